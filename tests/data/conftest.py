"""Random rows in the layout of Criteo Kaggle."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oper.data import SyntheticLog, write_synthetic_log
from tests.support import real_data

Fields = list[list[str]]


def _invent(num_rows: int, seed: int = 0, vocabulary: int = 40) -> Fields:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        dense = ["" if rng.random() < 0.2 else str(rng.integers(-3, 2000)) for _ in range(13)]
        ids = np.minimum(rng.integers(0, vocabulary, 26), rng.integers(0, vocabulary, 26))
        sparse = ["" if rng.random() < 0.1 else f"{(int(i) * 2654435761 + c * 40503) % 2**32:08x}"
                  for c, i in enumerate(ids)]
        rows.append([str(rng.integers(0, 2)), *dense, *sparse])
    return rows


@pytest.fixture
def invent() -> Callable[..., Fields]:
    """Return a function that makes random rows of 40 text fields, many of them empty."""
    return _invent


@pytest.fixture
def write() -> Callable[[Path, Fields], Path]:
    """Return a function that writes rows as TAB-separated lines."""

    def write_rows(path: Path, rows: Fields) -> Path:
        path.write_text("".join("\t".join(row) + "\n" for row in rows))
        return path

    return write_rows


@pytest.fixture
def real_log() -> Path:
    """Return the first 10,000 rows of the real log, or skip the test if it is not available."""
    return real_data("criteo_kaggle_10k/train.txt")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_synthetic_log(tmp_path / "log.txt", SyntheticLog(
        1500, cardinalities=(50,) * 20 + (3000,) * 6))
