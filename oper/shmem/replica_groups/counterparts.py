"""Exchanges of bytes between a rank and its counterparts in the other replica groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oper.errors import DeadlineError, DesyncError, PeerLostError
from oper.shmem.group.desync import SYNCHRONIZATION, CollectivePhase, register_of
from oper.shmem.group.transport import Transport, transport_of
from oper.shmem.replica_groups.groups import ReplicaGroups

Received = Callable[[], list[torch.Tensor]]  # waits for an exchange and returns what was received


class Counterparts:
    """A rank's connections to its counterparts. Construction is collective over all groups.

    Args:
        owner: the object that errors describe.
        groups: the replica groups.

    Attributes:
        number: number of the collection, the same on all counterparts.
        sent_bytes: number of bytes that this rank has sent, or has begun to send.
    """

    def __init__(self, owner: Any, groups: ReplicaGroups) -> None:
        self._groups, self.sent_bytes = groups, 0
        self.number = register_of(groups.counterparts).add(owner)
        self._transport = self._behind = transport_of(groups.counterparts)
        if groups.background is not None:
            self._behind = transport_of(groups.background.group)
        # Exchanges in the background refer to this object, so they end before the connections do.
        self._releases = [x.hold(self) for x in {self._transport, self._behind}]

    def close(self) -> None:
        """Release the connections, after exchanges that are under way. Not collective."""
        if self._groups.background is not None:
            self._groups.background.thread.submit(int).result()
        for release in self._releases:
            release()

    def rank_of(self, group: int) -> int:
        """Return the global rank of this rank's counterpart in a group."""
        mine = self._groups.mine
        return group * mine.world_size + mine.rank

    def exchange(self, data: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send `data`, uint8 tensors, to all counterparts.

        Returns:
            By group, the bytes that its counterpart has sent (this rank's own group: `data`), uint8
            [sizes[group]].
        """
        return self._begin(self._transport, data, sizes)()

    def begin(self, data: list[torch.Tensor], sizes: list[int]) -> Received:
        """Begin an `exchange` on the groups' background thread or, without such a thread, complete
        it. Returns a function that waits for it, raises its error, and returns its result."""
        call = self._begin(self._behind, data, sizes)
        if self._groups.background is not None:
            return self._groups.background.thread.submit(call).result
        found = call()
        return lambda: found

    def _begin(self, transport: Transport, data: list[torch.Tensor], sizes: list[int]) -> Received:
        """Prepare an exchange; returns the function that makes it, on any thread."""
        count, own = self._groups.count, self._groups.counterparts.rank
        mine = torch.cat([*data, torch.empty(0, dtype=torch.uint8)])
        there = [mine.numel() if g != own else 0 for g in range(count)]
        back = [size if g != own else 0 for g, size in enumerate(sizes)]
        self.sent_bytes += sum(there)

        def run() -> list[torch.Tensor]:
            received = torch.empty(sum(back), dtype=torch.uint8)
            transport.at = CollectivePhase(self.number, SYNCHRONIZATION)
            try:
                transport.exchange(mine if count == 2 else mine.repeat(count - 1), there,
                                   received, back)
            except (PeerLostError, DeadlineError, DesyncError) as error:
                if error.rank is None:
                    raise
                raise type(error)("lost the counterpart in another replica group", "rank",
                                  self.rank_of(error.rank),
                                  "all ranks alive and at the same update", str(error)) from error
            parts = list(received.split(back))
            parts[own] = mine
            return parts

        return run
