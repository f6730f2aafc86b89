"""The symmetric heap of one memory domain: an arena per rank that every rank can address.

Arenas are anonymous memory files (``memfd``), which the kernel frees even if a process is killed.
Descriptors are sent over private abstract Unix sockets to the group's processes, which must belong
to the same user. Peers map an arena read-only, so the MMU ensures that a rank writes only to its
own memory. A small control segment with the barrier words is writable by all ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch

from oper.errors import OperError
from oper.shmem.group.domains import peer_credentials, private_server
from oper.shmem.group.groups import Group
from oper.shmem.library import load
from oper.shmem.memory.segments import (
    create_segment,
    map_over_segment,
    map_segment,
    no_segment,
    page_kind,
)

_LINE_BYTES = 128  # one barrier line per rank, see csrc/host/barrier.h
_CONNECT_S = 60.0
_MAX_SEGMENTS = 253  # per rank; the kernel's limit on descriptors in one message
_HUGE = 2 << 20


def _page_up(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


class HostHeap:
    """Arenas of all ranks of a group, which is one memory domain.

    Args:
        group: the ranks. Creation is collective.
        num_bytes: int [W], size of each rank's arena; the same list on all ranks.
        host_ranges: [W] lists of ascending [begin, end) of pages for rows with memory ``"host"``,
            which are put into a second segment without huge pages; the same on all ranks.
        num_send_buffer_bytes: bytes of each arena's send buffer, used in error messages.

    Attributes:
        addresses: int [W], addresses at which the arenas are mapped in this process.
        control: address of the control segment.
        pidfds: int [W], descriptors that become readable when a peer ends; -1 = own process.
        page_kind: ``"4KiB"`` or ``"2MiB"`` (or a mix in per cent), after `collapse`.

    Raises:
        OperError: this rank or a peer runs out of memory, address space or descriptors.
    """

    def __init__(self, group: Group, num_bytes: list[int],
                 host_ranges: list[list[tuple[int, int]]] | None = None,
                 num_send_buffer_bytes: int = 0) -> None:
        load()
        self._group = group
        self._num_send_buffer_bytes = num_send_buffer_bytes
        self._host_ranges = host_ranges or [[] for _ in num_bytes]
        self._sizes = [_page_up(max(1, n)) for n in num_bytes]
        self._control_bytes = _page_up(group.world_size * _LINE_BYTES)
        self.pidfds = [-1] * group.world_size
        self.page_kind = "4KiB"
        self._mapped: list[tuple[int, int]] = []
        self.addresses: list[int] = []
        self.control = 0
        fds: list[int] = []
        try:
            problem: OperError | None = None
            try:
                for size in self._segment_sizes(group.rank):
                    fds.append(create_segment(size))
            except OSError as error:
                problem = self._problem("cannot create the shared arena", error)
            self._agree(problem)
            if group.is_local:
                # Virtual ranks share descriptors, but each maps the arenas, so that one rank may
                # close its tables while another reads.
                self._map_all(group.all_gather(list(fds)))
            else:
                self._attach_peers(fds)
        except OSError as error:
            self.close()
            raise self._problem("cannot share the arenas", error) from error
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _problem(self, what: str, error: OSError) -> OperError:
        """Return the error for failing to create this rank's arena or to map all ranks' arenas."""
        one = what.startswith("cannot create")
        num_bytes = self._sizes[self._group.rank] if one else sum(self._sizes)
        return no_segment(what, num_bytes, error,
                          self._num_send_buffer_bytes * (1 if one else self._group.world_size))

    def _agree(self, problem: OperError | None) -> None:
        """Raise any rank's error on all ranks, so that none waits for a rank that has failed."""
        whole: Group = getattr(self._group, "whole", self._group)  # of all memory domains
        found = whole.all_gather(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(found):
            if text is not None:
                raise OperError("a peer cannot share its arena", "rank", rank,
                                "enough memory and address space on all ranks",
                                f"see that rank's error: {text}")

    def _segment_sizes(self, rank: int) -> list[int]:
        """Return the sizes of a rank's segments: arena, control segment (rank 0), host memory."""
        sizes = [self._sizes[rank]]
        sizes += [self._control_bytes] if rank == 0 else []
        return sizes + ([self.host_bytes(rank)] if self._host_ranges[rank] else [])

    def host_bytes(self, rank: int) -> int:
        """Return the size of a rank's segment for rows with memory ``"host"``."""
        return sum(end - begin for begin, end in self._host_ranges[rank])

    def _map(self, fd: int, num_bytes: int, writable: bool) -> int:
        address = map_segment(fd, num_bytes, writable)
        self._mapped.append((address, num_bytes))
        return address

    def _map_all(self, segments: list[list[int]]) -> None:
        """Map the segments of all ranks; `segments`: by rank, descriptors as in `_segment_sizes`.
        """
        problem: OperError | None = None
        try:
            for rank, fds in enumerate(segments):
                writable = rank == self._group.rank
                address = self._map(fds[0], self._sizes[rank], writable)
                self.addresses.append(address)
                at = 0
                for begin, end in self._host_ranges[rank]:
                    map_over_segment(address + begin, fds[-1], at, end - begin, writable)
                    at += end - begin
            self.control = self._map(segments[0][1], self._control_bytes, True)
        except OSError as error:
            problem = self._problem("cannot map the ranks' arenas", error)
        # No rank may continue, and possibly exit, before all ranks have mapped its segments.
        self._agree(problem)

    def _attach_peers(self, fds: list[int]) -> None:
        """Exchange descriptors with peers and map the arenas; adds received descriptors to `fds`,
        which the caller closes."""
        group = self._group
        mine = list(fds)
        pids, received = exchange_over_sockets(group, mine)
        for got in received.values():
            fds.extend(got)
        for rank, pid in enumerate(pids):
            if rank != group.rank:
                self.pidfds[rank] = os.pidfd_open(pid)
        segments = [mine if r == group.rank else received[r] for r in range(group.world_size)]
        for rank, got in enumerate(segments):
            if len(got) != len(self._segment_sizes(rank)):
                raise OperError("cannot attach to a peer's arena", "rank, number of segments",
                                (rank, len(got)), f"{len(self._segment_sizes(rank))} segments",
                                "start all ranks with the same plan")
        self._map_all(segments)

    def collapse(self, num_bytes: list[int], sync: Callable[[], None]) -> None:
        """Request huge pages for the first `num_bytes[r]` bytes of every arena r. Collective.

        Each rank first collapses its own arena into huge pages, then its mappings of peers' arenas.
        `sync`, a barrier of all ranks, separates these steps, since two processes that collapse the
        same page at once both fail.
        """
        rank = self._group.rank
        done, want = self._collapse_one(rank, num_bytes[rank])
        sync()
        for peer, size in enumerate(num_bytes):
            if peer != rank:
                more, wanted = self._collapse_one(peer, size)
                done, want = done + more, want + wanted
        self.page_kind = page_kind(done, want)

    def _collapse_one(self, rank: int, num_bytes: int) -> tuple[int, int]:
        """Request huge pages for one arena; returns the bytes that got them, and the bytes that are
        eligible."""
        done = want = at = 0
        for begin, end in [*self._host_ranges[rank], (num_bytes, num_bytes)]:
            size = min(begin, num_bytes) - at
            if size > 0:
                first = -(-at // _HUGE) * _HUGE  # arenas begin at such a boundary
                want += max(0, (at + size) // _HUGE * _HUGE - first)
                done += int(torch.ops.oper.collapse_segment(self.addresses[rank] + at, size))
            at = end
        return done, want

    def close(self) -> None:
        """Unmap all arenas; views of them must not be used afterwards."""
        for address, size in self._mapped:
            torch.ops.oper.unmap_segment(address, size)
        self._mapped = []
        for fd in self.pidfds:
            if fd >= 0:
                os.close(fd)
        self.pidfds = [-1] * len(self.pidfds)


def exchange_over_sockets(group: Group, mine: list[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Send the descriptors `mine` to every peer of a group on this host. Collective.

    Returns:
        Process ids by rank, and the descriptors received from each peer, which the caller closes.

    Raises:
        OperError: a peer does not answer.
        OSError: this process has no free descriptor.
    """
    with private_server(group.world_size) as server:
        server.settimeout(_CONNECT_S)
        everyone = group.all_gather((os.getpid(), server.getsockname()))
        pids = [pid for pid, _ in everyone]
        try:
            return pids, _exchange_descriptors(
                server, group.rank, pids, [n for _, n in everyone], mine)
        except (TimeoutError, ConnectionError) as error:
            raise OperError("cannot attach to a peer's arena", "connection", str(error),
                            f"an answer of every rank within {_CONNECT_S:g} s",
                            "look at the other ranks' logs") from error


def _exchange_descriptors(
    server: socket.socket, rank: int, pids: list[int], names: list[bytes], mine: list[int]
) -> dict[int, list[int]]:
    """Send `mine` to every peer; returns the descriptors received, by rank.

    Connections of other users, and of processes outside the group, are closed.
    """
    incoming: dict[int, socket.socket] = {}
    received: dict[int, list[int]] = {}
    try:
        for peer, name in enumerate(names):
            if peer == rank:
                continue
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_CONNECT_S)
            incoming[peer] = connection
            connection.connect(name)  # completes in the peer's backlog
        served: set[int] = set()
        wanted = {pid for r, pid in enumerate(pids) if r != rank}
        while served != wanted:
            connection, _ = server.accept()
            with connection:
                pid, uid = peer_credentials(connection)
                if uid == os.getuid() and pid in wanted:
                    socket.send_fds(connection, [b"oper"], mine)
                    served.add(pid)
        for peer, connection in incoming.items():
            data, fds, _, _ = socket.recv_fds(connection, 4, _MAX_SEGMENTS)
            received[peer] = list(fds)
            if data != b"oper" or not fds:
                raise OperError("cannot attach to a peer's arena", "rank", peer,
                                "one that sends the descriptors of its memory",
                                "look at that rank's log")
    except BaseException:
        for fds in received.values():
            for fd in fds:
                os.close(fd)
        raise
    finally:
        for connection in incoming.values():
            connection.close()
    return received
