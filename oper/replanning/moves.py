"""The bytes that a move from one plan to another sends between memory domains, and the time for
it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.plan import Plan, TablePlan
from oper.rows.directory import TableDirectory, TierLayout
from oper.tables import OPTIMIZERS, bytes_of_row
from oper.topology import Topology

_NUM_SAMPLED = 1 << 18  # rows of a tier that stand for all of a larger one
_SLOT_BYTES = 8  # of a row's number, sent to the rank that is asked for it


@dataclass(slots=True, eq=False)
class Moves:
    """Bytes that a move between plans transfers.

    Attributes:
        owner_bytes: bytes of rows and optimizer states whose owner changes.
        between: float64 [D, D]; entry [s, t] is the number of bytes that domain t receives from
            domain s: rows, replicas and states that `oper.migrate` reads there, and the numbers
            of requested rows. Rows of which domain t has a replica are not transferred.
    """

    owner_bytes: float
    between: np.ndarray

    def transfer_us(self, topology: Topology) -> float:
        """Duration of the transfer in microseconds: bytes over bandwidth of the busiest domain.

        A domain's links are assumed to be busy throughout, sending and receiving at once. What
        crosses hosts and what stays within them is transferred one after the other.
        """
        host = np.array([d.host for d in topology.domains])
        ranks = np.array([len(d.ranks) for d in topology.domains])
        other = host[:, None] != host[None, :]
        total = 0.0
        for crosses, gbps in ((other, [d.cross_gbps for d in topology.domains]),
                              (~other, [d.link_gbps for d in topology.domains])):
            moved = np.where(crosses, self.between, 0.0)
            busiest = np.maximum(moved.sum(axis=0), moved.sum(axis=1))
            total += float((busiest / (np.array(gbps) * ranks)).max()) / 1e3
        return total


def moves(old: Plan, new: Plan, domain_of: list[int]) -> Moves:
    """Bytes that a move between plans of the same tables transfers.

    Args:
        old, new: the plans, for equal numbers of ranks.
        domain_of: index of each rank's memory domain, by rank.

    Tiers of more than 262,144 rows are estimated from a random sample of that many rows.
    """
    domains = np.asarray(domain_of)
    found = Moves(0.0, np.zeros((domains.max() + 1, domains.max() + 1)))
    for entry in new.tables:
        _add_table(found, old.table(entry.table.name), entry, domains)
    np.fill_diagonal(found.between, 0.0)
    return found


def _add_table(found: Moves, old: TablePlan, new: TablePlan, domains: np.ndarray) -> None:
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
                # A state of one number per row comes from the first piece.
                states = [4 * (j == 0) if per_row else 4 * columns
                          for _, per_row in OPTIMIZERS[d.table.optimizer].state]
                _add_rows(found, was, was.position_of(ids),
                          _Target(tier, owner, domains, scale, bytes_of_row(d.table.dtype, columns)
                                  if columns else 0, [x for x in states if x]))


@dataclass(slots=True, eq=False)
class _Target:
    """Rows of a tier of the new plan.

    Attributes:
        tier: the tier.
        owner: int64 [n], who will own each.
        domains: int64 [W], domain of each rank.
        scale: rows that each stands for.
        row_bytes: bytes of the columns that come from one piece of the old plan.
        states: bytes of each part of the optimizer state that come from there.
    """

    tier: TierLayout
    owner: np.ndarray
    domains: np.ndarray
    scale: float
    row_bytes: int
    states: list[int]


def _add_rows(found: Moves, was: TableDirectory, positions: np.ndarray, to: _Target) -> None:
    """Add rows that stand at `positions` (int64 [n]) of a piece of the old plan."""
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
    """Add rows, [from, to] by domain, of that many bytes each, and the numbers that ask for them.
    """
    if num_bytes:
        between += rows * num_bytes + rows.T * _SLOT_BYTES


def _sample(tier: TierLayout) -> tuple[np.ndarray, float]:
    """Positions in a tier, all or a sample, and how many rows each stands for."""
    start, stop = tier.tier.start, tier.tier.stop
    num = stop - start
    if num <= _NUM_SAMPLED:
        return np.arange(start, stop), 1.0
    return np.random.default_rng(0).integers(start, stop, _NUM_SAMPLED), num / _NUM_SAMPLED
