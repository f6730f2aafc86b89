"""Saving by survivors when a rank has ended, or does not arrive within the deadline.

On one host the memory of a rank outlives it while others map it. Its rows are those of a whole step
if no rank had begun the update of the next one, and none can any more: an update begins after a
barrier that all ranks must reach, and the missing rank had not reached the one at which this rank
failed. A rank that only stalled, and resumes, finds there that others have given up, and updates
nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from oper.errors import InvalidInputError, OperError
from oper.integration.checkpoint.on_demand import CHUNK_BYTES
from oper.integration.checkpoint.saving import Alone, save_by, tables_of
from oper.shmem.counters.progress import Mark, Progress
from oper.shmem.tables import ShardedTables

_WHAT = "cannot save what the survivors hold"


class Survivors:
    """Saves a checkpoint without ranks that are missing, if their rows are provably of one step.

    Call `mark` after every whole step, on every rank: tables and dense model are then of that step.

    Raises:
        InvalidInputError: the model has no sharded tables, or ranks do not share memory.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model, self._optimizer = model, optimizer
        tables = [t for t in tables_of(model) if isinstance(t, ShardedTables)]
        if not tables:
            raise InvalidInputError(_WHAT, "tables", 0, "sharded tables that are trained",
                                    "save whole checkpoints")
        for t in tables:
            if t.keys is not None:
                t.keys.refuse(_WHAT, "save whole checkpoints")
        self._progress = [Progress(t) for t in tables]
        self._marks: list[Mark] = []
        self.mark()

    def mark(self) -> None:
        """Note that a whole step is complete."""
        self._marks = [p.mark() for p in self._progress]

    def save(self, folder: str | os.PathLike[str], extra: dict[str, Any] | None = None,
             chunk_bytes: int = CHUNK_BYTES) -> bool:
        """Save the marked step after a `PeerLostError` or a `DeadlineError`. All survivors call it;
        one writes.

        The error must come from the forward or the backward pass: the dense model is saved as it is
        on this rank, which must not have made its own step yet.

        Args:
            folder, extra, chunk_bytes: as for `oper.save_checkpoint`.

        Returns:
            Whether this rank, as the first survivor, has written it.

        Raises:
            OperError: the rows are not provably of the marked step, or no rank is missing; nothing
                is written.
        """
        for progress, mark in zip(self._progress, self._marks, strict=True):
            if not progress.is_unchanged(mark):
                raise OperError(
                    _WHAT, "(arrivals, updates begun, updates ended) by rank",
                    [tuple(c) for c in progress.counts()],
                    f"{mark.updates} updates on all ranks and a barrier that no rank passes",
                    "the step was under way: load the last checkpoint")
        first = self._progress[0]
        missing = set().union(*(p.missing() for p in self._progress))
        if not missing:
            raise OperError(_WHAT, "ranks that are missing", "none", "at least one",
                            "save a checkpoint with all of them")
        if first.rank != min(set(range(first.world_size)) - missing):
            return False
        path = Path(folder).absolute()
        save_by(Alone(_WHAT, path), path, (self._model, self._optimizer, extra), chunk_bytes)
        return True
