"""Exact counting of accesses per row, bag lengths, presence and time buckets of one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.analysis.presence import PRESENCE_SAMPLES, Lookups, PresenceSampler
from oper.errors import InvalidInputError, fail
from oper.stats import TableStats, TimeBucket

_PENDING = 1 << 20  # ids that a sparse counter collects before it sorts them
_UINT32_MAX = 2**32 - 1
_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class CountOptions:
    """How tables are counted.

    Attributes:
        presence_samples: window sizes n at which presence is measured.
        dense_budget_bytes: memory for dense counters (4 bytes per row) over all tables; tables that
            do not fit are counted by sorting, exactly as well, at a third to a tenth of the speed.
    """

    presence_samples: tuple[int, ...] = PRESENCE_SAMPLES
    dense_budget_bytes: int = 2 << 30

    def dense_tables(self, num_rows: Sequence[int]) -> list[bool]:
        """Which tables get a dense counter: the smallest ones first, while the budget lasts."""
        result, left = [False] * len(num_rows), self.dense_budget_bytes
        for k in sorted(range(len(num_rows)), key=lambda k: num_rows[k]):
            left -= 4 * num_rows[k]
            if left < 0:
                break
            result[k] = True
        return result


class SparseCounter:
    """Counts of arbitrary integers in memory proportional to the distinct ones.

    Values are collected, sorted and kept as sorted runs of (value, count); runs of like size are
    merged, so that each value is merged a logarithmic number of times.
    """

    def __init__(self, dtype: type[np.integer] | np.dtype = np.int64) -> None:
        """Start a counter of values of `dtype`."""
        self._dtype = np.dtype(dtype)
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, values: np.ndarray) -> None:
        """Count `values`, integer [N]."""
        self._pending.append(values.astype(self._dtype))  # a copy: the caller may reuse its array
        self._num_pending += values.size
        if self._num_pending >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        if not self._num_pending:
            return
        values = np.concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        values.sort()
        starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        self._runs.append((values[starts], np.diff(starts, append=values.size)))
        while len(self._runs) > 1 and self._runs[-2][0].size <= 2 * self._runs[-1][0].size:
            self._runs[-2:] = [merge_counts(self._runs[-2:])]

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct values, ascending, and the count of each, int64 [K]."""
        self._flush()
        if not self._runs:
            return np.zeros(0, self._dtype), _EMPTY
        self._runs = [merge_counts(self._runs)]
        return self._runs[0]


