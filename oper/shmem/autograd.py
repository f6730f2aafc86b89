"""Lookups as autograd sees them: the backward pass updates the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from oper.errors import InvalidInputError, fail
from oper.shmem.batch import Lookup

if TYPE_CHECKING:
    from oper.shmem.runtime import ShardedTables


def trained_lookup(tables: ShardedTables, batch: Lookup, trains: bool = True) -> torch.Tensor:
    """`ShardedTables.forward`, whose backward pass updates the tables; then both are collective.

    Args:
        tables: the tables.
        batch: the batch; its ids and weights must not change before the backward pass.
        trains: whether any table is trained; otherwise only per-sample weights get a gradient.

    Returns:
        Embeddings, pooled, float32 [B, columns], or unpooled, float32 [N, D].
    """
    if batch.ids.is_inference() or (batch.weights is not None and batch.weights.is_inference()):
        batch = _tracked(batch)
    anchor = tables.anchor if trains else tables.anchor.detach()
    out: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        anchor, batch.weights, tables, batch)
    return out


def _tracked(batch: Lookup) -> Lookup:
    """The batch with copies of tensors of inference mode, whose changes nobody could notice."""
    return replace(batch, ids=batch.ids.clone(), resolved=None,
                   weights=None if batch.weights is None else batch.weights.clone())


class _Lookup(torch.autograd.Function):
    """Forward: lookup. Backward: the fused, collective update of the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None,
                tables: ShardedTables, batch: Lookup) -> torch.Tensor:
        out, offsets = tables.forward(batch, collective=anchor.requires_grad)
        ctx.call = (tables, batch, offsets, tables.frozen)
        ctx.versions = batch.versions()
        ctx.rows = (tables.num_steps, tables.num_published)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[None, torch.Tensor | None, None, None]:
        tables, batch, offsets, frozen = ctx.call
        if batch.versions() != ctx.versions:
            _refuse_changes(batch, ctx.versions)
        weights = None
        if ctx.needs_input_grad[1]:  # before the rows change
            if (tables.num_steps, tables.num_published) != ctx.rows:
                raise InvalidInputError(
                    fail("cannot take the gradient of per-sample weights",
                         "updates of the rows since the lookup",
                         tables.num_steps - ctx.rows[0] + tables.num_published - ctx.rows[1],
                         "0, since it is made of the rows",
                         "look up all that a step needs of these tables in one batch"))
            weights = tables.weight_gradient(grads[0], batch, offsets)
        if ctx.needs_input_grad[0]:
            tables.apply_gradients(grads[0], batch, offsets, frozen)
        return None, weights, None, None


def _refuse_changes(batch: Lookup, versions: tuple[int, int]) -> None:
    """Raise InvalidInputError for ids or weights that were written to after their lookup."""
    changed = [name for name, before, now in zip(
        ("ids", "per-sample weights"), versions, batch.versions(), strict=True) if before != now]
    raise InvalidInputError(
        fail("cannot update the rows of a lookup", "changed in place since the lookup", changed,
             "ids and weights as they were looked up",
             "write the next batch into other tensors, or after the backward pass"))
