"""Synchronization of a collection's tables between replica groups.

* ``every = 1``: before each update, counterparts (see `groups`) exchange the summed gradients of
  their rows and add them up in the order of the groups. All groups then make the update that one
  group of all ranks would make, up to the order of additions.
* ``every > 1``: each group updates its copy of the tables separately. After `every` updates,
  counterparts average the rows that have changed since the last synchronization, and the optimizer
  states of these rows.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from oper.errors import (
    DeadlineError,
    DesyncError,
    InvalidInputError,
    OperError,
    PeerLostError,
    require,
)
from oper.shmem.counters.changes import ChangedRows
from oper.shmem.group.agreement import check_agreement
from oper.shmem.group.desync import SYNCHRONIZATION, CollectivePhase, register_of
from oper.shmem.group.transport import transport_of
from oper.shmem.optim.optimizers import STATE_PARTS
from oper.shmem.passes import Backward
from oper.shmem.replica_groups.groups import ReplicaGroups
from oper.tables import OPTIMIZERS

CHUNK_BYTES = 64 << 20  # bytes that a rank sends to each counterpart in one exchange of rows
# Purposes of `_exchange_numbers`; _REFUSED: this rank's group skips the update.
_GRADIENTS, _ROWS, _COPIES, _REFUSED = range(4)
# Numbers of the first message. It has this size for all collections, since a group may refuse its
# batch in another collection than the one whose update its counterparts make.
_FIRST = 60


class Synchronizer:
    """Synchronizes a collection's tables with those of the other replica groups. Construction and
    methods are collective over all groups unless stated otherwise.

    Args:
        tables: new `ShardedTables` of `groups.mine`, trained and in host memory. They get this
            object as `replicas`; their `publish` then calls `agree`.
        groups: the replica groups.

    Attributes:
        sent_bytes: number of bytes that this rank has sent to its counterparts.
            `ShardedTables.sent_bytes` does not include them.

    Raises:
        InvalidInputError: the tables are read-only or in device memory, or plans or optimizers
            differ between the groups.
    """

    is_watched = False  # see `Collection`: errors describe this object by its name and tables

    def __init__(self, tables: Any, groups: ReplicaGroups) -> None:
        if tables.device.type != "cpu" or tables.optimizers is None:
            raise InvalidInputError(
                "cannot train tables in replica groups", "tables",
                f"on {tables.device}, {'with' if tables.optimizers else 'without'} optimizer",
                "trained tables in host memory", "shard without replica_groups")
        check_agreement(groups.counterparts, tables.plan, {
            "feature": tables.features, "optimizer": list(tables.optimizers.items())})
        self._tables, self._groups = tables, groups
        self.name, self.specs = tables.name, tables.specs
        self._number = register_of(groups.counterparts).add(self)  # type: ignore[arg-type]
        self._transport = transport_of(groups.counterparts)
        self._release = self._transport.hold(self)
        self._changed = ChangedRows(tables) if groups.every > 1 else None
        self.sent_bytes = 0
        self._since = 0  # updates since the last synchronization
        self._is_inside = self._has_refused = False
        if groups.every > 1:
            tables.on_update.append(self._count)
        tables.turns.is_alone, tables.meets_peers = False, True  # also for groups of one rank
        tables.replicas = self

    def close(self) -> None:
        """Release the transport. Not collective."""
        self._release()

    def refuse(self, what: str, todo: str) -> NoReturn:
        """Raise InvalidInputError, which begins with `what` and ends with the remedy `todo`, for an
        operation that replica groups do not support. Not collective."""
        raise InvalidInputError(what, "replica groups", self._groups.count, "one", todo)

    def check_synchronized(self, what: str) -> None:
        """Raise OperError, which begins with `what`, if there were updates since the last
        synchronization, so that rows may differ between groups. Not collective."""
        if self._since:
            raise OperError(what, "updates since the last synchronization of replica groups",
                            self._since, "0, after which all groups have the same rows",
                            "call oper.synchronize(model) on all ranks first")

    # ---- every = 1: gradients --------------------------------------------------------------------

    def takes(self, passed: Backward, updates: bool) -> bool:
        """Make the update of `ShardedTables.step` with the gradients of all groups.

        Args:
            passed, updates: the arguments of `step`.

        Returns:
            Whether the update was made here. False, without any effect, if `step` is to continue:
            with ``every > 1``, without `updates`, and when this method itself calls `step`.
        """
        if self._groups.every > 1 or self._is_inside or not updates:
            return False
        tables = self._tables
        self._has_refused = False
        self._is_inside = True
        try:
            try:
                tables.step(passed, updates=False)
            except Exception:
                if not self._has_refused:
                    self.refuse_update()
                raise
            try:
                self._add_up()
            except BaseException:
                torch.ops.oper.lookup_forget(tables.handle)
                tables.drop_in_family()
                raise
            tables.step(passed.without_samples())
        finally:
            self._is_inside = False
        return True

    def refuse_update(self) -> None:
        """Make the counterparts skip their update too, after this rank's group has refused a batch.
        Does nothing if ``every > 1``."""
        if self._groups.every == 1:
            self._has_refused = True
            # The caller raises the error for which the batch was refused.
            with contextlib.suppress(OperError):
                self._exchange_numbers(_REFUSED, [])

    def _add_up(self) -> None:
        """Replace this rank's sums of gradients, which `step` has kept for the update, by the sums
        over all groups."""
        tables = self._tables
        kept = [torch.ops.oper.context_kept(tables.handle, t)
                for t in range(len(tables.directories))]
        counts = self._exchange_numbers(_GRADIENTS, [x.numel() for of in kept for x in of[::2]])
        widths = [d.dim for d in tables.directories for _ in range(2)]
        found = self._exchange(
            [x.reshape(-1).view(torch.uint8) for of in kept for x in of],
            [sum(n * (4 + 4 * dim) for n, dim in zip(theirs, widths, strict=True))
             for theirs in counts])
        readers = [_Reader(x) for x in found]
        for k, dim in enumerate(widths):
            parts = [(reader.take(n, 1, torch.int32)[:, 0], reader.take(n, dim, torch.float32))
                     for reader, theirs in zip(readers, counts, strict=True)
                     for n in (theirs[k],)]
            slots = _union([s.numpy().view(np.uint32) for s, _ in parts])
            total = torch.zeros(slots.size, dim)
            for some, rows in parts:
                at = _places(slots, some.numpy().view(np.uint32))
                total.index_copy_(0, at, total.index_select(0, at) + rows)
            torch.ops.oper.context_keep(tables.handle, k // 2, bool(k % 2),
                                        torch.from_numpy(slots.view(np.int32)), total)

    # ---- every > 1: rows -------------------------------------------------------------------------

    def _count(self) -> None:
        self._since += 1
        if self._since == self._groups.every:
            self.synchronize()

    def synchronize(self) -> None:
        """Average the rows that have changed since the last synchronization, and their optimizer
        states. Does nothing without an update since then.

        The average is over all groups if the optimizer's step is proportional to the gradient
        (SGD), and otherwise over the groups that have updated the row. It is computed in float32
        and rounded to nearest for rows of 16 bits.
        """
        if not self._since:
            return
        assert self._changed is not None
        tables = self._tables
        tables.barrier()  # peers may still be copying rows of the last update to their replicas
        taken = self._changed.take()
        assert taken is not None  # `agree` has followed every other change of rows
        mine = [taken[k] for k in range(len(tables.directories))]
        counts = self._exchange_numbers(_ROWS, [x.size for x in mine])
        found = [_Reader(x) for x in self._exchange(
            [torch.from_numpy(np.concatenate(mine).view(np.uint8))],
            [4 * sum(theirs) for theirs in counts])]
        slots = [[reader.take(n, 1, torch.int32)[:, 0].numpy().view(np.uint32)
                  for reader, theirs in zip(found, counts, strict=True) for n in (theirs[k],)]
                 for k in range(len(mine))]
        unions = [_union(x) for x in slots]
        self._average(unions, [
            [union] * len(x)
            if OPTIMIZERS[tables.directories[k].table.optimizer].is_proportional else x
            for k, (union, x) in enumerate(zip(unions, slots, strict=True))])
        tables.publish_some(unions)
        self._changed.restart()
        self._since = 0

    def _average(self, unions: list[np.ndarray], slots: list[list[np.ndarray]]) -> None:
        """Replace rows and states of this rank by their averages over the groups.

        Args:
            unions: by directory, the slots to write, uint32 [n], ascending.
            slots: by directory and group, the slots whose rows are in that group's part of the
                average, uint32, ascending.
        """
        for some in self._chunks(unions):
            parts = [[_within(x, union) for x in of]
                     for union, of in zip(some, slots, strict=True)]
            for view, k, rows in self._rows_of_all(parts):
                view.index_copy_(0, _index(some[k]), _mean(some[k], parts[k], rows).to(view.dtype))

    def _chunks(self, slots: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Divide the slots of each directory into equally many parts, such that the rows and states
        of one part of every directory take about `CHUNK_BYTES` in all; yields these parts."""
        total = sum(x.size * sum(v.shape[1] * v.element_size() for v in self._views(k))
                    for k, x in enumerate(slots))
        count = -(-total // CHUNK_BYTES)
        for c in range(count):
            yield [x[x.size * c // count:x.size * (c + 1) // count] for x in slots]

    def _views(self, piece: int) -> list[torch.Tensor]:
        """Return views [rows, columns] of this rank's rows of a directory and of their optimizer
        states."""
        tables = self._tables
        parts = ("rows", *(part for part, _ in STATE_PARTS[
            tables.directories[piece].table.optimizer]))
        return [tables.view(part, piece, tables.group.rank) for part in parts]

    def _rows_of_all(self, slots: list[list[np.ndarray]]
                     ) -> Iterator[tuple[torch.Tensor, int, list[torch.Tensor]]]:
        """Exchange rows and states with the counterparts.

        Args:
            slots: by directory and group, the slots whose rows that group sends.

        Yields:
            For each view of `_views` of all directories: the view, the number of its directory, and
            by group the rows received, [number of slots, columns].
        """
        rank = self._groups.counterparts.rank
        views = [(view, k) for k in range(len(slots)) for view in self._views(k)]
        sent = []
        for view, k in views:
            mine = slots[k][rank]
            sent.append(view.new_empty(mine.size, view.shape[1]))
            torch.ops.oper.copy_rows(view, torch.from_numpy(mine.view(np.int32)), sent[-1])
        found = self._exchange(
            [x.reshape(-1).view(torch.uint8) for x in sent],
            [sum(slots[k][g].size * v.shape[1] * v.element_size() for v, k in views)
             for g in range(self._groups.count)])
        readers = [_Reader(x) for x in found]
        for view, k in views:
            yield view, k, [reader.take(x.size, view.shape[1], view.dtype)
                            for reader, x in zip(readers, slots[k], strict=True)]

    # ---- written rows ----------------------------------------------------------------------------

    def agree(self, refresh: Callable[[], None]) -> None:
        """Copy rows and states of the first group to all groups, for directories whose checksums
        differ between counterparts. Called after rows were written.

        Args:
            refresh: called on all ranks of a group, once, if rows of one of them were replaced.
        """
        tables = self._tables
        sums = self._exchange_numbers(_COPIES, [
            zlib.crc32(b"".join(zlib.crc32(_bytes(view)).to_bytes(4, "little")
                                for view in self._views(k)))
            for k in range(len(tables.directories))])
        wanted = [np.arange(self._views(k)[0].shape[0], dtype=np.uint32)
                  if any(theirs[k] != sums[0][k] for theirs in sums) else np.zeros(0, np.uint32)
                  for k in range(len(tables.directories))]
        nothing = np.zeros(0, np.uint32)
        for some in self._chunks(wanted):
            parts = [[x] + [nothing] * (self._groups.count - 1) for x in some]
            for view, k, rows in self._rows_of_all(parts):
                view.index_copy_(0, _index(some[k]), rows[0])
        if any(tables.all_gather(sums[self._groups.counterparts.rank] != sums[0])):
            refresh()
        if self._changed is not None:
            self._changed.restart()

    # ---- exchanges -------------------------------------------------------------------------------

    def _exchange_numbers(self, purpose: int, numbers: list[int]) -> list[list[int]]:
        """Exchange `numbers`, equally many on all counterparts, and return those of every group.

        Raises:
            PeerLostError: a counterpart's group has refused the batch of this update.
            DesyncError: a counterpart exchanges numbers for another purpose, collection or update.
            InvalidInputError: learning rates or frozen tables differ between the counterparts.
        """
        tables = self._tables
        settings = repr((sorted(tables.frozen), sorted(tables._skipped.items()),
                         [float(group["lr"]) for group in tables.param_groups]))
        head = [purpose, self._number, tables.num_steps, zlib.crc32(settings.encode())]
        found = self._all_numbers(head + numbers[:_FIRST] + [0] * (_FIRST - len(numbers)))
        for g, theirs in enumerate(found):
            refused = purpose == _GRADIENTS and theirs[0] == _REFUSED
            if refused or (theirs[:3] != head[:3] and purpose != _REFUSED):
                error = PeerLostError(
                    "another replica group has refused its batch, so no group has trained",
                    "rank", self._rank(g), "a valid batch on every rank",
                    "see that group's error; all ranks can continue with the next batch"
                ) if refused else DesyncError(
                    "a rank of another replica group is not at this synchronization", "rank",
                    self._rank(g), "the same updates, synchronizations and writes on all ranks",
                    "make the same calls in the same order on all ranks")
                error.rank = self._rank(g)
                raise error
        if purpose in (_GRADIENTS, _ROWS):
            require("cannot synchronize replica groups",
                    "set lr and requires_grad by the same rule on every rank", *(
                        (f"learning rates and frozen tables of rank {self._rank(g)}", "different",
                         theirs[3] == head[3], "equal to those of this rank")
                        for g, theirs in enumerate(found)))
        rest = self._all_numbers(numbers[_FIRST:]) if len(numbers) > _FIRST else [[]] * len(found)
        return [[*theirs[4:], *more][:len(numbers)]
                for theirs, more in zip(found, rest, strict=True)]

    def _all_numbers(self, mine: list[int]) -> list[list[int]]:
        """Return the numbers, as many as `mine`, that every group has sent."""
        data = torch.tensor(mine, dtype=torch.int64).view(torch.uint8)
        return [x.view(torch.int64).tolist()
                for x in self._exchange([data], [data.numel()] * self._groups.count)]

    def _rank(self, group: int) -> int:
        """Return the number, among all ranks, of this rank's counterpart in a group."""
        mine = self._groups.mine
        return group * mine.world_size + mine.rank

    def _exchange(self, data: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send `data`, uint8 tensors, to all counterparts.

        Returns:
            By group, the bytes that its counterpart has sent (this rank's own group: `data`), uint8
            [sizes[group]].
        """
        count, rank = self._groups.count, self._groups.counterparts.rank
        mine = torch.cat([*data, torch.empty(0, dtype=torch.uint8)])
        there = [mine.numel() if g != rank else 0 for g in range(count)]
        back = [size if g != rank else 0 for g, size in enumerate(sizes)]
        received = torch.empty(sum(back), dtype=torch.uint8)
        self.sent_bytes += sum(there)
        self._transport.at = CollectivePhase(self._number, SYNCHRONIZATION)
        try:
            self._transport.exchange(mine if count == 2 else mine.repeat(count - 1), there,
                                     received, back)
        except (PeerLostError, DeadlineError, DesyncError) as error:
            if error.rank is None:
                raise
            rank = self._rank(error.rank)
            found = type(error)("lost the counterpart in another replica group", "rank", rank,
                                "all ranks alive and at the same update", str(error))
            found.rank = rank
            raise found from error
        parts = list(received.split(back))
        parts[rank] = mine
        return parts


class _Reader:
    """Reads consecutive matrices from a uint8 tensor."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._at = data, 0

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next matrix [rows, columns], of `dtype`."""
        begin, self._at = self._at, self._at + rows * columns * dtype.itemsize
        part = self._data[begin:self._at]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(rows, columns)


def _bytes(view: torch.Tensor) -> memoryview:
    return view.reshape(-1).view(torch.uint8).numpy().data


def _index(slots: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))


def _union(slots: Sequence[np.ndarray]) -> np.ndarray:
    """Return the distinct slots of all arrays, ascending."""
    return np.unique(np.concatenate(slots))


def _places(union: np.ndarray, slots: np.ndarray) -> torch.Tensor:
    """Return the indices, int64, at which ascending `union` has the values `slots`."""
    return torch.from_numpy(np.searchsorted(union, slots).astype(np.int64))


def _within(slots: np.ndarray, union: np.ndarray) -> np.ndarray:
    """Return those of the ascending `slots` that lie between the first and the last value of the
    ascending `union`."""
    if not union.size:
        return union
    return slots[np.searchsorted(slots, union[0]):np.searchsorted(slots, union[-1], "right")]


def _mean(union: np.ndarray, slots: Sequence[np.ndarray], rows: Sequence[torch.Tensor]
          ) -> torch.Tensor:
    """Return the means of rows over the groups that contribute them, float32 [n, columns].

    The mean of count rows x is computed as x0 + sum(x - x0) / count, where x0 is the first of them,
    so that the mean of equal rows is exactly that row.

    Args:
        union: slots of the result's rows, ascending [n]; each is in at least one of `slots`.
        slots: by group, the slots of `rows`.
        rows: by group, the rows to average, [number of slots, columns].
    """
    first = torch.zeros(union.size, rows[0].shape[1])
    total, count = torch.zeros_like(first), torch.zeros(union.size, 1)
    for some, values in zip(slots, rows, strict=True):
        at, x = _places(union, some), values.float()
        number = count.index_select(0, at)
        base = torch.where(number == 0, x, first.index_select(0, at))
        first.index_copy_(0, at, base)
        total.index_copy_(0, at, total.index_select(0, at) + (x - base))
        count.index_copy_(0, at, number + 1)
    return first + total / count
