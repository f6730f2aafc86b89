"""Counts of one table's lookups, by row or by raw key: exact counts, bag lengths, presence and time
buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.analysis.presence import PRESENCE_SAMPLES, Lookups, PresenceSampler
from oper.analysis.sketch import (
    CountTable,
    DistinctSample,
    HeavyHitters,
    sketched_histogram,
    sketched_stats,
)
from oper.errors import InvalidInputError, require_fields
from oper.ranges import Count, rules_of
from oper.stats import TableStats, TimeBucket
from oper.support.counts import merge_counts

_BUCKET_ENTRIES = 1 << 16  # number of hottest ids retained per time bucket with inexact counts
_UINT32_MAX = 2**32 - 1
_EMPTY = np.zeros(0, np.int64)
_HASH_BITS = 40  # bits of hashed keys for presence, which are packed with a sample's index
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class CountOptions:
    """Memory and time limits of counting.

    Attributes:
        presence_samples: window sizes n, in samples, at which presence is measured.
        dense_budget_bytes: memory for dense counters (4 bytes per row) of all tables. Tables that
            do not fit are counted by sorting, which is also exact, but several times slower.
        sparse_budget_bytes: memory of one such table's counts (11 to 21 bytes per touched row,
            twice that if ids or accesses exceed 32 bits), and up to one and a half times as much
            again while new counts are merged. Beyond it, heavy hitters are kept with a bounded
            error, and the tail is estimated from a sample of its rows (see
            `oper.analysis.sketch`).
        max_overhead: share of the time that a live `Collector` may take, e.g. 0.02; it skips
            batches that would exceed this share, and presence windows join the batches before and
            after. None = count every batch.
    """

    presence_samples: tuple[int, ...] = PRESENCE_SAMPLES
    dense_budget_bytes: Count = 2 << 30
    sparse_budget_bytes: Count = 1 << 28
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        require_fields(
            self, "cannot count lookups", "correct this argument of CountOptions", *rules_of(self),
            ("max_overhead", self.max_overhead is None or 0 < self.max_overhead <= 1,
             "a share above 0 and at most 1, or None"))

    def dense_tables(self, num_rows: Sequence[int]) -> list[bool]:
        """Return whether each table gets a dense counter: the smallest ones, within the budget."""
        result, left = [False] * len(num_rows), self.dense_budget_bytes
        for k in sorted(range(len(num_rows)), key=lambda k: num_rows[k]):
            left -= 4 * num_rows[k]
            if left < 0:
                break
            result[k] = True
        return result

    def counters(self, names: Sequence[str], num_rows: Sequence[int]) -> list[TableCounter]:
        """Create one counter per table."""
        return [TableCounter(name, rows, dense, self.presence_samples, self.sparse_budget_bytes)
                for name, rows, dense in zip(names, num_rows, self.dense_tables(num_rows),
                                             strict=True)]


class AdaptiveCounter:
    """Counts ids exactly while the distinct ids fit a memory budget, and with sketches after
    that."""

    def __init__(self, budget_bytes: int) -> None:
        """Start with exact counts in a table of at most `budget_bytes` bytes."""
        self._counted = CountTable(budget_bytes)
        self.is_exact = True  # whether all counts are exact, that is, no sketch is used yet
        self.num_accesses = 0
        self.heavy, self.sample = HeavyHitters(), DistinctSample()

    @property
    def num_ids(self) -> int:
        """Number of distinct ids so far; an estimate once sketches are used."""
        if self.is_exact:
            return self._counted.num_ids
        return self.sample.result()[0].size << self.sample.level

    def add(self, ids: np.ndarray) -> None:
        """Count `ids`, non-negative integers [N]."""
        self.num_accesses += ids.size
        self._add(ids.astype(np.int64, copy=False), None)

    def _add(self, ids: np.ndarray, counts: np.ndarray | None) -> None:
        if self.is_exact:
            taken = self._counted.add(ids, counts)
            if taken == ids.size:
                return
            self._end_exact()
            ids, counts = ids[taken:], None if counts is None else counts[taken:]
        self.sample.add(ids, counts)
        self.heavy.add(ids, counts)

    def _end_exact(self) -> None:
        """Switch to sketches: the table keeps the heavy hitters and yields the sample."""
        if not self.is_exact:
            return
        self.is_exact = False
        level = max(0, (self._counted.num_ids // max(1, self.sample.num_entries)).bit_length() - 1)
        self.sample.level = max(level, self.sample.level)
        self.sample.add(*self._counted.sample(self.sample.level))
        self.heavy.count_in(self._counted)
        self._counted = CountTable(0)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids in ascending order and their counts, int64 [K] each: all ids and exact counts,
        or heavy hitters and lower bounds of their counts."""
        return self._counted.result() if self.is_exact else self.heavy.result()

    def merge(self, other: AdaptiveCounter) -> None:
        """Add another counter's counts; `other` must not be used afterwards."""
        self.num_accesses += other.num_accesses
        if other.is_exact:
            self._add(*other._counted.result())
            return
        for counter in (self, other):
            counter._end_exact()
        self.heavy.merge(other.heavy)
        self.sample.merge(other.sample)


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
        ids = np.flatnonzero(self._counts != 0)  # several times faster on bool than on uint32
        counts = self._counts[ids].astype(np.int64)
        self._counts[:] = 0
        self._total = 0
        return ids, counts

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the touched ids, ascending, and their counts; resets the counter."""
        return merge_counts([*self._spilled, self._take()])


class LengthCounter:
    """Counts bags by length."""

    def __init__(self) -> None:
        self._counts = np.zeros(2, np.int64)

    def add(self, part: Lookups) -> None:
        if part.lengths is None:
            self._counts[1] += part.ids.size
            return
        counts = np.bincount(part.lengths, minlength=self._counts.size)
        if counts.size > self._counts.size:
            self._counts = np.pad(self._counts, (0, counts.size - self._counts.size))
        self._counts += counts

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bag lengths, ascending, and the number of bags of each; int64 [P] each."""
        values = np.flatnonzero(self._counts)
        return values, self._counts[values]


