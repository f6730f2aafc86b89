"""Rows that differ since a checkpoint or a delta, in replica groups that update rows separately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.shmem.counters.changes import ChangedRows
from oper.shmem.replica_groups.averages import union_of


class SynchronizedRows(ChangedRows):
    """Tracks the rows of this rank that synchronizations have replaced.

    The marks of updates, which `ChangedRows` reads, belong to the `Synchronizer`, and do not
    include rows that only other groups have updated. Immediately after a synchronization, the rows
    that it and earlier ones have replaced are all rows that any group has changed.
    """

    def restart(self) -> None:
        """Forget the rows of earlier synchronizations. Not collective."""
        self._of = self._now()
        self._slots = [np.zeros(0, np.uint32) for _ in self.tables.directories]
        self._clocks = {}  # no dynamic tables: they require every = 1, where `ChangedRows` is used
        self.tables.replicas.followers.add(self)

    def is_current(self) -> bool:
        """Whether only updates and synchronizations have changed rows since `restart`."""
        return self._now() == self._of

    def add(self, slots: Sequence[np.ndarray]) -> None:
        """Record the rows that a synchronization has replaced: slots by directory, uint32 [n],
        ascending."""
        self._slots = [union_of(x) for x in zip(self._slots, slots, strict=True)]
        self.accept()

    def take(self) -> dict[int, np.ndarray] | None:
        """Take the slots of the replaced rows; call it when all groups have the same rows. See
        `ChangedRows.take`."""
        if not self.is_current():
            return None
        found = dict(enumerate(self._slots))
        self._slots = [np.zeros(0, np.uint32) for _ in self._slots]
        return found

    def stop(self) -> None:
        """Stop tracking replaced rows."""
        self.tables.replicas.followers.discard(self)
