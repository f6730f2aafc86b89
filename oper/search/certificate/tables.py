"""The least cost of a table at given prices, over all its placements.

A table's columns are cut into pieces. In a piece, every block of rows is placed in one of several
ways with owners of one class, or is pushed. Costs of a piece of width w:

* rows cost what the cost model gives for w columns;
* rows in several tiers cost more per id, and still more if some of them are pushed; a table may
  have pieces with and without pushed rows, and the latter pay the lesser charge here;
* pushed rows need partial sums, which are concave in the mass (share of the table's lookups) of one
  owner. If an owner holds at most m, owners with a total mass q cost at least as much as
  floor(q / m) full owners and one with the remainder;
* an owner of only a part of a piece sends requests to itself for its own ids.

The best set of pushed blocks with owners of one class is a prefix of the blocks by gain per id, or
stops inside a block where an owner is full, because a concave function has its minimum at an end
point. Owners of several classes are treated as one class with the largest capacity and the lowest
price. Further bounds, linear in the rows, follow from the limits on an owner's load, so that each
block can choose independently. With several classes, bounds in which one class has its own capacity
and price, and the others' partial sums are linear, are computed as well: linear for any share of
the lookups, or, in each of several ranges of that share, by the chord over the range. The largest
bound is used. A shortest path then combines pieces to the table's columns.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from oper.search.certificate.prices import PUSHES, STILL, Leaf, UnitPrices
from oper.search.cost.model import CostModel
from oper.search.cost.space import free_blocks, most_masters
from oper.search.problem.statement import IDS

STEP, NARROWEST = 4, 8  # columns: widths are multiples of STEP; pushed pieces have NARROWEST
_POINTS, _LEAST_SHARE = 4800, 1e-7  # grid of shares at which partial sums are tabulated
_BISECTIONS = 40
#: Shares of a table's lookups between which a class's partial sums are replaced by their chord.
_RANGES = 0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0
_ROUNDING = 1e-9
_MASSES = 0.0, 0.125, 0.25, 0.5, 0.75, 1.0  # at which tangents bound an owner's load


class TableCosts:
    """Computes lower bounds of the costs of all free tables.

    Args:
        may: maps each way of holding rows (`KINDS` of `oper.search.cost.space`) to bool [T, C]:
            whether ranks of a class may own such rows of the table, see `may_hold`.
        sizes: int64 [C], number of ranks in each class.
    """

    def __init__(self, model: CostModel, may: dict[str, np.ndarray], sizes: np.ndarray) -> None:
        self.model, self.may, self.sizes, problem = model, may, sizes, model.problem
        self.tables = tables = problem.free_tables
        pinned = [problem.held(t.spec.name).pinned for t in tables]
        #: float64 [T, B, 4], features of blocks without pinned rows, padded with zeros.
        self.blocks = np.zeros((len(tables), max((len(t.blocks) for t in tables), default=0), 4))
        for k, t in enumerate(tables):
            self.blocks[k, :len(t.blocks)] = free_blocks(problem, t)
        most = np.array([most_masters(problem, t, sizes) for t in tables])
        most = most.reshape(-1, 1, sizes.size)
        #: float64 [T, B, C], share of each block's masters that may all be in one class.
        self.masters = np.minimum(1.0, most / np.maximum(self.blocks[..., :1], 1e-9))
        self.total = np.array([t.total[IDS] for t in tables])
        #: int64 [T], number of first blocks that are single rows.
        self.single = np.array([np.logical_and.accumulate(t.blocks[:, 0] == 1).sum()
                                for t in tables], np.int64)
        self.bags = np.array([t.num_bags for t in tables])
        self.dims = np.array([t.spec.dim for t in tables], np.int64)
        self.cut = [problem.may_split(t) for t in tables]
        #: bool [T]: False if pinned pushed rows may let one rank own all rows and request none.
        self.asks = np.array([all(x.mode == "pull" for x in p) for p in pinned], bool)
        pull, push = model.tiers_ns(False), model.tiers_ns(True)
        self.still_ns = np.array([min(pull, push) if c or p else pull
                                  for c, p in zip(self.cut, pinned, strict=True)])
        self.grid = np.geomspace(_LEAST_SHARE, 1.0, _POINTS)
        self.sums = np.array([model.partial_bytes(t, t.spec.dim, self.grid * t.total[IDS])
                              for t in tables]).reshape(len(tables), _POINTS)
        ids = self.total[:, None] * _RANGES
        #: float64 [T, 6], partial sums at the shares `_RANGES`.
        self.at_ends = np.array([model.partial_bytes(t, t.spec.dim, x) for t, x in zip(
            tables, ids, strict=True)]).reshape(ids.shape)
        widths = [_widths(t.spec.dim, c) for t, c in zip(tables, self.cut, strict=True)]
        #: int64 [N], table and width of each type of piece that is considered.
        self.of = np.repeat(np.arange(len(tables)), [len(w) for w in widths])
        self.width = np.concatenate([np.zeros(0, np.int64), *widths])
        self.share = self.width / self.dims[self.of]  # of a table's columns
        #: Tables of equal dim that may or may not be cut, int64 [K], and their types of pieces,
        #: int64 [K, widths].
        self.groups = [(k, np.flatnonzero(np.isin(self.of, k)).reshape(k.size, -1)) for k in (
            np.array([n for n in range(len(tables)) if (int(self.dims[n]), self.cut[n]) == x])
            for x in dict.fromkeys(zip(self.dims.tolist(), self.cut, strict=True)))]

    def set_loads(self, each: np.ndarray, partial: np.ndarray, asks: np.ndarray) -> None:
        """Set the loads of pushed pieces on their owners, by class, phase and group.

        Args:
            each: float64 [T, 2, C, 3, P, 5], load of a unit of each feature except rows, in a piece
                of all columns, and the part that does not depend on the width.
            partial: float64 [T, C, P, 5], load of a byte of partial sums.
            asks: float64 [C, P, 5], load of an id that the owner pushes to itself, unless it has
                all rows.

        Attributes:
            unit: float64 [N, C, 3, P, 5], unit loads of the types of pieces considered.
            lines: float64 [T, 6, 2, 2, C, P, 5], lower bounds of an owner's load, without partial
                sums, that are linear in its mass: the tangents at `_MASSES` (second axis) of a
                piece of all columns and of the narrowest (third), at mass 0 and 1 (fourth).
            along: float64 [N], position of a width between all columns (0) and the narrowest (1).
            spared: float64 [T, C, P, 5], load of own requests, which an owner of all rows saves.
            ratio: float64 [T, C, G, G], ratio[.., i, j] = least quotient (load j) / (load i) of
                any piece, for all pairs of the G loads; infinite if the class may own no piece.
            top: float64 [T, C, G], upper limit of each load.
        """
        self.partial = partial
        self.spared = (self.total * self.asks)[:, None, None, None] * asks
        share = self.share.reshape(-1, 1, 1, 1, 1)
        self.unit = share * each[self.of, 0] + (1 - share) * each[self.of, 1]
        self.unit[:, :, 0] += self.asks[self.of, None, None, None] * asks
        self.lines = np.zeros((len(self.tables), len(_MASSES), 2, 2, *partial.shape[1:]))
        self.along = np.zeros(self.of.size)
        number = asks[0].size
        self.top = np.zeros((len(self.tables), len(asks), number))
        self.ratio = np.full((*self.top.shape, number), np.inf)
        for k, t in enumerate(self.tables):
            n = np.flatnonzero(self.of == k)
            blocks = t.blocks[t.blocks[:, IDS] > 0, IDS:]
            by_block = np.einsum("bf,ncfpg->nbcpg", blocks / blocks[:, :1] * self.total[k],
                                 self.unit[n])
            whole = np.einsum("f,ncfpg->ncpg", t.total[IDS:], self.unit[n]) - self.spared[k]
            wide = np.flatnonzero(self.width[n] >= min(NARROWEST, self.dims[k]))
            ends = wide[[0, min(1, wide.size - 1)]]  # the widest, and the narrowest
            some = np.concatenate([*by_block[ends], np.maximum(whole[ends], 0.0), partial[k, None]])
            some = some.reshape(*some.shape[:2], number)
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.where(some[..., None] > 0, some[..., None, :] / some[..., None], np.inf)
            may = self.may["push"][k] | (not self.asks[k])
            self.ratio[k][may] = found.min(axis=0)[may]
            share = (blocks[:, 0] / self.total[k]).reshape(-1, 1, 1, 1)
            self.lines[k] = _tangents(by_block[ends], share)
            widest, narrowest = self.width[n[ends]]
            self.along[n] = (widest - self.width[n]) / max(1, widest - narrowest)
            most = (np.maximum(by_block[ends], 0.0) * share).sum(axis=1).max(axis=0)
            self.top[k] = (most + partial[k] * self.sums[k, -1]).reshape(self.top[k].shape)

    def implied(self, least: np.ndarray) -> np.ndarray:
        """Lower bounds of the largest piece's other loads, as ratios to the load by which it is
        the largest.

        That load is at least `least`, float64 [P, 5]. Returns float64 [P, 5, P, 5].
        """
        has = self.top * (1 + _ROUNDING) >= least.ravel()
        found = np.where(has[..., None], self.ratio, np.inf).min(axis=(0, 1), initial=np.inf)
        return np.where(np.isfinite(found), found, 0.0).reshape(2 * least.shape)

    def least(self, prices: UnitPrices, leaf: Leaf, floor: np.ndarray) -> np.ndarray:
        """Lower bound of the cost of every table; infinite if the leaf admits no placement of it.

        Args:
            leaf: the leaf, with its limits on pieces and pushing.
            floor: float64 [C, P, 5], load that every plan puts on owners, minus the dense compute
                that hides it, microseconds.

        Returns:
            float64 [T].
        """
        if not self.tables:
            return np.zeros(0)
        cost = {kind: self._blocks(x) for kind, x in prices.cost.items()}  # [N, B, C]
        if "replicated" in cost:
            x, part = cost["replicated"], self.sizes / self.sizes.sum()
            cost["replicated"] = self.masters[self.of] * (x - (x @ part)[..., None]) + (
                x @ part)[..., None]
        for kind, x in cost.items():
            np.copyto(x, np.inf, where=~self.may[kind][self.of][:, None, :])
        still, stay = self._still(prices, {k: x for k, x in cost.items() if k != "push"})
        pushed = np.full(self.of.size, np.inf)
        if "push" in cost:
            wide = (self.share == 1) | (self.width >= NARROWEST)
            at = np.flatnonzero(wide & (leaf.pushes[self.of] != STILL))
            may = self.may["push"][self.of[at]]
            mass = np.where(may, self._masses(at, leaf, floor), 0.0)
            at, mass = at[mass.any(axis=1)], mass[mass.any(axis=1)]
            heavy = self._heavy(at, leaf, floor, mass)
            pushed[at] = self._pushed(at, prices, cost["push"][at], stay[at], mass, heavy,
                                      self._lines(at, leaf, floor, mass))
        out = np.zeros(len(self.tables))
        for tables, n in self.groups:
            out[tables] = self._combined(tables, n, still[n] + prices.piece,
                                         pushed[n] + prices.piece,
                                         leaf.pushes[tables]) - prices.piece
        return out

    def _blocks(self, cost: np.ndarray) -> np.ndarray:
        """Cost of the blocks of every type of piece, by class of their owners, from prices
        [2, T, C, 4]; float64 [N, B, C]."""
        share = self.share[:, None, None]
        each = share * cost[0][self.of] + (1 - share) * cost[1][self.of]
        return np.asarray(np.einsum("nbf,ncf->nbc", self.blocks[self.of], each))

    def _still(self, prices: UnitPrices, cost: dict[str, np.ndarray]
               ) -> tuple[np.ndarray, np.ndarray]:
        """Return the least cost of pieces that push nothing, float64 [N], and of each of their
        blocks, float64 [N, B]; `cost` maps ways of holding rows, except push, to [N, B, C]."""
        stay = np.full((self.of.size, self.blocks.shape[1]), np.inf)
        one = np.full(self.of.size, np.inf)
        for x in cost.values():
            least = x.min(axis=2)
            one = np.minimum(one, least.sum(axis=1))
            stay = np.minimum(stay, least)
        several = (self.total * self.still_ns)[self.of] * prices.tier
        return np.minimum(one, stay.sum(axis=1) + several), stay

    # -- pushed pieces ----------------------------------------------------------------------------

    def _sums(self, of: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return a lower bound of the bytes of partial sums that one owner sends, for all columns,
        if it owns the share `share` [N, ...] of the lookups of tables `of`, int64 [N]; float64,
        shape of `share`."""
        of = of.reshape(-1, *(1,) * (share.ndim - 1))
        ratio = np.log(self.grid[1] / self.grid[0])
        at = np.log(np.maximum(share, _LEAST_SHARE) / _LEAST_SHARE) / ratio
        low = np.minimum(at.astype(np.int64), _POINTS - 2)
        a, b = self.grid[low], self.grid[low + 1]
        left, right = self.sums[of, low], self.sums[of, low + 1]
        inside = left + np.clip((share - a) / (b - a), 0.0, 1.0) * (right - left)
        return np.asarray(inside * np.minimum(share / _LEAST_SHARE, 1.0))

    def _owners(self, of: np.ndarray, share: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Return the bound of `_sums` for all owners of `share` together, each of which owns at
        most the share `most`."""
        full = _full(share, most)
        return np.asarray(full * self._sums(of, np.minimum(most, 1.0))
                          + self._sums(of, np.maximum(share - full * most, 0.0)))

    def _masses(self, at: np.ndarray, leaf: Leaf, floor: np.ndarray) -> np.ndarray:
        """The largest share of its table's lookups that one owner of each pushed piece `at` may
        hold within the leaf's limits, by class of the owner; float64 [n, C], 0 if none fits."""
        most, step_us = leaf.most * (1 + _ROUNDING), leaf.step_us * (1 + _ROUNDING)
        along, ends = self.along[at].reshape(-1, 1, 1, 1, 1, 1), self.lines[self.of[at]]
        lines = ends[:, :, 0] + along * (ends[:, :, 1] - ends[:, :, 0])
        none, slope = lines[:, :, 0], lines[:, :, 1] - lines[:, :, 0]  # [n, 6, C, P, 5]

        def fits(which: np.ndarray, share: np.ndarray, owns_all: bool = False) -> np.ndarray:
            of, part = self.of[at[which]], self.share[at[which]][:, None, None, None]
            rows = (none[which] + share[:, None, :, None, None] * slope[which]).max(axis=1)
            load = rows + part * self._sums(of, share)[..., None, None] * self.partial[of]
            if owns_all:
                load -= self.spared[of]
            step = np.maximum((load + floor).max(axis=-1), 0.0).sum(axis=-1)
            return np.asarray((load <= most).all(axis=(-1, -2)) & (step <= step_us))

        pieces, found = np.arange(at.size), np.ones((at.size, floor.shape[0]))
        everything = fits(pieces, found, owns_all=True)
        found[~everything & ~fits(pieces, 0 * found)] = 0.0
        is_between = ~everything & (found > 0)
        some = np.flatnonzero(is_between.any(axis=1))
        low, high = np.zeros((2, some.size, floor.shape[0]))
        high += 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            good = fits(some, middle)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        found[some] = np.where(is_between[some], high, found[some])
        return found

    def _heavy(self, at: np.ndarray, leaf: Leaf, floor: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """Which blocks of the pushed pieces `at` no owner may have within the leaf's limits; bool
        [n, B]. A block of one row has one owner. Its load is at least that of the row, and the
        least load of any further rows, which is 0 or negative."""
        of, most, step_us = self.of[at], leaf.most * (1 + _ROUNDING), leaf.step_us * (1 + _ROUNDING)
        out = np.zeros((at.size, self.blocks.shape[1]), bool)
        along = self.along[at].reshape(-1, 1, 1, 1)
        ends = self.lines[of][:, 0, :, 0]
        least = np.minimum(ends[:, 0] + along * (ends[:, 1] - ends[:, 0]), 0.0)  # [n, C, P, 5]
        part = self.share[at].reshape(-1, 1, 1, 1)
        for b in range(self.single.max(initial=0)):
            row = self.blocks[of, b]
            sums = self._sums(of, row[:, IDS] / self.total[of]).reshape(-1, 1, 1, 1)
            # If sums load their owner less than a reader, it is assumed to send all.
            sums = np.where(self.partial[of] > 0, sums, self.sums[of, -1].reshape(-1, 1, 1, 1))
            load = (np.einsum("nf,ncfpg->ncpg", row[:, IDS:], self.unit[at]) + least
                    + part * sums * self.partial[of])
            step = np.maximum((load + floor).max(axis=-1), 0.0).sum(axis=-1)
            fits = (load <= most).all(axis=(-1, -2)) & (step <= step_us) | (mass == 1)
            out[:, b] = (b < self.single[of]) & ~(fits & (mass > 0)).any(axis=1)
            if not out[:, b].any():
                break
        return out

    def _lines(self, at: np.ndarray, leaf: Leaf, floor: np.ndarray, mass: np.ndarray
               ) -> list[np.ndarray]:
        """Lower bounds, linear in the blocks, of the bytes of partial sums of the pieces `at`.

        Partial sums are concave, so rows send at least their proportional share of what a full
        owner sends. An owner whose rows have load r per unit of share holds at most M, given by
        r M + sums(M) = limit, and so sends at least sums(M) / M per unit of share. This is concave
        in r, and chords between a few values of r lie below it: mixing rows on one owner does not
        reduce the bound. Every limit gives such a bound. Which one is tightest depends on the
        prices of the blocks' other costs and on the class, so several are returned, float64 [n, B,
        C] each. Chosen for each class by the total over all blocks: the largest of all; the
        proportional share; the largest of those by limits (0 without). Then those by each limit.
        """
        share = self.blocks[self.of[at], :, IDS] / self.total[self.of[at], None]  # [n, B]
        most = np.minimum(share.sum(axis=1, keepdims=True), mass)
        out = share[..., None] * (self._sums(self.of[at], most)
                                  / np.maximum(most, _LEAST_SHARE))[:, None]
        number = int(np.isfinite(leaf.most).sum() + np.isfinite(leaf.step_us))
        lines = [out.copy() for _ in range(3 + number)]
        lines[2][:] = 0.0
        for n, c in np.argwhere((mass > 0) & (mass < 1)):  # an owner of a whole piece has no limit
            k = self.of[at[n]]
            unit, partial = self.unit[at[n], c], self.share[at[n]] * self.partial[k, c]
            ask = np.einsum("bf,fpg->pgb", self.blocks[k][:, IDS:]
                            / np.maximum(share[n], 1e-300)[:, None], unit)
            limits = [(ask[x], partial[x], leaf.most[x]) for x in zip(
                *np.nonzero(np.isfinite(leaf.most)), strict=True)]
            if np.isfinite(leaf.step_us):  # the cutoff limits the sum of one group of each phase
                whole = np.einsum("f,fpg->pg", self.tables[k].total[IDS:], unit)
                top = np.arange(len(whole)), (whole + partial * self.sums[k, -1]).argmax(axis=1)
                limits.append((ask[top].sum(axis=0), partial[top].sum(),
                               leaf.step_us - floor[c][top].sum()))
            for line, (ask_, partial_, limit) in zip(lines[3:], limits, strict=True):
                r = ((limit - partial_ * self.sums[k]) / self.grid)[::-1]
                sent = (self.sums[k] / self.grid)[::-1]
                first = int(np.count_nonzero(r <= 0))
                # Below the least r, an owner could hold all lookups, and sends what it then sends.
                r, sent = ((np.append(0.0, x) if first == 0 else x[first - 1:]) for x in (r, sent))
                sums = share[n] * np.interp(ask_, r, sent)
                line[n, :, c] = sums
                for x in lines[0], lines[2]:
                    if sums.sum() > x[n, :, c].sum():
                        x[n, :, c] = sums
        return lines

    def _pushed(self, at: np.ndarray, prices: UnitPrices, go: np.ndarray, stay: np.ndarray,
                mass: np.ndarray, heavy: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
        """Least cost of pieces in which all or some rows are pushed; float64 [n].

        Args:
            at: int64 [n], the pieces.
            go: float64 [n, B, C], cost of each block if pushed, without partial sums.
            stay: float64 [n, B], cost of each block if not pushed.
            mass: float64 [n, C], largest share of its table's lookups that one owner holds.
            heavy: bool [n, B], blocks that may not be pushed.
            lines: float64 [n, B, C] each, lower bounds of the bytes of partial sums of each block.
        """
        of, usable = self.of[at], mass > 0
        ids = self.blocks[of, :, IDS]
        price = self.share[at][:, None] * prices.partial[of]
        own = ids[..., None] * prices.own * self.asks[of, None, None]
        go = np.where(usable[:, None], go, np.inf)
        # Owners of all classes are merged into one with the largest mass and the lowest price.
        pay = np.where(usable, price, np.inf).min(axis=1)[:, None]
        most = np.maximum(mass.max(axis=1)[:, None], _LEAST_SHARE)
        share = ids / self.total[of, None]
        whole = go + np.where(mass[:, None] < 1 - _ROUNDING, own, 0.0)
        every = whole.min(axis=2).sum(axis=1) + (
            pay * self._owners(of, share.sum(axis=1, keepdims=True), most))[:, 0]
        every[heavy.any(axis=1)] = np.inf
        free = np.isfinite(stay).all(axis=1)
        stay, go = np.where(free[:, None], stay, 0.0), np.where(heavy[..., None], 1e30, go + own)
        some = self._prefixes(of, np.minimum(go.min(axis=2) - stay, 1e30), share, pay, most)
        for sums in (price[:, None] * x for x in lines):
            every = np.maximum(every, (whole + sums).min(axis=2).sum(axis=1))
            some = np.maximum(some, np.minimum((go + sums).min(axis=2) - stay, 0.0).sum(axis=1))
        if usable.shape[1] > 1:
            for to, cost, base in ((every, whole, np.full(stay.shape, np.inf)), (some, go, stay)):
                self._raise_by_class(to, of, cost, base, price, mass, lines)
        some += (self.total[of] * self.model.tiers_ns(True) * prices.tier
                 + self.bags[of] * prices.bag + stay.sum(axis=1))
        return np.minimum(every, np.where(free, some, np.inf))

    def _raise_by_class(self, least: np.ndarray, of: np.ndarray, go: np.ndarray, stay: np.ndarray,
                        price: np.ndarray, mass: np.ndarray, lines: list[np.ndarray]) -> None:
        """Raise lower bounds of pushed pieces to those with exact partial sums of one class.

        Args:
            least: float64 [n], the bounds, without the cost of `stay` for all blocks; changed in
                place.
            stay: float64 [n, B], as for `_pushed`; infinite if all rows are pushed, and then not
                part of the costs that `least` leaves out.
            price: float64 [n, C], price of a byte of partial sums.
            of, go, mass, lines: as for `_pushed`; `go` has requests of owners to themselves.
        """
        left_out = np.where(np.isfinite(stay), stay, 0.0).sum(axis=1)
        for c in range(mass.shape[1]):
            n = np.flatnonzero((mass[:, c] > 0) & (np.delete(mass, c, axis=1) > 0).any(axis=1))
            pieces = of[n], go[n], stay[n], price[n], mass[n]
            for found in (self._beside_lines(c, *pieces, [x[n] for x in lines]),
                          self._beside_chords(c, *pieces)):
                least[n] = np.maximum(least[n], found - left_out[n])

    def _beside_lines(self, c: int, of: np.ndarray, go: np.ndarray, stay: np.ndarray,
                      price: np.ndarray, mass: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
        """Bounds with exact partial sums of class `c`, and of the other classes the lower bounds
        `lines`, which are linear in the blocks; float64 [n]. Arguments as for `_raise_by_class`."""
        least = np.full(of.size, -np.inf)
        lines = [np.delete(x, c, axis=2) for x in lines]
        cost, paid = np.delete(go, c, axis=2), np.delete(price, c, axis=1)[:, None]
        totals = [x.sum(axis=1) for x in lines]
        for sums, total in zip(lines, totals, strict=True):
            # Lines with about the largest total bound best. The search compares totals of weaker
            # lines, and may choose the proportional share (lines[1]).
            use = (total >= 0.99 * totals[0]).all(axis=1) | (sums is lines[1])
            if sums is not lines[0]:
                use &= (sums != lines[0]).any(axis=(1, 2))
            m = np.flatnonzero(use)
            rest = np.minimum(stay[m], (cost[m] + paid[m] * sums[m]).min(axis=2))
            least[m] = np.maximum(least[m], self._beside(
                rest, of[m], go[m, :, c], price[m, c], mass[m, c]))
        return least

    def _beside_chords(self, c: int, of: np.ndarray, go: np.ndarray, stay: np.ndarray,
                       price: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """Bounds with exact partial sums of class `c`, and of the other classes those of a single
        owner at the lowest of their prices, float64 [n]. Arguments as for `_raise_by_class`.

        The other classes together have a mass in one of the `_RANGES`, the first of which contains
        0. Over a range, partial sums are at least their chord, because they are concave.
        """
        least = np.full(of.size, np.inf)
        share = self.blocks[of, :, IDS] / self.total[of, None]
        cost = np.delete(go, c, axis=2).min(axis=2)
        pay = np.delete(np.where(mass > 0, price, np.inf), c, axis=1).min(axis=1)
        ends = zip(_RANGES, self.at_ends[of].T, strict=True)
        for (low, first), (high, last) in pairwise(ends):
            slope = (last - first) / (high - low)
            base = pay * (first - slope * low)
            rest = np.minimum(stay, cost + (pay * slope)[:, None] * share)
            # A range is skipped if it is not the cheapest even without the sums of class `c`.
            m = np.flatnonzero(base + np.minimum(rest, go[:, :, c]).sum(axis=1) < least)
            least[m] = np.minimum(least[m], base[m] + self._beside(
                rest[m], of[m], go[m, :, c], price[m, c], mass[m, c]))
        return least

    def _beside(self, rest: np.ndarray, of: np.ndarray, go: np.ndarray, price: np.ndarray,
                mass: np.ndarray) -> np.ndarray:
        """Least cost of pieces whose blocks cost `rest` or, pushed to one class, `go` (float64
        [n, B] each) and the class's partial sums; `price` and `mass` (float64 [n]) are its. Returns
        float64 [n]."""
        share = self.blocks[of, :, IDS] / self.total[of, None]
        return np.asarray(rest.sum(axis=1) + self._prefixes(
            of, np.minimum(go - rest, 1e30), share, price[:, None], mass[:, None]))

    def _prefixes(self, of: np.ndarray, gain: np.ndarray, share: np.ndarray, price: np.ndarray,
                  most: np.ndarray) -> np.ndarray:
        """Minimum over sets of pushed blocks of the sum of their gains (float64 [n, B]) plus the
        price of their owners' partial sums; an owner holds at most `most` ([n, 1]). Returns [n]."""
        rate = np.where(share > 0, gain / np.maximum(share, 1e-300),
                        np.where(gain < 0, -np.inf, np.inf))
        n, order = np.arange(len(gain))[:, None], np.argsort(rate, axis=1, kind="stable")
        gain, share = gain[n, order], share[n, order]
        total, end = (np.pad(np.cumsum(x, axis=1), ((0, 0), (1, 0))) for x in (gain, share))
        least = np.minimum((total + price * self._owners(of, end, most)).min(axis=1), 0.0)
        # The minimum may be inside a block, at a mass at which all owners are full.
        for full in (np.floor(end[:, :-1] / most) + 1, _full(end[:, 1:], most)):
            inside = np.clip(most * full, end[:, :-1], end[:, 1:])
            part = (inside - end[:, :-1]) / np.maximum(share, 1e-300)
            least = np.minimum(least, (total[:, :-1] + part * gain + price * self._owners(
                of, inside, most)).min(axis=1))
        return np.asarray(least)

    # -- combining pieces to a table --------------------------------------------------------------

    def _combined(self, tables: np.ndarray, n: np.ndarray, still: np.ndarray, pushed: np.ndarray,
                  pushes: np.ndarray) -> np.ndarray:
        """Least cost of the tables `tables`, of an entry of `groups`; float64 [K].

        Args:
            tables, n: int64 [K] and [K, widths], the entry.
            still, pushed: float64 [K, widths], lower bounds of the cost of a piece of each width,
                as a further piece, if it pushes nothing, or pushes rows.
            pushes: uint8 [K], `FREE`, `STILL` or `PUSHES`.
        """
        widths, dim, cut = self.width[n[0]], int(self.dims[tables[0]]), self.cut[tables[0]]
        if cut and dim % STEP:  # relaxed: a fractional number of pieces
            return np.asarray((np.minimum(still, pushed) * (dim / widths)).min(axis=1))
        # Shortest path; states: whether some rows are pushed so far, and columns covered.
        steps = dim // STEP if cut else 1
        count = widths // STEP if cut else np.ones(1, np.int64)
        cost, pieces = np.full((2, steps + 1, tables.size), np.inf), np.stack([still.T, pushed.T])
        cost[0, 0] = 0.0
        for to in range(1, steps + 1):
            m = count <= to
            found = (cost[:, None, to - count[m]] + pieces[:, m]).min(axis=2)  # [2, 2, K]
            cost[:, to] = found[0, 0], np.minimum(found[0, 1], found[1].min(axis=0))
        least = cost[:, -1]
        return np.where(pushes == PUSHES, least[1], np.where(
            pushes == STILL, least[0], least.min(axis=0)))


def _full(share: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Number of full owners, not counting the last one, which holds the remainder."""
    return np.floor(share / most * (1 - _ROUNDING))


def _tangents(by_block: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Lower bounds of an owner's load, linear in its mass; float64 [6, 2, 2, C, P, 5], see
    `TableCosts.lines`.

    An owner of a given mass loads itself least with the rows that have the least load per lookup.
    That least load is a convex function of the mass, and its tangents lie below it. They are made
    nondecreasing in the mass, and in the width.

    Args:
        by_block: float64 [2, B, C, P, 5], load if all lookups were to a block, of the widest and
            the narrowest piece.
        share: float64 [B, 1, 1, 1], share of the lookups that are to the block.
    """
    order = by_block.argsort(axis=1)
    each, part = (np.take_along_axis(x, order, axis=1) for x in (by_block, share + 0 * by_block))
    end, load = np.cumsum(part, axis=1), np.cumsum(part * each, axis=1)
    least = np.minimum(load.min(axis=1), 0.0)
    out = []
    for mass in _MASSES:
        # The block that an owner of this mass has in part; the last one if rounding leaves none.
        b = np.minimum((end <= mass).sum(axis=1, keepdims=True), by_block.shape[1] - 1)
        slope, last, value = (np.take_along_axis(x, b, axis=1)[:, 0] for x in (each, end, load))
        begin = np.where(slope > 0, value - slope * last, least)
        out.append([begin, begin + np.maximum(slope, 0.0)])
    lines = np.swapaxes(np.array(out), 1, 2)  # [6, 2, 2, C, P, 5]
    lines[:, 1] = lines.min(axis=1)
    return lines


def _widths(dim: int, cut: bool) -> np.ndarray:
    """Widths that a piece of a table of `dim` columns may have; int64 [n], first `dim` itself.

    If the table may be cut, these are the multiples of STEP below `dim`, and the widths of at least
    NARROWEST that remain next to pieces whose widths are multiples of STEP.
    """
    if not cut:
        return np.array([dim], np.int64)
    other = [w for w in range(1, dim)
             if w % STEP == 0 or (w >= NARROWEST and (dim - w) % STEP == 0)]
    return np.array([dim, *other], np.int64)
