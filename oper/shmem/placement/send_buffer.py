"""Size of a rank's send buffer, the memory in which it leaves gradients and sums for other
ranks."""

from __future__ import annotations

from collections.abc import Sequence

from oper.rows.directory import TableDirectory
from oper.shmem.settings import send_buffer_bytes

_PAGE, _HUGE = 4096, 2 << 20
_SMALL = 4096  # size of an unused send buffer


def needed_bytes(directories: Sequence[TableDirectory]) -> int | None:
    """Return a size in bytes that fits any batch, a multiple of the huge-page size; None if the
    tables imply no limit.

    A rank writes one gradient and slot for each distinct row of a batch, also after `no_sync`. For
    tiers in push mode it writes every id and bag instead, whose number the tables do not limit.

    Args:
        directories: one per column piece of each table.
    """
    halves = 1
    for d in directories:
        modes = {x.tier.mode for x in d.tiers}
        # A rank that owns an entire pushed table treats it like a pulled one.
        if "push" in modes and (d.world_size > 1 or len(modes) > 1):
            return None
        if "push" in modes:  # half of the send buffer is then for partial sums of owners
            halves = 2
    head = _header_bytes(directories)
    rows = sum(d.table.num_rows * (4 + 4 * d.dim) + 2 * 64 for d in directories)
    needed = -(-(head + _PAGE + rows) // _PAGE) * _PAGE * halves
    return -(-needed // _HUGE) * _HUGE


def _header_bytes(directories: Sequence[TableDirectory]) -> int:
    """Bytes of the tables of contents, which arrays follow that each begin at a multiple of 64
    bytes; see header_bytes and take_send_buffer in csrc/host/context.h."""
    size = directories[0].world_size if directories else 1
    return 64 + len(directories) * (64 + 40 * size)


def reserved_bytes(directories: Sequence[TableDirectory], is_used: bool,
                   default: int | None = None) -> int:
    """Return the address space to reserve for a send buffer, in bytes.

    This is the minimum of `needed_bytes` and the limit `oper.shmem.settings.send_buffer_bytes`, or
    one page if the send buffer is not used; but no less than its headers take.

    Args:
        directories: one per column piece of each table.
        is_used: whether ranks write to send buffers: in training, and if owners pool rows.
        default: limit if ``OPER_SEND_BUFFER_BYTES`` is not set; None = a quarter of the memory.
    """
    if not is_used:
        return _SMALL
    needed = needed_bytes(directories)
    most = send_buffer_bytes(default)
    # Kernels write the headers before they notice that the rows do not fit. With pushed rows, they
    # are in one half of the buffer.
    most = max(most, -(-2 * (_header_bytes(directories) + _PAGE) // _PAGE) * _PAGE)
    return most if needed is None else min(most, needed)