def merge_counts(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Add up (values, counts) pairs whose values ascend; values ascend in the result."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([v for v, _ in parts])
    counts = np.concatenate([c for _, c in parts])
    order = np.argsort(values, kind="stable")  # merges the sorted parts
    values, counts = values[order], counts[order]
    if not values.size:
        return values, counts
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.add.reduceat(counts, starts)


class _DenseCounter:
    """Counts of ids in `0..num_rows-1`, 4 bytes per row."""

    def __init__(self, num_rows: int) -> None:
        self._counts = np.zeros(num_rows, np.uint32)
        self._total = 0
        self._spilled: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, ids: np.ndarray) -> None:
        if self._total + ids.size > _UINT32_MAX:  # before any count could overflow
            self._spilled.append(self._take())
        self._total += ids.size
        if ids.dtype == np.uint64:  # not an index type; in range, so the cast is exact
            ids = ids.astype(np.int64)
        # With equal dtypes this is NumPy's indexed inner loop: no buffering, no temporary array.
        np.add.at(self._counts, ids, np.uint32(1))

    def _take(self) -> tuple[np.ndarray, np.ndarray]:
        ids = np.flatnonzero(self._counts != 0)  # several times as fast as on the counts
        counts = self._counts[ids].astype(np.int64)
        self._counts[:] = 0
        self._total = 0
        return ids, counts

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Touched ids, ascending, and their counts; the counter is empty afterwards."""
        return merge_counts([*self._spilled, self._take()])


class TableCounter:
    """Counts the lookups of one table, batch by batch, into `TableStats`."""

    def __init__(self, name: str, num_rows: int, dense: bool = True,
                 presence_samples: Sequence[int] = PRESENCE_SAMPLES) -> None:
        """Start a counter.

        Args:
            name: the table's name, for messages.
            num_rows: rows of the table; every id must be below.
            dense: 4 bytes per row (fast) instead of memory proportional to the touched rows.
            presence_samples: window sizes at which presence is measured.
        """
        self._name, self._num_rows, self._dense = name, num_rows, dense
        self._counter: _DenseCounter | SparseCounter = self._new_counter()
        self._label: str | None = None
        self._parts: dict[str | None, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._lengths = np.zeros(2, np.int64)
        self._presence = PresenceSampler(num_rows, presence_samples)

    def _new_counter(self) -> _DenseCounter | SparseCounter:
        return _DenseCounter(self._num_rows) if self._dense else SparseCounter()

    def add(self, lookups: Sequence[Lookups], bucket: str | None = None) -> None:
        """Count one batch.

        Args:
            lookups: the bags of every feature of the table, all of the same samples.
            bucket: label of the time bucket. Buckets should come one after the other: each change
                of the label costs a pass over the table's dense counter.

        Raises:
            InvalidInputError: an id out of range, lengths that do not add up to the ids, ids that
                are not integers, or features with different numbers of samples. This table
                has counted nothing of the batch then.
        """
        for part in lookups:
            self._check(part, lookups[0].num_samples)
        if bucket != self._label:
            self._end_bucket()
            self._label = bucket
        for part in lookups:
            self._counter.add(part.ids)
            self._add_lengths(part)
        if lookups:
            self._presence.add(lookups)

    def _check(self, part: Lookups, num_samples: int) -> None:
        what = f"cannot count lookups of table {self._name!r}"
        ids, lengths = part.ids, part.lengths
        size = ids.size
        for name, array in (("ids", ids), ("lengths", lengths)):
            if array is not None and (array.ndim != 1 or array.dtype.kind not in "iu"):
                raise InvalidInputError(
                    fail(what, name, (array.dtype.name, array.shape), "a flat integer array",
                         "convert it"))
        if part.num_samples != num_samples:
            raise InvalidInputError(
                fail(what, "num_samples", (num_samples, part.num_samples),
                     "the same samples for every feature of a table", "pass one batch at a time"))
        if lengths is not None and (
                int(lengths.sum()) != size or (lengths.size and lengths.min() < 0)):
            raise InvalidInputError(
                fail(what, "sum(lengths)", int(lengths.sum()), f"len(ids)={size}, none negative",
                     "pass lengths, not offsets"))
        if size and (ids.min() < 0 or ids.max() >= self._num_rows):
            bad = ids[(ids < 0) | (ids >= self._num_rows)]
            raise InvalidInputError(
                fail(what, "id", int(bad[0]), f"0 <= id < num_rows={self._num_rows}",
                     f"{bad.size} ids of this batch are out of range: remap them or enlarge the "
                     f"table"))

    def _add_lengths(self, part: Lookups) -> None:
        if part.lengths is None:
            self._lengths[1] += part.ids.size
            return
        counts = np.bincount(part.lengths, minlength=self._lengths.size)
        if counts.size > self._lengths.size:
            self._lengths = np.pad(self._lengths, (0, counts.size - self._lengths.size))
        self._lengths += counts

    def _end_bucket(self) -> None:
        ids, counts = self._counter.result()
        if not self._dense:
            self._counter = self._new_counter()
        if ids.size:
            self._parts.setdefault(self._label, []).append((ids, counts))

    def finish(self) -> TableStats:
        """The statistics of everything counted; the counter must not be used afterwards."""
        self._end_bucket()
        merged = {label: merge_counts(parts) for label, parts in self._parts.items()}
        buckets = tuple(TimeBucket(label, ids.astype(np.int64), counts)
                        for label, (ids, counts) in merged.items() if label is not None)
        ids, counts = self._total(list(merged.values()))
        values = np.flatnonzero(self._lengths)
        return TableStats.from_counts(
            self._num_rows, ids, counts, (values, self._lengths[values]),
            self._presence.result(), buckets)

    def _total(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        if not parts:
            return _EMPTY, _EMPTY
        if len(parts) == 1 or not self._dense:
            return merge_counts(parts)
        total = np.zeros(self._num_rows, np.int64)
        for ids, counts in parts:
            total[ids] += counts  # ids of one part are distinct
        ids = np.flatnonzero(total != 0)
        return ids, total[ids]
