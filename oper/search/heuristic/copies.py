"""Plans with copies on one rank of every host: which rank of a host has which copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost.model import CostModel
from oper.search.cost.tally import row_bytes
from oper.search.heuristic.placing import Placement
from oper.search.problem.machine import copy_sets
from oper.search.problem.statement import TOUCHED, TableProblem

_FINE = 4.0  # parts of a rank's mean load that copies are cut into
_MAX_SETS = 8  # tiers of one table that they are cut into


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
