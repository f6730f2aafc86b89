"""The order of the ranks in every stripe, which decides which rank owns the hottest rows.

A stripe assigns rows to its ranks round-robin, so ranks own the same number of rows, but those of
the first ranks are hotter. With suitable orders, a rank with hotter rows of one table has colder
rows of others. A rank has a load in every phase and group of cost terms, so ranks cannot simply be
sorted by one number. Instead, a local search swaps two ranks of a stripe, one of which is the
busiest of some phase, until no swap makes the step shorter. Owners of the master copies of
replicated rows, and owners of whole tiers, are chosen in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from oper.plan import Tier
from oper.search.cost.load_vector import NUM_ROWS, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import is_cut
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, evaluated, plan_load_vector

_SQUARINGS = 8  # a sum of powers with exponent 2**8 approximates the load of the slowest rank
_MIN_GAIN = 1e-6  # least relative improvement for a swap to be made
# A pass over all stripes that lowers the step time by less than this share is the last one. With
# 100 tables on 128 ranks, the first pass gains 1.5 %, all further ones 0.03 %.
_MIN_GAIN_OF_PASS = 1e-3
_ROOT = 0.5 ** _SQUARINGS


def order_ranks(relaxation: Relaxation, placements: Sequence[Placement],
                over: Callable[[], bool]) -> list[Placement]:
    """Choose the order of the ranks of every tier that several ranks may own.

    Args:
        relaxation: the cost model and the tables.
        placements: of each table. A tier with placement "owned" goes to one of its ranks.
        over: returns whether the time limit has passed.
    """
    search = _Orders(relaxation, placements)
    before = search.placements()
    search.run(over)
    found = search.placements()
    # The search minimises an approximate step time, so the exact one may have become longer.
    return min(found, before, key=lambda x: evaluated(relaxation, x).score)


class _Orders:
    """The search. Its items are tiers with several possible orders of their ranks.

    Attributes:
        hidden: float64 [P, 1, W], declared dense compute that overlaps with each phase, in
            microseconds.
        total: the load vector of the whole plan.
        excess: see `_excess`.
        tiers: by (table, piece, tier), the items with the orders found so far.
        rows: by item, its part of `total`, float64 [23, W].
    """

    def __init__(self, relaxation: Relaxation, placements: Sequence[Placement]) -> None:
        self.model, self.given = relaxation.model, placements
        self.class_of, self.classes = relaxation.classes.of_rank, relaxation.classes.ranks
        self.hidden = 1e6 * self.model.hidden[:, None]  # [P, 1, W]
        self.total = plan_load_vector(relaxation, list(placements))
        self.excess = _excess(self.model, self.classes)
        self.tiers: dict[tuple[int, int, int], Tier] = {}
        self.rows: dict[tuple[int, int, int], np.ndarray] = {}
        for k, (t, pieces) in enumerate(zip(relaxation.tables, placements, strict=True)):
            ordered = t.ids_are_positions or is_cut(pieces)
            for i, piece in enumerate(pieces):
                pushed = sum(x.mode == "push" and x.placement != "replicated" for x in piece.tiers)
                for n, tier in enumerate(piece.tiers):
                    is_pushed = tier.mode == "push" and tier.placement != "replicated"
                    world = self.class_of.size
                    if len(tier.ranks) > 1 and not (is_pushed and pushed > 1) and (
                            tier.placement != "replicated" or len(tier.ranks) == world):
                        self.tiers[k, i, n] = tier
                        self.rows[k, i, n] = self.model.piece_load_vector(
                            t, replace(piece, tiers=(tier,)), ordered).rows

    def placements(self) -> list[Placement]:
        """The placements with the orders found."""
        return [tuple(replace(p, tiers=tuple(
            _narrowed(self.tiers.get((k, i, n), x)) for n, x in enumerate(p.tiers)))
            for i, p in enumerate(pieces)) for k, pieces in enumerate(self.given)]

    def _loads(self, rows: np.ndarray) -> np.ndarray:
        """Return the loads, float64 [P, 8, W], of a plan with the load vector `rows`, float64 [23,
        W]."""
        us = self.model.group_us(self.model.units(replace(self.total, rows=rows)))
        return np.asarray((us - self.hidden).clip(0.0))

    def _fullest(self, rows: np.ndarray) -> float:
        """Return the used share of the fullest memory, at least 1."""
        m = self.model.machine
        return max(1.0, float(m.memory_used(rows[Row.HELD], rows[Row.HOST_HELD]).max()))

    def run(self, over: Callable[[], bool]) -> None:
        """Swap ranks until no swap makes the step shorter or the time limit has passed. No memory
        gets fuller than allowed, or than it was."""
        loads, fullest = self._loads(self.total.rows), self._fullest(self.total.rows)
        known = _smoothed(loads)
        spread = {at: float(np.ptp(self._own(rows), axis=0).max())
                  for at, rows in self.rows.items()}
        items = [at for at in sorted(spread, key=lambda x: -spread[x])
                 if spread[at] > _MIN_GAIN * known]
        before = np.inf
        while known < before * (1 - _MIN_GAIN_OF_PASS):
            before = known
            for at in items:
                while not over() and (swap := self._best_swap(at, loads, known)) is not None:
                    pair, permutation = swap
                    moved = self.rows[at][:, permutation]
                    rows = self.total.rows + (moved - self.rows[at])
                    found = self._loads(rows)
                    step = _smoothed(found)
                    if step >= known * (1 - _MIN_GAIN) or self._fullest(rows) > fullest:
                        break
                    known, loads = step, found
                    self.total = replace(self.total, rows=rows)
                    self.rows[at] = moved
                    self.tiers[at] = _with_swapped(self.tiers[at], *pair)

    def _own(self, rows: np.ndarray) -> np.ndarray:
        """Return the loads that an item puts on each rank because it owns rows, float64
        [W, P * 8]."""
        out = np.empty((self.class_of.size, self.excess.shape[2]))
        for ranks, excess in zip(self.classes, self.excess, strict=True):
            out[ranks] = rows[:, ranks].T @ excess
        return out

    def _best_swap(self, at: tuple[int, int, int], loads: np.ndarray, known: float
                   ) -> tuple[tuple[int, int], np.ndarray] | None:
        """Return the swap of two ranks of an item that is estimated to be best: the two ranks, and
        the permutation of all ranks; None if no swap seems to make the step shorter than `known`.
        The estimate neglects changes of the other ranks' loads, which are small."""
        phases, groups, world = loads.shape
        own = self._own(self.rows[at]).T.reshape(phases, groups, world)
        ranks = np.array(self.tiers[at].ranks)
        busy = np.unique(loads.max(axis=1).argmax(axis=-1))
        busy = busy[np.isin(busy, ranks)]
        a, b = (x.ravel() for x in np.meshgrid(busy, ranks, indexing="ij"))
        # Only for interchangeable ranks is the load vector after a swap a permutation of its
        # columns.
        keep = (a != b) & (self.class_of[a] == self.class_of[b])
        a, b = a[keep], b[keep]
        if not a.size:
            return None
        more = own[..., b] - own[..., a]  # [P, 8, N]
        most = loads.max(axis=(1, 2), keepdims=True).clip(1e-30)
        now = _powers(loads / most)
        then = _powers((loads[..., a] + more) / most) + _powers((loads[..., b] - more) / most)
        sums = now.sum(axis=(1, 2))[:, None] + (then - now[..., a] - now[..., b]).sum(axis=1)
        steps = (most[:, 0] * sums.clip(0.0) ** _ROOT).sum(axis=0)
        n = int(steps.argmin())
        if steps[n] >= known:
            return None
        permutation = np.arange(world)
        permutation[[a[n], b[n]]] = b[n], a[n]
        return (int(a[n]), int(b[n])), permutation


