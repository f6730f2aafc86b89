"""Push mode between memory domains, for tables in device memory.

A reader sends the owners of its pushed ids the ids' slots, one bit per id that marks the first id
of a bag, and weights; an owner returns the partial sums of the bags. Requests and sums of remote
ranks are stored in shadow receive buffers (`oper.shmem.exchange.device`), whose addresses change
with each batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from oper.shmem.batch import raise_status
from oper.shmem.exchange.device import DeviceExchange, DeviceRows, Phase, segment_bytes
from oper.shmem.group.status import Status
from oper.shmem.memory.device_batch import unsigned

_HEADER = struct.Struct("<5q")  # RequestHeader in csrc/device/device.h


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A reader's request to the owners of pushed rows; see csrc/device/kernels/push.cu.

    A *run* is the ids of one bag that belong to one table and owner.

    Attributes:
        run_begin: int64 [R + 1], index of each run's first id, then the number of ids.
        slots, weights: addresses of uint32 [N], and of float32 [N] or 0 without weights.
        first_run, last_run, first_pair, last_pair: int64 [T, W], bounds of the runs and of the ids
            of each table (in the order of keys) and owner.
    """

    run_begin: torch.Tensor
    slots: int
    weights: int
    first_run: np.ndarray
    last_run: np.ndarray
    first_pair: np.ndarray
    last_pair: np.ndarray

    @staticmethod
    def read(tables: DeviceRows, address: int) -> Request:
        """Read the request at an address that this device can access. Waits for the device."""
        T, W = len(tables.directories), tables.group.world_size
        size = _HEADER.size + 4 * (T * W + 1)
        own = tables.arenas.memory(address, size // 4).view(torch.uint8).cpu().numpy()
        runs, slots_at, begin_at, _, weights_at = _HEADER.unpack(own[:_HEADER.size].tobytes())
        segments = own[_HEADER.size:].view(np.uint32).astype(np.int64)
        if runs:
            begin = unsigned(tables.arenas.memory(address + begin_at, runs + 1))
        else:
            begin = torch.zeros(1, dtype=torch.int64, device=tables.device)
            segments[:] = 0
        pairs = begin[torch.from_numpy(segments).to(begin.device)].cpu().numpy()
        return Request(begin, address + slots_at, weights_at and address + weights_at,
                       segments[:-1].reshape(T, W), segments[1:].reshape(T, W),
                       pairs[:-1].reshape(T, W), pairs[1:].reshape(T, W))

    def num_pairs(self) -> np.ndarray:
        """Return the number of ids by table and owner, int64 [T, W]."""
        return self.last_pair - self.first_pair

    def num_runs(self) -> np.ndarray:
        """Return the number of runs by table and owner, int64 [T, W]."""
        return self.last_run - self.first_run


class PushMessages:
    """The two phases of one forward pass in push mode.

    Args:
        exchange: the exchange of the tables.
        tables: the tables, whose kernels have written this rank's requests.

    Attributes:
        requests, partials: int64 [W], device addresses of all ranks' requests and partial sums.
    """

    def __init__(self, exchange: DeviceExchange, tables: DeviceRows) -> None:
        self._exchange = exchange
        self._tables = tables
        self._keep: list[torch.Tensor] = []
        self.requests = tables.arenas.requests.copy()
        self.partials = tables.arenas.partials.copy()

    def exchange_requests(self) -> None:
        """Send this rank's requests to remote owners, and store the requests of remote readers in
        shadow receive buffers. Collective."""
        x = self._exchange
        own = Request.read(self._tables, int(self.requests[self._tables.group.rank]))
        counts = x.counts()
        counts[x.remote, :, 0] = own.num_pairs().T[x.remote]
        counts[x.remote, :, 2] = own.num_runs().T[x.remote]
        asked = x.begin(Phase.REQUESTS, counts, own.weights != 0)
        ids, self._runs = asked[..., 0], asked[..., 2]
        bits = self._bits(own)
        first = 4 * own.first_pair.T
        slots, words, weights = (
            torch.empty(int(n.sum()), dtype=torch.int32, device=self._tables.device)
            for n in (ids, _words(ids), ids))
        places, _ = x.exchange(
            (own.slots + first, 0), (x.starts(bits, _words(counts[..., 0])), 0),
            (own.weights + first, 0),
            targets=[x.starts(slots, ids), x.starts(words, _words(ids)), x.starts(weights, ids)])
        self._keep += [slots, weights]
        split = [int(_words(ids[r]).sum()) for r in x.remote]
        for r, part in zip(x.remote, words.split(split), strict=True):
            self._store_request(r, ids[r], self._begins(r, ids[r], part),
                                int(places[0, r, 0]), int(places[2, r].max()) and int(
                                    weights.data_ptr() + 4 * ids[:r].sum()))

    def _bits(self, own: Request) -> torch.Tensor:
        """Return the bits that mark the first id of each run, for remote owners.

        The result is int32 words, padded to complete words for each owner and table.
        """
        x = self._exchange
        pairs, runs, first_pair, first_run = (n.T[x.remote].reshape(-1) for n in (
            own.num_pairs(), own.num_runs(), own.first_pair, own.first_run))
        words = _words(pairs)
        at = 32 * (np.cumsum(words) - words) - first_pair
        begin = x.take(own.run_begin, first_run - (np.cumsum(runs) - runs), runs) + x.spread(
            at, runs)
        flags = torch.zeros(32 * int(words.sum()), dtype=torch.int64, device=begin.device)
        flags[begin] = 1
        place = torch.arange(32, device=flags.device)
        return (flags.view(-1, 32) << place).sum(1).to(torch.int32)

    def _begins(self, r: int, n: np.ndarray, words: torch.Tensor) -> torch.Tensor:
        """Decode the bits that remote reader `r` has sent.

        Args:
            r: the reader.
            n: int64 [T], number of its ids by table.
            words: int32, its bits, padded to complete words for each table.

        Returns:
            int32 [R + 1], index of the first id of each run, then the number of ids.
        """
        x, runs = self._exchange, self._runs[r]
        place = torch.arange(32, device=words.device)
        flagged = torch.nonzero((words.to(torch.int64)[:, None] >> place & 1).view(-1))[:, 0]
        if flagged.numel() != runs.sum():
            raise_status(*x.check(Status.IMPOSSIBLE_MESSAGE, r), 0)
        padded = 32 * _words(n)
        shift = (np.cumsum(n) - n) - (np.cumsum(padded) - padded)
        return torch.cat([flagged + x.spread(shift, runs), flagged.new_full((1,), int(n.sum()))]
                         ).to(torch.int32)

    def _store_request(self, r: int, n: np.ndarray, begin: torch.Tensor, slots: int, weights: int
                       ) -> None:
        """Write the header and bounds of remote reader r's request to a shadow receive buffer.

        Args:
            r: the reader's rank.
            n: int64 [T], number of its ids by table.
            begin: first id of each bag, int32 on this device.
            slots, weights: addresses of the received slots and weights (0 = no weights).
        """
        x, runs, rank = self._exchange, self._runs[r], self._tables.group.rank
        # Offsets of this owner's sums, as open_request_kernel computes them.
        floats = -(-runs * x.dims // 4) * 4
        offsets = np.zeros((n.size, self.requests.size), np.int64)
        offsets[:, rank] = np.cumsum(floats) - floats
        num_bytes = segment_bytes(*offsets.shape)
        size = _HEADER.size + num_bytes + offsets.nbytes
        shadow = torch.empty(size // 8, dtype=torch.int64, device=begin.device)
        base = shadow.data_ptr()
        head = _HEADER.pack(int(runs.sum()), slots - base, begin.data_ptr() - base, 0,
                            weights and weights - base)
        # This rank is the only owner in this copy.
        before = np.cumsum(runs)[:, None] - runs[:, None]
        segments = before + runs[:, None] * (np.arange(self.requests.size) > rank)
        bounds = np.append(segments, runs.sum()).astype(np.uint32).tobytes()
        shadow.copy_(torch.frombuffer(
            bytearray(head + bounds.ljust(num_bytes, b"\0") + offsets.tobytes()),
            dtype=torch.int64))
        self._keep += [shadow, begin]
        self.requests[r] = base

    def exchange_partials(self) -> None:
        """Send the sums of bags to their remote readers, and store the sums of remote owners in
        shadow receive buffers. Collective."""
        x, rank = self._exchange, self._tables.group.rank
        counts = x.counts()
        counts[x.remote, :, 0] = self._runs[x.remote]
        x.begin(Phase.PARTIALS, counts)
        part = self._tables.arenas.partial_bytes // self.requests.size // 16 * 16
        floats = -(-counts[..., 0] * x.dims // 4) * 4
        own = int(self.partials[rank]) + part * np.arange(self.requests.size)[:, None]
        (places,), memory = x.exchange((own + 4 * (np.cumsum(floats, 1) - floats), 0))
        self._keep.append(memory)
        # Received sums have the layout that this rank's request defines: by table, each table at a
        # multiple of 16 bytes.
        self.partials[x.remote] = places[x.remote, 0] - part * rank


def _words(num_bits: np.ndarray) -> np.ndarray:
    return -(-num_bits // 32)
