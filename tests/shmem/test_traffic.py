"""The runtime's counters equal those of a replay of the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.plan import Plan
from oper.rows.traffic import KIND, KINDS, Traffic
from oper.search.replay.simulate import Bags, RankBatch, Replay
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    dlrm_case,
    make_steps,
    open_tables,
    plans_for,
    rank_loss,
    rich_plan,
    run_ranks,
    with_tables,
)


def as_bags(case: Case, batch: Batch, trains_weights: bool = False) -> RankBatch:
    lengths = batch.lengths.reshape(len(case.keys), batch.size).numpy().astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    ids = batch.ids.numpy().astype(np.int64)
    return {key: Bags(ids[ends[k]:ends[k + 1]], lengths[k], case.weighted, trains_weights)
            for k, key in enumerate(case.keys)}


def executed(case: Case, plan: Plan, steps: list[list[Batch]], optimizer: Any, group: Any,
             read: Callable[[ShardedTables], Any] = ShardedTables.traffic,
             prepare: Callable[[ShardedTables], None] = lambda tables: None,
             trains_weights: bool = False) -> Any:
    """Train `steps` on one rank after ``prepare(tables)``; returns ``read(tables)``, by default the
    counters."""
    tables = open_tables(case, plan, group, optimizer)
    prepare(tables)
    tables.sent_bytes(reset=True)
    for batches in steps:
        batch = batches[group.rank]
        if trains_weights:
            batch.weights = batch.weights.detach().requires_grad_()
        rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
    found = read(tables)
    tables.barrier()
    tables.close()
    return found


def assert_equal(case: Case, plan: Plan, steps: list[list[Batch]], found: list[Traffic],
                 trains_weights: bool = False, **options: Any) -> None:
    """Check that the counters equal those of a replay with these `options`."""
    replay = Replay(with_tables(plan, case.tables), **options)
    total = replay.empty()
    for batches in steps:
        step = replay.step([as_bags(case, b, trains_weights) for b in batches])
        total = [a.plus(b) for a, b in zip(total, step, strict=True)]
    for mine, theirs in zip(total, found, strict=True):
        assert mine.tables == theirs.tables and mine.columns == theirs.columns
        assert mine.rank == theirs.rank and mine.num_backward == theirs.num_backward
        for k, kind in enumerate(KINDS):
            assert np.array_equal(mine.counts[k], theirs.counts[k]), f"{kind}, rank {mine.rank}"
        assert np.array_equal(mine.num_bytes, theirs.num_bytes)


def all_plans(case: Case, world_size: int) -> dict[str, Plan]:
    plans = plans_for(case.tables, world_size)
    for seed in (1, 2):
        plans[f"push{seed}"] = rich_plan(case.tables, world_size, seed, columns=False)
        plans[f"push, columns{seed}"] = rich_plan(case.tables, world_size, seed, columns=True)
    return plans


@pytest.mark.parametrize("world_size, optimizer", [
    (1, "sgd"), (2, "rowwise_adagrad"), (4, "sgd"), (4, "rowwise_adagrad")])
def test_replayed_traffic_is_the_executed_traffic(world_size: int, optimizer: str) -> None:
    case = dlrm_case(optimizer)
    steps = make_steps(case, world_size, 4)
    for plan in all_plans(case, world_size).values():
        found = run_ranks(world_size, lambda g, plan=plan: executed(
            case, plan, steps, OPTIMIZERS[optimizer], g))
        assert_equal(case, plan, steps, found)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, max_row_norm=0.01),
                                       RowWiseAdagrad(lr=0.05, max_row_norm=0.01)],
                         ids=["sgd", "rowwise_adagrad"])
def test_squares_of_clipped_rows_equal_the_replay(optimizer: Any) -> None:
    case = dlrm_case(optimizer.name)
    steps = make_steps(case, 2, 3)
    plan = rich_plan(case.tables, 2, 1, columns=True)
    found = run_ranks(2, lambda g: executed(case, plan, steps, optimizer, g))
    assert found[0].counts[KIND["squares"]].sum() > 0
    assert_equal(case, plan, steps, found, clipped=[t.name for t in case.tables])


def test_weights_and_their_gradients_are_counted() -> None:
    case = replace(dlrm_case(), weighted=True, id_dtype=torch.int32)
    steps = make_steps(case, 2, 3)
    plan = rich_plan(case.tables, 2, 3, columns=True)
    for trains_weights in (False, True):
        found = run_ranks(2, lambda g, trains=trains_weights: executed(
            case, plan, steps, OPTIMIZERS["rowwise_adagrad"], g, trains_weights=trains),
            num_threads=2)
        assert_equal(case, plan, steps, found, trains_weights)
        assert (found[0].counts[KIND["weight_rows"]].sum() > 0) == trains_weights


def test_reads_without_gradients_and_reset() -> None:
    """A lookup without gradients reads pushed tiers directly; a reset sets counters to zero."""
    case = dlrm_case("sgd")
    plan = rich_plan(case.tables, 2, 1, columns=False)
    (batches,) = make_steps(case, 2, 1)

    def body(group: Any) -> tuple[Traffic, Traffic]:
        tables = open_tables(case, plan, group, SGD(lr=0.1))
        with torch.no_grad():
            tables.lookup(batches[group.rank].lookup(case))
        found = tables.traffic(reset=True)
        return found, tables.traffic()

    own = with_tables(plan, case.tables)
    expected = Replay(own, training=False).step([as_bags(case, b) for b in batches])
    for (found, after), mine in zip(run_ranks(2, body), expected, strict=True):
        assert np.array_equal(found.counts, mine.counts) and found.num_forward == 1
        assert not after.counts.any() and after.num_forward == 0
