"""The anytime search: relaxed solution -> recipes -> ranks -> improvement of the slowest rank.

Deciding whether a step time can be reached is NP-hard (two equal ranks, whole tables: PARTITION),
so what follows the relaxation is local search: pushed rows are annealed (`annealing`), the rest is
dealt evenly. The last part sees the exact loads: it looks at the phase that loses most to
imbalance, at the rank which ends it, and moves, swaps, cuts, re-deals or re-tiers what that rank
owns (`moves`). When no move helps, a few random moves are taken against the score and the best plan
seen is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from oper.search.bound.master import Bound
from oper.search.bound.options import PUSH
from oper.search.heuristic.annealing import Annealing, Packed
from oper.search.heuristic.copies import spread_copies
from oper.search.heuristic.moves import Moves
from oper.search.heuristic.placing import Placement, Placer
from oper.search.heuristic.recipes import RecipeBook
from oper.search.heuristic.state import Attempt, Change, State
from oper.search.problem.pins import impose


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search.

    Attributes:
        num_starts: relaxed solutions, of boxes of plans, from which the search begins.
        num_looks: times that pushed rows are put on ranks by a short annealing, from each.
        max_trials: placements tried by the Markov chain.
        max_moves: placements tried by the local search.
        max_kicks: times it may pass through worse plans.
        max_boxes: relaxations solved to raise the bound before a search, of a hundred tables.
        deadline: `time.monotonic()` value at which it ends; None = the counts decide, so that
            equal seeds give equal plans.
    """

    num_starts: int
    num_looks: int
    max_trials: int
    max_moves: int
    max_kicks: int
    max_boxes: int
    deadline: float | None = None

    def over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline


EFFORTS = {"fast": Effort(3, 8, 4000, 300, 3, 40),
           "thorough": Effort(8, 32, 60000, 20000, 40, 300)}
_CHAINS = 2  # annealings that run beside each other; their number never changes what is found
_MOVES = 78_000_000  # of one annealing, over the ranks and a little; more for more tables
_LOOK, _GO_ON = 0.2, 0.6  # parts of them, of a look and of what goes on: of the looks that each
_OF_LOOKS = 4  # relaxed solution has, one of so many
_ALIKE, _WORSE = 5e-3, 1e-2  # half of them are enough where they differ less, or are so much worse
_MANY_TABLES = 200  # above which exact steps are looked at less
_RECIPES = 4000  # of all tables that annealing chooses from, beside those of the relaxed solution


@dataclass(frozen=True, slots=True)
class Found:
    """A placement, and the recipes that it was made of.

    Attributes:
        state: the placement.
        book: the recipes.
        is_annealed: whether its pushed rows were annealed, which leaves local search little.
        spread: how far the annealings' steps lay apart, as a share.
    """

    state: State
    book: RecipeBook
    is_annealed: bool
    spread: float = np.inf

    @property
    def step_us(self) -> float:
        """Its modelled step."""
        return self.state.evaluation.step_us

    @property
    def score(self) -> float:
        """Its score, see `oper.search.heuristic.state.score_of`."""
        return self.state.score


