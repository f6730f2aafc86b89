"""Small runs of the recommenders' training and simulator benchmarks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.bench.tables.model_case import ModelCase, _Tables, _with_gradients
from oper.train.engines import Engine, dense_optimizer, is_table
from oper.train.reference import SparseTableOptimizer
from oper.train.tasks import RecommenderTask
from tests.bench.helpers import bench
from tests.support import run_here


@pytest.mark.parametrize(("model", "kinds"), [
    # It has pooled tables, which TorchRec does not shard row-wise on CPU.
    ("cadvae", {"table_wise", "column_wise"}), ("hstu", {"table_wise", "row_wise", "column_wise"})])
def test_training_steps_of_a_recommender(model: str, kinds: set[str], tmp_path: Path) -> None:
    (case,), printed = bench(tmp_path, "train", "--model", model, "--quick")
    assert case["verified"] and max(case["max_relative_diff"].values()) <= 1e-4
    assert set(case["plans"]) == {"oper", "planner"} | kinds
    for phase in ("embedding", "step"):
        best = min(case["plans"][p][phase]["median_ms"] for p in case["plans"] if p != "oper")
        assert case[f"torchrec_{phase}_ms"] == best
    assert "torchrec" in printed


def test_users_of_hstu_have_as_many_items_as_those_of_movielens() -> None:
    task = RecommenderTask(ModelCase("small", "hstu", 500, 4, num_batches=8).config())
    lengths = np.concatenate([b.lengths.numpy() for b, _ in itertools.islice(task.epoch(1), 8)])
    # 200 that are seen, and the one behind them that is predicted.
    assert lengths.max() == 201 and len(set(lengths)) > 8 and lengths.min() < 60


def test_tables_alone_are_given_batches_that_nobody_has_looked_at() -> None:
    """Results that a KJT caches on first use must not speed up later calls. All tables are updated,
    also those whose optimizers run after the backward pass."""
    task = RecommenderTask(ModelCase("small", "cdt4rec", 500, 4, num_batches=2).config())
    model = task.build()
    tables = SparseTableOptimizer(model, "rowwise_adagrad", 0.5, 1e-8)
    dense = dense_optimizer(task.config.optimizer, model)
    batches = [b for b, _ in itertools.islice(task.epoch(1), 2)]
    alone = _Tables(Engine(model, model, [tables, dense]),
                    [_with_gradients(model, model.lookups(b)) for b in batches])
    seen = []
    for number in range(4):
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        alone.prepare(number)
        assert all(kjt._length_per_key is None and kjt._jt_dict is None for kjt in alone._kjts)
        alone.step(number)
        seen += alone._kjts
        changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
        assert changed == {name for name in before if is_table(name)}
    assert len(set(map(id, seen))) == len(seen)


def test_the_simulator(tmp_path: Path) -> None:
    command = ["simulator", "--quick", "--seeds", "1", "--runs", str(tmp_path / "runs")]
    (case, retention), printed = bench(tmp_path, *command)
    # What is kept is taken as it is, whatever it says.
    (kept,) = (tmp_path / "runs").iterdir()
    with np.load(kept) as stored:
        arrays = {name: stored[name] for name in stored.files}
    np.savez(kept, **arrays | {"iql": arrays["iql"] + 1})
    (again,), _ = bench(tmp_path, *command, "--only", "retention")
    mean = again["policies"]["iql"]["return"].pop("mean")
    assert mean == pytest.approx(retention["policies"]["iql"]["return"]["mean"] + 1)
    assert again["policies"]["cql"] == retention["policies"]["cql"]
    assert again["asked"] == retention["asked"]
    rates = {name: found["step"]["mean"] for name, found in case["policies"].items()}
    assert rates["random"] < rates["behaviour"] < rates["oracle"] and case["verified"]
    assert {"cdt4rec", "decision transformer", "behaviour cloning", "cql", "iql",
            "td3+bc", "dqn"} < set(retention["policies"]) and retention["verified"]
    clicks = {name: found["return"]["mean"] for name, found in retention["policies"].items()}
    assert clicks["random"] < clicks["behaviour"] < clicks["oracle of clicks and return"]
    for name, found in retention["policies"].items():
        less = clicks["cdt4rec"] - clicks[name]
        assert found["cdt4rec_less"]["mean"] == pytest.approx(less, abs=1e-5)
    asked = retention["asked"]
    for suffix in ("", "_calibrated"):
        (order,) = asked["spearman" + suffix]
        assert -1 <= order <= 1 and len(asked["relative_error" + suffix]) == 7
    low, high = asked["reach"][0]
    assert low <= high and len(asked["calibrated"][0]) == 7
    controlled = clicks["cdt4rec, estimated returns"]
    assert asked["served"][0][5] == pytest.approx(controlled, abs=1e-3)
    assert "no statement on a real shop" in printed
    assert run_here("bench", "simulator", "--weights", str(tmp_path)).returncode == 1
