"""Training end to end, alone and in two processes, of DLRM and of every recommender."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper.cli import main
from oper.data import Folder, load_recipe
from oper.errors import FileFormatError, InvalidInputError
from oper.plan import uniform_plan
from oper.rl_rec.data.catalogue import Catalogue, synthetic_interactions
from oper.rl_rec.registry import WORKLOADS
from oper.shmem.settings import deadline_s
from oper.stats import AccessStats
from oper.support.processes import free_port
from oper.train import loop
from oper.train.config import TrainConfig, load_config
from oper.train.engines import unsharded
from oper.train.loop import train
from oper.train.model import build_dlrm, load_state
from oper.train.resume import Checkpoints
from oper.train.tasks import ClickTask, RecommenderTask, click_batches, evaluate_clicks
from tests.data.loader_support import made
from tests.forked import Forked
from tests.support import ROOT, run_here, wait_for
from tests.train.conftest import Prepared

FLAGS = {"batch_size": 256, "model.dim": 8, "model.dense_layers": [16], "model.over_layers": [16],
         "epochs": 2, "log_every": 5}


def config(prepared: Prepared, out: Path, **flags: Any) -> TrainConfig:
    oper_only = {"stats": prepared.stats} if flags.get("sharding", "oper") == "oper" else {}
    return load_config(None, FLAGS | {"data": prepared.folder, "out": str(out)} | oper_only | flags)


def train_on(prepared: Prepared, out: Path, resume: bool = False, **flags: Any) -> dict[str, Any]:
    return train(config(prepared, out, **flags), show_progress=False, resume=resume)


def test_statistics_of_another_numbering_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    """Their hottest rows would stand for other values."""
    stats = AccessStats.load(prepared.stats)
    for numbering in ("another", ""):
        replace(stats, numbering=numbering).save(tmp_path / "stats")
        flags = {"stats": str(tmp_path / "stats"), "max_steps": 1}
        if numbering:
            with pytest.raises(InvalidInputError, match="numbering of their rows='another'"):
                train_on(prepared, tmp_path / "run", **flags)
        else:
            train_on(prepared, tmp_path / "run", **flags)


def words(prepared: Prepared, out: Path, **flags: Any) -> list[str]:
    return set_to(FLAGS | {"data": prepared.folder, "out": str(out)} | flags)


def set_to(flags: dict[str, Any]) -> list[str]:
    return ["train", *(w for k, v in flags.items() for w in ("--set", f"{k}={v}"))]


def start_ranks(arguments: list[str], world_size: int, labels: str = ""
                ) -> list[subprocess.Popen[str]]:
    """Start one process per rank, as torchrun would; `labels` as in `World`."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [Forked(
        [sys.executable, "-m", "oper", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, **shared, "RANK": str(rank),
                                     "OPER_DOMAIN": labels[rank:rank + 1]})
        for rank in range(world_size)]


