"""Backward passes of lookups: combining them, and holding them back for a later update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import key_bounds, offsets_of


@dataclass(slots=True)  # not frozen: see the comment at `Lookup`
class Backward:
    """One backward pass of a lookup.

    Attributes:
        grads: float32, the gradient of the lookup's output, or one tensor per feature if
            `batch.apart`.
        batch: the batch of the lookup.
        offsets: int64 [num_keys * B + 1], bounds of the batch's bags.
        frozen: names of tables that must not be updated.
        accumulates: whether `no_sync` was entered since the last update.
    """

    grads: Sequence[torch.Tensor]
    batch: Lookup
    offsets: torch.Tensor
    frozen: frozenset[str] = frozenset()
    accumulates: bool = False

    @property
    def grad(self) -> torch.Tensor:
        """The gradient as one tensor. Gradients per feature are concatenated once, and `grads` then
        holds the result."""
        if len(self.grads) > 1:
            self.grads = (torch.cat(tuple(self.grads)),)
        return self.grads[0]

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self.grads = (value,)

    def without_samples(self) -> Backward:
        """Return the backward pass of an empty batch for the same tables: a step with it applies
        the gradients that are kept for the update, without adding any."""
        batch, grad = self.batch, self.grads[0]
        nothing = Lookup(batch.ids[:0], batch.lengths[:0], batch.key_of, 0,
                         None if batch.weights is None else batch.weights[:0], batch.pooled)
        return Backward((grad.new_empty(0, grad.shape[-1]),), nothing, self.offsets.new_zeros(1),
                        self.frozen, self.accumulates)


class HeldPasses:
    """Backward passes whose gradients are accumulated for a later update (`no_sync`).

    Args:
        lock: lock that guards all attributes; the caller of `join` must hold it.

    Attributes:
        passes: the passes held back.
        holders: number of `hold` blocks that are active, over all threads.
        is_entered: whether a `hold` block was entered since the last update.
        refused: the error of a pass whose gradient was refused, after which the accumulated
            gradients must not be applied; else None.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.holders = 0
        self.is_entered = False
        self.passes: list[Backward] = []
        self.refused: Exception | None = None

    def drop(self) -> None:
        """Drop the passes held back, because no rank makes their update."""
        self.passes, self.refused, self.is_entered = [], None, False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold back the passes that any thread gives to `join` inside the block."""
        mine = 0
        try:  # begins first: KeyboardInterrupt may be raised between any two calls
            with self._lock:
                self.holders, mine = self.holders + 1, 1
                self.is_entered = True
            yield
        finally:
            with self._lock:
                self.holders -= mine

    def join(self, parts: list[Backward]) -> Backward | None:
        """Hold back `parts` and return None inside `hold`; otherwise return the combination of all
        passes held back and `parts`."""
        if self.holders:  # copies, since the caller may reuse its buffers
            self.passes += [Backward((_own(p),), p.batch.kept(), p.offsets.clone(), p.frozen)
                            for p in parts]
            return None
        parts, self.passes = [*self.passes, *parts], []
        joint = parts[0] if len(parts) == 1 else as_one(parts)
        joint.accumulates, self.is_entered = self.is_entered, False
        return joint


def _own(passed: Backward) -> torch.Tensor:
    """Return a copy of the gradient."""
    return passed.grad if len(passed.grads) > 1 else passed.grad.clone()


def as_one(parts: Sequence[Backward]) -> Backward:
    """Combine backward passes into the pass of one batch with all their samples, in order.

    The result has one key per feature, since the order of keys may differ between the parts. Its
    update is bitwise that of one lookup of the combined batch.

    Raises:
        InvalidInputError: the passes differ in their frozen tables.
    """
    frozen = {p.frozen for p in parts}
    if len(frozen) > 1:
        raise InvalidInputError("cannot add up gradients", "frozen tables",
                                [sorted(f) for f in frozen],
                                "the same in all backward passes of one update",
                                "freeze and unfreeze between updates, or call zero_grad() first")
    weighted = any(p.batch.weights is not None for p in parts)
    ids, lengths, weights, rows = [], [], [], []
    bounds = [key_bounds(p.batch, p.offsets) for p in parts]
    taken = [0] * len(parts)  # by part, rows of its unpooled gradient used so far
    for feature in range(parts[0].batch.key_of.numel()):
        for k, part in enumerate(parts):
            batch, key = part.batch, int(part.batch.key_of[feature])
            begin, end = bounds[k][key], bounds[k][key + 1]
            ids.append(batch.ids[begin:end])
            # Not `batch.lengths`, which may have changed since the lookup.
            first = key * batch.batch_size
            lengths.append(part.offsets[first:first + batch.batch_size + 1].diff())
            if weighted:
                weights.append(batch.weights[begin:end] if batch.weights is not None
                               else torch.ones(end - begin, dtype=torch.float32,
                                               device=batch.ids.device))
            if not batch.pooled:
                rows.append(part.grad[taken[k]:taken[k] + end - begin])
                taken[k] += end - begin
    joint = Lookup(torch.cat(ids), torch.cat(lengths),
                   torch.arange(parts[0].batch.key_of.numel()),
                   sum(p.batch.batch_size for p in parts),
                   torch.cat(weights) if weighted else None, parts[0].batch.pooled,
                   seen=tuple(s for p in parts for s in p.batch.seen))
    grad = torch.cat([p.grad for p in parts] if joint.pooled else rows)
    offsets = offsets_of(joint.lengths)
    if any(b[0] for b in bounds):  # on a device, bounds that begin with 1 mark a refused batch
        offsets = torch.ones_like(offsets)
    return Backward((grad,), joint, offsets, parts[0].frozen)
