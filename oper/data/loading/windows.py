"""The order of an epoch, and the windows of rows that are shuffled together."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from oper.data.loading.groups import Column, GroupReader, RowGroups


class EpochOrder:
    """The rows of row groups that a rank reads in an epoch, window by window.

    Attributes:
        batches_per_window: whole batches of a window; only a rank's last window has fewer rows.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, window: int, seed: tuple[int, int],
                 share: tuple[int, int], together: int = 1) -> None:
        """Arrange the row groups for a rank and an epoch.

        Args:
            rows: rows of each row group, int64 [G].
            batch_size, window: samples of a batch; rows of a window, 0 = no shuffle.
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
        # Without a shuffle a window is what is read at once.
        self.batches_per_window = max(1, (window or 1 << 17) // batch_size)
        self._size = self.batches_per_window * batch_size
        full = (self._last - self._first) // self._size
        self._together, self._in_turns = together, full // together * together

    def place(self, batch: int) -> tuple[int, int]:
        """The window of a batch, and the batch's number there.

        In each group of interleaved windows, the first batches of all windows come first, then the
        second ones, and so on; windows left over at the end come one after the other.
        """
        each, together = self.batches_per_window, self._together
        if batch >= self._in_turns * each:
            return divmod(batch, each)
        block, turn = divmod(batch, each * together)
        return block * together + turn % together, turn // together

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """The row ranges that make up a window: group, first row, row after the last; [] after the
        last window."""
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
        """Indices of the rows of a window in random order, int32 [num_rows]."""
        if not self._shuffles:
            return np.arange(num_rows, dtype=np.int32)
        rng = np.random.default_rng(np.random.SeedSequence(
            self._seed, spawn_key=(*self._share, window)))
        return rng.permutation(num_rows).astype(np.int32)

    def grouped(self, window: int, keys: np.ndarray) -> np.ndarray:
        """Indices, int32 [n], that put rows of equal key (int [n]) together, keys in random order.
        """
        distinct, inverse = np.unique(keys, return_inverse=True)
        order = self.shuffled(window, distinct.size)
        turn = np.empty(distinct.size, np.int32)
        turn[order] = np.arange(distinct.size, dtype=np.int32)
        return np.argsort(turn[inverse], kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows by column, and the order in which to use them, int32 [n].

    A column consists of one or more pieces, in the folder's order.
    """

    columns: dict[str, list[Column]]
    order: np.ndarray

    def of_rank(self, batch_size: int, rank: int, world_size: int) -> Window:
        """A rank's parts of global batches of `batch_size * world_size` rows, one after the other.

        Parts of an incomplete last batch are as equal as possible, the first ranks taking one row
        more if they cannot be equal.
        """
        full = self.order.size // (batch_size * world_size)
        whole, rest = np.split(self.order, [full * batch_size * world_size])
        mine = whole.reshape(full, world_size, batch_size)[:, rank].reshape(-1)
        return Window(self.columns, np.concatenate(
            [mine, np.array_split(rest, world_size)[rank]]))


class WindowReader:
    """Reads the windows of one rank and epoch; by any number of threads at once.

    A row group that continues in the next window is kept for it, so windows read in sequence or
    concurrently read each group once.
    """

    def __init__(self, groups: RowGroups, order: EpochOrder, group_by: str, num_near: int
                 ) -> None:
        """Prepare to read windows; those read at the same time must be at most `num_near` apart."""
        self._groups, self._order, self._group_by = groups, order, group_by
        self._own, self._lock = threading.local(), threading.Lock()
        self._kept: dict[int, Future[dict[str, Column]]] = {}
        self._most_kept = num_near + 1

    def read(self, window: int) -> Window:
        """The rows of a window, empty after the rank's last row; raises FileFormatError."""
        pieces = self._order.pieces(window)
        if not pieces:
            none, bags = np.zeros(0, np.int32), self._groups.bags
            return Window({n: [Column(none, np.zeros(1, np.int64) if n in bags else None)]
                           for n in self._groups.columns}, none)
        found = {group: self._group(group, stop - start < self._groups.rows[group])
                 for group, start, stop in pieces}
        # In the folder's order, that of time where there is one.
        columns = {n: [found[group][n].part(start, stop) for group, start, stop in sorted(pieces)]
                   for n in self._groups.columns}
        if self._group_by:
            keys = np.concatenate([p.values for p in columns[self._group_by]])
            return Window(columns, self._order.grouped(window, keys))
        return Window(columns, self._order.shuffled(
            window, sum(stop - start for _, start, stop in pieces)))

    def _group(self, group: int, is_shared: bool) -> dict[str, Column]:
        """The columns of a group; one that windows share is read by the first that needs it."""
        if not is_shared:
            return self._read(group)
        with self._lock:
            kept = self._kept.pop(group, None)
            future: Future[dict[str, Column]] = kept or Future()
            self._kept[group] = future  # behind those that were needed earlier
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
