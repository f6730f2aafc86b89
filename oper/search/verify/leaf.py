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
from oper.search.cost.tally import (
    FORWARD_NS,
    HELD,
    HOST_HELD,
    NUM_RELATIONAL,
    NUM_ROWS,
    PARTIALS,
)
from oper.search.problem.machine import copy_sets, rank_classes
from oper.search.problem.space import STILL, WITH_COLUMNS
from oper.search.problem.statement import IDS
from oper.search.verify.loads import (
    KINDS,
    LOCAL,
    UnitLoads,
    base_tally,
    copy_units,
    free_blocks,
    kind_rows,
)
from oper.search.verify.prices import (
    APART,
    PIECE,
    PIECE_GROUPS,
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
        self.model, self.part, problem = model, part, model.problem
        held = problem.constraints.tables
        named = [*part.classes, part.apart,
                 *(c.ranks for c in held.values() if c.ranks is not None),
                 *(x.ranks for c in held.values() for x in c.tiers or ())]
        self.classes = rank_classes(model.machine, named)
        self.units = UnitLoads(model, self.classes)
        self.tables = problem.free_tables
        pushes = part.plans != (STILL,)
        allowed = {"replicated": "replicated", "shard": "pull", "host": "pull", "push": "push"}
        self.kinds = [k for k in KINDS if allowed[k] in problem.allow and (k != "push" or pushes)
                      and (k != "host" or model.machine.host_capacity_bytes.any())]
        self.rows = {k: [kind_rows(model, t, k, self.classes) for t in self.tables]
                     for k in self.kinds}
        sets = copy_sets(model.machine)
        self.copies = ([copy_units(model, t, sets[0]) for t in self.tables]
                       if "per_host" in problem.allow and not pushes and sets
                       and len(self.classes.ranks) == 1 else [])
        whole, self.base = base_tally(model, pushes)
        base = model.group_us(model.units(whole))[:, :PIECE_GROUPS]
        hidden = 1e6 * model.hidden  # [P, W]
        #: float64 [P, 6, W], what every plan puts on each rank beyond what hides it.
        self.visible = model.group_us(model.units(self.base)) - hidden[:, None]
        #: float64 [C, P, 5], what every plan puts on each rank of a class; [P, 5], on any.
        self.floor = np.stack([base[..., r].min(axis=-1) for r in self.classes.ranks])
        self.hidden_most = np.stack([hidden[:, r].max(axis=-1) for r in self.classes.ranks])
        self.costs = TableCosts(model, self.tables, [free_blocks(model, t) for t in self.tables],
                                WITH_COLUMNS in part.plans, self._allowed(),
                                np.array([r.size for r in self.classes.ranks]))
        self._set_piece_loads()

    def _allowed(self) -> dict[str, np.ndarray]:
        """Which table may be held how, by the owner's class; bool [T, C] by kind."""
        problem, out = self.model.problem, {}
        for kind in (*self.kinds, *(["copies"] if self.copies else [])):
            may = np.zeros((len(self.tables), len(self.classes.ranks)), bool)
            for k, t in enumerate(self.tables):
                name = t.spec.name
                held = problem.constraints.tables.get(name)
                places, modes = problem.placements_of(name), problem.modes_of(name)
                memory = "host" if kind == "host" else "device"
                if kind in ("replicated", "copies"):
                    may[k] = "replicated" in places
                    continue
                mode = "push" if kind == "push" else "pull"
                if memory in problem.memories_of(name) and mode in modes and (
                        places & {"striped", "owned"}):
                    may[k] = [held is None or held.ranks is None or r in held.ranks
                              for r in self.units.first]
            out[kind] = may
        return out

    def _set_piece_loads(self) -> None:
        """What ids of a pushed piece, and bytes of its partial sums, put on its owner."""
        if "push" not in self.kinds:
            return
        u, rows = self.units, self.rows["push"]
        has_local = self.model.has_local[:, :PIECE_GROUPS]
        partial = u.own[:, PARTIALS, :, :PIECE_GROUPS].copy()
        if self.part.beside_reader:
            partial -= u.other[:, PARTIALS, :, LOCAL, None] * has_local
        each = []
        for x in rows:
            owner, reader = x.owner[:, :, IDS:], x.reader[:, :, IDS:]
            load = np.einsum("wcfq,cqpg->wfcpg", owner, u.own[..., :PIECE_GROUPS])
            if self.part.beside_reader:  # than a rank of the owner's class, if there is one
                read = self._elsewhere(owner, reader)[..., LOCAL]
                same = np.einsum("wcfcp->wfcp", read)
                least = np.nanmin(read, axis=3).swapaxes(1, 2)
                load -= np.where(np.isnan(same), least, same)[..., None] * has_local
            each.append(load)
        asks = self.model.costs.push_ns * u.own[:, list(self.model.passes)].sum(axis=1)
        self.costs.set_loads(np.array(each), asks[..., :PIECE_GROUPS], np.maximum(partial, 0.0))

    def _elsewhere(self, owner: np.ndarray, reader: np.ndarray) -> np.ndarray:
        """Microseconds on a rank of each class that owns nothing, by the owner's class; owner
        [..., C, F, 20], reader [..., C, F, 20, D] -> float64 [..., C, F, D, P, 6], NaN where there
        is no such rank."""
        u = self.units
        local = np.einsum("...cfqd,dqpg->...cfdpg", reader[..., NUM_RELATIONAL:, :],
                          u.own[:, NUM_RELATIONAL:])
        served = np.einsum("...cfq,cqpg->...cfpg", owner, u.other)
        return np.asarray(local + served[..., None, :, :])

    # -- a leaf -----------------------------------------------------------------------------------

    def bound(self, leaf: Leaf, fixed_us: float) -> float:
        """The bound in microseconds.

        Args:
            leaf: the leaf; all its prices are scaled down where those of a phase add up to more
                than 1.
            fixed_us: fixed cost of a step of any of its plans.
        """
        visible = -leaf.memory_us + float((leaf.load * self.visible).sum())
        visible += float(leaf.memory @ self.model.machine.per_domain(self.base.rows[HELD]))
        visible += float(leaf.host @ self.model.machine.per_host(self.base.rows[HOST_HELD]))
        least = np.maximum(leaf.least, (self.costs.ratio * leaf.least[..., None, None]).max((0, 1)))
        weight = leaf.load.sum(axis=(1, 2))
        for kind, p, g, price in leaf.owner:
            row = price * self._owner_row(kind, p, g)
            weight = weight + row
            visible += price * float(least[p, g] + self.floor[:, p, g].min())
            visible -= float(row @ self.hidden_most.max(axis=0))
        asked = self.costs.least(self._asked(leaf), leaf, self.floor - self.hidden_most[..., None])
        return fixed_us + (visible + float(asked.sum())) / max(1.0, float(weight.max()))

    def _owner_row(self, kind: str, p: int, g: int) -> np.ndarray:
        """Weights of the phases' times that bound such a row.

        A rank that takes s seconds for a byte reads all that other hosts own, `E - e` bytes of E.
        What its own host owns, `e (others) <= T sum 1 / s` of it sends within a phase of length T,
        or gets back as gradients. So `T (1 + spared) >= load + s E`.
        """
        one = np.eye(len(self.model.phases))[p]
        if kind not in (SPREAD, RETURNED):
            return one
        m = self.model.machine
        seconds, of = m.seconds_per_unit[g + 1], self.units.hood
        others = m.world_size - np.bincount(of)[of]
        spared = float((seconds * np.bincount(of, 1 / seconds)[of] / others).max())
        widest = max((t.spec.row_bytes / (4.0 * t.spec.dim) for t in self.tables), default=1.0)
        return one + spared * (one if kind == SPREAD else
                               max(1.0, widest) * np.eye(one.size)[-1])

    def _asked(self, leaf: Leaf) -> Asked:
        """Prices of what tables ask, by the class of the rank that owns."""
        u, m = self.units, self.model.machine
        unit = np.einsum("cqpgw,pgw->cq", u.on, leaf.load)  # [C, 20]
        rank = np.array(u.first)
        unit[:, HELD] += leaf.memory[m.domain[rank]]
        unit[:, HOST_HELD] += leaf.host[m.host[rank]]
        size = np.array([r.size for r in self.classes.ranks])
        every, partial = size @ unit, unit[:, PARTIALS].copy()  # [20], [C]
        shape = (2, len(self.tables), size.size, 4)
        cost = {}
        for kind in self.kinds:
            cost[kind] = np.einsum("twcfqd,dq->wtcf", np.array([x.total for x in self.rows[kind]]),
                                   unit) if self.tables else np.zeros(shape)
        for name, p, g, price in leaf.owner:
            if name == PIECE:
                continue
            for kind in self.kinds:
                for k, x in enumerate(self.rows[kind]):
                    cost[kind][:, k] += price * self._read(name, p, g, x.owner, x.reader)
            sums = np.zeros((u.own.shape[0], 1, NUM_ROWS))
            sums[:, 0, PARTIALS] = 1.0
            partial += price * self._read(name, p, g, sums,
                                           np.zeros((*sums.shape, size.size)))[:, 0]
            if self._adds_local(p, g):
                every = every + price * u.own[:, :, p, LOCAL].min(axis=0)
        if self.copies:
            y = leaf.load.mean(axis=-1)
            cost["copies"] = np.zeros(shape)
            for k, (times, held) in enumerate(self.copies):
                cost["copies"][:, k] = np.einsum("fpg,pg->f", times, y) + held * leaf.memory[0]
        costs = self.model.costs
        passes = list(self.model.passes)
        return Asked(
            cost, partial, own=costs.push_ns * unit[:, passes].sum(axis=1),
            piece=costs.table_us * 1e3 * float(every[list(self.model.every_pass)].sum()),
            tier=float(every[passes].sum()), bag=costs.push_bag_ns * float(every[FORWARD_NS]))

    def _adds_local(self, p: int, g: int) -> bool:
        """Whether rows about owners hold what these read beside the piece, of their own time."""
        return bool(self.part.beside_reader and self.model.has_local[p, g])

    def _read(self, name: str, p: int, g: int, owner: np.ndarray, reader: np.ndarray
              ) -> np.ndarray:
        """What a rank reads of a unit of each feature at least, whoever owns the largest piece: in
        its own time, where that counts, and over its links, except for `READER`; owner [..., C, F,
        20], reader [..., C, F, 20, D] -> float64 [..., C, F]."""
        u, out = self.units, np.zeros(owner.shape[:-1])
        if self._adds_local(p, g):
            own = np.einsum("...cfq,cq->...cf", owner, u.own[:, :, p, LOCAL])
            other = np.nanmin(self._elsewhere(owner, reader)[..., p, LOCAL], axis=-1)
            out += np.minimum(own, other)
        if name == READER:
            return out
        read = u.far[:, :, p, g]
        if name == APART:
            here = u.links[:, :, p, g][..., list(self.part.apart)]
            there = np.isfinite(u.rest[:, :, p, g][..., list(self.part.apart)])
            here = np.where(there, here, np.inf).min(axis=-1)
            read = np.where(np.isfinite(here), here, 0.0)  # nobody else is there
        return out + np.einsum("...cfq,cq->...cf", owner[..., :NUM_RELATIONAL],
                               read[:, :NUM_RELATIONAL])
