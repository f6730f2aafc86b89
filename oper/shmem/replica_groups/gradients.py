"""Sums of gradients over replica groups that make every update together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oper.messages import number_bytes
from oper.shmem.replica_groups.averages import places, union_of
from oper.shmem.replica_groups.counterparts import Counterparts
from oper.shmem.replica_groups.messages import Reader, coded


def add_up(tables: Any, counterparts: Counterparts, group: int, bits: int,
           exchange: Callable[[list[int]], list[list[int]]]) -> None:
    """Replace this rank's sums of gradients, which `step` has kept for the update, by the sums over
    all groups. Collective over the counterparts.

    With fewer than 32 bits every group rounds its sums once, stochastically with 8 bits; all
    groups, this one as well, add up the rounded values, so that they make the same update.

    Args:
        tables: the collection's tables.
        counterparts: the connections to the other groups.
        group: the number of this rank's group.
        bits: bits per number of a gradient in messages.
        exchange: sends numbers, the same count on all counterparts, and returns those of every
        group.
    """
    pairs = [(d, *torch.ops.oper.context_kept(tables.handle, t, pushed))
             for t, d in enumerate(tables.directories) for pushed in (False, True)]
    counts = exchange([slots.numel() for _, slots, _ in pairs])
    data = []
    for d, slots, rows in pairs:
        draws = [*tables._rounding_keys[d.table.name], tables.num_steps, group, int(d.column)]
        data += [slots.view(torch.uint8), coded(rows, bits, draws, slots)]
    found = counterparts.exchange(
        data, [sum(n * (4 + number_bytes(bits, d.dim))
                   for n, (d, _, _) in zip(theirs, pairs, strict=True)) for theirs in counts])
    readers = [Reader(x) for x in found]
    for k, (d, _, _) in enumerate(pairs):
        parts = [(reader.slots(theirs[k]), reader.take(theirs[k], d.dim, torch.float32, bits))
                 for reader, theirs in zip(readers, counts, strict=True)]
        union = union_of([s for s, _ in parts])
        total = torch.zeros(union.size, d.dim, dtype=torch.float32)
        for slots, rows in parts:
            at = places(union, slots)
            total.index_copy_(0, at, total.index_select(0, at) + rows)
        torch.ops.oper.context_keep(tables.handle, k // 2, bool(k % 2),
                                    torch.from_numpy(union.view(np.int32)), total)
