"""Directories of dynamic tables: which row each raw key has, on all ranks.

A dynamic table is a static table whose row numbers come from a directory of keys (csrc/host/keys/):
fixed buckets of slots, divided among ranks, in memory that all ranks can read; only the owner of a
bucket writes to it. The key in slot s has row s + 1; row 0 is the default row of all other keys.

* A lookup first replaces the keys of all tables by rows, which only reads the directories. Then it
  continues as a lookup in static tables, under any plan.
* Each update of the rows also updates the directories. Before the gradient exchange, every rank
  writes the count of each key in its batch, and the keys without a row, to its arena. Before rows
  are updated, the owner of each bucket adds up the counts of all ranks and publishes which rows it
  has given to new keys. After the update every rank initialises the new rows that it owns, from key
  and seed, and clears their optimizer states.
* Every memory domain has a copy of the directories, divided among its ranks, and applies every
  update to it; `oper.shmem.keys.across` sends it the keys of the other domains' batches.

Buckets depend only on the number of rows, and changes of a bucket only on the keys and counts of
all ranks' batches. Keys, rows, counts and clocks (numbers of updates, by which keys' ages are
measured) therefore do not depend on the number of ranks, the plan or the threads.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from oper.errors import FileFormatError, InvalidInputError, OperError
from oper.rows.directory import MAX_ROWS
from oper.shmem.batch import Lookup, SeenKeys, version_of
from oper.shmem.group.domains import DomainGroup
from oper.shmem.group.groups import Group
from oper.shmem.keys.across import KeyExchange
from oper.shmem.keys.late import RowHistory
from oper.shmem.keys.places import num_buckets, num_candidates
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.library import load
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer, initial_state
from oper.shmem.protocol import Tables
from oper.shmem.settings import SEND_BUFFER_ENV, send_buffer_bytes
from oper.support.processes import when_dropped
from oper.tables import KEY_BUCKET_ROWS, KEY_EVICTIONS, TableSpec

CHUNK_RECORDS = 1 << 20  # records that are read or checked at once
MOST_UPDATES = (1 << 32) - 2  # clocks have 32 bits
_NO_ROOM, _CLOCK_AT_END = 1, 2  # KeyTables::Left in csrc/host/keys/tables.h
# Parts of a directory in a checkpoint, and whether their keys are candidates, which have no row.
RECORDS = {"keys": False, "candidates": True}


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """Statistics of the keys of a dynamic table.

    Attributes:
        rows: number of rows available to keys.
        occupied: number of rows assigned to a key, including expired keys.
        buckets, full_buckets: number of buckets of rows, and of buckets without a free row. A new
            key of a full bucket takes the row of another key, even if other buckets have free rows.
        admitted, evicted, expired: number of keys that got a row, that lost their row to a new key,
            and whose time to live was over when their row was reused; over all ranks, since the
            tables were made.
        refused: number of times that a new key got no row because all keys in its full bucket had
            been seen in the same update.
        lookups, missed: number of ids looked up over all ranks since the tables were made, and of
            lookups that read the default row.
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
        """Share of the rows that are assigned to a key."""
        return self.occupied / self.rows

    @property
    def default_share(self) -> float:
        """Share of the lookups that read the default row; 0 without lookups."""
        return self.missed / max(self.lookups, 1)


