"""Averages of rows over replica groups, and the correction of rows that have changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def union_of(slots: Sequence[np.ndarray]) -> np.ndarray:
    """Return the distinct slots of all arrays, ascending."""
    return np.unique(np.concatenate(slots))


def places(union: np.ndarray, slots: np.ndarray) -> torch.Tensor:
    """Return the indices, int64, at which ascending `union` has the values `slots`."""
    return torch.from_numpy(np.searchsorted(union, slots).astype(np.int64))


def within(slots: np.ndarray, union: np.ndarray) -> np.ndarray:
    """Return those of the ascending `slots` that lie between the first and the last value of the
    ascending `union`."""
    if not union.size:
        return union
    return slots[np.searchsorted(slots, union[0]):np.searchsorted(slots, union[-1], "right")]


def mean(union: np.ndarray, slots: Sequence[np.ndarray], rows: Sequence[torch.Tensor]
         ) -> torch.Tensor:
    """Return the means of rows over the groups that contribute them, float32 [n, columns].

    The mean of n rows x0, x1, ... is computed as x0 + sum(xk - x0) / n, so that the mean of equal
    rows is exactly that row. Where this is not finite, it is sum(xk) / n in double precision.

    Args:
        union: slots of the result's rows, ascending [n]; each is in at least one of `slots`.
        slots: by group, the slots of `rows`.
        rows: by group, the rows to average, [number of slots, columns].
    """
    first = torch.zeros(union.size, rows[0].shape[1], dtype=torch.float32)
    total, count = torch.zeros_like(first), first.new_zeros(union.size, 1)
    for some, values in zip(slots, rows, strict=True):
        at, x = places(union, some), values.float()
        number = count.index_select(0, at)
        base = torch.where(number == 0, x, first.index_select(0, at))
        first.index_copy_(0, at, base)
        total.index_copy_(0, at, total.index_select(0, at) + (x - base))
        count.index_copy_(0, at, number + 1)
    means = first + total / count
    if bool(means.isfinite().all()):
        return means
    exact = torch.zeros_like(means, dtype=torch.float64)
    for some, values in zip(slots, rows, strict=True):
        at = places(union, some)
        exact.index_copy_(0, at, exact.index_select(0, at) + values)
    return torch.where(means.isfinite(), means, (exact / count).float())


def corrected(means: torch.Tensor, before: torch.Tensor, now: torch.Tensor, is_squares: bool
              ) -> torch.Tensor:
    """Return the averages of rows, with the changes that this group has made since the rows were
    sent: ``means + (now - before)``, and exactly `means` where ``now == before``.

    Args:
        means: averages of the rows that were sent, float32 [n, columns].
        before: this group's rows when they were sent, [n, columns].
        now: this group's rows, [n, columns].
        is_squares: whether they are sums or averages of squared gradients. Where these have become
            smaller (they decay), the result is ``means * (now / before)``, since the sum could
            be negative.
    """
    before, now = before.float(), now.float()
    moved = means + (now - before)
    if is_squares:
        moved = torch.where(now < before, means * (now / before), moved)
    return torch.where(now == before, means, moved)
