"""Raw keys in front of sharded tables: which row each one has, on all ranks.

A dynamic table is a static one whose row numbers come from a directory of keys
(csrc/host/keys.h): fixed buckets of slots, dealt to the ranks, in memory that all ranks read and
that only a bucket's rank writes. Row = slot + 1; row 0 is that of keys without a row.

* A lookup replaces keys by rows, reading the directory only. After that it is a lookup of a static
  table, under any plan.
* Each update of the rows is followed by an update of the directory. Before the gradient exchange
  every rank has put its batch's distinct keys and counts into its arena. Now the owner of each
  bucket adds up those of all ranks, in hash order, and publishes which rows went to new keys. After
  a barrier every rank initialises the new rows that it holds, from key and seed, and clears their
  optimizer states. A second barrier ends the update.

Buckets follow from the number of rows, and what happens in one from the keys and counts of all
ranks' batches: keys, rows, counts and clocks do not depend on the number of ranks, on the plan or
on threads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from oper.dynamic import EVICTIONS, DynamicTable
from oper.errors import InvalidInputError, OperError, fail
from oper.shmem.batch import BatchChecks, Lookup, SeenKeys
from oper.shmem.by_feature import key_bounds, offsets_of
from oper.shmem.group.desync import GRADIENTS, KEYS, phase_of
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.optim.optimizers import STATE_PARTS, initial_state
from oper.shmem.protocol import Tables
from oper.shmem.settings import OUTBOX_ENV, outbox_bytes

_PAGE = 4096
_PAIR_BYTES, _RECORD_COLUMNS = 16, 3
MOST_UPDATES = (1 << 32) - 2  # clocks have 32 bits
_CHUNK = 1 << 20  # records that are counted at a time
RECORDS = {"keys": False, "candidates": True}  # part of a checkpoint: of candidates or not


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """What has happened to the keys of a dynamic table.

    Attributes:
        rows: rows available to keys.
        occupied: rows that a key holds, expired keys included.
        admitted, evicted, expired: keys that got a row; that lost it to a new key; that had
            outlived their time to live when their row was reused. Over all ranks, since the tables
            were made.
        refused: times that a new key got no row because its bucket was full of keys seen in that
            update.
        lookups, missed: ids looked up by this rank, and those among them that read the default row.
    """

    rows: int
    occupied: int
    admitted: int
    evicted: int
    expired: int
    refused: int
    lookups: int
    missed: int


@dataclass(slots=True)
class _Table:
    """One dynamic table.

    Attributes:
        rules: its configuration.
        handle: its directory.
        number: among the dynamic tables.
        bound: of new rows.
        clock: updates so far.
        changes: int64 [4], keys of this rank's buckets: admitted, evicted, expired, refused.
        lookups: int64 [2], ids of this rank: all, without a row.
    """

    rules: DynamicTable
    handle: int
    number: int
    bound: float
    clock: int = 0
    changes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4, np.int64))
    lookups: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.int64))


class Keys:
    """The directories of a collection's dynamic tables. Creation is collective.

    Args:
        tables: the tables, with optimizers, in host memory that all ranks share.
        rules: by table, for those that are dynamic.

    Raises:
        InvalidInputError: tables that cannot be dynamic.
        OperError: there is no memory for the directories.
    """

    def __init__(self, tables: Tables, rules: Mapping[str, DynamicTable]) -> None:
        _check(tables, rules)
        self._tables: Tables = weakref.proxy(tables)
        self._features = [(number, table) for number, (_, table) in enumerate(tables.features)
                          if table in rules]
        group = tables.group
        self._rank, self._size = group.rank, group.world_size
        # In every arena: directories, then keys that were looked up, then rows of new keys.
        starts: list[list[int]] = []
        self._seen_at = []
        for rank in range(self._size):
            at, mine = 0, []
            for name, rule in rules.items():
                mine.append(at)
                at = _page_up(at + torch.ops.oper.keys_num_bytes(
                    tables.specs[name].num_rows - 1, self._size, rank, rule.admit_after > 1))
            starts.append(mine)
            self._seen_at.append(at)
        self._header = 8 * (len(rules) + 1)
        most_new = sum(tables.specs[name].num_rows for name in rules)
        self._seen_bytes = _page_up(self._header + outbox_bytes())
        self._new_bytes = _page_up(self._header + _PAIR_BYTES * most_new)
        self._heap = HostHeap(group, [at + self._seen_bytes + self._new_bytes
                                      for at in self._seen_at], num_outbox_bytes=self._seen_bytes)
        self.tables: dict[str, _Table] = {}
        for number, (name, rule) in enumerate(rules.items()):
            arenas = [a + starts[r][number] for r, a in enumerate(self._heap.addresses)]
            num_rows = tables.specs[name].num_rows
            handle = int(torch.ops.oper.keys_create(arenas, self._rank, num_rows - 1,
                                                    _rule_numbers(rule)))
            bound = math.sqrt(1 / num_rows) if rule.init_bound is None else rule.init_bound
            self.tables[name] = _Table(rule, handle, number, bound)
        self._counting = threading.Lock()
        self._checks = BatchChecks()
        self._release = weakref.finalize(self, _release,
                                         [t.handle for t in self.tables.values()], self._heap)
        self._release.atexit = False

    def refuse(self, what: str, todo: str) -> NoReturn:
        """Raise InvalidInputError for what dynamic tables cannot do."""
        raise InvalidInputError(fail(what, "dynamic tables", list(self.tables), "none", todo))

    # ---- lookups ---------------------------------------------------------------------------------

    def lookup(self, look_up: Callable[..., torch.Tensor], batch: Lookup) -> torch.Tensor:
        """The collection's `look_up`, of the rows that the keys have.

        Compiled programs call it outside of their graphs, which cannot look up keys.
        """
        if torch.compiler.is_exporting():
            self.refuse("cannot export a lookup", "export models of static tables")
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.compiler.disable(look_up)(batch)
            return found
        # An update may give the row of a key to another one in the meantime.
        with self._tables.turns.lock:
            return look_up(self.translate(batch), has_rows=True)

    def translate(self, batch: Lookup) -> Lookup:
        """The batch with rows in the place of the dynamic tables' keys. Not collective.

        With gradients enabled its keys are noted, for the update that follows.

        Raises:
            InvalidInputError: as `ShardedTables.lookup`.
        """
        self._checks.check(batch)
        trains = torch.is_grad_enabled()
        if not batch.ids.numel() or not batch.batch_size:
            return batch
        lengths = batch.lengths.long()
        offsets = offsets_of(lengths)
        if (lengths < 0).any() or int(offsets[-1]) != batch.ids.numel():
            return batch  # refused by the kernels
        bounds = key_bounds(batch, offsets)
        ids = batch.ids.to(torch.int64, copy=True)
        seen: list[SeenKeys] = []
        key_of = batch.key_of.tolist()
        for key, name in dict.fromkeys((key_of[f], t) for f, t in self._features):
            rows = ids[bounds[key]:bounds[key + 1]]
            if not rows.numel():
                continue
            table = self.tables[name]
            if trains:
                seen.append(SeenKeys(name, rows.clone(), rows, table.clock))
            missed = torch.ops.oper.keys_find(table.handle, rows, table.clock)
            with self._counting:
                table.lookups += (rows.numel(), missed)
        return dataclasses.replace(batch, ids=ids, resolved=None, seen=tuple(seen))

    # ---- updates ---------------------------------------------------------------------------------

    def leave(self, batch: Lookup) -> None:
        """Put the keys that a batch has seen where the other ranks read them.

        Raises:
            InvalidInputError: an update since the lookup has given one of its rows to another key.
            OperError: there is no room for them. Either way all ranks leave this batch out.
        """
        try:
            self._leave(batch)
        except OperError:
            torch.ops.oper.context_barrier(self._tables.handle, GRADIENTS, True)
            raise

    def _leave(self, batch: Lookup) -> None:
        for seen in batch.seen:
            self._check_rows(seen)
        found = []
        for name, table in self.tables.items():
            if table.clock >= MOST_UPDATES:
                raise OperError(fail(f"cannot update dynamic table {name!r}", "updates",
                                     table.clock, f"< {MOST_UPDATES}, as its clock has 32 bits",
                                     "export it and begin a new one"))
            mine = [s.keys for s in batch.seen if s.table == name]
            found.append(torch.ops.oper.keys_distinct(
                table.handle, torch.cat(mine) if mine else torch.empty(0, dtype=torch.int64)))
        at = self._seen_at[self._rank]
        if not self._put(at, self._seen_bytes, found):
            raise OperError(
                fail("the keys of a batch do not fit the outbox", OUTBOX_ENV,
                     self._seen_bytes - self._header, "16 bytes for each of its distinct keys",
                     f"raise {OUTBOX_ENV} or use a smaller batch"))

    def _check_rows(self, seen: SeenKeys) -> None:
        """Raise InvalidInputError where gradients would go to the row of another key."""
        table = self.tables[seen.table]
        if seen.clock == table.clock:
            return
        rows = seen.keys.clone()
        torch.ops.oper.keys_find(table.handle, rows, seen.clock)
        lost = seen.keys[(seen.rows != 0) & (seen.rows != rows)]
        if lost.numel():
            raise InvalidInputError(
                fail(f"cannot update dynamic table {seen.table!r}",
                     "keys that have lost their rows since the lookup", lost.unique()[:4].tolist(),
                     "none, so that gradients reach the rows that were looked up",
                     "call backward() for all lookups before the next update, at once or within "
                     "oper.no_sync"))

    def take(self, frozen: frozenset[str]) -> dict[str, np.ndarray]:
        """Update the directories from what all ranks have left, and begin new rows. Collective.

        Args:
            frozen: tables that stay as they are.

        Returns:
            Rows int64 [n] that keys of this rank's buckets have got, by table.
        """
        left = [self._got(rank, self._seen_at[rank]) for rank in range(self._size)]
        given = [torch.empty(0, 2, dtype=torch.int64)] * len(self.tables)
        for name, table in self.tables.items():
            if name in frozen:
                continue
            table.clock += 1
            given[table.number], changes = torch.ops.oper.keys_update(
                table.handle, [lists[table.number] for lists in left], table.clock)
            table.changes += changes
        self._put(self._seen_at[self._rank] + self._seen_bytes, self._new_bytes, given)
        with phase_of(self._tables, KEYS):
            self._tables.barrier()
            everyone = [self._got(r, self._seen_at[r] + self._seen_bytes)
                        for r in range(self._size)]
            for name, table in self.tables.items():
                self._begin(name, table, torch.cat([new[table.number] for new in everyone]))
            self._tables.barrier()
        return {name: given[t.number][:, 0].numpy() for name, t in self.tables.items()
                if given[t.number].numel()}

    def _begin(self, name: str, table: _Table, new: torch.Tensor) -> None:
        """First values of the rows of new keys, and their states, where this rank holds them."""
        if not new.numel():
            return
        tables = self._tables
        rows = new[:, 0].numpy()
        held = tables.held_here(name, rows)
        if not held.any():
            return
        new, rows = new[torch.from_numpy(held)], rows[held]
        values = torch.ops.oper.keys_draw(new, row_seed(name, table.rules.seed),
                                          tables.specs[name].dim, table.bound)
        tables.scatter(name, rows, values)
        tables.scatter_replicas(name, rows, values)
        assert tables.optimizers is not None
        first = initial_state(tables.optimizers[name])
        for part, per_row in STATE_PARTS[tables.specs[name].optimizer]:
            begin = first if part == "momentum1" else 0.0
            columns = 1 if per_row else tables.specs[name].dim
            tables.scatter(name, rows, torch.full((rows.size, columns), begin), part)

    # ---- lists in the arenas ---------------------------------------------------------------------

    def _words(self, rank: int, at: int, num_bytes: int) -> torch.Tensor:
        view: torch.Tensor = torch.ops.oper.segment_bytes(self._heap.addresses[rank] + at,
                                                          num_bytes)
        return view.view(torch.int64)

    def _put(self, at: int, room: int, lists: list[torch.Tensor]) -> bool:
        """Leave a list of pairs per table in this rank's arena; whether there is room."""
        joint = torch.cat(lists)
        if self._header + _PAIR_BYTES * joint.shape[0] > room:
            return False
        bounds = np.cumsum([0, *(x.shape[0] for x in lists)])
        self._words(self._rank, at, self._header).copy_(torch.from_numpy(bounds))
        if joint.numel():
            self._words(self._rank, at + self._header, _PAIR_BYTES * joint.shape[0]).copy_(
                joint.view(-1))
        return True

    def _got(self, rank: int, at: int) -> list[torch.Tensor]:
        """The lists that a rank has left, int64 [n, 2] each, mapped."""
        bounds = self._words(rank, at, self._header).tolist()
        if not bounds[-1]:
            return [torch.empty(0, 2, dtype=torch.int64)] * len(self.tables)
        pairs = self._words(rank, at + self._header, _PAIR_BYTES * bounds[-1]).view(-1, 2)
        return [pairs[begin:end] for begin, end in itertools.pairwise(bounds)]

    # ---- state -----------------------------------------------------------------------------------

    def parts(self, name: str) -> list[str]:
        """The parts of a table's directory in a checkpoint, beside its clock."""
        return [part for part, c in RECORDS.items() if self.num_records(name, c)]

    def num_records(self, name: str, candidates: bool) -> int:
        """Slots of a table, or places of keys that are counted without a row."""
        return int(torch.ops.oper.keys_num_records(self.tables[name].handle, candidates))

    def read(self, name: str, part: str, begin: int, end: int) -> torch.Tensor:
        """Records `[begin, end)`, int64 [n, 3]: key, count, clock; the clock is -1 where there is
        none. One-sided: no rank may be in an update."""
        records: torch.Tensor = torch.ops.oper.keys_read(self.tables[name].handle, RECORDS[part],
                                                         begin, end)
        return records

    def write(self, name: str, part: str, begin: int, records: torch.Tensor,
              checks: bool = False) -> None:
        """Restore records from `read`, the same on all ranks; a barrier must follow. With `checks`
        nothing is written.

        Raises:
            InvalidInputError: a record that cannot be there.
        """
        if records.dtype != torch.int64 or records.dim() != 2 or (
                records.shape[1] != _RECORD_COLUMNS):
            raise InvalidInputError(
                fail(f"cannot load the {part} of dynamic table {name!r}", "records",
                     (records.dtype, tuple(records.shape)), "int64 [n, 3]",
                     "load a checkpoint of this model"))
        bad = torch.ops.oper.keys_write(self.tables[name].handle, RECORDS[part], begin,
                                        records.contiguous(), checks)
        if bad >= 0:
            raise InvalidInputError(
                fail(f"cannot load the {part} of dynamic table {name!r}",
                     f"record {begin + bad}", records[bad].tolist(),
                     "a key that belongs there, a count and a clock",
                     "load a checkpoint of a table with the same rows, seed and admit_after"))

    def counts(self, name: str) -> KeyCounts:
        """What has happened to the keys of a table. Collective, between two batches."""
        table = self.tables[name]
        slots = self.num_records(name, False)
        self._tables.barrier()
        occupied = sum(int((self.read(name, "keys", at, min(slots, at + _CHUNK))[:, 2] >= 0).sum())
                       for at in range(0, slots, _CHUNK))
        changes = np.sum(self._tables.all_gather(table.changes), axis=0)
        return KeyCounts(slots, occupied, *changes.tolist(), *table.lookups.tolist())

    def close(self) -> None:
        """Release the directories."""
        self._release()