class Keys:
    """The directories of a collection's dynamic tables. Creation is collective.

    Args:
        tables: the tables, with optimizers, in host memory.
        rules: settings of the dynamic tables, by table name.

    Attributes:
        tables: number of each dynamic table, from 0, by name.
        rules: settings of the dynamic tables, by name.
        num_bytes: bytes of the directories in this memory domain.

    Raises:
        InvalidInputError: a table cannot be dynamic.
        OperError: there is not enough memory for the directories.
    """

    def __init__(self, tables: Tables, rules: Mapping[str, DynamicTable]) -> None:
        _check(tables, rules)
        self._tables: Tables = weakref.proxy(tables)
        self.tables = {name: number for number, name in enumerate(rules)}
        self.rules = dict(rules)
        self._table_of = [self.tables.get(table, -1) for _, table in tables.features]
        self._arguments = _arguments(tables, rules)
        self._domains = KeyExchange(tables, [
            num_buckets(tables.specs[name].num_rows - 1) * KEY_BUCKET_ROWS for name in rules])
        self._open(tables)

    def _open(self, tables: Tables) -> None:
        """Allocate and initialise the directories."""
        operators = torch.ops.oper
        group: Group = tables.group
        if not tables.is_one_domain:
            group = DomainGroup(tables.group, list(tables.members))
        seen_bytes = send_buffer_bytes()
        sizes = [operators.keys_num_bytes(rank, group.world_size, seen_bytes, *self._arguments)
                 for rank in range(group.world_size)]
        self.num_bytes = sum(of_slots for of_slots, _ in sizes)
        self._heap = HostHeap(group, [n for _, n in sizes], num_send_buffer_bytes=seen_bytes)
        self._handle = int(operators.keys_open(
            self._heap.addresses, group.rank, seen_bytes, *self._arguments, self._table_of))
        # Huge pages, since buckets are read in random order.
        self._heap.collapse([of_slots for of_slots, _ in sizes], tables.barrier)
        self._last = partial(operators.keys_new, self._handle)
        self._history = RowHistory(self._last)
        # Without `.default`, torch would search for the overload in every call.
        self._find: Any = operators.keys_find.default
        self._leave: Any = operators.keys_leave.default
        self._release: Any = when_dropped(self, _release, self._handle, self._heap)

    def refuse(self, what: str, todo: str) -> NoReturn:
        """Raise InvalidInputError for an operation that dynamic tables do not support."""
        raise InvalidInputError(what, "dynamic tables", list(self.tables), "none", todo)

    # ---- lookups ---------------------------------------------------------------------------------

    def lookup(self, look_up: Callable[..., torch.Tensor], batch: Lookup) -> torch.Tensor:
        """Call the collection's `look_up` with keys replaced by their rows.

        In compiled programs this causes a graph break, because graphs cannot look up keys.
        """
        if torch.compiler.is_exporting():
            self.refuse("cannot export a lookup", "export models of static tables")
        if torch.compiler.is_compiling():
            return torch.compiler.disable(look_up)(batch)
        # Without the lock, an update could give a key's row to another key before `look_up`.
        with self._tables.turns.lock:
            return look_up(self.translate(batch), has_rows=True)

    def translate(self, batch: Lookup) -> Lookup:
        """Return the batch with the dynamic tables' keys replaced by rows. Not collective.

        With gradients enabled, `Lookup.seen` records the keys found and missed for the update. The
        caller must hold the tables' lock. An invalid batch is returned unchanged, for the lookup to
        refuse.
        """
        if not batch.ids.numel():
            return batch
        trains = torch.is_grad_enabled()
        rows, *found, code = self._find_keys(batch, trains)
        if code:
            return batch  # the lookup refuses it and notifies the other ranks
        seen: tuple[SeenKeys, ...] = ()
        if trains:
            seen = (SeenKeys(batch.ids, version_of(batch.ids), rows, tuple(found),
                             self._history.num_updates),)
            self._history.wait(seen[0])
        return Lookup(rows, batch.lengths, batch.key_of, batch.batch_size, batch.weights,
                      batch.pooled, batch.shared, seen=seen, apart=batch.apart)

    def _find_keys(self, batch: Lookup, trains: bool) -> tuple[Any, ...]:
        """Return the rows of a batch's ids, `SeenKeys.found`, and a code that is not 0 for an
        invalid batch."""
        return self._find(self._handle, batch.ids, batch.lengths, batch.key_of,
                          batch.batch_size, trains)

    # ---- updates ---------------------------------------------------------------------------------

    def leave(self, batch: Lookup, frozen: frozenset[str]) -> None:
        """Write the keys that a batch's lookups found and missed to this rank's send buffer, from
        which the following backward pass updates the directories. Collective with several memory
        domains or replica groups.

        Args:
            batch: the batch.
            frozen: names of tables that are not updated.

        Raises:
            InvalidInputError: an update after the lookup has given one of its rows to another key;
                all ranks skip this batch.
            OperError: the keys do not fit the send buffer; all ranks skip this batch.
            PeerLostError: a rank of another memory domain or replica group has refused its batch
                or has ended.
        """
        # If this fails, no rank reaches the gradient exchange, which otherwise reports a refusal.
        every = self._domains.exchange(self._tables, [seen.found for seen in batch.seen])
        try:
            self._check_rows(batch)
            left, number = self._leave(
                self._handle, [x[0] for x in every], [x[1] for x in every], [x[2] for x in every],
                [self.tables[n] for n in frozen if n in self.tables], self._tables.handle)
            if left:
                self._refuse_batch(left, number)
        except OperError:
            self._tables.refuse()
            raise

    def _check_rows(self, batch: Lookup) -> None:
        """Raise InvalidInputError if a row of the batch has been given to another key."""
        self._history.keep()
        for seen in batch.seen:
            if seen.updates != self._history.num_updates:
                self._history.check(seen, self._parts(seen), list(self.tables))

    def _parts(self, seen: SeenKeys) -> list[tuple[int, int, int]]:
        """Return the numbers of a lookup's dynamic tables, with begin and end of their ids."""
        return [(number, begin, end) for number, begin, end, *_ in seen.found[2].tolist()]

    def _refuse_batch(self, left: int, number: int) -> NoReturn:
        if left == _CLOCK_AT_END:
            raise clock_at_end(list(self.tables)[number])
        assert left == _NO_ROOM
        raise OperError("the keys of a batch do not fit the send buffer", SEND_BUFFER_ENV,
                        send_buffer_bytes(),
                        "8 bytes for each of its distinct keys, 16 for those without a row; also "
                        "for keys received from other hosts",
                        f"raise {SEND_BUFFER_ENV} or use a smaller batch")

    def note_update(self) -> None:
        """Record that an update has been made."""
        self._history.num_updates += 1

    def new_rows(self) -> dict[str, np.ndarray]:
        """Return the rows, int64 [n], that the last update has given to new keys on any rank, by
        table."""
        new, bounds = self._last()
        rows = new[:, 0].numpy()
        found = {name: rows[bounds[k]:bounds[k + 1]] for name, k in self.tables.items()}
        return {name: of[of > 0] for name, of in found.items() if (of > 0).any()}

    # ---- state -----------------------------------------------------------------------------------

    def parts(self, name: str) -> list[str]:
        """Return the names of the parts of a table's directory in a checkpoint (`RECORDS`)."""
        return [part for part, c in RECORDS.items() if self.num_records(name, c)]

    def clock(self, name: str) -> int:
        """Return the number of updates of a table so far."""
        return int(torch.ops.oper.keys_clock(self._handle, self.tables[name]))

    def set_clock(self, name: str, clock: int) -> None:
        """Restore the number of updates of a table, after its records have been written: only then
        do lookups of tables in device memory find these."""
        torch.ops.oper.keys_set_clock(self._handle, self.tables[name], clock)

    def flush(self) -> None:
        """Make written records visible to lookups; in host memory they already are."""

    def _records(self, writes: bool = False, own: bool = False) -> int:
        """Return the handle by which operators read or write records in host memory; with `own`,
        only those of this rank's buckets."""
        return self._handle

    def num_records(self, name: str, candidates: bool) -> int:
        """Return the number of records of a part: slots of the table, or entries for candidates,
        which are keys that are counted but have no row."""
        slots = self._tables.specs[name].num_rows - 1
        if not candidates:
            return slots
        return num_candidates(slots) if self.rules[name].admit_after > 1 else 0

    def read(self, name: str, part: str, begin: int, end: int) -> torch.Tensor:
        """Return the records `[begin, end)` of a part, int64 [n, 3]: key, count, clock of the last
        occurrence (-1 = empty record). One-sided: no rank may be in an update."""
        return torch.ops.oper.keys_read(
            self._records(), self.tables[name], RECORDS[part], begin, end)

    def changed(self, name: str, part: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the records of a part, in this rank's buckets, that have changed or become empty
        in updates after clock `since`. With several memory domains, only ranks of the first one
        return any, since all copies are equal.

        Returns:
            Their numbers int64 [n], ascending, and the records as `read` returns them.
        """
        since = since if self._domains.is_first else self.clock(name)
        return torch.ops.oper.keys_changed(
            self._records(own=True), self.tables[name], RECORDS[part], since)

    def expired(self, name: str, since: int) -> torch.Tensor:
        """Return the slots in this rank's buckets, int64 [n], ascending, whose keys are past their
        time to live now and were not at clock `since`; with -1, all slots whose keys are past it.
        With several memory domains, only ranks of the first one return any."""
        since = since if self._domains.is_first else self.clock(name)
        return torch.ops.oper.keys_expired(self._records(own=True), self.tables[name], since)

    def write(self, name: str, part: str, numbers: torch.Tensor, records: torch.Tensor,
              checks: bool = False) -> None:
        """Write records of a part, as `read` or `changed` returned them; a barrier must follow.

        Args:
            name: name of the table.
            part: the part, see `RECORDS`.
            numbers: int64 [n], numbers of the records; equal on all ranks.
            records: int64 [n, 3], the records; equal on all ranks.
            checks: only check the records, without writing them.

        Raises:
            InvalidInputError: a record is invalid there.
        """
        if not checks:
            self._history.load()
        bad = self._write(name, part, numbers, records.contiguous(), checks)
        if bad >= 0:
            raise InvalidInputError(
                f"cannot load the {part} of dynamic table {name!r}", f"record {int(numbers[bad])}",
                records[bad].tolist(),
                "a key of this slot's bucket that no earlier record has, a valid count and clock",
                "load a checkpoint of a table with the same rows, seed and admit_after")

    def _write(self, name: str, part: str, numbers: torch.Tensor, records: torch.Tensor,
               checks: bool) -> int:
        """Write records as `write` does; return the index of the first invalid one, or -1."""
        return int(torch.ops.oper.keys_write(self._records(writes=True), self.tables[name],
                                             RECORDS[part], numbers, records, checks))

    def check(self, name: str) -> None:
        """Check this rank's share of a table's records. One-sided: no rank may be in an update.

        Needed after several calls of `write`, each of which compares only the records of its own
        call.

        Raises:
            FileFormatError: two records have the same key, or one is newer than the table's clock.
        """
        clock, group = self.clock(name), self._tables.group
        for part in self.parts(name):
            size = self.num_records(name, RECORDS[part])
            first, end = (size * r // group.world_size for r in (group.rank, group.rank + 1))
            for at in range(first, end, CHUNK_RECORDS):
                # Keys are compared within their buckets, so the first one must be whole.
                begin, stop = max(0, at - KEY_BUCKET_ROWS), min(at + CHUNK_RECORDS, end)
                records = self.read(name, part, begin, stop)
                newest = int(records[:, 2].argmax())
                bad = newest if records[newest, 2] > clock else self._write(
                    name, part, torch.arange(begin, stop), records, checks=True)
                if bad >= 0:
                    raise FileFormatError(
                        f"the deltas of dynamic table {name!r} do not fit its checkpoint",
                        f"{part}, record {begin + bad}", records[bad].tolist(),
                        f"a key that no other record has, a clock of at most {clock}, the table's",
                        "remove the folder of deltas, and load the checkpoint again")

    def counts(self, name: str) -> KeyCounts:
        """Return statistics of the keys of a table. Collective; call it between two batches."""
        found = np.sum(self._tables.all_gather(self.own_counts(name)), axis=0)
        return self.counts_of(name, found.tolist())

    def own_counts(self, name: str) -> list[int]:
        """Return this rank's part of `counts`; `counts_of` takes the sum over all ranks. Reads
        one byte per row of this rank's buckets; call it between two batches."""
        found = list(torch.ops.oper.keys_counts(self._records(), self.tables[name]))
        # All copies of a directory have the same keys; lookups are each rank's own.
        return found if self._domains.is_first else [0] * (len(found) - 2) + found[-2:]

    def counts_of(self, name: str, found: Sequence[int]) -> KeyCounts:
        """Return the `counts` of a table from the sum of all ranks' `own_counts`."""
        slots = self.num_records(name, False)
        occupied, full, *events = found
        return KeyCounts(slots, occupied, num_buckets(slots), full, *events)

    def present_counts(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the counts of the keys in slots `[begin, end)`, int64 [n], halved as
        `DynamicTable.half_life` states; 0 for free slots and expired keys. One-sided: no rank may
        be in an update."""
        rule, clock = self.rules[name], self.clock(name)
        _, counts, clocks = self.read(name, "keys", begin, end).unbind(1)
        if rule.half_life is not None:  # KeyRules::decayed in csrc/common/keys.h
            passed = clock // rule.half_life - clocks // rule.half_life
            counts = counts >> passed.clamp(0, 40)
        oldest = 0 if rule.time_to_live is None else max(0, clock - rule.time_to_live)
        return torch.where(clocks >= oldest, counts, 0)

    def close(self) -> None:
        """Release the directories."""
        self._release()


def _release(handle: int, heap: HostHeap) -> None:
    torch.ops.oper.keys_close(handle)
    heap.close()


def clock_at_end(name: str) -> OperError:
    """Return the error for an update of a table whose clock has reached its end."""
    return OperError(f"cannot update dynamic table {name!r}", "updates", MOST_UPDATES,
                     f"< {MOST_UPDATES}, since its clock has 32 bits",
                     "export its rows to a new table")


def row_seed(name: str, seed: int) -> int:
    """Return the int64 seed of a table's random numbers (admission, new rows), derived from the
    rule's seed and the table's name."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little", signed=True)


def rule_numbers(name: str, num_rows: int, rule: DynamicTable) -> list[int]:
    """Return a table's settings as the first entries of ``TableColumn`` in csrc/bindings/keys.cpp.
    """
    below = 0 if rule.admit_probability == 1 else min(
        max(1, int(rule.admit_probability * 2.0**64)), (1 << 64) - 1)
    signed = below - (1 << 64) if below >> 63 else below
    return [num_rows - 1, rule.seed, row_seed(name, rule.seed), rule.admit_after, signed,
            KEY_EVICTIONS.index(rule.eviction), rule.half_life or 0, rule.time_to_live or 0]


def directory_bytes(num_rows: int, rule: DynamicTable) -> int:
    """Return the size in bytes of a directory of keys for `num_rows` rows, including row 0."""
    load()
    numbers = torch.tensor([[*rule_numbers("", num_rows, rule), -1, 0, 0]])
    of_slots, _ = torch.ops.oper.keys_num_bytes(0, 1, 0, numbers, torch.zeros(1, 2).double())
    return int(of_slots)


def dynamic_rows(num_bytes: int, dim: int, rule: DynamicTable, optimizer: Optimizer,
                 dtype: str = "float32") -> int:
    """Return the largest number of rows, including row 0, of a dynamic table in `num_bytes`.

    Args:
        num_bytes: bytes of rows, optimizer states and directory of keys, over all ranks.
        dim: columns of a row.
        rule: the table's settings.
        optimizer: the table's optimizer.
        dtype: type of the rows, see `oper.TableSpec`.

    Raises:
        InvalidInputError: not even two rows fit, or another argument is invalid.

    Example:
        >>> import oper
        >>> adagrad = oper.RowWiseAdagrad(lr=0.05)
        >>> oper.dynamic_rows(1 << 20, 16, oper.DynamicTable(), adagrad)  # 64 + 4 + 17 bytes each
        12332
    """
    spec = TableSpec("dynamic", 2, dim, dtype=dtype, optimizer=optimizer.name)
    each = spec.row_bytes + spec.state_bytes
    least = 2 * each + directory_bytes(2, rule)
    if not isinstance(num_bytes, int) or num_bytes < least:
        raise InvalidInputError("cannot size a dynamic table", "bytes", num_bytes,
                                f"an integer >= {least}, for two rows of {dim} columns",
                                "give the table more memory")
    sizes = range(2, MAX_ROWS + 1)
    return 1 + bisect.bisect_right(sizes, num_bytes,
                                   key=lambda n: n * each + directory_bytes(n, rule))


def _arguments(tables: Tables, rules: Mapping[str, DynamicTable]
               ) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables' settings for csrc/bindings/keys.cpp: int64 [T, 11] and float64 [T, 2]."""
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
    """Raise InvalidInputError if the tables cannot be dynamic."""
    what = "cannot make tables dynamic"
    if tables.optimizers is None:
        raise InvalidInputError(what, "objective", "inference", "training",
                                "shard for training, and look up without gradients")
    users: dict[str, list[str]] = {}
    for feature, table in tables.features:
        users.setdefault(feature, []).append(table)
    for feature, found in users.items():
        if len(found) > 1 and any(t in rules for t in found):
            raise InvalidInputError(what, f"tables of feature {feature!r}", found,
                                    "one table, since one of these is dynamic",
                                    "use a separate feature for each table")
    for name in rules:
        if tables.specs[name].num_rows < 2:
            raise InvalidInputError(
                what, f"num_embeddings of {name!r}", tables.specs[name].num_rows,
                "at least 2, for the default row and a key", "enlarge the table")
