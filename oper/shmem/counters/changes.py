"""Rows that training has changed, marked by their owners during updates, and changed keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oper.errors import InvalidInputError

if TYPE_CHECKING:
    from oper.shmem.tables import ShardedTables


EXPIRED = "expired"


@dataclass(frozen=True, slots=True, eq=False)
class ChangedKeys:
    """Changes of a dynamic table's directory in this rank's buckets.

    Attributes:
        table: name of the table.
        part: ``"keys"`` or ``"candidates"``, a part of `oper.shmem.keys.directories.RECORDS`; or
            ``"expired"``: slots whose keys have outlived their time to live since the last changes
            were taken, although the directory still holds them.
        numbers: int64 [n], ascending, numbers of the records or slots.
        records: int64 [n, 3]: key, count and clock of each record; clock -1 = the record has become
            empty. None if `part` is ``"expired"``.
    """

    table: str
    part: str
    numbers: torch.Tensor
    records: torch.Tensor | None


class ChangedRows:
    """Tracks which rows of this rank updates have changed, with one bit per row.

    The bits belong to the tables, so only the last tracker that was made or restarted has them.
    For the others, and after `stop`, `take` returns None.

    Changes of the directories of dynamic tables need no marks: every change has the clock of its
    update.

    Args:
        tables: tables with an optimizer.

    Raises:
        InvalidInputError: the tables have no optimizer; or they are in device memory, and steps
            that mark no rows have been captured in a CUDA graph.
    """

    def __init__(self, tables: ShardedTables) -> None:
        if tables.optimizers is None:
            raise InvalidInputError(
                "cannot track changed rows", "tables", "without optimizer", "trained tables",
                "save complete checkpoints instead of deltas")
        self.tables = tables
        self._of = (0, -1)
        self._token = object()  # while it is `ShardedTables.tracker`, the marks are this object's
        self.restart()

    def restart(self) -> None:
        """Clear all marks and start marking. No update may be under way on this rank."""
        if self._call("mark_changes", True) is False:
            raise InvalidInputError(
                "cannot track changed rows", "steps captured in a CUDA graph", "without marks",
                "none before rows are tracked, since replays of such steps mark no rows",
                "track changed rows (make DeltaCheckpoints) before the capture")
        self._of = self._now()
        self._token = self.tables.tracker = object()
        keys = self.tables.keys
        self._clocks = {name: keys.clock(name) for name in keys.tables} if keys else {}
        # The time to live may have been different before.
        self._expired_since = dict.fromkeys(self._clocks, -1)

    def _call(self, what: str, argument: int) -> Any:
        prefix = "device_context" if self.tables.on_device else "context"
        return getattr(torch.ops.oper, f"{prefix}_{what}")(self.tables.handle, argument)

    def accept(self) -> None:
        """Regard all rows flushed so far (`flush_replicas`) as known, and keep all marks: `take`
        does not return None because of them."""
        self._of = self._now()

    def _now(self) -> tuple[int, int]:
        return self.tables.handle, self.tables.num_flushes

    def take(self) -> dict[int, np.ndarray] | None:
        """Take the marked slots and clear their marks.

        Returns:
            Slots uint32 [n], ascending, by directory. None if other rows may have changed as well,
                because rows were written and flushed, the tables were moved to another plan, or
                another tracker has taken marks; then treat all rows as changed and call `restart`.
        """
        if self._now() != self._of or self._token is not self.tables.tracker:
            return None
        return {k: self._call("take_changes", k).numpy().view(np.uint32)
                for k in range(len(self.tables.directories))}

    def take_keys(self) -> Iterator[ChangedKeys]:
        """Yield the changes of all directories since the last call or `restart`; call it after
        `take`, if that returned slots."""
        keys = self.tables.keys
        if keys is None:
            return
        for name, since in self._clocks.items():
            for part in keys.parts(name):
                yield ChangedKeys(name, part, *keys.changed(name, part, since))
            yield ChangedKeys(name, EXPIRED, keys.expired(name, self._expired_since[name]), None)
            self._clocks[name] = self._expired_since[name] = keys.clock(name)

    def copy(self, part: str, piece: int, slots: np.ndarray, to: torch.Tensor) -> None:
        """Copy rows of this rank in their stored form.

        Args:
            part: ``"rows"`` or a state's name.
            piece: index of the directory.
            slots: uint32 [n], slots in the directory, from `take`.
            to: [n, width] of the stored dtype, in host memory, written to.
        """
        rows = self.tables.view(part, piece, self.tables.group.rank)
        if rows.device == to.device:
            torch.ops.oper.copy_rows(rows, torch.from_numpy(slots.view(np.int32)), to)
        else:
            to.copy_(rows[torch.from_numpy(slots.astype(np.int64)).to(rows.device)])

    def stop(self) -> None:
        """Stop marking rows, unless another tracker needs the marks."""
        if self._token is not self.tables.tracker:
            return
        self.tables.tracker = None
        if self.tables._heap is not None:
            self._call("mark_changes", False)
