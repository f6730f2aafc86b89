"""Rows of sharded tables in logical order, whatever rank holds them: read, write, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.rows.directory import TableDirectory, TierLayout
from oper.shmem.exchange.host import Exchange, Wanted
from oper.shmem.group.desync import STATE_ACCESS
from oper.shmem.group.groups import Group
from oper.shmem.group.turns import Turns
from oper.shmem.keys.directories import Keys
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.memory.quantise import as_rows, dequantise
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer, initial_state
from oper.shmem.placement.layout import ROW_TYPES, ArenaLayout
from oper.tables import CODE_BITS, DTYPE_BYTES, TableSpec, bytes_of_row

# What rows are given out as: codes as the numbers that they stand for.
TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES} | dict.fromkeys(
    CODE_BITS, torch.float32)
CHUNK_ROWS = 1 << 17  # rows that are handled at a time when whole tables are read or written

_Work = TypeVar("_Work")


class LogicalRows:
    """Base of `ShardedTables`: access to rows and optimizer state by id.

    Attributes:
        device: device of rows and outputs.
        specs: the tables by name.
        directories: one per column piece of each table.
        pieces: the directories of each table, in column order.
        group: the ranks.
        turns: lock of this rank's threads.
    """

    device = torch.device("cpu")
    optimizers: Mapping[str, Optimizer] | None = None  # by table; None = read-only tables
    name = ""  # of the collection in its model, e.g. a module's path; for errors
    phase = STATE_ACCESS  # what `barrier` is called for at present
    num_published = 0  # how often rows were written but by training
    specs: dict[str, TableSpec]
    directories: list[TableDirectory]
    pieces: dict[str, list[int]]
    group: Group
    turns: Turns
    keys: Keys | None = None  # of dynamic tables, where there are any
    _layout: ArenaLayout
    _heap: HostHeap | None
    _addresses: list[int]  # [W] of the arenas, 0 = in another memory domain
    _exchange: Exchange | None

    @property
    def is_one_domain(self) -> bool:
        """Whether every rank can address every other's memory."""
        return self._exchange is None

    @property
    def members(self) -> Sequence[int]:
        """Ranks of this memory domain, ascending."""
        return range(self.group.world_size) if self._exchange is None else self._exchange.members

    def barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank. Collective; between batches.

        Raises:
            PeerLostError: a peer has ended; names it.
            DeadlineError: a peer did not come in time; names it.
        """
        self.barrier()  # here peers are watched one by one
        try:
            return self.group.all_gather(value)
        except (PeerLostError, DeadlineError):
            self.barrier()
            raise

    def _parts(self, piece: int, positions: np.ndarray
               ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Owner, index into `positions` (int64 [n]) and slot of rows of a piece."""
        owner, slot = self.directories[piece].locate(positions)
        for rank in range(self.group.world_size):
            at = np.flatnonzero(owner == rank)
            if at.size:
                yield rank, torch.from_numpy(at), torch.from_numpy(slot[at])

    def view(self, part: str, piece: int, rank: int) -> torch.Tensor:
        """A view of a rank's shard of a piece or of its optimizer state, [slots, columns].

        Quantised rows are uint8 [slots, bytes of a row].
        """
        d = self.directories[piece]
        if self._heap is None:
            raise OperError("sharded tables were closed", "table", d.table.name, "open tables",
                            "read them before close()")
        columns = 1 if self._is_per_row(part, d.table.name) else d.dim
        return self._segment(
            self._addresses[rank] + int(getattr(self._layout, part)[piece, rank]),
            int(d.num_slots[rank]), columns, d.table.dtype if part == "rows" else "float32")

    def _begin_states(self, optimizers: Mapping[str, Optimizer]) -> bool:
        """Initialise this rank's optimizer states that do not begin at 0; returns whether any rank
        has such states."""
        first = {table: x for table, o in optimizers.items() if (x := initial_state(o))}
        for k, d in enumerate(self.directories):
            if d.table.name in first:
                self.view("momentum1", k, self.group.rank).fill_(first[d.table.name])
        return bool(first)

    def _segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        """Mapped memory as [rows, columns] of `dtype`; quantised rows as bytes."""
        if dtype in CODE_BITS:
            width = bytes_of_row(dtype, columns)
            return torch.ops.oper.segment_bytes(address, rows * width).view(rows, width)
        return torch.ops.oper.segment_view(address, rows, columns, ROW_TYPES.index(dtype))

    def columns(self, part: str, piece: int) -> slice:
        """Columns of the table that a directory's piece holds; one column for a state with one
        number per row."""
        d = self.directories[piece]
        per_row = self._is_per_row(part, d.table.name)
        return slice(0, 1) if per_row else slice(d.column, d.column + d.dim)

    def _is_per_row(self, part: str, table: str) -> bool:
        spec = self.specs[table]
        parts = {"rows": False, **dict(STATE_PARTS[spec.optimizer])}
        if part not in parts:
            raise InvalidInputError(f"table {table!r} has no such part", "part", part,
                                    f"one of {list(parts)}", f"its optimizer is {spec.optimizer}")
        return parts[part]

    def shape(self, table: str, part: str = "rows") -> tuple[int, ...]:
        """Global shape of a table or of a part of its optimizer state."""
        spec = self.specs[table]
        return (spec.num_rows,) if self._is_per_row(part, table) else (spec.num_rows, spec.dim)

    def dtype(self, table: str, part: str = "rows") -> torch.dtype:
        """The dtype in which `read` returns a table's rows or a part of its optimizer state.

        It is that of storage, but float32 for quantised rows and for every state.
        """
        return TORCH_DTYPES[self.specs[table].dtype] if part == "rows" else torch.float32

    def read(self, table: str, begin: int = 0, end: int | None = None, part: str = "rows"
             ) -> torch.Tensor:
        """Rows `[begin, end)` of a table in logical order, as a copy.

        Args:
            table: its name.
            begin, end: ids; the whole table by default.
            part: ``"rows"``, or a part of the optimizer's state (`STATE_PARTS`).

        Returns:
            The rows' dtype [n, dim], in host memory; for states float32 [n, dim], or [n] with one
            number per row.

        One-sided: reads the owners' memory; no rank may be in an update meanwhile. Between memory
        domains collective: all ranks read, possibly other rows, or none.
        """
        end = self.specs[table].num_rows if end is None else end
        per_row = self._is_per_row(part, table)
        out = torch.empty(end - begin, 1 if per_row else self.specs[table].dim,
                          dtype=self.dtype(table, part))

        def read_chunk(work: tuple[int, int]) -> None:
            piece, at = work
            ids = np.arange(at, min(end, at + CHUNK_ROWS))
            self.gather_piece(piece, ids, part, slice(0, out.shape[1]),
                              out[at - begin:at - begin + ids.size])

        self.in_rounds([(piece, at) for at in range(begin, end, CHUNK_ROWS)
                        for piece in self.pieces_of(table, part)], read_chunk)
        return out[:, 0] if per_row else out

    def in_rounds(self, work: Sequence[_Work], body: Callable[[_Work], None]) -> None:
        """Call ``body``, which calls `gather_piece` once, for each piece of work.

        Between memory domains collective: ranks with less to do take part in the others' rounds.
        """
        rounds = len(work)
        if self._exchange is not None:
            rounds = max(self.all_gather(rounds))
        for x in work:
            body(x)
        for _ in range(len(work), rounds):
            self._fetch({})

    def pieces_of(self, table: str, part: str) -> list[int]:
        """Indices of the directories that together hold a part of a table.

        These are all of the table's, but only the first for a state with one number per row, since
        every column piece has a copy of it.
        """
        return self.pieces[table][:1 if self._is_per_row(part, table) else None]

    def gather(self, table: str, ids: np.ndarray, part: str, columns: slice, out: torch.Tensor
               ) -> None:
        """Copy some columns of rows in any order.

        Args:
            table: its name.
            ids: int64 [n], valid.
            part: as for `read`.
            columns: columns of the table; ``slice(0, 1)`` of a state with one number per row.
            out: [n, columns], written to.

        Between memory domains collective: all ranks gather from this table at once.
        """
        for piece in self.pieces_of(table, part):
            self.gather_piece(piece, ids, part, columns, out)

    def gather_piece(self, piece: int, ids: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
        """As `gather`, for columns that a single directory holds.

        Between memory domains collective if domains overlap; ranks may gather from different
        tables.
        """
        mine = self.columns(part, piece)
        first, last = max(mine.start, columns.start), min(mine.stop, columns.stop)
        if first >= last:
            return
        to = out[:, first - columns.start:last - columns.start]
        inside = slice(first - mine.start, last - mine.start)
        d = self.directories[piece]
        positions = d.position_of(ids)
        if part != "rows" or d.table.dtype not in CODE_BITS:
            self._copy_stored(piece, positions, part, inside, to)
            return
        # The columns of quantised rows share a scale, and come together.
        codes = torch.empty(ids.size, d.row_bytes, dtype=torch.uint8)
        self._copy_stored(piece, positions, part, slice(0, d.row_bytes), codes)
        to.copy_(dequantise(codes, d.table.dtype, d.dim)[:, inside])

    def _copy_stored(self, piece: int, positions: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
        """Copy rows in stored form from their owners: `columns` of the shards (bytes, if rows are
        quantised), to `out` [n, columns]. Collective between memory domains."""
        far: dict[int, Wanted] = {}
        places = {}
        for rank, index, slot in self._parts(piece, positions):
            if self._addresses[rank]:
                out[index] = self.view(part, piece, rank)[slot][:, columns].to(out.device)
            else:
                far[rank], places[rank] = (part, piece, slot, columns), index
        for rank, rows in self._fetch(far).items():
            out[places[rank]] = rows.to(out.device)

    def copy_near_replicas(self, piece: int, ids: np.ndarray, columns: slice, out: torch.Tensor
                           ) -> np.ndarray:
        """Copy rows whose owner is in another memory domain from replicas in this one.

        Args:
            piece: index of a directory.
            ids: int64 [n], valid.
            columns: columns of the table, all of them in this piece.
            out: [n, columns], written to.

        Returns:
            bool [n], whether each row was copied. Replicas equal their masters between two steps.
        """
        d, found = self.directories[piece], np.zeros(ids.size, bool)
        if self._exchange is None:
            return found
        position = d.position_of(ids)
        is_far = (np.array(self._addresses) == 0)[d.locate(position)[0]]
        inside = slice(columns.start - d.column, columns.stop - d.column)
        for x in d.tiers:
            holder = next((r for r in self.members if x.replica_base[r] >= 0), None)
            at = np.flatnonzero(is_far & (x.tier.start <= position) & (position < x.tier.stop))
            if holder is None or not at.size:
                continue
            slot = position[at] - x.tier.start + int(x.replica_base[holder])
            rows = self.replica_view(piece, holder)[torch.from_numpy(slot)]
            out[torch.from_numpy(at)] = rows[:, inside].to(out.device)
            found[at] = True
        return found

    def _fetch(self, wanted: dict[int, Wanted]) -> dict[int, torch.Tensor]:
        """Rows of ranks in other memory domains, by rank; collective if there are several
        domains."""
        if self._exchange is None:
            return {}
        if self.turns.parts is not None:
            self.turns.parts.settle()
        rank = self.group.rank
        return self._exchange.fetch(wanted, lambda part, piece: self.view(part, piece, rank),
                                    self.phase)

    def write(self, table: str, values: torch.Tensor, begin: int = 0, part: str = "rows",
              column: int = 0) -> None:
        """Write rows `[begin, begin + n)`; every rank stores those that it owns.

        Args:
            table: its name.
            values: [n, columns], or [n] for a state with one number per row, of any float dtype
                (rounded to nearest if rows are narrower, quantised row by row if they are codes),
                or uint8 [n, bytes of a row] in the stored form of quantised rows; equal on all
                ranks.
            begin: first id.
            part: as for `read`.
            column: column of the table to which the first column of `values` belongs.

        Call `publish` afterwards.
        """
        values = values.detach().reshape(values.shape[0], -1)
        for at in range(0, values.shape[0], CHUNK_ROWS):
            chunk = values[at:at + CHUNK_ROWS]
            ids = np.arange(begin + at, begin + at + chunk.shape[0])
            self.scatter(table, ids, chunk, part, column)

    def scatter(self, table: str, ids: np.ndarray, values: torch.Tensor, part: str = "rows",
                column: int = 0) -> None:
        """As `write`, for rows in any order.

        Args:
            table: its name.
            ids: int64 [n], valid, each once.
            values, part, column: as for `write`.
        """
        spec, rank = self.specs[table], self.group.rank
        values = values.detach().reshape(ids.size, -1)
        for piece in self.pieces[table]:
            columns = self.columns(part, piece)
            first = max(columns.start, column)
            last = min(columns.stop, column + values.shape[1])
            if first >= last:
                continue
            mine, positions = self.view(part, piece, rank), self.directories[piece].position_of(ids)
            for owner, index, slot in self._parts(piece, positions):
                if owner != rank:
                    continue
                if part == "rows" and spec.dtype in CODE_BITS:
                    put_rows(mine, slot, as_rows(values[index], spec), torch.arange(slot.numel()))
                else:
                    put_rows(mine[:, first - columns.start:last - columns.start], slot,
                             values[:, first - column:last - column], index)

    def publish(self) -> None:
        """Make written rows visible to all: wait for all ranks, refresh replicas. Collective."""
        self.num_published += 1
        self.barrier()
        for k, d in enumerate(self.directories):
            for x in d.tiers:
                if (x.replica_base >= 0).any():
                    self._copy_replicas(k, x)
        self.barrier()

    def _copy_replicas(self, piece: int, x: TierLayout) -> None:
        """Copy a replicated tier's master rows into this rank's replica, if it has one."""
        first = int(x.replica_base[self.group.rank])
        copies = self.replica_view(piece, self.group.rank)
        for start in range(x.tier.start, x.tier.stop, CHUNK_ROWS):
            stop = min(x.tier.stop, start + CHUNK_ROWS) if first >= 0 else start
            begin = first + start - x.tier.start
            self._copy_stored(piece, np.arange(start, stop), "rows", slice(0, copies.shape[1]),
                              copies[begin:begin + stop - start])

    def replica(self, table: str, rank: int, piece: int = 0) -> torch.Tensor:
        """A rank's copy of the replicated rows of one column piece of a table.

        Returns:
            The rows' dtype [rows, columns of the piece], a mapped view.

        Raises:
            OperError: the rank is in another memory domain.
        """
        if not self._addresses[rank]:
            raise OperError("cannot see a rank's replicas", "rank", rank,
                            "a rank of this memory domain", "read them there")
        return self.replica_view(self.pieces[table][piece], rank)

    def replica_view(self, piece: int, rank: int) -> torch.Tensor:
        """As `replica`, given the index of a directory."""
        d = self.directories[piece]
        return self._segment(self._addresses[rank] + int(self._layout.replicas[piece, rank]),
                             int(d.num_replica_rows[rank]), d.dim, d.table.dtype)


def put_rows(to: torch.Tensor, slot: torch.Tensor, values: torch.Tensor, index: torch.Tensor
             ) -> None:
    """``to[slot] = values[index]``; both int64 [n], n > 0. Consecutive rows are copied as blocks.
    """
    n = slot.numel()
    if bool((slot.diff() == 1).all()) and bool((index.diff() == 1).all()):
        to[int(slot[0]):int(slot[0]) + n].copy_(values[int(index[0]):int(index[0]) + n])
    else:
        to[slot] = values[index].to(to)