def _release(handles: list[int], heap: HostHeap) -> None:
    for handle in handles:
        torch.ops.oper.keys_close(handle)
    heap.close()


def row_seed(name: str, seed: int) -> int:
    """Seed of a table's new rows: tables of one rule do not begin alike. An int64."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little", signed=True)


def _rule_numbers(rule: DynamicTable) -> list[int]:
    """As ``KeyRules``, every number as an int64."""
    below = 0 if rule.admit_probability == 1 else min(
        max(1, int(rule.admit_probability * 2.0**64)), (1 << 64) - 1)
    signed = below - (1 << 64) if below >> 63 else below
    return [rule.seed, rule.admit_after, signed, EVICTIONS.index(rule.eviction),
            rule.half_life or 0, rule.time_to_live or 0]


def _page_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _check(tables: Tables, rules: Mapping[str, DynamicTable]) -> None:
    """Raise InvalidInputError for tables that cannot be dynamic."""
    what = "cannot make tables dynamic"
    if tables.optimizers is None:
        raise InvalidInputError(fail(what, "objective", "inference", "training",
                                     "shard for training, and look up without gradients"))
    if tables.device.type != "cpu" or not tables.is_one_domain:
        where = tables.device.type if tables.device.type != "cpu" else "several memory domains"
        raise InvalidInputError(fail(what, "tables in", where,
                                     "host memory that all ranks share",
                                     "train on the ranks of one host"))
    users: dict[str, list[str]] = {}
    for feature, table in tables.features:
        users.setdefault(feature, []).append(table)
    for feature, found in users.items():
        if len(found) > 1 and any(t in rules for t in found):
            raise InvalidInputError(fail(what, f"tables of feature {feature!r}", found,
                                         "one, where it is dynamic",
                                         "give each of them a feature of its own"))
    for name in rules:
        if tables.specs[name].num_rows < 2:
            raise InvalidInputError(fail(what, f"num_embeddings of {name!r}",
                                         tables.specs[name].num_rows,
                                         "at least 2, for the default row and a key",
                                         "enlarge the table"))