def search(bounds: Sequence[Bound], effort: Effort, lower_us: float, target_gap: float, seed: int
           ) -> Found:
    """Find a placement of the bounds' problem.

    Args:
        bounds: solved relaxations of one problem, of different boxes, the least bound first.
        effort: rounds, trials, kicks, deadline.
        lower_us: lower bound of the whole problem, of which this relaxation may be a branch.
        target_gap: stop when step / lower_us - 1 is at most this.
        seed: equal seeds give equal placements unless a deadline cuts the search short.
    """
    rng = np.random.default_rng(seed)
    goal = lower_us * (1.0 + target_gap)
    every: list[Found] = []
    looks: list[tuple[Packed, _Anneals]] = []
    with ThreadPoolExecutor(1) as ahead:  # one is prepared while the one before is annealed
        def prepare(n: int) -> Future[tuple[RecipeBook, _Anneals | None]]:
            return ahead.submit(_prepared, bounds[n], effort, goal, target_gap, rng, seed + 97 * n)

        coming = prepare(0)
        for n in range(len(bounds)):
            if looks and (effort.over() or min(x.step_us for x, _ in looks) <= goal):
                break
            book, anneals = coming.result()
            if anneals is None:
                every.append(_placed(book))
                break  # pieces are what boxes differ in
            if n + 1 < len(bounds):
                coming = prepare(n + 1)
            known = min((x.step_us for x, _ in looks), default=np.inf)
            looks += [(x, anneals) for x in anneals.looks(known, len(bounds) > 1)]
    if looks:
        every += _gone_on(looks, effort, goal)
        if not min(every, key=lambda x: x.score).state.evaluation.fits:
            every.append(_placed(looks[0][1].book))
    best = min(every, key=lambda x: x.score)
    return best if best.is_annealed else improved(best, effort, goal, seed)


def _prepared(bound: Bound, effort: Effort, goal: float, target_gap: float,
              rng: np.random.Generator, seed: int) -> tuple[RecipeBook, _Anneals | None]:
    """Recipes for a relaxed solution, and annealings of what they push, if anything."""
    near = bound.lower_bound_us * (1.0 + 0.1 * target_gap)  # us; good enough for class means
    book = RecipeBook(bound)
    if bound.relaxation.tables:
        book.descend(rng, near)
    options = bound.relaxation.options
    pushes = any(options[o].kind == PUSH for r in book.chosen() for o in r.options)
    if not pushes:
        book.refine(rng, near)
    book.simplify(near)
    return book, _Anneals(book, bound, effort, goal, seed) if pushes else None


def _placed(book: RecipeBook) -> Found:
    """The chosen recipes, dealt without annealing."""
    placements = Placer(book.relaxation, book.total).place(book.chosen())
    return Found(_state(book, placements), book, False, 0.0)


def improved(found: Found, effort: Effort, goal: float, seed: int) -> Found:
    """`found` after local search; arguments as `search`, `goal` is the step (us) at which it stops.
    """
    improver = _Improver(found.state, found.book, np.random.default_rng([seed, 1]))
    improver.run(effort, goal)
    return replace(found, state=improver.best)


def _state(book: RecipeBook, placements: list[Placement]) -> State:
    """Placements of all tables, held to what rows are pinned to."""
    relaxation = book.relaxation
    held = relaxation.problem.constraints.tables
    placements = [impose(held.get(t.spec.name), x) for t, x in zip(
        relaxation.tables, spread_copies(relaxation.model, relaxation.tables, placements),
        strict=True)]
    return State(relaxation.model, relaxation.tables, relaxation.base_tally, placements)


