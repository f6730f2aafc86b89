"""Build vocabularies: ids of raw values in frequency order, by their counts in the training part.

Values and counts may exceed memory, so a vocabulary is built from slices of ascending values and
stored in memory-mapped files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper.data.arrays import as_binary
from oper.data.vocabulary.merging import RunMerger
from oper.errors import InvalidInputError
from oper.support.counts import merge_counts
from oper.support.numeric import mix64

_WRITE_ROWS = 1 << 20
_SMALL_BYTES = 1 << 24  # maximum size of a vocabulary that is cached in memory
_FEW = 1 << 16  # counts below this are tallied by np.bincount, larger ones by sorting
# Returns an iterator over ascending distinct values [K] and counts int64 [K], piece by piece.
Slices = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
# Ascending distinct values [K], ids int32 [K], counts int64 [K], piece by piece.
Parts = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """Facts about a column's values and how they map to ids.

    Id 0 stands for every value without its own id: seen fewer than `min_count` times in the
    training part, dropped by the limit on rows, or never seen. Ids 1, 2, ... are assigned to the
    other values by descending count, ties by ascending value; a missing field counts as a value
    that sorts before all others. In a hashed column, ids are 1 + hash mod (rows - 1), and 0 for
    missing fields.

    Attributes:
        num_rows: rows of the table, row 0 included.
        num_distinct: distinct values seen in the training part; missing fields count as one value.
        num_once: values seen once in the training part. Divided by all accesses, this is the
            Good-Turing estimate of the probability that the next value is new; access counts of
            rows do not determine it.
        num_rare_accesses: training accesses to row 0, that is, of values without their own id; 0 in
            a hashed column.
        missing_id: id of a missing field; 0 if it shares row 0.
        hashed: whether ids are hashes.
        num_collisions: number of distinct values of a hashed column minus the rows they occupy.
    """

    num_rows: int
    num_distinct: int
    num_once: int
    num_rare_accesses: int
    missing_id: int
    hashed: bool = False
    num_collisions: int = 0


def hash64(values: np.ndarray) -> np.ndarray:
    """Hash raw values [K], integers or bytes, to uint64 [K]; stable across releases.

    The hash of an integer is the finalizer of splitmix64; that of a string folds its bytes through
    the finalizer, eight at a time.
    """
    if values.dtype.kind == "S":
        width = -(-values.dtype.itemsize // 8) * 8
        words = np.ascontiguousarray(values.astype(f"S{width}")).view("<u8").reshape(
            values.size, width // 8)
        state = np.full(values.size, 0x9E3779B97F4A7C15, np.uint64)
        for word in words.T:  # padding (zero words) must not change the hash
            state = np.where(word != 0, mix64(state ^ word), state)
        return state
    return mix64(values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values)


def hash_values(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Hash raw values [K] to ids 1 + mix64(hash64(value) + 1) mod (num_rows - 1), int32 [K]."""
    return (1 + mix64(hash64(values) + np.uint64(1)) % np.uint64(num_rows - 1)).astype(np.int32)


