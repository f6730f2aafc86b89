"""Directories of dynamic tables in device memory, see csrc/device/keys.h.

They have the layout of those in host memory (`oper.shmem.keys.directories`), and the same changes.
Checkpoints and statistics read and write them through a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError
from oper.shmem.batch import Lookup, SeenKeys
from oper.shmem.keys.directories import MOST_UPDATES, Keys, clock_at_end
from oper.shmem.keys.late import RowHistory
from oper.shmem.keys.places import BUCKET_BYTES, slots_of_buckets
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.memory.device_heap import DeviceHeap, release
from oper.support.processes import when_dropped
from oper.tables import KEY_BUCKET_ROWS

_STATE_WIDTH = 7  # numbers of `device_keys_state`: the clock, then those of KeyCounter
_ALIGNMENT = 64


@dataclass(slots=True)
class _HostCopy:
    """A copy of all ranks' directories.

    Attributes:
        handle: of the host back end's operators.
        directories: the bytes of each rank's directories.
        is_whole: whether those of other ranks have been copied.
        clocks: by table; an update of the directories would have changed them.
        is_written: whether records have been written, which the device gets by `flush`; each
            rank writes to its own directories only.
    """

    handle: int
    directories: list[torch.Tensor]
    is_whole: bool
    clocks: list[int]
    is_written: bool = False


class DeviceKeys(Keys):
    """`Keys` of tables in device memory. Creation is collective.

    Lookups and updates do not wait for the device.

    Args:
        tables: `DeviceTables`, with optimizers.
        rules: settings of the dynamic tables, by table name.
        seen_bytes: memory for the distinct keys of a rank's batch, 12 bytes each; the same on all
            ranks.

    Raises:
        InvalidInputError: a table cannot be dynamic, or there are several memory domains.
        OperError: there is not enough memory for the directories.
    """

    def __init__(self, tables: Any, rules: Mapping[str, DynamicTable], seen_bytes: int) -> None:
        if not tables.is_one_domain:
            raise InvalidInputError(
                "cannot make tables in device memory dynamic", "memory domains",
                len(tables.domains), "1: all GPUs can address each other's memory",
                "train on the GPUs of one host, or in host memory")
        self._seen_bytes = seen_bytes
        self._copy: _HostCopy | None = None
        self._most_updates = 0  # no table's clock is higher
        super().__init__(tables, rules)

    def _open(self, tables: Any) -> None:
        operators, group, self._streams = torch.ops.oper, tables.group, tables.streams
        sizes = [operators.device_keys_num_bytes(rank, group.world_size, self._seen_bytes,
                                                 *self._arguments)
                 for rank in range(group.world_size)]
        self._directory_bytes, of_slots, of_arenas = zip(*sizes, strict=True)
        self.num_bytes = sum(of_slots)
        self._heap: Any = DeviceHeap(group, list(of_arenas), tables.device)
        self._handle = int(operators.device_keys_open(
            tables.handle, self._heap.addresses, self._seen_bytes, *self._arguments,
            self._table_of))
        tables.barrier()  # before ranks look up in each other's directories
        self._last = partial(_last_changes, self._handle, self._tables)
        self._history = RowHistory(self._last)
        self._find = operators.device_keys_find.default
        self._leave = operators.device_keys_leave.default
        self._release = when_dropped(
            self, release, self._heap, partial(operators.device_keys_close, self._handle))

    def _find_keys(self, batch: Lookup, trains: bool) -> tuple[Any, ...]:
        streams = self._streams
        # The host would not know of a replay's updates, so rows could get other keys' gradients.
        if streams is not None and streams.is_current_stream_capturing():
            self.refuse("cannot capture a lookup in a graph", "run these steps outside graphs")
        return self._find(
            self._handle, self._tables.handle, batch.ids, batch.lengths, batch.key_of,
            batch.batch_size, trains)

    # ---- updates ---------------------------------------------------------------------------------

    def leave(self, batch: Lookup, frozen: frozenset[str]) -> None:
        """See `Keys.leave`. Kernels recognise frozen tables by their optimizers' arguments, and
        find keys that do not fit their memory; the error is then raised later."""
        try:
            self._check_rows(batch)
            if batch.batch_size:  # else the batch may stand for one that this rank has refused
                self._check_clocks()
            self._leave(self._handle, self._tables.handle, [s.found[0] for s in batch.seen],
                        [s.found[1] for s in batch.seen],
                        len({s.updates for s in batch.seen}) > 1)
        except OperError:
            self._tables.refuse()
            raise

    def _parts(self, seen: SeenKeys) -> list[tuple[int, int, int]]:
        tables, sizes = torch.unique_consecutive(seen.found[1] >> 1, return_counts=True)
        ends = sizes.cumsum(0)
        return [(table, end - size, end) for table, size, end in zip(
            tables.tolist(), sizes.tolist(), ends.tolist(), strict=True)
            if table < len(self.tables)]

    def _check_clocks(self) -> None:
        if self._most_updates < MOST_UPDATES:
            return
        clocks = self._state()[::_STATE_WIDTH]
        for name, number in self.tables.items():
            if clocks[number] >= MOST_UPDATES:
                raise clock_at_end(name)
        self._most_updates = max(clocks)

    def note_update(self) -> None:
        super().note_update()
        self._most_updates += 1
        self._drop_copy()

    # ---- state -----------------------------------------------------------------------------------

    def _state(self) -> list[int]:
        """Return `_STATE_WIDTH` numbers for each table; waits for the device."""
        return list(torch.ops.oper.device_keys_state(self._handle, self._tables.handle))

    def clock(self, name: str) -> int:
        return self._state()[self.tables[name] * _STATE_WIDTH]

    def set_clock(self, name: str, clock: int) -> None:
        self.flush()
        torch.ops.oper.device_keys_set_clock(self._handle, self._tables.handle,
                                             self.tables[name], clock)
        self._most_updates = max(self._most_updates, clock)

    def flush(self) -> None:
        if self._copy is not None and self._copy.is_written:
            rank = self._tables.group.rank
            self._on_device(rank).copy_(self._copy.directories[rank])
        self._drop_copy()

    def _records(self, writes: bool = False, own: bool = False) -> int:
        clocks = self._state()[::_STATE_WIDTH]
        copy = self._copy
        if copy is None or copy.clocks != clocks or (copy.is_written and not writes) or not (
                copy.is_whole or own):
            self._drop_copy()
            copy = self._copy = self._copied(clocks, own)
        return copy.handle

    def _copied(self, clocks: list[int], own: bool) -> _HostCopy:
        operators, group = torch.ops.oper, self._tables.group
        addresses, directories = [], []
        for rank, num_bytes in enumerate(self._directory_bytes):
            _, size = operators.keys_num_bytes(rank, group.world_size, 0, *self._arguments)
            memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            first = -memory.data_ptr() % _ALIGNMENT
            directories.append(memory[first:first + num_bytes])
            addresses.append(memory.data_ptr() + first)
        handle = int(operators.keys_open(addresses, group.rank, 0, *self._arguments,
                                         self._table_of))
        for rank, directory in enumerate(directories):
            if rank == group.rank or not own:
                directory.copy_(self._on_device(rank))
        for table, clock in enumerate(clocks):
            operators.keys_set_clock(handle, table, clock)
        return _HostCopy(handle, directories, not own, clocks)

    def _on_device(self, rank: int) -> torch.Tensor:
        """Return a view of a rank's directories, uint8 [bytes]."""
        return self._bytes_at(self._heap.addresses[rank], self._directory_bytes[rank])

    def _bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a view of device memory, uint8 [num_bytes]; `num_bytes` is a multiple of 4."""
        arenas: Any = self._tables.arenas  # type: ignore[attr-defined]
        return arenas.memory(address, num_bytes // 4).view(torch.uint8)

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            torch.ops.oper.keys_close(copy.handle)

    def write(self, name: str, part: str, numbers: torch.Tensor, records: torch.Tensor,
              checks: bool = False) -> None:
        super().write(name, part, numbers, records, checks)
        if not checks:
            assert self._copy is not None
            self._copy.is_written = True  # `flush` copies all records to the device at once

    def own_counts(self, name: str) -> list[int]:
        at = self.tables[name] * _STATE_WIDTH
        events = self._state()[at + 1:at + _STATE_WIDTH]
        address, first, end = torch.ops.oper.device_keys_own(self._handle, self.tables[name])
        if first == end:
            return [0, 0, *events]
        buckets = self._bytes_at(address, (end - first) * BUCKET_BYTES).view(-1, BUCKET_BYTES)
        held = (buckets[:, :KEY_BUCKET_ROWS] != 0).sum(1)  # slots with a tag have a key
        begins, ends = slots_of_buckets(np.arange(first, end), self.num_records(name, False))
        full = held == torch.from_numpy(ends - begins).to(held.device)
        return [int(held.sum()), int(full.sum()), *events]

    def close(self) -> None:
        self._drop_copy()
        super().close()


def _last_changes(handle: int, tables: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the rows and bounds that `RowHistory` reads, without the keys."""
    rows, bounds = torch.ops.oper.device_keys_new(handle, tables.handle)
    return rows[:, None], bounds
