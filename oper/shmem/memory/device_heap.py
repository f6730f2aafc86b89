"""Arenas in device memory that every rank of a group can address.

Three implementations are tried in this order: plain tensors, if all ranks are threads of this
process; torch's symmetric memory; CUDA virtual memory with POSIX descriptors, which also serves
plans with rows in host memory. Kernels get only base addresses. torch's symmetric memory is an
alpha interface; only this file uses it, and only the integers in its handle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oper.errors import OperError, PlanError
from oper.shmem import library
from oper.shmem.group.domains import DomainGroup
from oper.shmem.group.groups import Group, ProcessGroup
from oper.shmem.memory.host_heap import exchange_over_sockets
from oper.support.environment import setting

HEAP_ENV = "OPER_DEVICE_HEAP"
PART_BYTES = 2 << 20  # kPartBytes in csrc/bindings/device/memory.cpp


class DeviceHeap:
    """Arenas of all ranks of a group in device memory.

    Args:
        group: all ranks, or the ranks of one memory domain. Creation is collective over the ranks
            of all domains.
        num_bytes: int [W], size of each rank's arena; the same list on all ranks.
        device: this rank's device.
        host_ranges: [W] lists of ascending [begin, end) of the rows in host memory, multiples of
            `PART_BYTES`; the same on all ranks.

    Attributes:
        addresses: int [W], addresses at which the arenas are mapped for this rank's device.
        kind: ``"local"``, ``"symmetric memory"`` or ``"virtual memory"``.
        page_kind: always ``"device"``.

    Raises:
        PlanError: two ranks cannot address each other's memory.
        OperError: the memory cannot be allocated.
    """

    def __init__(self, group: Group | DomainGroup, num_bytes: list[int], device: torch.device,
                 host_ranges: Sequence[Sequence[tuple[int, int]]] = ()) -> None:
        library.load_device()
        self._group = group
        # All domains decide together, so that they make the same collective calls.
        self._whole: Group = group.whole if isinstance(group, DomainGroup) else group
        self.device = device
        # Symmetric memory requires equal sizes.
        self._size = -(-max(1, *num_bytes) // PART_BYTES) * PART_BYTES
        self._host_ranges = [[x for pair in ranges for x in pair] for ranges in host_ranges]
        self._host_ranges += [[]] * (group.world_size - len(self._host_ranges))
        has_host = any(self._host_ranges)
        self.addresses: list[int] = []
        self._keep: list[Any] = []
        self._mapped: list[tuple[int, list[int]]] = []
        self.page_kind = "device"
        # If every domain has one rank, no other rank needs to access this memory.
        if group.is_local or (isinstance(group, DomainGroup)
                              and max(group.whole.all_gather(group.world_size)) == 1):
            self.kind = "local"
            self._open_local(has_host)
            return
        assert isinstance(self._whole, ProcessGroup)
        wanted = setting(HEAP_ENV, "cannot open the device heap")
        reason = "not requested"
        if has_host:
            reason = "it has no rows in host memory"
            if wanted == "symmetric":
                raise OperError("cannot open the device heap", HEAP_ENV, wanted,
                                "'virtual', since the plan has rows in host memory",
                                f"unset {HEAP_ENV}")
        elif wanted != "virtual":
            reason = self._open_symmetric()
            if not reason:
                self.kind = "symmetric memory"
                return
            if wanted == "symmetric":
                raise OperError("cannot open the device heap", "symmetric memory", reason,
                                "a torch and a driver that provide it", f"unset {HEAP_ENV}")
        self.kind = "virtual memory"
        self._open_virtual(reason)

    def _open_local(self, has_host: bool) -> None:
        if has_host and self.device.type == "cuda":
            address, fds = self._create()
            for fd in fds:
                os.close(fd)
        else:
            arena = self._allocate()
            arena.zero_()
            self._keep.append(arena)
            address = arena.data_ptr()
        everyone = self._group.all_gather((address, str(self.device)))
        devices = {where for _, where in everyone}
        if len(devices) > 1:
            raise PlanError("threads of one process cannot be ranks on several devices", "devices",
                            sorted(devices), "one device", "start one process per device")
        self.addresses = [address for address, _ in everyone]

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self.device)

    def _name(self) -> str:
        """Return the name of a process group of these ranks, which is created for a domain."""
        whole = self._whole
        assert isinstance(whole, ProcessGroup)
        if not isinstance(self._group, DomainGroup):
            return str(whole.handle.group_name)
        import torch.distributed as dist

        everyone = whole.ranks
        self._domain = dist.new_group([everyone[r] for r in self._group.members], backend="gloo",
                                      use_local_synchronization=True)
        return str(self._domain.group_name)

    def _open_symmetric(self) -> str:
        """Map all arenas by torch's symmetric memory; returns "", or the reason of a failure."""
        reason = ""
        try:
            import torch.distributed._symmetric_memory as symmetric

            # torch refuses to set the back end that is the default already.
            if symmetric.get_backend(self.device) != "CUDA":
                symmetric.set_backend("CUDA")
            arena = symmetric.empty(self._size, dtype=torch.uint8, device=self.device)
        except (ImportError, AttributeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
        # Continue on all ranks or none, since the rendezvous waits for all of them.
        reasons = [r for r in self._whole.all_gather(reason) if r]
        if reasons:
            return reasons[0]
        try:
            handle = symmetric.rendezvous(arena, group=self._name())  # type: ignore[arg-type]
            addresses = [int(a) for a in handle.buffer_ptrs]
            # If the arena is part of a larger block, peers' addresses are those of the block.
            if addresses[self._group.rank] != arena.data_ptr():
                reason = "torch has allocated the arena inside another block"
        except (AttributeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
        reasons = [r for r in self._whole.all_gather(reason) if r]
        if reasons:
            return reasons[0]
        arena.zero_()
        torch.cuda.synchronize(self.device)
        self._whole.all_gather(None)
        self._keep += [handle, arena]
        self.addresses = addresses
        return ""

    def _create(self) -> tuple[int, list[int]]:
        """Create and map this rank's arena; returns its address and its parts' descriptors."""
        mine = self._host_ranges[self._group.rank]
        address, *fds = torch.ops.oper.device_memory_create(
            self._size, mine, self.device.index or 0)
        self._mapped.append((address, mine))
        return address, fds

    def _open_virtual(self, reason: str) -> None:
        group = self._group
        fds: list[int] = []
        address, error = 0, ""
        try:
            address, fds = self._create()
        except RuntimeError as problem:
            error = str(problem).splitlines()[0]
        received: dict[int, list[int]] = {}
        try:
            errors = [(rank, e) for rank, e in enumerate(self._whole.all_gather(error)) if e]
            if errors:
                raise OperError("cannot share device memory between processes", "rank, error",
                                errors[0],
                                "POSIX descriptors of CUDA virtual memory",
                                f"symmetric memory was not used either ({reason}); use a plan that "
                                "exchanges over torch.distributed")
            _, received = exchange_over_sockets(group, fds)
            own: PlanError | None = None
            for rank in range(group.world_size):
                try:
                    self.addresses.append(
                        address if rank == group.rank else self._attach(rank, received[rank]))
                except PlanError as found:
                    own = own or found
            # Continue on all ranks or none, since later calls are collective.
            problems = [p for p in self._whole.all_gather(own) if p is not None]
            if problems:
                raise own or problems[0]
        finally:
            for fd in [*fds, *(fd for got in received.values() for fd in got)]:
                os.close(fd)

    def _attach(self, rank: int, fds: list[int]) -> int:
        parts = self._host_ranges[rank]
        try:
            address = int(torch.ops.oper.device_memory_attach(
                fds, self._size, parts, self.device.index or 0))
        except RuntimeError as error:
            raise PlanError(f"rank {self._group.rank} cannot address the memory of rank {rank}",
                            "device", str(self.device), "devices with peer access",
                            "use a plan that exchanges over torch.distributed "
                            f"({str(error).splitlines()[0]})") from None
        self._mapped.append((address, parts))
        return address

    def close(self) -> None:
        """Release this rank's arena and its mappings of peers' arenas; not collective."""
        for address, parts in self._mapped:
            torch.ops.oper.device_memory_release(address, self._size, parts)
        self._mapped = []
        self._keep = []
        self.addresses = []


_to_release: list[tuple[DeviceHeap, Callable[[], object]]] = []


def release(heap: DeviceHeap, close: Callable[[], object]) -> None:
    """Wait for the running kernels, call `close`, which frees the users of the heap, and close
    it."""
    _to_release.append((heap, close))
    streams = library.streams_of(heap.device)
    # Running kernels still use both, and one cannot wait for them during graph capture; the next
    # release then closes both.
    if streams is not None and streams.is_current_stream_capturing():
        return
    while _to_release:
        heap, close = _to_release.pop()
        if streams is not None:
            streams.synchronize(heap.device)
        close()
        heap.close()
