"""Rows that training has changed, marked by their owners during updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from oper.errors import InvalidInputError

if TYPE_CHECKING:
    from oper.shmem.tables import ShardedTables


class ChangedRows:
    """Tracks which rows of this rank updates have changed, with one bit per row.

    Args:
        tables: tables with an optimizer, in host memory.

    Raises:
        InvalidInputError: the tables have no optimizer or are in device memory.
    """

    def __init__(self, tables: ShardedTables) -> None:
        if tables.device.type != "cpu" or tables.optimizers is None:
            raise InvalidInputError(
                "cannot track changed rows", "tables",
                f"on {tables.device}, {'with' if tables.optimizers else 'without'} optimizer",
                "trained tables in host memory", "save complete checkpoints instead of deltas")
        self.tables = tables
        self._of = (0, -1)
        self.restart()

    def restart(self) -> None:
        """Clear all marks and start marking. No update may be under way on this rank."""
        torch.ops.oper.context_mark_changes(self.tables.handle, True)
        self._of = self._now()

    def accept(self) -> None:
        """Regard the rows published so far as known, and keep all marks: `take` does not return
        None because of them."""
        self._of = self._now()

    def _now(self) -> tuple[int, int]:
        return self.tables.handle, self.tables.num_published

    def take(self) -> dict[int, np.ndarray] | None:
        """Take the marked slots and clear their marks.

        Returns:
            Slots uint32 [n], ascending, by directory. None if other rows may have changed as well,
                because rows were written and published, or the tables were moved to another plan;
                then treat all rows as changed and call `restart`.
        """
        if self._now() != self._of:
            return None
        handle = self.tables.handle
        return {k: torch.ops.oper.context_take_changes(handle, k).numpy().view(np.uint32)
                for k in range(len(self.tables.directories))}

    def copy(self, part: str, piece: int, slots: np.ndarray, to: torch.Tensor) -> None:
        """Copy rows of this rank in their stored form.

        Args:
            part: ``"rows"`` or a state's name.
            piece: index of the directory.
            slots: uint32 [n], slots in the directory, from `take`.
            to: [n, width] of the stored dtype, written to.
        """
        rows = self.tables.view(part, piece, self.tables.group.rank)
        torch.ops.oper.copy_rows(rows, torch.from_numpy(slots.view(np.int32)), to)

    def stop(self) -> None:
        """Stop marking rows."""
        if self.tables._heap is not None:
            torch.ops.oper.context_mark_changes(self.tables.handle, False)