def finish(ranks: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[tuple[str, str]]:
    try:
        return [p.communicate(timeout=timeout_s) for p in ranks]
    finally:
        for p in ranks:
            p.kill()


def run_ranks(arguments: list[str], world_size: int = 2, labels: str = ""
              ) -> list[tuple[str, str]]:
    """Run all ranks, which must succeed, and return their outputs."""
    ranks = start_ranks(arguments, world_size, labels)
    texts = finish(ranks)
    assert [p.returncode for p in ranks] == [0] * world_size, texts
    return texts


def validate_unsharded(trained: TrainConfig) -> dict[str, Any]:
    """Load a saved state into the unsharded model and validate the model."""
    folder = Folder.open(trained.data)
    model = build_dlrm(folder.tables(trained.model.dim), len(folder.dense), trained.model, seed=99)
    model.load_state_dict(load_state(Path(trained.out) / "state.pt"), strict=True)
    return evaluate_clicks(unsharded(model, trained.optimizer), click_batches(trained, "valid"))


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_oper_and_unsharded_agree_and_learn(prepared: Prepared, tmp_path: Path) -> None:
    results = {}
    for sharding in ("oper", "none"):
        run = config(prepared, tmp_path / sharding, sharding=sharding, eval_every=20)
        results[sharding] = train(run, show_progress=False)
        again = validate_unsharded(run)
        for key in ("auc", "log_loss", "samples"):
            assert again[key] == pytest.approx(results[sharding][key], rel=1e-6)
    ours, reference = results["oper"], results["none"]
    assert ours["auc"] > 0.6
    assert ours["auc"] == pytest.approx(reference["auc"], abs=1e-3)
    assert ours["steps"] == reference["steps"] == 2 * (6857 // 256)
    events = lines(tmp_path / "oper")
    assert [e["event"] for e in events].count("valid") == 2
    assert events[-1]["event"] == "end" and events[-1]["auc"] == ours["auc"]
    losses = [e["loss"] for e in events if e["event"] == "train"]
    assert losses[-1] < losses[0]
    echo = json.loads((tmp_path / "oper" / "config.json").read_text())
    assert echo["config"]["model"]["dim"] == 8 and "torch" in echo["versions"]
    assert len(echo["model"]["tables"]) == 26 and echo["model"]["num_dense"] == 13
    state = load_state(tmp_path / "oper" / "state.pt")
    for name, value in load_state(tmp_path / "none" / "state.pt").items():
        assert torch.allclose(state[name], value, atol=1e-2 * float(value.abs().max())), name


def test_validation_between_hosts_with_a_rank_without_samples(prepared: Prepared, tmp_path: Path
                                                              ) -> None:
    split = Folder.open(prepared.folder).rows["valid"]
    size, left = divmod(split, 3)
    assert left > 0  # a second global batch with fewer samples than ranks
    plan = uniform_plan(Folder.open(prepared.folder).tables(8, optimizer="rowwise_adagrad"), 3,
                        "striped")
    plan.save(tmp_path / "plan.json")
    flags = {"batch_size": size, "max_steps": 2, "plan": tmp_path / "plan.json"}
    run_ranks(words(prepared, tmp_path / "run", **flags), 3, "abc")
    assert lines(tmp_path / "run")[-1]["samples"] == split


def test_metrics_lines_cover_all_steps_and_no_other_work(prepared: Prepared, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and phases include the steps before a validation or checkpoint; time excludes both."""
    flags: dict[str, Any] = {"max_steps": 6, "batch_size": 64}
    train_on(prepared, tmp_path / "all", **flags, log_every=1)
    pause, save, evaluate = 0.15, Checkpoints.after, ClickTask.evaluate

    def slowly(function: Any, *arguments: Any) -> Any:
        time.sleep(pause)
        return function(*arguments)

    monkeypatch.setattr(Checkpoints, "after", lambda *x: slowly(save, *x))
    monkeypatch.setattr(ClickTask, "evaluate", lambda *x: slowly(evaluate, *x))
    began = time.perf_counter()
    train_on(prepared, tmp_path / "some", **flags, log_every=3, checkpoint_every=2, eval_every=2)
    seconds = time.perf_counter() - began
    some = [e for e in lines(tmp_path / "some") if e["event"] == "train"]
    each = [e["loss"] for e in lines(tmp_path / "all") if e["event"] == "train"]
    assert [e["loss"] for e in some] == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3])
    assert all(e["phases"]["forward"]["count"] == 3 for e in some)
    assert sum(3 * 64 / e["samples_per_s"] for e in some) <= seconds - 9 * pause


def test_a_diverged_run_writes_valid_json(prepared: Prepared, tmp_path: Path) -> None:
    result = train_on(prepared, tmp_path / "run", sharding="none", max_steps=3, log_every=1, **{
        "optimizer.dense": "sgd", "optimizer.dense_lr": 1e18, "optimizer.tables_lr": 1e18})
    assert math.isnan(result["auc"])
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_undefined_metrics_are_printed_as_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loop, "train", lambda *_, **__: {
        "steps": 3, "interrupted": False, "auc": math.nan, "log_loss": math.inf, "samples": 2})
    assert main(["train", "--data", "d", "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "steps": 3, "interrupted": False, "auc": None, "log_loss": None, "samples": 2}


@pytest.mark.parametrize(("sharding", "cross_layers"), [("oper", 0), ("oper", 2), ("torchrec", 0)])
def test_two_processes(prepared: Prepared, tmp_path: Path, sharding: str, cross_layers: int
                       ) -> None:
    """Same samples per step as in one process; the unsharded model can load the state."""
    extra = {"stats": prepared.stats} if sharding == "oper" else {}
    layers = {"model.cross_layers": cross_layers, "model.cross_rank": 4}
    two = {"batch_size": 128, "sharding": sharding} | layers | extra
    (out, err), _ = run_ranks([*words(prepared, tmp_path / "two", **two), "--json"])
    result = json.loads(out)
    assert "training" in err and "100%" in err
    again = validate_unsharded(config(prepared, tmp_path / "two", **two))
    assert again["auc"] == pytest.approx(result["auc"], rel=1e-6)
    assert again["samples"] == result["samples"]
    one = train_on(prepared, tmp_path / "one", sharding="none", **layers)
    assert result["auc"] == pytest.approx(one["auc"], abs=1e-3)
    crossed = [name for name in load_state(tmp_path / "two" / "state.pt") if "V_kernels" in name]
    assert len(crossed) == cross_layers


def test_interrupt_keeps_the_state(prepared: Prepared, tmp_path: Path) -> None:
    ranks = start_ranks(words(prepared, tmp_path, stats=prepared.stats, epochs=10_000), 2)
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and lines(tmp_path))
    for p in ranks:  # as a terminal does
        p.send_signal(signal.SIGINT)
    texts = finish(ranks)
    assert [p.returncode for p in ranks] == [130, 130], texts
    assert "interrupted" in texts[0][0] and "saving the state" in texts[0][1]
    assert lines(tmp_path)[-1]["interrupted"] is True
    assert validate_unsharded(config(prepared, tmp_path))["auc"] > 0.5


def test_a_dead_peer_is_one_message(prepared: Prepared, tmp_path: Path) -> None:
    ranks = start_ranks(words(prepared, tmp_path, stats=prepared.stats, epochs=10_000), 2)
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and lines(tmp_path))
    ranks[1].kill()
    began = time.monotonic()
    (_, err), _ = finish(ranks)
    assert time.monotonic() - began < deadline_s() / 10, "it was waited for"
    assert ranks[0].returncode == 1
    assert "Traceback" not in err and err.count("oper: ") == 1, err
    assert "rank=1" in err.splitlines()[-1]


def test_unsuitable_data_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="batch_size"):
        train_on(prepared, tmp_path / "a", batch_size=100_000)
    with pytest.raises(FileFormatError, match="preprocess"):
        train_on(prepared, tmp_path / "b", data=str(tmp_path))
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    damaged = tmp_path / "state.pt"
    damaged.write_bytes(b"no state")
    with pytest.raises(FileFormatError, match=r"state\.pt"):
        load_state(damaged)
    torch.save({"weight": [1, 2]}, damaged)
    with pytest.raises(FileFormatError, match="tensors by name"):
        load_state(damaged)
    assert run_here("train", "--data", prepared.folder, "--set", "x=3").stderr.count("\n") == 1
    into_file = run_here("train", "--data", prepared.folder, "--out", damaged)
    assert into_file.returncode == 1 and "expected a folder" in into_file.stderr
    assert into_file.stderr.count("\n") == 1


# ---- recommenders --------------------------------------------------------------------------------

SMALL = {"catalogue.num_items": 300, "catalogue.num_users": 200, "catalogue.length": 12,
         "batch_size": 32, "epochs": 1, "log_every": 2, "optimizer.dense": "adam",
         "optimizer.dense_lr": 0.003, "optimizer.tables_lr": 0.1}
SEQUENCES = {"model.dim": 16, "model.steps": 6, "model.window": 4, "model.negatives": 32}


def config_of(name: str, out: Path, **flags: Any) -> TrainConfig:
    sizes = SEQUENCES if hasattr(WORKLOADS[name].config(), "steps") else {}
    return load_config(None, {**SMALL, **sizes, "model.name": name, "out": str(out), **flags})


@pytest.mark.parametrize("name", WORKLOADS)
def test_sharded_equals_unsharded(name: str, tmp_path: Path) -> None:
    results = {}
    # A rounding error may change DQN's best next action, so its discount is 0 here; that of sqn
    # is not.
    flags = {"model.gamma": 0.0} if name == "dqn" else {}
    for sharding in ("oper", "none"):
        run = config_of(name, tmp_path / sharding, sharding=sharding, **flags)
        results[sharding] = train(run, show_progress=False)
    ours, plain = results["oper"], results["none"]
    assert ours["users"] == 200 and ours["steps"] == plain["steps"]
    assert ours["steps"] == (len(RecommenderTask(run).batches) // 32 if name != "popularity" else 0)
    for key in ("ndcg@10", "recall@20"):
        assert ours[key] == pytest.approx(plain[key], abs=0.02)
    state = load_state(tmp_path / "oper" / "state.pt")
    for key, value in load_state(tmp_path / "none" / "state.pt").items():
        assert torch.allclose(state[key], value, atol=2e-2 * max(1e-3, float(value.abs().max())))
    echo = json.loads((tmp_path / "oper" / "config.json").read_text())
    assert echo["config"]["model"]["name"] == name


@pytest.mark.parametrize("sharding", ["oper", "torchrec"])
def test_a_recommender_in_two_processes(sharding: str, tmp_path: Path) -> None:
    flags = {**SMALL, **SEQUENCES, "model.name": "cdt4rec", "out": str(tmp_path), "batch_size": 16,
             "sharding": sharding, "tables_on": "meta" if sharding == "oper" else "cpu"}
    (out, _), _ = run_ranks([*set_to(flags), "--json"])
    result = json.loads(out)
    assert result["users"] == 200 and 0 < result["ndcg@10"] < 1
    shape = load_state(tmp_path / "state.pt")["items.embeddings.item.weight"].shape
    assert shape == (301, 16)


def ratings(folder: Path) -> dict[str, Any]:
    """Preprocess a small log of ratings; returns the settings of SASRec on it."""
    rows = [(u, 100 + (u * 7 + 3 * k) % 40, 9 if k % 3 else 4, 1_400_000_000 + 50 * k + u)
            for u in range(1, 60) for k in range(12)]
    made(folder, "".join(f"{u}::{i:07}::{r}::{t}\n" for u, i, r, t in rows),
         load_recipe("movietweetings"), "data", min_count=1, valid="0", test="0")
    flags = {k: v for k, v in SMALL.items() if not k.startswith("catalogue")} | SEQUENCES
    return {**flags, "data": str(folder / "data"), "model.name": "sasrec",
            "interactions.k_core": 2}


def test_a_preprocessed_log(tmp_path: Path) -> None:
    run = load_config(None, {**ratings(tmp_path), "out": str(tmp_path / "run"), "epochs": 3,
                             "eval_every": 2, "eval_users": 20})
    result = train(run, show_progress=False)
    assert result["users"] == 20 and not result["interrupted"]
    assert {"train", "valid", "end"} == {e["event"] for e in lines(tmp_path / "run")}


def test_contradictory_configurations_are_refused(tmp_path: Path) -> None:
    for flags, pattern in (
            ({"model.name": "bert4rec"}, "model.name"), ({"model.nothing": 1}, "model.nothing"),
            ({"model.heads": 3}, "model.heads=3"), ({"data": "somewhere"}, "catalogue"),
            ({"interactions.protocol": "x"}, "protocol"), ({"catalogue.length": 2}, "length")):
        with pytest.raises(InvalidInputError, match=pattern):
            load_config(None, {**SMALL, "model.name": "cdt4rec", "out": str(tmp_path), **flags})
    with pytest.raises(InvalidInputError, match="DLRM"):
        load_config(None, {"catalogue.num_items": 5})
    # Settings that would have no effect.
    kept = {k: v for k, v in SMALL.items() if not k.startswith("catalogue")} | {"data": "d"}
    ranked = {**kept, "model.name": "sasrec"}
    load_config(None, {**ranked, "eval_users": 5, "interactions.k_core": 2, "start": "s"})
    for flags, pattern in (
            ({**ranked, "shuffle": False}, "shuffle"),
            ({**ranked, "start": "s", "remap": "r"}, "remap='r', expected '' with a recommender"),
            ({**kept, "eval_users": 5}, "eval_users=5"),
            ({**ranked, "catalogue.length": 30}, "other keys of .catalogue"),
            ({**kept, "interactions.k_core": 2}, "interactions"),
            ({**SMALL, "model.name": "sasrec", "interactions.k_core": 2}, "a catalogue")):
        with pytest.raises(InvalidInputError, match=pattern):
            load_config(None, flags)
    with pytest.raises(InvalidInputError, match="batch_size"):
        train(config_of("cdt4rec", tmp_path, batch_size=10_000))


@pytest.mark.parametrize(("name", "model", "dim"), [
    ("cdt4rec", "cdt4rec", 64), ("cdt4rec-10m", "cdt4rec", 64), ("cadvae", "cadvae", 40)])
def test_the_examples_are_configurations(name: str, model: str, dim: int) -> None:
    flags = {} if name.endswith("-10m") else {"data": "d"}
    shown = load_config(ROOT / "examples" / f"{name}.toml", flags)
    assert shown.model_name == model and shown.model.dim == dim


def test_a_catalogue_has_the_stated_items() -> None:
    data = synthetic_interactions(Catalogue(num_items=1000, num_users=500, length=20, again=0.0))
    assert data.items.max() <= 1000 and data.items.min() == 1 and data.num_items == 1001
    counts = data.popularity()
    assert counts[1] > counts[50] > counts[800]
    assert (data.items[data.valid.stop] == data.valid.targets).all()
    assert (data.items[data.test.stop] == data.test.targets).all()
    assert (data.train_stop[1:] == data.valid.stop).all()


def test_users_of_a_catalogue_differ_by_its_spread() -> None:
    data = synthetic_interactions(Catalogue(num_items=1000, num_users=4000, length=60, spread=0.8,
                                            again=1.0))
    lengths = np.diff(data.offsets)[1:]
    assert lengths.min() >= 3 and lengths.mean() == pytest.approx(60, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.05)
    assert (data.users == np.repeat(np.arange(1, 4001), lengths)).all()
    assert (data.items[data.test.stop] == data.test.targets).all()
    assert (data.test.stop == data.offsets[2:] - 1).all()
    assert (data.rewards[data.test.stop] == 1).all()
    # Consecutive items of a user are close; the last of one user and the first of the next are not.
    first = np.zeros(data.users.size, bool)
    first[data.offsets[1:-1]] = True
    step = np.diff(data.items)[~first[1:]]
    assert step.min() >= 0 and step.max() == 3 and np.abs(np.diff(data.items)[first[1:]]).max() > 3
    assert (data.times[first] == 0).all() and (np.diff(data.times)[~first[1:]] == 60).all()
