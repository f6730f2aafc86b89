"""Lookups as autograd sees them: the backward pass updates the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oper.errors import InvalidInputError, fail
from oper.shmem.batch import Lookup

if TYPE_CHECKING:
    from oper.shmem.runtime import ShardedTables


def trained_lookup(tables: ShardedTables, batch: Lookup) -> torch.Tensor:
    """`ShardedTables.forward`, collective, whose backward pass updates the tables.

    Returns:
        Embeddings, pooled, float32 [B, columns], or unpooled, float32 [N, D].
    """
    out: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        tables.anchor, batch.weights, tables, batch)
    return out


class _Lookup(torch.autograd.Function):
    """Forward: lookup. Backward: the fused, collective update of the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None,
                tables: ShardedTables, batch: Lookup) -> torch.Tensor:
        out, offsets = tables.forward(batch, collective=True)
        ctx.call = (tables, batch, offsets)
        ctx.step = tables.num_steps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[None, torch.Tensor | None, None, None]:
        tables, batch, offsets = ctx.call
        weights = None
        if ctx.needs_input_grad[1]:  # before the rows change
            if tables.num_steps != ctx.step:
                raise InvalidInputError(
                    fail("cannot take the gradient of per-sample weights", "updates since the "
                         "lookup", tables.num_steps - ctx.step, "0, since it is made of the rows",
                         "look up all that a step needs of these tables in one batch"))
            weights = tables.weight_gradient(grads[0], batch, offsets)
        tables.apply_gradients(grads[0], batch, offsets)
        return None, weights, None, None
