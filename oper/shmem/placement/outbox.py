"""Size of a rank's outbox: the most that a pass leaves there."""

from __future__ import annotations

from collections.abc import Sequence

from oper.rows.directory import TableDirectory
from oper.shmem.settings import outbox_bytes

_PAGE, _HUGE = 4096, 2 << 20
_SMALL = 4096  # where nothing is left


def needed_bytes(directories: Sequence[TableDirectory]) -> int | None:
    """Bytes, in whole huge pages, that suffice for every batch; None if no limit follows from the
    tables.

    A rank leaves every row that a batch looks up once, with its slot, whatever the number of its
    ids and of the passes that were added up (`no_sync`). Of tiers in push mode it leaves every id
    and every bag instead, which the tables do not bound.

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

    No more than the tables need, nor than `OPER_OUTBOX_BYTES`, or else `default`, or a quarter of
    the machine's memory.

    Args:
        directories: one per column piece of each table.
        is_used: whether ranks leave anything there: in training, and where owners pool.
        default: limit if the variable is not set; None = a quarter of the machine's memory.
    """
    if not is_used:
        return _SMALL
    needed = needed_bytes(directories)
    most = outbox_bytes(default)
    return most if needed is None else min(most, needed)
