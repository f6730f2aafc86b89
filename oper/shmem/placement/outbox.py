"""Size of a rank's outbox: the largest amount of data that a pass writes to it."""

from __future__ import annotations

from collections.abc import Sequence

from oper.rows.directory import TableDirectory
from oper.shmem.settings import outbox_bytes

_PAGE, _HUGE = 4096, 2 << 20
_SMALL = 4096  # where nothing is left


def needed_bytes(directories: Sequence[TableDirectory]) -> int | None:
    """Bytes, in whole huge pages, that suffice for every batch; None if no limit follows from the
    tables.

    For every row that a batch looks up, a rank writes one gradient with its slot, whatever the
    number of ids and of passes that were added up (`no_sync`). For tiers in push mode it writes
    every id and every bag instead, whose number the tables do not limit.

    Args:
        directories: one per column piece of each table.
    """
    halves = 1
    for d in directories:
        modes = {x.tier.mode for x in d.tiers}
        # A rank that owns the whole of a pushed table treats it as one that is pulled.
        if "push" in modes and (d.world_size > 1 or len(modes) > 1):
            return None
        if "push" in modes:  # the other half is for sums, which are sent without a request
            halves = 2
    size = directories[0].world_size if directories else 1
    # See header_bytes and take_outbox in csrc/host/context.h: the tables of contents, then arrays
    # that each begin at a multiple of 64 bytes.
    head = 64 + len(directories) * (64 + 40 * size)
    rows = sum(d.table.num_rows * (4 + 4 * d.dim) + 2 * 64 for d in directories)
    needed = -(-(head + _PAGE + rows) // _PAGE) * _PAGE * halves
    return -(-needed // _HUGE) * _HUGE


def reserved_bytes(directories: Sequence[TableDirectory], is_used: bool,
                   default: int | None = None) -> int:
    """Address space to reserve for an outbox, in bytes.

    At most the bytes that the tables need, and at most `OPER_OUTBOX_BYTES` (if not set: `default`,
    or a quarter of the machine's memory).

    Args:
        directories: one per column piece of each table.
        is_used: whether ranks write to it: in training, and if owners pool rows.
        default: limit if the variable is not set; None = a quarter of the machine's memory.
    """
    if not is_used:
        return _SMALL
    needed = needed_bytes(directories)
    most = outbox_bytes(default)
    return most if needed is None else min(most, needed)
