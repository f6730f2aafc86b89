"""Compiled counting and parsing of text.

``liboper_data.so`` has a plain C interface and needs no torch, so that workers that read logs start
quickly. Texts, for which it has no functions, are processed by NumPy.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from oper.errors import MissingDependencyError

_KINDS = {np.dtype(np.uint32): 0, np.dtype(np.int64): 1, np.dtype(np.uint64): 2}
Counts = tuple[np.ndarray, np.ndarray]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        MissingDependencyError: it is not built or does not load.
    """
    path = Path(__file__).resolve().parents[1] / "_lib" / "liboper_data.so"
    try:
        found = ctypes.CDLL(str(path))
        for name in ("parse", "encode", "encoded", "sample", "merge", "lookup", "deal", "tally",
                     "tally_move", "tally_purge", "tally_levels", "tally_list"):
            getattr(found, f"oper_data_{name}").restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(
            "the native library for logs and counts cannot be used", "file", str(path), str(error),
            "build it: python setup.py build_ext --inplace, or install the package") from None
    return found


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    """Address of the data of a contiguous array; a null pointer for None."""
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


def sampled(ids: np.ndarray, level: int) -> np.ndarray:
    """Indices, ascending, of the ids (int64 [K]) whose 64-bit hash begins with `level` zeros.

    The hash is the finalizer of splitmix64; a share of about 2^-level of all ids has it.
    """
    if level == 0:
        return np.arange(ids.size)
    ids, places = np.ascontiguousarray(ids, np.int64), np.empty(ids.size, np.int64)
    num = library().oper_data_sample(address(ids), _size(ids), ctypes.c_int32(level),
                                     address(places))
    return places[:num].copy()


def merge_counts(parts: list[Counts] | tuple[Counts, ...]) -> Counts:
    """Merge (values, counts) pairs, each sorted by value, adding the counts (int64) of equal
    values."""
    parts = list(parts)
    if _kind(*(v for v, _ in parts)) is not None:
        while len(parts) > 1:  # neighbours in pairs: a logarithmic number of rounds
            parts = [_merge_two(*parts[k:k + 2]) if k + 1 < len(parts) else parts[k]
                     for k in range(0, len(parts), 2)]
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


def _merge_two(one: Counts, other: Counts) -> Counts:
    if not one[0].size or not other[0].size:
        return one if one[0].size else other
    arrays = [np.ascontiguousarray(a) for a in one] + [np.ascontiguousarray(a) for a in other]
    arrays[1::2] = (a.astype(np.int64, copy=False) for a in arrays[1::2])
    total = one[0].size + other[0].size
    values, counts = np.empty(total, one[0].dtype), np.empty(total, np.int64)
    size = library().oper_data_merge(
        _KINDS[values.dtype], address(arrays[0]), address(arrays[1]), _size(arrays[0]),
        address(arrays[2]), address(arrays[3]), _size(arrays[2]), address(values), address(counts))
    if 2 * size < total:  # what is kept for long should not hold memory for nothing
        return values[:size].copy(), counts[:size].copy()
    return values[:size], counts[:size]


def encode(values: np.ndarray, valid: np.ndarray | None, offset: int, expected: int = 0
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of values in ascending order.

    Args:
        values: uint32, int64 or uint64 [L].
        valid: bitmap uint8, bit `offset` + k of which is 0 where value k is missing; None = none
            missing.
        offset: see `valid`.
        expected: approximate number of distinct values, 0 = unknown.

    Returns:
        Codes in the narrowest unsigned integers [L] (0 = missing, k + 1 = the k-th distinct value),
        distinct values, ascending [K], and how often each code occurs, int64 [K + 1].
    """
    compiled, kind = library(), _KINDS[values.dtype]
    values = np.ascontiguousarray(values)
    num = compiled.oper_data_encode(
        kind, address(values), address(valid), ctypes.c_int64(offset), _size(values),
        ctypes.c_int64(expected))
    codes = np.empty(values.size, np.min_scalar_type(max(1, num)))
    distinct, counts = np.empty(num, values.dtype), np.empty(num + 1, np.int64)
    compiled.oper_data_encoded(kind, address(codes), address(distinct), address(counts))
    return codes, distinct, counts


def lookup(known: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ids, int32 [K], of `values` [K] in a vocabulary; 0 for a value that is not in it.

    Args:
        known: the vocabulary's values, ascending [M].
        ids: their ids, int32 [M].
        values: ascending values [K].
    """
    found = np.zeros(values.size, np.int32)
    if not known.size or not values.size:
        return found
    kind = _kind(known, values)
    if kind is not None:
        values = np.ascontiguousarray(values)
        library().oper_data_lookup(kind, address(known), address(ids), _size(known),
                                   address(values), _size(values), address(found))
        return found
    first, last = np.searchsorted(known, [values[0], values[-1]])
    at = np.searchsorted(known[first:last + 1], values) + first
    at[at == known.size] = 0
    return np.where(known[at] == values, ids[at], np.int32(0))


def deal(counts: np.ndarray, levels: tuple[np.ndarray, np.ndarray, np.ndarray],
         given: np.ndarray) -> np.ndarray:
    """Assign ids by count: values of equal count get ascending ids in the order in which they come.

    Args:
        counts: int64 [K], counts of the next values.
        levels: three arrays int64 [M]: all counts that occur, ascending; how many values of each
            get an id; the first id of each.
        given: int64 [M], values of each count seen so far; updated in place.

    Returns:
        int32 [K], 0 = none.
    """
    found = np.zeros(counts.size, np.int32)
    arrays = [np.ascontiguousarray(a, np.int64) for a in (counts, *levels)]
    if library().oper_data_deal(*(address(a) for a in arrays), _size(arrays[1]), _size(arrays[0]),
                                address(given), address(found)):
        raise ValueError("a count that is not among the levels")
    return found


_TAKES = {(np.dtype(a), np.dtype(b)): k for k, (a, b) in enumerate(
    ((np.int32, np.int64), (np.int64, np.int64), (np.float32, np.float32)))}


class Outputs:
    """Arrays that `take` writes to, one per batch; created once for all columns.

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
        to: output arrays, at least one per batch, int64, or float32 for float values.
        starts: int64, where in each batch the column's values begin; overwritten with where they
            end.
        step: distance from one value to the next in the output, 1 for bags.
    """
    assert ends is None or step == 1
    if not to.arrays:
        return
    if len({p.dtype for p in pieces}) > 1:
        pieces = [np.concatenate(pieces)]
    # Named, so that they outlive the call: an address alone does not hold its array.
    sources = Outputs(pieces).bases
    sizes = np.array([p.size for p in pieces], np.int64)
    outs = to.bases + (starts * to.arrays[0].itemsize).astype(np.uint64)
    library().oper_data_take(
        _TAKES[pieces[0].dtype, to.arrays[0].dtype], address(sources), address(sizes), _size(sizes),
        address(ends), address(order), _size(order), ctypes.c_int64(size), ctypes.c_int64(step),
        address(outs))
