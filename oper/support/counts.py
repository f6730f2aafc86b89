"""Counts of distinct values, sorted by value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Counts = tuple[np.ndarray, np.ndarray]  # distinct values [K], ascending, and their counts [K]


def sum_counts(values: np.ndarray, counts: np.ndarray) -> Counts:
    """Sort values [N] and add the counts [N] of equal ones; keeps both dtypes."""
    order = np.argsort(values, kind="stable")  # fast if the values consist of sorted parts
    values, counts = values[order], counts[order]
    if not values.size:
        return values, counts
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.add.reduceat(counts, starts, dtype=counts.dtype)


def merge_counts(parts: Sequence[Counts]) -> Counts:
    """Merge one or more parts, adding the counts of equal values."""
    if len(parts) == 1:
        return parts[0]
    return sum_counts(np.concatenate([v for v, _ in parts]), np.concatenate([c for _, c in parts]))


def hotness_order(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return indices that sort ids by descending count, with ties in ascending order of id.

    Args:
        ids: int64 [H].
        counts: int64 [H], access count of each id.

    Returns:
        int64 [H], indices into `ids`.
    """
    if not counts.size or (np.diff(ids) <= 0).any():
        return np.lexsort((ids, -counts))
    # Ids ascend already: a stable sort by count suffices; for 16-bit keys NumPy uses a radix sort.
    below = counts.max() - counts
    return np.argsort(below.astype(np.uint16) if below.max() < 2**16 else below, kind="stable")
