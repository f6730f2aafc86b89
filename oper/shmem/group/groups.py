"""Groups of ranks: one interface to a process group, a single rank, or threads of one process."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from oper.errors import DeadlineError, OperError, PeerLostError
from oper.shmem.settings import DEADLINE_ENV, deadline_s

_SLICE = timedelta(milliseconds=200)  # waits are split, since gloo's own timeout may be 30 minutes


class Group(Protocol):
    """Ranks that share tables.

    Attributes:
        rank: this rank.
        world_size: number of ranks W.
        is_local: whether all ranks are threads of this process.
    """

    rank: int
    world_size: int
    is_local: bool

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Collective."""


class SingleGroup:
    """A group of one rank."""

    rank = 0
    world_size = 1
    is_local = True

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class ProcessGroup:
    """Ranks of a ``torch.distributed`` process group (the default group when None)."""

    is_local = False

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    @property
    def handle(self) -> Any:
        """The process group as an object, also if it is torch's default group."""
        return self.process_group or self._dist.group.WORLD

    @property
    def ranks(self) -> list[int]:
        """Ranks of the process group in torch's default group."""
        return list(self._dist.get_process_group_ranks(self.handle))

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Collective.

        With gloo, errors do not name the rank; `LogicalRows.all_gather` names it.

        Raises:
            OperError: the process group has been destroyed.
            PeerLostError: a peer has ended.
            DeadlineError: a peer did not arrive in time.
        """
        values: list[Any] = [None] * self.world_size
        if self._is_destroyed():
            raise OperError("cannot exchange values with other ranks", "process group",
                            "destroyed", "the group with which the model was sharded",
                            "shard the model again, in the new process group")
        if "gloo" not in self._dist.get_backend(self.process_group):
            self._dist.all_gather_object(values, value, group=self.process_group)
            return values
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([data.numel()]))
        padded = torch.zeros(max(int(n) for n in sizes), dtype=torch.uint8)
        padded[:data.numel()] = data
        return [pickle.loads(x.numpy()[:int(n)].data)
                for x, n in zip(self._gather(padded), sizes, strict=True)]

    def _is_destroyed(self) -> bool:
        group = self.process_group
        return not self._dist.is_initialized() or (group is not None and is_destroyed(group))

    def _gather(self, data: Any) -> list[Any]:
        """Return the tensors `data` of all ranks, which must have the same size, over gloo."""
        parts = [data.new_empty(data.shape) for _ in range(self.world_size)]
        try:
            work = self._dist.all_gather(parts, data, group=self.process_group, async_op=True)
            _wait(work, deadline_s())
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            raise PeerLostError("a peer was lost during a collective", "rank", "unknown",
                                "all ranks alive",
                                f"look at the other ranks' logs ({text})") from error
        return parts


def _wait(work: Any, seconds: float) -> None:
    """Wait for a gloo collective, for at most `seconds`; raises DeadlineError afterwards."""
    start = time.monotonic()
    while True:
        with contextlib.suppress(RuntimeError):  # timeout of the slice; errors are raised below
            work.wait(_SLICE)
        if work.is_completed():
            work.wait()
            return
        if time.monotonic() - start > seconds:
            raise DeadlineError("a peer did not arrive at a collective", "rank", "unknown",
                                f"arrival within {DEADLINE_ENV}={seconds:g} s",
                                "every rank must make the same calls; look at the other ranks")


class ThreadGroup:
    """Virtual ranks: W threads of one process, for tests and for the `local` back end.

    Attributes:
        domains: label of the simulated memory domain of each rank; None = one domain.
    """

    is_local = True

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.domains = shared.domains
        self.world_size = shared.world_size
        self._shared = shared

    @staticmethod
    def create(world_size: int, deadline_s: float = 60.0,
               domains: Sequence[int] | None = None) -> list[ThreadGroup]:
        """Return the groups of ranks 0..W-1, one for each thread.

        Args:
            world_size: number of ranks W.
            deadline_s: seconds that a rank waits for the others in a collective.
            domains: label of the memory domain of each rank; None = one domain.
        """
        shared = _Shared(world_size, deadline_s, domains)
        return [ThreadGroup(rank, shared) for rank in range(world_size)]

    def all_gather(self, value: Any) -> list[Any]:
        shared = self._shared
        shared.values[self.rank] = value
        try:
            shared.barrier.wait(shared.deadline_s)
            values = list(shared.values)
            shared.barrier.wait(shared.deadline_s)
        except threading.BrokenBarrierError:
            raise DeadlineError("another virtual rank did not take part in a collective",
                                "waiting rank", self.rank, "the same calls on all ranks",
                                "look for an error on another thread") from None
        return values

    def abort(self) -> None:
        """Make the waits of all other threads raise; called by a thread that has failed."""
        self._shared.barrier.abort()


class _Shared:
    def __init__(self, world_size: int, deadline_s: float, domains: Sequence[int] | None) -> None:
        self.world_size = world_size
        self.domains = domains
        self.deadline_s = deadline_s
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)


def is_destroyed(process_group: Any) -> bool:
    """Whether ``destroy_process_group`` has ended a process group to which references remain."""
    import torch.distributed as dist

    with contextlib.suppress(KeyError, ValueError):
        dist.get_process_group_ranks(process_group)
        return False
    return True


def default_group(process_group: Any = None) -> Group:
    """Return the group of `process_group`; if None, of torch's default process group if it is
    initialized, else a group of one rank."""
    if process_group is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return SingleGroup()
    return ProcessGroup(process_group)
