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
ends where owners are full, as what is concave is least at an end; owners of several classes are
taken for one, of those that hold most and pay least, and two of them are looked at once more, by
what the first holds. Beside it, what owners may be loaded with says what their rows send at least,
linear in the rows, so that each block chooses for itself. The greatest of these bounds counts.
Pieces then make up the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.search.cost.model import CostModel
from oper.search.problem.space import MAX_REPLICATED
from oper.search.problem.statement import IDS, TableProblem
from oper.search.verify.prices import FREE, PARTLY, PUSHES, STILL, WHOLLY, Leaf

STEP, NARROWEST = 4, 8  # columns: what widths are multiples of, and the least that is pushed
_POINTS, _LEAST_SHARE = 1200, 1e-7  # at which partial sums are tabulated; chords lie below
_PARTS = 1 / 64, 1 / 16, 1 / 4, 1, 2  # of what one owner holds, between which a line is drawn
_BISECTIONS = 40
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Asked:
    """Prices of what tables ask, for C classes of owners.

    Attributes:
        cost: by kind, float64 [2, T, C, 4], a unit of each feature in a piece of all columns, and
            what a piece asks whatever its width is.
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
        may: which table may be held how, by the owner's class; bool [T, C] by kind.
        sizes: int64 [C], ranks of each class.
    """

    def __init__(self, model: CostModel, tables: Sequence[TableProblem],
                 blocks: Sequence[np.ndarray], cuts: bool, may: dict[str, np.ndarray],
                 sizes: np.ndarray) -> None:
        self.model, self.tables, self.may, self.sizes = model, tables, may, sizes
        most = max((len(b) for b in blocks), default=0)
        #: float64 [T, B, 4], padded with blocks of nothing.
        self.blocks = np.zeros((len(tables), most, 4))
        for k, b in enumerate(blocks):
            self.blocks[k, :len(b)] = b
        # Masters of replicated rows are dealt in turn: of equal rows of a tier, only what is left
        # of a turn may lie in some classes and not in another one.
        some = [sizes.sum() - np.delete(sizes, c).min(initial=sizes.sum())
                for c in range(sizes.size)]
        tiers = [MAX_REPLICATED + len(model.problem.pinned_of(t.spec.name))
                 if t.ids_are_positions else np.inf for t in tables]
        #: float64 [T, B, C], share of each block whose masters may lie where they cost least.
        self.masters = np.minimum(1.0, np.array(tiers).reshape(-1, 1, 1) * np.maximum(some, 1)
                                  / np.maximum(self.blocks[..., :1], 1e-9))
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
        self.share = self.width / self.dims[self.of]  # of a table's columns
        self.ratio = np.zeros((1, 1, 1, 1))

    def set_loads(self, each: np.ndarray, asks: np.ndarray, partial: np.ndarray) -> None:
        """Say what pushed pieces put on their owners, by class, phase and group.

        Args:
            each: float64 [T, 2, 3, C, P, 5], a unit of each feature but rows, in a piece of all
                columns, and in any.
            asks: float64 [C, P, 5], an id that the owner pushes to itself, unless it has all rows.
            partial: float64 [C, P, 5], a byte of partial sums.

        Attributes:
            unit: float64 [N, C, P, 5, 3], of pieces that are looked at.
            low: float64 [N, C, P, 5], what all ids would ask if they were those of the block where
                that is least.
            spared: float64 [T, C, P, 5], what the owner of all rows does not ask.
            ratio: float64 [P, 5, P, 5], least load by the second that a piece has by the first.
        """
        self.partial = partial
        self.spared = (self.total * self.asks)[:, None, None, None] * asks
        shape = (self.of.size, *partial.shape)
        self.unit, self.low = np.zeros((*shape, 3)), np.zeros(shape)
        ratio = np.full((*shape[2:], *shape[2:]), np.inf)
        for k, t in enumerate(self.tables):
            n = np.flatnonzero(self.of == k)
            share = self.share[n][:, None, None, None, None]
            unit = np.moveaxis(share * each[k, 0] + (1 - share) * each[k, 1], 1, -1)
            unit[..., 0] += asks * self.asks[k]
            blocks = t.blocks[t.blocks[:, IDS] > 0]
            by_block = unit @ (blocks[:, IDS:] / blocks[:, [IDS]] * self.total[k]).T
            # What owners of some rows have less of than readers is not looked at.
            odd = (by_block[self.width[n] >= NARROWEST] < 0).any(axis=(0, -1))
            by_block[:, odd] = 0.0
            self.spared[k][odd] = 0.0
            self.unit[n] = np.where(odd[..., None], 0.0, unit)
            self.low[n] = by_block.min(axis=-1)
            # The owner of all rows does not ask itself.
            every = self.unit[n] @ t.total[IDS:] - self.spared[k]
            wide = self.width[n] >= min(NARROWEST, self.dims[k])
            for c in np.flatnonzero(self.may["push"][k] | (not self.asks[k])):
                for x in (*by_block[wide][[0, -1], c], *every[wide][[0, -1], c, ..., None],
                          partial[c, ..., None]):
                    ratio = np.minimum(ratio, _least_ratio(x))
        self.ratio = np.where(np.isfinite(ratio), ratio, 0.0)

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
        cost = {kind: self._blocks(x) for kind, x in asked.cost.items()}  # [N, B, C]
        if "replicated" in cost:
            x, part = cost["replicated"], self.sizes / self.sizes.sum()
            cost["replicated"] = self.masters[self.of] * (x - (x @ part)[..., None]) + (
                x @ part)[..., None]
        for kind, x in cost.items():
            np.copyto(x, np.inf, where=~self.may[kind][self.of][:, None, :])
        still, stay = self._still(asked, {k: x for k, x in cost.items() if k != "push"})
        pushed = np.full((2, self.of.size), np.inf)
        if "push" in cost:
            wide = (self.share == 1) | (self.width >= NARROWEST)
            at = np.flatnonzero(wide & (leaf.pushes[self.of] != STILL))
            may = self.may["push"][self.of[at]]
            mass = np.where(may, self._masses(at, leaf, floor), 0.0)
            at, mass = at[mass.any(axis=1)], mass[mass.any(axis=1)]
            pushed[:, at] = self._pushed(at, asked, cost["push"][at], stay[at], mass,
                                         self._line(at, leaf, floor, mass))
        return np.array([self._table(k, still, pushed, int(leaf.pushes[k]), asked.piece)
                         for k in range(len(self.tables))])

    def _blocks(self, cost: np.ndarray) -> np.ndarray:
        """What blocks of pieces ask; float64 [N, B, C]."""
        share = self.share[:, None, None]
        each = share * cost[0][self.of] + (1 - share) * cost[1][self.of]
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
        part = self.share[at][:, None, None, None]

        def fits(share: np.ndarray, spared: np.ndarray | float = 0.0) -> np.ndarray:
            sums = self._sums(self.of[at], share)[..., None, None]
            load = share[..., None, None] * self.low[at] - spared + part * sums * self.partial
            step = np.maximum((load + floor).max(axis=-1), 0.0).sum(axis=-1)
            return np.asarray((load <= leaf.most * (1 + _ROUNDING)).all(axis=(-1, -2))
                              & (step <= leaf.step_us * (1 + _ROUNDING)))

        low, high = np.zeros((2, at.size, floor.shape[0]))
        high += 1.0
        everything, nothing = fits(high, self.spared[self.of[at]]), ~fits(low)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            good = fits(middle)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return np.where(everything, 1.0, np.where(nothing, 0.0, high))

    def _line(self, at: np.ndarray, leaf: Leaf, floor: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """Bytes of partial sums of each block of pieces `at` at least, by class, as that limit of
        what an owner is loaded with has it that says most of all blocks; float64 [n, B, C].

        An owner whose rows ask r by share holds M at most, r M + sums(M) = limit, and sends
        sums(M) / M by share at least. That is concave in r, and lines between some r lie below
        it: owners of mixed rows send no less than their rows would apart.
        """
        out = np.zeros((at.size, self.blocks.shape[1], floor.shape[0]))
        every = np.arange(floor.shape[1])
        for n, c in np.argwhere((mass > 0) & (mass < 1)):  # a whole piece sends no more than that
            k, blocks = self.of[at[n]], self.blocks[self.of[at[n]]]
            share = blocks[:, IDS] / self.total[k]
            ask = self.unit[at[n], c] @ (blocks[:, IDS:].T / np.maximum(share, 1e-300))  # [P, 5, B]
            partial = self.share[at[n]] * self.partial[c]
            limits = [(ask[p, g], partial[p, g], leaf.most[p, g])
                      for p, g in np.argwhere(np.isfinite(leaf.most))]
            if np.isfinite(leaf.step_us):  # all phases together, by a group of each
                whole = self.unit[at[n], c] @ self.tables[k].total[IDS:]
                top = every, (whole + partial * self.sums[k, -1]).argmax(axis=1)
                limits.append((ask[top].sum(axis=0), partial[top].sum(),
                               leaf.step_us - floor[c][top].sum()))
            for ask_, partial_, limit in limits:
                r = ((limit - partial_ * self.sums[k]) / self.grid)[::-1]
                sent = (self.sums[k] / self.grid)[::-1]
                first = int(np.count_nonzero(r <= 0))
                # Beyond all lookups nothing more is sent.
                r, sent = ((np.append(0.0, x) if first == 0 else x[first - 1:]) for x in (r, sent))
                sums = share * np.interp(ask_, r, sent)
                if sums.sum() > out[n, :, c].sum():
                    out[n, :, c] = sums
        return out

    def _pushed(self, at: np.ndarray, asked: Asked, go: np.ndarray, stay: np.ndarray,
                mass: np.ndarray, line: np.ndarray) -> np.ndarray:
        """Least cost of pieces of which all rows are pushed, or some; float64 [2, n]."""
        of = self.of[at]
        usable = mass > 0
        price = np.where(usable, self.share[at][:, None] * asked.partial, np.inf)
        ids = self.blocks[of, :, IDS]
        go = np.where(usable[:, None], go, np.inf)
        own = ids[..., None] * asked.own * self.asks[of, None, None]
        # Sums are concave: each row sends no less than its part of what its class sends at most.
        most = np.minimum(ids.sum(axis=1)[:, None] / self.total[of, None], mass)
        each = self._sums(of, most) / np.maximum(most, _LEAST_SHARE)
        lines = line, ids[..., None] / self.total[of, None, None] * each[:, None]
        whole = np.where(mass[:, None] < 1 - _ROUNDING, own, 0.0)
        every = self._least(of, go + whole, np.zeros_like(stay), price, mass, lines, True)
        free = np.isfinite(stay).all(axis=1)
        stay = np.where(free[:, None], stay, 0.0)
        some = (self.total[of] * self.model.tiers_ns(True) * asked.tier + self.bags[of] * asked.bag
                + stay.sum(axis=1) + self._least(of, go + own, stay, price, mass, lines, False))
        return np.stack([every, np.where(free, some, np.inf)])

    def _least(self, of: np.ndarray, go: np.ndarray, stay: np.ndarray, price: np.ndarray,
               mass: np.ndarray, lines: Sequence[np.ndarray], must: bool) -> np.ndarray:
        """Least sum of `go - stay` over pushed blocks of pieces of tables `of` and of their partial
        sums; of all blocks, if `must`.

        Args:
            of: int64 [n].
            go, stay: float64 [n, B, C], infinite where blocks may not be pushed; [n, B].
            price: float64 [n, C], of a byte of partial sums of all columns.
            mass: float64 [n, C], share of its table's lookups that one owner holds at most.
            lines: float64 [n, B, C] each, bytes of partial sums of each block at least.

        Returns:
            float64 [n].
        """
        gain = np.minimum(go.min(axis=2) - stay, 1e30)
        share = self.blocks[of, :, IDS] / self.total[of, None]
        # Owners of all classes as one, of those that hold most and pay least.
        out = self._prefixes(of, gain, share, price.min(axis=1)[:, None], mass.max(axis=1)[:, None],
                             must)
        for x in lines:
            sums = x * np.where(price < np.inf, price, 0.0)[:, None]
            gain = np.minimum((go + sums).min(axis=2) - stay, 1e30)
            out = np.maximum(out, (gain if must else np.minimum(gain, 0.0)).sum(axis=1))
        n = np.flatnonzero((price < np.inf).sum(axis=1) == 2)
        if n.size:
            both = np.argsort(price[n] == np.inf, axis=1, kind="stable")[:, :2]
            pay, most = (np.take_along_axis(x[n], both, 1) for x in (price, mass))
            two = self._two_classes(of[n], np.take_along_axis(go[n], both[:, None], 2), stay[n],
                                    share[n], pay, most, must)
            out[n] = np.maximum(out[n], two)
        return out

    def _two_classes(self, of: np.ndarray, go: np.ndarray, stay: np.ndarray, share: np.ndarray,
                     price: np.ndarray, mass: np.ndarray, must: bool) -> np.ndarray:
        """As `_least`, where owners of the first class hold a share between two of `_PARTS` of a
        full one's: a line lies below their sums there, and those of the second hold a prefix."""
        full, low = np.minimum(mass[:, :1], share.sum(axis=1, keepdims=True)), 0.0 * mass[:, :1]
        out, before = np.full(len(of), np.inf), low
        for part in _PARTS:
            high = np.minimum(part, 1.0) * full
            after = price[:, :1] * self._sums(of, high)
            # More than one full owner send no less than if all were full.
            slope = (after - before) / (high - low) if part <= 1 else after / high
            other = go[..., 0] + slope * share
            if not must:
                other = np.minimum(other, stay)
            found = self._prefixes(of, np.minimum(go[..., 1] - other, 1e30), share, price[:, 1:],
                                   mass[:, 1:], False)
            start = (before - slope * low)[:, 0] if part <= 1 else 0.0
            out = np.minimum(out, start + (other - stay).sum(axis=1) + found)
            low, before = high, after
        return out

    def _prefixes(self, of: np.ndarray, gain: np.ndarray, share: np.ndarray, price: np.ndarray,
                  most: np.ndarray, must: bool) -> np.ndarray:
        """As `_least`, where partial sums are those of owners who hold `most`."""
        n = np.arange(len(gain))[:, None]
        if must:
            sums = self._owners(of, share.sum(axis=1, keepdims=True), most)
            return np.asarray(gain.sum(axis=1) + (price * sums)[:, 0])
        rate = np.where(share > 0, gain / np.maximum(share, 1e-300),
                        np.where(gain < 0, -np.inf, np.inf))
        order = np.argsort(rate, axis=1, kind="stable")
        gain, share = gain[n, order], share[n, order]
        zero = np.zeros((len(gain), 1))
        total = np.concatenate([zero, np.cumsum(gain, axis=1)], axis=1)
        end = np.concatenate([zero, np.cumsum(share, axis=1)], axis=1)
        least = np.minimum((total + price * self._owners(of, end, most)).min(axis=1), 0.0)
        # Inside of a block owners may be full: after the first of them, and after the last.
        last = most * _full(end[:, 1:], most)
        first = np.minimum(last, most * (np.floor(end[:, :-1] / most) + 1))
        for at in (first, last):
            inside = (at > end[:, :-1]) & (at < end[:, 1:])
            part = np.where(inside, (at - end[:, :-1]) / np.maximum(share, 1e-300), 0.0)
            found = total[:, :-1] + part * gain + price * self._owners(
                of, np.where(inside, at, 0.0), most)
            least = np.minimum(least, np.where(inside, found, np.inf).min(axis=1))
        return np.asarray(least)

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
        # By columns made up so far, and by whether some rows stayed (1) and some are pushed (2).
        steps = dim // STEP if self.cut[k] else 1
        count = widths // STEP if self.cut[k] else np.ones(1, np.int64)
        cost, pieces = np.full((4, steps + 1), np.inf), np.stack([still, every, some])
        cost[0, 0] = 0.0
        for to in range(1, steps + 1):
            m = count <= to
            found = (cost[:, None, to - count[m]] + pieces[:, m]).min(axis=-1)  # [4, 3]
            np.minimum.at(cost[:, to], np.arange(4)[:, None] | np.arange(1, 4), found)
        known = {FREE: (1, 2, 3), STILL: (1,), PUSHES: (2, 3), PARTLY: (3,), WHOLLY: (2,)}
        return float(min(cost[x, -1] for x in known[pushes]) - piece)


def _least_ratio(loads: np.ndarray) -> np.ndarray:
    """The least of loads (float64 [P, 5, B]) over others that are not 0; float64 [P, 5, P, 5]."""
    by = loads[:, :, None, None]
    out = np.divide(loads, by, out=np.full((*by.shape[:2], *loads.shape), np.inf), where=by > 0)
    return np.asarray(np.where(loads < 0, 0.0, out).min(axis=-1))


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
