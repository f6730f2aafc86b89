"""Gradients of per-sample weights against autograd of the unsharded lookup."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import SGD, Adam
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import (
    Batch,
    Case,
    assert_bitwise,
    assert_near,
    dlrm_case,
    initial_weights,
    make_batch,
    make_steps,
    mixed_plan,
    open_alone,
    open_tables,
    rank_loss,
    reference_forward,
    run_ranks,
)


def wanted(case: Case, batch: Batch) -> torch.Tensor:
    weights = batch.weights.detach().clone().requires_grad_()
    other = Batch(batch.lengths, batch.ids, weights, batch.target)
    out = reference_forward(case, initial_weights(case), other)
    rank_loss(out, batch.target).backward()
    return weights.grad


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_autograd(world_size: int, ids: torch.dtype) -> None:
    """Sum and mean, bags of all lengths and empty ones, empty batches, a key of two tables.

    Each rank's gradient is that of its own loss, whatever W; the rows are those before the update.
    """
    case = dlrm_case(weighted=True, id_dtype=ids)
    (batches,) = make_steps(case, world_size, 1)
    plan = mixed_plan(case.tables, world_size, 1)

    def body(group):
        tables = open_tables(case, plan, group, SGD(lr=0.5))
        batch = batches[group.rank]
        batch.weights.requires_grad_()
        rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        return batch.weights.grad

    got = run_ranks(world_size, body)
    for batch, gradient in zip(batches, got, strict=True):
        assert_near(gradient, wanted(case, batch), "gradient")
    assert max(g.abs().max() for g in got if g.numel()) > 0.1
    # Keys that no table reads get zeros.
    extra = case.keys.index("extra")
    ends = [0, *batches[0].lengths.view(len(case.keys), -1).sum(1).cumsum(0).tolist()]
    assert ends[extra] < ends[extra + 1]
    assert not got[0][ends[extra]:ends[extra + 1]].any()


def test_many_bags_on_several_threads() -> None:
    tables = (TableSpec("t", 500, 24, ("f",), "sum"), TableSpec("m", 70, 5, ("g", "f"), "mean"))
    case = Case(tables, ("g", "f"), weighted=True, max_length=40)
    batch = make_batch(case, 1, 2500)
    batch.weights.requires_grad_()
    results = []
    for threads in (1, 2, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        sharded = open_alone(case, SGD(lr=0.1))
        rank_loss(sharded.lookup(batch.lookup(case)), batch.target).backward()
        torch.set_num_threads(before)
        results.append(batch.weights.grad)
        batch.weights.grad = None
    assert_near(results[0], wanted(case, batch), "gradient")
    assert_bitwise(results[1:], results[:1] * 2, "weight gradients on one and two threads")


def test_weight_gradients_do_not_change_the_update() -> None:
    """The tables' update does not depend on whether the weights need a gradient."""
    case = dlrm_case(weighted=True)
    batch = make_batch(case, 4, 20)
    ends = []
    for wants in (False, True):
        tables = open_alone(case, Adam(lr=0.1))
        weights = batch.weights.clone().requires_grad_(wants)
        other = Batch(batch.lengths, batch.ids, weights, batch.target)
        rank_loss(tables.lookup(other.lookup(case)), batch.target).backward()
        ends.append({t.name: tables.read(t.name) for t in case.tables})
    assert_bitwise(ends[0], ends[1], "tables")


def test_rows_that_have_changed_since_the_lookup_are_refused() -> None:
    """One lookup's backward pass updates rows from which another's gradient is computed."""
    case = dlrm_case(weighted=True)
    tables = open_alone(case, SGD(lr=0.5))
    first, second = (replace(make_batch(case, 0, k).lookup(case)) for k in range(2))
    for batch in (first, second):
        batch.weights = batch.weights.clone().requires_grad_()
    one, other = tables.lookup(first).sum(), tables.lookup(second).sum()
    one.backward()
    with pytest.raises(InvalidInputError, match="updates of the rows since the lookup=1"):
        other.backward()
    # One backward pass updates when it has all gradients; one under no_sync changes no row.
    (tables.lookup(first).sum() + tables.lookup(second).sum()).backward()
    with tables.no_sync():
        one, other = tables.lookup(first).sum(), tables.lookup(second).sum()
        one.backward()
        other.backward()


def test_weights_of_read_only_tables_must_not_need_gradients() -> None:
    case = dlrm_case("none", weighted=True)
    tables = ShardedTables(uniform_plan(case.tables, 1), case.features, SingleGroup(), None)
    batch = make_batch(case, 5, 3)
    batch.weights.requires_grad_()
    with pytest.raises(InvalidInputError, match="per-sample weights"):
        tables.lookup(batch.lookup(case))
    with pytest.raises(InvalidInputError, match="per-sample weights"):
        torch.compile(lambda x: tables.lookup(x), backend="aot_eager")(batch.lookup(case))
    with torch.no_grad():
        assert tables.lookup(batch.lookup(case)).shape == (3, case.columns)
