"""Synchronization of a collection's tables between replica groups.

* ``every = 1``: before each update, counterparts (see `groups`) exchange the summed gradients of
  their rows and add them up in the order of the groups. All groups then make the update that one
  group of all ranks would make, up to the order of additions. Before that, counterparts exchange
  the keys of their batches, so that directories of dynamic tables stay equal.
* ``every > 1``: each group updates its copy of the tables separately. After `every` updates,
  counterparts average the rows that have changed since the last synchronization, and the optimizer
  states of these rows. With ``delay > 0`` the rows are sent while the next `delay` updates are made
  (overlapped local SGD). After these updates, a row becomes average + (row - row that was sent), so
  that the group keeps its updates of the meantime. The number of updates is fixed, so that results
  do not depend on timing.

With fewer than 32 bits per number, sums of gradients are rounded as other gradients (see
`oper.messages`). Rows are rounded to nearest, with error feedback: a row becomes average + (row -
row as sent), so that the group keeps the error, and sends it with the row's next change.
`synchronize` averages changed rows exactly, as without rounding, and then sends those rows again,
exactly, that were rounded before and have not changed. Optimizer states are always exact.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from oper.errors import DesyncError, InvalidInputError, OperError, PeerLostError, require
from oper.messages import number_bytes
from oper.shmem.counters.changes import ChangedRows
from oper.shmem.group.agreement import check_agreement
from oper.shmem.optim.arguments import rate_of
from oper.shmem.passes import Backward
from oper.shmem.replica_groups.averages import corrected, mean, places, union_of, within
from oper.shmem.replica_groups.changes import SynchronizedRows
from oper.shmem.replica_groups.counterparts import Counterparts
from oper.shmem.replica_groups.gradients import add_up
from oper.shmem.replica_groups.groups import ReplicaGroups
from oper.shmem.replica_groups.late import UPDATES, catch_up
from oper.shmem.replica_groups.messages import Reader, coded
from oper.shmem.replica_groups.refused import check_counts, note_refused
from oper.shmem.replica_groups.written import check_keys, equalize_groups
from oper.tables import OPTIMIZERS

CHUNK_BYTES = 64 << 20  # bytes that a rank sends to each counterpart in one exchange of rows
# Purposes of `_exchange_numbers`; _REFUSED: this rank's group skips the update.
_GRADIENTS, _ROWS, _EXACT_ROWS, _COPIES, _REFUSED, _KEYS = range(6)
# Numbers of the first message. It has this size for all collections, since a group may refuse its
# batch in another collection than the one whose update its counterparts make.
_FIRST = 59
# Sent instead of the checksum of settings if this rank's group is late (`is_late`), or if its
# ranks have frozen different tables.
_LATE, _DIFFERED = -1, -2
_Rows = Iterator[tuple[int, str, torch.Tensor, list[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a synchronization that are sent in one exchange.

    Attributes:
        slots: by directory, the slots to average, uint32, ascending.
        contributed: by directory and group, those of them whose rows that group sends.
        bits: bits per number of a row.
        before: this rank's rows and states at `slots` when they were sent, by view; None where
            they are neither rounded nor updated before they are replaced.
        received: waits for the exchange and yields the rows that `_send_rows` describes.
    """

    slots: list[np.ndarray]
    contributed: list[list[np.ndarray]]
    bits: int
    before: list[torch.Tensor | None]
    received: Callable[[], _Rows]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A synchronization whose rows have been sent and not yet replaced.

    Attributes:
        updates: number of updates that it synchronizes.
        slots: by directory, the slots to average.
        parts: its exchanges.
    """

    updates: int
    slots: list[np.ndarray]
    parts: list[_Part]


class Synchronizer:
    """Synchronizes a collection's tables with those of the other replica groups. Construction and
    methods are collective over all groups unless stated otherwise.

    Args:
        tables: new `ShardedTables` of `groups.mine`, trained and in host memory. They get this
            object as `replicas`; their `flush_replicas` then calls `agree`.
        groups: the replica groups.

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
        self.tables, self.groups = tables, groups
        self.name, self.specs = tables.name, tables.specs
        self._counterparts = Counterparts(self, groups)
        self._changed = ChangedRows(tables) if groups.every > 1 else None
        self.followers: set[SynchronizedRows] = set()
        # Updates that no synchronization has included yet. Updates that the group has skipped are
        # counted, so that all groups synchronize after the same batches.
        self._since = 0
        self.is_late = False  # whether the group has skipped the update that should synchronize
        self.last_update = -self._counterparts.number  # until the first one, see `late`
        # See `refused`: number of updates, also skipped ones, since the model's collections were
        # joined; whether batches leave out collections; whether a refused batch may have left out
        # this collection.
        self.counted, self.is_uneven, self.is_assumed = 0, False, False
        self._has_differed = False  # whether ranks froze different tables, see `_adopt_skipped`
        self._under_way: _UnderWay | None = None
        # Whether `takes` is running, this group has refused its update, a synchronization failed.
        self._is_inside = self._has_refused = self._is_broken = False
        self._accumulates = False  # whether the update that is under way does, see `Backward`
        self._taken: list[np.ndarray] | None = None  # slots of a synchronization that was refused
        # Since the last exact synchronization: the number of updates that rounded ones included,
        # and by directory the slots of rows whose rounding errors this rank keeps.
        self._rounded = 0
        self._inexact: list[np.ndarray] = []
        if groups.every > 1:
            tables.on_update.append(self._count)
        tables.turns.is_alone, tables.notifies_peers = False, True  # also for groups of one rank
        tables.replicas = self

    def close(self) -> None:
        """Release the connections to the counterparts. Not collective."""
        self._counterparts.close()

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank has sent to its counterparts, which
        `ShardedTables.sent_bytes` does not include."""
        return self._counterparts.sent_bytes

    def refuse(self, what: str, todo: str) -> NoReturn:
        """Raise InvalidInputError, which begins with `what` and ends with the remedy `todo`, for an
        operation that replica groups do not support. Not collective."""
        raise InvalidInputError(what, "replica groups", self.groups.count, "one", todo)

    def changed_rows(self) -> ChangedRows:
        """Return a tracker of this rank's rows that change from one synchronization to the next.
        Not collective."""
        return (ChangedRows if self.groups.every == 1 else SynchronizedRows)(self.tables)

    def share(self, slots: np.ndarray) -> np.ndarray:
        """Return the part of `slots` that this rank saves; its counterparts save the others. Not
        collective."""
        group, count = self.groups.counterparts.rank, self.groups.count
        return slots[slots.size * group // count:slots.size * (group + 1) // count]

    def check_synchronized(self, what: str) -> None:
        """Raise OperError, which begins with `what`, if there were updates since the last
        complete synchronization, so that rows may differ between groups. Not collective."""
        updates = self._since + (  # `_rounded` includes those of a synchronization under way
            self._rounded or (0 if self._under_way is None else self._under_way.updates))
        if updates:
            raise OperError(what, "updates since the last synchronization of replica groups",
                            updates, "0, after which all groups have the same rows",
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
        if self.tables.migration is not None:
            self.refuse("cannot train while tables move to another plan", "finish the move first")
        if self.groups.every > 1 or self._is_inside or not updates:
            return False
        tables = self.tables
        self._has_refused = False
        self._is_inside, self._accumulates = True, passed.accumulates
        try:
            try:
                if tables.keys is not None:
                    tables.keys.leave(passed.batch, passed.frozen)
                tables.step(passed, updates=False)
            except BaseException as error:  # perhaps of a signal, after gradients were kept
                self._drop_gradients()
                if isinstance(error, Exception) and not self._has_refused:
                    self.refuse_update()
                raise
            try:
                add_up(tables, self._counterparts, self.groups.counterparts.rank, self.groups.bits,
                       partial(self._exchange_numbers, _GRADIENTS))
            except BaseException:
                self._drop_gradients()
                raise
            tables.step(passed.without_samples())
        finally:
            self._is_inside = False
        return True

    def _drop_gradients(self) -> None:
        """Drop the gradients kept for an update that this rank does not make. Not collective."""
        torch.ops.oper.lookup_forget(self.tables.handle)
        self.tables.drop_in_family()

    def exchange_keys(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Send a message about keys, int64 [n], to the counterparts and return theirs.

        Raises:
            PeerLostError: another group has refused its batch; all ranks of this group skip it.
        """
        try:
            sizes = self._exchange_numbers(_KEYS, [8 * message.numel()])
        except PeerLostError:  # the counterparts have ended this exchange, too: nothing is sent
            self._has_refused = True
            self.tables._skip_in_family()
            torch.ops.oper.lookup_refuse_update(self.tables.handle)
            raise
        found = self._counterparts.exchange([message.view(torch.uint8)], [n for (n,) in sizes])
        del found[self.groups.counterparts.rank]
        return [x.clone().view(torch.int64) for x in found]

    def begin_batch(self) -> None:
        """Called before each lookup in training. Not collective; see `check_counts`."""
        # Lookups that a backward pass repeats do not begin a batch.
        if self.groups.every > 1 and torch._C._current_graph_task_id() == -1:
            check_counts(self)

    def refuse_update(self) -> None:
        """Make the counterparts skip their update too, after this rank's group has refused a batch.
        Does nothing if ``every > 1``."""
        if self.groups.every == 1:
            self._has_refused = True
            # The caller raises the error for which the batch was refused.
            with contextlib.suppress(OperError):
                self._exchange_numbers(_REFUSED, [])

    # ---- every > 1: rows -------------------------------------------------------------------------

    def note_refused(self, differ: bool = False) -> None:
        """Count the update that this rank's group skips because one of its ranks has refused the
        batch, see `refused.note_refused`. Does nothing if ``every = 1``: then no group updates."""
        if self.groups.every > 1:
            note_refused(self, differ)

    def count_skipped(self, differ: bool) -> None:
        """Count an update that this rank's group skips. `differ`: whether the ranks of the group
        have frozen different tables."""
        self._since, self.counted = self._since + 1, self.counted + 1
        self.is_late |= self._since >= self.groups.every
        self._has_differed |= differ

    def _count(self) -> None:
        self._since, self.counted = self._since + 1, self.counted + 1
        self.last_update = next(UPDATES)
        if self._since >= self.groups.delay:
            self._finish()
        if self._since >= self.groups.every:  # only once even if late by more, see `late`
            self._finish()
            self._begin(self.groups.bits)

    def synchronize(self) -> None:
        """Average the rows that have changed since the last synchronization, and their optimizer
        states, immediately. Does nothing without an update since then.

        The average is over all groups if the optimizer's step is proportional to the gradient
        (SGD), and otherwise over the groups that have updated the row. It is computed in float32
        and rounded to nearest for rows of 16 bits. Rows are sent exactly. Those that earlier
        synchronizations rounded, and no group has updated since, follow in another exchange.
        """
        self.begin_batch()
        catch_up(self.tables.family)
        self._finish()
        while self._since or self._rounded:
            self._begin(32)
            self._finish()

    def catch_up(self) -> None:
        """Begin the first synchronization for which the group is late, if any; see `late`."""
        if self.is_late:
            self._finish()
            self._begin(self.groups.bits)

    def _begin(self, bits: int) -> None:
        """Send the rows that have changed since the last synchronization began. With ``delay > 0``
        only their slots have been exchanged on return; otherwise they are averaged, too.

        Without an update since then, send the rows again that earlier synchronizations rounded.
        If the group has skipped the update after which the synchronization was due, it begins after
        the next one, and the other groups wait; that update counts for the next synchronization.
        """
        assert self._changed is not None
        tables = self.tables
        tables.barrier()  # peers may still be copying rows of the last update to their replicas
        taken = self._changed.take()
        assert taken is not None  # `agree` has followed every other change of rows
        mine = [taken[k] for k in range(len(tables.directories))]
        if self._taken is not None:
            mine = [union_of(x) for x in zip(mine, self._taken, strict=True)]
        self._taken = mine  # their marks are cleared; if settings differ, the next call sends them
        is_exact = bits == 32
        if not self._since:
            mine = self._inexact
        counts = self._exchange_numbers(_EXACT_ROWS if is_exact else _ROWS, [x.size for x in mine])
        self._taken, self._is_broken, self.is_assumed = None, True, False
        found = [Reader(x) for x in self._counterparts.exchange(
            [torch.from_numpy(np.concatenate(mine).view(np.uint8))],
            [4 * sum(theirs) for theirs in counts])]
        slots = [[reader.slots(theirs[k]) for reader, theirs in zip(found, counts, strict=True)]
                 for k in range(len(mine))]
        unions = [union_of(x) for x in slots]
        slots = [[union] * len(x)
                 if OPTIMIZERS[tables.directories[k].table.optimizer].is_proportional else x
                 for k, (union, x) in enumerate(zip(unions, slots, strict=True))]
        included = min(self._since, self.groups.every) if self.is_late else self._since
        self._under_way = _UnderWay(included, unions, [])
        if not included:
            self._rounded, self._inexact = 0, []
        elif self._rounded or not is_exact:
            self._note_rounded(unions, [of[self.groups.counterparts.rank] for of in slots], bits)
            self._rounded += 0 if is_exact else included
        self._since -= included
        self.is_late = self._since >= self.groups.every
        for some in self._chunks(unions):
            contributed = [[within(x, union) for x in of]
                           for union, of in zip(some, slots, strict=True)]
            before = [self._copied(view, some[k])
                      if self.groups.delay or self._bits_of(k, name, bits) < 32 else None
                      for k in range(len(some)) for name, view in tables.views(k).items()]
            part = _Part(some, contributed, bits, before, self._send_rows(contributed, bits))
            if self.groups.delay:
                self._under_way.parts.append(part)
            else:
                self._average(part)
        self._is_broken = False
        if not self.groups.delay:
            self._finish()

    def _finish(self) -> None:
        """Replace the rows of the synchronization that is under way, if any, by their averages.

        Raises:
            OperError: an earlier synchronization has failed and may have replaced some rows only.
        """
        if self._is_broken:
            raise OperError("cannot synchronize replica groups", "failed synchronizations", 1,
                            "0, since some rows may have been replaced already",
                            "see its error, and restart the job from its last checkpoint")
        if self._under_way is None:
            return
        assert self._changed is not None
        self._is_broken = True
        tables = self.tables
        if self.groups.delay:
            tables.barrier()  # see `_begin`
        for part in self._under_way.parts:
            self._average(part)
        current = [x for x in self.followers if x.is_current()]
        tables.flush_some_replicas(self._under_way.slots)
        self._changed.accept()
        for x in current:
            x.add(self._under_way.slots)
        self._under_way, self._is_broken = None, False

    def _average(self, part: _Part) -> None:
        """Replace rows and states of this rank by their averages over the groups, to which the
        changes since they were sent are added."""
        own = self.groups.counterparts.rank
        for (k, name, view, rows), before in zip(part.received(), part.before, strict=True):
            means = mean(part.slots[k], part.contributed[k], rows)
            if before is not None:
                if self._bits_of(k, name, part.bits) < 32:  # rounded, as the others have them
                    before.index_copy_(0, places(part.slots[k], part.contributed[k][own]),
                                       rows[own])
                optimizer = OPTIMIZERS[self.tables.directories[k].table.optimizer]
                means = corrected(means, before, self._copied(view, part.slots[k]),
                                  name == optimizer.squares)
            at = torch.from_numpy(part.slots[k].astype(np.int64))
            view.index_copy_(0, at, means.to(view.dtype))

    def _chunks(self, slots: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Divide the slots of each directory into the same number of parts, such that the rows and
        states of one part of every directory take about `CHUNK_BYTES` in all; yields these
        parts."""
        total = sum(x.size * sum(v.shape[1] * v.element_size()
                                 for v in self.tables.views(k).values())
                    for k, x in enumerate(slots))
        count = -(-total // CHUNK_BYTES)
        for c in range(count):
            yield [x[x.size * c // count:x.size * (c + 1) // count] for x in slots]

    def _copied(self, view: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Return a copy of the rows of a view at some slots."""
        rows = view.new_empty(slots.size, view.shape[1])
        torch.ops.oper.copy_rows(view, torch.from_numpy(slots.view(np.int32)), rows)
        return rows

    def _bits_of(self, piece: int, name: str, bits: int) -> int:
        """Return the bits per number of the part `name` of a directory in messages of `bits`:
        states and rows of 16 bits are sent as they are stored."""
        is_rounded = name == "rows" and self.tables.directories[piece].table.dtype == "float32"
        return bits if is_rounded else 32

    def _note_rounded(self, unions: list[np.ndarray], sent: list[np.ndarray], bits: int) -> None:
        """Note, by directory, that the rows at `unions` are replaced, and that those `sent` by this
        rank keep its rounding errors if messages of `bits` round them."""
        before = self._inexact or [x[:0] for x in unions]
        kept = [x if self._bits_of(k, "rows", bits) < 32 else x[:0]
                for k, x in enumerate(sent)]
        self._inexact = [union_of([np.setdiff1d(old, union, assume_unique=True), new])
                         for old, union, new in zip(before, unions, kept, strict=True)]

    def _send_rows(self, slots: list[list[np.ndarray]], bits: int = 32) -> Callable[[], _Rows]:
        """Begin to exchange rows and states with the counterparts, see `Counterparts.begin`.

        Args:
            slots: by directory and group, the slots whose rows that group sends.
            bits: bits per number of a row.

        Returns:
            A function that waits for the exchange and yields, for each of the `views` of all
            directories: the number of its directory, its name, the view, and by group the rows
            received, [number of slots, columns].
        """
        rank = self.groups.counterparts.rank
        views = [(k, name, view, self._bits_of(k, name, bits)) for k in range(len(slots))
                 for name, view in self.tables.views(k).items()]
        wait = self._counterparts.begin(
            [coded(self._copied(view, slots[k][rank]), b) for k, _, view, b in views],
            [sum(slots[k][g].size * (v.shape[1] * v.element_size() if b == 32 else
                                     number_bytes(b, v.shape[1])) for k, _, v, b in views)
             for g in range(self.groups.count)])

        def received() -> _Rows:
            readers = [Reader(x) for x in wait()]
            for k, name, view, b in views:
                yield k, name, view, [reader.take(x.size, view.shape[1], view.dtype, b)
                                      for reader, x in zip(readers, slots[k], strict=True)]

        return received

    # ---- written rows, another plan --------------------------------------------------------------

    def agree(self, refresh: Callable[[], None]) -> None:
        """Make tables equal in all groups after rows were written; see `written`."""
        equalize_groups(self, partial(self._exchange_numbers, _COPIES), refresh)
        self.restart_changes()

    def check_keys(self, name: str) -> None:
        """Called after the keys of a dynamic table were written, see `written.check_keys`."""
        check_keys(self.tables, name, partial(self._exchange_numbers, _COPIES))

    def restart_changes(self) -> None:
        """Track changes from now on, under a new plan or after writes. Not collective."""
        if self._changed is not None:
            self._changed.restart()

    # ---- exchanges -------------------------------------------------------------------------------

    def _exchange_numbers(self, purpose: int, numbers: list[int]) -> list[list[int]]:
        """Exchange `numbers`, the same count on all counterparts, and return those of every group.

        Raises:
            PeerLostError: a counterpart's group has refused the batch of this update.
            DesyncError: a counterpart exchanges numbers for another purpose, collection or update.
            InvalidInputError: learning rates, frozen tables or, if ``every = 1``, use of `no_sync`
                differ between the counterparts.
        """
        tables = self.tables
        settings = repr((sorted(tables.frozen), self._accumulates,
                         [*map(rate_of, tables.param_groups)]))
        skipped = repr(sorted(tables._skipped.items()))
        checksums = [zlib.crc32(text.encode()) for text in (settings, skipped)]
        if self._has_differed:
            checksums[1] = _DIFFERED
        if self.is_late:  # the others wait in an earlier update, which may have other settings
            checksums = [_LATE, _LATE]
        step = tables.num_steps - max(0, self._since - self.groups.every)
        head = [purpose, self._counterparts.number, step, *checksums]
        rank_of = self._counterparts.rank_of
        found = self._all_numbers(head + numbers[:_FIRST] + [0] * (_FIRST - len(numbers)))
        for g, theirs in enumerate(found):
            if purpose in (_GRADIENTS, _KEYS) and theirs[0] == _REFUSED:
                raise PeerLostError(
                    "another replica group has refused its batch, so no group has trained",
                    "rank", rank_of(g), "a valid batch on every rank",
                    "see that group's error; all ranks can continue with the next batch")
            if theirs[:3] != head[:3] and purpose != _REFUSED:
                raise DesyncError(
                    "a rank of another replica group is not at this synchronization", "rank",
                    rank_of(g), "the same updates, synchronizations and writes on all ranks",
                    "make the same calls in the same order on all ranks")
        if purpose in (_GRADIENTS, _ROWS, _EXACT_ROWS):
            self._adopt_skipped([theirs[4] for theirs in found])
            require("cannot synchronize replica groups",
                    "set lr and requires_grad, and enter no_sync, by one rule on every rank", *(
                        (f"learning rates, frozen tables and no_sync of rank {rank_of(g)}",
                         "different", all(x == y or x < 0 or y < 0 for x, y in
                                          zip(theirs[3:5], checksums, strict=False)),
                         "equal to those of this rank")
                        for g, theirs in enumerate(found)))
        rest = self._all_numbers(numbers[_FIRST:]) if len(numbers) > _FIRST else [[]] * len(found)
        return [[*theirs[5:], *more][:len(numbers)]
                for theirs, more in zip(found, rest, strict=True)]

    def _adopt_skipped(self, checksums: Sequence[int]) -> None:
        """If ranks of this group have differed in which tables they froze, adopt from another group
        how often each table was frozen, unless a group is late. `checksums` are by group."""
        if _DIFFERED in checksums and _LATE not in checksums:
            first = next((g for g, checksum in enumerate(checksums) if checksum >= 0), 0)
            skipped = self.tables._skipped
            theirs = self._all_numbers([*skipped.values()])[first]
            if self._has_differed:
                skipped.update(zip(skipped, theirs, strict=True))
                self._has_differed = False

    def _all_numbers(self, mine: list[int]) -> list[list[int]]:
        """Return the numbers, as many as `mine`, that every group has sent."""
        data = torch.tensor(mine, dtype=torch.int64).view(torch.uint8)
        return [x.view(torch.int64).tolist()
                for x in self._counterparts.exchange([data], [data.numel()] * self.groups.count)]
