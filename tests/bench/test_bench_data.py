"""``oper bench data`` on a small log."""

from pathlib import Path

import pytest

pytest.importorskip("torchrec")
from oper.bench.core.launch import Task
from oper.bench.data import suite
from tests.bench.helpers import verified


def test_bags_of_sessions_are_trained_once_and_in_full(tmp_path: Path) -> None:
    case = Task("sessions", suite.measure, ("sessions", 1200, str(tmp_path)))
    entry, = verified(case, figures=suite.FIGURES)
    assert entry["duplication"] > 3 and entry["duplication_alone"] == pytest.approx(1)
    for name in ("", "_alone"):
        assert entry[f"ratio_step{name}"] == pytest.approx(
            entry[f"full_step_ms{name}"] / entry[f"once_step_ms{name}"], rel=1e-5)
    assert not list(tmp_path.iterdir())
