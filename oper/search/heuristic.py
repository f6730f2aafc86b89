"""The anytime search: relaxed solution -> recipes -> ranks -> improvement of the slowest rank.

Deciding whether a step time can be reached is NP-hard (two equal ranks, whole tables: PARTITION),
so the last part is local search. It looks at the phase that loses most to imbalance, at the rank
which ends it, and moves, swaps, re-deals or re-tiers what that rank owns. When no move helps, a few
random moves are taken against the score and the best plan seen is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from oper.plan import Tier
from oper.search.bound import Bound
from oper.search.cost import CostModel, Evaluation, Tally
from oper.search.placing import Placer, owner_prices, table_tally, tier_rows
from oper.search.problem import TableProblem
from oper.search.recipes import MAX_TIERS, RecipeBook

_OVERFLOW = 1e3
_MOVES = 120  # moves looked at before the best of them is taken
Change = dict[int, tuple[Tier, ...]]
#: Score, tally of everything, tallies of the changed tables, evaluation.
Attempt = tuple[float, Tally, dict[int, Tally], Evaluation]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search.

    Attributes:
        max_trials: placements tried by the local search.
        max_kicks: times it may pass through worse plans.
        deadline: `time.monotonic()` value at which it ends; None = trials alone decide, so that
            equal seeds give equal plans.
    """

    max_trials: int
    max_kicks: int
    deadline: float | None = None

    def over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline


EFFORTS = {"fast": Effort(4000, 6), "thorough": Effort(60000, 80)}


class State:
    """A placement of all free tables, its tally and its score.

    Attributes:
        tiers: per table.
        tallies: per table.
        total: everything together, what all plans pay and pinned tables included.
    """

    def __init__(self, model: CostModel, tables: tuple[TableProblem, ...], base: Tally,
                 tiers: list[tuple[Tier, ...]]) -> None:
        self.model, self.tables = model, tables
        self.tiers = list(tiers)
        self.tallies = [table_tally(model, t, x) for t, x in zip(tables, tiers, strict=True)]
        self.total = base
        for tally in self.tallies:
            self.total = self.total.plus(tally)
        self.evaluation = model.evaluation(self.total)
        self.score = score_of(self.evaluation)

    def attempt(self, change: Change) -> Attempt:
        """Score, tally and evaluation after `change`, without making it."""
        total, new = self.total, {}
        for k, tiers in change.items():
            new[k] = table_tally(self.model, self.tables[k], tiers)
            total = total.plus(self.tallies[k], -1).plus(new[k])
        evaluation = self.model.evaluation(total)
        return score_of(evaluation), total, new, evaluation

    def apply(self, change: Change, result: Attempt) -> None:
        """Make `change`, whose attempt gave `result`."""
        self.score, self.total, new, self.evaluation = result
        for k, tiers in change.items():
            self.tiers[k], self.tallies[k] = tiers, new[k]


def score_of(evaluation: Evaluation) -> float:
    """Step (us), dearer when memory overflows; the spread of rank loads breaks ties."""
    used = evaluation.domain_bytes / np.maximum(evaluation.capacity_bytes, 1.0)
    over = float(np.maximum(used - 1.0, 0.0).sum())
    spread = sum(float(np.sqrt(np.square(p.groups.max(axis=0)).mean())) for p in evaluation.phases)
    return (evaluation.step_us + 1e-2 * spread * 1e6) * (1.0 + _OVERFLOW * over)


def search(bound: Bound, effort: Effort, target_gap: float, seed: int) -> State:
    """Find a placement of the bound's problem.

    Args:
        bound: the solved relaxation.
        effort: trials, kicks, deadline.
        target_gap: stop when (step - bound) / bound is at most this.
        seed: equal seeds give equal placements unless a deadline cuts the search short.
    """
    rng = np.random.default_rng(seed)
    relaxation = bound.relaxation
    book = RecipeBook(bound)
    near = bound.lower_bound_us * (1.0 + 0.1 * target_gap)
    if relaxation.tables:
        book.descend(rng, near)
        book.refine(rng, near)
        book.simplify(near)
    placer = Placer(relaxation, book.total)
    state = State(relaxation.model, relaxation.tables, relaxation.base_tally,
                  placer.place(book.chosen()))
    goal = bound.lower_bound_us * (1.0 + target_gap)
    improver = _Improver(state, book, rng)
    improver.run(effort, goal)
    return improver.best


