"""`oper train` of every recommender: alone, sharded, in two processes, without a real log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.errors import InvalidInputError
from oper.rl_rec.data.catalogue import Catalogue, synthetic_interactions
from oper.rl_rec.registry import WORKLOADS
from oper.train.config import TrainConfig, load_config
from oper.train.loop import train
from oper.train.model import load_state
from oper.train.tasks import RecommenderTask
from tests.support import ROOT
from tests.train.test_train import run_ranks

SMALL = {"catalogue.num_items": 300, "catalogue.num_users": 200, "catalogue.length": 12,
         "batch_size": 32, "epochs": 1, "log_every": 2, "optimizer.dense": "adam",
         "optimizer.dense_lr": 0.003, "optimizer.tables_lr": 0.1}
SEQUENCES = {"model.dim": 16, "model.steps": 6, "model.window": 4, "model.negatives": 32}


def config(name: str, out: Path, **flags: Any) -> TrainConfig:
    sizes = SEQUENCES if hasattr(WORKLOADS[name].config(), "steps") else {}
    return load_config(None, {**SMALL, **sizes, "model.name": name, "out": str(out), **flags})


@pytest.mark.parametrize("name", WORKLOADS)
def test_sharded_equals_unsharded(name: str, tmp_path: Path) -> None:
    results = {}
    # A rounding error may change DQN's best next action, so its discount is 0 here; that of sqn
    # is not.
    flags = {"model.gamma": 0.0} if name == "dqn" else {}
    for sharding in ("oper", "none"):
        run = config(name, tmp_path / sharding, sharding=sharding, **flags)
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
def test_two_processes(sharding: str, tmp_path: Path) -> None:
    flags = {**SMALL, **SEQUENCES, "model.name": "cdt4rec", "out": str(tmp_path), "batch_size": 16,
             "sharding": sharding, "tables_on": "meta" if sharding == "oper" else "cpu"}
    words = ["train", *(w for k, v in flags.items() for w in ("--set", f"{k}={v}")), "--json"]
    (out, _), _ = run_ranks(words)
    result = json.loads(out)
    assert result["users"] == 200 and 0 < result["ndcg@10"] < 1
    shape = load_state(tmp_path / "state.pt")["items.embeddings.item.weight"].shape
    assert shape == (301, 16)


def test_a_preprocessed_log(tmp_path: Path) -> None:
    rows = [(u, 100 + (u * 7 + 3 * k) % 40, 9 if k % 3 else 4, 1_400_000_000 + 50 * k + u)
            for u in range(1, 60) for k in range(12)]
    log = tmp_path / "ratings.dat"
    log.write_text("".join(f"{u}::{i:07}::{r}::{t}\n" for u, i, r, t in rows))
    preprocess(load_recipe("movietweetings"), [str(log)], tmp_path / "data",
               PreprocessOptions(min_count=1, valid="0", test="0"))
    flags = {k: v for k, v in SMALL.items() if not k.startswith("catalogue")} | SEQUENCES
    run = load_config(None, {**flags, "data": str(tmp_path / "data"), "model.name": "sasrec",
                             "out": str(tmp_path / "run"), "epochs": 3, "eval_every": 2,
                             "interactions.k_core": 2, "eval_users": 20})
    result = train(run, show_progress=False)
    assert result["users"] == 20 and not result["interrupted"]
    events = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"train", "valid", "end"} == {e["event"] for e in events}


def test_configurations_that_make_no_sense(tmp_path: Path) -> None:
    for flags, pattern in (
            ({"model.name": "bert4rec"}, "model.name"), ({"model.nothing": 1}, "model.nothing"),
            ({"model.heads": 3}, "model.heads=3"), ({"data": "somewhere"}, "catalogue"),
            ({"interactions.protocol": "x"}, "protocol"), ({"catalogue.length": 2}, "length")):
        with pytest.raises(InvalidInputError, match=pattern):
            load_config(None, {**SMALL, "model.name": "cdt4rec", "out": str(tmp_path), **flags})
    with pytest.raises(InvalidInputError, match="DLRM"):
        load_config(None, {"catalogue.num_items": 5})
    with pytest.raises(InvalidInputError, match="batch_size"):
        train(config("cdt4rec", tmp_path, batch_size=10_000))


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
