"""Runs that go on: after kills, under torchrun, on another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import Prepared  # type: ignore[import-not-found]

from oper.errors import InvalidInputError
from oper.train.loop import train
from oper.train.model import load_state
from tests.faults.pauses import Pauses
from tests.faults.soak import soak
from tests.support import ROOT
from tests.train.test_train import config, finish, lines, start_ranks, words

FLAGS = {"max_steps": 30, "checkpoint_every": 4, "batch_size": 64, "epochs": 50, "log_every": 1}


@pytest.fixture(scope="module")
def calm(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two ranks; its last checkpoint is of step 28."""
    out: Path = tmp_path_factory.mktemp("runs") / "calm"
    ranks = start_ranks(words(prepared, out, stats=prepared.stats, **FLAGS), 2)
    texts = finish(ranks)
    assert [p.returncode for p in ranks] == [0, 0], texts
    return out


def test_killed_runs_end_with_the_same_weights(tmp_path: Path) -> None:
    result = soak(faults=2, steps=40, seed=3, folder=tmp_path, pauses=Pauses())
    assert result.problems == [] or result.faults < 2  # a fast machine may have ended before
    assert result.same


def test_torchrun_starts_again_from_the_last_checkpoint(prepared: Prepared, calm: Path,
                                                        tmp_path: Path) -> None:
    """One of two ranks is killed; the restarted run ends with the weights of a calm one."""
    out = tmp_path / "killed"
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--max-restarts", "2", "--monitor-interval", "0.1", "-m", "oper",
         *words(prepared, out, stats=prepared.stats, **FLAGS)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        _kill_a_rank(run.pid, out, after_step=8)
        text, _ = run.communicate(timeout=180)
    finally:
        run.kill()
    assert run.returncode == 0, text
    assert [e["step"] for e in lines(out) if e["event"] == "train"] == list(range(1, 31))
    states = load_state(out / "state.pt")
    for key, value in load_state(calm / "state.pt").items():
        assert torch.equal(states[key], value), key


def _kill_a_rank(launcher: int, out: Path, after_step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and len(lines(out)) > after_step:
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError("the run never came so far")


def test_another_number_of_ranks_goes_on(prepared: Prepared, calm: Path, tmp_path: Path) -> None:
    """Two ranks' checkpoint on one: the same samples in every step, numbers up to rounding."""
    out = tmp_path / "one"
    shutil.copytree(calm, out)
    flags = {**FLAGS, "stats": prepared.stats}
    with pytest.raises(InvalidInputError, match="batch_size"):
        train(config(prepared, out, **flags), show_progress=False, resume=True)
    assert len(lines(out)) == 31, "a refused run changes nothing"
    train(config(prepared, out, **{**flags, "batch_size": 128}), show_progress=False, resume=True)
    assert [e["step"] for e in lines(out) if e["event"] == "train"] == list(range(1, 31))
    mine = load_state(out / "state.pt")
    for key, value in load_state(calm / "state.pt").items():
        assert torch.allclose(mine[key], value, rtol=1e-4, atol=1e-6), key


def test_a_new_run_forgets_the_checkpoint_of_the_old_one(prepared: Prepared, calm: Path,
                                                         tmp_path: Path) -> None:
    """Else a crash before its first checkpoint would make it go on from another run."""
    out = tmp_path / "new"
    shutil.copytree(calm, out)
    flags = {**FLAGS, "stats": prepared.stats, "max_steps": 2}
    train(config(prepared, out, **flags), show_progress=False)
    assert not (out / "checkpoint").exists() and len(lines(out)) == 3