def lookup(known: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the ids, int32 [K], of values in a vocabulary; 0 for values that are not in it.

    Args:
        known: the vocabulary's values [M], ascending.
        ids: ids of `known`, int32 [M].
        values: the values to look up [K], ascending.
    """
    if not known.size or not values.size:
        return np.zeros(values.size, np.int32)
    first, last = np.searchsorted(known, [values[0], values[-1]])
    at = np.searchsorted(known[first:last + 1], values) + first
    at[at == known.size] = 0
    return np.where(known[at] == values, ids[at], np.int32(0))


class Vocabulary:
    """The mapping from one column's raw values to ids, in memory-mapped files.

    Attributes:
        facts: facts about the values.
        num_missing: number of missing fields in the training part.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files that `build` or `build_hashed` wrote to `folder`."""
        self._folder = folder
        self._small: tuple[np.ndarray, np.ndarray] | None = None
        known = json.loads((folder / "facts.json").read_text())
        self.num_missing = int(known.pop("num_missing"))
        self.facts = VocabularyFacts(**known)

    def lookup(self, values: np.ndarray) -> np.ndarray:
        """Look up distinct ascending raw values [K]; returns int32 [K + 1].

        Entry 0 is the id of a missing field, entry k + 1 that of value k (0 = without its own id).
        """
        ids = np.zeros(values.size + 1, np.int32)
        ids[0] = self.facts.missing_id
        if self.facts.hashed:
            ids[1:] = hash_values(values, self.facts.num_rows)
        else:
            ids[1:] = self._find(values)
        return ids

    def has(self, values: np.ndarray) -> np.ndarray:
        """Whether each of the distinct ascending raw values [K] has an id; bool [K]."""
        return self._find(values) > 0

    def _find(self, values: np.ndarray) -> np.ndarray:
        """Return the ids, int32 [K], of distinct ascending raw values [K]; 0 = no id."""
        known, ids = self._known()
        kind = common_kind(known, values)
        if kind.kind != "S":  # strings of different widths can be compared
            known, values = known.astype(kind, copy=False), values.astype(kind, copy=False)
        return lookup(known, ids, values)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Memory-map the values [V] with an id, ascending, their ids int32 and counts int64 [V]."""
        values, ids, counts = (np.load(self._folder / f"{n}.npy", mmap_mode="r")
                               for n in ("values", "ids", "counts"))
        return values, ids, counts

    def parts(self) -> Parts:
        """Yield the contents of `arrays` in pieces, at least one (which may be empty)."""
        every = self.arrays()
        for start in range(0, max(1, every[0].size), _WRITE_ROWS):
            values, ids, counts = (np.array(a[start:start + _WRITE_ROWS]) for a in every)
            yield values, ids, counts

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """Return values and ids: cached if small, otherwise memory-mapped in each call.

        Pages of a permanent mapping would count as resident memory of the process.
        """
        if self._small is not None:
            return self._small
        paths = [self._folder / f"{n}.npy" for n in ("values", "ids")]
        if sum(p.stat().st_size for p in paths) > _SMALL_BYTES:
            return np.load(paths[0], mmap_mode="r"), np.load(paths[1], mmap_mode="r")
        self._small = np.load(paths[0]), np.load(paths[1])
        return self._small

    def write_parquet(self, path: Path) -> None:
        """Write the vocabulary to Parquet, see the module's `write_parquet`."""
        facts = self.facts
        write_parquet(path, self.parts, (facts.missing_id, self.num_missing)
                      if facts.missing_id or facts.hashed else None)


def common_kind(one: np.ndarray, other: np.ndarray) -> np.dtype[Any]:
    """Return a dtype for the raw values of both arrays; raises InvalidInputError if none exists."""
    if not one.size or not other.size or one.dtype == other.dtype:
        return one.dtype if one.size else other.dtype
    kind = np.promote_types(one.dtype, other.dtype)
    if (one.dtype.kind == "S") != (other.dtype.kind == "S") or kind.kind not in "iuS":
        raise InvalidInputError(
            "cannot look values up in a vocabulary", "types", (other.dtype.name, one.dtype.name),
            "both signed, both unsigned or both strings",
            "parse the column as in the run that made the vocabulary")
    return kind


def write_parquet(path: Path, parts: Callable[[], Parts], missing: tuple[int, int] | None) -> None:
    """Write a vocabulary to Parquet: columns value, id and count, by ascending value.

    Strings are written as Arrow strings, or as binary if one of them is not UTF-8.

    Args:
        path: the file.
        parts: returns an iterator over (values, ids, counts); called twice.
        missing: id and count of a missing field, whose row is first and has a null value; None = no
            such row.
    """
    kind = pa.int64()
    for values, _, _ in parts():
        if values.dtype.kind != "S":
            kind = pa.from_numpy_dtype(values.dtype)
            break
        try:
            kind = as_binary(values).cast(pa.string()).type
        except pa.ArrowInvalid:
            kind = pa.binary()
            break
    schema = pa.schema([("value", kind), ("id", pa.int32()), ("count", pa.int64())])
    with pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False,
                          write_statistics=False) as writer:
        if missing is not None:
            writer.write_table(pa.table([pa.array([None], kind), [missing[0]], [missing[1]]],
                                        schema=schema))
        for values, ids, counts in parts():
            if values.size:
                raw = as_binary(values) if values.dtype.kind == "S" else pa.array(values)
                writer.write_table(pa.table([raw.cast(kind), ids, counts], schema=schema))


def build(folder: Path, merger: RunMerger, num_missing: int, min_count: int,
          max_rows: int | None) -> Vocabulary:
    """Assign ids to counted values, write the vocabulary to `folder` and return it.

    Args:
        folder: folder for the files.
        merger: counts of all values in the training part.
        num_missing: number of missing fields in the training part.
        min_count: values seen fewer than `min_count` times get id 0.
        max_rows: maximum number of rows, row 0 included; less frequent values get id 0. None = no
            limit.
    """
    levels, num = _histogram(merger.slices)
    total = int((levels * num).sum()) + num_missing
    distinct, once = int(num.sum()) + (num_missing > 0), int(num[levels == 1].sum())
    if num_missing:
        at = int(np.searchsorted(levels, num_missing))
        if at == levels.size or levels[at] != num_missing:
            levels, num = np.insert(levels, at, num_missing), np.insert(num, at, 0)
        num[at] += 1
        once += num_missing == 1
    # By distinct count: number of values that get an id, first id, and number assigned so far.
    num_ids = np.where(levels >= min_count, num, 0)
    if max_rows is not None:
        hotter = np.concatenate([np.cumsum(num_ids[::-1])[::-1][1:], [0]])
        num_ids = np.clip(max_rows - 1 - hotter, 0, num_ids)
    first = 1 + np.concatenate([np.cumsum(num_ids[::-1])[::-1][1:], [0]]).astype(np.int64)
    given = np.zeros(levels.size, np.int64)
    missing_id = 0
    if num_missing:
        at = int(np.searchsorted(levels, num_missing))
        missing_id, given[at] = (int(first[at]), 1) if num_ids[at] else (0, 0)
    kept = _write_values(folder, merger.slices, (levels, num_ids, first, given),
                         int(num_ids.sum()) - (missing_id > 0))
    return with_facts(folder, VocabularyFacts(
        int(num_ids.sum()) + 1, distinct, once, total - kept - (num_missing if missing_id else 0),
        missing_id), num_missing)


