"""Pushed pieces: how much of a table one owner may hold if the step time is limited.

A mean over ranks spreads a pushed table over all of them for the price of one id stream and one
partial sum per bag. A plan cannot do that: an owner receives the ids of every column piece that it
holds, and sends a partial sum for every bag with an id among its rows. So the cost of a table
depends on the size of its largest piece. This size is limited, because the owner of a piece is busy
for at least the load of the piece: in a plan of at most T microseconds no piece has a load above T.
A column of a table whose pieces are `w` wide, and whose owners hold at most the share `q` of its
lookups (their mass), costs `D / w` id streams and at least `sums(q) / q` bytes of partial sums per
unit of mass, since `sums` is concave.

So for any T and any prices, a step takes at least min(T, the priced bound with pieces that fit T).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from oper.search import native
from oper.search.cost.load_vector import SUM_ROWS
from oper.search.cost.space import PUSH, free_blocks
from oper.search.problem.space import COLUMN_STEP, MIN_COLUMNS
from oper.search.problem.statement import IDS, ROWS, TableProblem
from oper.search.relaxation.units import ANY, LOCAL, WHOLE, UnitRows

NUM_PIECE_GROUPS = 5  # the first groups of terms; no pushed piece loads the others
_RATIO = 1.05  # largest ratio of two widths of the same type, if there are more than `_FEW` tables
_FEW = 30  # tables, up to which every width is a separate type
# Shares at which partial sums are tabulated, all powers of 2 among them, where pricing needs exact
# values (`kRanges` in csrc/search/price.cpp). Below the least, sums are taken to be proportional.
_GRID, _FIRST = 20 * 30 + 1, 2.0**-20
_TANGENTS = 0.0, 0.125, 0.25, 0.5, 0.75, 1.0  # masses at which an owner's least load is tabulated
_ROUNDING = 1e-9  # relative tolerance within which an owner is full
_FITS = 32  # results of `Pieces.fit` that are kept: a node and its candidate children have about 7


@dataclass(frozen=True, slots=True, eq=False)
class LoadLimits:
    """Limits on the largest load that one pushed piece puts on its owner.

    Attributes:
        least, most: float64 [num_phases, 5], microseconds by phase and group of terms.
        step: cutoff for the sum of all phases, without fixed costs, microseconds.
    """

    least: np.ndarray
    most: np.ndarray
    step: float = np.inf


def column_widths(t: TableProblem, split: bool, ratio: float) -> list[tuple[int, int]]:
    """Intervals (narrowest, widest) that cover all widths that a piece may have; the first is the
    entire row. Widths of an interval differ by at most the factor `ratio`."""
    dim = t.spec.dim
    if not split:
        return [(dim, dim)]
    # Multiples of `COLUMN_STEP`, and the columns that remain next to them.
    widths = np.array([w for w in range(dim - 1, MIN_COLUMNS - 1, -1)
                       if w % COLUMN_STEP == 0 or (dim - w) % COLUMN_STEP == 0], np.int64)
    if not widths.size:
        return [(dim, dim)]
    # Intervals of constant ratio; the narrowest contain a single width.
    level = np.floor(np.log(widths / widths[-1]) / max(np.log(ratio), 1e-9))
    parts = np.split(widths, np.flatnonzero(np.diff(level)) + 1)
    return [(dim, dim), *((int(p[-1]), int(p[0])) for p in parts)]


class Pieces:
    """The types of pushed pieces of every table, and their loads on owners by class of ranks.

    An owner also reads its own piece, as every rank does. Of a rank's own time (the local group,
    and its part in other groups), the load of a piece is therefore only the owner's excess over a
    reader.

    Args:
        units: unit loads of the tables' rows, by class of their owner.
        base_rows: float64 [23, W], the load vector that every plan has.
        asks: bool [T], whether an owner of some pushed rows of the table sends requests to itself.
        may: bool [T, C], whether a table may be pushed to a class.

    Attributes:
        floor: float64 [C, num_phases, 5], least load that every plan puts on a rank of a class.
        hidden: float64 [C, num_phases, 1], longest dense compute that overlaps a rank's phase.
        has_local: bool [num_phases, 5], which groups include a rank's own time.
        unit: float64 [C, 23, num_phases, 5], load of a unit of each load-vector row on its owner.
        per_byte: float64 [T, 3], bytes in `SUM_ROWS` per float32 byte of a table's partial sums.
    """

    def __init__(self, units: UnitRows, base_rows: np.ndarray, asks: np.ndarray, may: np.ndarray
                 ) -> None:
        model, tables, classes = units.model, units.tables, units.classes
        self.model, self.tables, self.units, self._may = model, tables, units, may
        self.has_local = model.has_local[:, :NUM_PIECE_GROUPS]
        self.unit = units.own_us[..., :NUM_PIECE_GROUPS]
        #: float64 [C, 3, P, 5], load of a byte of each of `SUM_ROWS` on the owner of a piece; and
        #: [T, C, P, 5], of a byte of a table's partial sums.
        self._of_sums = (self.unit[:, SUM_ROWS]
                         - units.read_us[:, SUM_ROWS, :, None] * self.has_local)
        self.per_byte = np.array([model.messages.per_byte(t) for t in tables]).reshape(-1, 3)
        self.partial = np.einsum("tq,cqpg->tcpg", self.per_byte, self._of_sums)
        base = model.group_us(model.loads(base_rows))[..., :NUM_PIECE_GROUPS, :]
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
        sizes = [len(w) for w in self.widths]
        #: int64 [T + 1], first type of each table. `narrow` and `streams`, float64 [N] each, have
        #: the narrowest width and the number of id streams of each type.
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        #: bool [T], whether the table may be cut by columns.
        self.cut = np.array([len(w) > 1 for w in self.widths], bool)
        #: int64 [T], columns that pieces must add up to; 0 if the table has one piece, or a dim
        #: that is not a multiple of `COLUMN_STEP`.
        self.columns = np.array([t.spec.dim * (len(w) > 1 and t.spec.dim % COLUMN_STEP == 0)
                                 for t, w in zip(tables, self.widths, strict=True)], np.int64)
        self.narrow = np.array([w[0] for x in self.widths for w in x], float)
        self.streams = np.array([t.spec.dim / w[1] for t, x in zip(tables, self.widths, strict=True)
                                 for w in x], float)
        self._last_fits = lru_cache(_FITS)(self._fit)
        self._set_loads(asks)
        self._set_ratios(may)

    def _set_loads(self, asks: np.ndarray) -> None:
        """Set the loads of a pushed table on its owner, without partial sums: as one piece, and in
        the narrowest pieces (axis of size 2). G is the number of loads.

        Attributes:
            per_unit: float64 [T, C, 2, G, 3], load of a unit of each feature except rows.
            density: float64 [T, C, 2, G, 3], load if all lookups were to the block with the least
                load per id; to the block with the largest load per id; and as they are.
            tangents: float64 [T, C, 2, G, L, 2], values at mass 0 and 1 of lower bounds of the load
                of an owner that are linear in its mass, see `_least_loads`.
            asks: float64 [T, C, G], part of these loads for the ids that the owner pushes to
                itself, which an owner of all rows does not have.
            hot: float64 [T, H, 3], features except rows of each table's hottest rows, as far as
                they are blocks of their own, without pinned rows; padded with zeros. H >= 1.
        """
        num_loads = self.floor.shape[1] * self.floor.shape[2]
        shape = (len(self.tables), len(self.floor), 2, num_loads, 3)
        self.per_unit, self.density = np.zeros(shape), np.zeros(shape)
        self.tangents = np.zeros((*shape[:-1], len(_TANGENTS), 2))
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
            self.tangents[k] = _least_loads(by_block, blocks[:, IDS] / t.total[IDS])
        single = [int(np.logical_and.accumulate(t.blocks[:, ROWS] == 1).sum()) for t in self.tables]
        self.hot = np.zeros((len(self.tables), max([1, *single]), 3))
        for k, (t, number) in enumerate(zip(self.tables, single, strict=True)):
            self.hot[k, :number] = free_blocks(self.model.problem, t)[:number, IDS:]

    def _more(self, units: np.ndarray) -> np.ndarray:
        """Load of a unit of every feature except rows on its owner; of own time, only the excess
        over the least loaded reader; float64 [2, C, T, 4, 23] -> [C, T, 3, P, 5]."""
        us = self.units.group_us(self.units.loads(units)[:, :, IDS:])
        least = us[..., LOCAL, :].min(axis=-1)[..., None]
        return np.asarray(us[..., :NUM_PIECE_GROUPS, 0] - least * self.has_local)

    def fit(self, limits: LoadLimits) -> Fit:
        """The pieces that plans within `limits` may have.

        They do not depend on `limits.least`. Most nodes have the same other limits as their parent
        or a sibling, so the last results are kept.
        """
        return self._last_fits(limits.most.tobytes(), limits.step)

    def _fit(self, most: bytes, step: float) -> Fit:
        """Compute the result of `fit` in C++."""
        shape = (len(self.tables), len(self.floor))
        mass = np.zeros((self.narrow.size, shape[1]))
        least_sums = np.zeros((self.narrow.size, shape[1], 3))
        whole, heavy = np.zeros(shape, np.uint8), np.zeros(self.narrow.size, np.int64)
        if self.tables:
            total_ids = np.array([t.total[IDS] for t in self.tables])
            arrays = {"density": self.density, "tangents": self.tangents,
                      "per_unit": self.per_unit, "asks": self.asks, "partial": self.partial,
                      "first": self.first, "total_ids": total_ids, "hot": self.hot,
                      "may": self._may.astype(np.uint8), "narrow": self.narrow,
                      "floor": self.floor - self.hidden, "most": np.frombuffer(most), "mass": mass,
                      "least_sums": least_sums, "whole": whole, "heavy": heavy}
            native.call("oper_fit", native.Fit, arrays, num_tables=shape[0], num_classes=shape[1],
                        num_loads=self.density.shape[-2], num_tangents=len(_TANGENTS),
                        num_hot=self.hot.shape[1], sums=self.native_sums, step=step)
        return Fit(self, mass, least_sums, whole.astype(bool), heavy)

    def sum_bytes(self, tables: np.ndarray, share: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Least bytes of partial sums that the owners of a share of a table's lookups send to each
        reader, for all columns; float64 [N].

        The sums are concave in the mass of an owner, so that they are least if all owners but one
        are full.

        Args:
            tables: int64 [N].
            share: float64 [N], share of all lookups of the table.
            owner: float64 [N], largest share that one owner may hold.
        """
        full = np.floor(share / owner * (1 - _ROUNDING))
        most, rest = self._one_sum(tables, np.stack([np.minimum(share, owner),
                                                     share - full * owner]))
        return np.asarray(full * most + rest)

    def _one_sum(self, tables: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Lower bound of the bytes that one owner of a share (float64 [..., N]) sends, by linear
        interpolation of a concave function."""
        at = np.interp(share, self.grid, np.arange(_GRID))
        low = np.minimum(at.astype(np.int64), _GRID - 2)
        left, right = self.sums[tables, low], self.sums[tables, low + 1]
        inside = left + (at - low) * (right - left)
        return np.asarray(inside * np.minimum(share / _FIRST, 1.0))

    def load(self, k: int, c: int, width: int, features: np.ndarray) -> np.ndarray:
        """Load of a piece of table `k` on its owner, a rank of class `c`; float64 [num_phases, 5].

        Args:
            k, c: indices of table and class.
            width: columns of the piece.
            features: float64 [4], of the rows of the piece, in all columns.
        """
        t = self.tables[k]
        widest, narrowest = self.widths[k][0][0], self.widths[k][-1][0]
        along = (widest - width) / max(1, widest - narrowest)
        each = self.per_unit[k, c, 0] + along * (self.per_unit[k, c, 1] - self.per_unit[k, c, 0])
        sums = float(self.model.num_sums(t, features[IDS])) * self.model.messages.sum_rows(t, width)
        load = each @ features[IDS:]
        if features[ROWS] >= t.spec.num_rows * (1 - 1e-12):
            load = load - self.asks[k, c]
        return np.asarray(load.reshape(self.floor.shape[1:])
                          + np.einsum("q,qpg->pg", sums, self._of_sums[c]))

    def _set_ratios(self, may: np.ndarray) -> None:
        """Set, for pieces of each table, the least ratio of each load to each other load (float64
        [T, C, G, G]; infinite if the class may own none), and the largest loads (float64 [T, C,
        G])."""
        number = self.density.shape[-2]
        self._ratio = np.full((*may.shape, number, number), np.inf)
        self._most = np.zeros((*may.shape, number))
        for k, c in np.argwhere(may).tolist():
            blocks, sums = self.by_block[k][c], self.partial[k, c].reshape(-1, 1)
            # An owner of all rows sends no requests to itself.
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
        """Lower bounds of the largest piece's other loads, as ratios to the load by which it is
        the largest.

        Tables whose total load on an owner is below `least` have no such piece.

        Args:
            least: float64 [G], lower limit of the load by which the piece is the largest.

        Returns:
            float64 [G, G], ratio by that load (first axis) and the other load.
        """
        has = self._most * (1 + _ROUNDING) >= least
        found = np.where(has[..., None], self._ratio, np.inf).min(axis=(0, 1), initial=np.inf)
        return np.where(np.isfinite(found), found, 0.0)


def _least_loads(by_block: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Lower bounds, linear in an owner's mass, of its load without partial sums.

    An owner of a given mass has the least load if it has the rows with the least load per lookup.
    This load is convex in the mass, so that its tangents are lower bounds. An owner of more mass is
    not assumed to have a smaller load: a falling tangent is replaced by the least load of any mass.
    Nor are wider pieces: tangents of the narrowest pieces are lowered to those of all columns.

    Args:
        by_block: float64 [..., 2, G, B], load if all lookups were to rows of a block, of pieces of
            all columns and of the narrowest pieces.
        share: float64 [B], share of the lookups that are to rows of a block; their sum is 1.

    Returns:
        float64 [..., 2, G, L, 2], values at mass 0 and 1 of the tangents at the masses `_TANGENTS`.
    """
    order = by_block.argsort(axis=-1)
    slope = np.take_along_axis(by_block, order, axis=-1)
    mass, load = (np.pad(np.cumsum(x, axis=-1), [(0, 0)] * (x.ndim - 1) + [(1, 0)])
                  for x in (share[order], share[order] * slope))
    out = np.zeros((*by_block.shape[:-1], len(_TANGENTS), 2))
    for n, at in enumerate(_TANGENTS):
        b = (mass[..., :-1] <= at).sum(axis=-1, keepdims=True) - 1  # the block that contains `at`
        begin, value, each = (np.take_along_axis(x, b, axis=-1)[..., 0]
                              for x in (mass, load, slope))
        first = np.where(each > 0, value - each * begin, load.min(axis=-1))
        out[..., n, :] = np.stack([first, first + np.maximum(each, 0.0)], axis=-1)
    out[..., 1, :, :, :] = out.min(axis=-4)
    return out


class Fit:
    """The pieces that plans within limits may have.

    A table that fits a class of ranks as one piece has only that piece there.

    Args:
        pieces: all pieces, of N types.
        mass: float64 [N, C], largest share of a table's lookups that one owner may hold; 0 if the
            limits admit no piece of the type.
        least_sums: float64 [N, C, 3], least bytes of partial sums per unit of each feature except
            rows.
        whole: bool [T, C], whether the table fits the class as one piece.
        heavy: int64 [N], how many of the table's hottest rows, which are its first blocks, no owner
            may have in pieces of the type.

    Attributes:
        streams: float64 [N, C], id streams of each type.
    """

    def __init__(self, pieces: Pieces, mass: np.ndarray, least_sums: np.ndarray,
                 whole: np.ndarray, heavy: np.ndarray) -> None:
        self._pieces, self.whole, self.heavy = pieces, whole, heavy
        one = np.repeat(whole, np.diff(pieces.first), axis=0)
        self.streams = np.where(one, 1.0, pieces.streams[:, None])
        self.mass = np.where(one, 1.0, mass)
        self._least_sums = np.where(one[..., None], 0.0, least_sums)
        for x in (self.streams, self.mass, self._least_sums):  # nodes with equal limits share them
            x.flags.writeable = False

    def types(self, classes: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays of the piece types of every table in the rank classes `classes` (int64 [M]), in
        the layout of `OperPricing` (csrc/search/price.h)."""
        p, number = self._pieces, len(self.whole)
        table, rank_class = np.repeat(np.arange(number), classes.size), np.tile(classes, number)
        whole = self.whole[table, rank_class]
        sizes = np.where(whole, 1, np.diff(p.first)[table])
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        of = np.repeat(np.arange(sizes.size), sizes)
        at, c = p.first[table[of]] + np.arange(of.size) - first[of], rank_class[of]
        # A table that fits as one piece has one stream, for pieces of any width.
        narrowest = np.minimum.reduceat(p.narrow, p.first[:-1])[table[of]]
        return {"first": first, "streams": self.streams[at, c], "mass": self.mass[at, c],
                "least_sums": self._least_sums[at, c], "heavy": self.heavy[at],
                "narrowest": np.where(whole[of], narrowest, p.narrow[at])}

    def place(self, tables: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """Index of a piece type in arrays over the types of all tables; int64 [N].

        `kind` (int64 [N]) is the type's number within its table, one of `tables` (int64 [N]).
        """
        first = self._pieces.first
        return np.asarray(np.minimum(first[tables] + kind, first[tables + 1] - 1))

    def chosen(self, tables: np.ndarray, c: int, kind: np.ndarray
               ) -> tuple[np.ndarray, np.ndarray]:
        """Id streams of pieces of type `kind` of some tables, and the largest mass of one owner of
        class `c`; float64 [N] each."""
        at = self.place(tables, kind), c
        return self.streams[at], self.mass[at]

    def least_sums(self, tables: np.ndarray, c: int, kind: np.ndarray, features: np.ndarray
                   ) -> np.ndarray:
        """Lower bound of the bytes of partial sums that rows with the given features (float64 [N,
        4]) cause within the load limits; float64 [N]. Other arguments as for `chosen`."""
        each = self._least_sums[self.place(tables, kind), c]
        return np.asarray((each * features[:, IDS:]).sum(axis=1))
