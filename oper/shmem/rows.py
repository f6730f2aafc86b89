"""Reading and writing rows of sharded tables by id, regardless of the ranks that own them."""

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
from oper.shmem.group.turns import Turns, in_turn
from oper.shmem.keys.directories import Keys
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.memory.quantise import as_rows, dequantise
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer, initial_state
from oper.shmem.placement.layout import ArenaLayout
from oper.tables import CODE_BITS, DTYPE_BYTES, TableSpec, bytes_of_row

# Dtypes in which rows are returned; quantised rows are returned as float32.
TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES} | dict.fromkeys(
    CODE_BITS, torch.float32)
CHUNK_ROWS = 1 << 17  # rows per operation when entire tables are read or written

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
    name = ""  # the collection's name in its model, e.g. a module's path; for errors
    phase = STATE_ACCESS  # phase in which `barrier` is called, for errors; see `phase_of`
    num_flushes = 0  # number of calls of `flush_replicas` and `flush_some_replicas`
    specs: dict[str, TableSpec]
    directories: list[TableDirectory]
    pieces: dict[str, list[int]]
    group: Group
    turns: Turns
    keys: Keys | None = None  # directories of dynamic tables; None without any
    replicas: Any = None  # `Synchronizer` with other replica groups; None without any
    _layout: ArenaLayout
    _heap: HostHeap | None
    _addresses: list[int]  # [W], addresses of the arenas, 0 = in another memory domain
    _exchange: Exchange | None

    @property
    def is_one_domain(self) -> bool:
        """Whether all ranks can address each other's memory."""
        return self._exchange is None

    @property
    def members(self) -> Sequence[int]:
        """Ranks of this memory domain, ascending."""
        return range(self.group.world_size) if self._exchange is None else self._exchange.members

    def barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Collective; call it between batches.

        Raises:
            PeerLostError: a peer has ended; the message names it.
            DeadlineError: a peer did not arrive in time; the message names it.
        """
        self.barrier()  # unlike the group's collective, it identifies the missing rank
        try:
            return self.group.all_gather(value)
        except (PeerLostError, DeadlineError):
            self.barrier()
            raise

    def _parts(self, piece: int, positions: np.ndarray
               ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Group positions (int64 [n]) by owner: yields owner, indices into `positions`, slots."""
        owner, slot = self.directories[piece].locate(positions)
        for rank in range(self.group.world_size):
            at = np.flatnonzero(owner == rank)
            if at.size:
                yield rank, torch.from_numpy(at), torch.from_numpy(slot[at])

    def view(self, part: str, piece: int, rank: int) -> torch.Tensor:
        """Return a view of a rank's shard of a piece or of its optimizer state.

        Args:
            part: ``"rows"`` or a part of the optimizer state (`STATE_PARTS`).
            piece: index of a directory.
            rank: a rank of this memory domain.

        Returns:
            [slots, columns] in the stored dtype; quantised rows are uint8 [slots, bytes of a row].
        """
        d = self.directories[piece]
        if self._heap is None:
            raise OperError("sharded tables were closed", "table", d.table.name, "open tables",
                            "read them before close()")
        columns = 1 if self._is_per_row(part, d.table.name) else d.dim
        return self._segment(
            self._addresses[rank] + int(getattr(self._layout, part)[piece, rank]),
            int(d.num_slots[rank]), columns, d.table.dtype if part == "rows" else "float32")

    def views(self, piece: int) -> dict[str, torch.Tensor]:
        """Return a `view` of this rank's rows of a piece and one of each part of their optimizer
        state, by the `part` of `view`."""
        parts = ("rows", *dict(STATE_PARTS[self.directories[piece].table.optimizer]))
        return {part: self.view(part, piece, self.group.rank) for part in parts}

    def _begin_states(self, optimizers: Mapping[str, Optimizer]) -> bool:
        """Initialise this rank's optimizer states whose initial value is not 0; returns whether any
        optimizer has such a state."""
        first = {table: x for table, o in optimizers.items() if (x := initial_state(o))}
        for k, d in enumerate(self.directories):
            if d.table.name in first:
                self.view("momentum1", k, self.group.rank).fill_(first[d.table.name])
        return bool(first)

    def _segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        """Return mapped memory as a tensor [rows, columns] of `dtype`; quantised rows as bytes."""
        width = bytes_of_row(dtype, columns)
        stored: torch.Tensor = torch.ops.oper.segment_bytes(address, rows * width)
        if dtype not in CODE_BITS:
            stored, width = stored.view(TORCH_DTYPES[dtype]), columns
        return stored.view(rows, width)

    def columns(self, part: str, piece: int) -> slice:
        """Return the columns of the table that a piece covers; ``slice(0, 1)`` for a state with one
        number per row."""
        d = self.directories[piece]
        per_row = self._is_per_row(part, d.table.name)
        return slice(0, 1) if per_row else slice(d.column, d.column + d.dim)

    def _is_per_row(self, part: str, table: str) -> bool:
        spec = self.specs[table]
        parts = {"rows": False, **dict(STATE_PARTS[spec.optimizer])}
        if part not in parts:
            raise InvalidInputError(f"table {table!r} has no such part", "part", part,
                                    f"one of {list(parts)}, as {spec.optimizer} has them",
                                    "correct the name, or shard with another optimizer")
        return parts[part]

    def shape(self, table: str, part: str = "rows") -> tuple[int, ...]:
        """Return the global shape of a table or of a part of its optimizer state."""
        spec = self.specs[table]
        return (spec.num_rows,) if self._is_per_row(part, table) else (spec.num_rows, spec.dim)

    def dtype(self, table: str, part: str = "rows") -> torch.dtype:
        """Return the dtype of `read`: the table's dtype, or float32 for quantised rows and states.
        """
        return TORCH_DTYPES[self.specs[table].dtype] if part == "rows" else torch.float32

    @in_turn
    def read(self, table: str, begin: int = 0, end: int | None = None, part: str = "rows"
             ) -> torch.Tensor:
        """Return a copy of the rows with ids `[begin, end)`.

        One-sided within a memory domain: reads the owners' memory, so no rank may be in an update.
        Collective with several domains, where each rank may read other rows, or none.

        Args:
            table: name of the table.
            begin, end: first id, and last id + 1; by default the entire table.
            part: ``"rows"``, or a part of the optimizer state (`STATE_PARTS`).

        Returns:
            [n, dim] of `dtype`, in host memory; [n] for states with one number per row.
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
        """Call ``body(x)``, which must call `gather_piece` once, for each x in `work`.

        Collective with several memory domains: ranks with shorter `work` join the remaining rounds.
        """
        rounds = len(work)
        if self._exchange is not None:
            rounds = max(self.all_gather(rounds))
        for x in work:
            body(x)
        for _ in range(len(work), rounds):
            self._fetch({})

    def pieces_of(self, table: str, part: str) -> list[int]:
        """Return indices of the directories that together hold a part of a table.

        For a state with one number per row, which every column piece copies, this is only the first
        directory of the table; otherwise all of them.
        """
        return self.pieces[table][:1 if self._is_per_row(part, table) else None]

    @in_turn
    def gather(self, table: str, ids: np.ndarray, part: str, columns: slice, out: torch.Tensor
               ) -> None:
        """Copy columns of rows, given by ids in any order, to `out`.

        Collective with several memory domains: all ranks must gather from this table.

        Args:
            table: name of the table.
            ids: int64 [n], valid.
            part: see `read`.
            columns: columns of the table; ``slice(0, 1)`` for a state with one number per row.
            out: [n, columns], written to.
        """
        for piece in self.pieces_of(table, part):
            self.gather_piece(piece, ids, part, columns, out)

    @in_turn
    def gather_piece(self, piece: int, ids: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
        """Copy those of the `columns` that one piece (index of a directory) holds; see `gather`.

        Collective with several memory domains; ranks may gather from different pieces.
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
        # All columns of a quantised row are needed, since its scale and bias precede the codes.
        codes = torch.empty(ids.size, d.row_bytes, dtype=torch.uint8)
        self._copy_stored(piece, positions, part, slice(0, d.row_bytes), codes)
        to.copy_(dequantise(codes, d.table.dtype, d.dim)[:, inside])

    def _copy_stored(self, piece: int, positions: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
        """Copy rows in stored form from their owners to `out`, [n, columns]. `columns` are columns
        of the shards, or bytes of quantised rows. Collective with several memory domains."""
        remote: dict[int, Wanted] = {}
        places = {}
        for rank, index, slot in self._parts(piece, positions):
            if self._addresses[rank]:
                out[index] = self.view(part, piece, rank)[slot][:, columns].to(out.device)
            else:
                remote[rank], places[rank] = (part, piece, slot, columns), index
        for rank, rows in self._fetch(remote).items():
            out[places[rank]] = rows.to(out.device)

    def copy_local_replicas(self, piece: int, ids: np.ndarray, columns: slice, out: torch.Tensor
                           ) -> np.ndarray:
        """Copy rows whose owner is in another memory domain from replicas in this one.

        Call it only between two steps, when replicas equal their master copies.

        Args:
            piece: index of a directory.
            ids: int64 [n], valid.
            columns: columns of the table, all of them in this piece.
            out: [n, columns], written to.

        Returns:
            bool [n], whether each row was copied.
        """
        d, found = self.directories[piece], np.zeros(ids.size, bool)
        if self._exchange is None:
            return found
        position = d.position_of(ids)
        is_remote = (np.array(self._addresses) == 0)[d.locate(position)[0]]
        inside = slice(columns.start - d.column, columns.stop - d.column)
        for x in d.tiers:
            holder = next((r for r in self.members if x.replica_base[r] >= 0), None)
            at = np.flatnonzero(is_remote & (x.tier.start <= position) & (position < x.tier.stop))
            if holder is None or not at.size:
                continue
            slot = position[at] - x.tier.start + int(x.replica_base[holder])
            rows = self.replica_view(piece, holder)[torch.from_numpy(slot)]
            out[torch.from_numpy(at)] = rows[:, inside].to(out.device)
            found[at] = True
        return found

    @property
    def domains(self) -> list[list[int]]:
        """Ranks of each memory domain, ascending; domains in the order of their first ranks."""
        return ([list(range(self.group.world_size))] if self._exchange is None
                else self._exchange.domains)

    def send(self, messages: Mapping[int, torch.Tensor],
             read: Callable[[torch.Tensor], Any], phase: int) -> list[Any]:
        """Send messages to ranks of other memory domains, see `Exchange.send`."""
        assert self._exchange is not None
        return self._exchange.send(messages, read, phase)

    def _fetch(self, wanted: dict[int, Wanted]) -> dict[int, torch.Tensor]:
        """Fetch rows from ranks of other memory domains, by rank; collective with several domains.
        """
        if self._exchange is None:
            return {}
        if self.turns.parts is not None:
            self.turns.parts.settle()
        rank = self.group.rank
        return self._exchange.fetch(wanted, lambda part, piece: self.view(part, piece, rank),
                                    self.phase)

    @in_turn
    def write(self, table: str, values: torch.Tensor, begin: int = 0, part: str = "rows",
              column: int = 0) -> None:
        """Write rows `[begin, begin + n)`; every rank stores the rows that it owns.

        Not collective, but all ranks must make the call, and then call `flush_replicas`.

        Args:
            table: name of the table.
            values: equal on all ranks; floats [n, columns], or [n] for a state with one number per
                row, converted to the stored dtype (rounded to nearest, or quantised row by row); or
                uint8 [n, bytes of a row], the stored form of quantised rows.
            begin: first id.
            part: see `read`.
            column: column of the table to which the first column of `values` belongs.
        """
        values = values.detach().reshape(values.shape[0], -1)
        for at in range(0, values.shape[0], CHUNK_ROWS):
            chunk = values[at:at + CHUNK_ROWS]
            ids = np.arange(begin + at, begin + at + chunk.shape[0])
            self.scatter(table, ids, chunk, part, column)

    @in_turn
    def scatter(self, table: str, ids: np.ndarray, values: torch.Tensor, part: str = "rows",
                column: int = 0) -> None:
        """Write rows given by ids in any order; otherwise like `write`.

        Args:
            table: name of the table.
            ids: int64 [n], valid and distinct.
            values, part, column: see `write`.
        """
        if self.replicas is not None:
            self.replicas.check_synchronized(f"cannot write rows of table {table!r}")
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

    def flush_replicas(self) -> None:
        """Make rows that any rank has written visible to all: copy them to replicas. Collective."""
        self.num_flushes += 1
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

    def flush_some_replicas(self, written: Sequence[np.ndarray]) -> None:
        """Make written rows visible to all ranks, as `flush_replicas` does, but copy only the
        rows named here. Collective.

        Args:
            written: by directory, the slots of this rank's rows that were written, uint32 [n].
        """
        self.num_flushes += 1
        tiers = [(k, x) for k, d in enumerate(self.directories) for x in d.tiers
                 if (x.replica_base >= 0).any()]
        everyones = self.all_gather({k: written[k] for k, _ in tiers})
        for k, x in tiers:
            positions = np.concatenate([
                self.directories[k].positions_at(rank, theirs[k].astype(np.int64))
                for rank, theirs in enumerate(everyones)])
            positions = positions[(x.tier.start <= positions) & (positions < x.tier.stop)]
            first = int(x.replica_base[self.group.rank])
            copies = self.replica_view(k, self.group.rank)
            for at in range(0, positions.size, CHUNK_ROWS):
                some = positions[at:at + CHUNK_ROWS if first >= 0 else at]
                rows = copies.new_empty(some.size, copies.shape[1])
                self._copy_stored(k, some, "rows", slice(0, copies.shape[1]), rows)
                copies.index_copy_(0, torch.from_numpy(first + some - x.tier.start), rows)
        self.barrier()

    def replica_view(self, piece: int, rank: int) -> torch.Tensor:
        """Return a mapped view of the replica rows of a rank of this memory domain, [rows, columns]
        of the table's dtype; `piece` is the index of a directory."""
        d = self.directories[piece]
        return self._segment(self._addresses[rank] + int(self._layout.replicas[piece, rank]),
                             int(d.num_replica_rows[rank]), d.dim, d.table.dtype)


def put_rows(to: torch.Tensor, slot: torch.Tensor, values: torch.Tensor, index: torch.Tensor
             ) -> None:
    """Perform ``to[slot] = values[index]``, as one block copy if both (int64 [n], n > 0) ascend by
    1."""
    n = slot.numel()
    if bool((slot.diff() == 1).all()) and bool((index.diff() == 1).all()):
        to[int(slot[0]):int(slot[0]) + n].copy_(values[int(index[0]):int(index[0]) + n])
    else:
        to[slot] = values[index].to(to)
