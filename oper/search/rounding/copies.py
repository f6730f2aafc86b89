"""Assignment of copies to ranks, in plans that have copies on one rank of every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import Tier
from oper.search.cost.load_vector import LoadVector, row_bytes
from oper.search.problem.machine import copy_sets
from oper.search.problem.statement import TOUCHED, TableProblem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, evaluated, plan_load_vector

#: Tiers of copies are cut into parts of about 1 / _FINE of a rank's mean load; a table's only tier
#: into parts of about 1 / x of it for each x of _COARSE (0: it is not cut), because a second tier
#: costs time, of which the choice of copies takes no account. The best of these is used.
_COARSE, _FINE = (4, 2, 1, 0), 16
_MAX_SETS = 8  # upper limit of the parts of one tier
_POWER = 16  # exponent of the power mean that approximates the slowest rank and breaks ties
_PASSES = 4  # upper limit of passes over all parts

_Part = tuple[int, int, int, Tier]  # indices of table, piece and tier, and the rows of the part


def spread_copies(relaxation: Relaxation, placements: Sequence[Placement]) -> list[Placement]:
    """Distribute the copies of placements over the ranks of each host.

    Tiers are cut into parts, and the parts are assigned by local search: each in turn, the largest
    first, goes to the rank that gives the least step time. Ranks of a host are treated as equal.

    Args:
        relaxation: the cost model and the tables.
        placements: of each table, with all copies on the first set of `copy_sets`.
    """
    tables, sets = relaxation.tables, copy_sets(relaxation.model.machine)
    found = [(k, i, n) for k, pieces in enumerate(placements) for i, piece in enumerate(pieces)
             for n, tier in enumerate(piece.tiers)
             if sets and tier.placement == "replicated" and set(tier.ranks) == set(sets[0])]
    if not found:
        return list(placements)
    weight = []  # bytes read by ranks without the copy
    for k, i, n in found:
        piece, tier = placements[k][i], placements[k][i].tiers[n]
        touched = float(tables[k].features(tier.start, tier.stop, True)[TOUCHED])
        weight.append(touched * row_bytes(tables[k], piece.stop - piece.start)[0])
    mean = max(sum(weight), 1e-30) / len(sets)
    most = min(len(sets), _MAX_SETS)
    several = np.array([len(placements[k][i].tiers) > 1 for k, i, _ in found])
    counts = (np.ceil(np.where(several, _FINE, x) * np.array(weight) / mean).clip(1, most)
              for x in _COARSE)
    each = []
    for count in dict.fromkeys(tuple(x.astype(int).tolist()) for x in counts):
        parts = [(k, i, n, x) for (k, i, n), number in zip(found, count, strict=True)
                 for x in _cut(tables[k], placements[k][i].tiers[n], number)]
        each.append(_spread(relaxation, placements, parts, sets))
    return min(each, key=lambda x: evaluated(relaxation, x).score)


def _spread(relaxation: Relaxation, placements: Sequence[Placement], parts: Sequence[_Part],
            sets: list[tuple[int, ...]]) -> list[Placement]:
    """The placements with tiers of copies cut into `parts`, each on the best of `sets`."""
    model, tables = relaxation.model, relaxation.tables

    def loads(vector: LoadVector) -> np.ndarray:
        """Microseconds by phase and by group of terms that run concurrently; [P, 8, W]."""
        return model.group_us(model.units(vector))

    each = np.stack([loads(model.piece_load_vector(
        tables[k], replace(placements[k][i], tiers=(x,)), True)) for k, i, _, x in parts])
    total = loads(plan_load_vector(relaxation, _with(placements, parts, [sets[0]] * len(parts))))
    return _with(placements, parts, [sets[x] for x in _assigned(each, total, sets)])


def _with(placements: Sequence[Placement], parts: Sequence[_Part],
          ranks: Sequence[tuple[int, ...]]) -> list[Placement]:
    """The placements with tiers replaced by their parts, each on the given ranks."""
    cut: dict[tuple[int, int, int], list[Tier]] = {}
    for (k, i, n, x), r in zip(parts, ranks, strict=True):
        cut.setdefault((k, i, n), []).append(replace(x, ranks=r))
    return [tuple(replace(p, tiers=tuple(
        y for n, x in enumerate(p.tiers) for y in cut.get((k, i, n), [x])))
        for i, p in enumerate(pieces)) for k, pieces in enumerate(placements)]


def _assigned(loads: np.ndarray, total: np.ndarray, sets: list[tuple[int, ...]]) -> list[int]:
    """The index of the set of ranks to which each part is assigned.

    Args:
        loads: float64 [N, P, 8, W], loads of each part if it is on the first set.
        total: float64 [P, 8, W], loads of the entire plan if all parts are on the first set.
        sets: the sets of ranks, one rank per host each.
    """
    # A part on another set has the loads of the first set with the two sets' ranks swapped.
    seen = np.tile(np.arange(total.shape[-1]), (len(sets), 1))
    for swapped, ranks in zip(seen, sets, strict=True):
        swapped[list(ranks)], swapped[list(sets[0])] = sets[0], ranks
    at = np.full(len(loads), -1)
    now = total - loads.sum(axis=0)
    for _ in range(_PASSES):
        before = at.copy()
        for n in np.argsort(-loads.max(axis=(1, 2, 3)), kind="stable").tolist():
            if at[n] >= 0:
                now = now - loads[n][..., seen[at[n]]]
            then = (now[:, :, None] + loads[n][..., seen]).clip(0.0)  # [P, 8, sets, W]
            most = np.maximum(then.max(axis=(1, 3), keepdims=True), 1e-30)
            mean = ((then / most) ** _POWER).sum(axis=(1, 3), keepdims=True) ** (1 / _POWER)
            at[n] = (most * mean).sum(axis=0).argmin()
            now = then[:, :, at[n]]
        if (at == before).all():
            break
    return at.tolist()


def _cut(t: TableProblem, tier: Tier, count: int) -> list[Tier]:
    """Cut a tier into `count` tiers with about the same number of distinct rows per batch; fewer if
    it has few rows."""
    inner = t.edges[(t.edges > tier.start) & (t.edges < tier.stop)]
    at = np.concatenate([[tier.start], inner, [tier.stop]])
    touched = t.prefix(at.astype(float))[TOUCHED]
    ends = np.interp(np.linspace(touched[0], touched[-1], count + 1), touched, at)
    cuts = {round(x) for x in ends.tolist()} | {tier.start, tier.stop}
    edges = sorted(x for x in cuts if tier.start <= x <= tier.stop)
    return [replace(tier, start=a, stop=b) for a, b in pairwise(edges)]
