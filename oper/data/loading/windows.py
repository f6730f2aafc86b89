"""The order of an epoch, and the windows of rows that are shuffled together."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from oper.data.loading.groups import Column, GroupReader, RowGroups


class EpochOrder:
    """Divides a rank's rows of an epoch into windows, which are shuffled, and these into batches.

    Attributes:
        batches_per_window: batches of a window; only a rank's last window may have fewer.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, window: int, seed: tuple[int, int],
                 share: tuple[int, int], together: int = 1) -> None:
        """Order the row groups of an epoch and take a rank's contiguous share of their rows.

        Args:
            rows: rows of each row group, int64 [G].
            batch_size: samples of a batch.
            window: rows of a window; 0 = no shuffle.
            seed: seed and epoch.
            share: rank and world size.
            together: number of windows whose batches alternate.
        """
        self._seed, self._share, self._shuffles = seed, share, window > 0
        self._order = (np.random.default_rng(seed).permutation(rows.size) if window
                       else np.arange(rows.size))
        self._ends = np.cumsum(rows[self._order])
        total, (rank, world_size) = int(rows.sum()), share
        self._first, self._last = (total * k // world_size for k in (rank, rank + 1))
        # Without a shuffle, a window is only the unit of reading.
        self.batches_per_window = max(1, (window or 1 << 17) // batch_size)
        self._size = self.batches_per_window * batch_size
        full = (self._last - self._first) // self._size
        self._together, self._in_turns = together, full // together * together

    def place(self, batch: int) -> tuple[int, int]:
        """Return the window that contains a batch of the epoch, and the batch's index in it.

        The batches of each group of `together` windows are taken round-robin from its windows;
        windows that do not fill a group come one after the other at the end.
        """
        each, together = self.batches_per_window, self._together
        if batch >= self._in_turns * each:
            return divmod(batch, each)
        block, turn = divmod(batch, each * together)
        return block * together + turn % together, turn // together

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """List the row ranges of a window as (group, start, stop); empty after the last window."""
        start = self._first + window * self._size
        stop = min(start + self._size, self._last)
        found = []
        at = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            end, group = int(self._ends[at]), int(self._order[at])
            begin = int(self._ends[at - 1]) if at else 0
            if end > start:
                found.append((group, start - begin, min(end, stop) - begin))
                start = min(end, stop)
            at += 1
        return found

    def shuffled(self, window: int, num_rows: int) -> np.ndarray:
        """Permute the row indices of a window, int32 [num_rows]; identity without a shuffle."""
        if not self._shuffles:
            return np.arange(num_rows, dtype=np.int32)
        rng = np.random.default_rng(np.random.SeedSequence(
            self._seed, spawn_key=(*self._share, window)))
        return rng.permutation(num_rows).astype(np.int32)

    def grouped(self, window: int, keys: np.ndarray) -> np.ndarray:
        """Permute the rows of a window: rows with equal keys become adjacent, in their order, and
        the keys are shuffled (if there is a shuffle).

        Args:
            window: number of the window, which determines the shuffle.
            keys: int [n], key of each row.

        Returns:
            int32 [n], row indices in the new order.
        """
        distinct, inverse = np.unique(keys, return_inverse=True)
        order = self.shuffled(window, distinct.size)
        turn = np.empty(distinct.size, np.int32)
        turn[order] = np.arange(distinct.size, dtype=np.int32)
        return np.argsort(turn[inverse], kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The rows of a window and their shuffled order.

    Attributes:
        columns: by name, the pieces of a column in the folder's order, to be concatenated.
        order: indices of the rows in the order in which batches use them, int32 [n].
    """

    columns: dict[str, list[Column]]
    order: np.ndarray

    def of_rank(self, batch_size: int, rank: int, world_size: int) -> Window:
        """Return a rank's rows of all global batches of `batch_size * world_size` rows.

        An incomplete last batch is divided evenly; the first ranks take one row more if needed.
        """
        full = self.order.size // (batch_size * world_size)
        whole, rest = np.split(self.order, [full * batch_size * world_size])
        mine = whole.reshape(full, world_size, batch_size)[:, rank].reshape(-1)
        return Window(self.columns, np.concatenate(
            [mine, np.array_split(rest, world_size)[rank]]))


class WindowReader:
    """Reads the windows of one rank and epoch; thread-safe.

    Row groups that two windows share are cached, so that neighbouring windows read them once.
    """

    def __init__(self, groups: RowGroups, order: EpochOrder, group_by: str, num_near: int
                 ) -> None:
        """Prepare to read, with a cache for up to `num_near` windows in progress at a time."""
        self._groups, self._order, self._group_by = groups, order, group_by
        self._own, self._lock = threading.local(), threading.Lock()
        self._kept: dict[int, Future[dict[str, Column]]] = {}
        self._most_kept = num_near + 1

    def read(self, window: int) -> Window:
        """Read a window, empty after the rank's last row; raises FileFormatError."""
        pieces = self._order.pieces(window)
        if not pieces:
            none, bags = np.zeros(0, np.int32), self._groups.bags
            return Window({n: [Column(none, np.zeros(1, np.int64) if n in bags else None)]
                           for n in self._groups.columns}, none)
        found = {group: self._group(group, stop - start < self._groups.rows[group])
                 for group, start, stop in pieces}
        # Sorted by group, that is in the folder's order, which is by time for logs with times.
        columns = {n: [found[group][n].part(start, stop) for group, start, stop in sorted(pieces)]
                   for n in self._groups.columns}
        if self._group_by:
            keys = np.concatenate([p.values for p in columns[self._group_by]])
            return Window(columns, self._order.grouped(window, keys))
        return Window(columns, self._order.shuffled(
            window, sum(stop - start for _, start, stop in pieces)))

    def _group(self, group: int, is_shared: bool) -> dict[str, Column]:
        """Return the columns of a group; a shared one is read by the first thread that needs it."""
        if not is_shared:
            return self._read(group)
        with self._lock:
            kept = self._kept.pop(group, None)
            future: Future[dict[str, Column]] = kept or Future()
            self._kept[group] = future  # at the end: the first entries are evicted first
            while len(self._kept) > self._most_kept:
                del self._kept[next(iter(self._kept))]
        if kept is None:
            try:
                future.set_result(self._read(group))
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()

    def _read(self, group: int) -> dict[str, Column]:
        if not hasattr(self._own, "reader"):  # files are not shared between threads
            self._own.reader = GroupReader(self._groups)
        found: dict[str, Column] = self._own.reader.read(group)
        return found
