"""Renumbering of the rows of sharded tables, with their optimizer states."""

from __future__ import annotations

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.rows.remap import Remap, of_table
from oper.shmem.rows import CHUNK_ROWS, LogicalRows, put_rows


def check_renumbering(tables: LogicalRows, remap: Remap) -> None:
    """Raise InvalidInputError if a re-map does not fit the tables; nothing changes."""
    for name, spec in tables.specs.items():
        if tables.keys is not None and of_table(spec, remap) is not None:
            tables.keys.refuse(f"cannot renumber table {name!r}", "leave it out of the re-map")
        if of_table(spec, remap) is not None and tables.optimizers is None:
            raise InvalidInputError(f"cannot renumber table {name!r}", "optimizer", None,
                                    "a table sharded for training",
                                    "renumber the trained tables, then publish them")


def renumber(tables: LogicalRows, remap: Remap) -> None:
    """Move every row r, with its optimizer state, to row ``remap[feature][r]``. Collective.

    Values do not change. Each rank needs memory for a copy of its part of one table at a time.

    Args:
        tables: the tables; no batch may be under way.
        remap: by feature, int [num_rows], the new number of each row; see `oper.rows.remap`.

    Raises:
        InvalidInputError: the re-map does not fit; no row has moved.
    """
    check_renumbering(tables, remap)
    rank = tables.group.rank
    for name, spec in tables.specs.items():
        new_rows = of_table(spec, remap)
        if new_rows is None:
            continue
        old_rows = np.argsort(new_rows)  # by new row number
        moved = []
        for piece in tables.pieces[name]:
            directory = tables.directories[piece]
            owner, slots = directory.locate(directory.position_of(np.arange(spec.num_rows)))
            mine = np.flatnonzero(owner == rank)
            moved += [(view, torch.from_numpy(slots[mine]),
                       _gathered(tables, (name, part, piece), old_rows[mine]))
                      for part, view in tables.views(piece).items()]
        tables.barrier()  # all ranks have read the old rows
        for view, places, values in moved:
            if places.numel():
                put_rows(view, places, values, torch.arange(places.numel()))
        tables.flush_replicas()


def _gathered(tables: LogicalRows, place: tuple[str, str, int], ids: np.ndarray) -> torch.Tensor:
    """Copy rows `ids` (int64 [n]) of (table, part, piece): returns [n, columns of the piece]."""
    name, part, piece = place
    columns = tables.columns(part, piece)
    out = torch.empty(ids.size, columns.stop - columns.start, dtype=tables.dtype(name, part))

    def gather(at: int) -> None:
        tables.gather_piece(piece, ids[at:at + CHUNK_ROWS], part, columns,
                            out[at:at + CHUNK_ROWS])

    tables.in_rounds(range(0, ids.size, CHUNK_ROWS), gather)
    return out
