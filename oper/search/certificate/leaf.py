"""The lower bound that a leaf's prices certify, recomputed from the cost model.

For weights y >= 0 of the ranks' loads that add up to at most 1 in every phase, a step is at least

    fixed + sum of y (load - hidden) = fixed + y (base - hidden) + sum over tables of cost(table, y)

where base are the loads that every plan has, and hidden is the dense compute that overlaps with a
phase. So the bound follows from every table's least cost at weights y. Two further kinds of prices
are added to y: prices of memory, whose contribution is never positive because a plan that fits
exceeds no memory; and prices of the inequalities about the owner of the largest piece
(`oper.search.certificate.prices.OWNER_INEQUALITIES`), which count towards the sum of their phase's
weights.
"""

from __future__ import annotations

import numpy as np

from oper.search.certificate.loads import LOCAL, PIECE_GROUPS, Loads, Probe
from oper.search.certificate.prices import APART, READER, SPREAD, Leaf, UnitPrices
from oper.search.certificate.tables import TableCosts
from oper.search.cost.load_vector import NUM_ROWS, SUM_ROWS, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import COPIES, KINDS, PUSH, fixed_load_vectors, has_copies, may_hold
from oper.search.problem.machine import neighbourhoods
from oper.search.problem.statement import IDS


class Checker:
    """Recomputes the bounds of the leaves of one part of a proof.

    Args:
        model: the cost model of the problem restricted to the part's plans.
        apart: None, or a load (phase, group of terms). The first host (on a single host: memory
            domain) is then assumed to own the piece with the largest such load, and its ranks have
            separate prices.
    """

    def __init__(self, model: CostModel, apart: tuple[int, int] | None) -> None:
        self.model, self.apart, problem = model, apart, model.problem
        self.probe = probe = Probe(model, apart is not None)
        self.classes = probe.classes
        self.tables = problem.free_tables
        if has_copies(model) and len(self.classes.ranks) > 1:
            raise ValueError("copies per host need the same prices on all ranks")
        #: By way of holding rows (`KINDS` of `oper.search.cost.space`): whether each table's rows
        #: may be held in this way by owners of each class; bool [T, C].
        self.may = {kind: np.array([[may_hold(problem, t.spec.name, kind, r) for r in probe.first]
                                    for t in self.tables], bool).reshape(-1, probe.first.size)
                    for kind in KINDS if kind != COPIES or has_copies(model)}
        #: By way of holding rows: loads of one unit of each feature of every table; the axes are
        #: [T, 2, C, 4, ...], see `Probe.table`.
        self.asked = {kind: Loads.stack([probe.table(t, kind) for t in self.tables])
                      for kind, may in self.may.items() if may.any()}
        #: float64 [T, 3], bytes in `SUM_ROWS` per float32 byte of a table's partial sums.
        self.per_byte = np.array([model.messages.per_byte(t) for t in self.tables]).reshape(-1, 3)
        #: Loads of a byte of each of `SUM_ROWS`, and of an id pushed to its owner; [C, 4, ...].
        one = probe.units(NUM_ROWS)
        asks = model.costs.push_ns * one[:, list(model.passes)].sum(axis=1)
        self.owned = probe.loads(np.concatenate([one[:, SUM_ROWS], asks[:, None]], axis=1))
        #: Loads of one more piece, of 1 ns in every pass, and of a pushed bag; [1, 3, ...].
        every = np.zeros((1, 3, NUM_ROWS, model.machine.world_size))
        every[0, 0, list(model.every_pass)] = model.costs.table_us * 1e3
        every[0, 1, list(model.passes)] = 1.0
        every[0, 2, Row.FORWARD_NS] = model.costs.push_bag_ns
        self.charges = probe.loads(every)
        whole, pinned = fixed_load_vectors(model)
        self.base = base = whole.plus(pinned)
        hidden = 1e6 * model.hidden  # [P, W]
        groups = model.group_us(model.units(base)) - hidden[:, None]
        #: float64 [L, C], loads that every plan has, summed over the ranks of each class, less the
        #: dense compute that hides them.
        self.visible = probe.by_class(groups, base.rows[[Row.HELD, Row.HOST_HELD]])
        #: float64 [C, P, 5], least load that every plan puts on a rank of each class; [C, P], the
        #: most dense compute that hides it.
        floor = model.group_us(model.units(whole))[:, :PIECE_GROUPS]
        self.floor = np.stack([floor[..., r].min(axis=-1) for r in self.classes.ranks])
        self.hidden = np.stack([hidden[:, r].max(axis=-1) for r in self.classes.ranks])
        #: bool [P, 5], groups that include own time; of an owner's, only the excess over a reader's
        #: counts as load of a piece.
        self.beside = model.has_local[:, :PIECE_GROUPS]
        self.costs = TableCosts(model, self.may, np.array([r.size for r in self.classes.ranks]))
        if PUSH in self.asked:
            owned = self._more(self.owned)
            self.costs.set_loads(self._more(self.asked[PUSH])[..., IDS:, :, :], np.einsum(
                "tq,cqpg->tcpg", self.per_byte, owned[:, :-1]), owned[:, -1])

    def _more(self, x: Loads) -> np.ndarray:
        """Return loads of a piece on its owner; of the owner's own work, only the excess over that
        of the least loaded reader."""
        return np.asarray(x.own - x.read[..., None] * self.beside)

    def bound(self, leaf: Leaf, fixed_us: float) -> float:
        """Return a lower bound on the step time of the leaf's plans, microseconds.

        Args:
            leaf: the leaf. Prices that add up to more than 1 in some phase are scaled down.
            fixed_us: fixed cost of a step, which every plan of the leaf pays.
        """
        visible = float((leaf.weights * self.visible).sum()) - leaf.memory_us
        ranks = np.array([r.size for r in self.classes.ranks])
        weight = (leaf.weights[:-2] @ ranks).reshape(len(self.beside), -1).sum(axis=1)
        least, ratio = leaf.least, np.zeros(2 * leaf.least.shape)
        for _ in range(2 * (PUSH in self.asked)):
            ratio = self.costs.implied(least)
            least = np.maximum(least, (ratio * least[..., None, None]).max((0, 1)))
        floor = self.floor.min(axis=0)
        for kind, p, g, price in leaf.owner:
            times = 1.0 + self._spared(kind, g)
            weight[p] += price * times
            load = self.apart if kind == APART else None
            piece = least[p, g] if load in (None, (p, g)) else ratio[load][p, g] * least[load]
            visible += price * float(
                piece + floor[p, g] - times * self.hidden[:, p].max()
                + (times - 1.0) * self.beside[p, g] * floor[p, LOCAL])
        owned = self._price(self.owned, leaf)
        prices = UnitPrices({k: np.moveaxis(self._price(x, leaf), 1, 0)
                             for k, x in self.asked.items()},
                            self.per_byte @ owned[:, :-1].T, owned[:, -1],
                            *self._price(self.charges, leaf)[0])
        found = self.costs.least(prices, leaf, self.floor - self.hidden[..., None])
        return fixed_us + (visible + float(found.sum())) / max(1.0, float(weight.max()))

    def _spared(self, kind: str, g: int) -> float:
        """The factor k of an inequality about links, `T + k (T - R) >= load + s E`; 0 for others.

        T is the length of the phase, `load` that of the largest piece on its owner, and R the
        rank's own work if the exchange waits for it, else 0. All rows together have E bytes. A rank
        that takes s seconds per byte reads the `E - e` bytes that other hosts own. Its own host
        owns e bytes and sends them to the n ranks of other hosts within `T - R`, so that
        `e n <= (T - R) sum 1 / s` over the host's ranks. Hence `s e <= k (T - R)`, with k the
        largest `s / n sum 1 / s` of any rank.
        """
        if kind != SPREAD:
            return 0.0
        m, (of_rank, _) = self.model.machine, neighbourhoods(self.model.machine)
        seconds, others = m.seconds_per_unit[g + 1], m.world_size - np.bincount(of_rank)[of_rank]
        return float((seconds * np.bincount(of_rank, 1 / seconds)[of_rank] / others).max())

    def _price(self, x: Loads, leaf: Leaf) -> np.ndarray:
        """Return the cost at the leaf's prices of one unit of each of F features, if owned by each
        of C classes of ranks, float64 [..., C, F]. This includes the part of a unit that the
        owner of the largest piece reads as every rank does."""
        out = np.asarray(np.einsum("...lc,lc->...", x.total, leaf.weights))
        for kind, p, g, price in leaf.owner:
            times = 1.0 + self._spared(kind, g)
            out = out + price * times * self.beside[p, g] * x.read[..., p]
            if kind != READER:
                out = out + price * (x.apart if kind == APART else x.far)[..., p, g]
        return out
