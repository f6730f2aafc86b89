"""Progress of the ranks of a memory domain, read from shared memory even after a rank has died.

The barrier counts each rank's arrivals, and the updates of its rows that the rank has begun and
ended (csrc/host/barrier.h).
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from oper.errors import InvalidInputError, OperError
from oper.shmem.group.desync import FORWARD, GIVEN_UP, BarrierState, barrier_states

if TYPE_CHECKING:
    from oper.shmem.memory.host_heap import HostHeap
    from oper.shmem.tables import ShardedTables


class Progress:
    """Reads the progress counters of tables whose ranks share memory. No method is collective.

    Args:
        tables: tables in host memory, with a single memory domain; no update may be under way on
            this rank.

    Attributes:
        updates: number of updates at the last `mark`.

    Raises:
        InvalidInputError: the tables are in device memory or have several memory domains.
    """

    def __init__(self, tables: ShardedTables) -> None:
        if not tables.is_one_domain or tables.device.type != "cpu":
            raise InvalidInputError(
                "cannot read the progress of the ranks", "tables",
                f"on {tables.device}, in "
                f"{'one domain' if tables.is_one_domain else 'several domains'}",
                "tables in host memory that all ranks share", "save delta checkpoints instead")
        self._tables, self._rank = tables, tables.group.rank
        self.mark()

    def counts(self) -> list[BarrierState]:
        """Return the barrier state of every rank; empty with a single rank. Raises OperError if
        the tables are closed."""
        self._heap()
        return barrier_states(self._tables.handle)

    def missing(self) -> set[int]:
        """Return the ranks that have exited and, if this rank has aborted, those it waited for.

        The latter notice this at their next arrival. Raises OperError if the tables are closed.
        """
        late = set()
        # Arrivals must be read after the rank has aborted, see `Barrier::arrive`.
        if any(c.absent == GIVEN_UP for c in self.counts()[self._rank:self._rank + 1]):
            arrivals = [c.arrivals for c in self.counts()]
            late = {r for r, n in enumerate(arrivals) if n < arrivals[self._rank]}
        return late | self._ended()

    def _ended(self) -> set[int]:
        poll = select.poll()
        ranks = {fd: r for r, fd in enumerate(self._heap().pidfds) if fd >= 0}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        return {ranks[fd] for fd, _ in poll.poll(0)}

    def _heap(self) -> HostHeap:
        if self._tables._heap is None:
            raise OperError("cannot read the progress of the ranks", "tables", "closed",
                            "open tables", "load a checkpoint")
        return self._tables._heap

    def mark(self) -> None:
        """Remember the current moment. No update may be under way on this rank."""
        found = self.counts()
        self._handle = self._tables.handle
        self._arrivals, self.updates = (
            (found[self._rank].arrivals, found[self._rank].ended) if found else (0, 0))

    def is_unchanged(self) -> bool:
        """Return whether all ranks' rows are as they were at this rank's mark, and will stay so.

        This requires that no rank has begun an update after the mark, and that none can begin one.
        No rank can begin one if this rank has since arrived only at barriers of forward passes, and
        the caller arrives at no others; or if a missing rank has refused at the barrier at which
        this rank arrived last, or has not arrived there, since no rank passes that barrier.
        """
        missing = self.missing()  # before the counters, which are final for ranks that have ended
        found = self.counts()
        mine, phase = (found[self._rank].arrivals, found[self._rank].phase) if found else (0, -1)
        held = (mine == self._arrivals or phase in FORWARD
                or any(found[r].arrivals < mine + found[r].refuses for r in missing))
        whole = all(c.begun == c.ended == self.updates for c in found)
        return self._tables.handle == self._handle and held and whole
