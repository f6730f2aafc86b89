"""Rows of sharded tables in logical order, whatever rank holds them: read, write, publish."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from oper.directory import TableDirectory, TierLayout
from oper.errors import InvalidInputError, OperError, fail
from oper.shmem.arena import ROW_TYPES, ArenaLayout
from oper.shmem.group import Group
from oper.shmem.heap import HostHeap
from oper.shmem.optimizers import STATE_PARTS
from oper.tables import TableSpec

TORCH_DTYPES = {name: getattr(torch, name) for name in ROW_TYPES}
CHUNK_ROWS = 1 << 17  # rows that are handled at a time when whole tables are read or written


class LogicalRows:
    """Base of `ShardedTables`: access to rows and optimizer state by id.

    Attributes:
        specs: the tables by name.
        directories: one per column piece of each table.
        pieces: the directories of each table, in column order.
        group: the ranks.
    """

    specs: dict[str, TableSpec]
    directories: list[TableDirectory]
    pieces: dict[str, list[int]]
    group: Group
    _layout: ArenaLayout
    _heap: HostHeap | None

    def barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def _parts(self, piece: int, ids: np.ndarray
               ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Owner, index into `ids` (int64 [n]) and slot of rows of a piece."""
        d = self.directories[piece]
        owner, slot = d.locate(d.position_of(ids))
        for rank in range(self.group.world_size):
            at = np.flatnonzero(owner == rank)
            if at.size:
                yield rank, torch.from_numpy(at), torch.from_numpy(slot[at])

    def view(self, part: str, piece: int, rank: int) -> torch.Tensor:
        """A rank's shard of a piece or of its optimizer state, [slots, columns], mapped."""
        heap, d = self._heap, self.directories[piece]
        if heap is None:
            raise OperError(fail("sharded tables were closed", "table", d.table.name, "open tables",
                                 "read them before close()"))
        columns = 1 if self._is_per_row(part, d.table.name) else d.dim
        view: torch.Tensor = torch.ops.oper.segment_view(
            heap.addresses[rank] + int(getattr(self._layout, part)[piece, rank]),
            int(d.num_slots[rank]), columns,
            ROW_TYPES.index(d.table.dtype) if part == "rows" else 0)
        return view

    def columns(self, part: str, piece: int) -> slice:
        """Where a directory's piece stands in a row of its table; one column for a state per row.
        """
        d = self.directories[piece]
        per_row = self._is_per_row(part, d.table.name)
        return slice(0, 1) if per_row else slice(d.column, d.column + d.dim)

    def _is_per_row(self, part: str, table: str) -> bool:
        spec = self.specs[table]
        parts = {"rows": False, **dict(STATE_PARTS[spec.optimizer])}
        if part not in parts:
            raise InvalidInputError(
                fail(f"table {table!r} has no such part", "part", part, f"one of {list(parts)}",
                     f"its optimizer is {spec.optimizer}"))
        return parts[part]

    def shape(self, table: str, part: str = "rows") -> tuple[int, ...]:
        """Global shape of a table or of a part of its optimizer state."""
        spec = self.specs[table]
        return (spec.num_rows,) if self._is_per_row(part, table) else (spec.num_rows, spec.dim)

    def dtype(self, table: str, part: str = "rows") -> torch.dtype:
        """What a table's rows, or a part of its optimizer state (float32), are stored as."""
        return TORCH_DTYPES[self.specs[table].dtype] if part == "rows" else torch.float32

    def read(self, table: str, begin: int = 0, end: int | None = None, part: str = "rows"
             ) -> torch.Tensor:
        """Rows `[begin, end)` of a table in logical order, as a copy.

        Args:
            table: its name.
            begin, end: ids; the whole table by default.
            part: ``"rows"``, or a part of the optimizer's state (`STATE_PARTS`).

        Returns:
            The rows' dtype [n, dim]; for states float32 [n, dim], or [n] with one number per row.

        One-sided: reads the owners' memory; no rank may be in an update meanwhile.
        """
        end = self.specs[table].num_rows if end is None else end
        per_row = self._is_per_row(part, table)
        out = torch.empty(end - begin, 1 if per_row else self.specs[table].dim,
                          dtype=self.dtype(table, part))
        columns = slice(0, out.shape[1])
        for at in range(begin, end, CHUNK_ROWS):
            stop = min(end, at + CHUNK_ROWS)
            self.gather(table, np.arange(at, stop), part, columns, out[at - begin:stop - begin])
        return out[:, 0] if per_row else out

    def gather(self, table: str, ids: np.ndarray, part: str, columns: slice, out: torch.Tensor
               ) -> None:
        """Copy some columns of rows in any order.

        Args:
            table: its name.
            ids: int64 [n], valid.
            part: as for `read`.
            columns: columns of the table; ``slice(0, 1)`` of a state with one number per row.
            out: [n, columns], where they go.
        """
        # All pieces of a row carry the same state per row.
        per_row = self._is_per_row(part, table)
        for piece in self.pieces[table][:1] if per_row else self.pieces[table]:
            mine = self.columns(part, piece)
            first, last = max(mine.start, columns.start), min(mine.stop, columns.stop)
            if first >= last:
                continue
            for rank, index, slot in self._parts(piece, ids):
                rows = self.view(part, piece, rank)[:, first - mine.start:last - mine.start]
                out[index, first - columns.start:last - columns.start] = rows[slot]

    def write(self, table: str, values: torch.Tensor, begin: int = 0, part: str = "rows",
              column: int = 0) -> None:
        """Write rows `[begin, begin + n)`; every rank stores those that it owns.

        Args:
            table: its name.
            values: [n, columns], or [n] for a state with one number per row, of any float dtype
                (rounded to nearest where rows are narrower); equal on all ranks.
            begin: first id.
            part: as for `read`.
            column: first column that `values` stands for.

        Call `publish` afterwards.
        """
        values = values.detach().reshape(values.shape[0], -1)
        for piece in self.pieces[table]:
            columns = self.columns(part, piece)
            first = max(columns.start, column)
            last = min(columns.stop, column + values.shape[1])
            if first >= last:
                continue
            mine = self.view(part, piece, self.group.rank)[
                :, first - columns.start:last - columns.start]
            for at in range(0, values.shape[0], CHUNK_ROWS):
                stop = min(values.shape[0], at + CHUNK_ROWS)
                for rank, index, slot in self._parts(piece, np.arange(begin + at, begin + stop)):
                    if rank == self.group.rank:
                        mine[slot] = values[index + at, first - column:last - column].to(mine.dtype)

    def publish(self) -> None:
        """Make written rows visible to all: wait for all ranks, refresh replicas. Collective."""
        self.barrier()
        for k, d in enumerate(self.directories):
            for x in d.tiers:
                if x.replica_base[self.group.rank] >= 0:
                    self._copy_replicas(k, x)
        self.barrier()

    def _copy_replicas(self, piece: int, x: TierLayout) -> None:
        """Copy a replicated tier's master rows into this rank's replica."""
        d = self.directories[piece]
        first = int(x.replica_base[self.group.rank])
        copy = self.replica_view(piece, self.group.rank)[first:first + x.tier.stop - x.tier.start]
        for at in range(0, copy.shape[0], CHUNK_ROWS):
            positions = np.arange(at, min(copy.shape[0], at + CHUNK_ROWS)) + x.tier.start
            owner, slot = d.locate(positions)
            for peer in np.unique(owner):
                here = np.flatnonzero(owner == peer)
                source = self.view("rows", piece, int(peer))
                copy[torch.from_numpy(here + at)] = source[torch.from_numpy(slot[here])]

    def replica(self, table: str, rank: int, piece: int = 0) -> torch.Tensor:
        """A rank's copy of the replicated rows of one column piece of a table.

        Returns:
            The rows' dtype [rows, columns of the piece], a mapped view.
        """
        return self.replica_view(self.pieces[table][piece], rank)

    def replica_view(self, piece: int, rank: int) -> torch.Tensor:
        """As `replica`, of a directory."""
        assert self._heap is not None
        d = self.directories[piece]
        copy: torch.Tensor = torch.ops.oper.segment_view(
            self._heap.addresses[rank] + int(self._layout.replicas[piece, rank]),
            int(d.num_replica_rows[rank]), d.dim, ROW_TYPES.index(d.table.dtype))
        return copy
