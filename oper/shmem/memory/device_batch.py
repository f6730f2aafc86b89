"""Intermediate arrays of the current step on a device, and the ranges of row keys in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.rows.directory import TableDirectory, TierLayout

_UINT32 = 0xFFFFFFFF


class StepArrays:
    """Intermediate arrays of the current step, in device memory. Methods wait for the device.

    Args:
        handle: the kernel context of the tables.
    """

    def __init__(self, handle: int) -> None:
        keys, begin, num_runs, *lists = torch.ops.oper.device_arrays(handle)
        self._keys, self._begin, self._num_runs, self._lists = keys, begin, num_runs, lists

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the batch's distinct rows, int64 [R], ascending, and the index of each
        row's first id in the sorted batch, int64 [R + 1]."""
        begin = unsigned(self._begin[:int(self._num_runs) + 1])
        keys = self._keys[begin[:-1]]
        return (keys if keys.dtype == torch.int64 else unsigned(keys)), begin

    def lists(self, world_size: int) -> np.ndarray:
        """Return where each table's entries begin in the list that each rank sends to this one.

        int64 [W, T + 1] by sender and table in the order of keys. Valid within an update.
        """
        return self._lists[0].cpu().numpy().reshape(world_size, -1)

    def merged_slots(self, directories: Sequence[TableDirectory], table: int, rank: int
                     ) -> np.ndarray:
        """Return the slots of a table on this rank for which any rank has a gradient, int64 [n],
        ascending. Valid within an update.

        Args:
            directories: in the order of keys.
            table: index of the table.
            rank: this rank.
        """
        begin = self.lists(directories[table].world_size)
        rows = self._lists[1].view(len(begin), -1)
        every = torch.unique(unsigned(torch.cat(
            [x[a:b] for x, (a, b) in zip(rows, begin[:, table:table + 2].tolist(), strict=True)])))
        first = sum(int(d.num_slots[rank]) for d in directories[:table])
        return (every - first).cpu().numpy()


class KeyRange(NamedTuple):
    """The consecutive keys of the rows of one tier at one owner.

    Attributes:
        table: index of the table in the order of keys.
        tier: the tier.
        owner: rank of the owner.
        begin, end: first key, and last key + 1.
        base: key of the owner's first row of the table.
    """

    table: int
    tier: TierLayout
    owner: int
    begin: int
    end: int
    base: int


def key_ranges(directories: Sequence[TableDirectory]) -> Iterator[KeyRange]:
    """Yield the key ranges of all rows; `directories` must be in the order of keys."""
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
