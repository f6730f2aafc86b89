"""The lower bound that a leaf's prices certify, computed anew from the cost model.

For weights y >= 0 of the ranks' loads that add up to at most 1 in every phase, a step is at least

    fixed + sum of y (load - hidden) = fixed + y base + sum over tables of what the table asks at y

so that the bound is that with every table's least cost. Prices of memory (capacity less what is
held is never negative) and of rows about the owner of the largest piece add to y; with the latter,
the weights of a phase include theirs.
"""

from __future__ import annotations

import numpy as np

from oper.search.cost.model import CostModel
from oper.search.cost.space import has_copies
from oper.search.cost.tally import FORWARD_NS, HELD, HOST_HELD, NUM_ROWS, PARTIALS
from oper.search.problem.machine import rank_classes
from oper.search.problem.space import STILL, WITH_COLUMNS
from oper.search.problem.statement import IDS
from oper.search.verify.loads import KINDS, PIECE_GROUPS, Loads, Probe, base_tally
from oper.search.verify.prices import (
    APART,
    PIECE,
    READER,
    RETURNED,
    SPREAD,
    Leaf,
    Part,
)
from oper.search.verify.tables import Asked, TableCosts


class Checker:
    """Bounds of the leaves of one part.

    Args:
        model: the cost model.
        part: the part.
    """

    def __init__(self, model: CostModel, part: Part) -> None:
        self.model, self.part, problem, m = model, part, model.problem, model.machine
        held = problem.constraints.tables.values()
        self.classes = rank_classes(m, [
            *part.classes, part.apart, *(np.flatnonzero(x) for x in part.memories),
            *(c.ranks for c in held if c.ranks is not None),
            *(x.ranks for c in held for x in c.tiers or ())])
        self.probe = probe = Probe(model, self.classes, part.apart)
        self.tables = problem.free_tables
        pushes = part.plans != (STILL,)
        kinds = [k for k in KINDS if (k != "push" or pushes) and (
            k != "host" or m.host_capacity_bytes.any())]
        self.may = {k: self._may(k) for k in kinds}
        asked = {k: [probe.table(t, k) for t in self.tables] for k in kinds if self.may[k].any()}
        if has_copies(model) and not pushes:
            if len(self.classes.ranks) > 1:
                raise ValueError("copies per host need the same prices on all ranks")
            self.may["copies"] = self.may["replicated"]
            asked["copies"] = [probe.copies(t) for t in self.tables]
        #: Loads of one unit of each feature of a table's rows, by how rows are held; [T, 2, C, 4,
        #: ...].
        self.asked = {k: Loads.stack(x) for k, x in asked.items() if x}
        #: Loads of a byte of partial sums, and of an id pushed to its owner; [C, 2, ...].
        own = probe.units(NUM_ROWS, [PARTIALS, FORWARD_NS])
        own[:, 1] = sum(probe.units(NUM_ROWS, [q])[:, 0] for q in model.passes)
        self.owned = probe.loads(own * [[[1.0]], [[model.costs.push_ns]]])
        #: Loads on every rank of one more piece, 1 ns in every pass, and a pushed bag; [1, 3, ...].
        every = np.zeros((1, 3, NUM_ROWS, m.world_size))
        every[0, 0, list(model.every_pass)] = model.costs.table_us * 1e3
        every[0, 1, list(model.passes)] = 1.0
        every[0, 2, FORWARD_NS] = model.costs.push_bag_ns
        self.charges = probe.loads(every)
        whole, base = base_tally(model, pushes)
        self.base = base
        hidden = 1e6 * model.hidden  # [P, W]
        #: float64 [L, W], load of every plan on each rank, less the dense compute that hides it.
        self.visible = probe.every(model.units(base), base.rows[[HELD, HOST_HELD]])
        self.visible[:-2] -= np.repeat(hidden, len(self.visible[:-2]) // len(hidden), axis=0)
        #: float64 [C, P, 5], what every plan puts on each rank of a class; [C, P], what hides it.
        floor = model.group_us(model.units(whole))[:, :PIECE_GROUPS]
        self.floor = np.stack([floor[..., r].min(axis=-1) for r in self.classes.ranks])
        self.hidden = np.stack([hidden[:, r].max(axis=-1) for r in self.classes.ranks])
        self.costs = TableCosts(model, self.tables, WITH_COLUMNS in part.plans, self.may,
                                np.array([r.size for r in self.classes.ranks]))
        #: float64 [P, 5], 1 where only the owner's time in excess of a reader's counts.
        self.beside = model.has_local[:, :PIECE_GROUPS] * part.beside_reader
        if "push" in self.asked:
            x = self.asked["push"]
            self.costs.set_loads(self._more(x)[..., IDS:, :, :], *np.moveaxis(
                self._more(self.owned), 1, 0))

    def _may(self, kind: str) -> np.ndarray:
        """Whether a table may be held in this way, by the owner's class; bool [T, C]."""
        problem, out = self.model.problem, []
        memory, mode = ("host" if kind == "host" else "device"), (
            "push" if kind == "push" else "pull")
        for t in self.tables:
            name = t.spec.name
            places, held = problem.placements_of(name), problem.constraints.tables.get(name)
            if kind == "replicated":
                out.append(["replicated" in places] * len(self.classes.ranks))
                continue
            may = (memory in problem.memories_of(name) and mode in problem.modes_of(name)
                   and bool(places & {"striped", "owned"}))
            out.append([may and (held is None or held.ranks is None or r in held.ranks)
                        for r in self.probe.first.tolist()])
        return np.array(out, bool).reshape(-1, len(self.classes.ranks))

    def _more(self, x: Loads) -> np.ndarray:
        """Load of a piece on its owner, in own time beyond that of the least loaded reader."""
        return np.asarray(x.own - x.read[..., None] * self.beside)

    # -- a leaf -----------------------------------------------------------------------------------

    def bound(self, leaf: Leaf, fixed_us: float) -> float:
        """The bound in microseconds.

        Args:
            leaf: the leaf; all its prices are scaled down where those of a phase add up to more
                than 1.
            fixed_us: fixed cost of a step of any of its plans.
        """
        visible = float((leaf.weights * self.visible).sum()) - leaf.memory_us
        weight = leaf.weights[:-2].reshape(len(self.beside), -1).sum(axis=1)
        least = np.maximum(leaf.least, (self.costs.ratio * leaf.least[..., None, None]).max((0, 1)))
        for kind, p, g, price in leaf.owner:
            times = self._times(kind, p, g)
            weight += price * times
            visible += price * float(least[p, g] + self.floor[:, p, g].min()
                                     - times @ self.hidden.max(axis=0))
        asked = Asked({k: np.moveaxis(self._price(x, leaf), 1, 0) for k, x in self.asked.items()},
                      *self._price(self.owned, leaf).T, *self._price(self.charges, leaf)[0])
        found = self.costs.least(asked, leaf, self.floor - self.hidden[..., None])
        return fixed_us + (visible + float(found.sum())) / max(1.0, float(weight.max()))

    def _times(self, kind: str, p: int, g: int) -> np.ndarray:
        """Weights of the phases' times that bound a row about an owner; float64 [P].

        A rank that takes s seconds for a byte reads all that other hosts own, `E - e` bytes of E.
        What its own host owns, `e (others) <= T sum 1 / s` of it sends within a phase of length T,
        or gets back as gradients. So `T (1 + spared) >= load + s E`.
        """
        m, hood, out = self.model.machine, self.probe.hood, np.eye(len(self.beside))[p]
        if kind in (SPREAD, RETURNED):
            seconds, others = m.seconds_per_unit[g + 1], m.world_size - np.bincount(hood)[hood]
            spared = float((seconds * np.bincount(hood, 1 / seconds)[hood] / others).max())
            widest = self.model.messages.most_per_gradient(self.tables)
            out[p if kind == SPREAD else -1] += spared * (
                1.0 if kind == SPREAD else widest)
        return out

    def _price(self, x: Loads, leaf: Leaf) -> np.ndarray:
        """Cost of each unit at the leaf's prices, including the least that the owner of the
        largest piece must read of it; float64 [..., C, F]."""
        y = np.stack([leaf.weights[:, r] for r in self.probe.first], axis=-1)  # [L, C]
        out = np.asarray(np.einsum("...lc,lc->...", x.total, y))
        for kind, p, g, price in leaf.owner:
            if kind != PIECE:
                out = out + price * self.beside[p, g] * x.read[..., p]
            if kind not in (PIECE, READER):
                out = out + price * (x.apart if kind == APART else x.far)[..., p, g]
        return out
