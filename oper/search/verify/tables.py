"""The least that a table can ask at given prices, over all its placements.

A table's columns are cut into pieces, and every block of rows of a piece is held in one way by
owners of one class, or pushed. Per piece of width w:

* rows ask what the cost model says of w columns;
* rows in several tiers ask more per id, and more where some of them are pushed; pieces without
  pushed rows may lie beside such with some, and pay the lesser;
* what is pushed asks for partial sums, concave in what one owner holds. Owners of a share q, of
  which one holds m at most, cost no less than floor(q / m) full ones and one with the rest;
* an owner that does not hold a whole piece asks itself for its own ids.

The best set of pushed blocks with owners of one class is a prefix of the blocks by gain per id, or
ends where owners are full, as what is concave is least at an end. With several classes the shares
are divided, the part with the least bound first, chords of the concave sums below each part. Pieces
then make up the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.search.cost.model import CostModel
from oper.search.problem.statement import IDS, TableProblem
from oper.search.verify.prices import FREE, PARTLY, PUSHES, STILL, WHOLLY, Leaf

STEP, NARROWEST = 4, 8  # columns: what widths are multiples of, and the least that is pushed
_POINTS, _LEAST_SHARE = 1200, 1e-7  # at which partial sums are tabulated; chords lie below
_PARTS, _TURNS = 32, 4  # of the shares of several classes, and of the lines in a part
_CLOSE = 1e-5  # of a cost, up to which a bound is as good as the cost
_BISECTIONS = 40
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Asked:
    """Prices of what tables ask, for C classes of owners.

    Attributes:
        cost: by kind, float64 [3, T, C, 4], a unit of each feature in a piece of all columns, what
            a further column adds, and what owners of parts of a row exchange.
        partial: float64 [C], a byte of partial sums.
        own: float64 [C], an id that a rank pushes to itself.
        piece: a further piece of a table.
        tier: a nanosecond in every pass over a table's ids.
        bag: a bag of a table that is pushed in part.
    """

    cost: dict[str, np.ndarray]
    partial: np.ndarray
    own: np.ndarray
    piece: float
    tier: float
    bag: float


class TableCosts:
    """Least costs of the free tables.

    Args:
        model: the cost model.
        tables: the tables.
        blocks: features of each table's blocks, float64 [K, 4].
        cuts: whether tables may be cut by columns.
    """

    def __init__(self, model: CostModel, tables: Sequence[TableProblem],
                 blocks: Sequence[np.ndarray], cuts: bool) -> None:
        self.model, self.tables = model, tables
        most = max((len(b) for b in blocks), default=0)
        #: float64 [T, B, 4], padded with blocks of nothing.
        self.blocks = np.zeros((len(tables), most, 4))
        for k, b in enumerate(blocks):
            self.blocks[k, :len(b)] = b
        self.total = np.array([t.total[IDS] for t in tables])
        self.bags = np.array([t.traffic.num_bags for t in tables])
        self.dims = np.array([t.spec.dim for t in tables], np.int64)
        self.cut = [cuts and model.problem.may_split(t) for t in tables]
        pinned = [bool(model.problem.pinned_of(t.spec.name)) for t in tables]
        #: bool [T]: owners of pinned pushed rows may have all rows, and ask nobody.
        self.asks = np.array([all(x.mode == "pull" for x in model.problem.pinned_of(t.spec.name))
                              for t in tables], bool)
        pull, push = model.tiers_ns(False), model.tiers_ns(True)
        self.still_ns = np.array([min(pull, push) if c or p else pull
                                  for c, p in zip(self.cut, pinned, strict=True)])
        self.grid = np.geomspace(_LEAST_SHARE, 1.0, _POINTS)
        self.sums = np.array([model.partial_bytes(t, t.spec.dim, self.grid * t.total[IDS])
                              for t in tables]).reshape(len(tables), _POINTS)
        widths = [_widths(t.spec.dim, c) for t, c in zip(tables, self.cut, strict=True)]
        #: int64 [N], table and width of each kind of piece that is looked at.
        self.of = np.repeat(np.arange(len(tables)), [len(w) for w in widths])
        self.width = np.concatenate([np.zeros(0, np.int64), *widths])
        self.may: dict[str, np.ndarray] = {}
        self.ids = np.zeros((len(tables), 2, 1, 1, 5))
        self.partial = np.zeros((1, 1, 5))

    def admit(self, may: dict[str, np.ndarray]) -> None:
        """Say which table may be held how, by the owner's class; bool [T, C] by kind."""
        self.may = may

    def set_loads(self, ids: np.ndarray, partial: np.ndarray) -> None:
        """Say what all ids of a table as a pushed piece (float64 [T, 2, C, P, 5]: of all columns,
        and a further one), and a byte of partial sums ([C, P, 5]), put on the owner."""
        self.ids, self.partial = ids, partial

    def least(self, asked: Asked, leaf: Leaf, floor: np.ndarray) -> np.ndarray:
        """Least cost of every table; infinite where the leaf has no placement of it.

        Args:
            asked: the prices.
            leaf: what is known of pieces, and of which tables push.
            floor: float64 [C, P, 5], what every plan puts on owners beyond what hides it.

        Returns:
            float64 [T].
        """
        if not self.tables:
            return np.zeros(0)
        whole = self.width == self.dims[self.of]
        cost = {kind: self._blocks(x, whole) for kind, x in asked.cost.items()}  # [N, B, C]
        for kind, x in cost.items():
            np.copyto(x, np.inf, where=~self.may[kind][self.of][:, None, :])
        still, stay = self._still(asked, {k: x for k, x in cost.items() if k != "push"})
        pushed = np.full((2, self.of.size), np.inf)
        if "push" in cost:
            wide = whole | (self.width >= NARROWEST)
            at = np.flatnonzero(wide & (leaf.pushes[self.of] != STILL))
            mass = self._masses(at, leaf, floor)
            must = leaf.pushes[self.of] >= PUSHES
            pushed[:, at] = self._pushed(at, asked, cost["push"][at], stay[at],
                                      np.where(must[at], np.inf, still[at]), mass)
        return np.array([self._table(k, still, pushed, int(leaf.pushes[k]), asked.piece)
                         for k in range(len(self.tables))])

    def _blocks(self, cost: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """What blocks of pieces ask; float64 [N, B, C]."""
        less = (self.dims[self.of] - self.width)[:, None, None]
        each = cost[0][self.of] - less * cost[1][self.of]
        each += np.where(whole[:, None, None], 0.0, cost[2][self.of])
        return np.asarray(np.einsum("nbf,ncf->nbc", self.blocks[self.of], each))

    def _still(self, asked: Asked, cost: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Pieces that push nothing: their least cost, and that of their blocks; [N], [N, B]."""
        stay = np.full((self.of.size, self.blocks.shape[1]), np.inf)
        one = np.full(self.of.size, np.inf)
        for x in cost.values():
            least = x.min(axis=2)
            one = np.minimum(one, least.sum(axis=1))
            stay = np.minimum(stay, least)
        several = (self.total * self.still_ns)[self.of] * asked.tier
        return np.minimum(one, stay.sum(axis=1) + several), stay

    # -- pushed pieces ----------------------------------------------------------------------------

    def _sums(self, of: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Bytes of partial sums of one owner of a share of the lookups of tables `of` (int64 [N]),
        in all columns, from below; float64 [N, ...] as `share`."""
        of = of.reshape(-1, *(1,) * (share.ndim - 1))
        ratio = np.log(self.grid[1] / self.grid[0])
        position = np.log(np.maximum(share, _LEAST_SHARE) / _LEAST_SHARE) / ratio
        low = np.minimum(position.astype(np.int64), _POINTS - 2)
        a, b = self.grid[low], self.grid[low + 1]
        left, right = self.sums[of, low], self.sums[of, low + 1]
        inside = left + np.clip((share - a) / (b - a), 0.0, 1.0) * (right - left)
        return np.asarray(inside * np.minimum(share / _LEAST_SHARE, 1.0))

    def _owners(self, of: np.ndarray, share: np.ndarray, most: np.ndarray) -> np.ndarray:
        """The same of as many owners as it takes of whom each holds `most` (as `share`)."""
        most = np.maximum(most, _LEAST_SHARE)
        full = _full(share, most)
        return np.asarray(full * self._sums(of, np.minimum(most, 1.0) + 0 * share)
                          + self._sums(of, np.maximum(share - full * most, 0.0)))

    def _masses(self, at: np.ndarray, leaf: Leaf, floor: np.ndarray) -> np.ndarray:
        """The largest share of its table's lookups that one owner of a pushed piece may hold, of
        pieces `at`, by class; float64 [n, C], 0 where none fits."""
        of, width = self.of[at], self.width[at]
        less = (self.dims[of] - width)[:, None, None, None]
        ids = np.maximum(self.ids[of, 0] - less * self.ids[of, 1], 0.0)  # [n, C, P, 5]
        part = (width / self.dims[of])[:, None, None, None]

        def fits(share: np.ndarray) -> np.ndarray:
            sums = self._sums(of, share)[..., None, None]
            load = share[..., None, None] * ids + part * sums * self.partial
            step = np.maximum((load + floor).max(axis=-1), 0.0).sum(axis=-1)
            return np.asarray((load <= leaf.most * (1 + _ROUNDING)).all(axis=(-1, -2))
                              & (step <= leaf.step_us * (1 + _ROUNDING)))

        low, high = np.zeros((2, at.size, floor.shape[0]))
        high += 1.0
        everything, nothing = fits(high), ~fits(low)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            good = fits(middle)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return np.where(everything, 1.0, np.where(nothing, 0.0, high))

    def _pushed(self, at: np.ndarray, asked: Asked, go: np.ndarray, stay: np.ndarray,
                still: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """Least cost of pieces of which all rows are pushed, or some, as far as that is below
        `still` or easily shown; float64 [2, n]."""
        of = self.of[at]
        price = (self.width[at] / self.dims[of])[:, None] * asked.partial
        ids = self.blocks[of, :, IDS]
        go = np.where((mass > 0)[:, None, :], go, np.inf)
        some = (self.total[of] * self.model.tiers_ns(True) * asked.tier + self.bags[of] * asked.bag)
        own = ids[..., None] * asked.own * self.asks[of, None, None]
        free = np.isfinite(stay).all(axis=1)
        out = np.full((2, at.size), np.inf)
        usable = np.isfinite(go).all(axis=1)  # [n, C]
        for single in (True, False):
            n = np.flatnonzero((usable.sum(axis=1) == 1) if single else usable.sum(axis=1) > 1)
            if not n.size:
                continue
            share = ids[n] / self.total[of[n], None]
            search = _Search(self, of[n], share, price[n], mass[n], usable[n])
            parted = go[n] + own[n]
            every = go[n] + np.where(mass[n, None] < 1 - _ROUNDING, own[n], 0.0)
            zero = np.zeros_like(stay[n])
            out[0, n] = search.least(every, zero, True, still[n])
            m = np.flatnonzero(free[n])
            if m.size:
                search = search.of(m)
                rest = stay[n][m].sum(axis=1) + some[n][m]
                found = search.least(parted[m], stay[n][m], False, still[n][m] - rest)
                out[1, n[m]] = rest + found
        return out

    # -- a table of pieces ------------------------------------------------------------------------

    def _table(self, k: int, still: np.ndarray, pushed: np.ndarray, pushes: int, piece: float
               ) -> float:
        """Least cost of a table whose pieces of each width cost so much at least: `still` where
        nothing is pushed (float64 [N]), and `pushed` where all rows are, or some ([2, N])."""
        n = np.flatnonzero(self.of == k)
        widths, dim = self.width[n], int(self.dims[k])
        still, (every, some) = still[n] + piece, pushed[:, n] + piece
        if pushes == STILL:
            every, some = np.full((2, n.size), np.inf)
        if self.cut[k] and dim % STEP:  # a fraction of a piece may be left
            return float((np.minimum(np.minimum(still, every), some) * (dim / widths)).min()
                         - piece)
        # What a table costs of which nothing, all and some is pushed, by columns made up so far.
        steps = dim // STEP if self.cut[k] else 1
        nothing, everything, something = np.full((3, steps + 1), np.inf)
        nothing[0] = everything[0] = 0.0
        count = widths // STEP if self.cut[k] else np.ones(1, np.int64)
        for to in range(1, nothing.size):
            m = count <= to
            before = to - count[m]
            nothing[to] = (nothing[before] + still[m]).min()
            everything[to] = (everything[before] + every[m]).min()
            beside = np.where(before > 0, 0.0, np.inf)
            none, every_, some_ = nothing[before], everything[before], something[before]
            something[to] = min((np.minimum(np.minimum(none, every_), some_) + some[m]).min(),
                                (np.minimum(none, some_) + beside + every[m]).min(),
                                (np.minimum(every_, some_) + beside + still[m]).min())
        lanes = {FREE: (nothing, everything, something), STILL: (nothing,),
                 PUSHES: (everything, something), PARTLY: (something,), WHOLLY: (everything,)}
        return float(min(x[-1] for x in lanes[pushes]) - piece)


class _Search:
    """Least cost of what is pushed of some pieces, against staying.

    Args:
        costs: the tables.
        of: int64 [n], table of each piece.
        share: float64 [n, B], of its table's lookups that a block has.
        price: float64 [n, C], of a byte of partial sums of all columns.
        mass: float64 [n, C], share that one owner holds at most.
        usable: bool [n, C].
    """

    def __init__(self, costs: TableCosts, of: np.ndarray, share: np.ndarray, price: np.ndarray,
                 mass: np.ndarray, usable: np.ndarray) -> None:
        self.costs, self.table, self.share = costs, of, share
        self.price, self.mass, self.usable = price, mass, usable

    def of(self, n: np.ndarray) -> _Search:
        """The same of fewer pieces."""
        return _Search(self.costs, self.table[n], self.share[n], self.price[n], self.mass[n],
                       self.usable[n])

    def least(self, go: np.ndarray, stay: np.ndarray, must: bool, enough: np.ndarray
              ) -> np.ndarray:
        """Least sum of `go - stay` over pushed blocks (float64 [n, B, C], [n, B]) and of partial
        sums; of all blocks, if `must`; float64 [n]. More than `enough` need not be shown."""
        price = np.where(self.usable, self.price, np.inf).min(axis=1)
        mass = np.where(self.usable, self.mass, 0.0).max(axis=1)
        alike = self._prefixes(np.minimum(go.min(axis=2) - stay, 1e30), price, mass, must)
        if (self.usable.sum(axis=1) == 1).all():
            return alike
        return np.maximum(alike, self._divided(go - stay[..., None], must, enough))

    def _prefixes(self, gain: np.ndarray, price: np.ndarray, mass: np.ndarray, must: bool
                  ) -> np.ndarray:
        """With owners of one class."""
        n, one = np.arange(len(gain))[:, None], mass[:, None]
        if must:
            share = self.share.sum(axis=1, keepdims=True)
            sums = self.costs._owners(self.table, share, one)[:, 0]
            return np.asarray(gain.sum(axis=1) + price * sums)
        rate = np.where(self.share > 0, gain / np.maximum(self.share, 1e-300),
                        np.where(gain < 0, -np.inf, np.inf))
        order = np.argsort(rate, axis=1, kind="stable")
        gain, share = gain[n, order], self.share[n, order]
        zero = np.zeros((len(gain), 1))
        total = np.concatenate([zero, np.cumsum(gain, axis=1)], axis=1)
        end = np.concatenate([zero, np.cumsum(share, axis=1)], axis=1)
        found = total + price[:, None] * self.costs._owners(self.table, end, one)
        least = np.minimum(found.min(axis=1), 0.0)
        # Inside of a block owners may be full: after the first of them, and after the last.
        last = one * _full(end[:, 1:], one)
        first = np.minimum(last, one * (np.floor(end[:, :-1] / one) + 1))
        for at in (first, last):
            inside = (at > end[:, :-1]) & (at < end[:, 1:])
            part = np.where(inside, (at - end[:, :-1]) / np.maximum(share, 1e-300), 0.0)
            found = total[:, :-1] + part * gain + price[:, None] * self.costs._owners(
                self.table, np.where(inside, at, 0.0), one)
            least = np.minimum(least, np.where(inside, found, np.inf).min(axis=1))
        return least

    def _divided(self, gain: np.ndarray, must: bool, enough: np.ndarray) -> np.ndarray:
        """With owners of several classes (gain float64 [n, B, C]); a bound of `enough` (float64
        [n]) is not raised."""
        size, classes = len(gain), gain.shape[2]
        each = np.arange(size)
        low, high = np.zeros((2, size, _PARTS + 1, classes))
        high += self.share.sum(axis=1)[:, None, None]
        bound = np.full((size, _PARTS + 1), np.inf)
        error, cut = np.zeros((2, size, _PARTS + 1, classes))
        bound[:, 0], error[:, 0], cut[:, 0] = self._part(gain, low[:, 0], high[:, 0], must)
        for new in range(1, _PARTS + 1):
            at = bound.argmin(axis=1)
            worst = error[each, at].argmax(axis=1)
            least = bound[each, at]
            n = np.flatnonzero((error[each, at, worst] > _CLOSE * np.abs(least)) & (least < enough))
            if not n.size:
                break
            at, worst = at[n], worst[n]
            low[n, new], high[n, new] = low[n, at], high[n, at]
            before = bound[n, at]
            low[n, new, worst] = high[n, at, worst] = cut[n, at, worst]
            part = self.of(n)
            for slot in (at, np.full(n.size, new)):
                found, error[n, slot], cut[n, slot] = part._part(gain[n], low[n, slot],
                                                                 high[n, slot], must)
                bound[n, slot] = np.maximum(found, before)
        return np.asarray(bound.min(axis=1))

    def _part(self, gain: np.ndarray, low: np.ndarray, high: np.ndarray, must: bool
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bound where the owners of each class hold a share between two (float64 [n, C]): partial
        sums by a line below them. What the line misses at the shares that blocks then choose, and
        where to divide; float64 [n], [n, C], [n, C]."""
        mass = np.maximum(self.mass, _LEAST_SHARE)
        at_low, at_high = self._cost(low), self._cost(high)
        wide = np.maximum(high - low, 1e-300)
        slope, fixed = (at_high - at_low) / wide, at_low - (at_high - at_low) / wide * low
        full = _full(high, mass) * mass > low  # nothing costs less than owners that are all full
        slope = np.where(full, self._cost(mass) / mass, slope)
        fixed = np.where(full, 0.0, fixed)
        point = high <= low
        slope, fixed = np.where(point, 0.0, slope), np.where(point, at_low, fixed)
        slope, fixed = np.where(self.usable, slope, 0.0), np.where(self.usable, fixed, 0.0)
        bound, held = self._with_lines(gain, slope, fixed, must)
        best, turned_slope, turned_fixed = bound, slope, fixed
        for _ in range(_TURNS):
            # A share beyond an end of its part, where the line is too low: turned about that end,
            # the line is as high as the cost there, and on the part it is lower than before.
            end = np.clip(held, low, high)
            there, cost = turned_fixed + turned_slope * end, self._cost(held)
            turn = self.usable & (held != end) & (
                cost > turned_fixed + turned_slope * held + _ROUNDING * np.abs(cost))
            if not turn.any():
                break
            steep = (cost - there) / np.where(turn, held - end, 1.0)
            turned_slope = np.where(turn, steep, turned_slope)
            turned_fixed = np.where(turn, there - steep * end, turned_fixed)
            found, held = self._with_lines(gain, turned_slope, turned_fixed, must)
            best = np.maximum(best, found)
        inside = np.clip(held, low, high)
        error = np.where(self.usable & (inside > low) & (inside < high),
                         self._cost(inside) - fixed - slope * inside, 0.0)
        begin = _full(inside, mass) * mass
        cut = np.where(begin > low, begin, np.where(begin + mass < high, begin + mass, inside))
        return best, np.maximum(error, 0.0), cut

    def _with_lines(self, gain: np.ndarray, slope: np.ndarray, fixed: np.ndarray, must: bool
                    ) -> tuple[np.ndarray, np.ndarray]:
        """Least cost where partial sums lie on lines, and the shares by class that it has; float64
        [n], [n, C]."""
        cost = gain + self.share[..., None] * slope[:, None, :]  # [n, B, C]
        best = cost.argmin(axis=2)
        least = np.minimum(np.take_along_axis(cost, best[..., None], 2)[..., 0], 1e30)
        chosen = np.ones_like(best, bool) if must else least < 0
        bound = np.where(chosen, least, 0.0).sum(axis=1) + fixed.sum(axis=1)
        held = np.stack([(self.share * (chosen & (best == c))).sum(axis=1)
                         for c in range(cost.shape[2])], axis=1)
        return bound, held

    def _cost(self, share: np.ndarray) -> np.ndarray:
        """Of partial sums by class; float64 [n, C]."""
        return np.where(self.usable, self.price, 0.0) * self.costs._owners(
            self.table, share, np.maximum(self.mass, _LEAST_SHARE))


def _full(share: np.ndarray, most: np.ndarray) -> np.ndarray:
    """How many owners are full and have others beside them."""
    return np.floor(share / most * (1 - _ROUNDING))


def _widths(dim: int, cut: bool) -> np.ndarray:
    """Widths of a table's pieces: the whole row first, multiples of a step, and what is left of a
    row beside one that is pushed."""
    if not cut:
        return np.array([dim], np.int64)
    other = [w for w in range(1, dim)
             if w % STEP == 0 or (w >= NARROWEST and (dim - w) % STEP == 0)]
    return np.array([dim, *other], np.int64)
