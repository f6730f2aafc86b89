"""Lookups as autograd sees them: the backward pass updates the tables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from oper.errors import InvalidInputError, fail
from oper.shmem.batch import Lookup
from oper.shmem.protocol import Tables


class _Lookup(torch.autograd.Function):
    """Forward: lookup. Backward: hands the gradient to the fused, collective update."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None,
                tables: Tables, batch: Lookup) -> torch.Tensor:
        if batch.ids.is_inference() or (weights is not None and weights.is_inference()):
            # Copies, since nobody could notice changes of these.
            batch = replace(batch, ids=batch.ids.clone(), resolved=None,
                            weights=None if weights is None else weights.clone())
        with tables.turns.lock:  # no other thread updates the rows in between
            ctx.rows = (tables.num_steps, tables.num_published)
            out, offsets = tables.forward(batch, collective=anchor.requires_grad)
        ctx.call = (tables, batch, offsets, tables.frozen)
        ctx.versions = batch.versions()
        ctx.thread = threading.get_ident()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        tables, batch, offsets, frozen = ctx.call
        if batch.versions() != ctx.versions:
            _refuse_changes(batch, ctx.versions)
        weights = None
        if ctx.needs_input_grad[1]:
            with tables.turns.lock:
                _check_rows(tables, ctx.rows)
                weights = tables.weight_gradient(grads[0], batch, offsets)
        if not (ctx.needs_input_grad[0]
                and torch._C._will_engine_execute_node(ctx.next_functions[0][0])):
            return None, weights, None, None
        tables.collected.add(torch._C._current_graph_task_id(),
                             tables.passed(grads[0], batch, offsets, frozen), ctx.thread)
        return tables.anchor.detach(), weights, None, None


#: Embeddings of (anchor of the tables, weights of the batch, tables, batch), by `forward` of the
#: tables. The backward pass updates them where the anchor requires a gradient; then both passes are
#: collective. Ids and weights must not change in between.
trained_lookup: Callable[..., torch.Tensor] = _Lookup.apply


def _check_rows(tables: Tables, rows: tuple[int, int]) -> None:
    """Raise InvalidInputError unless the rows are as they were: `rows` = steps and publications."""
    since = tables.num_steps - rows[0] + tables.num_published - rows[1]
    if since:
        raise InvalidInputError(
            fail("cannot take the gradient of per-sample weights",
                 "updates of the rows since the lookup", since, "0, since it is made of the rows",
                 "take all gradients of a step in one backward pass"))


def _refuse_changes(batch: Lookup, versions: tuple[int, int]) -> None:
    """Raise InvalidInputError for ids or weights that were written to after their lookup."""
    changed = [name for name, before, now in zip(
        ("ids", "per-sample weights"), versions, batch.versions(), strict=True) if before != now]
    raise InvalidInputError(
        fail("cannot update the rows of a lookup", "changed in place since the lookup", changed,
             "ids and weights as they were looked up",
             "write the next batch into other tensors, or after the backward pass"))
