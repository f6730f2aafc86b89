"""A batch on a device: intermediate arrays of the present step, and ranges of its row keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.rows.directory import TableDirectory, TierLayout

_UINT32 = 0xFFFFFFFF


class StepArrays:
    """Intermediate arrays of the present step, in device memory. Reading them waits for the device.

    Args:
        handle: the tables' native handle.
    """

    def __init__(self, handle: int) -> None:
        keys, begin, num_runs, *inbox = torch.ops.oper.device_arrays(handle)
        self._keys, self._begin, self._num_runs, self._inbox = keys, begin, num_runs, inbox

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the distinct rows of the batch, ascending, int64 [R], and where the (row,
        gradient) pairs of each begin, int64 [R + 1]."""
        begin = unsigned(self._begin[:int(self._num_runs) + 1])
        keys = self._keys[begin[:-1]]
        return (keys if keys.dtype == torch.int64 else unsigned(keys)), begin

    def lists(self, world_size: int) -> np.ndarray:
        """Where each table's entries begin in the send buffers of all ranks for this one.

        int64 [W, T + 1], tables in the order of keys. Valid within an update.
        """
        return self._inbox[0].cpu().numpy().reshape(world_size, -1)

    def merged_slots(self, directories: Sequence[TableDirectory], table: int, rank: int
                     ) -> np.ndarray:
        """Slots, ascending, of a table on this rank for which any rank has a gradient. Valid within
        an update.

        Args:
            directories: in the order of keys.
            table: index of the table.
            rank: this rank.
        """
        begin = self.lists(directories[table].world_size)
        rows = self._inbox[1].view(len(begin), -1)
        every = torch.unique(unsigned(torch.cat(
            [x[a:b] for x, (a, b) in zip(rows, begin[:, table:table + 2].tolist(), strict=True)])))
        first = sum(int(d.num_slots[rank]) for d in directories[:table])
        return (every - first).cpu().numpy()


class KeyRange(NamedTuple):
    """The keys of the rows of one tier at one owner, which are consecutive.

    Attributes:
        table: index of the table, in the order of keys.
        tier: the tier.
        owner: its rank.
        begin, end: first key, and the one after the last.
        base: key of the owner's first row of the table.
    """

    table: int
    tier: TierLayout
    owner: int
    begin: int
    end: int
    base: int


def key_ranges(directories: Sequence[TableDirectory]) -> Iterator[KeyRange]:
    """The key ranges of all rows of the directories, which are in the order of keys."""
    first = 0
    for k, d in enumerate(directories):
        for x in d.tiers:
            for owner in x.num_rows.nonzero()[0].tolist():
                base = first + int(d.owner_begin[owner])
                begin = base + int(x.slot_base[owner])
                yield KeyRange(k, x, owner, begin, begin + int(x.num_rows[owner]), base)
        first += d.table.num_rows


def unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Convert uint32 numbers, stored as int32 or as bytes, to int64."""
    return numbers.view(torch.int32).to(torch.int64) & _UINT32
