"""Loads that a unit of each feature of a table's rows puts on the ranks, by class of its owner.

Ranks of a class are interchangeable. A unit's load is therefore given by two parts: the excess of
its owner over other ranks of the class, and the load of every rank of each class, whoever the owner
is. It is computed only for ranks whose position relative to the owner differs (domain, host, rack).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oper.search.cost.load_vector import NUM_ROWS
from oper.search.cost.model import CostModel
from oper.search.cost.space import row_makers
from oper.search.problem.machine import GROUPS, RankClasses, by_group
from oper.search.problem.statement import NUM_FEATURES, TableProblem

LOCAL = GROUPS.index("local")  # a rank's own memory and cores
#: Indices of the first axis of `UnitRows.of`: the unit for a piece of all columns; the part of it
#: that is the same for every width; the same part in a table that is split by columns, whose owners
#: exchange sums of squares.
WHOLE, ANY, ANY_SQUARES = range(3)
_MOST_BYTES = 1 << 26  # limit of the loads that are computed at a time


class UnitRows:
    """Units (of features, or of load-vector rows), and their loads on ranks.

    Units are arrays float64 [2, C, ..., 23]: the excess of an owner of class c over other ranks of
    its class, and the load of every rank of class c.

    Args:
        model: the cost model.
        classes: classes of ranks; the first rank of each owns the units.
        tables: the tables.

    Attributes:
        seen: int64 [C, S], one rank for each position relative to the owner; the first is the
            owner itself.
        each: float64 [2, C, 23, 23], a unit of each load-vector row on the owner.
        every: float64 [2, C, 23, 23], a unit of each load-vector row on every rank.
        own_us: float64 [C, 23, P, 8], microseconds of a unit of each load-vector row on its owner.
        read_us: float64 [C, 23, P], own time of a unit of each load-vector row on a reader, least
            over the ranks, microseconds.
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
                         for ranks in (is_owner, in_class))  # [C, 23, P, 9, W]
        on_links = model.machine.on_links
        self._on_links = self._of_seen(on_links(owned), on_links(shared))
        self._by_rank = (self._of_seen(owned, shared) if any(model.machine.shared_terms)
                         else self._on_links)
        self._unit = np.eye(NUM_FEATURES)[:, :, None] * is_owner[:, None, None].astype(float)
        # A reader is the owner of another class, or another rank of the only class.
        self._owner_seen = (np.arange(number) + 1) % number
        self._reader = self._first if number > 1 else classes.ranks[0][1:2]
        self._known: dict[str, np.ndarray] = {}
        rows = np.broadcast_to(one, (number, NUM_ROWS, NUM_ROWS))
        self.each, self.every = np.stack([rows, 0 * rows]), np.stack([0 * rows, rows])
        us = self.group_us(self.loads(self.each))
        self.own_us, self.read_us = us[..., 0], us[..., LOCAL, :].min(axis=-1)

    def _of_seen(self, owned: np.ndarray, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Loads of a unit of one owner on the ranks `seen` (float64 [C, 23, P, 9, S]), and loads of
        a unit on every rank of a class on the first rank of each class (float64 [C, 23, P, 9, C]).
        """
        return (np.stack([x[..., at] for x, at in zip(owned, self.seen, strict=True)]),
                shared[..., self._first])

    def of(self, kind: str) -> np.ndarray:
        """Units of the features of every table's rows that are held as `kind`, see `row_makers`.

        Returns:
            float64 [3, 2, C, T, 4, 23]; see WHOLE for the first axis.
        """
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
        """Convert load-vector rows (float64 [C, 4, 23, W]) to units (float64 [2, C, 4, 23])."""
        mine = rows[np.arange(self._first.size), ..., self._first]
        shared = (rows[self._owner_seen, ..., self._reader] if self._reader.size
                  else np.zeros_like(mine))
        return np.stack([mine - shared, shared])

    def mean(self, units: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """Consumption of the resource rows by units, by class of the owner.

        Args:
            units: float64 [2, C, ..., 23].
            unit: float64 [C, 23, R], consumption by a unit of each load-vector row, spread over a
                class.

        Returns:
            float64 [C, ..., R].
        """
        own, every = units.reshape(2, self.sizes.size, -1, NUM_ROWS)
        out = own @ unit + (every @ (unit * self.sizes[:, None, None])).sum(axis=0)
        return np.asarray(out.reshape(*units.shape[1:-1], out.shape[-1]))

    def by_owner(self, asked: np.ndarray, rank_class: int) -> np.ndarray:
        """The entry of `asked` (float64 [C, ...], by class of the owner) for one class, or for -1
        the mean over all ranks."""
        return np.asarray(asked[rank_class] if rank_class >= 0 else
                          np.average(asked, axis=0, weights=self.sizes))

    def by_tables(self, units: np.ndarray, asked: Callable[[np.ndarray], np.ndarray]
                  ) -> np.ndarray:
        """Apply `asked`, a function of units, to the units of all tables (float64 [2, C, T, 4,
        23]) in batches of limited memory; float64 [C, T, ...]."""
        size = 8 * NUM_FEATURES * self._on_links[0][:, 0].size
        step = max(1, _MOST_BYTES // size)
        return np.concatenate([asked(units[:, :, k:k + step])
                               for k in range(0, max(1, units.shape[2]), step)], axis=1)

    def loads(self, units: np.ndarray, by_rank: bool = False) -> np.ndarray:
        """Loads that units put on the ranks `seen`, by phase and term.

        Args:
            units: float64 [2, C, ..., 23].
            by_rank: on links that several ranks share, whether a rank's load is the bytes that it
                sends and receives itself, or those that it waits for (`Machine.on_links`).

        Returns:
            float64 [C, ..., P, 9, S], by class of the owner.
        """
        number, (owned, of_class) = self.sizes.size, self._by_rank if by_rank else self._on_links
        own, every = units.reshape(2, number, -1, NUM_ROWS)
        out = (own @ owned.reshape(number, NUM_ROWS, -1)).reshape(number, -1, *owned.shape[2:])
        shared = np.moveaxis(every, 0, 1).reshape(-1, number * NUM_ROWS) @ of_class.reshape(
            number * NUM_ROWS, -1)
        shared = shared.reshape(-1, *of_class.shape[2:])  # [N, P, 9, C]
        out += np.moveaxis(shared[..., self._class_seen], -2, 0)
        return np.asarray(out.reshape(*units.shape[1:-1], *owned.shape[2:]))

    def seconds(self, num_axes: int) -> np.ndarray:
        """Seconds per unit of load (a byte, or a nanosecond of compute) of each term on the ranks
        `seen`; float64 [C, 1, ..., 9, S], which broadcasts with loads of `num_axes` axes."""
        found = np.moveaxis(self.model.machine.seconds_per_unit[:, self.seen], 1, 0)
        return np.asarray(np.expand_dims(found, tuple(range(1, num_axes - 2))))

    def group_us(self, loads: np.ndarray) -> np.ndarray:
        """Microseconds by group of terms that run concurrently; float64 [C, ..., P, 8, S]."""
        return by_group(loads * self.seconds(loads.ndim) * 1e6, self.model.has_local)


def _seen(model: CostModel, classes: RankClasses, first: np.ndarray) -> np.ndarray:
    """For the first rank of every class: the rank itself, and one rank of every class in its memory
    domain, on its host, in its rack, and elsewhere; int64 [C, S], padded with the rank itself."""
    m, out = model.machine, []
    for owner in first.tolist():
        where = np.stack([classes.of_rank, m.domain == m.domain[owner], m.host == m.host[owner],
                          m.rack == m.rack[owner], np.arange(m.world_size) == owner], axis=-1)
        ranks = np.unique(where, axis=0, return_index=True)[1]
        out.append([owner, *ranks[ranks != owner].tolist()])
    most = max(map(len, out))
    return np.array([x + x[:1] * (most - len(x)) for x in out], np.int64)
