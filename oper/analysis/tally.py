"""Counts of ids in a hash table of bounded size: exact while they fit, Misra-Gries beyond."""

from __future__ import annotations

import ctypes

import numpy as np

from oper.support.native import Counts, address, library

_FEW = 1 << 12  # counts below are distinguished when a table is purged
_FIRST_BITS = 12
_NARROW = 1 << 32  # slots have 8 bytes while ids and accesses are below
_EMPTY = np.zeros(0, np.int64)


class Tally:
    """Counts of non-negative ids in one hash table.

    Open addressing, with at most three quarters of the slots used. A slot has 8 bytes, or 16 once
    ids or accesses exceed 32 bits. `purge` makes space by the method of Misra and Gries ("Finding
    repeated elements", 1982), applied to many ids at a time (Anderson et al., "A high-performance
    algorithm for identifying frequent items in data streams", 2017).

    Attributes:
        max_bytes: memory limit; while the table grows, it takes up to a quarter more.
        error: upper limit of what `purge` has subtracted from any count.
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
        """Add 1, or `counts[k]`, to the count of every `ids[k]`; both arguments int64 [N].

        Returns the number of ids that were counted; the table has no space for the rest of `ids`.
        """
        if not ids.size:
            return 0
        num = self._num_accesses + (ids.size if counts is None else int(counts.sum()))
        if (num >= _NARROW or int(ids.max()) >= _NARROW) and not self._widen():
            return 0
        self._num_accesses = num
        ids, taken = np.ascontiguousarray(ids), 0
        while taken < ids.size:
            if self._bits:
                left = None if counts is None else np.ascontiguousarray(counts[taken:])
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
