"""Saving by the surviving ranks after a rank has exited or missed the deadline.

On one host, a rank's shared memory persists after its exit while other ranks map it. Its rows are
those of a completed step if no rank had begun the next step's update, and then none can begin it:
an update begins after a barrier of all ranks, and the missing rank had not reached the barrier at
which this rank failed. A stalled rank that resumes finds at this barrier that the others have
aborted, and updates nothing.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from oper.errors import InvalidInputError, OperError
from oper.integration.checkpoint.files import place_of
from oper.integration.checkpoint.folders import Ranks
from oper.integration.checkpoint.on_demand import CHUNK_BYTES
from oper.integration.checkpoint.saving import save_by, tables_of
from oper.shmem.counters.progress import Progress
from oper.shmem.tables import ShardedTables

_WHAT = "cannot save a checkpoint without the missing ranks"


class Survivors:
    """Saves a checkpoint without missing ranks if all rows are provably of the same step.

    Call `mark` on every rank after every step, when both tables and dense model are updated.

    Args:
        model: a model with sharded tables.
        optimizer: as for `oper.save_checkpoint`.

    Raises:
        InvalidInputError: the model has no sharded tables, or has tables that are dynamic or in
            replica groups, or ranks do not share memory.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model, self._optimizer = model, optimizer
        tables = [t for t in tables_of(model) if isinstance(t, ShardedTables)]
        if not tables:
            raise InvalidInputError(_WHAT, "trained sharded tables", 0, "at least one",
                                    "save full checkpoints")
        for t in tables:
            for part in (t.keys, t.replicas):
                if part is not None:
                    part.refuse(_WHAT, "save full checkpoints")
        self._group = tables[0].group
        self._progress = [Progress(t) for t in tables]

    def mark(self) -> None:
        """Record that a step is complete on this rank."""
        for progress in self._progress:
            progress.mark()

    def save(self, folder: str | os.PathLike[str], extra: dict[str, Any] | None = None,
             chunk_bytes: int = CHUNK_BYTES) -> bool:
        """Save the marked step after a `PeerLostError` or a `DeadlineError`.

        All survivors call this method, and the one with the lowest rank writes. The error must have
        been raised by the forward or backward pass, because the dense model is saved with its
        current values: its optimizer must not have made the next step yet.

        Args:
            folder, extra, chunk_bytes: as for `oper.save_checkpoint`.

        Returns:
            Whether this rank is the one that has written the checkpoint.

        Raises:
            OperError: the rows are not provably of the marked step, or no rank is missing. Nothing
                is written.
        """
        for progress in self._progress:
            if not progress.is_unchanged():
                raise OperError(
                    _WHAT, "(arrivals, updates begun, updates ended) by rank",
                    [(c.arrivals, c.begun, c.ended) for c in progress.counts()],
                    f"{progress.updates} updates begun and ended on all ranks, and no further one",
                    "an update had begun or may still begin: load the last checkpoint")
        missing = set().union(*(p.missing() for p in self._progress))
        if not missing:
            raise OperError(_WHAT, "ranks that are missing", "none", "at least one",
                            "save a checkpoint with all of them")
        if self._group.rank != min(set(range(self._group.world_size)) - missing):
            return False
        path = place_of(folder)
        save_by(Ranks(None, _WHAT, path), path, (self._model, self._optimizer, extra), chunk_bytes)
        return True
