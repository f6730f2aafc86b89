"""Performance ceilings: bare loops that read or rewrite the rows of a batch in OPER's arena."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from oper.bench.core.planning import slowest
from oper.bench.core.record import elapsed
from oper.bench.core.workload import NO_ID

if TYPE_CHECKING:
    from oper.shmem.tables import ShardedTables

# Settings that `Ceiling.tune` tries: prefetch distances in rows, and orders of the bags.
PREFETCH_ROWS = (8, 16, 24, 32, 48)
ORDERS = ("feature", "sample")
_REPEATS = 6  # batches timed per setting; their median is compared


def row_addresses(tables: ShardedTables, name: str) -> np.ndarray:
    """Addresses from which this rank reads each row of a table, int64 [num_rows], by id.

    Replicated rows are read from the rank's own copy, all others from their owner's arena.
    """
    k = tables.pieces[name][0]
    directory, rank = tables.directories[k], tables.group.rank
    row_bytes = directory.row_bytes
    positions = directory.position_of(np.arange(directory.table.num_rows, dtype=np.int64))
    owner, slot = directory.locate(positions)
    shards = [tables.view("rows", k, r).data_ptr() for r in range(tables.group.world_size)]
    address = np.array(shards, np.int64)[owner] + slot * row_bytes
    for x in directory.tiers:
        if x.replica_base[rank] >= 0:
            inside = (positions >= x.tier.start) & (positions < x.tier.stop)
            copy = tables.replica_view(k, rank).data_ptr()
            address[inside] = copy + row_bytes * (
                int(x.replica_base[rank]) + positions[inside] - x.tier.start)
    return address


def gather_batch(addresses: np.ndarray, pooling: int, dim: int, order: str
                 ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of one batch of bare gathers.

    Args:
        addresses: row addresses, int64 [F, B * pooling], key-major; 0 = no lookup.
        pooling: ids per bag, padding included.
        dim: columns of each table.
        order: order of the bags: ``"feature"`` (all samples of one feature, then of the next) or
            ``"sample"``.

    Returns:
        Addresses in the order of the bags, int64 [N + padding] (padded for prefetching); offsets
        int64 [num_bags + 1]; and each bag's offset in the output, in floats, int64 [num_bags].
    """
    num_features = addresses.shape[0]
    bags = addresses.reshape(num_features, -1, pooling)
    size = bags.shape[1]
    out = (np.arange(size, dtype=np.int64)[None, :] * num_features
           + np.arange(num_features, dtype=np.int64)[:, None]) * dim
    if order == "sample":
        bags, out = bags.transpose(1, 0, 2), out.T
    flat = bags[bags != 0]
    flat = np.concatenate([flat, np.repeat(flat[-1:], max(PREFETCH_ROWS))])
    offsets = np.zeros(num_features * size + 1, np.int64)
    np.cumsum((bags != 0).sum(axis=2).reshape(-1), out=offsets[1:])
    return (torch.from_numpy(flat), torch.from_numpy(offsets),
            torch.from_numpy(np.ascontiguousarray(out.reshape(-1))))


