"""Copies on one rank of every host, which the host's other ranks read over its own links.

Between hosts a changed row then travels once per host, and once per rank where it is replicated on
all ranks; in exchange ranks without the copy read it from a neighbour. Which rank of a host has the
copy is free, so that rows are cut into tiers whose copies lie on different ranks.

What such rows ask of the resource rows of a relaxation is a sum over hosts of what follows from the
rank that the host chose, and, for the master copies, from the host that has them. The least of each
is below every choice, and equal to it where ranks are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost import CostModel
from oper.search.machine import (
    COMPUTE,
    CROSS_IN,
    CROSS_OUT,
    LINK_IN,
    LINK_OUT,
    MEMORY,
    TERMS,
    Machine,
    add_wire,
)
from oper.search.problem import NUM_FEATURES, ROWS, TOUCHED, TOUCHED_ALL, TableProblem
from oper.search.tally import BROADCAST, HELD, NUM_ROWS, UPDATE_NS, row_bytes

if TYPE_CHECKING:
    from oper.search.placing import Placement
    from oper.search.relax import Relaxation

_FINE = 4.0  # parts of a rank's mean load that copies are cut into
_MAX_SETS = 8  # tiers of one table that they are cut into


def copy_sets(machine: Machine) -> list[tuple[int, ...]]:
    """Sets of one rank of every host: the first rank of each, the second, and so on; empty where
    hosts have one rank or there is one host."""
    hosts = [np.flatnonzero(machine.host == h) for h in range(machine.host_capacity_bytes.size)]
    most = max(h.size for h in hosts)
    if len(hosts) == 1 or most == 1:
        return []
    return [tuple(int(h[n % h.size]) for h in hosts) for n in range(most)]


# -- the relaxation --------------------------------------------------------------------------------


class CopyRows:
    """What a unit of each kind asks of the resource rows; float64 [R] each.

    Attributes:
        need: a byte that every rank reads.
        send: a byte that a master sends to the other copies.
        held: a byte held on every host.
        refresh: a nanosecond of every host's holder in the update.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        model = relaxation.model
        m, world = model.machine, model.machine.world_size
        hosts = range(m.host_capacity_bytes.size)
        first, last = model.phases.index("forward"), len(model.phases) - 1
        each = np.arange(world)
        units = np.zeros((5, world, len(model.phases), len(TERMS), world))
        need, send, receive, refresh = units[:4]
        reads = (m.host[:, None] == m.host[None, :]) & (m.domain[:, None] != m.domain[None, :])
        need[:, first, LINK_IN] = reads
        for term in (LINK_OUT, MEMORY):
            need[each, first, term, each] = reads.sum(axis=1)
        send[each, last, CROSS_OUT, each] = len(hosts) - 1
        for term in (CROSS_IN, MEMORY):
            receive[each, last, term, each] = 1.0
        refresh[each, last, COMPUTE, each] = 1.0
        add_wire(units, m)
        rows = relaxation.rows_of_units(units)  # [5, W, R]
        held = np.zeros((world, NUM_ROWS, world))
        held[each, HELD, each] = 1.0
        rows[4] = relaxation.rows_of(held)
        least = np.stack([rows[:, m.host == h].min(axis=1) for h in hosts], axis=1)  # [5, H, R]
        self.need, self.held, self.refresh = (least[k].sum(axis=0) for k in (0, 4, 3))
        # Masters on the host where that is cheapest; every other host receives.
        self.send = (least[1] + least[2].sum(axis=0) - least[2]).min(axis=0)

    def coefficients(self, relaxation: Relaxation, t: TableProblem) -> np.ndarray:
        """What a unit of each feature of a table asks; float64 [4, R]."""
        model, width = relaxation.model, t.spec.dim
        row, _, state = row_bytes(t, width)
        by_class = []
        for ranks in relaxation.classes.ranks:
            masters = np.zeros((NUM_FEATURES, NUM_FEATURES, model.machine.world_size))
            masters[np.arange(NUM_FEATURES)[:, None], np.arange(NUM_FEATURES)[:, None], ranks] = (
                1 / ranks.size)
            rows = model.replica_rows(t, width, masters)
            rows[:, BROADCAST] = 0.0
            rows[:, HELD] = masters[:, ROWS] * (row + state) if model.training else 0.0
            if model.training:
                rows[:, UPDATE_NS] = masters[:, TOUCHED_ALL] * model.odd_ns(t, width, 2)
            by_class.append(relaxation.rows_of(rows))
        out = np.min(by_class, axis=0)
        out[ROWS] += row * self.held
        out[TOUCHED] += row * self.need
        if model.training:
            out[TOUCHED_ALL] += row * self.send + model.costs.refresh_ns * self.refresh
        return np.asarray(out)


# -- plans -----------------------------------------------------------------------------------------


def spread_copies(model: CostModel, tables: Sequence[TableProblem],
                  placements: Sequence[Placement]) -> list[Placement]:
    """The placements with their copies dealt over the ranks of hosts.

    Args:
        model: the cost model.
        tables: the tables.
        placements: of each; copies all on the first of `copy_sets`.
    """
    sets = copy_sets(model.machine)
    if not sets:
        return list(placements)
    found = [(k, i, n) for k, pieces in enumerate(placements) for i, piece in enumerate(pieces)
             for n, tier in enumerate(piece.tiers) if _is_first(tier, sets)]
    weight = {(k, i, n): _weight(tables[k], placements[k][i], n) for k, i, n in found}
    load = np.zeros(len(sets))
    parts: dict[tuple[int, int, int], list[Tier]] = {}
    grain = sum(weight.values()) / len(sets) / _FINE
    for place in sorted(found, key=lambda p: (-weight[p], p)):
        k, i, n = place
        tier = placements[k][i].tiers[n]
        count = min(int(np.ceil(weight[place] / max(grain, 1e-30))), len(sets), _MAX_SETS)
        parts[place] = _cut(tables[k], tier, max(1, count))
        for x, part in enumerate(parts[place]):
            to = int(load.argmin())
            load[to] += weight[place] / len(parts[place])
            parts[place][x] = replace(part, ranks=sets[to])
    return [tuple(Piece(p.start, p.stop, tuple(
        y for n, x in enumerate(p.tiers) for y in parts.get((k, i, n), [x])))
        for i, p in enumerate(pieces)) for k, pieces in enumerate(placements)]


def _is_first(tier: Tier, sets: list[tuple[int, ...]]) -> bool:
    return tier.placement == "replicated" and set(tier.ranks) == set(sets[0])


def _weight(t: TableProblem, piece: Piece, n: int) -> float:
    """Bytes that ranks without the copy read."""
    tier = piece.tiers[n]
    touched = t.features(tier.start, tier.stop, True)[TOUCHED]
    return float(touched * row_bytes(t, piece.stop - piece.start)[0])


def _cut(t: TableProblem, tier: Tier, count: int) -> list[Tier]:
    """`count` tiers that are read alike, or fewer where rows are few."""
    inner = t.edges[(t.edges > tier.start) & (t.edges < tier.stop)]
    at = np.concatenate([[tier.start], inner, [tier.stop]])
    touched = t.prefix(at.astype(float))[TOUCHED]
    ends = np.interp(np.linspace(touched[0], touched[-1], count + 1), touched, at)
    cuts = {round(x) for x in ends.tolist()} | {tier.start, tier.stop}
    edges = sorted(x for x in cuts if tier.start <= x <= tier.stop)
    return [replace(tier, start=a, stop=b) for a, b in pairwise(edges)]
