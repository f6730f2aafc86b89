"""Statistics in a file, and commands in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.search.search_cases import tables_and_stats
from tests.support import run_command


@pytest.fixture
def stats_file(tmp_path: Path) -> Path:
    """The statistics of ``tables_and_stats(5, 2)``."""
    path = tmp_path / "stats.npz"
    tables_and_stats(5, 2)[1].save(path)
    return path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, checks its result and returns what it prints."""
    def call(*words: object, status: int = 0) -> str:
        capsys.readouterr()
        assert run_command(*words) == status
        return capsys.readouterr().out

    return call
