"""The weights of stripes of pulled rows, by linear programming.

Annealing gives the stripes of all tables the same weights, so they can balance only one phase of
the step: a rank that owns many pushed rows is busier in forward or in update, depending on the
tables, and owning fewer pulled rows relieves it in a fixed ratio of the two. With weights of its
own, each table shifts its own ratio. With all other rows held fixed, the loads are almost linear in
the shares x of the ranks:

    minimise    sum over phases p of T_p + sum over stripes i and ranks r of c[i] |x - x'|[i, r]
    subject to  now[p, g, q] + sum over stripes i and ranks r of load[i, r, p, g, q] (x - x')[i, r]
                    <= T_p + hidden[p, q]          for every group of terms g and rank q
                held[d] + sum of bytes[i, r] (x - x')[i, r] <= capacity[d]  for every memory d
                sum over r of x[i, r] = 1          for every stripe i

with x' the present shares, and load[i, r] the load of stripe i if rank r owned all of its rows but
the hottest ones. Every rank of a stripe owns one row before any owns two, so the owners of these do
not change. The small cost c of a change keeps the weights of stripes that do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np

from oper.plan import Tier
from oper.search.cost.load_vector import Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import is_cut
from oper.search.pricing.master import silent_solver
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, plan_load_vector

_UNITS = 1024  # sum of the weights of a stripe before they are reduced
_FEWEST = 2 * _UNITS  # least rows of a stripe whose weights are chosen
# Stripes with the largest loads are chosen until they have this many shares. The program is then
# solved in 0.1 to 0.3 s. With 4000 shares it took up to 2 s on 64 ranks, and gained nothing there.
_SHARES = 1000
_CHANGE = 0.01  # c, relative to the largest load of the stripe divided by the number of ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Stripe:
    """A stripe of pulled rows.

    Attributes:
        table: index of its table, which has one column piece.
        tier: index of its tier.
        ranks: int64 [N], the ranks that may own its rows; equal ranks.
        share: float64 [N], the present share of each of them.
        rows: float64 [23, W], its load vector if the first of `ranks` owned all of it but the
            hottest rows.
        load_us: the largest load of that rank beyond the least of `ranks`, microseconds.
    """

    table: int
    tier: int
    ranks: np.ndarray
    share: np.ndarray
    rows: np.ndarray
    load_us: float


def weigh_stripes(relaxation: Relaxation, placements: Sequence[Placement]) -> list[Placement]:
    """Choose the weights of stripes of pulled rows; returns the placements with these weights,
    which may be slightly slower, because the program is not exact.

    Args:
        relaxation: the cost model and the tables.
        placements: of each table. Stripes of tables that are split by columns, have pinned rows or
            few rows keep their weights.
    """
    out = list(placements)
    stripes = _stripes(relaxation, out)
    for stripe, share in zip(stripes, _solved(relaxation, out, stripes), strict=True):
        piece, = out[stripe.table]
        tiers = list(piece.tiers)
        tiers[stripe.tier] = _weighted(tiers[stripe.tier], stripe.ranks, share)
        out[stripe.table] = (replace(piece, tiers=tuple(tiers)),)
    return out


def _share(tier: Tier, ranks: np.ndarray) -> np.ndarray:
    """The share of the tier's rows that each of `ranks` (int64 [N]) owns; float64 [N]."""
    weights = dict(zip(tier.ranks, tier.weights or (1,) * len(tier.ranks), strict=True))
    out = np.array([weights.get(r, 0) for r in ranks.tolist()], float)
    return out / out.sum()


def _stripes(relaxation: Relaxation, placements: list[Placement]) -> list[_Stripe]:
    """The stripes whose weights are chosen: those with the largest loads on their owners."""
    model, classes, problem = relaxation.model, relaxation.classes, relaxation.problem
    found: list[_Stripe] = []
    for k, (t, pieces) in enumerate(zip(relaxation.tables, placements, strict=True)):
        if len(pieces) != 1 or problem.held(t.spec.name).pinned:
            continue
        for n, x in enumerate(pieces[0].tiers):
            ranks = classes.ranks[classes.of_rank[x.ranks[0]]]
            ranks = ranks[np.isin(ranks, problem.owners_of(t.spec.name))]
            if (x.placement == "striped" and x.mode == "pull" and x.memory == "device"
                    and x.stop - x.start >= _FEWEST and ranks.size > 1
                    and np.isin(x.ranks, ranks).all()):
                tail = replace(x, start=x.start + ranks.size, placement="owned",
                               ranks=(int(ranks[0]),), weights=())
                rows = model.piece_load_vector(t, replace(pieces[0], tiers=(tail,)),
                                               t.ids_are_positions or is_cut(pieces)).rows
                us = model.group_us(model.loads(rows))[..., ranks]
                found.append(_Stripe(k, n, ranks, _share(x, ranks), rows,
                                     float(np.ptp(us, axis=-1).max())))
    out, left = [], _SHARES
    for stripe in sorted(found, key=lambda x: -x.load_us):
        if stripe.ranks.size <= left:
            left -= stripe.ranks.size
            out.append(stripe)
    return out


