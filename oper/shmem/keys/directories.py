"""Raw keys as ids of sharded tables: which row each key has, on all ranks.

A dynamic table is a static one whose row numbers come from a directory of keys (csrc/host/keys/):
fixed buckets of slots, divided among ranks, in memory that all ranks read; only the owner of a
bucket writes to it. Row = slot + 1; row 0 is that of keys without a row.

* A lookup first replaces the keys of all tables by rows, in one call that only reads the
  directories. Then it is a lookup in static tables, under any plan.
* Each update of the rows also updates the directories. Before the gradient exchange, every rank
  writes to its arena the count of each key in its batch, and the keys without a row. Before its
  rows are updated, the owner of each bucket adds up the counts of all ranks and publishes which
  rows went to new keys. After the update every rank initialises the new rows that it holds, from
  key and seed, and clears their optimizer states. Ranks arrive at a barrier before the update and
  wait there after it.

The buckets depend only on the number of rows, and the changes in a bucket only on the keys and
counts of all ranks' batches. Keys, rows, counts and clocks therefore do not depend on the number of
ranks, the plan or the threads.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError
from oper.shmem.batch import Lookup, SeenKeys, version_of
from oper.shmem.keys.late import RowHistory
from oper.shmem.keys.places import num_buckets, slots_of_buckets
from oper.shmem.keys.rules import EVICTIONS, DynamicTable
from oper.shmem.library import load
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.optim.optimizers import STATE_PARTS, initial_state
from oper.shmem.protocol import Tables
from oper.shmem.settings import OUTBOX_ENV, outbox_bytes

_RECORD_COLUMNS = 3
MOST_UPDATES = (1 << 32) - 2  # clocks have 32 bits
_CHUNK = 1 << 20  # records that are counted at a time
_NO_ROOM, _CLOCK_AT_END = 1, 2  # KeyTables::Left in csrc/host/keys/tables.h
RECORDS = {"keys": False, "candidates": True}  # part of a checkpoint: of candidates or not


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """Statistics of the keys of a dynamic table.

    Attributes:
        rows: rows available to keys.
        occupied: rows that a key holds, expired keys included.
        buckets, full_buckets: number of buckets of rows, and of those without a free row, in which
            a new key takes the row of another key even if other buckets have free rows.
        admitted, evicted, expired: keys that got a row, that lost it to a new key, and that had
            outlived their time to live when their row was reused; over all ranks, since the tables
            were made.
        refused: how often a new key got no row because its bucket was full of keys seen in that
            update.
        lookups, missed: ids looked up, over all ranks, since the tables were made, and those among
            them that read the default row.
    """

    rows: int
    occupied: int
    buckets: int
    full_buckets: int
    admitted: int
    evicted: int
    expired: int
    refused: int
    lookups: int
    missed: int

    @property
    def occupancy(self) -> float:
        """Share of the rows that a key holds."""
        return self.occupied / self.rows

    @property
    def default_share(self) -> float:
        """Share of the lookups that read the default row; 0 before the first."""
        return self.missed / max(self.lookups, 1)


class Keys:
    """The directories of a collection's dynamic tables. Creation is collective.

    Args:
        tables: the tables, with optimizers, in host memory that all ranks share.
        rules: rules of the dynamic tables, by name.

    Attributes:
        tables: number of each dynamic table, by name.
        num_bytes: bytes of all ranks' directories.

    Raises:
        InvalidInputError: tables that cannot be dynamic.
        OperError: there is no memory for the directories.
    """

    def __init__(self, tables: Tables, rules: Mapping[str, DynamicTable]) -> None:
        _check(tables, rules)
        self._tables: Tables = weakref.proxy(tables)
        group, operators = tables.group, torch.ops.oper
        seen_bytes = outbox_bytes()
        arguments = _arguments(tables, rules)
        sizes = [operators.keys_num_bytes(rank, group.world_size, seen_bytes, *arguments)
                 for rank in range(group.world_size)]
        self.num_bytes = sum(of_slots for of_slots, _ in sizes)
        self._heap = HostHeap(group, [n for _, n in sizes], num_outbox_bytes=seen_bytes)
        self.tables = {name: number for number, name in enumerate(rules)}
        self._handle = int(operators.keys_open(
            self._heap.addresses, group.rank, seen_bytes, *arguments,
            [self.tables.get(table, -1) for _, table in tables.features]))
        # Buckets are read in random order.
        self._heap.collapse([of_slots for of_slots, _ in sizes], tables.barrier)
        self._history = RowHistory()
        self._new: tuple[torch.Tensor, list[int]] = (torch.empty(0, 2, dtype=torch.int64),
                                                     [0] * (len(rules) + 1))
        # Without `.default`, torch would search for the overload in every call.
        self._find: Any = operators.keys_find.default
        self._leave: Any = operators.keys_leave.default
        self._release = weakref.finalize(self, _release, self._handle, self._heap)
        self._release.atexit = False

    def refuse(self, what: str, todo: str) -> NoReturn:
        """Raise InvalidInputError for an operation that dynamic tables do not support."""
        raise InvalidInputError(what, "dynamic tables", list(self.tables), "none", todo)

    # ---- lookups ---------------------------------------------------------------------------------

    def lookup(self, look_up: Callable[..., torch.Tensor], batch: Lookup) -> torch.Tensor:
        """The collection's `look_up`, with keys replaced by their rows.

        Compiled programs call it outside of their graphs, because graphs cannot look up keys.
        """
        if torch.compiler.is_exporting():
            self.refuse("cannot export a lookup", "export models of static tables")
        if torch.compiler.is_compiling():
            return torch.compiler.disable(look_up)(batch)
        # An update may give the row of a key to another one in the meantime.
        with self._tables.turns.lock:
            return look_up(self.translate(batch), has_rows=True)

    def translate(self, batch: Lookup) -> Lookup:
        """The batch with the dynamic tables' keys replaced by rows. Not collective.

        With gradients enabled, the keys found and missed are recorded for the update that follows.
        The caller holds the tables' lock.

        Raises:
            InvalidInputError: as `ShardedTables.lookup`.
        """
        ids, lengths = batch.ids, batch.lengths
        if not ids.numel():
            return batch
        trains = torch.is_grad_enabled()
        rows, counts, missed, parts, code = self._find(self._handle, ids, lengths, batch.key_of,
                                                       batch.batch_size, trains)
        if code:
            return batch  # refused by the lookup, which tells the other ranks
        seen: tuple[SeenKeys, ...] = ()
        if trains:
            version = version_of(ids)
            seen = (SeenKeys(ids, version, rows, counts, missed, parts,
                             self._history.num_updates),)
            self._history.wait(seen[0])
        return Lookup(rows, lengths, batch.key_of, batch.batch_size, batch.weights, batch.pooled,
                      batch.shared, seen=seen, apart=batch.apart)

    # ---- updates ---------------------------------------------------------------------------------

    def leave(self, batch: Lookup, frozen: frozenset[str]) -> None:
        """Write the keys that a batch's lookups found and missed to where other ranks read them.

        The backward pass that follows updates the directories.

        Args:
            batch: the batch.
            frozen: tables that are not updated.

        Raises:
            InvalidInputError: an update after a lookup has given one of its rows to another key.
            OperError: the memory for it is too small. In both cases all ranks skip this batch.
        """
        try:
            for seen in batch.seen:
                if seen.updates != self._history.num_updates:
                    self._history.check(seen, list(self.tables))
            left, number = self._leave(
                self._handle, [s.counts for s in batch.seen], [s.missed for s in batch.seen],
                [s.parts for s in batch.seen],
                [self.tables[n] for n in frozen if n in self.tables], self._tables.handle)
            if left:
                self._refuse_batch(left, number)
        except OperError:
            self._tables.refuse()
            raise

    def _refuse_batch(self, left: int, number: int) -> NoReturn:
        if left == _CLOCK_AT_END:
            raise OperError(f"cannot update dynamic table {list(self.tables)[number]!r}", "updates",
                            MOST_UPDATES, f"< {MOST_UPDATES}, as its clock has 32 bits",
                            "export it and begin a new one")
        assert left == _NO_ROOM
        raise OperError("the keys of a batch do not fit the outbox", OUTBOX_ENV, outbox_bytes(),
                        "8 bytes for each of its distinct keys, 16 for those without a row",
                        f"raise {OUTBOX_ENV} or use a smaller batch")

    def take(self) -> None:
        """Note which rows the backward pass has given to new keys."""
        self._new = torch.ops.oper.keys_new(self._handle)
        self._history.note(*self._new)

    def new_rows(self) -> dict[str, np.ndarray]:
        """Rows that the last update has given to new keys, int64 [n], by table; on all ranks."""
        rows, bounds = self._new[0][:, 0].numpy(), self._new[1]
        found = {name: rows[bounds[k]:bounds[k + 1]]
                 for name, k in self.tables.items()}
        return {name: of[of > 0] for name, of in found.items() if (of > 0).any()}

    # ---- state -----------------------------------------------------------------------------------

    def parts(self, name: str) -> list[str]:
        """The parts of a table's directory in a checkpoint, without its clock."""
        return [part for part, c in RECORDS.items() if self.num_records(name, c)]

    def clock(self, name: str) -> int:
        """Updates of a table so far."""
        return int(torch.ops.oper.keys_clock(self._handle, self.tables[name]))

    def set_clock(self, name: str, clock: int) -> None:
        """Restore the number of updates of a table."""
        torch.ops.oper.keys_set_clock(self._handle, self.tables[name], clock)

    def num_records(self, name: str, candidates: bool) -> int:
        """Number of records of a part: slots of a table, or candidates (keys that are counted
        without a row)."""
        return int(torch.ops.oper.keys_num_records(self._handle, self.tables[name],
                                                   candidates))

    def read(self, name: str, part: str, begin: int, end: int) -> torch.Tensor:
        """Records `[begin, end)`, int64 [n, 3]: key, count, clock; the clock is -1 where there is
        none. One-sided: no rank may be in an update."""
        return torch.ops.oper.keys_read(
            self._handle, self.tables[name], RECORDS[part], begin, end)

    def write(self, name: str, part: str, begin: int, records: torch.Tensor,
              checks: bool = False) -> None:
        """Restore records from `read`, the same on all ranks; a barrier must follow. With `checks`
        nothing is written.

        Raises:
            InvalidInputError: a record is impossible at its place.
        """
        if records.dtype != torch.int64 or records.dim() != 2 or (
                records.shape[1] != _RECORD_COLUMNS):
            raise InvalidInputError(f"cannot load the {part} of dynamic table {name!r}", "records",
                                    (records.dtype, tuple(records.shape)), "int64 [n, 3]",
                                    "load a checkpoint of this model")
        if not checks:
            self._history.load()
        bad = torch.ops.oper.keys_write(self._handle, self.tables[name], RECORDS[part],
                                        begin, records.contiguous(), checks)
        if bad >= 0:
            raise InvalidInputError(
                f"cannot load the {part} of dynamic table {name!r}", f"record {begin + bad}",
                records[bad].tolist(), "a key that belongs there, a count and a clock",
                "load a checkpoint of a table with the same rows, seed and admit_after")

    def counts(self, name: str) -> KeyCounts:
        """Statistics of the keys of a table. Collective, between two batches."""
        slots = self.num_records(name, False)
        self._tables.barrier()
        clocks = [self.read(name, "keys", at, min(slots, at + _CHUNK))[:, 2].numpy()
                  for at in range(0, slots, _CHUNK)]
        held = np.concatenate(clocks) >= 0
        begin, end = slots_of_buckets(np.arange(num_buckets(slots)), slots)
        full = np.add.reduceat(held, begin, dtype=np.int64) == end - begin
        mine = torch.ops.oper.keys_counts(self._handle, self.tables[name])
        found = np.sum(self._tables.all_gather(mine), axis=0)
        return KeyCounts(slots, int(held.sum()), full.size, int(full.sum()), *found.tolist())

    def close(self) -> None:
        """Release the directories."""
        self._release()


