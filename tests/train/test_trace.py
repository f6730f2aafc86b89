"""`oper train --trace`, and the phases in a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oper.errors import InvalidInputError
from oper.shmem.counters.phases import PHASES
from oper.train.loop import train
from tests.support import read_trace
from tests.train.conftest import Prepared
from tests.train.test_train import config, lines, run_ranks, words


def steps_in(path: Path) -> dict[str, Any]:
    """Return the number of phase bars by step."""
    found: dict[int, int] = {}
    for event in read_trace(path)["traceEvents"]:
        if event.get("cat") == "phase":
            step = event["args"]["step"]
            found[step] = found.get(step, 0) + 1
    return found


def test_two_processes_in_one_file(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (out, _), _ = run_ranks([
        *words(prepared, tmp_path / "run", stats=prepared.stats, batch_size=128, max_steps=7),
        "--trace", str(path), "--trace-steps", "3-5", "--json"])
    assert json.loads(out)["trace"] == str(path)
    assert steps_in(path) == dict.fromkeys((3, 4, 5), 2 * len(PHASES))
    told = [line for line in lines(tmp_path / "run") if line["event"] == "train"]
    assert [line["step"] for line in told] == [5, 7]
    for line, steps in zip(told, (5, 2), strict=True):
        assert list(line["phases"]) == list(PHASES)
        for phase in line["phases"].values():
            assert phase["count"] == sum(phase["below_us"].values()) == 2 * steps
            most = sum(float(us) * n for us, n in phase["below_us"].items()) * 1e-6
            assert 0 < phase["sum_s"] < most


def test_steps_are_those_of_the_run(prepared: Prepared, tmp_path: Path) -> None:
    """Also after resuming; steps before the resumption are not traced."""
    run = {"max_steps": 4, "checkpoint_every": 2}
    train(config(prepared, tmp_path / "run", **run), show_progress=False)
    path = tmp_path / "trace.json"
    more = {"checkpoint_every": 2, "trace": str(path)}
    with pytest.warns(UserWarning, match="steps after 4, at which this run resumes"):
        result = train(config(prepared, tmp_path / "run", **more, max_steps=6, trace_steps="2-4"),
                       show_progress=False, resume=True)
    assert "trace" not in result and not path.exists()
    train(config(prepared, tmp_path / "run", **more, max_steps=8, trace_steps="3-7"),
          show_progress=False, resume=True)
    assert steps_in(path) == {7: len(PHASES)}


def test_steps_that_the_run_will_not_reach(prepared: Prepared, tmp_path: Path) -> None:
    """They are refused before training begins; a run that ends within them writes a partial trace.
    """
    out, path = tmp_path / "run", tmp_path / "trace.json"
    with pytest.raises(InvalidInputError, match="'11-20', expected steps of the run, 1-5"):
        train(config(prepared, out, max_steps=5, trace=str(path)), show_progress=False)
    assert not out.exists()
    with pytest.warns(UserWarning, match="steps 4 to 5 only"):
        result = train(config(prepared, out, max_steps=5, trace=str(path), trace_steps="4-9"),
                       show_progress=False)
    assert result["trace"] == str(path) and set(steps_in(path)) == {4, 5}


def test_an_unsharded_run_has_no_phases(prepared: Prepared, tmp_path: Path) -> None:
    train(config(prepared, tmp_path, sharding="none", max_steps=5), show_progress=False)
    assert all("phases" not in line for line in lines(tmp_path))


def test_a_trace_that_cannot_be_written_loses_no_run(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="the trace is not written"):
        result = train(config(prepared, tmp_path / "run", max_steps=5, trace_steps="1-2",
                              trace=str(tmp_path / "file" / "t.json")), show_progress=False)
    assert result["steps"] == 5 and "trace" not in result
    assert (tmp_path / "run" / "state.pt").exists()
