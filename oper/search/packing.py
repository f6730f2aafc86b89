"""Which rank owns which columns of pushed tables: fill, local search, and large neighbourhoods.

Packing whole tables evenly is NP-hard, but pieces may be cut: pieces of the widths that the
relaxation suggests are placed the heaviest first, then moved, swapped, shifted column by column
between owners of one table, or split while that relieves the fullest rank. When
nothing does, a few tables are taken out, cut and tiered differently, and poured in again; a state a
little worse than the best is accepted on the way (Dueck's record-to-record travel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oper.search.bound import Bound
from oper.search.owner_rows import PUSH
from oper.search.pieces import COLUMN_STEP, MIN_COLUMNS
from oper.search.problem import IDS
from oper.search.recipes import Recipe, RecipeBook
from oper.search.shards import _OVERFLOW, _POWER, _SPREAD, MAX_PARTS, Loads, Shards

_TARGETS = 8  # ranks that may take over
_SWAPS = 32  # shards looked at in exchange
_HARM = 6.0  # how strongly the fullest phase counts when a piece looks for its owner
_RECIPES = 16  # looked at when a table is tiered anew
_WORSE = 0.004  # how much worse than the best a state may be


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Changes that touch the rank to relieve and one other.

    Attributes:
        other: int64 [N].
        mine, theirs: float64 [N, G], change of the two ranks' loads.
        every: float64 [N, C, G], change of what all ranks carry.
        code: int64 [N, 4], kind of change, shard, other shard or rank, columns.
    """

    other: np.ndarray
    mine: np.ndarray
    theirs: np.ndarray
    every: np.ndarray
    code: np.ndarray


_MOVE, _SPLIT, _SWAP, _SHIFT = range(4)


