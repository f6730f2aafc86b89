"""Statistics in a file."""

from pathlib import Path

import pytest

from tests.search.search_cases import tables_and_stats


@pytest.fixture
def stats_file(tmp_path: Path) -> Path:
    """The statistics of ``tables_and_stats(5, 2)``."""
    path = tmp_path / "stats.npz"
    tables_and_stats(5, 2)[1].save(path)
    return path
