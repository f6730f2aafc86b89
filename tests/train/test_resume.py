"""Resuming runs: after kills, under torchrun, on another number of ranks."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from oper.cli import main
from oper.errors import FileFormatError, InvalidInputError
from oper.support.locks import LOCK
from oper.train import resume, tasks
from oper.train.config import load_config
from oper.train.engines import Engine
from oper.train.loop import train
from oper.train.model import load_state
from oper.train.tasks import ClickTask
from oper.train.trained import find_weights
from tests.faults.pauses import Pauses
from tests.faults.soak import make_run, soak
from tests.support import ROOT, run_here, wait_for
from tests.train.conftest import Prepared
from tests.train.test_train import (
    SEQUENCES,
    SMALL,
    config,
    finish,
    lines,
    ratings,
    run_ranks,
    start_ranks,
    train_on,
    words,
)

FLAGS = {"max_steps": 30, "checkpoint_every": 4, "batch_size": 64, "epochs": 50, "log_every": 1}


# The program `oper`; rank 1 kills itself once, between two checkpoints.
KILLED = """
import os, signal, sys
from oper.cli import main
from oper.train.engines import Engine
original, made = Engine.step, []
def step(self, batch):
    made.append(1)
    if (len(made), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (10, "1", "0"):
        open(__file__.replace("program.py", "killed.note"), "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch)
Engine.step = step
sys.exit(main(sys.argv[1:]))
"""


def assert_same_state(run: Path, other: Path) -> None:
    mine, theirs = (load_state(folder / "state.pt") for folder in (run, other))
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(mine[key], value), key


@pytest.fixture(scope="module")
def calm(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two ranks, whose last checkpoint is that of step 28."""
    out: Path = tmp_path_factory.mktemp("runs") / "calm"
    run_ranks(words(prepared, out, stats=prepared.stats, **FLAGS))
    return out


@pytest.mark.parametrize("model", [
    "dlrm", pytest.param("dynamic", marks=pytest.mark.slow), "cadvae"])
def test_killed_runs_end_with_the_same_weights(model: str, tmp_path: Path) -> None:
    result = soak(2, make_run(model, tmp_path) | {"max_steps": 60}, 3, tmp_path, Pauses())
    # A fast machine may have ended before.
    assert [p for p in result.problems if "needs more steps" not in p] == []
    assert result.same
    if model == "dynamic":  # the run has keys that wait, that expire and that are evicted
        keys = [x["keys"]["C26"] for x in lines(tmp_path / "calm") if x["event"] == "train"]
        assert all(sum(x[event] for x in keys) for event in ("admitted", "expired", "evicted"))


@pytest.mark.parametrize("model", ["cdt4rec", "cadvae"])
def test_a_recommender_continues(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                 ) -> None:
    """After a crash, dropout, candidates, schedules and multipliers equal those of an uninterrupted
    run."""
    flags = make_run(model, tmp_path) | {"max_steps": 43, "delta_every": 0}
    runs = {name: load_config(None, flags | {"out": str(tmp_path / name)})
            for name in ("calm", "crashed")}
    train(runs["calm"], show_progress=False)
    original = Engine.step

    def crash(self: Engine, batch: Any) -> Any:
        if len(made) == 36:
            raise RuntimeError("out of luck")
        made.append(1)
        return original(self, batch)

    made: list[int] = []
    monkeypatch.setattr(Engine, "step", crash)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(runs["crashed"], show_progress=False)
    monkeypatch.setattr(Engine, "step", original)
    torch.manual_seed(99)
    train(runs["crashed"], show_progress=False, resume=True)
    assert_same_state(tmp_path / "crashed", tmp_path / "calm")


def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are due every 4 steps; the interrupt ends the run at the next log line, 10."""
    flags = SMALL | SEQUENCES | {"model.name": "sasrec", "epochs": 50, "max_steps": 13,
                                 "checkpoint_every": 4, "log_every": 5}
    runs = {name: load_config(None, flags | {"out": str(tmp_path / name)})
            for name in ("calm", "stopped")}
    train(runs["calm"], show_progress=False)
    original, made = Engine.step, []

    def interrupt(self: Engine, batch: Any) -> Any:
        made.append(1)
        if len(made) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    monkeypatch.setattr(Engine, "step", interrupt)
    assert train(runs["stopped"], show_progress=False)["interrupted"] and len(made) == 10
    assert not train(runs["stopped"], show_progress=False, resume=True)["interrupted"]
    assert len(made) == 13
    assert_same_state(tmp_path / "stopped", tmp_path / "calm")
    steps = [x["step"] for x in lines(tmp_path / "stopped") if x["event"] == "train"]
    assert steps == [5, 10, 13]


def test_a_recommender_continues_only_with_its_numbers_of_items(tmp_path: Path) -> None:
    """Training counts number users and items, so other settings of the same size change them."""
    flags = ratings(tmp_path) | {"checkpoint_every": 2, "max_steps": 2, "epochs": 9}
    first = flags | {"out": str(tmp_path / "first")}
    train(load_config(None, first), show_progress=False)
    by_time = {"interactions.protocol": "time", "interactions.valid": 0.4}
    for more in ({"interactions.reward_offset": 0.5}, by_time):
        with pytest.raises(InvalidInputError, match=r"interactions in the checkpoint.*\[inter"):
            train(load_config(None, first | more), show_progress=False, resume=True)
    start = flags | {"start": str(tmp_path / "first"), "out": str(tmp_path / "second")}
    with pytest.raises(InvalidInputError, match="numbering of users and items"):
        train(load_config(None, start | by_time), show_progress=False)
    train(load_config(None, start | {"interactions.reward_offset": 0.5}), show_progress=False)
    assert train(load_config(None, first | {"max_steps": 4}), show_progress=False,
                 resume=True)["steps"] == 4


def test_a_model_without_tables_keeps_no_checkpoints(tmp_path: Path) -> None:
    run = load_config(None, {"model.name": "popularity", "catalogue.num_items": 30,
                             "out": str(tmp_path), "checkpoint_every": 5})
    with pytest.raises(InvalidInputError, match="without checkpoints"):
        train(run, show_progress=False)


def test_torchrun_starts_again_from_the_last_checkpoint(prepared: Prepared, calm: Path,
                                                        tmp_path: Path) -> None:
    """One of two ranks is killed; the final weights equal those of an uninterrupted run."""
    out, program = tmp_path / "killed", tmp_path / "program.py"
    program.write_text(KILLED)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--max-restarts", "2", "--monitor-interval", "0.1", str(program),
         *words(prepared, out, stats=prepared.stats, **FLAGS)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 0, run.stdout
    assert (tmp_path / "killed.note").exists(), run.stdout
    assert [e["step"] for e in lines(out) if e["event"] == "train"] == list(range(1, 31))
    assert_same_state(out, calm)


def test_another_number_of_ranks_continues(prepared: Prepared, calm: Path, tmp_path: Path) -> None:
    """One rank resumes a run of two: same samples per step, results equal up to rounding."""
    out = tmp_path / "one"
    shutil.copytree(calm, out)
    flags = {**FLAGS, "stats": prepared.stats}
    with pytest.raises(InvalidInputError, match="batch_size"):
        train_on(prepared, out, resume=True, **flags)
    assert len(lines(out)) == 31, "a refused run changes nothing"
    train_on(prepared, out, resume=True, **{**flags, "batch_size": 128})
    assert [e["step"] for e in lines(out) if e["event"] == "train"] == list(range(1, 31))
    mine = load_state(out / "state.pt")
    for key, value in load_state(calm / "state.pt").items():
        assert torch.allclose(mine[key], value, rtol=1e-4, atol=1e-6), key


def test_a_new_run_forgets_the_checkpoint_of_the_old_one(prepared: Prepared, calm: Path,
                                                         tmp_path: Path) -> None:
    """Otherwise a run that crashes before its first checkpoint would resume from the earlier run.
    """
    out = tmp_path / "new"
    shutil.copytree(calm, out)
    flags = {**FLAGS, "stats": prepared.stats, "max_steps": 2}
    train_on(prepared, out, **flags)
    assert not (out / "checkpoint").exists() and len(lines(out)) == 3


def test_a_new_run_removes_no_folders_of_others(prepared: Prepared, tmp_path: Path
                                                ) -> None:
    """A link to a checkpoint, and folders that are not checkpoints."""
    out, linked = tmp_path / "run", tmp_path / "large disk" / "c"
    place = out / "checkpoint"
    out.mkdir()
    run = config(prepared, out, batch_size=64, max_steps=2, checkpoint_every=1)
    for name in ("checkpoint", "checkpoint.previous", "checkpoint.saving"):
        (out / name).mkdir()
        (out / name / "mine.txt").touch()
        with pytest.raises(InvalidInputError, match=rf"{name}'.*move it"):
            train(run, show_progress=False)
        assert [p.name for p in out.rglob("*")] == [name, "mine.txt"]
        shutil.rmtree(out / name)
    linked.mkdir(parents=True)
    place.symlink_to(linked)
    train(run, show_progress=False)
    assert place.is_symlink() and (linked / ".metadata").exists()
    before = (linked / ".metadata").stat()
    with pytest.raises(InvalidInputError, match=r"large disk/c'.*remove it.*or the link"):
        train(run, show_progress=False)
    assert (linked / ".metadata").stat() == before
    assert train(replace(run, max_steps=3), show_progress=False, resume=True)["steps"] == 3


def test_a_checkpoint_alone_is_not_replaced_without_force(prepared: Prepared, calm: Path,
                                                          tmp_path: Path) -> None:
    shutil.copytree(calm / "checkpoint", tmp_path / "run" / "checkpoint")
    done = run_here(*words(prepared, tmp_path / "run", stats=prepared.stats, max_steps=2))
    assert done.returncode == 1 and "--resume" in done.stderr and "--force" in done.stderr
    assert (tmp_path / "run" / "checkpoint" / ".metadata").exists()


def test_a_resumed_run_has_the_learning_rates_of_its_own_configuration(prepared: Prepared,
                                                                       tmp_path: Path) -> None:
    """For tables and dense layers; with learning rates of 0, no weight changes."""
    flags: dict[str, Any] = {"checkpoint_every": 2, "batch_size": 64}
    for name in ("before", "after"):
        train_on(prepared, tmp_path / name, max_steps=2, **flags)
    out, none = tmp_path / "after", {"optimizer.tables_lr": 0.0, "optimizer.dense_lr": 0.0}
    result = train_on(prepared, out, resume=True, max_steps=4, **flags, **none)
    assert result["steps"] == 4
    assert_same_state(out, tmp_path / "before")
    for dense in ("adam", "sgd"):
        with pytest.raises(InvalidInputError, match=f"optimizer.dense='{dense}'"):
            train_on(prepared, out, resume=True, max_steps=6, **flags, **{"optimizer.dense": dense})


def test_a_resumed_run_continues_with_its_own_data_only(
        prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data with the same vocabulary have other samples in the remaining steps."""
    flags: dict[str, Any] = {"checkpoint_every": 1, "batch_size": 64}
    train_on(prepared, tmp_path / "run", max_steps=1, **flags)
    shutil.copytree(prepared.folder, tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    path.write_text(path.read_text().replace('"max_bad"', '"of another day"'))
    other = {**flags, "data": str(path.parent), "max_steps": 2}
    with pytest.raises(InvalidInputError, match=r"data in the checkpoint=.*start a run on other"):
        train_on(prepared, tmp_path / "run", resume=True, **other)
    assert train_on(prepared, tmp_path / "next", start=str(tmp_path / "run"), **other)["steps"] == 2
    monkeypatch.setattr(resume, "_draws", lambda _: "0 1")  # those of another release of NumPy
    with pytest.raises(InvalidInputError, match=r"drawn from the seed in the checkpoint.*NumPy"):
        train_on(prepared, tmp_path / "run", resume=True, max_steps=2, **flags)


@pytest.mark.parametrize("flag", ["", "--force"])
def test_a_restart_does_not_continue_an_earlier_run(
        flag: str, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun also restarts a run that was refused, or has failed before it replaced another."""
    out = tmp_path / "run"
    flags: dict[str, Any] = {"checkpoint_every": 1, "batch_size": 64, "stats": prepared.stats}
    train_on(prepared, out, max_steps=2, **flags)
    before, steps, original = (out / "metrics.jsonl").read_bytes(), list[int](), Engine.step

    def counted(self: Engine, batch: Any) -> Any:
        steps.append(self.num_steps)
        return original(self, batch)

    def unlucky(_: ClickTask) -> Engine:
        raise InvalidInputError("out of luck")

    def restart(count: int, max_steps: int) -> int:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        return main([*words(prepared, out, max_steps=max_steps, **flags), *filter(None, [flag])])

    monkeypatch.setattr(Engine, "step", counted)
    with monkeypatch.context() as patch:
        patch.setattr(ClickTask, "engine", unlucky)
        assert restart(0, 2) == 1
    codes = [restart(1, 2), restart(2, 3)]
    assert (codes, steps) == (([0, 0], [0, 1, 2]) if flag else ([1, 1], []))
    assert flag or (out / "metrics.jsonl").read_bytes() == before


def test_a_new_run_that_fails_leaves_no_weights_of_the_old_one(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a server would publish the old weights, whose rows may have another numbering."""
    out = tmp_path / "run"
    train_on(prepared, out, sharding="none", max_steps=1)
    assert find_weights(out).name == "state.pt"
    monkeypatch.setattr(Engine, "step", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train_on(prepared, out, sharding="none", max_steps=1)
    with pytest.raises(FileFormatError):
        find_weights(out)


def test_a_second_run_into_the_folder_is_refused_by_name(prepared: Prepared, tmp_path: Path
                                                         ) -> None:
    """A second run is refused while the first one is running, even with --force or --resume."""
    out = tmp_path / "run"
    again = words(prepared, out, stats=prepared.stats, **FLAGS | {"max_steps": 2})
    first, = start_ranks(words(prepared, out, stats=prepared.stats, epochs=10_000), 1)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and lines(out))
        config_before = (out / "config.json").read_bytes()
        for flag in ("--force", "--resume"):
            done = run_here(*again, flag)
            assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
            assert f"process {first.pid} on " in done.stderr and str(out) in done.stderr
        assert (out / "config.json").read_bytes() == config_before
        first.send_signal(signal.SIGINT)
        finish([first])
        steps = [e["step"] for e in lines(out) if e["event"] == "train"]
        assert steps == sorted(set(steps)) and lines(out)[-1]["event"] == "end"
        assert not (out / LOCK).exists()
        first, = start_ranks([*words(prepared, out, stats=prepared.stats, epochs=10_000),
                              "--force"], 1)
        wait_for(lambda: [e["event"] for e in lines(out)][-1:] == ["train"])
    finally:
        first.kill()
    finish([first])
    done = run_here(*again, "--force")
    assert done.returncode == 0, done.stderr
    assert lines(out)[-1]["event"] == "end"


def test_a_resumed_run_shows_the_speed_of_its_own_steps(
        prepared: Prepared, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar starts at the steps before the crash, which do not count towards the speed."""
    out = tmp_path / "again"
    shutil.copytree(calm, out)
    flags = {**FLAGS, "stats": prepared.stats, "batch_size": 128}
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            bars.append(self)

    monkeypatch.setattr(tasks, "tqdm", Bar)
    train(config(prepared, out, **flags), resume=True)
    bar = bars[0]
    assert (bar.initial, bar.n, bar.total) == (28, 30, 30)


def test_a_run_that_ends_before_a_validation_validates_when_it_resumes(
        prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"max_steps": 8, "checkpoint_every": 2, "eval_every": 4, "log_every": 3,
             "batch_size": 64}
    runs = [config(prepared, tmp_path / name, **flags) for name in ("calm", "crashed")]
    train(runs[0], show_progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(tasks.ClickTask, "evaluate", lambda *_: {}["crash"])
        with pytest.raises(KeyError, match="crash"):
            train(runs[1], show_progress=False)
    for _ in range(2):  # the second time, from the checkpoint of the last step
        train(runs[1], show_progress=False, resume=True)
        calm, crashed = (lines(tmp_path / name) for name in ("calm", "crashed"))
        assert [(x["event"], x.get("step"), x.get("auc")) for x in calm] == [
            (x["event"], x.get("step"), x.get("auc")) for x in crashed]
        assert [x.get("since") for x in crashed] == [None, None, 4, None, None]


def test_an_earlier_run_is_kept_and_the_error_names_the_remedies(prepared: Prepared, tmp_path: Path
                                                                 ) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")
    done = run_here(*words(prepared, out, stats=prepared.stats))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "--resume" in done.stderr and "--force" in done.stderr
    assert [p.name for p in out.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_ended_without_a_checkpoint_is_not_replaced_by_resuming(prepared: Prepared,
                                                                           tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_on(prepared, out, max_steps=2)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    done = run_here(*words(prepared, out, stats=prepared.stats), "--resume")
    assert done.returncode == 1 and "--force" in done.stderr
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.name in before} == before


def test_a_folder_made_for_a_run_that_cannot_begin_is_removed(tmp_path: Path) -> None:
    done = run_here("train", "--data", tmp_path, "--out", tmp_path / "runs" / "new")  # type: ignore[arg-type]
    assert done.returncode == 1
    assert not (tmp_path / "runs" / "new").exists()


def test_a_run_starts_from_another_one(prepared: Prepared, tmp_path: Path) -> None:
    train_on(prepared, tmp_path / "first", **FLAGS | {"max_steps": 8})
    # Without learning rates a step changes nothing, so the state is the loaded one.
    still = FLAGS | {"max_steps": 1, "start": str(tmp_path / "first"), "seed": 9,
                     "optimizer.tables_lr": 0.0, "optimizer.dense_lr": 0.0}
    train_on(prepared, tmp_path / "second", **still)
    assert_same_state(tmp_path / "second", tmp_path / "first")
    with pytest.raises(InvalidInputError, match="a folder other than out"):
        config(prepared, tmp_path / "first", **still)