class Packer:
    """Search over `Shards`.

    Attributes:
        state: the present state; `best` the best one seen.
    """

    def __init__(self, loads: Loads, state: Shards, rng: np.random.Generator,
                 over: Callable[[], bool]) -> None:
        self.loads, self.state, self.rng, self.over = loads, state, rng, over
        self.relaxation = loads.relaxation
        self.world = loads.class_of.size
        self.ranks_of = [self._allowed(k) for k in range(len(state.recipe))]
        self._may = np.zeros((len(state.recipe), self.world), bool)
        for k, ranks in enumerate(self.ranks_of):
            self._may[k, ranks] = True
        self._splittable = np.array([state.may_split(k) for k in range(len(state.recipe))], bool)
        self.rounds = 0

    def _allowed(self, k: int) -> np.ndarray:
        """Ranks that may own pushed rows of table `k`."""
        relaxation = self.relaxation
        good = [o.rank_class for n, o in enumerate(relaxation.options)
                if o.kind == "push" and relaxation.allowed[k, n]]
        return np.flatnonzero(np.isin(self.loads.class_of, good))

    # -- pouring ----------------------------------------------------------------------------------

    def pour(self, tables: list[int], parts: list[int], widths: list[int],
             level: np.ndarray) -> None:
        """Place the pushed rows of `tables`, whose shards were removed, the heaviest first.

        Args:
            tables: the tables.
            parts: owners among which each one's pieces are dealt by rows.
            widths: columns of each one's pieces.
            level: float64 [P], how busy ranks should be by phase.
        """
        state, level = self.state, np.maximum(level, 1e-9)
        wanted = []
        for k, m, width in zip(tables, parts, widths, strict=True):
            state.set_parts(k, m)
            if state.work(k).pushes:
                dim = self.relaxation.tables[k].spec.dim
                width = max(MIN_COLUMNS, -(-width // COLUMN_STEP) * COLUMN_STEP)
                width = min(width, dim) if state.may_split(k) else dim
                load = self.loads.busy(state.own(k, width, int(self.ranks_of[k][0])))
                wanted.append((float((load / level).max()), k, width))
        for _, k, width in sorted(wanted, reverse=True):
            self._pour_table(k, width, level)

    def _pour_table(self, k: int, width: int, level: np.ndarray) -> None:
        state, left, m = self.state, self.relaxation.tables[k].spec.dim, int(self.state.parts[k])
        ranks = self.ranks_of[k]
        used = np.zeros(ranks.size, bool)
        while left > 0:
            wide = left if left - width < MIN_COLUMNS else width
            free = np.flatnonzero(~used)
            if free.size < m:  # every rank has its share already: widen what is there
                if m > 1:
                    state.clear(k)
                    left = self.relaxation.tables[k].spec.dim
                    width, used[:] = left, False
                    continue
                free = np.arange(ranks.size)
                wide = left
            before = state.load[ranks[free]] + state.every[self.loads.class_of[ranks[free]]]
            after = before + state.own(k, wide, ranks[free])
            harm = ((self.loads.busy(after) / level) ** _HARM
                    - (self.loads.busy(before) / level) ** _HARM) @ level
            harm += 1e6 * np.maximum(after[:, -1] - 1.0, 0.0)
            chosen = free[np.argsort(harm, kind="stable")[:m]]
            used[chosen] = True
            self._place(k, wide, ranks[chosen])
            left -= wide

    def _place(self, k: int, width: int, ranks: np.ndarray) -> None:
        """Add a piece, to the rank's shard of the table where it has one."""
        state, piece = self.state, None
        same = np.flatnonzero((state.table == k) & (state.rank == ranks[0]))
        if same.size and ranks.size == 1:
            state.resize(int(same[0]), int(state.width[same[0]]) + width, int(ranks[0]))
            return
        for r in ranks.tolist():
            piece = state.add(k, width, r, piece)

    # -- relieving the fullest rank ---------------------------------------------------------------

    def improve(self, max_steps: int) -> None:
        """Best changes of the busiest rank, phase by phase, until none helps."""
        stuck: set[int] = set()
        for _ in range(max_steps):
            total = self.state.total()
            busy = self.loads.busy(total)
            waste = busy.max(axis=0) - busy.mean(axis=0)
            over = total[:, -1].max() > 1.0
            phases = [p for p in np.argsort(-waste).tolist() if p not in stuck]
            if not phases or self.over():
                return
            level = total[:, -1] if over else busy[:, phases[0]]
            if not self._relieve(int(level.argmax()), level, total):
                stuck.add(phases[0])
            else:
                stuck.clear()

    def _relieve(self, rank: int, level: np.ndarray, total: np.ndarray) -> bool:
        found = self._candidates(rank, level)
        if found is None:
            return False
        scores = self._scores(rank, total, found)
        best = int(scores.argmin())
        if scores[best] >= self.state.score() * (1 - 1e-7):
            return False
        self._apply(found.code[best])
        return True

    def _scores(self, rank: int, total: np.ndarray, x: Candidates) -> np.ndarray:
        """Score after each candidate; float64 [N]."""
        loads, class_of = self.loads, self.loads.class_of
        num_classes = loads.num_classes
        peak = np.full((x.other.size, num_classes, loads.num_loads), -np.inf)
        for c in range(num_classes):
            at = np.flatnonzero((class_of == c) & (np.arange(self.world) != rank))
            if not at.size:
                continue
            first = at[total[at].argmax(axis=0)]
            top = total[first, np.arange(loads.num_loads)]
            rest = total[at].copy()
            rest[np.searchsorted(at, first), np.arange(loads.num_loads)] = -np.inf
            second = rest.max(axis=0)
            peak[:, c] = np.where(x.other[:, None] == first, second, top)
        peak = (peak + x.every).max(axis=1)
        one = total[rank] + x.mine + x.every[:, class_of[rank]]
        two = total[x.other] + x.theirs + x.every[np.arange(x.other.size), class_of[x.other]]
        peak = np.maximum(peak, np.maximum(one, two))
        busy = loads.busy(total)
        most = np.maximum(busy.max(axis=0), 1e-30)
        after = loads.busy(peak)
        power = (busy / most) ** _POWER
        spread = power.sum(axis=0) - power[rank] - power[x.other]
        for load in (one, two):
            spread = spread + np.minimum(loads.busy(load) / most, 10.0) ** _POWER
        over = np.maximum(peak[:, -1] - 1.0, 0.0)
        return np.asarray(after.sum(axis=1) * (1.0 + _OVERFLOW * over)
                          + _SPREAD * (spread / self.world * most).sum(axis=1))

    def _candidates(self, rank: int, level: np.ndarray) -> Candidates | None:
        state = self.state
        mine = np.flatnonzero(state.rank == rank)
        if not mine.size:
            return None
        order = np.argsort(level, kind="stable")
        low = np.concatenate([order[:_TARGETS], self.rng.permutation(self.world)[:4]])
        low = np.unique(low[low != rank])
        # Owners of each of my tables, by rank: nobody owns two pieces of a table.
        owns = np.zeros((mine.size, self.world), bool)
        for n, k in enumerate(state.table[mine].tolist()):
            owns[n, state.rank[state.table == k]] = True
            owns[n] |= ~self._may[k]
        found = [x for x in (self._moves(mine, low, owns), self._splits(mine, low, owns),
                             self._swaps(mine, low, owns, rank), self._shifts(mine, rank))
                 if x is not None]
        if not found:
            return None
        return Candidates(*(np.concatenate([getattr(x, f) for x in found])
                            for f in Candidates.__slots__))

    def _moves(self, mine: np.ndarray, low: np.ndarray, owns: np.ndarray) -> Candidates | None:
        """Give a shard to a rank that owns none of the table."""
        state = self.state
        n, s = np.nonzero(~owns[:, low])
        if not n.size:
            return None
        i, s = mine[n], low[s]
        k, w, a = state.table[i], state.width[i], state.rank[i]
        return Candidates(s, -state.own(k, w, a), state.own(k, w, s),
                          state.read(k, w, s) - state.read(k, w, a),
                          np.stack([np.full(i.size, _MOVE), i, s, w], axis=1))

    def _splits(self, mine: np.ndarray, low: np.ndarray, owns: np.ndarray) -> Candidates | None:
        """Give some columns of a shard to a rank that owns none of the table."""
        state = self.state
        n, s = np.nonzero(~owns[:, low] & self._cuts(mine)[:, None])
        if not n.size:
            return None
        share = np.tile([0, 4, 2], n.size)
        i, s = np.repeat(mine[n], 3), np.repeat(low[s], 3)
        w = state.width[i]
        d = np.where(share > 0, w // np.maximum(share, 1) // COLUMN_STEP * COLUMN_STEP, MIN_COLUMNS)
        good = (d >= MIN_COLUMNS) & (w - d >= MIN_COLUMNS)
        i, s, w, d = i[good], s[good], w[good], d[good]
        k, a = state.table[i], state.rank[i]
        return Candidates(s, -d[:, None] * state.column[k, self.loads.class_of[a]],
                          state.own(k, d, s),
                          state.read(k, w - d, a) + state.read(k, d, s) - state.read(k, w, a),
                          np.stack([np.full(i.size, _SPLIT), i, s, d], axis=1))

    def _cuts(self, shards: np.ndarray) -> np.ndarray:
        """Whether the shards may be cut by columns; bool [N]."""
        return np.asarray(self._splittable[self.state.table[shards]]
                          & (self.state.parts[self.state.table[shards]] == 1))

    def _swaps(self, mine: np.ndarray, low: np.ndarray, owns: np.ndarray,
               rank: int) -> Candidates | None:
        """Exchange the owners of two shards of different tables."""
        state = self.state
        theirs = np.flatnonzero(np.isin(state.rank, low))
        if not theirs.size:
            return None
        if theirs.size > _SWAPS:
            theirs = self.rng.choice(theirs, _SWAPS, replace=False)
        here = np.zeros(len(state.recipe), bool)
        here[state.table[mine]] = True
        theirs = theirs[~here[state.table[theirs]] & self._may[state.table[theirs], rank]]
        n, m = np.nonzero(~owns[:, state.rank[theirs]])
        if not n.size:
            return None
        i, j = mine[n], theirs[m]
        k, w, p, v = state.table[i], state.width[i], state.table[j], state.width[j]
        b = state.rank[j]
        return Candidates(b, state.own(p, v, rank) - state.own(k, w, rank),
                          state.own(k, w, b) - state.own(p, v, b),
                          state.read(k, w, b) - state.read(k, w, rank)
                          + state.read(p, v, rank) - state.read(p, v, b),
                          np.stack([np.full(i.size, _SWAP), i, j, w], axis=1))

    def _shifts(self, mine: np.ndarray, rank: int) -> Candidates | None:
        """Give columns of a shard, or all of them, to another owner of the table."""
        state = self.state
        first, second = [], []
        for i in mine[state.parts[state.table[mine]] == 1].tolist():
            family = np.flatnonzero((state.table == state.table[i]) & (state.rank != rank))
            if family.size > 2 * _TARGETS:
                family = self.rng.choice(family, 2 * _TARGETS, replace=False)
            first.append(np.full(family.size, i))
            second.append(family)
        if not first or not sum(x.size for x in first):
            return None
        steps = np.array([1, 2, 4, 8, 16, 0]) * COLUMN_STEP
        i = np.repeat(np.concatenate(first), steps.size)
        j = np.repeat(np.concatenate(second), steps.size)
        w = state.width[i]
        d = np.tile(steps, i.size // steps.size)
        d = np.where(d == 0, w, d)
        good = (d == w) | ((w - d >= MIN_COLUMNS) & self._cuts(i))
        i, j, w, d = i[good], j[good], w[good], d[good]
        k, b, c = state.table[i], state.rank[j], self.loads.class_of
        gone = (d == w)[:, None]
        mine_ = -d[:, None] * state.column[k, c[rank]] - gone * state.stream[k, c[rank]]
        every = (d[:, None, None] * (state.column_read[k, c[b]] - state.column_read[k, c[rank]])
                 - gone[..., None] * state.stream_read[k, c[rank]])
        return Candidates(b, mine_, d[:, None] * state.column[k, c[b]], every,
                          np.stack([np.full(i.size, _SHIFT), i, j, d], axis=1))

    def _apply(self, code: np.ndarray) -> None:
        state = self.state
        kind, i, x, d = (int(v) for v in code)
        k, w, rank = int(state.table[i]), int(state.width[i]), int(state.rank[i])
        if kind == _MOVE:
            state.resize(i, w, x)
        elif kind == _SPLIT:
            state.resize(i, w - d, rank)
            state.add(k, d, x)
        elif kind == _SWAP:
            other = int(state.rank[x])
            state.resize(i, w, other)
            state.resize(x, int(state.width[x]), rank)
        else:
            state.resize(x, int(state.width[x]) + d, int(state.rank[x]))
            if d == w:
                state.drop([i])
            else:
                state.resize(i, w - d, rank)

    # -- recipes ----------------------------------------------------------------------------------

    def choose(self, k: int) -> bool:
        """Table `k`'s best recipe, its shards where they are; whether the score fell."""
        state, loads = self.state, self.loads
        mine = state.mine(k)
        before = state.score()
        recipes = loads.book.recipes[k]
        works = [loads.work(k, r) for r in recipes]
        usable = [n for n, w in enumerate(works) if mine.size or not w.pushes]
        if len(usable) > _RECIPES:
            usable = self.rng.choice(usable, _RECIPES, replace=False).tolist()
        if not usable:
            return False
        every = state.every - state.work(k).stay
        base = state.load.copy()
        width, rank, m = state.width[mine], state.rank[mine], state.parts[k] - 1
        c = loads.class_of[rank]
        np.subtract.at(base, rank, state.own(k, width, rank))
        every = every - state.read(k, width, rank).sum(axis=0)
        load = np.repeat(base[None], len(usable), axis=0)
        whole = np.stack([works[n].stay for n in usable]) + every
        for n, index in enumerate(usable):
            w = works[index]
            if w.pushes:
                np.add.at(load[n], rank, width[:, None] * w.own[m, c] + w.own_stream[m, c])
                whole[n] += (width[:, None, None] * w.read[m, c] + w.read_stream[m, c]).sum(axis=0)
        scores = self._scores_of(load + whole[:, loads.class_of])
        best = int(scores.argmin())
        if scores[best] >= before * (1 - 1e-7):
            return False
        state.retier(k, recipes[usable[best]])
        return True

    def _scores_of(self, total: np.ndarray) -> np.ndarray:
        """Scores of loads (float64 [N, W, G]); float64 [N]."""
        busy = self.loads.busy(total)
        most = busy.max(axis=1)
        spread = ((busy / np.maximum(most, 1e-30)[:, None]) ** _POWER).mean(axis=1)
        return np.asarray(self.loads.step_us(total.max(axis=1))
                          + _SPREAD * (most * spread).sum(axis=1))

    # -- large neighbourhoods ---------------------------------------------------------------------

    def run(self, max_rounds: int, goal_us: float) -> None:
        """Improve the state until its step is `goal_us` or the rounds are spent."""
        self.improve(400)
        best = self.state.copy()
        best_score = self.state.score()
        for n in range(max_rounds):
            self.rounds = n
            if best.step_us <= goal_us or self.over():
                break
            kept = self.state.copy()
            self._ruin()
            self.improve(25)
            found = self.state.score()
            if found < best_score * (1 - 1e-7):
                best, best_score = self.state.copy(), found
            if found > best_score * (1 + _WORSE * self.rng.random()):
                self.state = kept
        self.state = best

    def _ruin(self) -> None:
        """Take a few tables out, cut and tier them differently, and pour them in again."""
        state, rng = self.state, self.rng
        busy = self.loads.busy(state.total())
        pushed = np.unique(state.table)
        chosen: set[int] = set()
        if pushed.size:
            phase = int(rng.integers(busy.shape[1]))
            rank = int(busy[:, phase].argmax())
            mine = np.unique(state.table[state.rank == rank])
            if mine.size:
                chosen.add(int(rng.choice(mine)))
            chosen |= set(rng.choice(pushed, min(pushed.size, int(rng.integers(1, 4))),
                                     replace=False).tolist())
        if rng.random() < 0.3 or not chosen:
            chosen.add(int(rng.integers(len(state.recipe))))
        tables = rng.permutation(sorted(chosen)).tolist()
        widths = {k: self._width(k) for k in tables}
        for k in tables:
            state.clear(k)
            if rng.random() < 0.4:
                recipes = self.loads.book.recipes[k]
                state.retier(k, recipes[int(rng.integers(len(recipes)))])
        level = busy.max(axis=0) * (1.0 - 0.06 * rng.random())
        parts = [self._parts(k) for k in tables]
        self.pour(tables, parts, [widths[k] for k in tables], level)
        for k in tables:
            self.choose(k)

    def _width(self, k: int) -> int:
        """How wide to cut table `k`: about as now."""
        mine = self.state.mine(k)
        dim = self.relaxation.tables[k].spec.dim
        now = float(self.state.width[mine].mean()) if mine.size else dim
        return int(np.clip(now * np.exp(self.rng.normal(0.0, 0.4)), MIN_COLUMNS, dim))

    def _parts(self, k: int) -> int:
        """How many owners to deal table `k`'s rows among: mostly as now, or one more or less."""
        if "striped" not in self.loads.model.problem.placements_of(
                self.relaxation.tables[k].spec.name):
            return 1
        now = int(self.state.parts[k])
        change = int(self.rng.choice([0, 0, 0, 1, -1]))
        return int(np.clip(now + change, 1, min(MAX_PARTS, self.ranks_of[k].size)))


def pack(book: RecipeBook, bound: Bound, max_rounds: int, goal_us: float,
         rng: np.random.Generator, over: Callable[[], bool]) -> Shards:
    """The chosen recipes of a book with their pushed rows on ranks.

    Args:
        book: its chosen recipes are where the search begins.
        bound: says how wide pieces are and among how many owners they are dealt.
        max_rounds: neighbourhoods.
        goal_us: stop at this step.
        rng: decides among equals.
        over: whether the time is up.
    """
    relaxation = book.relaxation
    loads = Loads(book)
    state = Shards(loads, book.chosen())
    packer = Packer(loads, state, rng, over)
    tables = [k for k in range(len(state.recipe)) if state.work(k).pushes]
    cuts = [_first_cut(book, bound, k, state.recipe[k]) for k in tables]
    level = np.array([bound.phase_us(p) for p in range(loads.num_phases)])
    packer.pour(tables, [c[0] for c in cuts], [c[1] for c in cuts], level)
    packer.run(max_rounds, goal_us - relaxation.fixed_us)
    return packer.state


def _first_cut(book: RecipeBook, bound: Bound, k: int, recipe: Recipe) -> tuple[int, int]:
    """Owners per piece, and columns of each piece, as the relaxation would have them."""
    relaxation, t = book.relaxation, book.relaxation.tables[k]
    amount = book.amount(t, recipe)
    kind = int(relaxation.kinds(amount[None], k, bound.prices)[0])
    for o, option in enumerate(relaxation.options):
        if option.kind == PUSH and amount[o, IDS] > 0:
            types = relaxation.pieces.types[k][option.rank_class]
            j = min(kind, types.mass.size - 1)
            share = amount[o, IDS] / t.total[IDS] / max(float(types.mass[j]), 1e-3)
            striped = "striped" in relaxation.problem.placements_of(t.spec.name)
            parts = int(np.clip(np.ceil(share - 1e-2), 1, MAX_PARTS)) if striped else 1
            pieces = int(np.ceil(types.streams[j] - 1e-2))
            return min(parts, relaxation.model.machine.world_size), -(-t.spec.dim // pieces)
    return 1, t.spec.dim
