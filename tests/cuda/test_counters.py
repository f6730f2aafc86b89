"""The device back end's counters of read data equal the replay's and the host back end's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oper.errors import OperError
from oper.plan import Plan
from oper.rows.traffic import KIND, KINDS, Traffic
from oper.shmem.optim.optimizers import Optimizer, RowWiseAdagrad
from tests import runtime_support
from tests.cuda.emulated import on_devices
from tests.cuda.test_domains import small_case
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    make_steps,
    plans_for,
    rich_plan,
    run_ranks,
)
from tests.shmem.test_traffic import assert_equal, executed
from tests.support import pulled


def counted(case: Case, plan: Plan, steps: list[list[Batch]], optimizer: Optimizer, group: Any,
            trains_weights: bool = False) -> Traffic:
    """As `executed`, on the device."""
    tables: Any = runtime_support.open_tables(case, plan, group, optimizer)
    with pytest.raises(OperError, match="start_counting"):
        tables.traffic()
    tables.start_counting()
    for batches in steps:
        batch = batches[group.rank]
        if trains_weights:
            batch.weights = batch.weights.detach().requires_grad_()
        out = tables.lookup(batch.lookup(case))
        runtime_support.rank_loss(out, batch.target).backward()
    found: Traffic = tables.traffic(reset=True)
    assert not tables.traffic().counts.any()
    tables.barrier()
    tables.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_pulled_and_replicated_rows_and_column_pieces(
        emulation: pytest.MonkeyPatch, on_device: None, size: int) -> None:
    """All counters equal the replay's."""
    case = small_case("rowwise_adagrad", weighted=size == 2)
    steps = make_steps(case, size, 2)
    for plan in (plans_for(case.tables, size)["mixed1"],
                 pulled(rich_plan(case.tables, size, 1, columns=True))):
        found = run_ranks(size, lambda g, plan=plan: counted(
            case, plan, steps, OPTIMIZERS["rowwise_adagrad"], g, size == 2))
        assert_equal(case, plan, steps, found, size == 2)


def test_in_several_domains_and_with_two_rounds_of_squares(emulation: pytest.MonkeyPatch) -> None:
    """Counters equal the host back end's, which also reads rows of other domains from messages."""
    case = small_case("rowwise_adagrad")
    steps = make_steps(case, 4, 2)
    plan = pulled(rich_plan(case.tables, 4, 1, columns=True))
    chosen = RowWiseAdagrad(lr=0.05, max_row_norm=0.01)
    domains = (0, 1, 0, 1)
    host = run_ranks(4, lambda g: executed(case, plan, steps, chosen, g), domains=domains)
    with on_devices(emulation):
        device = run_ranks(4, lambda g: counted(case, plan, steps, chosen, g), domains=domains)
    for a, b in zip(host, device, strict=True):
        for kind, k in KIND.items():
            assert np.array_equal(a.counts[k], b.counts[k]), kind


def test_pushed_rows(emulation: pytest.MonkeyPatch) -> None:
    """The forward pass counts as on the host; gradients are counted after reduction by row."""
    case = small_case("sgd", weighted=True)
    steps = make_steps(case, 2, 2)
    plan = rich_plan(case.tables, 2, 2, columns=False)
    host = run_ranks(2, lambda g: executed(case, plan, steps, OPTIMIZERS["sgd"], g))
    with on_devices(emulation):
        device = run_ranks(2, lambda g: counted(case, plan, steps, OPTIMIZERS["sgd"], g))
    for a, b in zip(host, device, strict=True):
        for kind, phase in KINDS.items():
            if phase == "forward" or kind in ("updated_rows", "refreshed_rows"):
                assert np.array_equal(a.counts[KIND[kind]], b.counts[KIND[kind]]), kind
        assert a.counts[KIND["ids"]].any() and a.counts[KIND["partial_sums"]].any()
        assert not b.counts[KIND["bag_gradients"]].any()
        assert b.counts[KIND["gradient_rows"]].sum() > a.counts[KIND["gradient_rows"]].sum()