class _Improver:
    """Local search on one state."""

    def __init__(self, state: State, book: RecipeBook, rng: np.random.Generator) -> None:
        self.state, self.book, self.rng = state, book, rng
        self.relaxation = book.relaxation
        self.price = owner_prices(self.relaxation, book.total)
        self.trials = 0
        self.best = _copy(state)

    def run(self, effort: Effort, goal: float) -> None:
        """Improve until `goal` (us) is reached and memory holds, or the effort is spent."""
        kicks = 0
        while self.trials < effort.max_trials and not effort.over():
            if self._done(self.state, goal):
                break
            if self._step(effort):
                continue
            if self.state.score < self.best.score - 1e-9:
                self.best = _copy(self.state)
            if kicks >= effort.max_kicks:
                break
            kicks += 1
            self.state = _copy(self.best)
            self._kick()
        if self.state.score < self.best.score:
            self.best = _copy(self.state)

    def _done(self, state: State, goal: float) -> bool:
        return state.evaluation.fits and state.evaluation.step_us <= goal

    def _step(self, effort: Effort) -> bool:
        """Take the best of the moves that relieve the slowest rank; False when none improves."""
        found: tuple[Attempt, Change] | None = None
        score = self.state.score * (1 - 1e-7)
        for change in self._moves():
            if self.trials >= effort.max_trials or effort.over():
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

    def _target(self) -> tuple[int, np.ndarray]:
        """The rank to relieve, and all ranks from the least loaded on."""
        evaluation = self.state.evaluation
        machine = self.state.model.machine
        over = evaluation.domain_bytes / np.maximum(evaluation.capacity_bytes, 1.0)
        if over.max() > 1.0 + 1e-9:
            level = over[machine.domain]
            return int(level.argmax()), np.argsort(level, kind="stable")
        losses = [p.groups.max() - p.groups.max(axis=0).mean() for p in evaluation.phases]
        phase = evaluation.phases[int(np.argmax(losses))]
        level = phase.groups.max(axis=0)
        return int(level.argmax()), np.argsort(level, kind="stable")

    def _moves(self) -> list[Change]:
        rank, order = self._target()
        tallies = self.state.tallies
        stake = np.array([t.rows[:, rank] @ self.price[:, rank] for t in tallies])
        low = [int(r) for r in order[:6] if r != rank]
        moves: list[Change] = []
        for k in np.argsort(-stake, kind="stable")[:16].tolist():
            for n, tier in enumerate(self.state.tiers[k]):
                if tier.placement == "owned" and tier.ranks[0] == rank:
                    moves += self._owner_moves(k, n, rank, low)
                    moves += self._split_moves(k, n, rank, low)
                elif tier.placement != "owned" and rank in tier.ranks and len(tier.ranks) > 1:
                    moves += self._deal_moves(k, n, rank, low)
            moves += self._recipe_moves(k)
        if len(moves) > _MOVES:
            chosen = self.rng.choice(len(moves), _MOVES, replace=False)
            moves = [moves[int(n)] for n in np.sort(chosen)]
        return moves

    def _owner_moves(self, k: int, n: int, rank: int, low: list[int]) -> list[Change]:
        """Give the tier to another rank, alone or in exchange for one of that rank's tiers."""
        allowed = self._owners(k)
        moves: list[Change] = []
        for other in low:
            if other not in allowed:
                continue
            mine = self._with(k, n, (other,))
            moves.append({k: mine})
            for u, tiers in enumerate(self.state.tiers):
                for m, tier in enumerate(tiers):
                    if (u != k and tier.placement == "owned" and tier.ranks[0] == other
                            and rank in self._owners(u)):
                        moves.append({k: mine, u: self._with(u, m, (rank,))})
        return moves

    def _split_moves(self, k: int, n: int, rank: int, low: list[int]) -> list[Change]:
        """Cut the tier by rows and give the colder or the hotter part to another rank."""
        tier, t = self.state.tiers[k][n], self.state.tables[k]
        if len(self.state.tiers[k]) >= 2 * MAX_TIERS or tier.stop - tier.start < 2:
            return []
        cuts = np.unique(np.concatenate([
            np.linspace(tier.start + 1, tier.stop - 1, 17),
            tier.start + np.geomspace(1, tier.stop - tier.start - 1, 17)]).astype(np.int64))
        # A fifth, a half, or what would level the two ranks: each by what the owner pays.
        part = self._owner_share(t, tier, cuts, rank)
        load = (self.state.total.rows * self.price).sum(axis=0)
        whole = max(self._tier_load(t, tier, rank), 1e-30)
        moves: list[Change] = []
        for other in low[:3]:
            if other not in self._owners(k):
                continue
            level = float(np.clip((load[rank] - load[other]) / 2 / whole, 0.02, 0.98))
            for share in sorted({0.2, 0.5, level}):
                moves.append({k: self._cut(k, n, int(cuts[np.abs(part - share).argmin()]),
                                           (other, rank))})
                moves.append({k: self._cut(k, n, int(cuts[np.abs(1 - part - share).argmin()]),
                                           (rank, other))})
        return moves

    def _tier_load(self, t: TableProblem, tier: Tier, rank: int) -> float:
        owner = np.zeros((4, self.state.model.machine.world_size))
        owner[:, rank] = t.prefix(float(tier.stop)) - t.prefix(float(tier.start))
        return float(tier_rows(self.state.model, t, tier, owner)[:, rank] @ self.price[:, rank])

    def _owner_share(self, t: TableProblem, tier: Tier, cuts: np.ndarray,
                     rank: int) -> np.ndarray:
        """Share of the tier's load that lies below each cut; float64 [num_cuts]."""
        world = self.state.model.machine.world_size
        unit = np.zeros((4, 4, world))
        unit[np.arange(4), np.arange(4), rank] = 1.0
        rows = (self.state.model.push_rows if tier.mode == "push" else self.state.model.shard_rows)
        weight = rows(t, t.spec.dim, unit)[..., rank] @ self.price[:, rank]
        ends = t.prefix(np.array([tier.start, *cuts, tier.stop], float))
        load = weight @ (ends - ends[:, :1])
        return load[1:-1] / max(float(load[-1]), 1e-30)

    def _cut(self, k: int, n: int, position: int, ranks: tuple[int, int]) -> tuple[Tier, ...]:
        tiers = list(self.state.tiers[k])
        tier = tiers[n]
        tiers[n:n + 1] = [replace(tier, stop=position, ranks=(ranks[0],)),
                          replace(tier, start=position, ranks=(ranks[1],))]
        return tuple(tiers)

    def _deal_moves(self, k: int, n: int, rank: int, low: list[int]) -> list[Change]:
        """Deal a stripe differently: exchange two ranks' slots, or turn it."""
        ranks = list(self.state.tiers[k][n].ranks)
        moves: list[Change] = []
        for other in low:
            if other in ranks:
                swapped = list(ranks)
                a, b = ranks.index(rank), ranks.index(other)
                swapped[a], swapped[b] = other, rank
                moves.append({k: self._with(k, n, tuple(swapped))})
        turn = int(self.rng.integers(1, len(ranks)))
        moves.append({k: self._with(k, n, tuple(ranks[turn:] + ranks[:turn]))})
        return moves

    def _recipe_moves(self, k: int) -> list[Change]:
        """Other tiers for the table: the two recipes that suit the class means best."""
        book = self.book
        if len(book.recipes[k]) < 2:
            return []
        rest = book.total - book.resources[k][book.pick[k]]
        near = np.argsort(book.scores(rest + book.resources[k]), kind="stable")[:3].tolist()
        near += [n for n, r in enumerate(book.recipes[k]) if len(r.stops) == 1 and n not in near]
        placer = Placer(self.relaxation, book.total)
        placer.load = (self.state.total.rows * self.price).sum(axis=0)
        moves: list[Change] = []
        for n in near:
            placer.held = self.state.evaluation.domain_bytes.copy()
            moves.append({k: placer.place_one(k, book.recipes[k][n])})
        return moves

    def _owners(self, k: int) -> set[int]:
        held = self.state.model.problem.constraints.tables.get(self.state.tables[k].spec.name)
        if held is not None and held.ranks is not None:
            return set(held.ranks)
        return set(range(self.state.model.machine.world_size))

    def _with(self, k: int, n: int, ranks: tuple[int, ...]) -> tuple[Tier, ...]:
        tiers = list(self.state.tiers[k])
        tiers[n] = replace(tiers[n], ranks=ranks)
        return tuple(tiers)


def _copy(state: State) -> State:
    other = State.__new__(State)
    other.model, other.tables = state.model, state.tables
    other.tiers, other.tallies = list(state.tiers), list(state.tallies)
    other.total, other.evaluation, other.score = state.total, state.evaluation, state.score
    return other
