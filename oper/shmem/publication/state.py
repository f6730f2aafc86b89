"""The state of a publisher: two writable buffers, and the control block that readers see."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence

import torch

from oper.shmem.memory import numa
from oper.shmem.memory.segments import create_segment, map_segment, no_segment
from oper.shmem.publication.buffers import Layout
from oper.shmem.publication.reader import SEGMENT_NAME

_FREE = 3  # mode of fallocate(2): FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Buffer:
    """One of the two buffers: its segments, mapped writable."""

    def __init__(self, layout: Layout, nodes: Sequence[numa.Node]) -> None:
        self.sizes = [*layout.segment_bytes, layout.dense_bytes]
        self.fds: list[int] = []
        self.addresses: list[int] = []
        self.is_filled = False
        try:
            for k, size in enumerate(self.sizes):
                self.fds.append(create_segment(size, SEGMENT_NAME))
                address = map_segment(self.fds[-1], size, True)
                self.addresses.append(address)
                if len(nodes) > 1 and k < len(nodes):
                    _bind(address, size, nodes[k].number)
        except OSError as error:
            self.close()
            raise no_segment("cannot publish tables", sum(self.sizes), error) from error
        except BaseException:
            self.close()
            raise

    def give_back(self) -> None:
        """Free the buffer's memory pages; the mappings remain."""
        if self.is_filled:
            libc = ctypes.CDLL(None, use_errno=True)
            for fd, size in zip(self.fds, self.sizes, strict=True):
                whole = -(-size // 4096) * 4096
                libc.fallocate(fd, _FREE, ctypes.c_int64(0), ctypes.c_int64(whole))
            self.is_filled = False

    def held_bytes(self) -> int:
        """Return the number of bytes of memory that the segments use now."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.fds)

    def close(self) -> None:
        for address, size in zip(self.addresses, self.sizes, strict=False):
            torch.ops.oper.unmap_segment(address, size)
        for fd in self.fds:
            os.close(fd)
        self.addresses, self.fds = [], []


def _bind(address: int, num_bytes: int, node: int) -> None:
    refused = numa.bind(address, num_bytes, node)
    if refused:
        warnings.warn(f"the system does not bind tables to NUMA node {node} ({refused}): each page "
                      "is allocated on the node that first writes to it", stacklevel=2)


class State:
    """State that the publisher shares with its acceptor thread, and resources to release."""

    def __init__(self, layout: Layout, nodes: list[numa.Node]) -> None:
        self.layout = layout
        self.nodes = nodes
        self.lock = threading.RLock()  # held while a buffer is written or freed
        self.buffers: list[Buffer] = []
        self.control_bytes = int(torch.ops.oper.publication_control_bytes())
        try:
            self.control_fd = create_segment(self.control_bytes, "oper-epoch")
            self.control = map_segment(self.control_fd, self.control_bytes, True)
        except OSError as error:
            raise no_segment("cannot publish tables", self.control_bytes, error) from error
        try:
            for _ in range(2):
                self.buffers.append(Buffer(layout, nodes))
        except BaseException:
            self.close()
            raise
        self.pids: dict[int, int] = {}  # by slot
        self.is_spare_pending = False

    @property
    def epoch(self) -> int:
        return abs(int(torch.ops.oper.publication_epoch(self.control)))

    def busy(self, buffer: int) -> list[int]:
        """Return the process ids of readers that have pinned an epoch in a buffer."""
        slots = torch.ops.oper.publication_busy(self.control, buffer, list(self.pids))
        # The acceptor thread may remove a slot meanwhile.
        return [pid for s in slots if (pid := self.pids.get(s)) is not None]

    def try_to_give_back(self) -> None:
        """Free the unused buffer's memory if this is pending and no reader has pinned it."""
        if self.is_spare_pending and self.lock.acquire(blocking=False):
            try:
                spare = (self.epoch + 1) & 1
                if self.is_spare_pending and not self.busy(spare):
                    self.buffers[spare].give_back()
                    self.is_spare_pending = False
            finally:
                self.lock.release()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        if self.control_fd >= 0:
            torch.ops.oper.unmap_segment(self.control, self.control_bytes)
            os.close(self.control_fd)
            self.control_fd = -1
        self.buffers = []