def build_hashed(folder: Path, merger: RunMerger, num_missing: int, num_rows: int
                 ) -> Vocabulary:
    """Hash counted values to ids, write the vocabulary to `folder` and return it."""
    taken = np.zeros(num_rows, bool)
    levels, num = _histogram(merger.slices)
    distinct = int(num.sum())

    def every() -> Parts:
        for values, counts in merger.slices():
            ids = hash_values(values, num_rows)
            taken[ids] = True
            yield values, ids, counts

    write_parts(folder, every(), distinct)
    return with_facts(folder, VocabularyFacts(
        num_rows, distinct + (num_missing > 0), int(num[levels == 1].sum()), 0, 0, True,
        distinct - int(np.count_nonzero(taken))), num_missing)


def with_facts(folder: Path, facts: VocabularyFacts, num_missing: int) -> Vocabulary:
    """Write a vocabulary's facts and number of missing fields next to its arrays, without fsync;
    return the vocabulary."""
    (folder / "facts.json").write_text(json.dumps({**asdict(facts), "num_missing": num_missing}))
    return Vocabulary(folder)


def _histogram(slices: Slices) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct counts, ascending, int64 [K], and the number of values with each."""
    few = np.zeros(_FEW, np.int64)
    levels = num = np.zeros(0, np.int64)
    for _, counts in slices():
        few += np.bincount(counts[counts < _FEW], minlength=_FEW)
        found, times = np.unique(counts[counts >= _FEW], return_counts=True)
        levels, num = merge_counts([(levels, num), (found, times)])
    low = np.flatnonzero(few)
    return np.concatenate([low, levels]), np.concatenate([few[low], num])


def _write_values(folder: Path, slices: Slices, state: tuple[np.ndarray, ...], num_kept: int
                  ) -> int:
    """Write the `num_kept` values that get ids, by descending count, then ascending value.

    One pass over ascending values suffices, with the next free id of each distinct count. `state`
    has the arguments of `assign_ids`. Returns the total count of the values written.
    """
    levels, num_ids, first, given = state
    least = levels[num_ids > 0].min(initial=np.iinfo(np.int64).max)
    accesses = 0

    def parts() -> Parts:
        nonlocal accesses
        for values, counts in slices():
            kept = counts >= least
            values, counts = values[kept], counts[kept]
            ids = assign_ids(counts, (levels, num_ids, first), given)
            has_id = ids > 0
            if not has_id.all():
                values, ids, counts = values[has_id], ids[has_id], counts[has_id]
            accesses += int(counts.sum())
            yield values, ids, counts

    write_parts(folder, parts(), num_kept)
    return accesses


def assign_ids(counts: np.ndarray, levels: tuple[np.ndarray, np.ndarray, np.ndarray],
               given: np.ndarray) -> np.ndarray:
    """Assign ids to the next K values of a vocabulary; values of equal count get consecutive ids.

    Args:
        counts: int64 [K], counts of the next K values.
        levels: three arrays, int64 [M]: the M distinct counts, ascending; for each count, the
            number of values that get an id; for each count, the first id.
        given: int64 [M], number of values seen so far of each count; updated in place.

    Returns:
        Ids, int32 [K]; 0 = the value gets none.
    """
    distinct, num_ids, first = levels
    # In the narrowest type: NumPy sorts 16-bit integers by radix.
    level = np.searchsorted(distinct, counts).astype(np.min_scalar_type(given.size))
    sizes = np.bincount(level, minlength=given.size)
    turn = np.empty(counts.size, np.int64)  # number of earlier values of the same count
    turn[np.argsort(level, kind="stable")] = np.arange(counts.size) - np.repeat(
        np.cumsum(sizes) - sizes, sizes)
    turn += given[level]
    given += sizes
    return np.where(turn < num_ids[level], first[level] + turn, 0).astype(np.int32)


def write_parts(folder: Path, parts: Parts, count: int) -> None:
    """Write `count` values, ids and counts to three ``.npy`` files in `folder`."""
    files: list[BinaryIO] = []
    dtypes: list[np.dtype[Any]] = []
    try:
        for part in parts:
            if not files:
                dtypes = [part[0].dtype, np.dtype(np.int32), np.dtype(np.int64)]
                for name, dtype in zip(("values", "ids", "counts"), dtypes, strict=True):
                    files.append((folder / f"{name}.npy").open("wb"))
                    np.lib.format.write_array_header_2_0(
                        files[-1], {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
            for file, array, dtype in zip(files, part, dtypes, strict=True):
                file.write(array.astype(dtype, copy=False).tobytes())
    finally:
        for opened in files:
            opened.close()
    if not files:
        for name, kind in (("values", np.int64), ("ids", np.int32), ("counts", np.int64)):
            np.save(folder / f"{name}.npy", np.zeros(0, kind))
