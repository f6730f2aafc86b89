"""Bytes between ranks that share no memory: collectives of torch.distributed, or of threads."""

from __future__ import annotations

import contextlib
import time
import weakref
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from oper.errors import OperError, PeerLostError, fail
from oper.shmem.group.desync import LATE, Spot, Verdict, raise_verdict
from oper.shmem.group.groups import Group, ProcessGroup, ThreadGroup
from oper.shmem.group.liveness import Watch
from oper.shmem.settings import deadline_s

_POLL_S = 20e-6  # between looks at a collective on a device, which nobody can wait for
_SLICE = timedelta(milliseconds=200)  # how often a waiting rank looks whether its peers still live
_NAMING_S = 3.0  # how long after an error of the back end the dead peer is looked for


class Transport(Protocol):
    """One all-to-all exchange of bytes at a time.

    Attributes:
        spot: what the next exchange is for; whoever calls it sets it.
    """

    spot: Spot

    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int], is_head: bool = False) -> None:
        """Send segment r of `send` to rank r, receive segment r of `recv` from it. Collective.

        Args:
            send, recv: uint8, contiguous, on the CPU or on one device; segments in rank order.
            send_bytes, recv_bytes: int [W], sizes of the segments; what a rank receives from
                another must be what that one sends to it.
            is_head: all ranks send all ranks the same small number of bytes; all say so.

        Raises:
            PeerLostError: a peer has ended or given up; names it, and all peers are told.
            DeadlineError: a peer did not come in time; likewise.
        """

    def blame(self, verdict: Verdict) -> Verdict:
        """What is behind a failure that looked like `verdict`."""

    def give_up(self, verdict: Verdict) -> None:
        """Tell the others that this rank takes no part any more, and whom it blames."""


class ThreadTransport:
    """Between virtual ranks."""

    spot = Spot(0, 0)

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group

    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int], is_head: bool = False) -> None:
        group = self._group
        if send.is_cuda:  # threads may use streams of their own
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

    def blame(self, verdict: Verdict) -> Verdict:
        return verdict

    def give_up(self, verdict: Verdict) -> None:
        pass