class _Anneals:
    """Annealings of the pushed rows of one relaxed solution; `book` are its recipes."""

    def __init__(self, book: RecipeBook, bound: Bound, effort: Effort, goal: float, seed: int
                 ) -> None:
        book.add_thresholds(_RECIPES)
        self.book, self.effort, self.goal, self.seed = book, effort, goal, seed
        self._annealing = Annealing(book, bound)
        tables, world = len(book.recipes), book.relaxation.model.machine.world_size
        self._moves = max(_MOVES // (world + 64), 700 * tables)

    def looks(self, known: float, is_one_of: bool) -> list[Packed]:
        """What short ones come to, until one reaches the goal; half of them, where this is one of
        several relaxed solutions and they differ little or lie well above `known` (us)."""
        found: list[Packed] = []
        most = self.effort.num_looks
        with ThreadPoolExecutor(_CHAINS) as pool:
            while len(found) < most:
                seeds = range(len(found), min(len(found) + _CHAINS, most))
                found += pool.map(partial(self._run, _LOOK, None), seeds)
                steps = [x.step_us for x in found]
                least = min(steps)
                is_plain = is_one_of and (
                    least > known * (1 + _WORSE) or max(steps) < least * (1 + _ALIKE))
                if (least <= self.goal or self.effort.over()
                        or (is_plain and 2 * len(found) >= most)):
                    break
        return found

    def gone_on(self, found: Packed, number: int) -> Packed:
        """What a longer one makes of `found`, the `number`-th such."""
        return self._run(_GO_ON, found, self.effort.num_looks + number)

    def _run(self, share: float, start: Packed | None, number: int) -> Packed:
        deadline = self.effort.deadline
        left = 0.0 if deadline is None else max(0.05, deadline - time.monotonic())
        return self._annealing.run(round(share * self._moves), self.goal, 1000 * self.seed + number,
                                   left, start)


def _gone_on(looks: list[tuple[Packed, _Anneals]], effort: Effort, goal: float) -> list[Found]:
    """What the best of `looks` become when they are annealed further. Their exact steps are up to
    0.5 % longer, as stripes of few rows are not even; of many tables that of the best is looked at.
    """
    looks = sorted(looks, key=lambda x: x[0].step_us)[:-(-effort.num_looks // _OF_LOOKS)]
    if looks[0][0].step_us > goal and not effort.over():
        with ThreadPoolExecutor(_CHAINS) as pool:
            longer = list(pool.map(lambda n: looks[n][1].gone_on(looks[n][0], n),
                                   range(len(looks))))
        looks = [(x, anneals) for x, (_, anneals) in zip(longer, looks, strict=True)]
        looks.sort(key=lambda x: x[0].step_us)
    steps = [x.step_us for x, _ in looks]
    spread = max(steps) / min(steps) - 1.0 if len(steps) > 1 else np.inf
    if len(looks[0][1].book.recipes) > _MANY_TABLES:
        looks = looks[:1]
    return [Found(_state(x.book, Placer(x.book.relaxation, x.book.total).lay(y.parts, y.units)),
                  x.book, True, spread) for y, x in looks]


class _Improver:
    """Local search on one state."""

    def __init__(self, state: State, book: RecipeBook, rng: np.random.Generator) -> None:
        self.state, self.book, self.rng = state, book, rng
        self.placer = Placer(book.relaxation, book.total)
        self.trials = 0
        self.best = state.copy()

    def run(self, effort: Effort, goal: float) -> None:
        """Improve until `goal` (us) is reached and memory holds, or the effort is spent."""
        kicks = 0
        while self.trials < effort.max_moves and not effort.over():
            if self.state.evaluation.fits and self.state.evaluation.step_us <= goal:
                break
            if self._step(effort):
                continue
            if self.state.score < self.best.score - 1e-9:
                self.best = self.state.copy()
            if kicks >= effort.max_kicks:
                break
            kicks += 1
            self.state = self.best.copy()
            self._kick()
        if self.state.score < self.best.score:
            self.best = self.state.copy()

    def _step(self, effort: Effort) -> bool:
        """Take the best of the moves that relieve the slowest rank; False when none improves."""
        found: tuple[Attempt, Change] | None = None
        score = self.state.score * (1 - 1e-7)
        for change in self._moves():
            if self.trials >= effort.max_moves or effort.over():
                break
            self.trials += 1
            result = self.state.attempt(change)
            if result[0] < score:
                score, found = result[0], (result, change)
        if found is None:
            return False
        self.state.apply(found[1], found[0])
        return True

    def _kick(self) -> None:
        """A few random moves, whatever they cost."""
        moves = self._moves()
        if moves:
            for n in self.rng.choice(len(moves), min(3, len(moves)), replace=False):
                self.trials += 1
                change = moves[int(n)]
                self.state.apply(change, self.state.attempt(change))

    def _moves(self) -> list[Change]:
        return Moves(self.state, self.book, self.placer, self.rng).all()