class TableCounter:
    """Counts the lookups of one table batch by batch, for `TableStats`."""

    def __init__(self, name: str, num_rows: int, dense: bool = True,
                 presence_samples: Sequence[int] = PRESENCE_SAMPLES,
                 sparse_budget_bytes: int = 1 << 28) -> None:
        """Start a count.

        Args:
            name: the table's name, for error messages.
            num_rows: number of rows of the table; ids must be smaller.
            dense: use 4 bytes per row (fast) instead of memory proportional to the touched rows.
            presence_samples: window sizes at which presence is measured.
            sparse_budget_bytes: memory limit of a counter that is not dense; beyond it the counter
                uses sketches.
        """
        self._name, self._num_rows, self._dense = name, num_rows, dense
        self._budget = sparse_budget_bytes
        self._counter: _DenseCounter | AdaptiveCounter = self._new_counter()
        self._whole: AdaptiveCounter | None = None
        self._label: str | None = None
        self._parts: dict[str | None, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._lengths = LengthCounter()
        self._presence = PresenceSampler(num_rows, presence_samples)

    def _new_counter(self) -> _DenseCounter | AdaptiveCounter:
        return _DenseCounter(self._num_rows) if self._dense else AdaptiveCounter(self._budget)

    def add(self, lookups: Sequence[Lookups], bucket: str | None = None) -> None:
        """Count one batch.

        Args:
            lookups: the bags of every feature of the table, with the same samples in the same
                order.
            bucket: label of the time bucket. Batches of a bucket should be consecutive: each change
                of the label costs a pass over the table's dense counter.

        Raises:
            InvalidInputError: an id is out of range, the lengths do not add up to the ids, ids are
                not integers, or features differ in their numbers of samples. The counts are then
                unchanged.
        """
        for part in lookups:
            self._check(part, lookups[0].num_samples)
        if bucket != self._label:
            self._end_bucket()
            self._label = bucket
        for part in lookups:
            self._counter.add(part.ids)
            self._lengths.add(part)
        if lookups:
            self._presence.add(lookups)

    def _check(self, part: Lookups, num_samples: int) -> None:
        what = f"cannot count lookups of table {self._name!r}"
        ids, lengths = part.ids, part.lengths
        size = ids.size
        for name, array in (("ids", ids), ("lengths", lengths)):
            if array is not None and (array.ndim != 1 or array.dtype.kind not in "iu"):
                raise InvalidInputError(what, name, (array.dtype.name, array.shape),
                                        "a 1-d integer array", f"convert {name} to such an array")
        if part.num_samples != num_samples:
            raise InvalidInputError(what, "num_samples", (num_samples, part.num_samples),
                                    "equal for all features of a table",
                                    "pass the same samples for every feature")
        if lengths is not None and (
                int(lengths.sum()) != size or (lengths.size and lengths.min() < 0)):
            raise InvalidInputError(what, "sum(lengths), min(lengths)",
                                    (int(lengths.sum()), int(lengths.min(initial=0))),
                                    f"len(ids)={size} and >= 0", "pass lengths, not offsets")
        if size and (ids.min() < 0 or ids.max() >= self._num_rows):
            bad = ids[(ids < 0) | (ids >= self._num_rows)]
            raise InvalidInputError(
                what, "id", int(bad[0]), f"0 <= id < num_rows={self._num_rows}",
                f"{bad.size} ids of this batch are out of range: remap them or enlarge the table")

    def _end_bucket(self) -> None:
        counter = self._counter
        ids, counts = counter.result()
        if isinstance(counter, AdaptiveCounter):
            if self._label is not None and not counter.is_exact:
                ids, counts = _hottest(ids, counts)
            self._counter = self._new_counter()
            if self._whole is None:
                self._whole = counter
            else:
                self._whole.merge(counter)
        if ids.size and (self._dense or self._label is not None):
            self._parts.setdefault(self._label, []).append((ids, counts))

    def finish(self) -> TableStats:
        """Return the statistics of all batches; the counter must not be used afterwards."""
        self._end_bucket()
        merged = {label: merge_counts(parts) for label, parts in self._parts.items()}
        buckets = tuple(TimeBucket(label, ids.astype(np.int64), counts)
                        for label, (ids, counts) in merged.items() if label is not None)
        lengths = self._lengths.result()
        whole = self._whole
        if whole is not None and not whole.is_exact:
            return sketched_stats(self._num_rows, whole.heavy, whole.sample, whole.num_accesses,
                                  lengths, self._presence.result(), buckets)
        ids, counts = whole.result() if whole is not None else self._total(list(merged.values()))
        return TableStats.from_counts(self._num_rows, ids, counts, lengths,
                                      self._presence.result(), buckets)

    def _total(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        if not parts:
            return _EMPTY, _EMPTY
        if len(parts) == 1:
            return parts[0]
        total = np.zeros(self._num_rows, np.int64)
        for ids, counts in parts:
            total[ids] += counts  # ids of one part are distinct
        ids = np.flatnonzero(total != 0)
        return ids, total[ids]


def _hottest(ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the `_BUCKET_ENTRIES` ids with the largest counts, ascending, and their counts."""
    if ids.size <= _BUCKET_ENTRIES:
        return ids, counts
    keep = np.sort(np.argpartition(counts, ids.size - _BUCKET_ENTRIES)[-_BUCKET_ENTRIES:])
    return ids[keep], counts[keep]


class KeyCounter:
    """Counts the lookups of one column of raw keys batch by batch, for `TableStats`.

    The statistics cannot be merged, and have no head, since it is unknown which row a key will get.
    They contain a histogram of access counts (exact up to a memory budget, beyond it from heavy
    hitters and a sampled tail), bag lengths, presence, and the number of new keys in each time
    bucket. `oper.rows.capacity` predicts from them how large a dynamic table must be.
    """

    def __init__(self, presence_samples: Sequence[int] = PRESENCE_SAMPLES,
                 budget_bytes: int = 1 << 28) -> None:
        """Start a count; once the distinct keys take more than `budget_bytes`, sketches are
        used."""
        self._counter = AdaptiveCounter(budget_bytes)
        self._lengths = LengthCounter()
        self._presence = PresenceSampler(1 << _HASH_BITS, presence_samples)
        self._label: str | None = None
        self._known = 0  # number of distinct keys up to the end of the last bucket
        self._new: list[int] = []

    def add(self, lookups: Sequence[Lookups], bucket: str | None = None) -> None:
        """Count one batch.

        Args:
            lookups: the bags of keys (int64) of every feature of the table, with the same samples.
            bucket: label of the time bucket; batches of a bucket must be consecutive.
        """
        if bucket != self._label:
            self._end_bucket()
            self._label = bucket
        hashed = []
        for part in lookups:
            # Keys may be any 64 bits, but counters need numbers >= 0, and the sampler packs keys
            # with samples. So keys are hashed: the upper bits of the product distinguish them.
            hashes = part.ids.astype(np.int64).view(np.uint64) * _MULTIPLIER
            self._counter.add((hashes >> np.uint64(1)).view(np.int64))
            self._lengths.add(part)
            hashed.append(Lookups((hashes >> np.uint64(64 - _HASH_BITS)).view(np.int64),
                                  part.lengths))
        if hashed:
            self._presence.add(hashed)

    def _end_bucket(self) -> None:
        if self._label is None:
            return
        before, self._known = self._known, max(self._known, self._counter.num_ids)
        self._new.append(self._known - before)

    def finish(self) -> TableStats:
        """Return the statistics of all batches; the counter must not be used afterwards."""
        self._end_bucket()
        counter = self._counter
        _, counts = counter.result()
        if counter.is_exact:
            found = np.unique(counts, return_counts=True)
            values, rows = found[0], found[1].astype(np.int64)
        else:
            values, rows = sketched_histogram(counter.heavy, counter.sample, counter.num_accesses)
        if not values.size:
            values, rows = np.zeros(1, np.int64), np.ones(1, np.int64)
        samples, means, windows = self._presence.result()
        lengths, bags = self._lengths.result()
        return TableStats(
            int(rows.sum()), tail_values=values, tail_num_rows=rows, length_values=lengths,
            length_counts=bags, presence_samples=samples, presence_rows=means,
            presence_windows=windows, new_ids=np.array(self._new, np.int64))
