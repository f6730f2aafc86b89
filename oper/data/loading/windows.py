"""The order of an epoch, and the windows of rows that are shuffled together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.data.loading.groups import Column, GroupReader, RowGroups, joined


class EpochOrder:
    """Which rows of which row groups a rank reads in an epoch, window by window.

    Attributes:
        batches_per_window: whole batches of a window; only a rank's last window has fewer rows.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, window: int, seed: tuple[int, int],
                 share: tuple[int, int]) -> None:
        """Deal the row groups.

        Args:
            rows: of each row group, int64 [G].
            batch_size, window: samples of a batch; rows of a window, 0 = no shuffle.
            seed: seed and epoch.
            share: rank and world size.
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

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """Group, first row, row after the last, of what a window is made of; [] behind the end."""
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
        """Places of the rows of a window in random order, int32 [num_rows]."""
        if not self._shuffles:
            return np.arange(num_rows, dtype=np.int32)
        rng = np.random.default_rng(np.random.SeedSequence(
            self._seed, spawn_key=(*self._share, window)))
        return rng.permutation(num_rows).astype(np.int32)

    def grouped(self, window: int, keys: np.ndarray) -> np.ndarray:
        """Places int32 [n]: rows of one key, int [n], one after the other, keys in random order."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        order = self.shuffled(window, distinct.size)
        turn = np.empty(distinct.size, np.int32)
        turn[order] = np.arange(distinct.size, dtype=np.int32)
        return np.argsort(turn[inverse], kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows by column, in the folder's order, and the order in which they are to come, int32 [n]."""

    columns: dict[str, Column]
    order: np.ndarray

    def of_rank(self, batch_size: int, rank: int, world_size: int) -> Window:
        """A rank's parts of global batches of `batch_size * world_size` rows, one after the other.

        Parts of an incomplete last batch are as equal as possible, the first ranks taking one row
        more where it does not divide.
        """
        full = self.order.size // (batch_size * world_size)
        whole, rest = np.split(self.order, [full * batch_size * world_size])
        mine = whole.reshape(full, world_size, batch_size)[:, rank].reshape(-1)
        return Window(self.columns, np.concatenate(
            [mine, np.array_split(rest, world_size)[rank]]))


class WindowReader:
    """Reads the windows of one rank and epoch; for one thread.

    A row group that goes on in the next window is kept until then, so that windows which are read
    one after the other read each group once.
    """

    def __init__(self, groups: RowGroups, order: EpochOrder, group_by: str) -> None:
        self._reader, self._order, self._group_by = GroupReader(groups), order, group_by
        self._rows = groups.rows
        self._kept: tuple[int, dict[str, Column]] = (-1, {})

    def read(self, window: int) -> Window:
        """The rows of a window, none behind the rank's end; raises FileFormatError."""
        pieces = self._order.pieces(window)
        names, bags = self._reader.groups.columns, self._reader.groups.bags
        parts: list[tuple[int, dict[str, Column]]] = []
        for group, start, stop in pieces:
            found = self._kept[1] if self._kept[0] == group else self._reader.read(group)
            if (group, start, stop) == pieces[-1]:
                self._kept = (group, found) if stop < self._rows[group] else (-1, {})
            parts.append((group, {n: found[n].part(start, stop) for n in names}))
        parts.sort(key=lambda p: p[0])  # in the folder's order, that of time where there is one
        if not parts:
            none = np.zeros(0, np.int32)
            return Window({n: Column(none, np.zeros(1, np.int64) if n in bags else None)
                           for n in names}, none)
        columns = {n: joined([p[n] for _, p in parts]) for n in names}
        num_rows = sum(stop - start for _, start, stop in pieces)
        if self._group_by:
            return Window(columns, self._order.grouped(window, columns[self._group_by].values))
        return Window(columns, self._order.shuffled(window, num_rows))
