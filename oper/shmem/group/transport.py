"""Exchange of bytes between ranks without shared memory: sockets, device collectives or threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from oper.errors import OperError, PeerLostError
from oper.shmem.group.connections import connect
from oper.shmem.group.desync import CollectivePhase, Verdict, raise_verdict
from oper.shmem.group.groups import Group, ProcessGroup, ThreadGroup, is_destroyed
from oper.shmem.group.liveness import LivenessMonitor
from oper.shmem.group.status import Status
from oper.shmem.library import register
from oper.shmem.settings import deadline_s
from oper.support.processes import when_dropped

_POLL_S = 20e-6  # between polls of a device collective, whose own wait cannot be interrupted
_SLICE_S = 0.2  # interval at which a waiting rank checks that its peers are alive
_NAMING_S = 3.0  # how long to wait for the dead peer to be identified after a failed exchange


class Transport(ABC):
    """One all-to-all exchange of bytes at a time.

    Attributes:
        at: the phase of the next exchange, set by the caller.
    """

    at = CollectivePhase(0, 0)

    @abstractmethod
    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int]) -> None:
        """Send segment r of `send` to rank r, receive segment r of `recv` from it. Collective.

        Args:
            send, recv: uint8, contiguous, on the CPU or on one device; segments in rank order.
            send_bytes, recv_bytes: int [W], sizes of the segments in bytes; a rank's
                ``recv_bytes[r]`` must equal its entry in rank r's `send_bytes`.

        Raises:
            PeerLostError: a peer has ended or aborted; all peers are notified.
            DeadlineError: a peer did not arrive in time; all peers are notified.
        """

    def hold(self, owner: object) -> Callable[[], object]:
        """Keep the transport open; returns a function that ends this, called automatically when
        `owner` is garbage-collected."""
        return lambda: None

    def attribute(self, verdict: Verdict) -> Verdict:
        """Replace a preliminary verdict by the final one, using the other ranks' reports."""
        return verdict

    def abort(self, verdict: Verdict) -> None:  # noqa: B027  # by default, no rank is notified
        """Notify the other ranks that this rank no longer takes part, and of its verdict."""


