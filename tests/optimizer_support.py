"""Helpers of the optimizer tests: every kind of optimizer, and training with changing rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.plan import Plan
from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
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

EVERY: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.3),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.05, eps=1e-8),
    "rowwise_adagrad_l2": RowWiseAdagrad(lr=0.05, eps=1e-8, weight_decay=0.2),
    "rowwise_adagrad_decoupled": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.5, decoupled=True),
    "adagrad": Adagrad(lr=0.05, eps=1e-3),
    "adam": Adam(lr=0.02),
    "adam_decay": Adam(lr=0.02, betas=(0.8, 0.99), weight_decay=0.3),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.02),
    "partial_rowwise_adam_decay": PartialRowWiseAdam(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
    "adamw": AdamW(lr=0.02, weight_decay=0.1),
    "sgd_decay": SGD(lr=0.3, weight_decay=0.2),
    "momentum_sgd": SGD(lr=0.1, momentum=0.8),
    "momentum_sgd_decay": SGD(lr=0.1, momentum=0.7, weight_decay=0.2),
    "rowwise_adagrad_begun": RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.25),
    "adagrad_begun": Adagrad(lr=0.05, initial_accumulator_value=0.25),
    "sgd_clipped": SGD(lr=0.3, max_gradient=0.02, max_row_norm=0.05),
    "rowwise_adagrad_clipped": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.2, max_gradient=0.02, max_row_norm=0.05),
    # Clipped elements may cancel out; what rounding leaves of them must not make a whole step.
    "adam_clipped": Adam(lr=0.02, eps=1e-3, max_gradient=0.02, max_row_norm=0.05),
    "lars_sgd": LarsSGD(lr=0.2, eta=0.1),
    "lars_sgd_decay": LarsSGD(lr=0.2, momentum=0.6, weight_decay=0.5, eta=0.2),
    "lamb": LAMB(lr=0.02),
    "lamb_decay": LAMB(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.02),
    "partial_rowwise_lamb_decay": PartialRowWiseLAMB(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
}


def train_sharded(case: Case, plan: Plan, steps: list[list[Batch]],
                  optimizers: Optimizers, rates: Sequence[float] = (1.0,)) -> Result:
    """Train on virtual ranks. `rates`: factor on the learning rates by step; the last persists.
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
    """Every output, weight and state within `tolerance` of its largest value."""
    for part in ("weights", "states"):
        assert_near(getattr(got, part), getattr(want, part), part, tolerance)
    for step, (mine, theirs) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        assert_near(torch.cat(mine), torch.cat(theirs), f"output of step {step}", tolerance)