class CollectiveTransport:
    """Over ``torch.distributed``: gloo for CPU tensors, else the group's own back end and device.

    It has process groups of its own, so that it never meets the program's collectives: over gloo
    two. A pair of gloo's ranks has one connection, on which a receiver's permission to send waits
    behind what the receiver sends itself: two ranks that send each other much do so one after the
    other. With a connection for what goes to higher ranks and one for what goes to lower ones, they
    do so at once. Small messages, alike on all ranks, take one collective.
    """

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._whole = group
        self.spot = Spot(0, 0)
        self._deadline_s = deadline_s()
        parent = group.process_group or dist.group.WORLD
        self._device = _device_of(dist.get_backend(parent))
        is_gloo = self._device.type == "cpu"
        self._groups = [dist.new_group(
            dist.get_process_group_ranks(parent), use_local_synchronization=True,
            backend="gloo" if is_gloo else None,
            timeout=timedelta(seconds=max(self._deadline_s, 1.0) + 60))
            for _ in range(1 + is_gloo)]
        self._watch = Watch(group)
        self._staging: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        # The back end connects its ranks in the first exchange; do it while all are here.
        self.exchange(*_ones(group.world_size))
        self.exchange(*_ones(group.world_size), is_head=True)

    def exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int], is_head: bool = False) -> None:
        watch = self._watch
        if watch.loss is not None:  # what was left half done would be taken for this exchange
            self._fail(watch.loss, "earlier")
        watch.count += 1
        watch.spot, watch.is_inside = self.spot, True
        try:
            self._exchange(send, send_bytes, recv, recv_bytes, is_head)
        finally:
            watch.is_inside = False

    def _exchange(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                  recv_bytes: list[int], is_head: bool) -> None:
        there, back = self._on_device(0, send), self._on_device(1, recv)
        if there is not send:
            there.copy_(send)
        try:
            for work in self._begin(there, send_bytes, back, recv_bytes, is_head):
                self._wait(work)
        except OperError:
            raise
        except RuntimeError as error:
            loss = self._watch.wait_for_loss(_NAMING_S)
            text = str(error).strip().partition("\n")[0]
            if loss is None:
                raise PeerLostError(
                    fail("an exchange between memory domains has failed", "rank", "unknown",
                         "all ranks alive", f"look at the other ranks' logs ({text})")) from error
            self._fail(loss, text, error)
        if back is not recv:
            recv.copy_(back)

    def _begin(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
               recv_bytes: list[int], is_head: bool) -> list[Any]:
        """The collectives of one exchange, under way."""
        if is_head or len(self._groups) == 1:
            return [self._dist.all_to_all_single(recv, send, recv_bytes, send_bytes,
                                                 self._groups[0], async_op=True)]
        rank, size, works = self._whole.rank, len(send_bytes), []
        # This rank's own segment goes up: its sender is no higher than its receiver.
        for group, to, of in ((self._groups[0], (rank, size), (0, rank + 1)),
                              (self._groups[1], (0, rank), (rank + 1, size))):
            there, there_bytes = _segments(send, send_bytes, *to)
            back, back_bytes = _segments(recv, recv_bytes, *of)
            works.append(self._dist.all_to_all_single(back, there, back_bytes, there_bytes, group,
                                                      async_op=True))
        return works

    def _on_device(self, place: int, data: torch.Tensor) -> torch.Tensor:
        """A buffer of the collectives' device for `data`: itself, or staging memory that grows."""
        if self._device.type == data.device.type:
            return data
        if self._staging[place].numel() < data.numel() or self._staging[place].device.type == "cpu":
            self._staging[place] = torch.empty(data.numel() * 5 // 4 + 64, dtype=torch.uint8,
                                               device=self._device)
        return self._staging[place][:data.numel()]

    def _wait(self, work: Any) -> None:
        start = time.monotonic()
        while True:
            if self._device.type == "cpu":
                with contextlib.suppress(RuntimeError):
                    work.wait(_SLICE)
            if work.is_completed():
                work.wait()  # raises what the collective has met
                return
            if self._watch.loss is not None:
                self._fail(self._watch.loss, "it will not take part")
            if time.monotonic() - start > self._deadline_s:
                self._fail(self._watch.behind(self._whole.rank))
            if self._device.type != "cpu":
                time.sleep(_POLL_S)

    def _fail(self, verdict: Verdict, detail: str = "", cause: BaseException | None = None
              ) -> NoReturn:
        """Raise a verdict, of which all peers are told."""
        self.give_up(verdict)
        try:
            raise_verdict(verdict, self._whole, detail=detail)
        except OperError as error:
            raise error from cause

    def blame(self, verdict: Verdict) -> Verdict:
        if verdict.code == LATE and self._watch.loss is None:
            return self._watch.behind(verdict.rank)
        return self._watch.wait_for_loss(_SLICE.total_seconds()) or verdict

    def give_up(self, verdict: Verdict) -> None:
        self._watch.give_up(verdict)


_TRANSPORTS: weakref.WeakKeyDictionary[Any, CollectiveTransport] = weakref.WeakKeyDictionary()


def transport_of(group: Group) -> Transport:
    """The transport of a group, made once for each process group. Collective."""
    if isinstance(group, ThreadGroup):
        return ThreadTransport(group)
    assert isinstance(group, ProcessGroup)
    import torch.distributed as dist

    key = group.process_group or dist.group.WORLD
    if key not in _TRANSPORTS:
        _TRANSPORTS[key] = CollectiveTransport(group)
    return _TRANSPORTS[key]


def _segments(data: torch.Tensor, sizes: list[int], first: int, end: int
              ) -> tuple[torch.Tensor, list[int]]:
    """Segments first..end-1 of `data`, and the sizes without those of all others."""
    begin = sum(sizes[:first])
    return (data[begin:begin + sum(sizes[first:end])],
            [n if first <= r < end else 0 for r, n in enumerate(sizes)])


def _ones(world_size: int) -> tuple[torch.Tensor, list[int], torch.Tensor, list[int]]:
    """A byte for everybody."""
    sizes = [1] * world_size
    send = torch.zeros(world_size, dtype=torch.uint8)
    return send, sizes, torch.empty_like(send), sizes


def _device_of(backend: str) -> torch.device:
    """Where the back end of a process group wants its tensors; the CPU where it can."""
    if "gloo" in backend or "mpi" in backend or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
