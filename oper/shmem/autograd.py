"""Lookups in autograd: every backward pass updates the tables once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.by_feature import by_feature
from oper.shmem.passes import Backward
from oper.shmem.protocol import Tables

_VERSION = attrgetter("_version")  # how often a tensor was changed in place


class CollectedPasses:
    """Collects the gradients of all lookups of the tables in one backward pass.

    All lookups depend on one leaf tensor, the anchor. Autograd accumulates the anchor's gradient
    after the backward pass of the last lookup, and a hook on it then updates the tables with the
    sum of the lookups' gradients. A backward pass that does not accumulate into leaves
    (``torch.autograd.grad``, ``backward(inputs=...)``) updates nothing.

    Args:
        tables: the tables, held by a weak reference.

    Attributes:
        parts: by id of autograd's graph task: the thread that made its first finished lookup, and
            the backward passes of its lookups so far.
        began: by id of a graph task that is running: `num_steps` of the tables at its first lookup
            or update.
        nothing: zeros like the anchor, the gradient that every lookup returns for it.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = weakref.ref(tables)
        self.parts: dict[int, tuple[int, list[Backward]]] = {}
        self.began: dict[int, int] = {}
        self.nothing = torch.zeros_like(tables.anchor)
        # With a gradient already present, autograd adds in place, which is safe from many threads.
        tables.anchor.grad = torch.zeros_like(tables.anchor)
        tables.anchor.register_post_accumulate_grad_hook(self._apply)

    def forget_failed(self) -> None:
        """Drop the gradients of this thread's backward passes that raised an error."""
        if self.parts and torch._C._current_graph_task_id() == -1:
            mine = threading.get_ident()
            for task in [t for t, (thread, _) in list(self.parts.items()) if thread == mine]:
                self.parts.pop(task, None)

    def check_repeated(self, num_steps: int) -> None:
        """Raise InvalidInputError if a lookup within a backward pass, which repeats one of the
        forward pass, would read rows that the same backward pass has updated.

        A reentrant checkpoint repeats its lookups within the backward pass of the whole model and
        then runs a separate backward pass, whose update later checkpoints would see. `num_steps`:
        the tables' current value.
        """
        if self.began.setdefault(torch._C._current_graph_task_id(), num_steps) != num_steps:
            raise InvalidInputError("cannot repeat a lookup in a backward pass",
                                    "updates of the rows in this backward pass", ">= 1",
                                    "0, because the repeated lookup must read the rows of the "
                                    "first", "checkpoint with use_reentrant=False, or only one "
                                    "part of the model with lookups in these tables")

    def _apply(self, anchor: torch.Tensor) -> None:
        grad = anchor.grad
        if grad is None or grad.requires_grad:  # by a pass with create_graph=True
            anchor.grad = torch.zeros_like(anchor)
        tables = self._tables()
        task = torch._C._current_graph_task_id()
        _, parts = self.parts.pop(task, (0, []))
        if tables is not None and parts:
            self.began.setdefault(task, tables.num_steps)
            tables.apply_all(parts)


class _Lookup(torch.autograd.Function):
    """Forward: lookup. Backward: adds the gradient to `CollectedPasses`, which updates the tables.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None,
                tables: Tables, batch: Lookup) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if batch.ids.is_inference() or (weights is not None and weights.is_inference()):
            # Copy them: inference tensors have no version counter that would reveal changes.
            batch = replace(batch, ids=batch.ids.clone(), resolved=None,
                            weights=None if weights is None else weights.clone())
        shared = batch.shared
        if shared is not None and shared.samples.is_inference():
            shared = SharedBags(shared.bags, shared.samples.clone())
            batch = replace(batch, shared=shared)
        turns, trains = tables.turns, anchor.requires_grad
        if torch._C._current_graph_task_id() == -1:
            tables.collected.began.clear()
        else:
            tables.collected.check_repeated(tables.num_steps)
        with turns.lock:  # no other thread updates the rows in between
            ctx.rows = (tables.num_steps, tables.num_flushes)
            if turns.is_alone or not trains:
                out, offsets = tables.forward(batch, trains)
            else:
                turns.check()
                out, offsets = tables.forward(batch, True)
                turns.begin(offsets)
        if batch.looked_up is not None:  # avoid a reference cycle: output -> graph -> ctx -> output
            batch = replace(batch, looked_up=None)
        ctx.call = (tables, batch, offsets, tables.frozen)
        ctx.watched = (batch.ids,) if batch.weights is None else (batch.ids, batch.weights)
        if shared is not None:
            ctx.watched += (shared.samples,)
        ctx.versions = (*map(_VERSION, ctx.watched),)
        ctx.thread = threading.get_ident()
        return by_feature(out, batch, offsets) if batch.apart else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        if torch.is_grad_enabled():  # only with create_graph=True
            return _backward_once(ctx, *grads)
        tables, batch, offsets, frozen = ctx.call
        if (*map(_VERSION, ctx.watched),) != ctx.versions:
            _refuse_changes(batch, ctx.watched, ctx.versions)
        weights = None
        updates = ctx.needs_input_grad[0] and torch._C._will_engine_execute_node(
            ctx.next_functions[0][0])
        if ctx.needs_input_grad[1]:
            with tables.turns.lock:
                check_rows(tables, ctx.rows)
                weights = tables.weight_gradient(grads[0], batch, offsets, updates)
        if not updates:
            return None, weights, None, None
        _, parts = tables.collected.parts.setdefault(torch._C._current_graph_task_id(),
                                                     (ctx.thread, []))
        parts.append(Backward(grads, batch, offsets, frozen))
        return tables.collected.nothing, weights, None, None


# With create_graph=True, the gradients must refuse a second differentiation. The decorator takes
# time in every pass, so others do without.
_backward_once: Any = once_differentiable(_Lookup.backward)

#: ``trained_lookup(tables.anchor, batch.weights, tables, batch)`` returns the embeddings of
#: `Tables.forward`: one tensor, or a tuple of one per feature if `batch.apart`. If the anchor
#: requires a gradient, the backward pass updates the tables and both passes are collective. Ids,
#: weights and shared bags must not change between the passes.
#: ``Function.apply`` would first make several calls for ``torch.func``, whose transforms lookups
#: refuse; the ``apply`` of its base class does not.
trained_lookup: Callable[..., Any] = super(torch.autograd.Function, _Lookup).apply


def check_rows(tables: Tables, rows: Sequence[int]) -> None:
    """Raise InvalidInputError if rows have changed since a lookup.

    `rows`: `num_steps` and `num_flushes` of the tables at that lookup.
    """
    since = tables.num_steps - rows[0] + tables.num_flushes - rows[1]
    if since:
        raise InvalidInputError("cannot take the gradient of per-sample weights",
                                "updates of the rows since the lookup", since,
                                "0, because the gradient is computed from the rows",
                                "take all gradients of a step in one backward pass, and write to "
                                "tables before the lookup or after that pass")


def _refuse_changes(batch: Lookup, watched: Sequence[torch.Tensor], versions: Sequence[int]
                    ) -> None:
    """Raise InvalidInputError naming the tensors of a batch that changed after its lookup."""
    names = ("ids", *(() if batch.weights is None else ("per-sample weights",)), "inverse_indices")
    changed = [name for name, x, before in zip(names, watched, versions, strict=False)
               if x._version != before]
    raise InvalidInputError("cannot update the rows of a lookup",
                            "changed in place since the lookup", changed,
                            "no change between lookup and backward pass",
                            "write the next batch into other tensors, or after the backward pass")
