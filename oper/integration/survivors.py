"""What survivors can still save when a rank has ended.

On one host the memory of a rank outlives it while others map it. Its rows are those of a whole step
if no rank had begun the update of the next one, and none can any more: an update begins after a
barrier that all ranks must reach, and the dead rank had not reached the one at which this rank
failed.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, OperError, fail
from oper.integration.on_demand import CHUNK_BYTES
from oper.integration.saving import Alone, save_by, tables_of
from oper.shmem.runtime import ShardedTables

_WHAT = "cannot save what the survivors hold"


class Survivors:
    """Saves a checkpoint without ranks that have ended, if their rows are provably of one step.

    Call `mark` after every whole step, on every rank: tables and dense model are of that step then.

    Raises:
        InvalidInputError: the model has no sharded tables, or ranks do not share memory.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._tables = [t for t in tables_of(model) if isinstance(t, ShardedTables)]
        if not self._tables or not all(
                t.is_one_domain and t.device.type == "cpu" for t in self._tables):
            raise InvalidInputError(fail(_WHAT, "tables", len(self._tables),
                                         "sharded tables of ranks that share memory",
                                         "save delta checkpoints"))
        self._marks: list[tuple[int, int, int]] = []
        self.mark()

    def mark(self) -> None:
        """A step is over."""
        self._marks = [(t._handle, *self._own(t)) for t in self._tables]

    @staticmethod
    def _progress(t: ShardedTables) -> list[list[int]]:
        flat = torch.ops.oper.context_progress(t._handle)
        return [flat[k:k + 3] for k in range(0, len(flat), 3)]

    def _own(self, t: ShardedTables) -> tuple[int, int]:
        found = self._progress(t)
        return (found[t.group.rank][0], found[t.group.rank][2]) if found else (0, 0)

    def save(self, folder: str | os.PathLike[str], extra: dict[str, Any] | None = None,
             chunk_bytes: int = CHUNK_BYTES) -> bool:
        """Save the marked step after a `PeerLostError`. Every survivor calls it; one writes.

        The error must come from the forward or the backward pass: the dense model is saved as it is
        on this rank, which must not have made its own step yet.

        Args:
            folder, extra, chunk_bytes: as for `oper.save_checkpoint`.

        Returns:
            Whether this rank has written it: the first survivor does.

        Raises:
            OperError: the rows are not provably of the marked step, or no rank has ended; nothing
                is written.
        """
        for t, mark in zip(self._tables, self._marks, strict=True):
            self._check(t, mark)
        dead = self._dead(self._tables[0])
        if not dead:
            raise OperError(fail(_WHAT, "ranks that have ended", "none", "at least one",
                                 "save a checkpoint with all of them"))
        if self._tables[0].group.rank != min(
                set(range(self._tables[0].group.world_size)) - dead):
            return False
        path = Path(folder).absolute()
        save_by(Alone(_WHAT, path), path, (self._model, self._optimizer, extra), chunk_bytes)
        return True

    @staticmethod
    def _dead(t: ShardedTables) -> set[int]:
        if t._heap is None:
            raise OperError(fail(_WHAT, "tables", "closed", "open tables", "load a checkpoint"))
        poll = select.poll()
        ranks = {fd: r for r, fd in enumerate(t._heap.pidfds) if fd >= 0}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        return {ranks[fd] for fd, _ in poll.poll(0)}

    def _check(self, t: ShardedTables, mark: tuple[int, int, int]) -> None:
        handle, arrivals, updates = mark
        found, dead = self._progress(t), self._dead(t)
        mine = found[t.group.rank][0] if found else 0
        # Nobody passes a barrier that a dead rank did not reach, or that this rank does not reach.
        held = mine == arrivals or any(found[r][0] < mine for r in dead)
        whole = all((begun, ended) == (updates, updates) for _, begun, ended in found)
        if t._handle != handle or not held or not whole:
            raise OperError(
                fail(_WHAT, "(arrivals, updates begun, updates ended) by rank", found,
                     f"{updates} updates on all ranks and a barrier that nobody passes",
                     "the step was under way: load the last checkpoint"))
