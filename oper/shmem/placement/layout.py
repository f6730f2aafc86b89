"""Layout of the arenas: offsets of each rank's rows, optimizer states, replicas and send buffer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.rows.directory import TableDirectory, TierLayout, nearest_replica
from oper.shmem.optim.optimizers import STATE_PARTS
from oper.tables import OPTIMIZERS

_CPU = torch.device("cpu")
_PAGE = 4096
_ALIGN = 256  # rows of 64 floats then never straddle more cache lines than they fill
# RowType in csrc/common/elements.h
ROW_TYPES = ("float32", "float16", "bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLayout:
    """Byte offsets in every rank's arena.

    Attributes:
        rows, momentum1, momentum2, replicas, touched, squares: int64 [T, W], offset by directory
            and rank of: the rows, the optimizer states, the replica rows, the list of changed
            master rows, the sums of squared gradients.
        send_buffer: int [W], offset of the send buffer.
        num_bytes: int [W], size of the arena.
        used_bytes: int [W], size of the part before the send buffer, for which huge pages are
            requested.
        send_buffer_bytes: size of the send buffer.
        host_ranges: by rank, ascending [begin, end) of the pages that contain only rows in host
            memory, their replicas and their optimizer states.
    """

    rows: np.ndarray
    momentum1: np.ndarray
    momentum2: np.ndarray
    replicas: np.ndarray
    touched: np.ndarray
    squares: np.ndarray
    send_buffer: list[int]
    num_bytes: list[int]
    used_bytes: list[int]
    send_buffer_bytes: int
    host_ranges: list[list[tuple[int, int]]]

    @staticmethod
    def build(directories: Sequence[TableDirectory], world_size: int, num_send_buffer_bytes: int,
              clipped: Collection[str] = (), page_bytes: int = _PAGE) -> ArenaLayout:
        """Compute the layout for a plan; the result is the same on all ranks.

        Args:
            directories: one per column piece of each table.
            world_size: ranks W.
            num_send_buffer_bytes: bytes of every rank's send buffer.
            clipped: names of the tables whose optimizer has `max_row_norm`.
            page_bytes: page size; `host_ranges` consist of complete pages.
        """
        shape = (len(directories), world_size)
        parts = {name: np.zeros(shape, np.int64)
                 for name in ("rows", "momentum1", "momentum2", "replicas", "touched", "squares")}
        send_buffer, total, used = [], [], []
        host_ranges: list[list[tuple[int, int]]] = []
        for rank in range(world_size):
            at = 0
            in_host: list[tuple[int, int]] = []

            def take(num_bytes: int, num_host_bytes: int = 0,
                     in_host: list[tuple[int, int]] = in_host) -> int:
                nonlocal at
                begin = at
                at += int(num_bytes)
                first = -(-(at - int(num_host_bytes)) // page_bytes) * page_bytes
                last = at // page_bytes * page_bytes
                if first < last:
                    in_host.append((first, last))
                at = -(-at // _ALIGN) * _ALIGN
                return begin

            # All rows first, since lookups read them and huge pages benefit them most.
            for t, d in enumerate(directories):
                parts["rows"][t, rank] = take(
                    d.bytes[0, rank], d.host_bytes[0, rank])
            for t, d in enumerate(directories):
                parts["replicas"][t, rank] = take(
                    d.bytes[1, rank], d.host_bytes[1, rank])
            for t, d in enumerate(directories):
                for name, per_row in STATE_PARTS[d.table.optimizer]:
                    width = 4 * (1 if per_row else d.dim)
                    parts[name][t, rank] = take(
                        d.num_slots[rank] * width, d.num_host_slots[rank] * width)
                # See Table::rounds_of_squares in csrc/host/context.h.
                rounds = (OPTIMIZERS[d.table.optimizer].is_row_wise
                          + (d.table.name in clipped))
                if d.dim != d.table.dim:
                    parts["squares"][t, rank] = take(d.num_slots[rank] * 4 * rounds)
            for t, d in enumerate(directories):
                parts["touched"][t, rank] = take(4 * (1 + replicated_slots(d, rank)))
            at = -(-at // (2 << 20)) * (2 << 20)
            used.append(at)
            send_buffer.append(at)
            total.append(at + num_send_buffer_bytes)
            host_ranges.append(in_host)
        return ArenaLayout(**parts, send_buffer=send_buffer, num_bytes=total, used_bytes=used,
                           send_buffer_bytes=num_send_buffer_bytes, host_ranges=host_ranges)

    def memory_bytes(self, directories: Sequence[TableDirectory]) -> dict[str, list[int]]:
        """Return bytes of rows, replicas and optimizer states: ``{"device": [W], "host": [W]}``."""
        everything = np.zeros(len(self.num_bytes), np.int64)
        in_host = everything.copy()
        for d in directories:
            state = OPTIMIZERS[d.table.optimizer].state_bytes(d.dim)
            everything += d.bytes.sum(axis=0) + d.num_slots * state
            in_host += d.host_bytes.sum(axis=0) + d.num_host_slots * state
        return {"device": (everything - in_host).tolist(), "host": in_host.tolist()}


def replicated_slots(directory: TableDirectory, rank: int) -> int:
    """Return the number of master copies of replicated rows that `rank` owns."""
    return sum(int(x.num_rows[rank]) for x in directory.tiers if x.tier.placement == "replicated")


def context_arguments(directories: Sequence[TableDirectory], layout: ArenaLayout,
                      addresses: list[int], rank: int, features: torch.Tensor,
                      device: torch.device = _CPU) -> tuple[Any, ...]:
    """Return the first arguments of the operators that create a kernel context, see
    csrc/bindings/lookup.cpp.

    Rows of a tier repeat a pattern of P ranks (P: the sum of its stripe's weights), so a map stores
    two numbers for each place k in the pattern: its value for row ``n * P + k`` of the tier is
    ``base[k] + n * step[k]``. In the home map the value is the row's linear index
    (`oper.rows.directory`). In the read map it is the address from which `rank` reads the row, or
    ``-1 - linear index`` if `rank` cannot address it.

    Args:
        directories: one per column piece of each table.
        layout: layout of the arenas.
        addresses: [W], addresses of the arenas as `rank` sees them; 0 = in another memory domain.
        rank: the rank whose context it is.
        features: see `oper.shmem.optim.arguments.feature_rows`.
        device: device on which head maps are read.

    Returns:
        The rank; W; a list of int64 tensors: tables [T, 14], `owner_begin` [T, W + 1], tiers
            [N, 7], maps [2, M] (bases, steps), `features`, refreshes [K, 8], addresses of `touched`
            and `squares` [T, W] and of send buffers [W] (undefined for other memory domains); bytes
            of a send buffer; a list of the tensors of `TableDirectory.head_map` and `head_order`.
    """
    bases: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    tables: list[list[int]] = []
    tiers: list[list[int]] = []
    refreshes: list[list[int]] = []
    heads: list[np.ndarray] = []
    num_maps = 0

    def add_map(base: np.ndarray, step: np.ndarray) -> tuple[int, int]:
        nonlocal num_maps
        bases.append(np.asarray(base, np.int64))
        steps.append(np.asarray(step, np.int64))
        num_maps += bases[-1].size
        return num_maps - bases[-1].size, bases[-1].size

    where = np.asarray(addresses, np.int64)
    logical = {name: k for k, name in enumerate(dict.fromkeys(
        d.table.name for d in directories))}
    for t, d in enumerate(directories):
        row_address = where + layout.rows[t]
        replica_address = where + layout.replicas[t]
        first_tier = len(tiers)
        for x in d.tiers:
            slot = x.slot_base[x.pattern] + x.within
            home = add_map(d.owner_begin[x.pattern] + slot, x.weight[x.pattern])
            copy_at = nearest_replica(x, rank, where != 0)
            if copy_at >= 0:
                copy = replica_address[copy_at] + x.replica_begin[copy_at]
                read = add_map(np.array([copy]), np.array([x.row_bytes]))
            else:
                local = where[x.pattern] != 0
                key = d.owner_begin[x.pattern] + slot
                read = add_map(
                    np.where(local, row_address[x.pattern] + x.begin[x.pattern]
                             + x.within * x.row_bytes, -1 - key),
                    np.where(local, x.row_bytes, -1) * x.weight[x.pattern])
            tiers.append([x.tier.start, *read, *home, int(x.tier.mode == "push"),
                          ROW_TYPES.index(x.dtype)])
            if x.tier.placement == "replicated":
                refreshes += _refreshes(t, x, row_address, replica_address[rank], rank)
        places = []  # where head map and head order begin in `heads`; -1 = none
        for head in (d.head_map(), () if d.table.dtype == "float32" else d.head_order()):
            places.append(len(heads) if head else -1)
            heads += head
        state = {name: int(where[rank] + getattr(layout, name)[t, rank])
                 for name, _ in STATE_PARTS[d.table.optimizer]}
        tables.append([d.table.num_rows, d.dim, int(d.table.pooling == "mean"),
                       first_tier, len(tiers), int(row_address[rank]),
                       state.get("momentum1", 0), state.get("momentum2", 0), places[0],
                       logical[d.table.name], d.table.dim, ROW_TYPES.index(d.table.dtype),
                       d.column, places[1]])
    arrays = [np.array(tables, np.int64), np.stack([d.owner_begin for d in directories]),
              np.array(tiers, np.int64), np.stack([np.concatenate(bases), np.concatenate(steps)]),
              np.array(refreshes, np.int64).reshape(-1, 8), where[None, :] + layout.touched,
              where[None, :] + layout.squares, where + np.array(layout.send_buffer, np.int64)]
    tensors = [torch.from_numpy(x) for x in arrays]
    return (rank, len(addresses), [*tensors[:4], features, *tensors[4:]], layout.send_buffer_bytes,
            [torch.from_numpy(h).to(device) for h in heads])


def _refreshes(
    table: int, x: TierLayout, row_address: np.ndarray, replica_address: np.int64, rank: int,
) -> list[list[int]]:
    copy = 0
    if x.replica_base[rank] >= 0:
        copy = int(replica_address + x.replica_begin[rank])
    period = x.pattern.size
    return [[table, owner, int(x.slot_base[owner]), int(x.slot_base[owner] + x.num_rows[owner]),
             k, period, int(row_address[owner]), copy]
            for k, owner in enumerate(x.pattern.tolist())]