class Ceiling:
    """Bare gathers over the arena of sharded tables.

    Args:
        tables: the sharded tables, with equal dims and one feature each.
        batches: ids of each batch, int64 [F, B * pooling], key-major, features in output order;
            `NO_ID` = no lookup.
        pooling: ids per bag, padding included.

    Attributes:
        settings: the fastest settings, found by `tune`, for the benchmark record.
    """

    def __init__(self, tables: ShardedTables, batches: Sequence[np.ndarray], pooling: int) -> None:
        names = [table for _, table in tables.features]
        where = [row_addresses(tables, name) for name in names]
        self._dim = tables.directories[0].table.dim
        self._addresses = [np.stack([np.where(ids[f] == NO_ID, 0, w[ids[f]])
                                     for f, w in enumerate(where)]) for ids in batches]
        self._pooling = pooling
        size = batches[0].shape[1] // pooling
        self._out = torch.empty(size, self._dim * len(names))
        self.settings: dict[str, int | str | bool] = {}
        self._prefetch, self._stream = PREFETCH_ROWS[0], False
        self._arrange(ORDERS[0], len(batches))

    def run(self, number: int) -> torch.Tensor:
        """Pooled rows of batch `number` (modulo the number of batches), float32 [B, F * dim]. The
        next call overwrites the result."""
        torch.ops.oper.gather_ceiling(*self._batches[number % len(self._batches)], self._dim,
                                      self._prefetch, self._stream, self._out)
        return self._out

    def tune(self, align: Callable[[], None]) -> float:
        """Choose the fastest order of bags, prefetch distance and kind of store (normal or
        streaming). Collective.

        Args:
            align: function that synchronizes all ranks.

        Returns:
            Median seconds per batch of the slowest rank with these settings.
        """
        tried, seconds = [], []
        streams = (False, True) if self._dim % 16 == 0 else (False,)
        for order in ORDERS:
            self._arrange(order, _REPEATS)
            for prefetch in PREFETCH_ROWS:
                for stream in streams:
                    self._prefetch, self._stream = prefetch, stream
                    times = []
                    for number in range(_REPEATS):
                        align()
                        times.append(elapsed(functools.partial(self.run, number)))
                    tried.append((order, prefetch, stream))
                    seconds.append(float(np.median(times)))
        seconds = slowest(seconds)
        order, self._prefetch, self._stream = tried[int(np.argmin(seconds))]
        self._arrange(order, len(self._addresses))
        self._addresses = []
        self.settings = {"order": order, "prefetch_rows": self._prefetch, "stream": self._stream}
        return min(seconds)

    def _arrange(self, order: str, count: int) -> None:
        self._batches = [gather_batch(a, self._pooling, self._dim, order)
                         for a in self._addresses[:count]]


class UpdateCeiling:
    """Bare rewrites of the rows and optimizer states that this rank updates in a step.

    Each row that any rank looks up in this rank's shard is read and written back once, unchanged,
    in slot order; its state likewise.

    Args:
        tables: the sharded tables, without replicas and with row-wise Adagrad.
        batches: ids indexed by rank and batch, each int64 [F, ids], key-major, features in output
            order.

    Attributes:
        batches: for each batch, the addresses of its rows and of their states, each int64 [n +
            PREFETCH].
    """

    PREFETCH = 16  # prefetch distance in rows, as in the update kernel

    def __init__(self, tables: ShardedTables, batches: Sequence[Sequence[np.ndarray]]) -> None:
        self._row_bytes = tables.directories[0].row_bytes
        self.batches = [self._addresses(tables, together)
                         for together in zip(*batches, strict=True)]

    def _addresses(self, tables: ShardedTables, ids: Sequence[np.ndarray]
                   ) -> tuple[torch.Tensor, torch.Tensor]:
        rank = tables.group.rank
        found: dict[str, list[np.ndarray]] = {"rows": [], "momentum1": []}
        for f, (_, name) in enumerate(tables.features):
            k = tables.pieces[name][0]
            directory = tables.directories[k]
            touched = np.unique(np.concatenate([x[f] for x in ids]))
            owner, slot = directory.locate(directory.position_of(touched))
            slot = np.sort(slot[owner == rank])
            for part, places in found.items():
                view = tables.view(part, k, rank)
                places.append(view.data_ptr() + slot * (view.stride(0) * view.element_size()))
        rows, states = (np.concatenate(x) for x in found.values())
        surplus = np.full(self.PREFETCH, rows[-1]), np.full(self.PREFETCH, states[-1])
        return (torch.from_numpy(np.concatenate([rows, surplus[0]])),
                torch.from_numpy(np.concatenate([states, surplus[1]])))

    def run(self, number: int) -> None:
        """Rewrite the rows and states of batch `number` (modulo the number of batches)."""
        rows, states = self.batches[number % len(self.batches)]
        torch.ops.oper.rewrite_ceiling(rows, self._row_bytes, self.PREFETCH)
        torch.ops.oper.rewrite_ceiling(states, 4, self.PREFETCH)
