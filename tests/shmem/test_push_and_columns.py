"""Tiers in push mode and tables split by columns: the unsharded numbers, up to re-association."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.optim.optimizers import PartialRowWiseAdam, RowWiseAdagrad
from oper.tables import TableSpec
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    assert_bitwise,
    assert_exact,
    dlrm_case,
    make_steps,
    rich_plan,
    train_reference,
    train_virtual,
)
from tests.shmem.test_exactness import STEPS, references


# With columns on two and four ranks: test_exchange.py.
@pytest.mark.parametrize("world_size, columns", [(1, True), (2, False), (4, False)])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_training_equals_the_unsharded_run(world_size: int, optimizer: str, columns: bool) -> None:
    case = dlrm_case(optimizer)
    chosen = OPTIMIZERS[optimizer]
    steps, fp32, fp64 = references(case, world_size, optimizer, STEPS if world_size == 2 else 8)
    for seed in (1, 2):
        plan = rich_plan(case.tables, world_size, seed, columns)
        assert_exact(case, train_virtual(case, plan, steps, chosen), fp32, fp64)


def test_weighted_lookups_and_repeatability() -> None:
    case = replace(dlrm_case("rowwise_adagrad"), weighted=True, id_dtype=torch.int32)
    chosen = OPTIMIZERS["rowwise_adagrad"]
    steps = make_steps(case, 2, STEPS)
    plan = rich_plan(case.tables, 2, 5, columns=True)
    first = train_virtual(case, plan, steps, chosen)
    assert_exact(case, first, train_reference(case, steps, chosen, torch.float32),
                 train_reference(case, steps, chosen, torch.float64))
    second = train_virtual(case, plan, steps, chosen, num_threads=2)
    assert_bitwise(first.weights, second.weights, "weights of two runs")
    assert_bitwise(first.outputs, second.outputs, "outputs of two runs")


@pytest.mark.parametrize(
    "chosen", [RowWiseAdagrad(0.05, weight_decay=0.1), PartialRowWiseAdam(0.01)],
    ids=["l2 decay", "partial adam"])
def test_row_states_do_not_depend_on_columns(chosen: RowWiseAdagrad | PartialRowWiseAdam) -> None:
    """A row's state is that of the whole row, whatever pieces it is cut into."""
    table = TableSpec("t", 50, 24, ("f",), "sum", optimizer=chosen.name)
    case = Case((table,), ("f",))
    steps = make_steps(case, 2, STEPS)
    whole = Plan(2, (TablePlan(table, (Piece(0, 24, (Tier(0, 50, "striped", (0, 1)),)),)),))
    split = Plan(2, (TablePlan(table, (
        Piece(0, 8, (Tier(0, 50, "striped", (1, 0)),)),
        Piece(8, 12, (Tier(0, 20, "replicated", (0, 1)), Tier(20, 50, "owned", (1,)))),
        Piece(12, 24, (Tier(0, 50, "owned", (0,)),)))),))
    a = train_virtual(case, whole, steps, chosen)
    b = train_virtual(case, split, steps, chosen)
    for name, value in a.weights.items():
        assert torch.allclose(value, b.weights[name], rtol=1e-5, atol=1e-6), name
