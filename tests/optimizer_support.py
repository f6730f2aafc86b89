"""Helpers of the optimizer tests: training with changing learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.plan import Plan
from oper.shmem.tables import ShardedTables
from tests.runtime_support import (
    Batch,
    Case,
    Optimizers,
    Result,
    assert_near,
    merge_ranks,
    run_ranks,
    train_rank,
)


def train_sharded(case: Case, plan: Plan, steps: list[list[Batch]],
                  optimizers: Optimizers, rates: Sequence[float] = (1.0,)) -> Result:
    """Train on virtual ranks. `rates`: factor on the learning rates by step; the last one persists.
    """
    def body(group: Any) -> Result:
        first: list[float] = []

        def between(tables: ShardedTables, step: int) -> None:
            first[:] = first or [float(g["lr"]) for g in tables.param_groups]
            for param_group, lr in zip(tables.param_groups, first, strict=True):
                param_group["lr"] = lr * rates[min(step, len(rates) - 1)]

        return train_rank(case, plan, steps, optimizers, group, between)

    return merge_ranks(run_ranks(plan.world_size, body))


def assert_close(got: Result, want: Result, tolerance: float = 1e-5) -> None:
    """Require every output, weight and state to be within `tolerance` times its largest value."""
    for part in ("weights", "states"):
        assert_near(getattr(got, part), getattr(want, part), part, tolerance)
    for step, (mine, theirs) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        assert_near(torch.cat(mine), torch.cat(theirs), f"output of step {step}", tolerance)
