"""Backward passes of lookups: collected until autograd has brought them all, and added up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oper.errors import InvalidInputError, fail
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import key_bounds, offsets_of


@dataclass(slots=True)  # not frozen, for the reason that `Lookup` has
class Backward:
    """One backward pass of a lookup.

    Attributes:
        grad: float32, gradient of the lookup's output.
        batch: its batch.
        offsets: int64 [num_keys * B + 1], bounds of its bags.
        frozen: tables that are not to be updated.
    """

    grad: torch.Tensor
    batch: Lookup
    offsets: torch.Tensor
    frozen: frozenset[str] = frozenset()


def as_one(parts: Sequence[Backward]) -> Backward:
    """Backward passes as that of one batch that holds all their samples, in order.

    The result has one key per feature, so that the parts' keys may be in any order. Its update is
    bitwise that of the joint batch.

    Raises:
        InvalidInputError: the passes have other tables frozen.
    """
    frozen = {p.frozen for p in parts}
    if len(frozen) > 1:
        raise InvalidInputError(
            fail("cannot add up gradients", "frozen tables", [sorted(f) for f in frozen],
                 "the same in all backward passes of one update",
                 "freeze and unfreeze between updates, or call zero_grad() first"))
    weighted = any(p.batch.weights is not None for p in parts)
    ids, lengths, weights, rows = [], [], [], []
    bounds = [key_bounds(p.batch, p.offsets) for p in parts]
    taken = [0] * len(parts)  # rows of unpooled gradients
    for feature in range(parts[0].batch.key_of.numel()):
        for k, part in enumerate(parts):
            batch, key = part.batch, int(part.batch.key_of[feature])
            begin, end = bounds[k][key], bounds[k][key + 1]
            ids.append(batch.ids[begin:end])
            lengths.append(batch.lengths[key * batch.batch_size:(key + 1) * batch.batch_size])
            if weighted:
                weights.append(batch.weights[begin:end] if batch.weights is not None
                               else torch.ones(end - begin, device=batch.ids.device))
            if not batch.pooled:
                rows.append(part.grad[taken[k]:taken[k] + end - begin])
                taken[k] += end - begin
    joint = Lookup(torch.cat(ids), torch.cat(lengths).long(),
                   torch.arange(parts[0].batch.key_of.numel()),
                   sum(p.batch.batch_size for p in parts),
                   torch.cat(weights) if weighted else None, parts[0].batch.pooled)
    grad = torch.cat([p.grad for p in parts] if joint.pooled else rows)
    return Backward(grad, joint, offsets_of(joint.lengths), parts[0].frozen)


class Anchored(Protocol):
    """Tables whose lookups share a leaf of the graph."""

    anchor: torch.Tensor

    def apply_all(self, parts: list[Backward]) -> None:
        """One update with the sum of these passes."""


class CollectedPasses:
    """Lookups whose gradients a backward pass has brought, until it has brought all of them.

    All lookups of the tables share one anchor, a leaf of the graph. Autograd accumulates its
    gradient when the last lookup of the graph has been passed, and that is when the tables are
    updated: once per backward pass, with the sum of its lookups' gradients, as parameters are. A
    backward pass that is not to reach leaves (``torch.autograd.grad``, ``backward(inputs=...)``)
    updates nothing.

    Args:
        tables: the tables, which are not kept alive.
    """

    def __init__(self, tables: Anchored) -> None:
        self._tables = weakref.ref(tables)
        self.parts: dict[int, tuple[int, list[Backward]]] = {}  # thread and passes by graph task
        # A gradient that is there from the start is added to in place, which threads may do at
        # once.
        tables.anchor.grad = torch.zeros_like(tables.anchor)
        tables.anchor.register_post_accumulate_grad_hook(self._apply)

    def add(self, task: int, part: Backward, thread: int) -> None:
        """Keep a pass of graph task `task` for its end; `thread` ran the lookup."""
        self.parts.setdefault(task, (thread, []))[1].append(part)

    def forget_failed(self) -> None:
        """Drop what backward passes of this thread have left that ended with an error."""
        if self.parts and torch._C._current_graph_task_id() == -1:
            mine = threading.get_ident()
            for task in [t for t, (thread, _) in list(self.parts.items()) if thread == mine]:
                self.parts.pop(task, None)

    def _apply(self, anchor: torch.Tensor) -> None:
        if anchor.grad is None or anchor.grad.requires_grad:  # of a pass with create_graph=True
            anchor.grad = torch.zeros_like(anchor)
        tables = self._tables()
        _, parts = self.parts.pop(torch._C._current_graph_task_id(), (0, []))
        if tables is not None and parts:
            tables.apply_all(parts)