def _release(handle: int, heap: HostHeap) -> None:
    torch.ops.oper.keys_close(handle)
    heap.close()


def row_seed(name: str, seed: int) -> int:
    """Seed of the random numbers for a table's keys (admission and new rows), int64; different for
    tables with the same rule."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little", signed=True)


def rule_numbers(name: str, num_rows: int, rule: DynamicTable) -> list[int]:
    """A table's rule as the first columns of ``TableColumn`` in csrc/bindings/keys.cpp, int64."""
    below = 0 if rule.admit_probability == 1 else min(
        max(1, int(rule.admit_probability * 2.0**64)), (1 << 64) - 1)
    signed = below - (1 << 64) if below >> 63 else below
    return [num_rows - 1, rule.seed, row_seed(name, rule.seed), rule.admit_after, signed,
            EVICTIONS.index(rule.eviction), rule.half_life or 0, rule.time_to_live or 0]


def directory_bytes(num_rows: int, rule: DynamicTable) -> int:
    """Bytes of the directory of a dynamic table of `num_rows` rows, the default row among them."""
    load()
    numbers = torch.tensor([[*rule_numbers("", num_rows, rule), -1, 0, 0]])
    of_slots, _ = torch.ops.oper.keys_num_bytes(0, 1, 0, numbers, torch.zeros(1, 2).double())
    return int(of_slots)


