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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from oper.search.annealing import Annealing, Packed
from oper.search.bound import Bound
from oper.search.copies import spread_copies
from oper.search.moves import Moves
from oper.search.owner_rows import PUSH
from oper.search.pins import impose
from oper.search.placing import Placement, Placer
from oper.search.recipes import RecipeBook
from oper.search.state import Attempt, Change, State


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search.

    Attributes:
        num_starts: relaxed solutions, of boxes of plans, from which the search begins.
        max_anneals: times that pushed rows are put on ranks by annealing, from each.
        max_trials: placements tried by the Markov chain.
        max_moves: placements tried by the local search.
        max_kicks: times it may pass through worse plans.
        max_boxes: relaxations solved to raise the bound before a search, of a hundred tables.
        deadline: `time.monotonic()` value at which it ends; None = the counts decide, so that
            equal seeds give equal plans.
    """

    num_starts: int
    max_anneals: int
    max_trials: int
    max_moves: int
    max_kicks: int
    max_boxes: int
    deadline: float | None = None

    def over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline


EFFORTS = {"fast": Effort(2, 2, 4000, 300, 3, 40),
           "thorough": Effort(8, 10, 60000, 20000, 40, 300)}
_CHAINS = 2  # annealings that run beside each other; their number never changes what is found
_MOVES = 65_000_000  # of one annealing, over the ranks and a little; more for more tables
_FEW_TABLES = 30  # of which the exact step of every annealing is looked at
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
        """Its score, see `oper.search.state.score_of`."""
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
    for n, bound in enumerate(bounds):
        if every and (effort.over() or min(x.step_us for x in every) <= goal):
            break
        book = _book(bound, target_gap, rng)
        relaxation = bound.relaxation
        pushes = any(relaxation.options[o].kind == PUSH for r in book.chosen() for o in r.options)
        if pushes:
            found = [Found(_state(book, x), book, True, spread)
                     for spread, places in [_annealed(book, bound, effort, goal, seed + 97 * n)]
                     for x in places]
            every.append(min(found, key=lambda x: x.score))
        if not pushes or not every[-1].state.evaluation.fits:
            placements = Placer(relaxation, book.total).place(book.chosen())
            every.append(Found(_state(book, placements), book, False, 0.0))
        if not pushes:
            break  # pieces are what boxes differ in
    best = min(every, key=lambda x: x.score)
    return best if best.is_annealed else improved(best, effort, goal, seed)


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


def _book(bound: Bound, target_gap: float, rng: np.random.Generator) -> RecipeBook:
    """Recipes for all tables, chosen by class means."""
    bound.relaxation.set_box(bound.box)
    book, near = RecipeBook(bound), bound.lower_bound_us * (1.0 + 0.1 * target_gap)
    if bound.relaxation.tables:
        book.descend(rng, near)
        book.refine(rng, near)
        book.simplify(near)
    return book


def _annealed(book: RecipeBook, bound: Bound, effort: Effort, goal: float, seed: int
              ) -> tuple[float, list[list[Placement]]]:
    """How far several annealings' steps lie apart, as a share, and the best of them; of few tables,
    where stripes of few rows are far from even and a look at the exact loads costs little, what
    each of them found."""
    book.add_thresholds(_RECIPES)
    annealing = Annealing(book, bound)
    tables, world = len(book.recipes), book.relaxation.model.machine.world_size
    moves = max(_MOVES // (world + 32), 700 * tables)
    found: list[Packed] = []
    with ThreadPoolExecutor(_CHAINS) as pool:
        for first in range(0, effort.max_anneals, _CHAINS):
            left = (0.0 if effort.deadline is None
                    else max(0.05, effort.deadline - time.monotonic()))
            seeds = range(first, min(first + _CHAINS, effort.max_anneals))
            chains = [pool.submit(annealing.run, moves, goal, 1000 * seed + n, left)
                      for n in seeds]
            found += [c.result() for c in chains]
            if min(x.step_us for x in found) <= goal or effort.over():
                break
    placer = Placer(book.relaxation, book.total)
    steps = [x.step_us for x in found]
    spread = max(steps) / min(steps) - 1.0 if len(steps) > 1 else np.inf
    if tables > _FEW_TABLES:
        best = min(found, key=lambda x: x.step_us)
        return spread, [placer.lay(best.parts, best.units)]
    return spread, [placer.lay(x.parts, x.units) for x in found]


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
