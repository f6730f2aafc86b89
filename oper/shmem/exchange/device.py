"""The exchange between memory domains for tables in device memory.

What `csrc/host/exchange/exchange.h` is for host memory: the same messages and order of sums; the
same meetings, but that rows and sums of owners travel one after the other. Within a domain kernels
read their peers' memory; ranks of other domains send each other distinct rows, partial sums,
reduced gradients, squares and changed masters by collectives of torch.distributed (NCCL where the
group has it). What a far rank has sent is laid out as a mirror of its outbox, request or partial
sums, which kernels read like a neighbour's.

Collectives need sizes that only the device knows: each meeting waits for the device once or twice,
and such steps cannot be captured in a graph. Gradients of pushed rows travel reduced by row, as
those of other rows do, where the host back end sends bag gradients: the sums are the same.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from oper.errors import InvalidInputError, fail
from oper.messages import MessageBits
from oper.rows.directory import TableDirectory, needs_across
from oper.rows.traffic import SENT
from oper.shmem.batch import raise_status
from oper.shmem.exchange.host import Exchange
from oper.shmem.group.desync import STATE_ACCESS, Spot
from oper.shmem.group.groups import Group
from oper.shmem.memory.device_arenas import DeviceArenas
from oper.shmem.memory.device_batch import StepArrays, key_ranges, unsigned
from oper.shmem.optim.optimizers import Optimizer
from oper.shmem.placement.layout import nearest_replica

_UNIT = 16  # kStagingUnit in csrc/device/device.h
# Words before the counts: phase, sequence, code, culprit, weighted, wire, collection, none. Heads
# are of whole units, see csrc/host/exchange/exchange.h.
_HEAD, _HEAD_UNIT = 8, 256
_COUNTS = 3  # per table, of which one is used here
_OUTBOX = struct.Struct("<4q")  # OutboxHeader in csrc/device/device.h
_WIRES = {32: torch.float32, 16: torch.bfloat16}  # by bits of messages
_NONE = torch.empty(0, dtype=torch.uint8)


class Meeting(enum.IntEnum):
    """As csrc/host/context.h numbers them."""

    GATHER, REQUESTS, PARTIALS, GRADIENTS, SQUARES, REFRESHES = range(6)


class DeviceRows(Protocol):
    """Tables in device memory, as exchanges and counters see them; see `DeviceTables`."""

    arenas: DeviceArenas
    device: torch.device
    directories: list[TableDirectory]
    pieces: dict[str, list[int]]
    group: Group
    optimizers: Mapping[str, Optimizer] | None
    num_squares: int
    order: list[int]
    streams: Any
    updates_at_once: bool

    @property
    def num_refreshed(self) -> np.ndarray: ...
    def found_error(self) -> tuple[int, int, int]: ...
    def synchronize(self) -> None: ...
    def rounds_of_squares(self, table: str) -> int: ...
    def view(self, part: str, piece: int, rank: int) -> torch.Tensor: ...
    def replica_view(self, piece: int, rank: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class FarRows:
    """Rows of other domains that were fetched for a batch; see csrc/device/device.h.

    Attributes:
        stretches: int64 [S, 5], on the device.
        received: uint8, the rows as they came.
        num_rows: distinct rows.
        num_bytes: what they take once they are staged.
    """

    stretches: torch.Tensor
    received: torch.Tensor
    num_rows: int
    num_bytes: int


@dataclass(slots=True)
class _Stretches:
    """Keys of far rows that this rank reads: home slots of one tier at one owner each.

    Attributes:
        rank, table: int64 [S], owner and table in the order of keys; sorted by both.
        bounds: int64 [2, S], first key and end, on the device.
        base: int64 [S], key of the owner's first row of the table.
    """

    rank: np.ndarray
    table: np.ndarray
    bounds: torch.Tensor
    base: np.ndarray


class DeviceExchange(Exchange):
    """Exchange of one collection's tables in device memory with ranks of other memory domains.

    Args:
        group: all ranks. Creation is collective.
        domain_of: index of each rank's domain, by rank.
        collection, bits: see `Exchange`; bits are 32 or 16.
        device: this rank's device.

    Attributes:
        sent: int64 [kinds, W], bytes sent by kind (`SENT`) and receiver.
        answers, gradients: dtypes as which float32 numbers of messages travel.
        num_refreshed: int64 [W, T], masters of far ranks that the last step has changed, by owner
            and by table in the order of keys.
    """

    def __init__(self, group: Any, domain_of: Sequence[int], collection: int, bits: MessageBits,
                 device: torch.device) -> None:
        super().__init__(group, domain_of, collection, bits)
        if 8 in bits.to_json():
            raise InvalidInputError(fail(
                "cannot exchange rows in device memory", "message_bits", bits.to_json(),
                "32 or 16", "choose 16, or keep the tables in host memory"))
        self._heads: list[list[int]] = []  # of a meeting to which not all have come
        self._device = device
        self.far = [r for r in range(group.world_size) if r not in self.members]
        self._size, self._rank = group.world_size, group.rank
        self._sequence = 0
        self._failed: tuple[int, int] | None = None
        self.sent = np.zeros((len(SENT), self._size), np.int64)
        self.num_refreshed = np.zeros((self._size, 0), np.int64)
        self.answers, self.gradients = _WIRES[bits.answers], _WIRES[bits.gradients]
        self._wire = bits.answers << 8 | bits.gradients  # as heads tell it

    # ---- what a plan needs -----------------------------------------------------------------------

    def open(self, tables: DeviceRows) -> dict[str, np.ndarray]:
        """Mirrors of far ranks, as the kernels' maps name them: int64 ``outboxes`` [W] and
        ``touched``, ``squares`` [T, W], 0 for near ranks."""
        self._tables = tables
        directories = tables.directories
        num_tables, size = len(directories), self._size
        self._header = _OUTBOX.size + self.segment_bytes(num_tables) + 8 * num_tables
        self._mirrors = torch.zeros(len(self.far), self._header // 8, dtype=torch.int64,
                                    device=self._device)
        self._nothing = torch.zeros(2, dtype=torch.int32, device=self._device)
        self._squares: dict[tuple[int, int], torch.Tensor] = {}
        outboxes = np.zeros(size, np.int64)
        touched, squares = (np.zeros((num_tables, size), np.int64) for _ in range(2))
        for k, r in enumerate(self.far):
            outboxes[r] = self._mirrors[k].data_ptr()
            touched[:, r] = self._nothing.data_ptr()
            for t, d in enumerate(directories):
                if d.dim != d.table.dim:  # two rounds at most
                    mirror = torch.zeros(2 * int(d.num_slots[r]) + 1, device=self._device)
                    self._squares[t, r] = mirror
                    squares[t, r] = mirror.data_ptr()
        return {"outboxes": outboxes, "touched": touched, "squares": squares}

    def segment_bytes(self, num_tables: int) -> int:
        """Bytes of the bounds by table and owner in outboxes and requests."""
        return (4 * (num_tables * self._size + 1) + 7) // 8 * 8

    def attach(self, handle: int, directories: Sequence[TableDirectory]) -> None:
        """Once the kernels know the tables."""
        self._handle = handle
        self._order: list[int] = torch.ops.oper.device_context_order(handle)
        self._of_key = [directories[t] for t in self._order]  # in the order of keys
        # Rows whose gradients are made of 16-byte parts first: they stay aligned in a message.
        self._row_order = sorted(range(len(self._order)), key=lambda k: self._of_key[k].dim % 4 > 0)
        self.dims = np.array([d.dim for d in self._of_key])
        self._row_bytes = np.array([d.row_bytes for d in self._of_key])
        self._units = -(-self._row_bytes // _UNIT)
        self.needs = needs_across(directories, self._domain_of)
        self._pulled = self._list_stretches(with_pushed=False)
        self._read = self._list_stretches(with_pushed=True)

    def _meetings(self) -> tuple[list[Spot], list[int]]:
        return [Spot(h[6], h[0]) for h in self._heads], [h[1] for h in self._heads]

    def _list_stretches(self, with_pushed: bool) -> _Stretches:
        near = np.isin(np.arange(self._size), self.members)
        found = [(x.owner, x.table, x.begin, x.end, x.base) for x in key_ranges(self._of_key)
                 if x.owner in self.far and nearest_replica(x.tier, self._rank, near) < 0
                 and (with_pushed or x.tier.tier.mode != "push")]
        columns = np.array(sorted(found), np.int64).reshape(-1, 5).T.copy()
        return _Stretches(columns[0], columns[1], self.to_device(columns[2:4]), columns[4])

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """The array on this rank's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    # ---- meetings --------------------------------------------------------------------------------

    def meet(self, what: Meeting, counts: np.ndarray, weighted: bool = False
             ) -> tuple[np.ndarray, list[bool]]:
        """Tell all ranks int64 [W, T] counts; theirs for this rank, and who has weights.

        Raises:
            OperError: what this rank's kernels have found, or another rank's error.
        """
        if self._failed is not None:
            raise_status(*self.check(*self._failed), self._tables.arenas.outbox_bytes, None)
        code, culprit, _ = self._tables.found_error()
        self._sequence += 1
        end = _HEAD + counts.shape[1] * _COUNTS
        width = -(-end // _HEAD_UNIT) * _HEAD_UNIT
        heads = np.zeros((self._size, width), np.uint32)
        heads[:, :_HEAD] = (what, self._sequence, code, culprit & 0xFFFFFFFF, weighted, self._wire,
                            self.collection, 0)
        heads[:, _HEAD:end:_COUNTS] = counts
        theirs = np.zeros_like(heads)
        each = [4 * width] * self._size
        self._guarded(torch.from_numpy(heads.view(np.uint8).reshape(-1)), each,
                      torch.from_numpy(theirs.view(np.uint8).reshape(-1)), each, what)
        self.sent[SENT.index("headers"), self.far] += 4 * width
        if code:
            self._tables.synchronize()  # raises it
        self._look_for_errors(theirs, what)
        return theirs[:, _HEAD:end:_COUNTS].astype(np.int64), [bool(x) for x in theirs[:, 4]]

    def _look_for_errors(self, heads: np.ndarray, what: Meeting) -> None:
        found = None
        for r in reversed(range(self._size)):
            code, culprit = int(heads[r, 2]), int(heads[r, 3])
            if not code:
                continue
            found = (code, culprit) if code in (1, 2, 6) else (6, r)
            if code not in (1, 2, 6):  # the one that all the others speak of
                break
        if found is None:
            ahead = [r for r in range(self._size) if tuple(heads[r, [0, 1, 5, 6]]) != (
                what, self._sequence, self._wire, self.collection)]
            self._heads = heads.tolist()
            found = (8, ahead[0]) if ahead else None
        if found is not None:
            self._failed = found
            raise_status(*self.check(*found), self._tables.arenas.outbox_bytes, None)

    def send(self, parts: dict[int, list[torch.Tensor]], wanted: dict[int, int],
             dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Send each far rank its tensors; `wanted` numbers from each, aligned to 16 bytes."""
        none = torch.empty(0, dtype=dtype, device=self._device)
        mine = torch.cat([none, *(x for r in sorted(parts) for x in parts[r])])
        width = none.element_size()
        there = [width * sum(x.numel() for x in parts.get(r, ())) for r in range(self._size)]
        back = [width * wanted.get(r, 0) for r in range(self._size)]
        received = torch.empty(sum(wanted.values()), dtype=dtype, device=self._device)
        self._guarded(mine.view(torch.uint8), there, received.view(torch.uint8), back)
        found, at = {}, 0
        for r in sorted(wanted):
            part = received[at:at + wanted[r]]
            found[r] = part.clone() if part.data_ptr() % _UNIT else part
            at += wanted[r]
        return found

    def send_numbers(self, parts: dict[int, list[torch.Tensor]], wanted: dict[int, int],
                     wire: torch.dtype) -> dict[int, torch.Tensor]:
        """As `send`, of float32 numbers that travel as `wire`."""
        if wire == torch.float32:
            return self.send(parts, wanted, wire)
        rounded = {r: [x.to(wire) for x in xs] for r, xs in parts.items()}
        return {r: x.float() for r, x in self.send(rounded, wanted, wire).items()}

    def count(self, kind: str, r: int, num_bytes: int) -> None:
        """Note that so many bytes go to rank `r`."""
        self.sent[SENT.index(kind), r] += num_bytes

    def words(self, address: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """This rank's device memory as numbers of 4 bytes."""
        return self._tables.arenas.memory(address, count).view(dtype)

    # ---- forward: distinct rows ------------------------------------------------------------------

    def gather(self, step: StepArrays, skip_pushed: bool, first_byte: int) -> FarRows | None:
        """Fetch the rows of other domains that a planned batch reads, each once. Collective.

        Args:
            step: the step, whose batch is planned.
            skip_pushed: without rows of pushed tiers.
            first_byte: where in the staging memory they begin, a multiple of 16.
        """
        x = self._pulled if skip_pushed else self._read
        keys, _ = step.runs()
        first, last = torch.searchsorted(keys, x.bounds).cpu().numpy()
        counts = np.zeros((self._size, len(self._order)), np.int64)
        np.add.at(counts, (x.rank, x.table), last - first)
        asked, _ = self.meet(Meeting.GATHER, counts)
        some = np.flatnonzero(last > first)
        n, first = (last - first)[some], first[some]
        table = x.table[some]
        before = np.cumsum(n) - n
        slots = self.take(keys, first - before, n) - self.spread(x.base[some], n)
        wanted = {r: int(counts[r].sum()) for r in self.far}
        for r in self.far:
            self.count("row_ids", r, 4 * wanted[r])
        mine = self.send({r: [p] for r, p in zip(self.far, slots.to(torch.int32).split(
            [wanted[r] for r in self.far]), strict=True)},
            {r: int(asked[r].sum()) for r in self.far}, torch.int32)
        received = self._answer(asked, mine, counts)
        num_bytes = n * self._row_bytes[table]
        taken = n * self._units[table]
        stretches = np.stack([before, first, np.cumsum(num_bytes) - num_bytes,
                              first_byte // _UNIT + np.cumsum(taken) - taken, table], 1)
        if not n.size:
            return None
        return FarRows(self.to_device(stretches), received, int(n.sum()),
                       int(taken.sum()) * _UNIT)

    def take(self, values: torch.Tensor, shift: np.ndarray, n: np.ndarray) -> torch.Tensor:
        """`values` at ``shift[s] + i``, where i counts on over all ranges and range s has n[s]."""
        return values[torch.arange(int(n.sum()), device=self._device) + self.spread(shift, n)]

    def spread(self, values: np.ndarray, n: np.ndarray) -> torch.Tensor:
        """`values[s]` repeated n[s] times, for every s."""
        return torch.repeat_interleave(self.to_device(values), self.to_device(n),
                                       output_size=int(n.sum()))

    def _answer(self, asked: np.ndarray, slots: dict[int, torch.Tensor], counts: np.ndarray
                ) -> torch.Tensor:
        """Send the rows that others ask for and receive those asked for here; uint8."""
        pieces = [(r, k) for r in self.far for k in range(len(self._order)) if asked[r, k]]
        n = np.array([asked[r, k] for r, k in pieces], np.int64)
        size = np.array([asked[r, k] * self._row_bytes[k] for r, k in pieces], np.int64)
        at = np.cumsum(size) - size
        packed = torch.empty(int(size.sum()), dtype=torch.uint8, device=self._device)
        if pieces:
            stretches = np.stack([np.cumsum(n) - n, at, np.array([k for _, k in pieces])], 1)
            torch.ops.oper.device_pack_rows(
                self._handle, self.to_device(stretches),
                torch.cat([slots[r] for r in self.far]), packed)
        there, back = ([int((c[r] * self._wire_row_bytes()).sum()) if r in self.far else 0
                        for r in range(self._size)] for c in (asked, counts))
        for r in self.far:
            self.count("rows", r, there[r])
        received = torch.empty(sum(back), dtype=torch.uint8, device=self._device)
        exact = self.answers == torch.float32
        sends = packed if exact else self._rounded(packed, pieces, at, size)
        self._guarded(sends, there, received, back)
        return received if exact else self._unrounded(received, counts)

    def _wire_row_bytes(self) -> np.ndarray:
        rounded = [d.table.dtype == "float32" for d in self._of_key]
        return np.where(rounded, self._row_bytes * self.answers.itemsize // 4, self._row_bytes)

    def _rounded(self, packed: torch.Tensor, pieces: list[tuple[int, int]], at: np.ndarray,
                 size: np.ndarray) -> torch.Tensor:
        """Packed rows with those of float32 as they travel."""
        out = [_NONE.to(self._device)]
        for (_, k), begin, count in zip(pieces, at.tolist(), size.tolist(), strict=True):
            part = packed[begin:begin + count]
            if self._of_key[k].table.dtype == "float32":
                part = part.clone().view(torch.float32).to(self.answers).view(torch.uint8)
            out.append(part)
        return torch.cat(out)

    def _unrounded(self, received: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
        out, at = [_NONE.to(self._device)], 0
        width = self._wire_row_bytes()
        for r in self.far:
            for k in np.flatnonzero(counts[r]).tolist():
                part = received[at:at + int(counts[r, k] * width[k])]
                at += part.numel()
                if self._of_key[k].table.dtype == "float32":
                    part = part.clone().view(self.answers).float().view(torch.uint8)
                out.append(part)
        return torch.cat(out)

    # ---- backward: reduced gradients -------------------------------------------------------------

    def send_gradients(self) -> None:
        """Give far owners the reduced gradients of their rows, and mirror what far ranks have for
        this one. Collective."""
        T, W = len(self._order), self._size
        box = int(self._tables.arenas.outboxes[self._rank])
        own = self._tables.arenas.memory(box, self._header // 4).view(torch.uint8).cpu().numpy()
        slots_at, rows_at, num_runs, _ = _OUTBOX.unpack(own[:_OUTBOX.size].tobytes())
        segments = own[_OUTBOX.size:][:4 * (T * W + 1)].view(np.uint32).astype(np.int64)
        offsets = own[self._header - 8 * T:].view(np.int64)
        begin, end = segments[:-1].reshape(T, W), segments[1:].reshape(T, W)
        counts = np.where(num_runs < 0, 0, (end - begin).T)
        mine, _ = self.meet(Meeting.GRADIENTS, counts * np.isin(np.arange(W), self.far)[:, None])
        slots = self.words(box + slots_at, int(segments[-1]))
        last = max((int(offsets[k] + (end[k, -1] - begin[k, 0]) * self.dims[k])
                    for k in range(T)), default=0)
        rows = self.words(box + rows_at, last, torch.float32)
        sent_slots, sent_rows = {}, {}
        for r in self.far:
            sent_slots[r] = [slots[begin[k, r]:end[k, r]] for k in range(T)]
            sent_rows[r] = [rows[at:at + counts[r, k] * self.dims[k]] for k in self._row_order
                            for at in [offsets[k] + (begin[k, r] - begin[k, 0]) * self.dims[k]]]
            self.count("gradient_rows", r, 4 * int(counts[r].sum()) + self.gradients.itemsize * (
                int((counts[r] * self.dims).sum())))
        got_slots = self.send(sent_slots, {r: int(mine[r].sum()) for r in self.far}, torch.int32)
        got_rows = self.send_numbers(
            sent_rows, {r: int((mine[r] * self.dims).sum()) for r in self.far}, self.gradients)
        headers = []
        for k, r in enumerate(self.far):
            base = self._mirrors[k].data_ptr()
            before = np.concatenate([[0], np.cumsum(mine[r])])
            sizes = (mine[r] * self.dims)[self._row_order]
            at = np.zeros(T, np.int64)
            at[self._row_order] = np.cumsum(sizes) - sizes
            headers.append(b"".join((
                _OUTBOX.pack(got_slots[r].data_ptr() - base, got_rows[r].data_ptr() - base,
                             int(before[-1]), 0),
                self.own_segments(before), at.tobytes())))
        self._mirrors.copy_(torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.int64
                                             ).view_as(self._mirrors))
        self._received = (got_slots, got_rows)  # until the next ones

    def own_segments(self, before: np.ndarray) -> bytes:
        """Segments of a list of which all entries are for this rank; `before`: int64 [T + 1]."""
        segments = np.repeat(before[:-1, None], self._size, axis=1)
        segments[:, self._rank + 1:] = before[1:, None]
        flat = np.append(segments.reshape(-1), before[-1]).astype(np.uint32).tobytes()
        return flat.ljust(self.segment_bytes(len(before) - 1), b"\0")

    # ---- backward: squares of column pieces ------------------------------------------------------

    def send_squares(self, step: StepArrays, round_number: int) -> None:
        """Give far owners of a row's other pieces this one's sums of squares. Collective."""
        tables, directories = self._tables, self._tables.directories
        lists = {t: step.merged_slots(self._of_key, self._order.index(t), self._rank)
                 for t, d in enumerate(directories)
                 if d.dim != d.table.dim and round_number < tables.rounds_of_squares(d.table.name)}
        counts = np.zeros((self._size, len(self._order)), np.int64)
        found: dict[tuple[int, int], np.ndarray] = {}
        for t, slots in lists.items():
            d = directories[t]
            positions = d.positions_at(self._rank, slots)
            owners = np.stack([directories[p].locate(positions)[0]
                               for p in tables.pieces[d.table.name]])
            for r in self.far:
                found[t, r] = slots[(owners == r).any(0)]
                counts[r, self._order.index(t)] = found[t, r].size
        mine, _ = self.meet(Meeting.SQUARES, counts)
        sent_slots: dict[int, list[torch.Tensor]] = {r: [] for r in self.far}
        sent_values: dict[int, list[torch.Tensor]] = {r: [] for r in self.far}
        for r in self.far:
            for t in (t for t in self._order if (t, r) in found):
                here = self.to_device(found[t, r])
                sent_slots[r].append(here.to(torch.int32))
                at = round_number * int(directories[t].num_slots[self._rank])
                sent_values[r].append(tables.arenas.squares(t, tables.num_squares)[here + at])
            self.count("squares", r, 8 * int(counts[r].sum()))
        wanted = {r: int(mine[r].sum()) for r in self.far}
        got_slots = self.send(sent_slots, wanted, torch.int32)
        got_values = self.send(sent_values, wanted, torch.float32)
        for r in self.far:
            sizes = mine[r].tolist()
            for t, there, values in zip(self._order, got_slots[r].split(sizes),
                                        got_values[r].split(sizes), strict=True):
                if there.numel():
                    at = round_number * int(directories[t].num_slots[r])
                    self._squares[t, r][there.to(torch.int64) + at] = values

    # ---- backward: changed masters ---------------------------------------------------------------

    def send_refreshes(self) -> None:
        """Give far replicas the masters that this step has changed. Collective."""
        if not self.needs.refreshes:
            return
        tables, rank = self._tables, self._rank
        counts = np.zeros((self._size, len(self._order)), np.int64)
        slots: dict[tuple[int, int], torch.Tensor] = {}
        for k, d in enumerate(self._of_key):
            replicated = [x for x in d.tiers if x.tier.placement == "replicated"
                          and x.num_rows[rank] and (x.replica_base[self.far] >= 0).any()]
            if not replicated:
                continue
            changed = tables.arenas.touched(self._order[k], rank)
            for r in self.far:
                mine = [changed[(changed >= x.slot_base[rank])
                                & (changed < x.slot_base[rank] + x.num_rows[rank])]
                        for x in replicated if x.replica_base[r] >= 0]
                if mine:
                    slots[k, r] = torch.cat(mine)
                    counts[r, k] = slots[k, r].numel()
        theirs, _ = self.meet(Meeting.REFRESHES, counts)
        self.num_refreshed = theirs
        sent: dict[int, list[torch.Tensor]] = {r: [] for r in self.far}
        for r in self.far:
            for k in np.flatnonzero(counts[r]).tolist():
                found = slots[k, r]
                rows = tables.view("rows", self._order[k], rank)[found]
                head = found.new_full((1,), found.numel())
                sent[r] += [torch.cat([head, found]).to(torch.int32).view(torch.uint8),
                            rows.reshape(-1).view(torch.uint8)]
            self.count("refreshed_rows", r, sum(x.numel() for x in sent[r]))
        got = self.send(sent, {r: int(sum(4 * (n + 1) + n * b for n, b in zip(
            theirs[r].tolist(), self._row_bytes.tolist(), strict=True) if n)) for r in self.far},
            torch.uint8)
        for r in self.far:
            at = 0
            for k in np.flatnonzero(theirs[r]).tolist():
                n, size = int(theirs[r, k]), int(self._row_bytes[k])
                found = unsigned(got[r][at + 4:at + 4 * (n + 1)].clone())
                rows = got[r][at + 4 * (n + 1):at + 4 * (n + 1) + n * size].clone()
                at += 4 * (n + 1) + n * size
                self._refresh(k, r, found, rows)

    def _refresh(self, k: int, owner: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy masters of a far owner into this rank's replicas."""
        d = self._of_key[k]
        replica = self._tables.replica_view(self._order[k], self._rank)
        rows = rows.view(replica.dtype).view(-1, d.dim)
        for x in d.tiers:
            if x.tier.placement != "replicated" or x.replica_base[self._rank] < 0:
                continue
            for turn, who in enumerate(x.pattern.tolist()):
                if who == owner:
                    first = int(x.slot_base[owner])
                    inside = (slots >= first) & (slots < first + int(x.num_rows[owner]))
                    place = (slots[inside] - first) * x.pattern.size + (
                        int(x.replica_base[self._rank]) + turn)
                    replica[place] = rows[inside]

    # ---- rows by slot ----------------------------------------------------------------------------

    def fetch(self, wanted: Any, serve: Callable[[str, int], torch.Tensor],
              phase: int = STATE_ACCESS) -> dict[int, torch.Tensor]:
        """As `Exchange.fetch`; the rows come to host memory."""
        rows: Any = lambda part, piece: _OnHost(serve(part, piece))  # noqa: E731
        return super().fetch(wanted, rows, phase)


class _OnHost:
    """Rows on a device that are copied to host memory when they are asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self.shape, self.dtype = rows.shape, rows.dtype

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        return self._rows[index.to(self._rows.device)].cpu()
