"""Logs in the layout of Criteo Kaggle."""

from pathlib import Path

import pytest

from oper.data import SyntheticLog, write_synthetic_log
from tests.support import real_data


@pytest.fixture
def real_log() -> Path:
    """Return the first 10,000 rows of the real log, or skip the test if it is not available."""
    return real_data("criteo_kaggle_10k/train.txt")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_synthetic_log(tmp_path / "log.txt", SyntheticLog(
        1500, cardinalities=(50,) * 20 + (3000,) * 6))
