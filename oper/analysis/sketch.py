"""Counting in bounded memory: exact counts while ids fit a table, then heavy hitters with
bounded error, and a tail from a sample of ids.

Heavy hitters are those of Misra and Gries ("Finding repeated elements", 1982), taken batch by
batch; such summaries can be merged with the same error bound (Agarwal et al., "Mergeable
summaries", 2012). The tail comes from a distinct sample (Gibbons, "Distinct sampling for
highly-accurate answers", 2001): exact counts of the ids whose hash is below a threshold, which is
halved if there are too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import InvalidInputError
from oper.rows.remap import Remap
from oper.stats import AccessStats, Sketch, TableStats, TimeBucket, hotness_order
from oper.support.counts import Counts, merge_counts, sum_counts
from oper.support.numeric import mix64

HEAVY_ENTRIES = 1 << 20   # ids in a heavy-hitter summary
SAMPLE_ENTRIES = 1 << 18  # ids in a distinct sample
_MAX_RELATIVE_ERROR = 0.1
_MAX_LEVEL = 63
_NARROW = 1 << 32  # ids and counts have 4 bytes each while ids and accesses are below
_LEAST_ENTRIES = 1 << 12  # a table with memory for fewer takes no ids
_MANY = 1 << 18    # ids in later runs that are not yet worth a merge
_STEP = 64         # ids that a table takes together when it is almost full
_HASHED = 1 << 16  # ids that are hashed at once, which stay in the processor's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sampled(ids: np.ndarray, level: int) -> np.ndarray:
    """Return ascending indices of `ids`, int64 [K], whose 64-bit hash begins with `level` zeros.

    The hash is the finalizer of splitmix64, so about 2^-level of all ids are selected.
    """
    if level == 0:
        return np.arange(ids.size)
    places = [np.zeros(0, np.int64)]
    for start in range(0, ids.size, _HASHED):
        hashes = mix64(ids[start:start + _HASHED].astype(np.uint64) + _GOLDEN)
        places.append(start + np.flatnonzero(hashes >> np.uint64(64 - level) == 0))
    return np.concatenate(places)


def _counted(ids: np.ndarray, counts: np.ndarray | None) -> Counts:
    """Count ids [N], each `counts[k]` times (None = once); results have the ids' dtype."""
    if counts is not None:
        return sum_counts(ids, counts)
    distinct, times = np.unique(ids, return_counts=True)
    return distinct, times.astype(ids.dtype)