def _arguments(tables: Tables, rules: Mapping[str, DynamicTable]
               ) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables as csrc/bindings/keys.cpp takes them: int64 [T, 11] and float64 [T, 2]."""
    assert tables.optimizers is not None
    rows, numbers = [], []
    for name, rule in rules.items():
        spec = tables.specs[name]
        # StateWidth in csrc/host/keys/rows.h: none, per column, per row.
        widths = [2 if per_row else 1 for _, per_row in STATE_PARTS[spec.optimizer]]
        feature = next((k for k, (_, table) in enumerate(tables.features) if table == name), -1)
        rows.append([*rule_numbers(name, spec.num_rows, rule), feature, *(*widths, 0, 0)[:2]])
        bound = math.sqrt(1 / spec.num_rows) if rule.init_bound is None else rule.init_bound
        numbers.append([bound, initial_state(tables.optimizers[name])])
    return torch.tensor(rows), torch.tensor(numbers, dtype=torch.float64)


def _check(tables: Tables, rules: Mapping[str, DynamicTable]) -> None:
    """Raise InvalidInputError for tables that cannot be dynamic."""
    what = "cannot make tables dynamic"
    if tables.optimizers is None:
        raise InvalidInputError(what, "objective", "inference", "training",
                                "shard for training, and look up without gradients")
    if tables.device.type != "cpu" or not tables.is_one_domain:
        where = tables.device.type if tables.device.type != "cpu" else "several memory domains"
        raise InvalidInputError(what, "tables in", where, "host memory that all ranks share",
                                "train on the ranks of one host")
    users: dict[str, list[str]] = {}
    for feature, table in tables.features:
        users.setdefault(feature, []).append(table)
    for feature, found in users.items():
        if len(found) > 1 and any(t in rules for t in found):
            raise InvalidInputError(what, f"tables of feature {feature!r}", found,
                                    "one, where it is dynamic",
                                    "give each of them a feature of its own")
    for name in rules:
        if tables.specs[name].num_rows < 2:
            raise InvalidInputError(
                what, f"num_embeddings of {name!r}", tables.specs[name].num_rows,
                "at least 2, for the default row and a key", "enlarge the table")
