"""Counting in bounded memory: exact counts while ids fit a hash table, then heavy hitters with
bounded error, and a tail from a sample of ids.

Heavy hitters are those of Misra and Gries ("Finding repeated elements", 1982), taken batch by
batch; such summaries can be merged with the same error bound (Agarwal et al., "Mergeable
summaries", 2012). The tail comes from a distinct sample (Gibbons, "Distinct sampling for
highly-accurate answers", 2001): exact counts of the ids whose hash is below a threshold, which is
halved if there are too many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from oper.errors import InvalidInputError
from oper.rows.remap import Remap
from oper.stats import AccessStats, Sketch, TableStats, TimeBucket, hotness_order
from oper.support.native import Counts, address, library, merge_counts, sampled

HEAVY_ENTRIES = 1 << 20   # ids in a heavy-hitter summary
SAMPLE_ENTRIES = 1 << 18  # ids in a distinct sample
_MAX_RELATIVE_ERROR = 0.1
_MAX_LEVEL = 63
_FEW = 1 << 12  # counts below are distinguished when a table is purged
_FIRST_BITS = 12
_NARROW = 1 << 32  # slots have 8 bytes while ids and accesses are below
_EMPTY = np.zeros(0, np.int64)


class CountTable:
    """Counts of non-negative ids in one hash table.

    Open addressing, with at most three quarters of the slots used. A slot has 8 bytes, or 16 once
    ids or accesses exceed 32 bits. `purge` makes space by the method of Misra and Gries ("Finding
    repeated elements", 1982), applied to many ids at a time (Anderson et al., "A high-performance
    algorithm for identifying frequent items in data streams", 2017).

    Attributes:
        max_bytes: memory limit; while the table grows, it takes up to a quarter more.
        error: upper limit of the amount that `purge` has subtracted from any count.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.error = 0
        self._num_accesses = 0
        self._wide = False
        self._bits = 0
        self._used = ctypes.c_int64(0)
        self._table = _EMPTY

    @property
    def num_ids(self) -> int:
        """Number of ids that have a count."""
        return self._used.value

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
        ids, taken = np.ascontiguousarray(ids, np.int64), 0
        while taken < ids.size:
            if self._bits:
                left = None if counts is None else np.ascontiguousarray(counts[taken:], np.int64)
                taken += library().oper_data_tally(
                    *self._where(), address(ids[taken:]), address(left),
                    ctypes.c_int64(ids.size - taken), ctypes.c_int64(3 << self._bits - 2),
                    ctypes.byref(self._used))
            if taken < ids.size and not self._grow():
                break
        return taken

    def _where(self) -> tuple[ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]:
        """Return the table as the first arguments of the compiled functions."""
        return ctypes.c_int32(self._wide), address(self._table), ctypes.c_int32(self._bits)

    def _grow(self) -> bool:
        """Quadruple the number of slots, or double it if four times as many exceed the limit."""
        bits = self._bits
        return any(self._rebuild(b, self._wide) for b in (
            (bits + 2, bits + 1) if bits else (_FIRST_BITS,)))

    def _widen(self) -> bool:
        """Switch to 16-byte slots if the ids then still fit the memory limit; returns success."""
        bits = self._bits
        while bits and 16 << bits > self.max_bytes:
            bits -= 1
        return self._wide or ((self._used.value <= 3 << bits - 2 if bits else not self._bits) and (
            self._rebuild(bits, True)))

    def _rebuild(self, bits: int, wide: bool) -> bool:
        if bits and (16 if wide else 8) << bits > self.max_bytes:
            return False
        # Zero pages are allocated by the system on first use only.
        table = np.zeros((2 if wide else 1) << bits, np.int64) if bits else _EMPTY
        if self._bits:
            library().oper_data_tally_move(*self._where(), ctypes.c_int32(wide), address(table),
                                           ctypes.c_int32(bits))
        self._table, self._bits, self._wide = table, bits, wide
        return True

    def _level(self, num_ids: int) -> int:
        """Return the smallest count that at most `num_ids` ids exceed, but at most `_FEW` - 2."""
        few = np.zeros(_FEW, np.int64)
        if self._bits:
            library().oper_data_tally_levels(*self._where(), address(few), ctypes.c_int64(_FEW))
        above = few[1:].sum() - np.cumsum(few) + few[0]
        fits = np.flatnonzero(above <= num_ids)
        return min(int(fits[0]), _FEW - 2) if fits.size else _FEW - 2

    def purge(self, num_ids: int) -> None:
        """Reduce all counts by the same number and drop ids at 0, until at most `num_ids` remain.

        The number is added to `error`. More than `num_ids` counts were at least that large, so
        `error` stays below (ids counted) / `num_ids`.
        """
        while self.num_ids > num_ids:
            level = self._level(num_ids)
            self._used.value = library().oper_data_tally_purge(
                *self._where(), ctypes.c_int64(level))
            self.error += level

    def sample(self, level: int) -> Counts:
        """Return the ids whose hash has `level` leading zeros (see `native.sampled`), and their
        counts, as `result` does."""
        size = self.num_ids if not level else 0
        while True:
            ids, counts = np.empty(size, np.int64), np.empty(size, np.int64)
            if not self._bits:
                return ids, counts
            found = library().oper_data_tally_list(
                *self._where(), ctypes.c_int64(0), ctypes.c_int32(level), ctypes.c_int64(size),
                address(ids), address(counts))
            if found <= size:
                return ids[:found], counts[:found]
            size = found

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
        """Count in `counted`, which may have counts already, until the next result."""
        counted.max_bytes = max(counted.max_bytes, self._least_bytes)
        self.counted = counted
        self._result: Counts | None = None  # the counts in place of those in `counted`

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
    """Exact counts of the ids whose hash has `level` leading zeros, about 2^-level of all ids."""

    def __init__(self, num_entries: int = SAMPLE_ENTRIES) -> None:
        """Start a sample of at most `num_entries` ids."""
        self.num_entries, self.level, self._counted = num_entries, 0, CountTable(0)
        self._thin(0)

    def _thin(self, level: int) -> None:
        """Keep only the ids whose hash has `level` leading zeros."""
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
        InvalidInputError: there are no parts, they are of different tables, or a table has no
            counts of single rows in its tail (for example from published counts).
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
    return replace(stats, tables=tables, ids_in_hotness_order=all(
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
