"""Moving tables from one plan to another between training steps.

The new plan's arenas are filled while lookups and updates still use the old ones. Each rank copies
the rows, replicas and optimizer states that the new plan assigns to it from the memory of their
current owners, a limited number of bytes per step. Rows that a step updates after they were copied
are copied again right after that step. When every rank has all its rows, all ranks switch to the
new plan together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError, PlanError
from oper.plan import Plan
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import key_bounds
from oper.shmem.group.desync import MIGRATION, phase_of
from oper.shmem.protocol import Tables
from oper.shmem.rows import put_rows
from oper.support import kernel
from oper.tables import CODE_BITS, DTYPE_BYTES, format_bytes

_CHUNK_BYTES = 16 << 20  # bytes per copy operation within a step's budget
_HUGE = 2 << 20  # size of a huge page


@dataclass(slots=True, eq=False)
class _Region:
    """Destination memory on this rank for rows, replicas or states of one column piece.

    Attributes:
        piece: index of the directory in the new plan.
        part: ``"rows"`` or a part of the optimizer state.
        replicas: whether the region holds this rank's replicas instead of rows that it owns.
        view: [rows, columns], the new memory.
        done: number of rows copied so far, from the first on.
    """

    piece: int
    part: str
    replicas: bool
    view: torch.Tensor
    done: int = 0

    @property
    def row_bytes(self) -> int:
        return self.view.shape[1] * self.view.element_size()


# A region, and the indices of its rows that are to be copied.
_Copy = tuple[_Region, np.ndarray | range]


class Migration:
    """A move of tables to another plan that is under way. Creation is collective.

    Args:
        tables: the tables.
        plan: their new plan, for the same number of ranks.
        bytes_per_step: maximum number of bytes that a rank copies per step, in addition to the rows
            that the step has just changed; None = no limit.

    Attributes:
        num_copied_bytes: bytes that this rank has copied so far.

    Raises:
        InvalidInputError: `bytes_per_step` is not an integer >= 1 or None.
        PlanError: the plan does not fit the tables, or cannot be executed here.
        OperError: the new arenas do not fit the free memory in addition to the old ones.
    """

    def __init__(self, tables: Tables, plan: Plan, bytes_per_step: int | None) -> None:
        if bytes_per_step is not None and (not isinstance(bytes_per_step, int)
                                           or bytes_per_step < 1):
            raise InvalidInputError("cannot move tables to another plan", "bytes_per_step",
                                    bytes_per_step, "an integer >= 1 or None",
                                    "pass for example 64 << 20")
        self._source = tables
        self._rank = tables.group.rank
        self._target = prepared(tables, self._own_part(plan))
        self._limit = bytes_per_step
        # Requesting huge pages is collective, so do it only if all hosts have obtained them.
        self._pages = all(tables.group.all_gather(tables.page_kind not in ("4KiB", "device")))
        self._regions = self._list_regions()
        # Address up to which huge pages have been requested.
        self._frontier = self._regions[0].view.data_ptr() if self._regions else 0
        self._touched: dict[str, list[np.ndarray]] = {}  # by table, ids changed by the last step
        self.num_copied_bytes = 0

    def _own_part(self, plan: Plan) -> Plan:
        """Return the part of the plan for this collection, with the model's own table specs."""
        source = self._source
        if plan.world_size != source.group.world_size:
            raise PlanError("cannot move tables to another plan", "plan.world_size",
                            plan.world_size, f"{source.group.world_size}",
                            "save a checkpoint and load it on the other number of ranks")
        bits = plan.message_bits.only(source.specs)
        if any(bits.of(t) != source.plan.message_bits.of(t) for t in source.specs):
            raise PlanError("cannot move tables to another plan", "plan.message_bits",
                            bits.to_json(),
                            f"{source.plan.message_bits.to_json()}, those of the current plan",
                            "plan with the same message_bits, or shard the model again")
        entries = []
        for spec in source.specs.values():
            entry = plan.table(spec.name)
            entries.append(dataclasses.replace(entry, table=spec))
            if spec.dtype in CODE_BITS:
                raise PlanError("cannot move tables to another plan",
                                f"dtype of table {spec.name!r}", spec.dtype,
                                " or ".join(DTYPE_BYTES), "shard the model again with the new plan")
            for name in ("num_rows", "dim", "dtype"):
                if getattr(entry.table, name) != getattr(spec, name):
                    raise PlanError(f"the plan is for another table {spec.name!r}", name,
                                    getattr(entry.table, name), f"{getattr(spec, name)}",
                                    "make a plan for this model")
        return dataclasses.replace(plan, tables=tuple(entries))

    def _list_regions(self) -> list[_Region]:
        """Return the regions in arena order: rows, replicas, optimizer states."""
        target, pieces = self._target, range(len(self._target.directories))
        own = [_Region(k, part, False, view) for k in pieces
               for part, view in target.views(k).items()]
        replicas = [_Region(k, "rows", True, target.replica_view(k, self._rank)) for k in pieces]
        rows, states = ([r for r in own if (r.part == "rows") == are_rows]
                        for are_rows in (True, False))
        return [r for r in (*rows, *replicas, *states) if r.view.shape[0]]

    # ---- between steps ---------------------------------------------------------------------------

    def note(self, batch: Lookup, offsets: torch.Tensor) -> None:
        """Record the rows that a step has changed: all rows of its batch and of new keys."""
        source = self._source
        new: Mapping[str, np.ndarray] = {} if source.keys is None else source.keys.new_rows()
        for table, rows in new.items():
            self._touched.setdefault(table, []).append(rows)
        bounds, all_ids = key_bounds(batch, offsets), batch.ids.cpu().numpy()
        for (_, table), key in zip(source.features, batch.key_of.tolist(), strict=True):
            if bounds[key + 1] > bounds[key]:
                ids = np.unique(all_ids[bounds[key]:bounds[key + 1]]).astype(np.int64)
                self._touched.setdefault(table, []).append(ids)

    def restart(self) -> None:
        """Copy everything again, because all rows may have changed."""
        for region in self._regions:
            region.done = 0
        self._touched = {}

    def advance(self) -> bool:
        """Copy changed rows again, copy more rows, and switch plans if all are copied. Collective.

        Returns:
            Whether the tables now follow the new plan.
        """
        try:
            with phase_of(self._source, MIGRATION):
                return self._advance()
        except BaseException:  # rows that were not copied yet may be marked as copied
            self.restart()
            raise

    def _advance(self) -> bool:
        touched = {name: np.unique(np.concatenate(ids)) for name, ids in self._touched.items()}
        self._touched = {}
        ready = all(r.done == r.view.shape[0] for r in self._regions)
        everyone = self._source.all_gather((ready, touched))
        again = list(self._changed_rows([ids for _, ids in everyone]))
        if all(done for done, _ in everyone):
            self._copy_all(again)
            self._source.all_gather(None)  # no rank switches before all have finished
            if self._pages:
                # This rank's own arena has huge pages; its mappings of peers' arenas do not yet.
                self._target.use_huge_pages()
            self._source.take_over(self._target)
            return True
        self._copy_all([*again, *self._next_rows()])
        for region in self._regions:
            if region.done:
                self._want_huge_pages(region)
        return False

    def finish(self) -> None:
        """Copy all remaining rows and switch plans. Collective."""
        self._limit = None
        while not self.advance():
            pass

    def stop(self) -> None:
        """Release the new arenas and stay with the old plan."""
        self._regions = []
        self._target.close()

    def _next_rows(self) -> Iterator[_Copy]:
        """Yield the next rows to copy within a step's budget, and mark them as copied."""
        left = self._limit
        for region in self._regions:
            while region.done < region.view.shape[0]:
                size = _CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES)
                # At least one row per step, even if the budget is smaller than a row.
                rows = max(1 if left is None or left == self._limit else 0,
                           size // region.row_bytes)
                if rows == 0:
                    return
                end = min(region.view.shape[0], region.done + rows)
                yield region, range(region.done, end)
                if left is not None:
                    left -= (end - region.done) * region.row_bytes
                region.done = end
                if left is not None and left <= 0:
                    return

    def _want_huge_pages(self, region: _Region) -> None:
        """Request huge pages for the memory written so far, to spread the cost over the steps."""
        if not self._pages:
            return
        end = region.view.data_ptr() + region.done * region.row_bytes
        if end - self._frontier >= _HUGE:
            torch.ops.oper.collapse_segment(self._frontier, end - self._frontier)
            self._frontier = end // _HUGE * _HUGE

    def _changed_rows(self, everyone: list[Mapping[str, np.ndarray]]) -> Iterator[_Copy]:
        """Yield the rows already copied that the last step has changed on any rank.

        Args:
            everyone: by rank, the ids that its step has changed, int64 [n], by table.
        """
        changed = {name: np.unique(np.concatenate([ids[name] for ids in everyone if name in ids]))
                   for name in {n for ids in everyone for n in ids}}
        for region in self._regions:
            directory = self._target.directories[region.piece]
            ids = changed.get(directory.table.name)
            if ids is None or not region.done:
                continue
            ids = ids[(ids >= 0) & (ids < directory.table.num_rows)]
            slots = self._slots_of(region, ids)
            slots = slots[slots < region.done]
            rows = max(1, _CHUNK_BYTES // region.row_bytes)
            for at in range(0, slots.size, rows):
                yield region, slots[at:at + rows]

    def _copy_all(self, copies: Iterable[_Copy]) -> None:
        """Copy rows into regions from their current owners. Collective between memory domains."""
        self._source.in_rounds(
            [(region, slots, piece) for region, slots in copies for piece in self._pieces(region)],
            lambda work: self._copy(*work))

    def _pieces(self, region: _Region) -> Iterator[int]:
        """Yield the directories of the current plan that hold columns of a region."""
        name = self._target.directories[region.piece].table.name
        wanted = self._target.columns(region.part, region.piece)
        for piece in self._source.pieces_of(name, region.part):
            found = self._source.columns(region.part, piece)
            if found.start < wanted.stop and wanted.start < found.stop:
                yield piece

    def _copy(self, region: _Region, slots: np.ndarray | range, piece: int) -> None:
        """Copy the columns that one piece of the current plan holds into rows of a region."""
        if isinstance(slots, range):
            slots = np.arange(slots.start, slots.stop)
        directory = self._target.directories[region.piece]
        positions = (self._replica_positions(region.piece, slots) if region.replicas
                     else directory.positions_at(self._rank, slots))
        there = self._target.columns(region.part, region.piece)
        here = self._source.columns(region.part, piece)
        columns = slice(max(there.start, here.start), min(there.stop, here.stop))
        view = region.view[:, columns.start - there.start:columns.stop - there.start]
        values = view.new_empty(slots.size, view.shape[1])
        ids, left = directory.ids_at(positions), np.ones(slots.size, bool)
        if region.part == "rows":
            left = ~self._source.copy_local_replicas(piece, ids, columns, values)
        if left.all():
            self._source.gather_piece(piece, ids, region.part, columns, values)
        else:
            rest = values.new_empty(int(left.sum()), values.shape[1])
            self._source.gather_piece(piece, ids[left], region.part, columns, rest)
            values[torch.from_numpy(left)] = rest
        put_rows(view, torch.from_numpy(slots), values, torch.arange(slots.size))
        self.num_copied_bytes += values.numel() * values.element_size()

    def _slots_of(self, region: _Region, ids: np.ndarray) -> np.ndarray:
        """Return the indices of a region's rows that hold any of `ids` (int64 [n])."""
        directory = self._target.directories[region.piece]
        positions = directory.position_of(ids)
        if not region.replicas:
            owner, slot = directory.locate(positions)
            return slot[owner == self._rank]
        found = [np.zeros(0, np.int64)]
        for x in directory.tiers:
            first = int(x.replica_base[self._rank])
            if first >= 0:
                inside = (positions >= x.tier.start) & (positions < x.tier.stop)
                found.append(positions[inside] - x.tier.start + first)
        return np.concatenate(found)

    def _replica_positions(self, piece: int, rows: np.ndarray) -> np.ndarray:
        """Return the positions (int64 [n]) of this rank's replica rows `rows` (int64 [n])."""
        positions = np.empty(rows.shape, np.int64)
        for x in self._target.directories[piece].tiers:
            first = int(x.replica_base[self._rank])
            if first >= 0:
                inside = (rows >= first) & (rows < first + x.tier.stop - x.tier.start)
                positions[inside] = rows[inside] - first + x.tier.start
        return positions


def prepared(tables: Tables, plan: Plan) -> Tables:
    """Return tables like `tables` under another plan, with uninitialised arenas. Collective.

    Raises:
        OperError: a rank does not have enough memory; raised on all ranks.
    """
    other = tables.like(plan)
    problem: OperError | None = None
    try:
        other.check_memory()
    except OperError as error:
        problem = error
    # Ranks may see different amounts of free memory, so they decide together.
    found = [e for e in tables.group.all_gather(problem) if e is not None]
    if found:
        other.close()
        raise found[0]
    return other


def copied(tables: Tables, memo: dict[int, Any]) -> Tables:
    """Return a copy of tables, including optimizer states, step counts and learning rates.
    Collective.

    Args:
        tables: the tables to copy; a migration under way is not copied.
        memo: the memo of ``copy.deepcopy``.
    """
    if tables.keys is not None:
        tables.keys.refuse("cannot copy sharded tables", "save and load a checkpoint")
    tables.barrier()  # peers may still be updating
    other = prepared(tables, tables.plan)
    other.continue_from(tables, memo)
    for k in range(len(tables.directories)):
        for view, values in zip(other.views(k).values(), tables.views(k).values(), strict=True):
            view.copy_(values)
    other.flush_replicas()
    return other


def check_memory(num_bytes: list[int], what: str = "the new plan in addition to the old one",
                 todo: str = "save a checkpoint, stop, and load it under the new plan") -> None:
    """Raise OperError unless the machine has enough memory for arenas of these sizes, in bytes."""
    free = kernel.available_memory()
    if sum(num_bytes) > free:
        raise OperError(f"not enough memory for {what}", "bytes", format_bytes(sum(num_bytes)),
                        f"<= {format_bytes(free)}, the free memory", todo)
