"""Compiled counting, sums and parsing of text, with NumPy in their place where nothing is built.

``liboper_data.so`` has a plain C interface and needs no torch, so that workers that read logs start
quickly. Every function here gives the same numbers with and without it.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from pathlib import Path

import numpy as np

_KINDS = {np.dtype(np.uint32): 0, np.dtype(np.int64): 1, np.dtype(np.uint64): 2}
_WIDTHS = {np.dtype(np.uint8): 1, np.dtype(np.uint16): 2, np.dtype(np.uint32): 4}
_EMPTY = np.zeros(0, np.int64)
Counts = tuple[np.ndarray, np.ndarray]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where it is not built or does not load."""
    path = Path(__file__).resolve().parents[1] / "_lib" / "liboper_data.so"
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name in ("parse", "encode", "encoded", "runs", "sample", "merge", "lookup", "deal",
                 "tally", "tally_move", "tally_purge", "tally_levels", "tally_list", "crc32"):
        getattr(found, f"oper_data_{name}").restype = ctypes.c_int64
    return found


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    """Where the numbers of a contiguous array lie; null for None."""
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _size(array: np.ndarray) -> ctypes.c_int64:
    return ctypes.c_int64(array.size)


def _kind(*arrays: np.ndarray) -> int | None:
    """Number of the arrays' common type; None when they have none or it is not compiled."""
    dtypes = {a.dtype for a in arrays}
    return _KINDS.get(dtypes.pop()) if len(dtypes) == 1 else None


def crc32(data: np.ndarray, before: int = 0, to: np.ndarray | None = None) -> int:
    """CRC-32, as ZIP and `zlib.crc32` have it.

    Args:
        data: uint8 [n], contiguous.
        before: the sum of what `data` follows.
        to: uint8 [n]; `data` is copied there as well.
    """
    compiled = library()
    if compiled is not None:
        found: int = compiled.oper_data_crc32(address(data), _size(data), ctypes.c_uint32(before),
                                              address(to))
        if found >= 0:
            return found
    if to is not None:
        to[:] = data
    return zlib.crc32(data.data, before)


def count_distinct(values: np.ndarray) -> Counts:
    """Distinct values, ascending, and the count of each, int64 [K]; `values` is sorted in place."""
    values.sort()
    compiled, kind = library(), _kind(values)
    if compiled is None or kind is None:
        starts = np.flatnonzero(np.concatenate([[values.size > 0], values[1:] != values[:-1]]))
        return values[starts], np.diff(starts, append=values.size)
    num = int(np.count_nonzero(values[1:] != values[:-1])) + (values.size > 0)
    # One entry more than is filled in: the library writes ahead.
    distinct, counts = np.empty(num + 1, values.dtype), np.empty(num + 1, np.int64)
    compiled.oper_data_runs(kind, address(values), _size(values), address(distinct),
                            address(counts))
    return distinct[:num], counts[:num]


def sampled(ids: np.ndarray, level: int) -> np.ndarray:
    """Places, ascending, of the ids int64 [K] whose 64-bit hash begins with `level` zeros.

    The hash is the finalizer of splitmix64; a share of about 2^-level of all ids has it.
    """
    if level == 0:
        return np.arange(ids.size)
    compiled = library()
    if compiled is not None and ids.dtype == np.int64:
        ids, places = np.ascontiguousarray(ids), np.empty(ids.size, np.int64)
        num = compiled.oper_data_sample(address(ids), _size(ids), ctypes.c_int32(level),
                                        address(places))
        return places[:num].copy()
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.flatnonzero((x ^ (x >> np.uint64(31))) >> np.uint64(64 - level) == 0)


