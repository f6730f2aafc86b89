"""Sharded tables of one collection: lookups, updates and access to rows in logical order."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError, PlanError, fail
from oper.plan import Plan
from oper.shmem.arena import OUTBOX_ENV, ArenaLayout, KernelMaps, outbox_bytes
from oper.shmem.directory import TableDirectory, TierLayout
from oper.shmem.group import Group
from oper.shmem.heap import HostHeap
from oper.shmem.library import load
from oper.shmem.optimizers import STATE_PARTS, Optimizer
from oper.tables import TableSpec

DEADLINE_ENV = "OPER_DEADLINE_S"
MAX_DIM = 1024
_INTEGERS = (torch.int64, torch.int32)
CHUNK_ROWS = 1 << 17  # rows that are handled at a time when whole tables are read or written


@dataclass(frozen=True, slots=True)
class Lookup:
    """One batch of lookups.

    Attributes:
        ids: int64 or int32 [N], key-major.
        lengths: int64 or int32 [num_keys * B], bag lengths, key-major.
        key_of: int64 [F], which key carries each feature of the collection.
        batch_size: samples B.
        weights: float32 [N], per-sample weights, or None (pooled only).
        pooled: one row per sample with the features side by side, or one row per id, feature after
            feature.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    key_of: torch.Tensor
    batch_size: int
    weights: torch.Tensor | None = None
    pooled: bool = True