def _excess(model: CostModel, stripe: _Stripe) -> np.ndarray:
    """Loads by owner of all rows but the hottest, float64 [N, P, 8, W], microseconds by phase,
    group of terms and rank, in excess of the least for any owner."""
    ranks, owned = stripe.ranks, stripe.rows
    every = np.repeat(owned[None], ranks.size, axis=0)
    every[:, :, ranks[0]] = owned[:, ranks[1]]
    every[np.arange(ranks.size), :, ranks] = owned[:, ranks[0]]
    us = model.group_us(model.loads(every))
    return np.asarray(us - us.min(axis=0))


def _solved(relaxation: Relaxation, placements: list[Placement], stripes: list[_Stripe]
            ) -> list[np.ndarray]:
    """The best shares of each stripe, float64 [N] each; the present ones if the solver finds no
    optimum."""
    if not stripes:
        return []
    model, inf = relaxation.model, highspy.kHighsInf
    m = model.machine
    total = plan_load_vector(relaxation, placements)
    us = model.group_us(model.units(total)) - 1e6 * model.hidden[:, None]
    num_phases, num_groups, world = us.shape
    # Most ranks are as busy whoever the owner is: as the shares of a stripe add up to 1, its least
    # loads are constant, and only what exceeds them is a coefficient.
    excess = [_excess(model, x) for x in stripes]
    slack = m.capacity_bytes - m.per_domain(total.rows[Row.HELD])
    solver = silent_solver()
    no_columns = 0, np.zeros(0, np.int32), np.zeros(0)
    for limit in [*-us.reshape(-1), *np.maximum(slack, 0.0)]:
        solver.addRow(-inf, float(limit), *no_columns)
    for _ in stripes:
        solver.addRow(0.0, 0.0, *no_columns)  # changes of its shares add up to 0
    for phase in range(num_phases):
        rows = np.arange(num_groups * world, dtype=np.int32) + phase * num_groups * world
        solver.addCol(1.0, 0.0, inf, rows.size, rows, -np.ones(rows.size))
    for i, (stripe, loads) in enumerate(zip(stripes, excess, strict=True)):
        cost, held = _CHANGE * float(loads.max()) / world, float(stripe.rows[Row.HELD].sum())
        for r, share, load in zip(stripe.ranks.tolist(), stripe.share, loads, strict=True):
            at = np.flatnonzero(load.reshape(-1) > 1e-9)
            rows = np.concatenate([at, [us.size + m.domain[r], us.size + slack.size + i]])
            values = np.concatenate([load.reshape(-1)[at], [held, 1.0]])
            # The share is its present value, plus one variable, minus another.
            solver.addCol(cost, 0.0, inf, rows.size, rows.astype(np.int32), values)
            solver.addCol(cost, 0.0, max(0.0, share - 1 / _UNITS), rows.size,
                          rows.astype(np.int32), -values)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return [x.share for x in stripes]
    more, less = np.array(solver.getSolution().col_value)[num_phases:].reshape(-1, 2).T
    ends = np.cumsum([x.ranks.size for x in stripes])[:-1]
    return [x.share + change for x, change in zip(stripes, np.split(more - less, ends),
                                                  strict=True)]


def _weighted(tier: Tier, ranks: np.ndarray, share: np.ndarray) -> Tier:
    """The tier with weights in proportion to `share` (float64 [N], of `ranks`); its present ranks
    come first, in their order, since the first ranks of a stripe own its hottest rows."""
    if np.abs(share - _share(tier, ranks)).max() < 1 / _UNITS:
        return tier
    ideal = share / share.sum() * (_UNITS - ranks.size)
    weights = np.floor(ideal).astype(np.int64)
    weights[np.argsort(weights - ideal, kind="stable")[:_UNITS - ranks.size - weights.sum()]] += 1
    of = dict(zip(ranks.tolist(), (weights + 1).tolist(), strict=True))
    owners = tuple(dict.fromkeys((*tier.ranks, *of)))
    common = int(np.gcd.reduce([of[r] for r in owners]))
    reduced = tuple(of[r] // common for r in owners)
    return replace(tier, ranks=owners, weights=() if set(reduced) == {1} else reduced)
