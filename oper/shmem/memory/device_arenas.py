"""Arenas of this rank and its peers in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.utils.dlpack

from oper.rows.directory import TableDirectory
from oper.shmem.group.domains import DomainGroup
from oper.shmem.group.groups import Group
from oper.shmem.memory.device_batch import unsigned
from oper.shmem.memory.device_heap import PART_BYTES, DeviceHeap
from oper.shmem.placement.layout import ROW_TYPES, ArenaLayout

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
_SMALL_BYTES = 64 << 10  # size of an unused send buffer


def _up(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


class DeviceArenas:
    """The arenas that a rank can address.

    Args:
        directories: one per column piece of each table.
        group: all ranks. Creation is collective.
        domain: ranks of this memory domain; None = all ranks.
        device: this rank's device.
        exchange_bytes: size of a send buffer and, in push mode, of each rank's requests and of its
            partial sums; 0 = not needed.
        pushes: whether any tier is in push mode.
        clipped: names of the tables whose optimizer has `max_row_norm`.

    Attributes:
        layout: offsets in the arenas, up to the end of the send buffer.
        heap: the memory of the arenas.
        addresses: int [W], addresses of the arenas, 0 = in another memory domain.
        pads, requests, partials: int64 [W], addresses of barrier words, requests and partial sums;
            0 = in another memory domain.
        partial_bytes: size of a rank's requests, and of its partial sums.
    """

    def __init__(self, directories: Sequence[TableDirectory], group: Group,
                 domain: list[int] | None, device: torch.device, exchange_bytes: int, pushes: bool,
                 clipped: Collection[str]) -> None:
        W = group.world_size
        self._device = device
        self.layout = ArenaLayout.build(directories, W, exchange_bytes or _SMALL_BYTES, clipped,
                                        PART_BYTES)
        pads = _up(max(self.layout.num_bytes))
        requests = _up(pads + 4 * W)
        self.partial_bytes = exchange_bytes // 256 * 256 if pushes else 0
        members = list(range(W)) if domain is None else domain
        self.heap = DeviceHeap(
            group if domain is None else DomainGroup(group, domain),
            [requests + 2 * self.partial_bytes] * len(members), device,
            [self.layout.host_ranges[r] for r in members])
        self.addresses = [0] * W
        for rank, address in zip(members, self.heap.addresses, strict=True):
            self.addresses[rank] = address
        base = np.array(self.addresses, np.int64)
        self.pads, self.requests, self.partials = (
            np.where(base > 0, base + at, 0)
            for at in (pads, requests, requests + self.partial_bytes))

    @property
    def send_buffers(self) -> np.ndarray:
        """Addresses of the send buffers, int64 [W]; undefined for ranks of other memory domains."""
        return np.array(self.addresses, np.int64) + np.array(self.layout.send_buffer)

    @property
    def send_buffer_bytes(self) -> int:
        """Size of a rank's send buffer."""
        return self.layout.send_buffer_bytes

    def is_local(self, rank: int) -> bool:
        """Return whether this rank can address the memory of `rank`."""
        return self.addresses[rank] > 0

    def segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        """Return a view [rows, columns] of memory that this rank can address."""
        index = self._device.index if self._device.type == "cuda" else -1
        # DLPack makes torch treat peers' memory, which this device can access, as its own.
        managed = torch.ops.oper.device_view(address, rows, columns, ROW_TYPES.index(dtype), index)
        return torch.utils.dlpack.from_dlpack(_capsule(managed, b"dltensor", None))

    def memory(self, address: int, count: int) -> torch.Tensor:
        """Return a view float32 [count] of memory that this rank can address."""
        return self.segment(address, count, 1, "float32").view(-1)

    def touched(self, piece: int, rank: int) -> torch.Tensor:
        """Return the slots, int64 [n], of replicated rows that the last step updated on a rank of
        this domain; waits for the device."""
        at = self.addresses[rank] + int(self.layout.touched[piece, rank])
        count = int(self.memory(at, 1).view(torch.int32))
        return unsigned(self.memory(at + 4, count))
