"""Loads of single units, and what tables ask: the cost model's linear parts, read off by probing.

The checker of certificates uses the problem's statement and the cost model, which define what a
step takes, and nothing of the search or of its bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost.model import CostModel
from oper.search.cost.tally import NUM_RELATIONAL, NUM_ROWS, Tally
from oper.search.problem.machine import GROUPS, RankClasses
from oper.search.problem.statement import NUM_FEATURES, TableProblem

LOCAL = GROUPS.index("local")
#: Ways to hold rows; the rows of a pushed tier are pooled by their owner.
KINDS = ("replicated", "shard", "host", "push")


class UnitLoads:
    """What a unit of every tally row on one rank costs every rank.

    Args:
        model: the cost model.
        classes: classes of interchangeable ranks.

    Attributes:
        first: a rank of each of the C classes.
        on: float64 [C, 20, P, 6, W], microseconds on every rank.
        own: float64 [C, 20, P, 6], on the rank itself.
        rest: as `on`, infinite on the rank itself.
        other: float64 [C, 20, P, 6], the least on any other rank.
        hood: int64 [W], host of each rank; on a single host, its memory domain.
        links: float64 [C, 20, P, 6, W], what of `on` are bytes over links and of host memory.
        far: float64 [C, 20, P, 6], the least of these on a rank of another host, were all links as
            fast as the fastest.
    """

    def __init__(self, model: CostModel, classes: RankClasses) -> None:
        world = model.machine.world_size
        self.first = [int(r[0]) for r in classes.ranks]
        rows = np.zeros((len(self.first), NUM_ROWS, NUM_ROWS, world))
        for c, rank in enumerate(self.first):
            rows[c, np.arange(NUM_ROWS), np.arange(NUM_ROWS), rank] = 1.0
        units = model.loads(rows)
        self.on = model.group_us(units)
        self.own = np.stack([self.on[c, ..., r] for c, r in enumerate(self.first)])
        self.rest = self.on.copy()
        for c, rank in enumerate(self.first):
            self.rest[c, ..., rank] = np.inf if world > 1 else 0.0
        self.other = self.rest.min(axis=-1)
        m = model.machine
        self.hood = m.host if m.host.any() else m.domain
        seconds = m.seconds_per_unit[1:].copy()
        seconds[LOCAL] = 0.0
        self.links = units[..., 1:, :] * seconds * 1e6
        by_byte = self.links / np.where(seconds > 0, seconds, np.inf)
        self.far = np.zeros(self.own.shape)
        for c, rank in enumerate(self.first if self.hood.any() else ()):
            self.far[c] = (by_byte[c, ..., self.hood != self.hood[rank]].min(axis=0)
                           * seconds.min(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class KindRows:
    """Tally rows of a unit of each feature, owned by a rank of each class, held in one way.

    A piece of a share of the columns asks that share of the first, which is of all columns, and the
    rest of the second, which is of none: what any piece asks, whatever its width is.

    Attributes:
        total: float64 [2, C, 4, 20, C], summed over the ranks of each class; with the squares that
            owners of columns of a row exchange.
        owner: float64 [2, C, 4, 20], of the owner, without them.
        reader: float64 [2, C, 4, 20, C], of another rank of each class; NaN where there is none.
    """

    total: np.ndarray
    owner: np.ndarray
    reader: np.ndarray


def kind_rows(model: CostModel, t: TableProblem, kind: str, classes: RankClasses) -> KindRows:
    """The rows of one table, held in one of `KINDS`."""
    make = {"replicated": model.replica_rows, "shard": model.shard_rows, "host": model.host_rows,
            "push": model.push_rows}[kind]
    world, first = model.machine.world_size, [int(r[0]) for r in classes.ranks]
    owner = np.zeros((len(first), NUM_FEATURES, NUM_FEATURES, world))
    for c, rank in enumerate(first):
        owner[c, np.arange(NUM_FEATURES), np.arange(NUM_FEATURES), rank] = 1.0
    once, twice = make(t, t.spec.dim, owner), make(t, 2 * t.spec.dim, owner)
    rows = np.stack([once, 2 * once - twice])
    total, cut = (np.stack([x[..., r].sum(axis=-1) for r in classes.ranks], axis=-1)
                  for x in (rows, model.cut_rows(t, once, twice)))
    total[1] = cut
    own = np.stack([rows[:, c, ..., r] for c, r in enumerate(first)], axis=1)
    reader = np.full(total.shape, np.nan)
    for c, rank in enumerate(first):
        for d, ranks in enumerate(classes.ranks):
            others = ranks[ranks != rank]
            if others.size:
                reader[:, c, ..., d] = rows[:, c, ..., others[0]]
    reader[..., :NUM_RELATIONAL, :] = 0.0  # those are the owner's
    return KindRows(total, own, reader)


def copy_units(model: CostModel, t: TableProblem, ranks: tuple[int, ...]
               ) -> tuple[np.ndarray, np.ndarray]:
    """What a unit of each feature asks that is copied to one rank of every host, where ranks are
    interchangeable: microseconds of all ranks together by phase and group, float64 [4, P, 6], and
    bytes held, float64 [4]."""
    tier = Tier(0, t.spec.num_rows, "replicated", ranks)
    times, held = [], []
    for f in range(NUM_FEATURES):
        owner = np.zeros((NUM_FEATURES, model.machine.world_size))
        owner[f, list(ranks)] = 1.0 / len(ranks)
        rows, need, send = model.subset_rows(t, t.spec.dim, tier, owner)
        tally = Tally(rows, {ranks: (need, send)})
        times.append(model.group_us(model.units(tally)).sum(axis=-1))
        held.append(model.evaluation(tally).held_bytes.sum())
    return np.stack(times), np.array(held)


def base_tally(model: CostModel, pushes: bool) -> tuple[Tally, Tally]:
    """What every plan pays: outputs and pinned tables, and the same with pinned rows of tables that
    are free to choose for the others; `pushes`: whether rows that are not pinned may be pushed."""
    problem = model.problem
    whole = model.base()
    for t in problem.tables:
        held = problem.constraints.tables.get(t.spec.name)
        if held is not None and held.tiers is not None:
            ordered = t.ids_are_positions or len(held.tiers) > 1
            whole = whole.plus(model.tally(t, (Piece(0, t.spec.dim, held.tiers),), ordered))
    total = whole
    for t in problem.tables:
        pinned = problem.pinned_of(t.spec.name)
        held = problem.constraints.tables.get(t.spec.name)
        if pinned and (held is None or held.tiers is None):
            every = len(pinned) == 1 and pinned[0].stop - pinned[0].start == t.spec.num_rows
            # Partial sums are concave: with other pushed rows beside them they may add nothing.
            alone = every or not (pushes and "push" in problem.modes_of(t.spec.name))
            total = total.plus(model.piece_tally(t, Piece(0, t.spec.dim, pinned),
                                                 t.ids_are_positions or not every, alone))
    return whole, total


def free_blocks(model: CostModel, t: TableProblem) -> np.ndarray:
    """Features of the table's blocks without its pinned rows; float64 [K, 4]."""
    out = t.blocks.copy()
    for tier in model.problem.pinned_of(t.spec.name):
        inside = np.clip(t.edges, tier.start, tier.stop)
        out -= np.diff(t.prefix(inside), axis=1).T
    return np.maximum(out, 0.0)
