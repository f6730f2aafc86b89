"""Statistics in a file; short simulations of queues."""

from pathlib import Path

import pytest

from oper.search.explain import latency
from tests.search.search_cases import tables_and_stats


@pytest.fixture
def stats_file(tmp_path: Path) -> Path:
    """The statistics of ``tables_and_stats(5, 2)``."""
    path = tmp_path / "stats.npz"
    tables_and_stats(5, 2)[1].save(path)
    return path


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the simulated queues, of which a plan for a latency needs hundreds."""
    monkeypatch.setattr(latency, "_NUM_SAMPLES", 5_000)
