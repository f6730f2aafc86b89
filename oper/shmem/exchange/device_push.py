"""Push mode between memory domains, for tables in device memory.

A reader sends the slots of its pushed ids to their owners, one bit per id that says where a bag
begins, and weights; an owner sends the bags' partial sums back. Kernels read mirrors of far
readers' requests and of far owners' sums at addresses that change from batch to batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from oper.shmem.exchange.device import DeviceExchange, DeviceRows, Meeting
from oper.shmem.memory.device_batch import unsigned

_HEADER = struct.Struct("<5q")  # RequestHeader in csrc/device/device.h


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a reader asks the owners of pushed rows for; see csrc/device/kernels/push.cu.

    Attributes:
        run_begin: int64 [R + 1], where each bag's ids begin among all.
        slots: int32 [N]; weights: int32 [N], bits of float32, or None.
        first_run, last_run, first_pair, last_pair: int64 [T, W], runs and ids by table, in the
            order of keys, and owner.
        offsets: int64 [T, W], where the owners' sums begin, in floats.
    """

    run_begin: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor | None
    first_run: np.ndarray
    last_run: np.ndarray
    first_pair: np.ndarray
    last_pair: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def read(tables: DeviceRows, address: int) -> Request:
        """The request at an address that this device sees. Waits for the device."""
        T, W = len(tables.directories), tables.group.world_size
        segment_bytes = (4 * (T * W + 1) + 7) // 8 * 8
        size = _HEADER.size + segment_bytes + 8 * T * W
        own = tables.arenas.memory(address, size // 4).view(torch.uint8).cpu().numpy()
        runs, slots_at, begin_at, _, weights_at = _HEADER.unpack(own[:_HEADER.size].tobytes())
        segments = own[_HEADER.size:][:4 * (T * W + 1)].view(np.uint32).astype(np.int64)
        if runs:
            begin = unsigned(tables.arenas.memory(address + begin_at, runs + 1))
        else:
            begin = torch.zeros(1, dtype=torch.int64, device=tables.device)
            segments[:] = 0
        pairs = begin[torch.from_numpy(segments).to(begin.device)].cpu().numpy()
        count = int(pairs[-1])

        def words(at: int) -> torch.Tensor:
            return tables.arenas.memory(address + at, count).view(torch.int32)

        return Request(
            begin, words(slots_at), words(weights_at) if weights_at else None,
            segments[:-1].reshape(T, W), segments[1:].reshape(T, W), pairs[:-1].reshape(T, W),
            pairs[1:].reshape(T, W), own[size - 8 * T * W:].view(np.int64).reshape(T, W))

    def num_pairs(self) -> np.ndarray:
        """Ids by table and owner, int64 [T, W]."""
        return self.last_pair - self.first_pair

    def num_runs(self) -> np.ndarray:
        """Bags by table and owner, int64 [T, W]."""
        return self.last_run - self.first_run


class PushMessages:
    """The two meetings of one forward pass in push mode.

    Args:
        exchange: of the tables.
        tables: the tables; their kernels have published this rank's requests.

    Attributes:
        requests, partials: int64 [W], on the device: addresses of what all ranks ask and sum.
    """

    def __init__(self, exchange: DeviceExchange, tables: DeviceRows) -> None:
        self._exchange = exchange
        self._tables = tables
        self._keep: list[torch.Tensor] = []
        self.requests = tables.arenas.requests.copy()
        self.partials = tables.arenas.partials.copy()
        self._own = Request.read(tables, int(self.requests[tables.group.rank]))

    def exchange_requests(self) -> None:
        """Send this rank's requests to far owners and mirror those of far readers. Collective."""
        x, own = self._exchange, self._own
        counts = own.num_pairs().T.copy()
        counts[[r for r in range(counts.shape[0]) if r not in x.far]] = 0
        asked, weighted = x.meet(Meeting.REQUESTS, counts, own.weights is not None)
        sent, wanted = {}, {}
        for r in x.far:
            parts = [slice(a, b) for a, b in zip(own.first_pair[:, r].tolist(),
                                                 own.last_pair[:, r].tolist(), strict=True)]
            bits = self._bits_to(r)
            sent[r] = [*(own.slots[p] for p in parts), bits]
            x.count("ids", r, 4 * int(counts[r].sum()) + 4 * bits.numel())
            if own.weights is not None:
                sent[r] += [own.weights[p] for p in parts]
                x.count("id_weights", r, 4 * int(counts[r].sum()))
            n = int(asked[r].sum())
            wanted[r] = n + int((-(-asked[r] // 32)).sum()) + (n if weighted[r] else 0)
        got = x.send(sent, wanted, torch.int32)
        self._asked = {r: self._mirror(r, asked[r], got[r], weighted[r]) for r in x.far}

    def _bits_to(self, r: int) -> torch.Tensor:
        """Where bags begin among the ids for an owner, int32 words by table."""
        x, own = self._exchange, self._own
        words = -(-own.num_pairs()[:, r] // 32)
        runs = own.num_runs()[:, r]
        at = 32 * (np.cumsum(words) - words) - own.first_pair[:, r]
        before = np.cumsum(runs) - runs
        begin = x.take(own.run_begin, own.first_run[:, r] - before, runs) + x.spread(at, runs)
        flags = torch.zeros(32 * int(words.sum()), dtype=torch.int64, device=begin.device)
        flags[begin] = 1
        place = torch.arange(32, device=flags.device)
        return (flags.view(-1, 32) << place).sum(1).to(torch.int32)

    def _mirror(self, r: int, n: np.ndarray, message: torch.Tensor, weighted: bool) -> np.ndarray:
        """Lay out a far reader's request; int64 [T], its runs by table."""
        x, tables = self._exchange, self._tables
        total, words = int(n.sum()), -(-n // 32)
        bits = message[total:total + int(words.sum())].to(torch.int64)
        place = torch.arange(32, device=bits.device)
        flagged = torch.nonzero((bits[:, None] >> place & 1).view(-1))[:, 0]
        edges = x.to_device(32 * np.cumsum(words))
        table = torch.searchsorted(edges, flagged, right=True)
        shift = (np.cumsum(n) - n) - 32 * (np.cumsum(words) - words)
        begin = torch.cat([flagged + x.to_device(shift)[table],
                           flagged.new_full((1,), total)]).to(torch.int32)
        runs: np.ndarray = torch.bincount(table, minlength=n.size).cpu().numpy()
        before = np.concatenate([[0], np.cumsum(runs)])
        # As open_request_kernel lays out the sums of this owner.
        floats = -(-runs * self._dims() // 4) * 4
        offsets = np.zeros((n.size, self.requests.size), np.int64)
        offsets[:, tables.group.rank] = np.cumsum(floats) - floats
        slots, weights = message[:total].clone(), message[message.numel() - total:].clone()
        size = _HEADER.size + x.segment_bytes(n.size) + offsets.nbytes
        mirror = torch.empty(size // 8, dtype=torch.int64, device=message.device)
        base = mirror.data_ptr()
        head = _HEADER.pack(int(before[-1]), slots.data_ptr() - base, begin.data_ptr() - base, 0,
                            weights.data_ptr() - base if weighted and total else 0)
        data = bytearray(head + x.own_segments(before) + offsets.tobytes())
        mirror.copy_(torch.frombuffer(data, dtype=torch.int64))
        self._keep += [mirror, slots, begin, weights]
        self.requests[r] = base
        return runs

    def _dims(self) -> np.ndarray:
        return self._exchange.dims

    def exchange_partials(self) -> None:
        """Send far readers the sums of their bags and mirror those of far owners. Collective."""
        x, tables = self._exchange, self._tables
        counts = np.zeros((self.requests.size, self._dims().size), np.int64)
        for r in x.far:
            counts[r] = self._asked[r]
        mine, _ = x.meet(Meeting.PARTIALS, counts)
        part = tables.arenas.partial_bytes // self.requests.size // 16 * 16
        own = int(self.partials[tables.group.rank])
        sent, wanted = {}, {}
        for r in x.far:
            floats = -(-counts[r] * self._dims() // 4) * 4
            at = np.cumsum(floats) - floats
            memory = x.words(own + part * r, int(floats.sum()), torch.float32)
            sent[r] = [memory[a:a + m] for a, m in zip(
                at.tolist(), (counts[r] * self._dims()).tolist(), strict=True)]
            x.count("partial_sums", r, x.answers.itemsize * int((counts[r] * self._dims()).sum()))
            wanted[r] = int((mine[r] * self._dims()).sum())
        got = x.send_numbers(sent, wanted, x.answers)
        for r in x.far:
            sizes = (mine[r] * self._dims()).tolist()
            mirror = got[r].new_empty(int(sum(-(-n // 4) * 4 for n in sizes)) + 4)
            offsets = self._own.offsets[:, r].tolist()
            for values, at in zip(got[r].split(sizes), offsets, strict=True):
                mirror[at:at + values.numel()] = values
            self._keep.append(mirror)
            self.partials[r] = mirror.data_ptr() - part * tables.group.rank
