"""A batch on a device: what the step under way has made of it, and the rows that its keys name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.rows.directory import TableDirectory, TierLayout

_UINT32 = 0xFFFFFFFF


class StepArrays:
    """What the step under way has made of its batch, in device memory. Reading it waits.

    Args:
        handle: of the tables.
    """

    def __init__(self, handle: int) -> None:
        keys, begin, num_runs, *inbox = torch.ops.oper.device_arrays(handle)
        self._keys, self._begin, self._num_runs, self._inbox = keys, begin, num_runs, inbox

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the distinct rows of the batch, ascending, int64 [R], and where the pairs of each
        begin, int64 [R + 1]."""
        begin = unsigned(self._begin[:int(self._num_runs) + 1])
        keys = self._keys[begin[:-1]]
        return (keys if keys.dtype == torch.int64 else unsigned(keys)), begin

    def lists(self, world_size: int) -> np.ndarray:
        """Where each table's entries begin in what each rank has left for this one, int64
        [W, T + 1], tables in the order of keys; within an update."""
        return self._inbox[0].cpu().numpy().reshape(world_size, -1)

    def merged_slots(self, directories: Sequence[TableDirectory], table: int, rank: int
                     ) -> np.ndarray:
        """Slots of a table on `rank`, this one, that any rank has a gradient of, ascending;
        `directories` in the order of keys. Within an update."""
        begin = self.lists(directories[table].world_size)
        rows = self._inbox[1].view(len(begin), -1)
        every = torch.unique(unsigned(torch.cat(
            [x[a:b] for x, (a, b) in zip(rows, begin[:, table:table + 2].tolist(), strict=True)])))
        first = sum(int(d.num_slots[rank]) for d in directories[:table])
        return (every - first).cpu().numpy()


class KeyRange(NamedTuple):
    """Keys of the rows of one tier at one owner: they follow each other.

    Attributes:
        table: in the order of keys.
        tier: the tier.
        owner: its rank.
        begin, end: the keys.
        base: key of the owner's first row of the table.
    """

    table: int
    tier: TierLayout
    owner: int
    begin: int
    end: int
    base: int


def key_ranges(directories: Sequence[TableDirectory]) -> Iterator[KeyRange]:
    """All rows of the directories, which are in the order of keys."""
    first = 0
    for k, d in enumerate(directories):
        for x in d.tiers:
            for owner in x.num_rows.nonzero()[0].tolist():
                base = first + int(d.owner_begin[owner])
                begin = base + int(x.slot_base[owner])
                yield KeyRange(k, x, owner, begin, begin + int(x.num_rows[owner]), base)
        first += d.table.num_rows


def unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """uint32 numbers, held as int32 or as bytes, as int64."""
    return numbers.view(torch.int32).to(torch.int64) & _UINT32
