"""Bytes that a migration between plans sends between memory domains, and the time for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.plan import Plan, TablePlan
from oper.rows.directory import TableDirectory, TierLayout
from oper.tables import OPTIMIZERS, bytes_of_row
from oper.topology import Topology

_NUM_SAMPLED = 1 << 18  # rows sampled from larger tiers
_SLOT_BYTES = 8  # size of a row number in a request


@dataclass(slots=True, eq=False)
class Moves:
    """Bytes that a migration transfers.

    Attributes:
        owner_bytes: bytes of rows and optimizer states whose owner changes.
        between: float64 [D, D]; entry [s, t] is the number of bytes that memory domain t receives
            from domain s: rows, replicas and states that `oper.migrate` reads there, and numbers of
            requested rows. Rows that domain t has a replica of are not transferred.
    """

    owner_bytes: float
    between: np.ndarray

    def transfer_us(self, topology: Topology) -> float:
        """Duration of the transfer in microseconds: bytes / bandwidth of the busiest domain, or of
        the busiest uplink of a rack if that takes longer.

        All links of a domain are assumed to send and receive concurrently. Transfers between hosts
        and transfers within hosts are assumed to follow each other.
        """
        domains, racks = topology.domains, topology.racks
        host = np.array([d.host for d in domains])
        each, rack_of = np.arange(host.size), {h: k for k, x in enumerate(racks) for h in x.hosts}
        rack = np.array([rack_of.get(h, 0) for h in host.tolist()])

        def busiest_us(crosses: np.ndarray, end: np.ndarray, gbps: list[float]) -> float:
            """Time of the pairs of domains `crosses`; `end` is each domain's link."""
            moved = np.where(crosses, self.between, 0.0)
            received, sent = (np.bincount(end, moved.sum(axis=k)) for k in (0, 1))
            return float((np.maximum(received, sent) / gbps).max()) / 1e3

        other = host[:, None] != host
        across = busiest_us(other, each, [d.cross_gbps * len(d.ranks) for d in domains])
        if racks:
            across = max(across, busiest_us(rack[:, None] != rack, rack,
                                            [x.uplink_gbps for x in racks]))
        return across + busiest_us(~other, each, [d.link_gbps * len(d.ranks) for d in domains])


def moves(old: Plan, new: Plan, domain_of: list[int]) -> Moves:
    """Compute the bytes that a migration between plans of the same tables transfers.

    Tiers of more than 262,144 rows are estimated from a random sample of that many rows.

    Args:
        old, new: the plans, for equal numbers of ranks.
        domain_of: index of each rank's memory domain.
    """
    domains = np.asarray(domain_of)
    found = Moves(0.0, np.zeros((domains.max() + 1, domains.max() + 1)))
    trains = new.objective == "training"  # tables that are only read have no optimizer state
    for entry in new.tables:
        _add_table(found, old.table(entry.table.name), entry, domains, trains)
    np.fill_diagonal(found.between, 0.0)
    return found


def _add_table(found: Moves, old: TablePlan, new: TablePlan, domains: np.ndarray,
               trains: bool) -> None:
    world_size = domains.size
    before = [TableDirectory(old, world_size, k) for k in range(len(old.pieces))]
    for k in range(len(new.pieces)):
        d = TableDirectory(new, world_size, k)
        for tier in d.tiers:
            positions, scale = _sample(tier)
            ids, owner = d.ids_at(positions), d.locate(positions)[0]
            for j, was in enumerate(before):
                columns = max(0, min(was.column + was.dim, d.column + d.dim)
                              - max(was.column, d.column))
                # Row-wise states (one number per row) are read from the first piece only.
                states = [4 * (j == 0) if per_row else 4 * columns
                          for _, per_row in OPTIMIZERS[d.table.optimizer].state if trains]
                _add_rows(found, was, was.position_of(ids),
                          _Target(tier, owner, domains, scale, bytes_of_row(d.table.dtype, columns)
                                  if columns else 0, [x for x in states if x]))


@dataclass(slots=True, eq=False)
class _Target:
    """Rows of a tier of the new plan, and the data that they get from one piece of the old plan.

    Attributes:
        tier: the tier.
        owner: int64 [n], new owner of each row.
        domains: int64 [W], memory domain of each rank.
        scale: number of rows that each sampled row represents.
        row_bytes: bytes of the columns that come from the piece.
        states: bytes of each optimizer state array that come from the piece.
    """

    tier: TierLayout
    owner: np.ndarray
    domains: np.ndarray
    scale: float
    row_bytes: int
    states: list[int]


def _add_rows(found: Moves, was: TableDirectory, positions: np.ndarray, to: _Target) -> None:
    """Add the transfers of rows at `positions` (int64 [n]) of a piece of the old plan."""
    num = found.between.shape[0]
    owner = was.locate(positions)[0]
    found.owner_bytes += (to.scale * (to.row_bytes + sum(to.states))
                          * np.count_nonzero(owner != to.owner))
    holders = np.bincount(to.domains[to.tier.replica_base >= 0], minlength=num)  # by domain
    for x in was.tiers:
        inside = (positions >= x.tier.start) & (positions < x.tier.stop)
        source, target = to.domains[owner[inside]], to.domains[to.owner[inside]]
        pairs = to.scale * np.bincount(source * num + target, minlength=num * num).reshape(num, num)
        copies = to.scale * np.outer(np.bincount(source, minlength=num), holders)
        lacks = np.bincount(to.domains[x.replica_base >= 0], minlength=num) == 0
        _add(found.between, (pairs + copies) * lacks, to.row_bytes)
        for state in to.states:
            _add(found.between, pairs, state)


def _add(between: np.ndarray, rows: np.ndarray, num_bytes: int) -> None:
    """Add `rows` (float64 [D, D], from domain, to domain) of `num_bytes` bytes each, and the
    requests for them."""
    if num_bytes:
        between += rows * num_bytes + rows.T * _SLOT_BYTES


def _sample(tier: TierLayout) -> tuple[np.ndarray, float]:
    """Positions of all rows of a tier, or of a sample, and the number of rows each represents."""
    start, stop = tier.tier.start, tier.tier.stop
    num = stop - start
    if num <= _NUM_SAMPLED:
        return np.arange(start, stop), 1.0
    return np.random.default_rng(0).integers(start, stop, _NUM_SAMPLED), num / _NUM_SAMPLED
