"""Sharded training gives the numbers of the unsharded run, for every plan and world size."""

from __future__ import annotations

import functools

import pytest
import torch

from oper.plan import Plan
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    Result,
    assert_exact,
    dlrm_case,
    make_steps,
    plans_for,
    train_reference,
    train_virtual,
)

STEPS = 20
PLANS = ("replicated", "striped", "owned", "mixed0", "mixed1", "mixed2")


@functools.cache
def references(case: Case, world_size: int, optimizer: str
               ) -> tuple[list[list[Batch]], Result, Result]:
    steps = make_steps(case, world_size, STEPS)
    args = (case, steps, OPTIMIZERS[optimizer])
    return steps, train_reference(*args), train_reference(*args, torch.float64)


def check(case: Case, plan: Plan, optimizer: str) -> Result:
    steps, fp32, fp64 = references(case, plan.world_size, optimizer)
    got = train_virtual(case, plan, steps, OPTIMIZERS[optimizer])
    assert_exact(case, got, fp32, fp64)
    return got


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_equals_the_unsharded_run(world_size: int, plan: str, optimizer: str) -> None:
    case = dlrm_case(optimizer)
    check(case, plans_for(case.tables, world_size)[plan], optimizer)