class ShardedTables:
    """The tables of one collection, placed by a plan and shared by a group of ranks.

    Args:
        plan: placement of all tables.
        features: (feature name, table name) in output order; the output of `lookup` has one block
            of the table's dim per feature.
        group: the ranks; construction is collective.
        optimizers: applied in the backward pass, one for all tables or by table name; None =
            read-only tables.
        gradient_scale: factor on table gradients (1 / W averages the ranks' losses).

    Raises:
        PlanError: the plan does not fit this world or cannot be executed here.
    """

    def __init__(self, plan: Plan, features: Sequence[tuple[str, str]], group: Group,
                 optimizers: Optimizer | Mapping[str, Optimizer] | None, gradient_scale: float = 1.0
                 ) -> None:
        load()
        self.plan = plan
        self.group = group
        self.features = list(features)
        tables = [t.table for t in plan.tables]
        if optimizers is not None and not isinstance(optimizers, Mapping):
            optimizers = {t.name: optimizers for t in tables}
        self.optimizers = dict(optimizers) if optimizers is not None else None
        self.num_steps = 0
        # One group per distinct optimizer; shared with whoever schedules learning rates.
        self.param_groups: list[dict[str, Any]] = [
            {"lr": o.lr, "tables": [n for n, x in (optimizers or {}).items() if x == o]}
            for o in dict.fromkeys((optimizers or {}).values())]
        self.gradient_scale = gradient_scale
        plan.check_for(tables, group.world_size)
        _check_supported(tables, self.optimizers)
        self.specs = {t.name: t for t in tables}
        self.directories = [TableDirectory(t, group.world_size, piece)
                            for t in plan.tables for piece in range(len(t.pieces))]
        self.has_push = any(x.tier.mode == "push" for d in self.directories for x in d.tiers)
        # The directories of each table, in column order.
        self.pieces: dict[str, list[int]] = {name: [] for name in self.specs}
        for k, d in enumerate(self.directories):
            self.pieces[d.table.name].append(k)
        # A single rank updates without an exchange but through the same outbox.
        self._layout = ArenaLayout.build(
            self.directories, group.world_size, outbox_bytes() if optimizers is not None else 4096)
        self._heap: HostHeap | None = HostHeap(group, self._layout.num_bytes)
        self._handle = self._create_context()
        # Tables that nobody refers to any more are released without close() as well.
        self._release = weakref.finalize(self, _release, self._handle, self._heap)
        self._release.atexit = False
        # Makes autograd call our backward although the tables are no parameters.
        self._anchor = torch.zeros(0, requires_grad=True)

    def _create_context(self) -> int:
        heap, group = self._heap, self.group
        assert heap is not None
        maps = KernelMaps.build(self.directories, self._layout, heap.addresses, group.rank)
        column = 0
        features = []
        for logical, (name, table) in enumerate(self.features):
            if table not in self.specs:
                raise PlanError(
                    fail("a feature names a table that the plan lacks", "feature, table",
                         (name, table), f"one of {list(self.specs)[:8]}", "plan for this model"))
            for k in self.pieces[table]:
                start = self.directories[k].column
                features.append([k, column + start, logical, start])
            column += self.specs[table].dim
        self.output_columns = column
        outboxes = [a + o for a, o in zip(heap.addresses, self._layout.outbox, strict=True)]
        as_tensor = torch.from_numpy
        handle = int(torch.ops.oper.context_create(
            group.rank, group.world_size, as_tensor(maps.tables), as_tensor(maps.owner_begin),
            as_tensor(maps.tiers), as_tensor(maps.maps.reshape(-1)),
            torch.tensor(features, dtype=torch.int64), as_tensor(maps.refreshes),
            as_tensor(maps.touched), as_tensor(maps.squares),
            torch.tensor(outboxes, dtype=torch.int64), self._layout.outbox_bytes,
            [as_tensor(h) for h in maps.heads]))
        if group.world_size > 1:
            deadline_ms = int(float(os.environ.get(DEADLINE_ENV, "300")) * 1000)
            torch.ops.oper.context_set_barrier(handle, heap.control, heap.pidfds, deadline_ms)
        return handle

    # ---- lookups ---------------------------------------------------------------------------------

    def lookup(self, batch: Lookup) -> torch.Tensor:
        """Embeddings: pooled, float32 [B, sum of the features' dims], or unpooled, float32 [N, D].

        With gradients enabled and an optimizer, the backward pass of the result updates the
        tables; that part is collective over the group. Without gradients nothing is collective.

        Raises:
            InvalidInputError: an id out of range, or lengths that do not fit the ids.
        """
        if self.optimizers is not None and torch.is_grad_enabled():
            out: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
                self._anchor, batch.weights, self, batch)
            return out
        if batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled():
            raise InvalidInputError(
                fail("cannot look up in read-only tables", "per-sample weights",
                     "requires_grad=True", "weights that need no gradient",
                     "detach them; they would not be trained"))
        return self.forward(batch)[0]

    def forward(self, batch: Lookup, collective: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and the offsets (int64 [num_keys * B + 1]) of the input's bags.

        Args:
            batch: the batch.
            collective: all ranks take part, and tiers in push mode are pooled by their owners;
                otherwise every row is read directly.
        """
        _check_batch(batch)
        empty = batch.ids.numel() == 0 and not (batch.pooled and batch.batch_size)
        if empty and not batch.lengths.any() and not (collective and self.has_push):
            dim = self.output_columns if batch.pooled else self.directories[0].table.dim
            return torch.empty(0, dim), torch.zeros(batch.lengths.numel() + 1, dtype=torch.int64)
        out, offsets, code, detail = torch.ops.oper.lookup_forward(
            self._handle, batch.ids, batch.lengths, batch.weights, batch.key_of, batch.batch_size,
            batch.pooled, collective)
        if code:
            self._raise(code, detail, batch, offsets)
        return out, offsets

    def apply_gradients(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor) -> None:
        """Reduce the gradients of `forward`'s output, exchange them and update. Collective.

        Args:
            grad: float32, shape of that output.
            batch: the batch of the forward pass.
            offsets: what `forward` returned.

        Raises:
            PeerLostError: a peer has ended.
            DeadlineError: a peer did not arrive in time.
        """
        grad = _rows_in_order(grad, batch.pooled)
        code, detail = torch.ops.oper.lookup_backward(
            self._handle, grad, batch.ids, offsets, batch.weights, batch.key_of, batch.batch_size,
            batch.pooled, self._optimizer_arguments(self.num_steps + 1), self.gradient_scale)
        if code:
            self._raise(code, detail, batch, offsets)
        self.num_steps += 1

    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor
                        ) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 [N]; before `apply_gradients`."""
        assert batch.weights is not None
        gradient: torch.Tensor = torch.ops.oper.lookup_weight_gradient(
            self._handle, grad.contiguous(), batch.ids, offsets, batch.weights, batch.key_of,
            batch.batch_size)
        return gradient

    def _optimizer_arguments(self, step: int) -> torch.Tensor:
        """float64 [T, 9], what every table's optimizer needs at this step."""
        assert self.optimizers is not None
        rates = {name: float(g["lr"]) for g in self.param_groups for name in g["tables"]}
        return torch.tensor(
            [self.optimizers[d.table.name].arguments(rates[d.table.name], step)
             for d in self.directories],
            dtype=torch.float64)

    def barrier(self) -> None:
        """Wait for all ranks; raises PeerLostError or DeadlineError."""
        code, detail = torch.ops.oper.context_barrier(self._handle)
        if code:
            self._raise(code, detail, None, None)

    def _raise(self, code: int, detail: int, batch: Lookup | None,
               offsets: torch.Tensor | None) -> None:
        if code == 1:
            raise PeerLostError(
                fail("a peer process has ended", "rank", detail, "all ranks alive",
                     "look at that rank's log and start all ranks again"))
        if code == 6:
            raise PeerLostError(
                fail("a peer has given up this exchange", "rank", detail, "no error on any rank",
                     "look at that rank's error and start all ranks again"))
        if code == 2:
            raise DeadlineError(
                fail("a peer did not arrive at the gradient exchange", "rank", detail,
                     f"arrival within {DEADLINE_ENV}={os.environ.get(DEADLINE_ENV, '300')} s",
                     "every rank must run the same number of training steps; look at that rank"))
        if code == 3:
            raise OperError(
                fail("the gradients of a batch do not fit the outbox", OUTBOX_ENV,
                     self._layout.outbox_bytes, "room for the batch's distinct rows",
                     f"raise {OUTBOX_ENV} or use a smaller batch"))
        assert batch is not None and offsets is not None
        if code == 5:
            raise InvalidInputError(
                fail("bag lengths do not fit the ids", "sum(lengths)", int(offsets[-1]),
                     f"{batch.ids.numel()} with no negative length", "correct the batch"))
        key = int(torch.searchsorted(offsets, detail, right=True)) - 1
        key //= max(1, batch.batch_size)
        bad = int(batch.ids[detail])
        for feature, carrier in zip(self.features, batch.key_of.tolist(), strict=True):
            num_rows = self.specs[feature[1]].num_rows
            if carrier == key and not 0 <= bad < num_rows:
                break  # of a feature's tables the one that lacks the row
        raise InvalidInputError(
            fail(f"lookup of feature {feature[0]!r} in table {feature[1]!r}", "id", bad,
                 f"0 <= id < {num_rows}", "correct the input or enlarge the table"))

    # ---- rows in logical order -------------------------------------------------------------------

    def _parts(self, piece: int, begin: int, end: int
               ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Rank, index into [begin, end) and slot of the rows `begin..end` of a piece."""
        d = self.directories[piece]
        owner, slot = d.locate(d.position_of(np.arange(begin, end, dtype=np.int64)))
        for rank in range(self.group.world_size):
            at = np.flatnonzero(owner == rank)
            if at.size:
                yield rank, torch.from_numpy(at), torch.from_numpy(slot[at])

    def _view(self, part: str, piece: int, rank: int) -> torch.Tensor:
        """A rank's shard of a piece or of its optimizer state, [slots, columns], mapped."""
        heap, d = self._heap, self.directories[piece]
        if heap is None:
            raise OperError(fail("sharded tables were closed", "table", d.table.name, "open tables",
                                 "read them before close()"))
        columns = 1 if self._is_per_row(part, d.table.name) else d.dim
        view: torch.Tensor = torch.ops.oper.segment_view(
            heap.addresses[rank] + int(getattr(self._layout, part)[piece, rank]),
            int(d.num_slots[rank]), columns)
        return view

    def _columns(self, part: str, piece: int) -> slice:
        """Where a piece stands in a row of the table; one column for a state per row."""
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

    def read(self, table: str, begin: int = 0, end: int | None = None, part: str = "rows"
             ) -> torch.Tensor:
        """Rows `[begin, end)` of a table in logical order, as a copy.

        Args:
            table: its name.
            begin, end: ids; the whole table by default.
            part: ``"rows"``, or a part of the optimizer's state (`STATE_PARTS`).

        Returns:
            float32 [n, dim], or [n] for a state with one number per row.

        One-sided: reads the owners' memory; no rank may be in an update meanwhile.
        """
        end = self.specs[table].num_rows if end is None else end
        per_row = self._is_per_row(part, table)
        out = torch.empty(end - begin, 1 if per_row else self.specs[table].dim)
        # All pieces of a row carry the same state per row.
        for piece in self.pieces[table][:1] if per_row else self.pieces[table]:
            columns = self._columns(part, piece)
            for at in range(begin, end, CHUNK_ROWS):
                for rank, index, slot in self._parts(piece, at, min(end, at + CHUNK_ROWS)):
                    out[index + (at - begin), columns] = self._view(part, piece, rank)[slot]
        return out[:, 0] if per_row else out

    def write(self, table: str, values: torch.Tensor, begin: int = 0, part: str = "rows") -> None:
        """Write rows `[begin, begin + n)`; every rank stores those that it owns.

        Args:
            table: its name.
            values: float32, the shape that `read` returns; equal on all ranks.
            begin: first id.
            part: as for `read`.

        Call `publish` afterwards.
        """
        values = values.detach().reshape(values.shape[0], -1)
        for piece in self.pieces[table]:
            columns = self._columns(part, piece)
            mine = self._view(part, piece, self.group.rank)
            for at in range(0, values.shape[0], CHUNK_ROWS):
                stop = min(values.shape[0], at + CHUNK_ROWS)
                for rank, index, slot in self._parts(piece, begin + at, begin + stop):
                    if rank == self.group.rank:
                        mine[slot] = values[index + at, columns].to(mine.dtype)

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
        copy = self._replica(piece, self.group.rank)[first:first + x.tier.stop - x.tier.start]
        for at in range(0, copy.shape[0], CHUNK_ROWS):
            positions = np.arange(at, min(copy.shape[0], at + CHUNK_ROWS)) + x.tier.start
            owner, slot = d.locate(positions)
            for peer in np.unique(owner):
                here = np.flatnonzero(owner == peer)
                source = self._view("rows", piece, int(peer))
                copy[torch.from_numpy(here + at)] = source[torch.from_numpy(slot[here])]

    def replica(self, table: str, rank: int, piece: int = 0) -> torch.Tensor:
        """A rank's copy of the replicated rows of one column piece of a table.

        Returns:
            float32 [rows, columns of the piece], a mapped view.
        """
        return self._replica(self.pieces[table][piece], rank)

    def _replica(self, piece: int, rank: int) -> torch.Tensor:
        assert self._heap is not None
        d = self.directories[piece]
        copy: torch.Tensor = torch.ops.oper.segment_view(
            self._heap.addresses[rank] + int(self._layout.replicas[piece, rank]),
            int(d.num_replica_rows[rank]), d.dim)
        return copy

    def use_huge_pages(self) -> str:
        """Ask for huge pages behind the written rows; returns the page kind. Collective."""
        assert self._heap is not None
        self._heap.collapse(self._layout.used_bytes, self.barrier)
        return self._heap.page_kind

    @property
    def page_kind(self) -> str:
        """Kind of the pages behind the rows."""
        return self._heap.page_kind if self._heap else "closed"

    def close(self) -> None:
        """Release the arenas of this rank. Peers that still read keep the memory alive."""
        self._release()
        self._heap = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OperError(
            fail("sharded tables cannot be copied or pickled", "tables", list(self.specs)[:8],
                 "one handle on the shared rows", "save and load the model's state_dict instead"))


def _release(handle: int, heap: HostHeap) -> None:
    torch.ops.oper.context_close(handle)
    heap.close()


class _Lookup(torch.autograd.Function):
    """Forward: lookup. Backward: the fused, collective update of the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None,
                tables: ShardedTables, batch: Lookup) -> torch.Tensor:
        out, offsets = tables.forward(batch, collective=True)
        ctx.call = (tables, batch, offsets)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[None, torch.Tensor | None, None, None]:
        tables, batch, offsets = ctx.call
        weights = None
        if ctx.needs_input_grad[1]:  # before the rows change
            weights = tables.weight_gradient(grads[0], batch, offsets)
        tables.apply_gradients(grads[0], batch, offsets)
        return None, weights, None, None


def _rows_in_order(grad: torch.Tensor, pooled: bool) -> torch.Tensor:
    """`grad` with columns side by side and rows that do not overlap, as the kernels read it."""
    wide = pooled and grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1]
    return grad if wide else grad.contiguous()


def _check_batch(batch: Lookup) -> None:
    """What the kernels take for granted: dtypes, sizes, contiguous memory."""
    ids, lengths, weights = batch.ids, batch.lengths, batch.weights
    for name, value in (("ids", ids), ("lengths", lengths)):
        if value.dtype not in _INTEGERS or value.dim() != 1 or not value.is_contiguous():
            raise InvalidInputError(
                fail("cannot look up", name, (value.dtype, tuple(value.shape)),
                     "contiguous int64 or int32, one dimension", "convert the batch"))
    num_keys, rest = divmod(lengths.numel(), max(1, batch.batch_size))
    first, last = (int(k) for k in torch.aminmax(batch.key_of))
    if first < 0:
        raise InvalidInputError(
            fail("cannot look up", "key_of", batch.key_of.tolist()[:8], "a key for every feature",
                 "add the missing features to the batch"))
    if rest or (num_keys <= last if batch.batch_size else num_keys):
        raise InvalidInputError(
            fail("cannot look up", "number of lengths", lengths.numel(),
                 f"one per key and sample of batch size {batch.batch_size}", "correct the batch"))
    if weights is None:
        return
    if (weights.dtype != torch.float32 or weights.shape != ids.shape
            or not weights.is_contiguous()):
        raise InvalidInputError(
            fail("cannot look up", "per-sample weights", (weights.dtype, tuple(weights.shape)),
                 f"contiguous float32 of shape {tuple(ids.shape)}", "convert the batch"))


def _check_supported(tables: Sequence[TableSpec], optimizers: Mapping[str, Optimizer] | None
                     ) -> None:
    for t in tables:
        what = f"cannot shard table {t.name!r}"
        if t.dtype != "float32":
            raise PlanError(fail(what, "dtype", t.dtype, "float32", "convert the table"))
        if t.dim > MAX_DIM:
            raise PlanError(fail(what, "dim", t.dim, f"<= {MAX_DIM}", "split the table by columns"))
        if optimizers is not None and t.optimizer != optimizers[t.name].name:
            raise PlanError(fail(what, "plan's optimizer", t.optimizer, optimizers[t.name].name,
                                 "plan again for this optimizer"))
