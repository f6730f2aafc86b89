"""Pushed pieces: how much of a table one owner may hold in a step of limited length.

The mean over ranks spreads a pushed table over all of them for the price of one id stream and one
partial sum per bag. A plan cannot do that: an owner receives the ids of every column piece that it
holds, and sends a partial sum for every bag with an id among its rows. So the cost of a table
depends on its largest pieces, and those are limited: whoever owns a piece is busy with it for at
least its own load, so that in a plan of at most T microseconds no piece has a load above T. A
column of a table whose pieces are `w` wide and hold at most the share `q` of its lookups (their
mass) costs `D / w` id streams and at least `pb(q) / q` bytes of partial sums per unit of mass, `pb`
being concave.

So for any T and any prices a plan takes at least min(T, the priced bound with pieces that fit T).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.search import native
from oper.search.cost.space import PUSH
from oper.search.cost.tally import Row
from oper.search.problem.space import COLUMN_STEP, MIN_COLUMNS
from oper.search.problem.statement import IDS, ROWS, TableProblem
from oper.search.relaxation.units import ANY, LOCAL, WHOLE, UnitRows

NUM_PIECE_GROUPS = 5  # groups of terms that a pushed piece loads: it is not in host memory
_RATIO = 1.15  # of the widths that a bound does not tell apart where tables are many
_FEW = 30  # tables, up to which every width is told apart
_GRID = 600  # shares at which partial sums are tabulated
_FIRST = 1e-6
_ROUNDING = 1e-9  # up to which an owner that has more than full is full


@dataclass(frozen=True, slots=True, eq=False)
class LoadLimits:
    """Limits on the largest load that one pushed piece puts on its owner, by phase.

    Attributes:
        least, most: float64 [num_phases, 5], microseconds by phase and group of terms.
        step: longest time of all phases together, without fixed costs.
    """

    least: np.ndarray
    most: np.ndarray
    step: float = np.inf


def column_widths(t: TableProblem, split: bool, ratio: float) -> list[tuple[int, int]]:
    """Intervals (narrowest, widest) that cover all widths a piece may have, the whole row first.

    The widths of one interval differ by at most the factor `ratio`.
    """
    dim = t.spec.dim
    if not split:
        return [(dim, dim)]
    # Multiples of the step, and what is left of a row beside them.
    widths = np.array([w for w in range(dim - 1, MIN_COLUMNS - 1, -1)
                       if w % COLUMN_STEP == 0 or (dim - w) % COLUMN_STEP == 0], np.int64)
    if not widths.size:
        return [(dim, dim)]
    # Intervals that grow with the width, the narrow ones of a single width.
    level = np.floor(np.log(widths / widths[-1]) / max(np.log(ratio), 1e-9))
    parts = np.split(widths, np.flatnonzero(np.diff(level)) + 1)
    return [(dim, dim), *((int(p[-1]), int(p[0])) for p in parts)]


class Pieces:
    """The pushed pieces that fit, for every table and class of ranks.

    An owner also reads its own piece, as every rank does. In a rank's own time (the local group,
    and its part in other groups) the load of a piece is therefore what its owner does in excess of
    a reader.

    Args:
        units: unit loads of the tables' rows, by class of their owner.
        base_rows: float64 [23, W], the tally that every plan has.
        asks: bool [T], tables for which an owner of some pushed rows sends requests to itself.
        may: bool [T, C], whether a table may be pushed to a class.

    Attributes:
        floor: float64 [C, num_phases, 5], load that every plan puts on a rank of a class.
        hidden: float64 [C, num_phases, 1], longest dense compute that overlaps a rank's phase.
        has_local: bool [num_phases, 5], which groups include a rank's own time.
        unit: float64 [C, 23, num_phases, 5], load of a unit of each tally row on its owner.
    """

    def __init__(self, units: UnitRows, base_rows: np.ndarray, asks: np.ndarray, may: np.ndarray
                 ) -> None:
        model, tables, classes = units.model, units.tables, units.classes
        self.model, self.tables, self.units = model, tables, units
        self.has_local = model.has_local[:, :NUM_PIECE_GROUPS]
        self.unit = units.own_us[..., :NUM_PIECE_GROUPS]
        #: float64 [C, P, 5], what a byte of partial sums puts on the owner of a piece.
        self.partial = (self.unit[:, Row.PARTIALS]
                        - units.read_us[:, Row.PARTIALS, :, None] * self.has_local)
        base = model.group_us(model.loads(base_rows))[..., :NUM_PIECE_GROUPS, :]
        # What every plan puts on the least loaded rank of each class.
        hidden = np.stack([1e6 * model.hidden[:, r].max(axis=-1) for r in classes.ranks])
        self.floor = np.stack([base[..., r].min(axis=-1) for r in classes.ranks])
        self.hidden = hidden[:, :, None]  # [C, P, 1]
        ratio = _RATIO if len(tables) > _FEW else 1.0
        self.widths = [column_widths(t, model.problem.may_split(t), ratio) for t in tables]
        self.grid = np.geomspace(_FIRST, 1.0, _GRID)
        #: float64 [T, N], bytes of partial sums by share of a table's mass.
        self.sums = np.stack([model.partial_bytes(t, t.spec.dim, self.grid * t.total[IDS])
                              for t in tables]) if tables else np.zeros((0, _GRID))
        self.native_sums = native.Sums(_GRID, _FIRST, float(self.grid[1] / self.grid[0]),
                                       self.sums.ctypes.data)
        #: int64 [T + 1], where each table's types begin; float64 [N], their widths and id streams.
        sizes = [len(w) for w in self.widths]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        #: bool [T], which may be cut by columns.
        self.cut = np.array([len(w) > 1 for w in self.widths], bool)
        #: int64 [T], columns of the tables whose pieces have to make them up, 0 for others.
        self.columns = np.array([t.spec.dim * (len(w) > 1 and t.spec.dim % COLUMN_STEP == 0)
                                 for t, w in zip(tables, self.widths, strict=True)], np.int64)
        self.narrow = np.array([w[0] for x in self.widths for w in x], float)
        self.streams = np.array([t.spec.dim / w[1] for t, x in zip(tables, self.widths, strict=True)
                                 for w in x], float)
        self._set_loads(asks)
        self._set_ratios(may)

    def _set_loads(self, asks: np.ndarray) -> None:
        """Loads that a pushed table puts on its owner, without partial sums: as one piece, and in
        the narrowest pieces.

        Attributes:
            per_unit: float64 [T, C, 2, G, 3], load of a unit of each feature except rows.
            density: float64 [T, C, 2, G, 3], load of all ids if all were ids of the block with the
                least load per id; the same for the block with the most; load of all ids as they
                are.
            asks: float64 [T, C, G], part of these loads for the ids that the owner pushes to
                itself; 0 if it owns all rows.
        """
        num_loads = self.floor.shape[1] * self.floor.shape[2]
        shape = (len(self.tables), len(self.floor), 2, num_loads, 3)
        self.per_unit, self.density = np.zeros(shape), np.zeros(shape)
        self.by_block: list[np.ndarray] = []  # [C, 2, G, B] each
        whole, least = self.units.of(PUSH)[[WHOLE, ANY]]
        narrow = np.array([w[-1][0] / w[0][0] for w in self.widths]).reshape(-1, 1, 1)
        for n, width in enumerate((np.ones_like(narrow), narrow)):
            each = self.units.by_tables(least + width * (whole - least), self._more)
            self.per_unit[:, :, n] = each.reshape(*shape[1::-1], 3, num_loads).transpose(1, 0, 3, 2)
        own = self.model.costs.push_ns * self.unit[:, list(self.model.passes)].sum(axis=1)
        own = own.reshape(1, shape[1], num_loads) * asks[:, None, None]
        self.asks = own * np.array([t.total[IDS] for t in self.tables])[:, None, None]
        self.per_unit[..., 0] += own[:, :, None]
        for k, t in enumerate(self.tables):
            blocks = t.blocks[t.blocks[:, IDS] > 0]
            by_block = self.per_unit[k] @ (
                blocks[:, IDS:] / blocks[:, IDS:IDS + 1] * t.total[IDS]).T
            self.by_block.append(by_block)
            self.density[k] = np.stack([by_block.min(axis=-1), by_block.max(axis=-1),
                                        self.per_unit[k] @ t.total[IDS:]], axis=-1)

    def _more(self, units: np.ndarray) -> np.ndarray:
        """Load of a unit of every feature except rows on its owner; for own time, the excess over
        the least loaded reader; float64 [2, C, T, 4, 20] -> [C, T, 3, P, 5]."""
        us = self.units.group_us(self.units.loads(units)[:, :, IDS:])
        least = us[..., LOCAL, :].min(axis=-1)[..., None]
        return np.asarray(us[..., :NUM_PIECE_GROUPS, 0] - least * self.has_local)

    def fit(self, limits: LoadLimits) -> Fit:
        """The pieces that plans within `limits` may have."""
        shape = (len(self.tables), len(self.floor))
        mass = np.zeros((self.narrow.size, shape[1]))
        least_sums = np.zeros((self.narrow.size, shape[1], 3))
        whole = np.zeros(shape, np.uint8)
        if self.tables:
            arrays = {"density": self.density, "per_unit": self.per_unit, "asks": self.asks,
                      "partial": self.partial,
                      "first": self.first, "total_ids": np.array([t.total[IDS]
                                                                  for t in self.tables]),
                      "narrow": self.narrow, "floor": self.floor - self.hidden, "most": limits.most,
                      "mass": mass, "least_sums": least_sums, "whole": whole}
            native.call("oper_fit", native.Fit, arrays, num_tables=shape[0], num_classes=shape[1],
                        num_loads=self.density.shape[-2], sums=self.native_sums, step=limits.step)
        return Fit(self, mass, least_sums, whole.astype(bool))

    def sum_bytes(self, tables: np.ndarray, share: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Least bytes of partial sums that the owners of a share of a table's mass send to each
        reader.

        Since these sums are concave in the mass of an owner, the least bytes result when all owners
        but one hold as much as they may.

        Args:
            tables: int64 [N].
            share: float64 [N], share of all lookups of the table.
            owner: float64 [N], largest share that one owner may hold.

        Returns:
            float64 [N].
        """
        full = np.floor(share / owner * (1 - _ROUNDING))
        most, rest = self._one_sum(tables, np.stack([np.minimum(share, owner),
                                                     share - full * owner]))
        return np.asarray(full * most + rest)

    def _one_sum(self, tables: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Lower bound of the bytes that one owner of a share (float64 [..., N]) sends, from
        tabulated points.
        """
        at = np.interp(share, self.grid, np.arange(_GRID))
        low = np.minimum(at.astype(np.int64), _GRID - 2)
        left, right = self.sums[tables, low], self.sums[tables, low + 1]
        inside = left + (at - low) * (right - left)
        return np.asarray(inside * np.minimum(share / _FIRST, 1.0))

    def load(self, k: int, c: int, width: int, features: np.ndarray) -> np.ndarray:
        """Load of a piece of `width` columns of table `k` on its owner, of class `c`.

        Args:
            k, c, width: see above.
            features: float64 [4], of the rows of the piece, in all columns.

        Returns:
            float64 [num_phases, 5].
        """
        t = self.tables[k]
        widest, narrowest = self.widths[k][0][0], self.widths[k][-1][0]
        along = (widest - width) / max(1, widest - narrowest)
        each = self.per_unit[k, c, 0] + along * (self.per_unit[k, c, 1] - self.per_unit[k, c, 0])
        sums = float(self.model.partial_bytes(t, width, features[IDS]))
        load = each @ features[IDS:]
        if features[ROWS] >= t.spec.num_rows * (1 - 1e-12):
            load = load - self.asks[k, c]
        return np.asarray(load.reshape(self.floor.shape[1:])
                          + sums * self.partial[c])

    def _set_ratios(self, may: np.ndarray) -> None:
        """Set, for a piece of each table, the least ratio of one load to another over all its rows
        (float64 [T, C, G, G]; infinite if the class may own none), and its largest loads (float64
        [T, C, G])."""
        number = self.density.shape[-2]
        self._ratio = np.full((*may.shape, number, number), np.inf)
        self._most = np.zeros((*may.shape, number))
        for k, c in np.argwhere(may).tolist():
            blocks, sums = self.by_block[k][c], self.partial[c].reshape(-1, 1)
            # Who has all rows does not ask itself.
            whole = self.density[k, c, :, :, 2:] - self.asks[k, c, :, None]  # [2, G, 1]
            for x in (*blocks, *whole, sums):  # [G, B], of widest and narrowest
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = np.where(x[:, None] > 0, x[None] / x[:, None], np.inf)
                ratio = np.where(x[None] < 0, 0.0, ratio)
                np.minimum(self._ratio[k, c], ratio.min(axis=-1), out=self._ratio[k, c])
            ids = self.tables[k].blocks[:, IDS]
            share = ids[ids > 0] / self.tables[k].total[IDS]
            self._most[k, c] = (np.maximum(blocks, 0.0) @ share).max(axis=0) + (
                sums[:, 0] * self.sums[k, -1])

    def implied(self, least: np.ndarray) -> np.ndarray:
        """Lower bounds of the largest piece's other loads, per microsecond of the load by which it
        is largest.

        A table whose total load on an owner stays below `least` has no such piece.

        Args:
            least: float64 [G], least value of the load by which the piece is the largest.

        Returns:
            float64 [G, G], by that load and the other one.
        """
        has = self._most * (1 + _ROUNDING) >= least
        found = np.where(has[..., None], self._ratio, np.inf).min(axis=(0, 1), initial=np.inf)
        return np.where(np.isfinite(found), found, 0.0)


class Fit:
    """The pieces that plans within `limits` may have.

    A table that fits a class of ranks as one piece has only that piece there.

    Args:
        pieces: all pieces, of N types.
        mass: float64 [N, C], largest share of a table's lookups that one owner may hold; 0 if none
            fits.
        least_sums: float64 [N, C, 3], least bytes of partial sums per unit of each feature except
            rows.
        whole: bool [T, C], whether the table fits the class as one piece.

    Attributes:
        streams: float64 [N, C], id streams of each type.
    """

    def __init__(self, pieces: Pieces, mass: np.ndarray, least_sums: np.ndarray,
                 whole: np.ndarray) -> None:
        self._pieces, self.whole = pieces, whole
        one = np.repeat(whole, np.diff(pieces.first), axis=0)
        self.streams = np.where(one, 1.0, pieces.streams[:, None])
        self.mass = np.where(one, 1.0, mass)
        self._least_sums = np.where(one[..., None], 0.0, least_sums)

    def types(self, classes: np.ndarray) -> dict[str, np.ndarray]:
        """Types of every table in some classes (int64 [M]), in the layout of `OperPricing`."""
        p, number = self._pieces, len(self.whole)
        table, rank_class = np.repeat(np.arange(number), classes.size), np.tile(classes, number)
        whole = self.whole[table, rank_class]
        sizes = np.where(whole, 1, np.diff(p.first)[table])
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        of = np.repeat(np.arange(sizes.size), sizes)
        at, c = p.first[table[of]] + np.arange(of.size) - first[of], rank_class[of]
        # What fits as a whole row has the least streams, whatever its width is.
        narrowest = np.minimum.reduceat(p.narrow, p.first[:-1])[table[of]]
        return {"first": first, "streams": self.streams[at, c], "mass": self.mass[at, c],
                "least_sums": self._least_sums[at, c],
                "narrowest": np.where(whole[of], narrowest, p.narrow[at])}

    def place(self, tables: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """Index of type `kind` (int64 [N]) of each table in arrays over all types; int64 [N]."""
        first = self._pieces.first
        return np.asarray(np.minimum(first[tables] + kind, first[tables + 1] - 1))

    def chosen(self, tables: np.ndarray, c: int, kind: np.ndarray
               ) -> tuple[np.ndarray, np.ndarray]:
        """Id streams and largest mass of one owner for the types `kind` of some tables."""
        at = self.place(tables, kind), c
        return self.streams[at], self.mass[at]

    def least_sums(self, tables: np.ndarray, c: int, kind: np.ndarray, features: np.ndarray
                   ) -> np.ndarray:
        """Lower bound of the bytes of partial sums that rows with the given features cause.

        Args:
            tables, c, kind: as for `chosen`.
            features: float64 [N, 4].

        Returns:
            float64 [N], valid while owners keep their load limits.
        """
        each = self._least_sums[self.place(tables, kind), c]
        return np.asarray((each * features[:, IDS:]).sum(axis=1))
