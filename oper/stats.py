"""Access statistics: how often a model looks up which ids.

For each table: a head (ids with their access counts, in hotness order), a tail (number of rows by
access count, for all other rows), a histogram of bag lengths, measured presence (distinct rows
touched by n samples) and time buckets. Statistics of two parts of a log merge by addition. Planners
read histograms and the head, never a dense array with one count per row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from oper.errors import FileFormatError, InvalidInputError, differing_names, require
from oper.ranges import Positive, Share, rules_of
from oper.support.counts import count_levels, hotness_order as hotness_order
from oper.support.files import read_arrays, write_arrays

STATS_KIND = "oper-stats"
STATS_VERSION = 2

_EMPTY_I64 = np.zeros(0, np.int64)
_EMPTY_F64 = np.zeros(0, np.float64)


def _whole_numbers(what: str, name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise InvalidInputError(what, name, values, "a flat array of integers >= 0",
                                "collect them again")
    return np.ascontiguousarray(array, np.int64)


Check = tuple[str, object, bool, str]


def _equal_lengths(owner: object, *names: str) -> Check:
    sizes = [np.shape(getattr(owner, name)) for name in names]
    return f"shapes of {', '.join(names)}", sizes, len(set(sizes)) == 1, "equal shapes"


def _ascending(owner: object, name: str) -> Check:
    values = getattr(owner, name)
    return name, values, bool((np.diff(values) > 0).all()), "ascending values"


@dataclass(frozen=True, slots=True, eq=False)
class TimeBucket:
    """Access counts of one table in one span of time, such as a day, for measuring drift.

    Attributes:
        label: name of the time span; a merge adds buckets with equal labels.
        ids: int64 [K], ascending.
        counts: int64 [K], accesses of each id, all >= 1. If the exact counts of the span exceeded
            the memory budget, only its most accessed ids (up to 65,536) with lower bounds.
    """

    label: str
    ids: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        what = f"invalid time bucket {self.label!r}"
        for name in ("ids", "counts"):
            object.__setattr__(self, name, _whole_numbers(what, name, getattr(self, name)))
        require(what, "collect them again",
                _equal_lengths(self, "ids", "counts"), _ascending(self, "ids"),
                ("counts", self.counts, self.counts.min(initial=1) >= 1, ">= 1"))


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Mergeable sketches of a table whose exact counts did not fit memory.

    Attributes:
        heavy_ids: int64 [M], ascending; the most accessed ids (a Misra-Gries summary).
        heavy_counts: int64 [M], accesses of each, too low by at most `heavy_error`.
        heavy_error: error bound of `heavy_counts`; an id that is not in `heavy_ids` has at most
            this many accesses.
        sample_ids: int64 [S], ascending; all ids whose hash begins with `sample_level` zero bits.
        sample_counts: int64 [S], accesses of each, exact.
        sample_level: number of leading zero bits by which `sample_ids` are selected.
    """

    heavy_ids: np.ndarray
    heavy_counts: np.ndarray
    heavy_error: int
    sample_ids: np.ndarray
    sample_counts: np.ndarray
    sample_level: int

    def __post_init__(self) -> None:
        what = "invalid sketch"
        for name in _SKETCH:
            object.__setattr__(self, name, _whole_numbers(what, name, getattr(self, name)))
        require(what, "collect them again",
                *(_equal_lengths(self, f"{x}_ids", f"{x}_counts") for x in ("heavy", "sample")),
                *(_ascending(self, f"{x}_ids") for x in ("heavy", "sample")),
                ("heavy_error, sample_level", (self.heavy_error, self.sample_level),
                 self.heavy_error >= 0 and 0 <= self.sample_level < 64, ">= 0, below 64"))