def _powers(x: np.ndarray) -> np.ndarray:
    """Return `x` ** 2 ** _SQUARINGS, with `x` clipped to [0, 2] so that nothing overflows: loads
    are relative to the largest one, and a swap that doubles it is never the best."""
    x = x.clip(0.0, 2.0)
    for _ in range(_SQUARINGS):
        x *= x
    return x


def _smoothed(loads: np.ndarray) -> float:
    """Return the approximate step time: the sum over phases of an approximate maximum of the
    loads, float64 [P, 8, W], over groups and ranks."""
    most = loads.max(axis=(1, 2), keepdims=True).clip(1e-30)
    return float((most[:, 0, 0] * _powers(loads / most).sum(axis=(1, 2)) ** _ROOT).sum())


def _excess(model: CostModel, classes: Sequence[np.ndarray]) -> np.ndarray:
    """Return by how much a unit of each load-vector row loads its owner more than it loads the
    other ranks of the owner's class; float64 [classes, 23, P * 8]."""
    out = []
    for ranks in classes:
        unit = np.eye(NUM_ROWS)[:, :, None] * (np.arange(model.machine.world_size) == ranks[0])
        us = model.group_us(model.loads(unit)).reshape(NUM_ROWS, -1, unit.shape[-1])
        others = us[..., ranks[1:]].mean(axis=-1) if ranks.size > 1 else 0.0
        out.append(us[..., ranks[0]] - others)
    return np.stack(out)


def _with_swapped(tier: Tier, a: int, b: int) -> Tier:
    """The tier with two of its ranks swapped."""
    other = {a: b, b: a}
    return replace(tier, ranks=tuple(other.get(r, r) for r in tier.ranks))


def _narrowed(tier: Tier) -> Tier:
    """Return an owned tier with its first rank as the only owner; others unchanged."""
    return replace(tier, ranks=tier.ranks[:1]) if tier.placement == "owned" else tier
