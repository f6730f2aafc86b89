"""Make tables equal in all replica groups after rows or keys were written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.shmem.keys.directories import RECORDS


def equalize_groups(of: Any, exchange: Callable[[list[int]], list[list[int]]],
                    refresh: Callable[[], None]) -> None:
    """Copy rows and states of the first group to all groups, for tables whose checksums differ
    between counterparts. Keys are only compared: every rank must have loaded the same ones.
    Collective over all groups.

    Args:
        of: this rank's `Synchronizer`.
        exchange: sends numbers, the same count on all counterparts, and returns those of every
        group.
        refresh: called on all ranks of a group, once, if rows of one of them were replaced.

    Raises:
        InvalidInputError: the keys of a dynamic table differ between groups.
    """
    tables, groups = of.tables, of.groups
    num = len(tables.directories)
    sums = exchange([_checksum([*tables.views(k).values()]) for k in range(num)] + [
        _key_checksum(tables, [] if tables.keys is None else tables.keys.tables)])
    _require_equal([x[num] for x in sums])
    wanted = [np.arange(tables.directories[k].num_slots[tables.group.rank], dtype=np.uint32)
              if any(theirs[k] != sums[0][k] for theirs in sums) else np.zeros(0, np.uint32)
              for k in range(num)]
    nothing = np.zeros(0, np.uint32)
    for some in of._chunks(wanted):
        parts = [[x] + [nothing] * (groups.count - 1) for x in some]
        for k, _, view, rows in of._send_rows(parts)():
            view.index_copy_(0, torch.from_numpy(some[k].astype(np.int64)), rows[0])
    if any(tables.all_gather(sums[groups.counterparts.rank] != sums[0])):
        refresh()


def check_keys(tables: Any, name: str, exchange: Callable[[list[int]], list[list[int]]]) -> None:
    """Raise InvalidInputError if the keys of dynamic table `name` differ between groups. Collective
    over all groups; `exchange`: see `equalize_groups`."""
    _require_equal([x for x, in exchange([_key_checksum(tables, [name])])])


def _require_equal(checksums: list[int]) -> None:
    if len(set(checksums)) > 1:
        raise InvalidInputError("cannot use the written tables", "keys of dynamic tables",
                                "different", "equal in all replica groups",
                                "load the same checkpoint on all ranks")


def _checksum(arrays: list[torch.Tensor]) -> int:
    return zlib.crc32(b"".join(
        zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data).to_bytes(4, "little")
        for x in arrays))


def _key_checksum(tables: Any, names: Collection[str]) -> int:
    """Checksum of the directories of these dynamic tables, the same on all ranks of a group; 0 if
    there are none."""
    keys, rank, size = tables.keys, tables.group.rank, tables.group.world_size
    if not names:
        return 0
    mine = []
    for name in names:
        for part in keys.parts(name):
            n = keys.num_records(name, RECORDS[part])
            mine.append(keys.read(name, part, n * rank // size, n * (rank + 1) // size))
    clocks = torch.tensor([keys.clock(name) for name in names])
    return zlib.crc32(repr(tables.all_gather(_checksum([*mine, clocks]))).encode())
