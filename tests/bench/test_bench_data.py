"""``oper bench data`` on a small log."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
from oper.bench.core.report import report
from oper.bench.data import suite


def test_bags_of_sessions_are_trained_once_and_in_full(tmp_path: Path) -> None:
    case = suite.Case("sessions", 1200, str(tmp_path))
    entry = {"name": case.name, **case.measure(lambda text: None)}
    assert entry["verified"]
    assert entry["duplication"] > 3 and entry["duplication_alone"] == pytest.approx(1)
    for name in ("", "_alone"):
        assert entry[f"ratio_step{name}"] == pytest.approx(
            entry[f"full_step_ms{name}"] / entry[f"once_step_ms{name}"])
    assert not list(tmp_path.iterdir())
    assert "sessions: verified yes" in report([{**entry, "other_busy_cores": 0.0}], suite.FIGURES)
    json.dumps(entry)
