"""What a unit of each feature of a table's rows asks of the ranks, by the class of its owner.

Ranks of a class are alike. So what a unit asks is said by what its owner has more than the other
ranks of its class, and by what every rank of each class has, whoever the owner is; and its loads
are those of the few ranks that differ in where they are, as seen from the owner.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oper.search.cost.model import CostModel
from oper.search.cost.space import row_makers
from oper.search.cost.tally import NUM_ROWS
from oper.search.problem.machine import GROUPS, RankClasses, by_group
from oper.search.problem.statement import NUM_FEATURES, TableProblem

LOCAL = GROUPS.index("local")  # a rank's own memory and cores
#: First axis of `UnitRows.of`: a piece of all columns; what any piece asks, whatever its width is;
#: and the same with the squares that owners of the columns of a row exchange.
WHOLE, ANY, ANY_SQUARES = range(3)
_MOST_BYTES = 1 << 26  # of loads at a time


class UnitRows:
    """Tally rows of units, and what they put on ranks.

    Units are arrays float64 [2, C, ..., 20]: what an owner of class c has more than other ranks of
    its class, and what every rank of class c has.

    Args:
        model: the cost model.
        classes: classes of ranks; the first rank of each owns the units.
        tables: the tables.

    Attributes:
        seen: int64 [C, S], ranks that differ as seen from the owner, who is the first of them.
        each: float64 [2, C, 20, 20], a unit of each tally row on its owner.
        every: float64 [2, C, 20, 20], a unit of each tally row on every rank.
        own_us: float64 [C, 22, P, 8], microseconds that a unit of each tally row costs its owner.
        read_us: float64 [C, 22, P], own time that it costs the rank where that is least.
    """

    def __init__(self, model: CostModel, classes: RankClasses, tables: tuple[TableProblem, ...]
                 ) -> None:
        self.model, self.classes, self.tables = model, classes, tables
        self.sizes = np.array([r.size for r in classes.ranks], float)
        self._first = np.array([r[0] for r in classes.ranks], np.int64)
        number, world = self._first.size, model.machine.world_size
        self.seen = _seen(model, classes, self._first)
        self._class_seen = classes.of_rank[self.seen]
        one = np.eye(NUM_ROWS)
        is_owner = np.arange(world) == self._first[:, None]
        in_class = classes.of_rank == np.arange(number)[:, None]
        owned, shared = (model.loads(one[:, :, None] * ranks[:, None, None].astype(float))
                         for ranks in (is_owner, in_class))  # [C, 22, P, 9, W]
        on_links = model.machine.on_links
        self._on_links = self._of_seen(on_links(owned), on_links(shared))
        self._by_rank = (self._of_seen(owned, shared) if any(model.machine.shared_terms)
                         else self._on_links)
        self._unit = np.eye(NUM_FEATURES)[:, :, None] * is_owner[:, None, None].astype(float)
        # Readers are seen with an owner of another class, or as another rank of the only class.
        self._owner_seen = (np.arange(number) + 1) % number
        self._reader = self._first if number > 1 else classes.ranks[0][1:2]
        self._known: dict[str, np.ndarray] = {}
        rows = np.broadcast_to(one, (number, NUM_ROWS, NUM_ROWS))
        self.each, self.every = np.stack([rows, 0 * rows]), np.stack([0 * rows, rows])
        us = self.group_us(self.loads(self.each))
        self.own_us, self.read_us = us[..., 0], us[..., LOCAL, :].min(axis=-1)

    def _of_seen(self, owned: np.ndarray, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Loads of a unit on the owner, by the ranks seen from it (float64 [C, 22, P, 9, S]), and
        of one on all ranks of a class, by the first rank of each (float64 [C, 22, P, 9, C])."""
        return (np.stack([x[..., at] for x, at in zip(owned, self.seen, strict=True)]),
                shared[..., self._first])

    def of(self, kind: str) -> np.ndarray:
        """Units of the features of every table's rows, held in one of the ways of `row_makers`;
        float64 [3, 2, C, T, 4, 20], see WHOLE."""
        if kind not in self._known:
            make = row_makers(self.model)[kind]
            found = np.zeros((3, 2, self.sizes.size, len(self.tables), NUM_FEATURES, NUM_ROWS))
            for k, t in enumerate(self.tables):
                once, twice = (self._divided(make(t, w, self._unit))[..., None]
                               for w in (t.spec.dim, 2 * t.spec.dim))
                found[:, :, :, k] = np.stack([once, 2 * once - twice,
                                              self.model.cut_rows(t, once, twice)])[..., 0]
            self._known[kind] = found
        return self._known[kind]

    def _divided(self, rows: np.ndarray) -> np.ndarray:
        """Tally rows (float64 [C, 4, 22, W]) as units."""
        mine = rows[np.arange(self._first.size), ..., self._first]
        shared = (rows[self._owner_seen, ..., self._reader] if self._reader.size
                  else np.zeros_like(mine))
        return np.stack([mine - shared, shared])

    def mean(self, units: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """What units ask of resource rows, of which a unit of each tally row, spread over a class,
        asks `unit` (float64 [C, 22, R]); float64 [C, ..., R], by the class of the owner."""
        own, every = units.reshape(2, self.sizes.size, -1, NUM_ROWS)
        out = own @ unit + (every @ (unit * self.sizes[:, None, None])).sum(axis=0)
        return np.asarray(out.reshape(*units.shape[1:-1], out.shape[-1]))

    def by_owner(self, asked: np.ndarray, rank_class: int) -> np.ndarray:
        """Of what units ask by the class of their owner (float64 [C, ...]) that of one class, or of
        units that are dealt evenly over all ranks (-1)."""
        return np.asarray(asked[rank_class] if rank_class >= 0 else
                          np.average(asked, axis=0, weights=self.sizes))

    def by_tables(self, units: np.ndarray, asked: Callable[[np.ndarray], np.ndarray]
                  ) -> np.ndarray:
        """`asked`, a function of units, for those of many tables (float64 [2, C, T, 4, 20]); [C, T,
        ...]."""
        size = 8 * NUM_FEATURES * self._on_links[0][:, 0].size
        step = max(1, _MOST_BYTES // size)
        return np.concatenate([asked(units[:, :, k:k + step])
                               for k in range(0, max(1, units.shape[2]), step)], axis=1)

    def loads(self, units: np.ndarray, by_rank: bool = False) -> np.ndarray:
        """Loads by phase and term on the ranks seen from the owner, as `Machine.on_links` has them
        or of what ranks send and receive themselves; float64 [C, ..., P, 9, S]."""
        number, (owned, of_class) = self.sizes.size, self._by_rank if by_rank else self._on_links
        own, every = units.reshape(2, number, -1, NUM_ROWS)
        out = (own @ owned.reshape(number, NUM_ROWS, -1)).reshape(number, -1, *owned.shape[2:])
        shared = np.moveaxis(every, 0, 1).reshape(-1, number * NUM_ROWS) @ of_class.reshape(
            number * NUM_ROWS, -1)
        shared = shared.reshape(-1, *of_class.shape[2:])  # [N, P, 9, C]
        out += np.moveaxis(shared[..., self._class_seen], -2, 0)
        return np.asarray(out.reshape(*units.shape[1:-1], *owned.shape[2:]))

    def seconds(self, num_axes: int) -> np.ndarray:
        """Seconds of a unit of each term on the ranks seen, to go with loads of so many axes;
        float64 [C, 1, ..., 9, S]."""
        found = np.moveaxis(self.model.machine.seconds_per_unit[:, self.seen], 1, 0)
        return np.asarray(np.expand_dims(found, tuple(range(1, num_axes - 2))))

    def group_us(self, loads: np.ndarray) -> np.ndarray:
        """Microseconds that run beside each other; float64 [C, ..., P, 8, S]."""
        return by_group(loads * self.seconds(loads.ndim) * 1e6, self.model.has_local)


def _seen(model: CostModel, classes: RankClasses, first: np.ndarray) -> np.ndarray:
    """Of every class's first rank: itself, and one rank of every class in its memory domain, on its
    host, in its rack, and elsewhere; int64 [C, S], filled up with itself."""
    m, out = model.machine, []
    for owner in first.tolist():
        where = np.stack([classes.of_rank, m.domain == m.domain[owner], m.host == m.host[owner],
                          m.rack == m.rack[owner], np.arange(m.world_size) == owner], axis=-1)
        ranks = np.unique(where, axis=0, return_index=True)[1]
        out.append([owner, *ranks[ranks != owner].tolist()])
    most = max(map(len, out))
    return np.array([x + x[:1] * (most - len(x)) for x in out], np.int64)