def merge_counts(parts: list[Counts] | tuple[Counts, ...]) -> Counts:
    """Add up (values, counts int64) pairs whose values ascend; values ascend in the result."""
    parts = list(parts)
    compiled = library() is not None and _kind(*(v for v, _ in parts)) is not None
    while compiled and len(parts) > 2:  # neighbours in pairs: a logarithmic number of rounds
        parts = [_merge_two(*parts[k:k + 2]) if k + 1 < len(parts) else parts[k]
                 for k in range(0, len(parts), 2)]
    if len(parts) == 1:
        return parts[0]
    if compiled and parts:
        return _merge_two(*parts)
    values = np.concatenate([v for v, _ in parts])
    counts = np.concatenate([c for _, c in parts])
    order = np.argsort(values, kind="stable")  # merges the sorted parts
    values, counts = values[order], counts[order]
    if not values.size:
        return values, counts
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.add.reduceat(counts, starts)


def _merge_two(one: Counts, other: Counts) -> Counts:
    compiled = library()
    assert compiled is not None
    if not one[0].size or not other[0].size:
        return one if one[0].size else other
    arrays = [np.ascontiguousarray(a) for a in one] + [np.ascontiguousarray(a) for a in other]
    arrays[1::2] = (a.astype(np.int64, copy=False) for a in arrays[1::2])
    total = one[0].size + other[0].size
    values, counts = np.empty(total, one[0].dtype), np.empty(total, np.int64)
    size = compiled.oper_data_merge(
        _KINDS[values.dtype], address(arrays[0]), address(arrays[1]), _size(arrays[0]),
        address(arrays[2]), address(arrays[3]), _size(arrays[2]), address(values), address(counts))
    if 2 * size < total:  # what is kept for long should not hold memory for nothing
        return values[:size].copy(), counts[:size].copy()
    return values[:size], counts[:size]


