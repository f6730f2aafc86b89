"""Interface to compiled functions that encode and count values of logs, and NumPy functions
that merge and look up sorted values.

``liboper_data.so`` has a plain C interface and does not need torch, so that processes that read
logs start quickly.
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
    """Load the compiled library.

    Raises:
        MissingDependencyError: the library is not built or cannot be loaded.
    """
    path = Path(__file__).resolve().parents[1] / "_lib" / "liboper_data.so"
    try:
        found = ctypes.CDLL(str(path))
        for name in ("encode", "encoded", "sample", "tally", "tally_move", "tally_purge",
                     "tally_levels", "tally_list"):
            getattr(found, f"oper_data_{name}").restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(
            "the native library for logs and counts cannot be used", "file", str(path), str(error),
            "build it: python setup.py build_ext --inplace, or install the package") from None
    return found


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    """Return the address of a contiguous array's data; a null pointer for None."""
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _size(array: np.ndarray) -> ctypes.c_int64:
    return ctypes.c_int64(array.size)


def sampled(ids: np.ndarray, level: int) -> np.ndarray:
    """Return ascending indices of `ids`, int64 [K], whose 64-bit hash begins with `level` zeros.

    The hash is the finalizer of splitmix64, so about 2^-level of all ids are selected.
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
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([v for v, _ in parts])
    counts = np.concatenate([c for _, c in parts])
    order = np.argsort(values, kind="stable")  # fast, since the parts are sorted
    values, counts = values[order], counts[order]
    if not values.size:
        return values, counts
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.add.reduceat(counts, starts)


def encode(values: np.ndarray, valid: np.ndarray | None, offset: int, expected: int = 0
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode values by their ranks among the distinct values.

    Args:
        values: uint32, int64 or uint64 [L].
        valid: bitmap, uint8; bit ``offset + k`` is 0 if value k is missing; None = all are valid.
        offset: index of the bit of value 0 in `valid`.
        expected: approximate number of distinct values; 0 = unknown.

    Returns:
        Codes [L] in the narrowest unsigned dtype (0 = missing, k + 1 = the k-th distinct value),
        the distinct values [K] in ascending order, and the number of occurrences of each code,
        int64 [K + 1].
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