class ThreadTransport(Transport):
    """A transport between virtual ranks."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group

    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int]) -> None:
        group = self._group
        if send.is_cuda:  # each thread may use a different stream
            torch.cuda.synchronize(send.device)
        everyone = group.all_gather((send, send_bytes))
        parts = []
        for data, sizes in everyone:
            begin = sum(sizes[:group.rank])
            parts.append(data[begin:begin + sizes[group.rank]])
        torch.cat(parts, out=recv)
        if recv.is_cuda:
            torch.cuda.synchronize(recv.device)
        group.all_gather(None)  # senders may reuse their buffers


class _MonitoredTransport(Transport):
    """Exchanges between processes that also watch for dead or late peers."""

    closes_with_tables = False

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._whole, self._process = group, os.getpid()
        self._deadline_s = deadline_s()
        self._device = device
        self._monitor = LivenessMonitor(group)
        self._exchanging = threading.RLock()  # held by an exchange, which may be on another thread
        self._staging: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._holders: set[object] = set()
        self._closes(_leave, self._monitor)

    @abstractmethod
    def _move(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
              recv_bytes: list[int]) -> None:
        """Perform `exchange` for tensors on the transport's device."""

    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int]) -> None:
        monitor = self._monitor
        with self._exchanging:
            self._check_open()
            if monitor.failure is not None:  # left-over data could be taken for this exchange's
                self._fail(monitor.failure, "earlier")
            monitor.count += 1
            monitor.at, monitor.is_inside = self.at, True
            try:
                there, back = self._on_device(0, send), self._on_device(1, recv)
                if there is not send:
                    there.copy_(send)
                self._move(there, send_bytes, back, recv_bytes)
                if back is not recv:
                    recv.copy_(back)
            finally:
                monitor.is_inside = False

    def _check_open(self) -> None:
        if not self.is_open:
            raise OperError("cannot exchange bytes with other hosts", "connections", "closed",
                            "an existing process group, and tables that are open on all ranks",
                            "shard the model again, on all ranks")
        if os.getpid() != self._process:
            raise OperError("a forked process cannot exchange bytes with other hosts", "process",
                            os.getpid(), f"process {self._process}, which opened the connections",
                            "look up in that process, or shard a model in the child")

    def _on_device(self, place: int, data: torch.Tensor) -> torch.Tensor:
        """Return `data` if it is on the transport's device, else a staging buffer of its size."""
        if data.device == self._device:
            return data
        staging = self._staging[place]
        if staging.numel() < data.numel() or staging.device != self._device:
            self._staging[place] = torch.empty(data.numel() * 5 // 4 + 64, dtype=torch.uint8,
                                               device=self._device)
        return self._staging[place][:data.numel()]

    def _check_peers(self, begun: float) -> None:
        """Raise if a peer is lost, or has not arrived within the deadline since `begun`
        (`time.monotonic`)."""
        if self._monitor.failure is not None:
            self._fail(self._monitor.failure, "it will not take part")
        if time.monotonic() - begun > self._deadline_s:
            self._fail(self._monitor.find_late(self._whole.rank))

    def _fail(self, verdict: Verdict, detail: str = "", cause: BaseException | None = None
              ) -> NoReturn:
        """Notify all peers of a verdict, and raise its error."""
        self.abort(verdict)
        try:
            raise_verdict(verdict, self._whole, detail=detail)
        except OperError as error:
            raise error from cause

    def attribute(self, verdict: Verdict) -> Verdict:
        if verdict.code == Status.PEER_LATE and self._monitor.failure is None:
            return self._monitor.find_late(verdict.rank)
        return self._monitor.wait_for_failure(_SLICE_S) or verdict

    def abort(self, verdict: Verdict) -> None:
        self._monitor.abort(verdict)

    def hold(self, owner: object) -> Callable[[], object]:
        token = object()
        self._holders.add(token)
        return when_dropped(owner, self._release, token)

    def _release(self, token: object) -> None:
        self._holders.discard(token)
        if self.closes_with_tables and not self._holders:
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether the transport has not been closed."""
        return self._close.alive

    def close(self) -> None:
        """Release the connections and the monitor's thread. Not collective: other ranks continue
        until they need this rank. An exchange on another thread raises OperError."""
        self._close()

    def _closes(self, close: Callable[..., None], *arguments: object) -> None:
        """Set the function that `close` calls, also when the transport is garbage-collected."""
        # Not at exit: peers of a process that ends see it as lost.
        self._close = when_dropped(self, close, self._process, *arguments)


class SocketTransport(_MonitoredTransport):
    """A transport for host memory, over its own TCP connections (csrc/host/exchange/sockets.h).

    The connections are closed with the last tables that use them, or with their process group.
    """

    closes_with_tables = True
    _DONE, _WAITS, _LOST, _UNEXPECTED = range(4)  # Sockets::Result

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, torch.device("cpu"))
        register()
        self._connections = connect(group)
        for peer in self._connections.values():
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ops = torch.ops.oper
        self._handle: int = ops.sockets_open(
            [self._connections[r].fileno() if r != group.rank else -1
             for r in range(group.world_size)])
        self._close.detach()
        self._closes(_disconnect, self._monitor, self._handle, list(self._connections.values()),
                     self._exchanging)

    def _move(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
              recv_bytes: list[int]) -> None:
        ops = torch.ops.oper
        if not ops.sockets_begin(self._handle, send, send_bytes, recv, recv_bytes):
            raise OperError("cannot exchange bytes with other hosts", "earlier exchange",
                            "interrupted", "only complete earlier exchanges",
                            "restart the job from its last checkpoint")
        begun = time.monotonic()
        while True:
            result, rank = ops.sockets_run(self._handle, round(1e3 * _SLICE_S))
            if result == self._DONE:
                return
            if result == self._WAITS:
                self._check_peers(begun)
            elif result == self._LOST:
                self._check_open()
                failure = self._monitor.wait_for_failure(_NAMING_S, rank)
                code = Status.PEER_CLOSED if rank in self._monitor.left else Status.PEER_ENDED
                self._fail(failure or Verdict(code, rank, self.at), "its connection has ended")
            else:
                self._fail(Verdict(Status.OTHER_PHASE, rank, self.at),
                           "its message is of another exchange or size")


class CollectiveTransport(_MonitoredTransport):
    """A transport for device memory, over collectives of the group's back end.

    It uses a separate process group, so that its collectives cannot mix with those of the program.
    """

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        super().__init__(group, torch.device("cuda", torch.cuda.current_device()))
        self._dist = dist
        self._group = dist.new_group(
            group.ranks, use_local_synchronization=True,
            timeout=timedelta(seconds=max(self._deadline_s, 1.0) + 60))
        # The back end connects its ranks in the first exchange: make it now, on all ranks at once.
        sizes = [1] * group.world_size
        ones = torch.zeros(group.world_size, dtype=torch.uint8)
        self.exchange(ones, sizes, torch.empty_like(ones), sizes)

    def _move(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
              recv_bytes: list[int]) -> None:
        try:
            work = self._dist.all_to_all_single(recv, send, recv_bytes, send_bytes, self._group,
                                                async_op=True)
            begun = time.monotonic()
            while not work.is_completed():  # a blocking wait on a device cannot be interrupted
                self._check_peers(begun)
                time.sleep(_POLL_S)
            work.wait()  # raises the collective's error, if any
        except OperError:
            raise
        except RuntimeError as error:
            failure = self._monitor.wait_for_failure(_NAMING_S)
            text = str(error).strip().partition("\n")[0]
            if failure is None:
                raise PeerLostError("an exchange between memory domains has failed", "rank",
                                    "unknown", "all ranks alive",
                                    f"look at the other ranks' logs ({text})") from error
            self._fail(failure, text, error)


def _leave(process: int, monitor: LivenessMonitor) -> None:
    """Close the liveness monitor, unless this process is a child of the one that opened it."""
    if os.getpid() == process:
        monitor.close()


def _disconnect(process: int, monitor: LivenessMonitor, handle: int,
                connections: Sequence[socket.socket], exchanging: threading.RLock) -> None:
    """Notify the peers that this rank leaves, then close the connections of a `SocketTransport`.

    An exchange on another thread is ended first. Otherwise it could read from and write to later
    connections that get the same descriptor numbers.
    """
    _leave(process, monitor)
    is_own = os.getpid() == process  # a forked child does not have the other threads
    for connection in connections if is_own else ():
        with contextlib.suppress(OSError):  # the peer has ended
            connection.shutdown(socket.SHUT_RDWR)
    with exchanging if is_own else contextlib.nullcontext():
        torch.ops.oper.sockets_close(handle)
        for connection in connections:
            connection.close()


_TRANSPORTS: weakref.WeakKeyDictionary[Any, _MonitoredTransport] = weakref.WeakKeyDictionary()


def transport_of(group: Group) -> Transport:
    """Return the transport of a group; all collections of a process group share one. Collective."""
    if isinstance(group, ThreadGroup):
        return ThreadTransport(group)
    assert isinstance(group, ProcessGroup)
    import torch.distributed as dist

    for other, transport in list(_TRANSPORTS.items()):
        if is_destroyed(other):
            transport.close()
            del _TRANSPORTS[other]
    key = group.handle
    known = _TRANSPORTS.get(key)
    if not all(group.all_gather(known is not None and known.is_open)):
        if known is not None:  # another rank has closed its end
            known.close()
        moves_on_device = torch.cuda.is_available() and not any(
            name in dist.get_backend(key) for name in ("gloo", "mpi"))
        known = (CollectiveTransport if moves_on_device else SocketTransport)(group)
        _TRANSPORTS[key] = known
        with_group = when_dropped(key, _close, weakref.ref(known))
        when_dropped(known, with_group.detach)
    assert known is not None
    return known


def _close(transport: weakref.ref[_MonitoredTransport]) -> None:
    """Close a transport whose process group is gone."""
    found = transport()
    if found is not None:
        found.close()
