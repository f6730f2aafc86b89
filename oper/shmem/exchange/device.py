"""The exchange between memory domains for tables in device memory.

Phases, headers, messages and checks are those of the host back end (csrc/common/exchange.h). Within
a domain kernels read their peers' memory. Data from *remote* ranks, those of other domains, is
received into *shadow receive buffers* with the form of those ranks' send buffers, requests and
partial sums, so kernels read it in the same way. One kernel packs messages, another unpacks them;
collectives of torch.distributed (NCCL if available) send them.

Collectives need message sizes that only the device knows: each phase waits for the device once or
twice, and such steps cannot be captured in a CUDA graph. Gradients of pushed rows are reduced by
row before they are sent, like all others; the host back end sends bag gradients instead. The sums
are the same. A row's *key* is the number by which kernels sort rows (`Table` in
csrc/device/device.h), not a raw id. Arrays "in the order of keys" list the tables, or their column
pieces, as `device_context_order` returns them.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.messages import MessageBits
from oper.rows.directory import TableDirectory, nearest_replica, needs_across
from oper.shmem.batch import raise_status
from oper.shmem.exchange.host import Exchange
from oper.shmem.group.status import Status
from oper.shmem.memory.device_arenas import DeviceArenas
from oper.shmem.memory.device_batch import StepArrays, key_ranges
from oper.shmem.protocol import Tables

_UNIT = 16  # kStagingUnit in csrc/device/device.h
_COUNTS = 3  # per table, Messages::kCounts
_SEND_BUFFER = struct.Struct("<4q")  # SendBufferHeader in csrc/device/device.h


def segment_bytes(num_tables: int, world_size: int) -> int:
    """Return the size in bytes of the array of segment bounds in a send buffer or a request."""
    return (4 * (num_tables * world_size + 1) + 7) // 8 * 8


class Phase(enum.IntEnum):
    """Phases of the exchange, numbered as in csrc/common/exchange.h."""

    GATHER, REQUESTS, PARTIALS, GRADIENTS, SQUARES, REFRESHES = range(6)


class DeviceRows(Tables, Protocol):
    """The interface of `DeviceTables` that exchanges and counters use."""

    arenas: DeviceArenas
    pieces: dict[str, list[int]]
    num_squares: int
    order: list[int]
    streams: Any
    updates_at_once: bool

    @property
    def num_refreshed(self) -> np.ndarray: ...
    def found_error(self) -> tuple[int, int, int]: ...
    def synchronize(self) -> None: ...
    def rounds_of_squares(self, table: str) -> int: ...


@dataclass(slots=True)
class _RemoteRanges:
    """Ranges of keys of the remote rows that this rank reads, one per tier and owner; S ranges.

    Attributes:
        rank, table: int64 [S], owner, and table in the order of keys; sorted by owner, then table.
        bounds: int64 [2, S], first key, and last key + 1, on the device.
        base: int64 [S], key of the owner's first row of the table.
    """

    rank: np.ndarray
    table: np.ndarray
    bounds: torch.Tensor
    base: np.ndarray


class DeviceExchange(Exchange):
    """Exchange of one collection's tables in device memory with ranks of other memory domains.

    Args:
        tables: the tables of this rank. Creation is collective.
        domain_of: index of each rank's domain, by rank.
        collection, bits: see `Exchange`; bits must be 32 or 16.

    Attributes:
        remote: ranks of other domains, ascending.
        rank, device: this rank, and its device.
        order: indices of the plan's column pieces, sorted by key.
        of_key: directories of the column pieces, in that order.
        dims: int64 [T], numbers of columns of the pieces, in that order.
        num_refreshed: int64 [W, T], number of changed master rows that each owner sent in the last
            step, by column piece in that order.

    Raises:
        InvalidInputError: `bits` has 8 or 4, or ranks have different `bits`.
    """

    _operators = "device_exchange"

    def __init__(self, tables: DeviceRows, domain_of: Sequence[int], collection: int,
                 bits: MessageBits) -> None:
        group = tables.group
        super().__init__(group, domain_of, collection, bits)
        if any({4, 8} & {*x} for x in ((bits.answers, bits.gradients), *bits.tables)):
            raise InvalidInputError("cannot exchange rows in device memory", "message_bits",
                                    bits.to_json(), "32 or 16",
                                    "choose 16, or keep the tables in host memory")
        self._tables, self.device = tables, tables.device
        self.remote = [r for r in range(group.world_size) if r not in self.members]
        self._size, self.rank = group.world_size, group.rank
        self._failed: tuple[int, int] | None = None
        self.num_refreshed = np.zeros((self._size, 0), np.int64)

    # ---- setup -----------------------------------------------------------------------------------

    def attach(self, handle: int, directories: Sequence[TableDirectory]) -> None:
        """Register this exchange with the kernel context `handle` of a plan."""
        self._handle = handle
        self.order: list[int] = torch.ops.oper.device_context_order(handle)
        self.of_key = [directories[t] for t in self.order]  # in the order of keys
        self.dims = np.array([d.dim for d in self.of_key])
        self._row_bytes = np.array([d.row_bytes for d in self.of_key])
        arenas = self._tables.arenas
        self._rows = (arenas.addresses[self.rank] + arenas.layout.rows[self.order, self.rank])
        self.needs = needs_across(directories, self._domain_of)
        self._pulled = self._list_ranges(with_pushed=False)
        self._read = self._list_ranges(with_pushed=True)
        torch.ops.oper.device_context_set_exchange(
            handle, self._bits_of(self.of_key), self.collection)
        self._callback_at = ctypes.cast(self.callback, ctypes.c_void_p).value

    def _list_ranges(self, with_pushed: bool) -> _RemoteRanges:
        local = np.isin(np.arange(self._size), self.members)
        found = [(x.owner, x.table, x.begin, x.end, x.base) for x in key_ranges(self.of_key)
                 if x.owner in self.remote and nearest_replica(x.tier, self.rank, local) < 0
                 and (with_pushed or x.tier.tier.mode != "push")]
        columns = np.array(sorted(found), np.int64).reshape(-1, 5).T.copy()
        return _RemoteRanges(columns[0], columns[1], self.to_device(columns[2:4]), columns[4])

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to this rank's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # ---- phases ----------------------------------------------------------------------------------

    def counts(self) -> np.ndarray:
        """Return zeros for the counts that `begin` sends: int64 [W, T, 3] by receiver and table in
        the order of keys, see csrc/common/exchange.h."""
        return np.zeros((self._size, len(self.order), _COUNTS), np.int64)

    def begin(self, phase: Phase, counts: np.ndarray, weighted: bool = False) -> np.ndarray:
        """Begin a phase: send `counts` to the remote ranks; returns their counts for this rank.

        Args:
            phase: the phase.
            counts: int64 [W, T, 3], see `counts`.
            weighted: whether the ids of this phase have per-sample weights.

        Returns:
            int64 [W, T, 3], by sender and table in the order of keys.

        Raises:
            OperError: kernels of this rank have found an error, or another rank reports one.
        """
        send_buffer_bytes = self._tables.arenas.send_buffer_bytes
        if self._failed is not None:
            raise_status(*self.check(*self._failed), send_buffer_bytes)
        code, culprit, _ = self._tables.found_error()
        theirs, *found = torch.ops.oper.device_exchange_headers(
            self._handle, phase, weighted, code, culprit, torch.from_numpy(counts),
            self._callback_at)
        if code:
            self._tables.synchronize()  # raises the kernels' error
        if found[0]:
            self._stop(found[0], found[1])
        return theirs.numpy()

    def refuse(self, rank: int) -> NoReturn:
        """Raise the error that `rank` has sent invalid data."""
        self._stop(Status.IMPOSSIBLE_MESSAGE, rank)

    def _stop(self, code: int, detail: int) -> NoReturn:
        if code != Status.TRANSPORT_FAILED:
            self._failed = code, detail
        raise_status(*self.check(code, detail), self._tables.arenas.send_buffer_bytes)

    def exchange(self, *sources: tuple[Any, Any], is_reply: bool = False,
                 targets: Sequence[Any] = ()) -> tuple[np.ndarray, torch.Tensor]:
        """Exchange the arrays of a phase; `begin` has exchanged their sizes. Collective.

        Args:
            sources: for each array, addresses of this rank's data, and of the row numbers (uint32)
                by which to gather it, or 0 if it is contiguous; int64 [W, T] or broadcastable.
            is_reply: whether these arrays answer the arrays of the last call.
            targets: for each array, addresses at which to store it, in the same form. If 0, it is
                stored in new memory at a multiple of 16 bytes; kernels then get the addresses of
                gradients and changed master rows.

        Returns:
            Addresses of the received arrays, int64 [arrays, W, T]; and the new memory.
        """
        shape = (len(sources), self._size, len(self.order))
        data, rows, there = (np.zeros(shape, np.int64) for _ in range(3))
        for k, source in enumerate(sources):
            data[k], rows[k] = source
        for k, target in enumerate(targets):
            there[k] = target
        ops = torch.ops.oper
        sent, received, send_bytes, recv_bytes = ops.device_exchange_pack(
            self._handle, is_reply, torch.from_numpy(data), torch.from_numpy(rows))
        self._guarded(sent, send_bytes.tolist(), received, recv_bytes.tolist())
        return there, ops.device_exchange_place(self._handle, received, torch.from_numpy(there))

    @staticmethod
    def starts(memory: torch.Tensor, sizes: np.ndarray) -> np.ndarray:
        """Return the addresses, int64 [W, T], of consecutive parts of `memory` with `sizes` (int64
        [W, T]) 4-byte words each."""
        flat = sizes.reshape(-1)
        return memory.data_ptr() + 4 * (np.cumsum(flat) - flat).reshape(sizes.shape)

    def words(self, address: int, count: int) -> torch.Tensor:
        """Return device memory as a view int32 [count]."""
        return self._tables.arenas.memory(address, count).view(torch.int32)

    # ---- forward: distinct rows ------------------------------------------------------------------

    def gather(self, step: StepArrays, skip_pushed: bool, first_byte: int) -> None:
        """Fetch each remote row that the batch reads once into the staging memory. Collective.

        Args:
            step: arrays of the current step, in which the batch's distinct rows are known.
            skip_pushed: whether to leave out rows of pushed tiers.
            first_byte: offset of the fetched rows in the staging memory, a multiple of 16.
        """
        x = self._pulled if skip_pushed else self._read
        keys, _ = step.runs()
        first, last = torch.searchsorted(keys, x.bounds).cpu().numpy()
        counts = self.counts()
        np.add.at(counts[..., 0], (x.rank, x.table), last - first)
        asked = self.begin(Phase.GATHER, counts)[..., 0]
        some = np.flatnonzero(last > first)
        n, first = (last - first)[some], first[some]
        rank, table = x.rank[some], x.table[some]
        before = np.cumsum(n) - n
        slots = (self.take(keys, first - before, n) - self.spread(x.base[some], n)).to(torch.int32)
        wanted = self.starts(slots, counts[..., 0])
        theirs = torch.empty(int(asked.sum()), dtype=torch.int32, device=self.device)
        places, _ = self.exchange((wanted, 0), targets=[self.starts(theirs, asked)])
        (received,), memory = self.exchange((self._rows, places[0]), is_reply=True)
        if not n.size:
            return
        # Index of a range's first row among the rows of the same owner and table.
        inside = before - (wanted[rank, table] - slots.data_ptr()) // 4
        from_byte = received[rank, table] - memory.data_ptr() + inside * self._row_bytes[table]
        taken = n * -(-self._row_bytes[table] // _UNIT)
        to_unit = first_byte // _UNIT + np.cumsum(taken) - taken
        torch.ops.oper.device_receive_rows(  # columns as in RemoteRows, csrc/device/device.h
            self._handle, self.to_device(np.stack([before, first, from_byte, to_unit, table], 1)),
            memory, int(n.sum()), int(taken.sum()) * _UNIT)

    def take(self, values: torch.Tensor, shift: np.ndarray, n: np.ndarray) -> torch.Tensor:
        """Return ``values[i + shift[s(i)]]`` for i = 0..sum(n)-1, where s(i) is the range that
        entry i belongs to: range s has n[s] consecutive entries."""
        return values[torch.arange(int(n.sum()), device=self.device) + self.spread(shift, n)]

    def spread(self, values: np.ndarray, n: np.ndarray) -> torch.Tensor:
        """Repeat each ``values[s]`` n[s] times, on the device."""
        return torch.repeat_interleave(self.to_device(values), self.to_device(n),
                                       output_size=int(n.sum()))

    # ---- backward: reduced gradients -------------------------------------------------------------

    def send_gradients(self) -> None:
        """Send the reduced gradients of remote rows to their owners. Collective."""
        T, W = len(self.order), self._size
        box = int(self._tables.arenas.send_buffers[self.rank])
        size = _SEND_BUFFER.size + segment_bytes(T, W) + 8 * T
        own = self.words(box, size // 4).cpu().numpy().view(np.uint8)
        slots_at, rows_at, num_runs, _ = _SEND_BUFFER.unpack(own[:_SEND_BUFFER.size].tobytes())
        segments = own[_SEND_BUFFER.size:][:4 * (T * W + 1)].view(np.uint32).astype(np.int64)
        offsets = own[size - 8 * T:].view(np.int64)
        begin, end = (x.reshape(T, W).T for x in (segments[:-1], segments[1:]))
        counts = self.counts()
        if num_runs >= 0:  # else the send buffer is full
            counts[self.remote, :, 0] = (end - begin)[self.remote]
        self.begin(Phase.GRADIENTS, counts)
        _, self._received = self.exchange(  # memory is needed until the next step's gradients
            (box + slots_at + 4 * begin, 0),
            (box + rows_at + 4 * (offsets + (begin - begin[0]) * self.dims), 0))

    # ---- backward: squares of column pieces, see device_squares.py -------------------------------

    def squares_at(self, round_number: int) -> np.ndarray:
        """Return where ranks store sums of squares in the exchange `round_number` of a step.

        Returns:
            int64 [T, W]: for each table and rank of this domain, the address of the sum (float32)
            of the rank's slot 0, which those of slots 1, 2, ... follow. Undefined for ranks of
            other domains.
        """
        arenas = self._tables.arenas
        num_slots = np.array([d.num_slots for d in self.of_key])
        return (np.array(arenas.addresses) + arenas.layout.squares[self.order]
                + 4 * round_number * num_slots)

    def add_up(self, out: np.ndarray, first: np.ndarray, terms: np.ndarray) -> None:
        """Store for each i the sum of the float32 numbers at the addresses
        ``terms[first[i]:first[i + 1]]``, added in this order, at address ``out[i]``."""
        torch.ops.oper.device_add_up(
            self._handle, *(self.to_device(x) for x in (out, first, terms)))

    def copy_numbers(self, out: np.ndarray, source: np.ndarray) -> None:
        """Copy the float32 numbers at the addresses `source` to the addresses `out`; int64 [n]."""
        self.add_up(out, np.arange(out.size + 1), source)

    # ---- backward: changed masters ---------------------------------------------------------------

    def send_refreshes(self) -> None:
        """Send master rows that this step has changed to remote ranks with replicas. Collective."""
        if not self.needs.refreshes:
            return
        counts, lists = self.counts(), [torch.empty(0, dtype=torch.int64, device=self.device)]
        changed = {k: self._tables.arenas.touched(t, self.rank)
                   for k, t in enumerate(self.order)
                   if any(x.tier.placement == "replicated" for x in self.of_key[k].tiers)}
        for r in self.remote:
            for k, slots in changed.items():
                mine = torch.cat([lists[0], *(
                    slots[(slots >= x.slot_base[self.rank])
                          & (slots < x.slot_base[self.rank] + x.num_rows[self.rank])]
                    for x in self.of_key[k].tiers
                    if x.tier.placement == "replicated" and x.replica_base[r] >= 0)])
                if mine.numel():
                    counts[r, k, 0] = mine.numel()
                    lists += [mine.new_full((1,), mine.numel()), mine]
        self.num_refreshed = self.begin(Phase.REFRESHES, counts)[..., 0]
        listed = torch.cat(lists).to(torch.int32)
        at = self.starts(listed, counts[..., 0] + (counts[..., 0] > 0))
        _, self._refreshed = self.exchange((at, 0), (self._rows, at + 4))