def encode(values: np.ndarray, valid: np.ndarray | None, offset: int, expected: int = 0
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Codes of values in ascending order, or None where this type is not compiled.

    Args:
        values: uint32, int64 or uint64 [L].
        valid: bitmap uint8, the bit of value k at place `offset` + k, 0 = missing; None = all
            there.
        offset: see `valid`.
        expected: about how many distinct values there will be, 0 = nobody knows.

    Returns:
        Codes in the narrowest unsigned integers [L] (0 = missing, k + 1 = the k-th distinct value),
        distinct values, ascending [K], and how often each code occurs, int64 [K + 1].
    """
    compiled, kind = library(), _kind(values)
    if compiled is None or kind is None:
        return None
    values = np.ascontiguousarray(values)
    num = compiled.oper_data_encode(
        kind, address(values), address(valid), ctypes.c_int64(offset), _size(values),
        ctypes.c_int64(expected))
    codes = np.empty(values.size, np.min_scalar_type(max(1, num)))
    distinct, counts = np.empty(num, values.dtype), np.empty(num + 1, np.int64)
    compiled.oper_data_encoded(kind, address(codes), address(distinct), address(counts))
    return codes, distinct, counts


def lookup(known: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ids int32 [K] of ascending `values` [K] by ascending `known` [M] with `ids` [M]; else 0."""
    found = np.zeros(values.size, np.int32)
    if not known.size or not values.size:
        return found
    compiled, kind = library(), _kind(known, values)
    if compiled is not None and kind is not None and ids.dtype == np.int32:
        values = np.ascontiguousarray(values)
        compiled.oper_data_lookup(kind, address(known), address(ids), _size(known),
                                  address(values), _size(values), address(found))
        return found
    first, last = np.searchsorted(known, [values[0], values[-1]])
    at = np.searchsorted(known[first:last + 1], values) + first
    at[at == known.size] = 0
    return np.where(known[at] == values, ids[at], np.int32(0))


def deal(counts: np.ndarray, levels: tuple[np.ndarray, np.ndarray, np.ndarray],
         given: np.ndarray) -> np.ndarray:
    """Ids by count: values of one count get ascending ids in the order in which they come.

    Args:
        counts: int64 [K], of the next values.
        levels: ascending counts, int64 [M], all that occur; how many values of each get an id; the
            first id of each.
        given: int64 [M], values of each count met so far; brought up to date.

    Returns:
        int32 [K], 0 = none.
    """
    found = np.zeros(counts.size, np.int32)
    compiled = library()
    if compiled is not None:
        arrays = [np.ascontiguousarray(a, np.int64) for a in (counts, *levels)]
        if compiled.oper_data_deal(
                *(address(a) for a in arrays), _size(arrays[1]), _size(arrays[0]), address(given),
                address(found)):
            raise ValueError("a count that is not among the levels")
        return found
    level = np.searchsorted(levels[0], counts)
    order = np.argsort(level, kind="stable")
    grouped = level[order]
    turn = np.empty(level.size, np.int64)
    turn[order] = np.arange(level.size) - np.searchsorted(grouped, grouped)
    turn += given[level]
    given += np.bincount(level, minlength=given.size)
    has_id = turn < levels[1][level]
    found[has_id] = (levels[2][level] + turn)[has_id]
    return found


def gather(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """``table[codes]`` of int32 [K] and unsigned codes [L], all below K."""
    compiled, width = library(), _WIDTHS.get(codes.dtype)
    if compiled is None or width is None or table.dtype != np.int32:
        return table[codes]
    table, codes = np.ascontiguousarray(table), np.ascontiguousarray(codes)
    if codes.size and int(codes.max()) >= table.size:
        raise IndexError(f"code {int(codes.max())} of {table.size}")
    found = np.empty(codes.size, np.int32)
    compiled.oper_data_gather(address(table), address(codes), _size(codes), width, address(found))
    return found


_TAKES = {(np.dtype(a), np.dtype(b)): k for k, (a, b) in enumerate(
    ((np.int32, np.int64), (np.int64, np.int64), (np.float32, np.float32)))}


class Outputs:
    """Arrays that `take` writes to, one of each batch; made once for all columns.

    Attributes:
        arrays: contiguous, of one type and dimension.
        bases: their addresses, uint64.
    """

    def __init__(self, arrays: list[np.ndarray]) -> None:
        assert all(a.flags.c_contiguous and a.ndim == 1 for a in arrays)
        self.arrays = arrays
        self.bases = np.array([a.ctypes.data for a in arrays], np.uint64)


def take(pieces: list[np.ndarray], ends: np.ndarray | None, order: np.ndarray, size: int,
         to: Outputs, starts: np.ndarray, step: int = 1) -> None:
    """Values of a column's rows in another order, cut into batches, bag after bag.

    Args:
        pieces: the column's values, one after the other, at least one: int32, int64 or float32,
            contiguous.
        ends: where each of n bags ends, int64 [n + 1], the first 0; None = one value per row.
        order: rows, int32 [m], contiguous, each in 0..n-1.
        size: rows of a batch; the last one may have fewer.
        to: at least as many batches as that makes, int64, or float32 for float values.
        starts: int64, where in each batch the column's values begin; they are overwritten.
        step: places from one value to the next, 1 for bags.
    """
    assert ends is None or step == 1
    if len({p.dtype for p in pieces}) > 1:
        pieces = [np.concatenate(pieces)]
    compiled = library()
    kind = _TAKES.get((pieces[0].dtype, to.arrays[0].dtype)) if to.arrays else None
    if compiled is not None and kind is not None:
        # Named, so that they outlive the call: an address alone does not hold its array.
        froms = Outputs(pieces).bases
        sizes = np.array([p.size for p in pieces], np.int64)
        outs = to.bases + (starts * to.arrays[0].itemsize).astype(np.uint64)
        compiled.oper_data_take(
            kind, address(froms), address(sizes), _size(sizes), address(ends),
            address(order), _size(order), ctypes.c_int64(size), ctypes.c_int64(step),
            address(outs))
        return
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    for k, (out, start) in enumerate(zip(to.arrays, starts, strict=True)):
        rows = order[k * size:(k + 1) * size]
        if ends is not None:
            lengths = np.diff(ends)[rows]
            firsts = np.cumsum(lengths) - lengths
            rows = np.arange(lengths.sum()) + np.repeat(ends[rows] - firsts, lengths)
        out[start::step][:rows.size] = values[rows]