def _find(known: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of the ascending `ids` its place in the ascending `known`, and whether it is
    there."""
    at = np.searchsorted(known, ids)
    return at, known.take(at, mode="clip") == ids if known.size else np.zeros(ids.size, bool)


def _capacity(max_bytes: int, kind: np.dtype[Any]) -> int:
    """Return the largest number of ids in a `CountTable`: three quarters of the power of two that
    the memory has entries for."""
    entries = max_bytes // (2 * kind.itemsize)
    return 3 << entries.bit_length() - 3 if entries >= _LEAST_ENTRIES else 0


class CountTable:
    """Counts of non-negative ids, as sorted runs of ids and their counts.

    All runs are merged into the first one when the others have an eighth of its length. An id takes
    8 bytes, or 16 once ids or accesses exceed 32 bits. `purge` makes space by the method of Misra
    and Gries ("Finding repeated elements", 1982), applied to many ids at a time (Anderson et al.,
    "A high-performance algorithm for identifying frequent items in data streams", 2017).

    Attributes:
        max_bytes: memory limit; a merge takes up to one and a half times as much again.
        error: upper limit of the amount that `purge` has subtracted from any count.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.error = 0
        self._num_accesses = 0
        self._kind: np.dtype[Any] = np.dtype(np.uint32)  # dtype of ids and counts
        self._runs: list[Counts] = []
        self._num_entries = 0  # ids in all runs

    @property
    def num_ids(self) -> int:
        """Number of ids that have a count."""
        return self._merged()[0].size

    def _merged(self) -> Counts:
        """Merge all runs into the first one and return it."""
        if not self._runs:
            return np.zeros(0, self._kind), np.zeros(0, self._kind)
        known, sums = self._runs[0]
        if len(self._runs) > 1:
            ids, counts = merge_counts(self._runs[1:])
            at, is_known = _find(known, ids)
            sums[at[is_known]] += counts[is_known]
            known = np.insert(known, at[~is_known], ids[~is_known])
            sums = np.insert(sums, at[~is_known], counts[~is_known])
            self._runs, self._num_entries = [(known, sums)], known.size
        return known, sums

    def add(self, ids: np.ndarray, counts: np.ndarray | None = None) -> int:
        """Add 1, or `counts[k]`, to the count of every `ids[k]`; both arguments integers [N].

        Returns the number of ids that were counted; the table has no space for the rest of `ids`.
        """
        if not ids.size:
            return 0
        num = self._num_accesses + (ids.size if counts is None else int(counts.sum()))
        if (num >= _NARROW or int(ids.max()) >= _NARROW) and not self._widen():
            return 0
        self._num_accesses = num
        ids = ids.astype(self._kind, copy=False)
        counts = None if counts is None else counts.astype(self._kind, copy=False)
        taken, run = ids.size, _counted(ids, counts)
        if self._num_entries + run[0].size + _STEP > _capacity(self.max_bytes, self._kind):
            taken = self._fitting(ids)
            run = _counted(ids[:taken], None if counts is None else counts[:taken])
        if taken:
            self._runs.append(run)
            self._num_entries += run[0].size
            known = self._runs[0][0].size
            if self._num_entries - known > max(_MANY, known // 8):
                self._merged()
        return taken

    def _widen(self) -> bool:
        """Switch to 64-bit ids and counts if the ids then still fit the memory limit; returns
        success."""
        wide = np.dtype(np.int64)
        if self._kind != wide:
            if self.num_ids > _capacity(self.max_bytes, wide):
                return False
            self._runs = [(ids.astype(wide), counts.astype(wide)) for ids, counts in self._runs]
            self._kind = wide
        return True

    def _fitting(self, ids: np.ndarray) -> int:
        """Return how many leading `ids` fit: steps of `_STEP` ids while all of a step could be new.
        """
        known = self._merged()[0]
        distinct, first = np.unique(ids, return_index=True)
        new = np.sort(first[~_find(known, distinct)[1]])
        starts = np.arange(0, ids.size, _STEP)
        most = known.size + np.searchsorted(new, starts) + np.minimum(_STEP, ids.size - starts)
        full = starts[most > _capacity(self.max_bytes, self._kind)]
        return int(full[0]) if full.size else ids.size

    def purge(self, num_ids: int) -> None:
        """Reduce all counts by the same number and drop ids at 0, until at most `num_ids` remain.

        The number is added to `error`. More than `num_ids` counts were at least that large, so
        `error` stays below (ids counted) / `num_ids`.
        """
        ids, counts = self._merged()
        if ids.size > num_ids:
            at = ids.size - num_ids - 1
            level = np.partition(counts, at)[at]
            keep = counts > level
            self._runs = [(ids[keep], counts[keep] - level)]
            self._num_entries = int(np.count_nonzero(keep))
            self.error += int(level)

    def sample(self, level: int) -> Counts:
        """Return the ids whose hash has `level` leading zeros (see `sampled`), and their counts, as
        `result` does."""
        ids, counts = self._merged()
        if level:
            keep = sampled(ids, level)
            ids, counts = ids[keep], counts[keep]
        return ids.astype(np.int64), counts.astype(np.int64)

    def result(self) -> Counts:
        """Return ids, ascending, and counts, int64 [K] each; true - error <= count <= true."""
        return self.sample(0)


class HeavyHitters:
    """A Misra-Gries summary: true count - error <= count <= true count.

    Ids with a true count above `error` are always in it. `error` is at most (number of ids) /
    `num_entries`, and much smaller for skewed ids.
    """

    def __init__(self, num_entries: int = HEAVY_ENTRIES) -> None:
        """Start an empty summary of at most `num_entries` ids."""
        self.num_entries = num_entries
        self._least_bytes = max(64 * num_entries, 1 << 17)  # holds more ids than there are entries
        self.count_in(CountTable(0))

    def count_in(self, counted: CountTable) -> None:
        """Count in the table `counted`, which may have counts already, until `result` is called."""
        counted.max_bytes = max(counted.max_bytes, self._least_bytes)
        self.counted = counted
        self._result: Counts | None = None  # the counts, once `result` has taken them out

    @property
    def error(self) -> int:
        """Upper limit of what was subtracted from any count."""
        return self.counted.error

    def add(self, ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Add 1, or `counts[k]`, to the count of every `ids[k]` >= 0; both arguments integers [K].
        """
        if self._result is not None:
            self.counted.add(*self._result)
            self._result = None
        taken = self.counted.add(ids, counts)
        while taken < ids.size:
            self.counted.purge(max(self.num_entries, self.counted.num_ids // 2))
            ids, counts = ids[taken:], None if counts is None else counts[taken:]
            taken = self.counted.add(ids, counts)

    def result(self) -> Counts:
        """Return at most `num_entries` ids, ascending, and their counts; int64 [M] each."""
        if self._result is None:
            self.counted.purge(self.num_entries)
            found, error = self.counted.result(), self.counted.error
            self.count_in(CountTable(0))  # releases memory that these ids do not need
            self.counted.error, self._result = error, found
        return self._result

    def merge(self, other: HeavyHitters) -> None:
        """Add another summary; the errors add up."""
        self.add(*other.result())
        self.counted.error += other.error


class DistinctSample:
    """Exact counts of the ids whose hash has at least `level` leading zero bits, about 2^-level of
    all ids."""

    def __init__(self, num_entries: int = SAMPLE_ENTRIES) -> None:
        """Start a sample of at most `num_entries` ids."""
        self.num_entries, self.level, self._counted = num_entries, 0, CountTable(0)
        self._thin(0)

    def _thin(self, level: int) -> None:
        """Keep only the ids whose hash has at least `level` leading zero bits."""
        kept = self._counted.sample(level)
        self.level, self._counted = level, CountTable(max(64 * self.num_entries, 1 << 17))
        self._counted.add(*kept)

    def add(self, ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Add 1, or `counts[k]`, to the count of every `ids[k]` >= 0; both arguments integers [K].
        """
        while ids.size:
            keep = sampled(ids, self.level)
            ids, counts = ids[keep], None if counts is None else counts[keep]
            taken = self._counted.add(ids, counts)
            ids, counts = ids[taken:], None if counts is None else counts[taken:]
            while self._counted.num_ids > self.num_entries and self.level < _MAX_LEVEL:
                self._thin(self.level + 1)

    def result(self) -> Counts:
        """Return the ids, ascending, and their counts; int64 [M] each."""
        return self._counted.result()

    def merge(self, other: DistinctSample) -> None:
        """Add another sample."""
        if other.level > self.level:
            self._thin(other.level)
        self.add(*other.result())


def sketched_stats(
    num_rows: int,
    heavy: HeavyHitters,
    sample: DistinctSample,
    num_accesses: int,
    lengths: tuple[np.ndarray, np.ndarray],
    presence: tuple[np.ndarray, np.ndarray, np.ndarray],
    buckets: tuple[TimeBucket, ...] = (),
) -> TableStats:
    """Make statistics from sketches.

    The head contains the ids whose error is at most a tenth of their count; half of the error is
    added to each count. All other rows are in the tail's histogram: that of the sampled ids outside
    the head, each of which represents 2^level rows, scaled so that head and tail contain all
    accesses.

    Args:
        num_rows: number of rows of the table.
        heavy, sample: the two sketches, each of all ids.
        num_accesses: number of ids counted.
        lengths: bag lengths and the number of bags of each.
        presence: window sizes, mean distinct rows and number of windows, see
            `PresenceSampler.result`.
        buckets: time buckets.
    """
    ids, counts = _head(heavy, num_accesses)
    order = hotness_order(ids, counts)
    kept = Sketch(*heavy.result(), heavy.error, *sample.result(), sample.level)
    values, rows = _tail(ids, sample, num_accesses - int(counts.sum()), num_rows - ids.size)
    return TableStats(num_rows, ids[order], counts[order], values, rows, lengths[0], lengths[1],
                      *presence, buckets, kept)


def sketched_histogram(heavy: HeavyHitters, sample: DistinctSample, num_accesses: int
                       ) -> tuple[np.ndarray, np.ndarray]:
    """Return access counts, ascending, and the number of ids with each; int64 [K] each.

    They are estimated as in `sketched_stats`, but no table limits the number of ids.
    """
    ids, counts = _head(heavy, num_accesses)
    num_sampled = sample.result()[0].size
    num_ids = max(num_sampled << sample.level, ids.size)
    values, rows = _tail(ids, sample, num_accesses - int(counts.sum()), num_ids - ids.size)
    hot, num_hot = np.unique(counts, return_counts=True)
    values, rows = merge_counts([(hot, num_hot.astype(np.int64)), (values, rows)])
    return values[values > 0], rows[values > 0]


def _head(heavy: HeavyHitters, num_accesses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, ascending, and counts whose error is at most a tenth of the count; int64 [H]
    each."""
    ids, counts = heavy.result()
    sure = counts * _MAX_RELATIVE_ERROR >= heavy.error
    ids, counts = ids[sure], counts[sure] + heavy.error // 2
    over = int(counts.sum()) - num_accesses
    if over > 0:  # the added halves of the error were too much
        counts = np.maximum(1, counts - -(-over // max(1, ids.size)))
    return ids, counts


def _tail(head: np.ndarray, sample: DistinctSample, num_accesses: int, num_rows: int
          ) -> tuple[np.ndarray, np.ndarray]:
    """Return a histogram of `num_rows` rows with `num_accesses` accesses, shaped like the sampled
    counts of ids outside `head`; all rows are equally cold if the sample has no such ids."""
    ids, counts = sample.result()
    values, found = np.unique(counts[~np.isin(ids, head, assume_unique=True)], return_counts=True)
    rows: np.ndarray = found.astype(np.float64) * 2.0**sample.level
    if not values.size and num_accesses and num_rows:
        values = np.array([-(-num_accesses // num_rows)])
        rows = np.ones(1)
    if values.size and num_accesses > 0:
        mass = np.cumsum(values * rows)
        # Small counts have many sampled rows and are accurate; large counts absorb the difference.
        upper = mass > mass[-1] / 2
        lower = float(mass[~upper][-1]) if not upper.all() else 0.0
        if lower < num_accesses:
            rows[upper] *= (num_accesses - lower) / (mass[-1] - lower)
        else:
            rows *= num_accesses / mass[-1]
        if rows.sum() > num_rows:
            rows *= num_rows / rows.sum()
    values, found = whole_rows(values, rows if num_accesses > 0 else 0 * rows, num_accesses,
                               num_rows)
    values, inverse = np.unique(np.append(values, 0), return_inverse=True)
    total = np.bincount(inverse, np.append(found, 0), minlength=values.size).astype(np.int64)
    total[0] += num_rows - int(total.sum())
    keep = total > 0
    return values[keep], total[keep]


def whole_rows(values: np.ndarray, rows: np.ndarray, num_accesses: int, num_rows: int
               ) -> tuple[np.ndarray, np.ndarray]:
    """Round a histogram with fractional numbers of rows to whole rows and `num_accesses` accesses.

    Args:
        values: int64 [K], access counts.
        rows: float64 [K], rows of each; ``values @ rows`` is at most about `num_accesses`.
        num_accesses: accesses of all rows of the result.
        num_rows: upper limit of rows of the result; accesses that remain after rounding down are
            given to additional rows, if the limit allows any.

    Returns:
        Ascending counts int64 [M] and numbers of rows int64 [M], all >= 1.
    """
    found = np.floor(rows + 1e-9).astype(np.int64)
    rest, spare = num_accesses - int(values @ found), num_rows - int(found.sum())
    if rest > 0 and spare > 0:
        more = min(spare, rest)
        each, extra = divmod(rest, more)
        values = np.append(values, [each, each + 1])
        found = np.append(found, [more - extra, extra])
    unique, inverse = np.unique(values, return_inverse=True)
    total = np.bincount(inverse, found, minlength=unique.size).astype(np.int64)
    return unique[total > 0], total[total > 0]


def merge_stats(parts: Iterable[AccessStats], grown: bool = False) -> AccessStats:
    """Merge the statistics of several parts, exact or sketched.

    A table whose parts are all exact stays exact. Otherwise exact parts are converted to sketches,
    and sketches are merged: errors add up and stay within (ids counted) / `HEAVY_ENTRIES`. Only the
    order of time buckets depends on the order of the parts.

    Args:
        parts: statistics of days, files or workers.
        grown: allow tables to have more rows in some parts than in others, appended at the end, as
            after ``oper vocabulary extend``; equal row numbers must mean equal values.

    Raises:
        InvalidInputError: there are no parts, they are of different tables or vocabularies, or a
            table has no counts of single rows in its tail (for example from published counts).
    """
    ready: list[tuple[int, AccessStats]] = []  # by decreasing size, so that few are in memory
    for part in parts:
        size, whole = 1, part
        while ready and ready[-1][0] == size:
            size, whole = 2 * size, _merge_two(ready.pop()[1], whole, grown)
        ready.append((size, whole))
    if not ready:
        raise InvalidInputError("cannot merge statistics", "parts", 0, "at least one",
                                "pass the statistics of at least one part")
    while len(ready) > 1:
        (_, one), (_, other) = ready[-2:]
        ready[-2:] = [(0, _merge_two(one, other, grown))]
    return ready[0][1]


def renumber_stats(stats: AccessStats, remap: Remap) -> AccessStats:
    """Return statistics under the row numbers that ``oper vocabulary extend --reorder`` assigned.

    Tables that have grown since they were counted get their new rows first. See `oper.rows.remap`.

    Raises:
        InvalidInputError: the re-map is of other tables, or a table was not counted exactly.
    """
    if set(stats.tables) != set(remap):
        raise InvalidInputError(
            "cannot renumber statistics", "tables", sorted(stats.tables), str(sorted(remap)),
            "pass the re-map of the vocabulary that these tables' logs were read with")
    tables = {n: t.grown(remap[n].size).renumbered(remap[n]) for n, t in stats.tables.items()}
    hot = [t.head_ids[t.head_ids > 0] for t in tables.values()]
    return replace(stats, tables=tables, numbering="", ids_in_hotness_order=all(
        np.array_equal(ids, np.arange(1, ids.size + 1)) for ids in hot))


def _merge_two(one: AccessStats, other: AccessStats, grown: bool) -> AccessStats:
    if grown and set(one.tables) == set(other.tables):
        rows = {n: max(t.num_rows, other.tables[n].num_rows) for n, t in one.tables.items()}
        one, other = (replace(
            s, tables={n: t.grown(rows[n]) for n, t in s.tables.items()},
            ids_in_hotness_order=s.ids_in_hotness_order and all(
                t.num_rows == rows[n] for n, t in s.tables.items())) for s in (one, other))
    return one.merge(other, _merge_tables)


def _merge_tables(name: str, one: TableStats, other: TableStats) -> TableStats:
    if one.is_exact and other.is_exact:
        return one.merge(other)
    if one.num_rows != other.num_rows:
        raise InvalidInputError(f"cannot merge statistics of table {name!r}", "num_rows",
                                (one.num_rows, other.num_rows), "equal numbers of rows",
                                "count both with the same vocabulary, or merge them as grown")
    (heavy, sample), (more, others) = (_sketches(name, t) for t in (one, other))
    heavy.merge(more)
    sample.merge(others)
    lengths, presence, buckets = one.merge_bags(other)
    return sketched_stats(one.num_rows, heavy, sample, one.num_accesses + other.num_accesses,
                          lengths, presence, buckets)


def _sketches(name: str, table: TableStats) -> tuple[HeavyHitters, DistinctSample]:
    heavy, sample = HeavyHitters(), DistinctSample()
    if table.is_exact:
        order = np.argsort(table.head_ids)
        ids, counts = table.head_ids[order], table.head_counts[order]
        heavy.add(ids, counts)
        sample.add(ids, counts)
        return heavy, sample
    kept = table.sketch
    if table.new_ids.size:
        raise InvalidInputError(f"cannot merge statistics of table {name!r}", "ids", "raw keys",
                                "row numbers of a vocabulary",
                                "count the days as one log: statistics of keys do not contain "
                                "the keys")
    if kept is None:
        raise InvalidInputError(f"cannot merge statistics of table {name!r}", "tail", "modelled",
                                "exact counts, or sketches made by counting",
                                "merge the statistics from which this table's were made")
    heavy.counted.error, sample.level = kept.heavy_error, kept.sample_level
    heavy.add(kept.heavy_ids, kept.heavy_counts)
    sample.add(kept.sample_ids, kept.sample_counts)
    return heavy, sample