@dataclass(frozen=True, slots=True, eq=False)
class TableStats:
    """Access statistics of one table.

    Attributes:
        num_rows: number of rows of the table.
        head_ids: int64 [H], distinct, in hotness order.
        head_counts: int64 [H], accesses of each head id, all >= 1, descending.
        tail_values: int64 [K], ascending access counts of rows outside the head (0 = untouched).
        tail_num_rows: int64 [K], number of rows outside the head with each of these counts;
            ``H + tail_num_rows.sum() == num_rows``.
        length_values: int64 [P], ascending bag lengths (0 = empty bag).
        length_counts: int64 [P], number of bags of each length, over all features of the table.
        presence_samples: int64 [Q], ascending numbers of samples n.
        presence_rows: float64 [Q], mean number of distinct rows touched by n consecutive samples.
        presence_windows: int64 [Q], number of windows of n samples that each mean represents (not
            all need have been measured), by which a merge weights the means.
        buckets: time buckets in chronological order.
        sketch: sketches for merging inexact counts, or None.
        new_ids: int64 [T], number of ids first seen in each time bucket, in chronological order;
            only for raw ids, which have no `buckets`.
        default_share: for the rows of a dynamic table, share of the lookups whose key has no row;
            None = static table, or statistics of keys.

    Raises:
        InvalidInputError: arrays contradict each other or `num_rows`.
    """

    num_rows: Positive
    head_ids: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    head_counts: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    tail_values: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    tail_num_rows: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    length_values: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    length_counts: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    presence_samples: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    presence_rows: np.ndarray = field(default_factory=lambda: _EMPTY_F64)
    presence_windows: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    buckets: tuple[TimeBucket, ...] = ()
    sketch: Sketch | None = None
    new_ids: np.ndarray = field(default_factory=lambda: _EMPTY_I64)
    default_share: Share | None = None

    def __post_init__(self) -> None:
        what = "invalid table statistics"
        for name in _COLUMNS:
            if name != "presence_rows":
                object.__setattr__(self, name, _whole_numbers(what, name, getattr(self, name)))
        rows = np.ascontiguousarray(self.presence_rows, np.float64)
        object.__setattr__(self, "presence_rows", rows)
        require(what, "collect them again",
                *(_equal_lengths(self, *names) for names in (
                    ("head_ids", "head_counts"), ("tail_values", "tail_num_rows"),
                    ("length_values", "length_counts"),
                    ("presence_samples", "presence_rows", "presence_windows"))),
                *(_ascending(self, name)
                  for name in ("tail_values", "length_values", "presence_samples")),
                ("presence_rows", rows, bool(np.isfinite(rows).all())
                 and rows.min(initial=0.0) >= 0, "values >= 0"),
                *((name, getattr(self, name), *rule) for name, *rule in rules_of(self)))
        ids = [self.head_ids, *(b.ids for b in self.buckets)]
        top = max((int(i.max()) for i in ids if i.size), default=-1)
        require(what, "pass the number of rows of the table, above its largest id",
                ("largest id", top, top < self.num_rows, f"< num_rows={self.num_rows}"))
        known = self.head_ids.size + int(self.tail_num_rows.sum())
        counts = self.head_counts
        steps = np.diff(counts)
        is_ordered = not (steps > 0).any() and not (np.diff(self.head_ids)[steps == 0] <= 0).any()
        require(what, "collect them again",
                ("rows in head and tail", known, known == self.num_rows,
                 f"num_rows={self.num_rows}"),
                ("head_counts", counts, not counts.size or (is_ordered and counts[-1] >= 1),
                 "counts >= 1, descending, ties by ascending id"),
                # Not np.unique, which hashes and takes ten times as long.
                ("head_ids", self.head_ids, bool(np.diff(np.sort(self.head_ids)).all()),
                 "distinct ids"))

    def __repr__(self) -> str:
        return (f"TableStats(num_rows={self.num_rows}, num_accesses={self.num_accesses}, "
                f"num_touched_rows={self.num_touched_rows}, pooling_factor="
                f"{self.pooling_factor:.4g})")

    @property
    def num_accesses(self) -> int:
        """Number of ids looked up, summed over all bags."""
        return int(self.head_counts.sum()) + int(self.tail_values @ self.tail_num_rows)

    @property
    def num_bags(self) -> int:
        """Number of bags, summed over all features of the table."""
        return int(self.length_counts.sum())

    @property
    def pooling_factor(self) -> float:
        """Mean number of ids per bag."""
        return self.num_accesses / max(1, self.num_bags)

    @property
    def num_touched_rows(self) -> int:
        """Number of rows with at least one access."""
        return self.head_ids.size + int(self.tail_num_rows[self.tail_values > 0].sum())

    @property
    def is_exact(self) -> bool:
        """Whether the head lists every touched row with its exact count."""
        tail = self.tail_num_rows[self.tail_values > 0]
        return self.sketch is None and not bool((tail > 0).any())

    @property
    def unseen_mass(self) -> float:
        """Good-Turing estimate of the probability that the next id is new (Good 1953): the number
        of ids seen once, divided by the number of accesses."""
        once = int((self.head_counts == 1).sum())
        once += int(self.tail_num_rows[self.tail_values == 1].sum())
        return once / max(1, self.num_accesses)

    def count_histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct access counts (int64 [K], descending) and the number of rows with
        each (int64 [K])."""
        values, rows = count_levels(self.head_counts, self.tail_values, self.tail_num_rows)
        unique, inverse = np.unique(values, return_inverse=True)
        merged = np.bincount(inverse, rows, minlength=unique.size).astype(np.int64)
        return unique[::-1].copy(), merged[::-1].copy()

    def coverage(self, num_hot: int | np.ndarray) -> np.ndarray:
        """Return the share of accesses to the `num_hot` hottest rows, float64 of the same shape."""
        values, rows = self.count_histogram()
        ends = np.concatenate([[0], np.cumsum(rows)])
        mass = np.concatenate([[0], np.cumsum(rows * values)])
        share: np.ndarray = np.interp(num_hot, ends, mass) / max(1, int(mass[-1]))
        return share

    @staticmethod
    def from_counts(
        num_rows: int,
        ids: np.ndarray,
        counts: np.ndarray,
        lengths: tuple[np.ndarray, np.ndarray],
        presence: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        buckets: tuple[TimeBucket, ...] = (),
    ) -> TableStats:
        """Make exact statistics from the counts of all touched rows.

        Args:
            num_rows: number of rows of the table.
            ids: int64 [H], distinct, in any order.
            counts: int64 [H], accesses of each id; ids with 0 accesses are dropped.
            lengths: `length_values` and `length_counts`, int64 [P] each.
            presence: `presence_samples`, `presence_rows` and `presence_windows`, or None.
            buckets: time buckets.

        Raises:
            InvalidInputError: arrays contradict each other or `num_rows`.
        """
        ids, counts = np.asarray(ids, np.int64), np.asarray(counts, np.int64)
        ids, counts = ids[counts > 0], counts[counts > 0]
        order = hotness_order(ids, counts)
        untouched = num_rows - ids.size
        samples, rows, windows = presence or (_EMPTY_I64, _EMPTY_F64, _EMPTY_I64)
        return TableStats(
            num_rows, ids[order], counts[order],
            np.array([0] if untouched else [], np.int64),
            np.array([untouched] if untouched else [], np.int64),
            lengths[0], lengths[1], samples, rows, windows, buckets)

    def grown(self, num_rows: int) -> TableStats:
        """Return the statistics of the table grown to `num_rows` rows; new rows have no accesses.

        Raises:
            InvalidInputError: `num_rows` is less than the current number of rows.
        """
        more = num_rows - self.num_rows
        if more < 0:
            raise InvalidInputError("cannot grow table statistics", "num_rows", num_rows,
                                    f">= {self.num_rows}", "pass the grown table's num_rows")
        if not more:
            return self
        values, rows = self.tail_values, self.tail_num_rows
        if not values.size or values[0] > 0:
            values, rows = np.insert(values, 0, 0), np.insert(rows, 0, 0)
        rows = np.concatenate([[rows[0] + more], rows[1:]])
        return replace(self, num_rows=num_rows, tail_values=values, tail_num_rows=rows)

    def renumbered(self, rows: np.ndarray) -> TableStats:
        """Return the statistics after row r became row `rows[r]`.

        Args:
            rows: integers [num_rows], a permutation of 0..num_rows-1.

        Raises:
            InvalidInputError: `rows` is for another number of rows, or the counts are not exact.
        """
        what = "cannot renumber table statistics"
        if rows.size != self.num_rows:
            raise InvalidInputError(what, "number of rows of the re-map", rows.size,
                                    str(self.num_rows),
                                    "pass the re-map of this table's vocabulary")
        if not self.is_exact:
            raise InvalidInputError(what, "is_exact", False, "exact counts",
                                    "preprocess the log with the new vocabulary and analyze that")
        buckets = []
        for bucket in self.buckets:
            ids = rows[bucket.ids]
            order = np.argsort(ids)
            buckets.append(TimeBucket(bucket.label, ids[order], bucket.counts[order]))
        return TableStats.from_counts(
            self.num_rows, rows[self.head_ids], self.head_counts,
            (self.length_values, self.length_counts),
            (self.presence_samples, self.presence_rows, self.presence_windows), tuple(buckets))

    def merge(self, other: TableStats) -> TableStats:
        """Return the statistics of two parts of a log together.

        Args:
            other: statistics of the later part. Only the order of time buckets depends on it.

        Raises:
            InvalidInputError: the parts differ in `num_rows`, or one of them is not exact.
        """
        what = "cannot merge table statistics"
        if self.num_rows != other.num_rows:
            raise InvalidInputError(
                what, "num_rows", (self.num_rows, other.num_rows), "equal numbers of rows",
                "count one of them again, or pass --grown if the vocabulary was extended")
        if not (self.is_exact and other.is_exact):
            raise InvalidInputError(what, "is_exact", (self.is_exact, other.is_exact),
                                    "exact parts",
                                    "use oper.analysis.merge_stats, which also merges sketches")
        ids, counts = _add_counts(
            [self.head_ids, other.head_ids], [self.head_counts, other.head_counts])
        dynamic = [t for t in (self, other) if t.default_share is not None]
        share = sum(t.num_accesses * (t.default_share or 0.0) for t in dynamic) / max(
            1, sum(t.num_accesses for t in dynamic)) if dynamic else None
        return replace(TableStats.from_counts(
            self.num_rows, ids, counts, *self.merge_bags(other)), default_share=share)

    def merge_bags(self, other: TableStats) -> tuple[
            tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray],
            tuple[TimeBucket, ...]]:
        """Merge the bag lengths, presence and time buckets of two parts; returns the arguments
        `lengths`, `presence` and `buckets` of `from_counts`."""
        lengths = _add_counts(
            [self.length_values, other.length_values], [self.length_counts, other.length_counts])
        labels = dict.fromkeys(b.label for part in (self, other) for b in part.buckets)
        buckets = []
        for label in labels:
            parts = [b for part in (self, other) for b in part.buckets if b.label == label]
            buckets.append(TimeBucket(
                label, *_add_counts([b.ids for b in parts], [b.counts for b in parts])))
        return lengths, _merge_presence(self, other), tuple(buckets)


def _add_counts(keys: list[np.ndarray], counts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    unique, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.zeros(unique.size, np.int64)
    np.add.at(total, inverse, np.concatenate(counts))
    return unique, total


def _merge_presence(
    a: TableStats, b: TableStats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    samples, inverse = np.unique(
        np.concatenate([a.presence_samples, b.presence_samples]), return_inverse=True)
    windows = np.concatenate([a.presence_windows, b.presence_windows])
    rows = np.concatenate([a.presence_rows, b.presence_rows])
    total = np.bincount(inverse, windows, minlength=samples.size)
    mean = np.bincount(inverse, rows * windows, minlength=samples.size) / np.maximum(total, 1)
    return samples, mean, total.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class AccessStats:
    """Access statistics of a model's tables.

    Attributes:
        num_samples: number of samples (rows of the log) counted.
        tables: statistics by table name.
        source: origin of the statistics, as free text.
        ids_in_hotness_order: whether ids were assigned in hotness order (row 0 = unseen or rare
            ids, then rows by descending count), so that a row's tier follows from its id.
        samples_per_bag: for features whose bags are looked up once for several samples, such as
            those of a user in requests that rank candidates: number of samples per bag, by feature
            (default 1). Planners use it; the other statistics are those of single samples.
        numbering: id of the mapping from values to rows, as in a preprocessed folder's manifest; ""
            = unknown.
    """

    num_samples: int
    tables: dict[str, TableStats]
    source: str = ""
    ids_in_hotness_order: bool = False
    samples_per_bag: Mapping[str, float] = field(default_factory=dict)
    numbering: str = ""

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise InvalidInputError("invalid statistics", "num_samples", self.num_samples, ">= 0",
                                    "collect them again")
        shared = {name: float(x) for name, x in self.samples_per_bag.items()}
        require("invalid statistics", "pass the number of samples that share a bag of the feature",
                ("samples_per_bag", shared, all(1 <= x < np.inf for x in shared.values()), ">= 1"))
        object.__setattr__(self, "samples_per_bag", shared)

    def __repr__(self) -> str:
        return (f"AccessStats(num_samples={self.num_samples}, {len(self.tables)} tables of "
                f"{sum(t.num_rows for t in self.tables.values())} rows, source={self.source!r})")

    def merge(self, other: AccessStats, merge_tables: Callable[
            [str, TableStats, TableStats], TableStats] = lambda _, a, b: a.merge(b)) -> AccessStats:
        """Return the statistics of two parts of a log together.

        Args:
            other: statistics of the later part.
            merge_tables: merges the statistics of one table: (name, earlier part, later part).

        Raises:
            InvalidInputError: the parts have different tables or vocabularies, or a table cannot be
                merged.
        """
        self.check_same_rows("cannot merge statistics", other)
        mine, theirs = set(self.tables), set(other.tables)
        if mine != theirs:
            raise InvalidInputError("cannot merge statistics", "tables",
                                    differing_names("only in the first part", mine,
                                                    "only in the second part", theirs),
                                    "the same tables in both parts",
                                    "collect both parts for the same model")
        shared = self.samples_per_bag
        require("cannot merge statistics", "set it after merging", (
            "samples_per_bag", (shared, other.samples_per_bag), shared == other.samples_per_bag,
            "the same in both parts"))
        return AccessStats(
            self.num_samples + other.num_samples,
            {name: merge_tables(name, t, other.tables[name]) for name, t in self.tables.items()},
            " + ".join(dict.fromkeys(f"{self.source} + {other.source}".split(" + "))),
            self.ids_in_hotness_order and other.ids_in_hotness_order, shared,
            self.numbering if self.numbering == other.numbering else "")

    __add__ = merge

    def check_same_rows(self, what: str, other: AccessStats) -> None:
        """Raise InvalidInputError, whose message begins with `what`, if it is known that a row
        stands for one value in these statistics and for another one in `other`."""
        both = self.numbering, other.numbering
        require(what, "count logs preprocessed with one vocabulary (oper preprocess --vocabulary); "
                "after 'oper vocabulary extend --reorder', renumber the earlier ones with "
                "oper analyze --merge --remap",
                ("numbering", both, not all(both) or both[0] == both[1],
                 "the same vocabulary: equal rows must stand for equal values"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics atomically to one file with checksums, for `load`."""
        arrays: dict[str, np.ndarray] = {}
        tables = []
        for index, (name, t) in enumerate(self.tables.items()):
            for column in _COLUMNS:
                arrays[f"{index}.{column}"] = _narrow(getattr(t, column))
            for k, bucket in enumerate(t.buckets):
                arrays[f"{index}.bucket{k}.ids"] = _narrow(bucket.ids)
                arrays[f"{index}.bucket{k}.counts"] = _narrow(bucket.counts)
            tables.append({"name": name, "num_rows": t.num_rows,
                           "buckets": [b.label for b in t.buckets]})
            if t.default_share is not None:
                tables[-1]["default_share"] = t.default_share
            if t.sketch is not None:
                for column in _SKETCH:
                    arrays[f"{index}.{column}"] = _narrow(getattr(t.sketch, column))
                tables[-1]["sketch"] = {"error": t.sketch.heavy_error,
                                        "level": t.sketch.sample_level}
        meta = {"num_samples": self.num_samples, "source": self.source, "tables": tables,
                "ids_in_hotness_order": self.ids_in_hotness_order,
                "samples_per_bag": self.samples_per_bag, "numbering": self.numbering}
        write_arrays(path, STATS_KIND, STATS_VERSION, arrays, meta)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> AccessStats:
        """Read statistics written by `save`.

        Raises:
            FileFormatError: the file is truncated, damaged or of another kind.
            InvalidInputError: arrays of the file contradict each other.
        """
        arrays, meta = read_arrays(path, STATS_KIND, STATS_VERSION)
        try:
            tables = {}
            for index, entry in enumerate(meta["tables"]):
                buckets = tuple(
                    TimeBucket(str(label), arrays[f"{index}.bucket{k}.ids"],
                               arrays[f"{index}.bucket{k}.counts"])
                    for k, label in enumerate(entry["buckets"]))
                columns = {c: arrays[f"{index}.{c}"] for c in _COLUMNS}
                sketch = None
                if "sketch" in entry:
                    sketch = Sketch(heavy_error=int(entry["sketch"]["error"]),
                                    sample_level=int(entry["sketch"]["level"]),
                                    **{c: arrays[f"{index}.{c}"] for c in _SKETCH})
                tables[str(entry["name"])] = TableStats(
                    int(entry["num_rows"]), buckets=buckets, sketch=sketch,
                    default_share=entry.get("default_share"), **columns)
            return AccessStats(int(meta["num_samples"]), tables, str(meta["source"]),
                               bool(meta["ids_in_hotness_order"]),
                               meta.get("samples_per_bag", {}), str(meta.get("numbering", "")))
        except (KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"cannot read {os.fspath(path)!r} as {STATS_KIND}", "missing",
                                  str(error), "a complete header", "regenerate it") from None
        except InvalidInputError:
            raise
        except (ValueError, OverflowError) as error:
            raise FileFormatError(f"cannot read {os.fspath(path)!r} as {STATS_KIND}", "header",
                                  str(error), "numbers", "regenerate it") from None


