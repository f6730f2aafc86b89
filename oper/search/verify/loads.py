"""The load that table rows and other units put on ranks, found by probing the cost model.

The checker of certificates uses the problem's statement and the cost model, which define what a
step takes, and nothing of the search or of its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost.model import CostModel
from oper.search.cost.tally import HELD, HOST_HELD, Tally
from oper.search.problem.machine import GROUPS, RankClasses, copy_sets
from oper.search.problem.statement import NUM_FEATURES, TableProblem

LOCAL, PIECE_GROUPS = GROUPS.index("local"), 5  # a pushed piece is not in host memory
#: Ways to hold rows; those of a pushed tier are pooled by their owner.
KINDS = ("replicated", "shard", "host", "push")


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Loads of F kinds of units, by the class of the rank that owns them.

    Attributes:
        total: float64 [..., C, F, L, C], microseconds by phase and group of terms, then bytes in
            device and in host memory (L = 6 P + 2), summed over the ranks of each class.
        own: float64 [..., C, F, P, 5], on the owner.
        read: float64 [..., C, F, P], own time on the rank where that is least.
        far: float64 [..., C, F, P, 5], over links, the least on a rank of another host (on a
            single host: memory domain), assuming the fastest links.
        apart: float64 [..., C, F, P, 5], over links, the least on the ranks of `apart`, the owner
            excluded.
    """

    total: np.ndarray
    own: np.ndarray
    read: np.ndarray
    far: np.ndarray
    apart: np.ndarray

    def with_total_of(self, more: Loads) -> Loads:
        """These loads with the total of `more`."""
        return Loads(more.total, self.own, self.read, self.far, self.apart)

    @staticmethod
    def stack(parts: Sequence[Loads]) -> Loads:
        """All along a new first axis."""
        return Loads(*(np.stack([getattr(x, f.name) for x in parts]) for f in fields(Loads)))


class Probe:
    """Reads loads off the cost model.

    Args:
        model: the cost model.
        classes: classes of interchangeable ranks.
        apart: ranks that are set apart.
    """

    def __init__(self, model: CostModel, classes: RankClasses, apart: Sequence[int]) -> None:
        self.model, self.classes, m = model, classes, model.machine
        self.first = np.array([r[0] for r in classes.ranks])
        #: bool [C, 1, 1, 1, W], the rank that owns the units of each class.
        self._owner = (np.arange(m.world_size) == self.first[:, None])[:, None, None, None]
        self.hood = m.host if m.host.any() else m.domain
        self._far = (self.hood != self.hood[self.first][:, None])[:, None, None, None]
        self._apart = np.isin(np.arange(m.world_size), apart) & ~self._owner

    def units(self, number: int, rows: Sequence[int]) -> np.ndarray:
        """Units whose n-th is 1 in entry rows[n] of `number` entries, on the first rank of each
        class; float64 [C, len(rows), number, W]."""
        out = np.zeros((self.first.size, len(rows), number, self.model.machine.world_size))
        for c, rank in enumerate(self.first):
            out[c, np.arange(len(rows)), rows, rank] = 1.0
        return out

    def loads(self, rows: np.ndarray) -> Loads:
        """Loads of tally rows, float64 [..., C, F, 22, W]."""
        return self._loads(self.model.loads(rows), rows[..., [HELD, HOST_HELD], :])

    def table(self, t: TableProblem, kind: str) -> Loads:
        """Loads of the features of one table's rows, held in one of `KINDS`; [2, C, 4, ...].

        A piece of a share of the columns asks that share of the first, which is of all columns, and
        the rest of the second, which is of none: what any piece asks, whatever its width is.
        """
        make = {"replicated": self.model.replica_rows, "shard": self.model.shard_rows,
                "host": self.model.host_rows, "push": self.model.push_rows}[kind]
        owner = self.units(NUM_FEATURES, range(NUM_FEATURES))
        once, twice = make(t, t.spec.dim, owner), make(t, 2 * t.spec.dim, owner)
        # Owners of the columns of a row exchange squares, which no load of a piece counts.
        cut = self.loads(np.stack([once, self.model.cut_rows(t, once, twice)]))
        return self.loads(np.stack([once, 2 * once - twice])).with_total_of(cut)

    def copies(self, t: TableProblem) -> Loads:
        """The same of rows that are copied to one rank of every host, where ranks are all alike."""
        ranks, owner = copy_sets(self.model.machine)[0], np.zeros((4, 4, self._owner.shape[-1]))
        units, held = [], []
        for f in range(NUM_FEATURES):
            owner[f, f, list(ranks)] = 1.0 / len(ranks)
            rows, need, send = self.model.subset_rows(
                t, t.spec.dim, Tier(0, t.spec.num_rows, "replicated", ranks), owner[f])
            units.append(self.model.units(Tally(rows, {ranks: (need, send)})))
            held.append(rows[[HELD, HOST_HELD]])
        # The part that does not depend on the width is zero: tables with copies are not cut.
        return self._loads(*(np.stack([x, 0 * x])[:, None]
                             for x in (np.stack(units), np.stack(held))))

    def _loads(self, units: np.ndarray, held: np.ndarray) -> Loads:
        us = self.model.group_us(units)[..., :PIECE_GROUPS, :]
        links, seconds = units[..., 1:1 + PIECE_GROUPS, :], (
            1e6 * self.model.machine.seconds_per_unit[1:1 + PIECE_GROUPS])

        def least(values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
            out = np.where(ranks, values, np.inf).min(axis=-1)
            return np.where(np.isfinite(out), out, 0.0)  # there may be no such rank

        return Loads(self.by_class(units, held), (us * self._owner).sum(axis=-1),
                     us[..., LOCAL, :].min(axis=-1),
                     least(links, self._far) * seconds.min(axis=-1),
                     least(links * seconds, self._apart))

    def by_class(self, units: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Loads summed over each class; units [..., P, 7, W], held [..., 2, W] -> [..., L, C]."""
        every = self.every(units, held)
        return np.stack([every[..., r].sum(axis=-1) for r in self.classes.ranks], axis=-1)

    def every(self, units: np.ndarray, held: np.ndarray) -> np.ndarray:
        """All loads as one axis; units [..., P, 7, W], held [..., 2, W] -> [..., L, W]."""
        us = self.model.group_us(units)
        return np.concatenate([us.reshape(*held.shape[:-2], -1, held.shape[-1]), held], axis=-2)


def base_tally(model: CostModel, pushes: bool) -> tuple[Tally, Tally]:
    """What every plan pays: outputs and pinned tables, and the same with pinned rows of tables that
    are free to choose for the others; `pushes`: whether rows that are not pinned may be pushed."""
    whole = total = model.base()
    for t in model.problem.tables:
        held = model.problem.constraints.tables.get(t.spec.name)
        pinned = model.problem.pinned_of(t.spec.name)
        if held is not None and held.tiers is not None:
            ordered = t.ids_are_positions or len(held.tiers) > 1
            tally = model.tally(t, (Piece(0, t.spec.dim, held.tiers),), ordered)
            whole, total = whole.plus(tally), total.plus(tally)
        elif pinned:
            every = len(pinned) == 1 and pinned[0].stop - pinned[0].start == t.spec.num_rows
            # Partial sums are concave: with other pushed rows beside them they may add nothing.
            alone = every or not (pushes and "push" in model.problem.modes_of(t.spec.name))
            total = total.plus(model.piece_tally(t, Piece(0, t.spec.dim, pinned),
                                                 t.ids_are_positions or not every, alone))
    return whole, total
