"""Counters of transfers between ranks for tables in device memory; see `oper.rows.traffic`.

Counts are derived from the arrays that the kernels read (distinct rows of the batch, send buffers,
requests, lists of changed rows) after each pass, which waits for the device. Counting is therefore
off by default.

On devices gradients of pushed rows are reduced by row before they are read, so they count as
``gradient_rows``; the host back end counts ``gradient_ids`` and ``bag_gradients`` instead.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from oper.rows.directory import nearest_replica
from oper.rows.traffic import KIND, Traffic, squares_read
from oper.shmem.exchange.device import DeviceRows
from oper.shmem.exchange.device_push import Request
from oper.shmem.memory.device_batch import StepArrays, key_ranges


class DeviceCounters:
    """Counters of one rank.

    Args:
        tables: the tables of the rank.

    Attributes:
        traffic: the counts so far.
    """

    def __init__(self, tables: DeviceRows) -> None:
        self._tables = tables
        self._rank = tables.group.rank
        self._size = tables.group.world_size
        self._order = tables.order
        self._of_key = [tables.directories[t] for t in self._order]
        pieces = [(d.table, d.column, d.column + d.dim) for d in tables.directories]
        self.traffic = Traffic.empty(self._rank, self._size, pieces)
        local = np.array([tables.arenas.is_local(r) for r in range(self._size)])
        self._one_domain = bool(local.all())
        self._ranges = list(key_ranges(self._of_key))
        copies = [nearest_replica(x.tier, self._rank, local) for x in self._ranges]
        self._read_from = np.array([x.owner if c < 0 else c for x, c in
                                    zip(self._ranges, copies, strict=True)])
        # A rank that owns all rows of a pushed table reads them like pulled ones, as on the host.
        asks = [any(x.tier.mode == "push" for x in d.tiers) and not (
            all(x.tier.mode == "push" for x in d.tiers) and d.num_slots.sum() == d.num_slots[
                self._rank]) for d in self._of_key]
        self._asks = np.array(asks)
        self._pushed = np.array([x.tier.tier.mode == "push" and asks[x.table]
                                 for x in self._ranges])
        bounds = np.array([[x.begin for x in self._ranges], [x.end for x in self._ranges]])
        self._bounds = torch.from_numpy(bounds).to(tables.device)

    def _add(self, kind: str, table: int, peer: int, count: int) -> None:
        self.traffic.counts[KIND[kind], self._order[table], peer] += count

    def rows(self, kind: str, step: StepArrays, without_pushed: bool) -> None:
        """Count rows read for single ids, in a forward pass or for the gradient of weights."""
        keys, begin = step.runs()
        first, last = begin[torch.searchsorted(keys, self._bounds)].cpu().numpy()
        skipped = self._pushed & without_pushed
        for k in np.flatnonzero((last > first) & ~skipped).tolist():
            self._add(kind, self._ranges[k].table, int(self._read_from[k]),
                      int(last[k] - first[k]))
        if kind == "rows":
            self.traffic = replace(self.traffic, num_forward=self.traffic.num_forward + 1)

    def requests(self, addresses: np.ndarray) -> None:
        """Count the ids that readers request this owner to pool; `addresses`: int64 [W], addresses
        of the ranks' requests."""
        for reader in range(self._size):
            request = Request.read(self._tables, int(addresses[reader]))
            pairs, sums = request.num_pairs(), request.num_runs()
            for k in range(len(self._order)):
                n = int(pairs[k, self._rank])
                if n and (reader != self._rank or self._asks[k]):
                    self._add("ids", k, reader, n)
                    self._add("pooled_rows", k, self._rank, n)
                    if request.weights:
                        self._add("id_weights", k, reader, n)
                if reader != self._rank or not self._asks[k]:
                    continue
                for owner in range(self._size):
                    self._add("partial_sums", k, owner, int(sums[k, owner]))

    def gradients(self, step: StepArrays) -> None:
        """Count reduced rows that this owner receives, and rows that it updates."""
        tables = self._tables
        self.traffic = replace(self.traffic, num_backward=self.traffic.num_backward + 1)
        if tables.updates_at_once:
            keys, _ = step.runs()
            ends = np.cumsum([0, *(d.table.num_rows for d in self._of_key)])
            at = torch.searchsorted(keys, torch.from_numpy(ends).to(keys.device)).tolist()
            for k, n in enumerate(np.diff(at).tolist()):
                self._add("gradient_rows", k, self._rank, n)
                self._updated(k, n)
            return
        lists = step.lists(self._size)
        for k, d in enumerate(self._of_key):
            rounds = tables.rounds_of_squares(d.table.name) if d.dim != d.table.dim else 0
            for r in range(self._size):
                self._add("gradient_rows", k, r, int(lists[r, k + 1] - lists[r, k]) * (1 + rounds))
            slots = step.merged_slots(self._of_key, k, self._rank)
            self._updated(k, slots.size)
            if rounds:
                self._squares(k, slots)

    def _updated(self, k: int, count: int) -> None:
        if self._of_key[k].table.name not in self._tables.frozen:
            self._add("updated_rows", k, self._rank, count)

    def _squares(self, k: int, slots: np.ndarray) -> None:
        tables, d = self._tables, self._of_key[k]
        assert tables.optimizers is not None
        clips = tables.optimizers[d.table.name].max_row_norm is not None
        row_wise = tables.rounds_of_squares(d.table.name) > int(clips)
        # With both, the norms for clipping are read twice: before the squares of the clipped
        # gradients are summed, and before the update.
        times = int(clips) + int(row_wise) + int(clips and row_wise)
        positions = d.positions_at(self._rank, slots)
        pieces = tables.pieces[d.table.name]
        owners = np.stack([tables.directories[p].locate(positions)[0] for p in pieces])
        reads = squares_read(owners, pieces.index(self._order[k]), positions,
                             tables.rounds_of_squares(d.table.name), times, self._size,
                             self._one_domain)
        for r, n in enumerate(reads[self._rank].tolist()):
            self._add("squares", k, r, n)

    def refreshes(self) -> None:
        """Count the changed master copies that this rank has copied into its replicas; called after
        all ranks' updates."""
        refreshed = self._tables.num_refreshed
        for k, d in enumerate(self._of_key):
            held = [x for x in d.tiers if x.tier.placement == "replicated"
                    and x.replica_base[self._rank] >= 0]
            if not held:
                continue
            for r in sorted({int(r) for x in held for r in x.pattern}):
                if not self._tables.arenas.is_local(r):
                    if refreshed.size:
                        self._add("refreshed_rows", k, r, int(refreshed[r, k]))
                    continue
                changed = self._tables.arenas.touched(self._order[k], r)
                for x in held:
                    first = int(x.slot_base[r])
                    inside = (changed >= first) & (changed < first + int(x.num_rows[r]))
                    self._add("refreshed_rows", k, r, int(inside.sum()))