_SKETCH = ("heavy_ids", "heavy_counts", "sample_ids", "sample_counts")
_COLUMNS = ("head_ids", "head_counts", "tail_values", "tail_num_rows", "length_values",
            "length_counts", "presence_samples", "presence_rows", "presence_windows", "new_ids")


def _narrow(values: np.ndarray) -> np.ndarray:
    """Convert integers >= 0 to the narrowest unsigned type that holds them; floats are returned as
    they are."""
    if values.dtype.kind == "f":
        return values
    top = int(values.max(initial=0))
    for dtype in (np.uint8, np.uint16, np.uint32):
        if top <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def table_stats_for(stats: AccessStats | Mapping[str, TableStats], name: str, num_rows: int
                    ) -> TableStats:
    """Return the statistics of a table; raises InvalidInputError if there are none, or their number
    of rows is not `num_rows`."""
    tables = stats.tables if isinstance(stats, AccessStats) else stats
    found = tables.get(name)
    if found is None:
        raise InvalidInputError("no statistics for a table", "table", name,
                                f"one of {sorted(tables)[:8]}", "collect statistics for this model")
    if found.num_rows != num_rows:
        raise InvalidInputError(f"statistics are for another table {name!r}", "num_rows",
                                found.num_rows, f"{num_rows}", "collect statistics for this model")
    return found
