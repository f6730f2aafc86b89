"""From relaxed solutions to placements: configurations by class means, then ranks by annealing.

Deciding whether a step time can be attained is NP-hard (two equal ranks, whole tables: PARTITION),
so the relaxation is followed by a local search. The relaxed solution of a node gives candidate
configurations of every table. Simulated annealing in C++ (`annealing`) chooses among them and
assigns pushed rows to ranks. Short annealings are run from several nodes, and the best of them are
continued (successive halving).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from oper.search.cost.model import Evaluation
from oper.search.pricing.master import Bound
from oper.search.problem.pins import impose
from oper.search.rounding.annealing import Annealing, Packed, Part, single_owner_options
from oper.search.rounding.candidates import CandidatePool
from oper.search.rounding.copies import spread_copies
from oper.search.rounding.orders import order_ranks
from oper.search.rounding.placing import Placement, Placer, evaluated
from oper.search.rounding.ranges import divide_rows
from oper.search.rounding.weights import weigh_stripes


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a search.

    Attributes:
        num_starts: number of nodes whose relaxed solutions the search starts from.
        num_probes: number of short annealings from each.
        max_work: work of each raising of the bound, in the unit of `SearchTree.work`; half of it
            before a plan is known.
        deadline: `time.monotonic()` value at which the search ends; None = only the other limits
            apply, so that equal seeds give equal plans.
    """

    num_starts: int
    num_probes: int
    max_work: int
    deadline: float | None = None

    def over(self) -> bool:
        """Whether the time limit has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline


EFFORTS = {"fast": Effort(3, 4, 25_000), "thorough": Effort(8, 32, 150_000)}
_CHAINS = 2  # annealings that run concurrently; their number does not affect the result
# Moves of an annealing, and least number of them per table. With about twice as many, gaps on 64
# and 128 ranks are at most 0.8 points smaller; with 40 %, mlperf-dlrm-v2 has 4 points more.
_MOVES, _MOVES_EACH = 450_000, 600
_PROBE, _CONTINUATION = 0.2, 0.6  # shares of these moves
_CONTINUED = 6  # the best 1 / 6 of the probes are continued
_PLACED = 8  # at most this many of these are placed; with many ranks, placing takes about as long
_CONFIGURATIONS = 4000  # candidates added for all tables, besides those of the relaxed solution
_CLOSE = 0.1  # share of the target gap at which the choice of configurations and an annealing end
_REPAIRS = 4  # limit of searches with increasing memory reserves, if plans overflow


@dataclass(frozen=True, slots=True)
class Found:
    """A placement of all free tables, and its evaluation.

    Attributes:
        placements: for each table of the relaxation.
        evaluation: evaluation of the plan.
    """

    placements: list[Placement]
    evaluation: Evaluation

    @property
    def step_us(self) -> float:
        """Modelled step time, microseconds."""
        return self.evaluation.step_us

    @property
    def score(self) -> tuple[float, float]:
        """`Evaluation.score`."""
        return self.evaluation.score


def search(bounds: Sequence[Bound], effort: Effort, lower_us: float, target_gap: float, seed: int
           ) -> Found:
    """Find a placement of the free tables of a problem.

    Args:
        bounds: solved relaxations of nodes of the problem, in ascending order of their bounds.
        effort: limits of the search.
        lower_us: lower bound of the entire problem, of which the nodes may be a part.
        target_gap: stop when step time / lower_us - 1 is at most this.
        seed: seed of the search; equal seeds give equal placements unless a deadline ends it.
    """
    goal, close = (lower_us * (1.0 + x * target_gap) for x in (1.0, _CLOSE))
    every: list[Found] = []
    reserve = 0.0
    for _ in range(_REPAIRS):
        every += _placed(bounds, effort, (goal, close), seed, reserve)
        over = min(x.score for x in every)[0]
        if not over:
            break
        # Relaxed solutions fill memories completely, but stripes are not exactly even.
        reserve = max(2 * over, 8 * reserve)
    best = min(every, key=lambda x: x.score)
    relaxation = bounds[0].relaxation
    if best.step_us <= goal or effort.over():
        return best
    placements = weigh_stripes(relaxation, best.placements)
    return min(best, Found(placements, evaluated(relaxation, placements)), key=lambda x: x.score)


def _placed(bounds: Sequence[Bound], effort: Effort, goals: tuple[float, float], seed: int,
            reserve: float) -> list[Found]:
    """Placements from all bounds, with a share `reserve` of every memory left free: short
    annealings from each bound, the best of which are continued.

    `goals` are two step times: that at which no further annealing begins, and a shorter one, at
    which a running annealing ends. Running ones aim for more than the target, because they hardly
    take longer for it.
    """
    goal = goals[0]
    rng = np.random.default_rng(seed)
    probes: list[tuple[Packed, _Start]] = []
    for n, bound in enumerate(bounds):
        if probes and (effort.over() or min(x.step_us for x, _ in probes) <= goal):
            break
        pool = CandidatePool(bound, reserve)
        near = bound.lower_bound_us + _CLOSE * max(0.0, goal - bound.lower_bound_us)
        pool.descend(rng, near)
        single_owner = single_owner_options(bound.relaxation)
        anneals = any(single_owner[k, list(r.options)].any() for k, r in enumerate(pool.chosen()))
        if not anneals:
            pool.refine(rng, near)
        pool.simplify(near)
        if not anneals:  # nothing is assigned to single owners, so other nodes add nothing
            parts = [[Part(t.spec.dim, r)] for t, r in zip(
                pool.relaxation.tables, pool.chosen(), strict=True)]
            world = pool.relaxation.model.machine.world_size
            return [_found(pool, parts, (1,) * world, effort)]
        start = _Start(pool, bound, effort, goals, seed + 97 * n)
        probes += [(x, start) for x in start.probes()]
    probes = sorted(probes, key=lambda x: x[0].step_us)[:-(-len(probes) // _CONTINUED)]
    if probes[0][0].step_us > goal and not effort.over():
        with ThreadPoolExecutor(_CHAINS) as threads:
            longer = list(threads.map(lambda n: probes[n][1].run(
                _CONTINUATION, probes[n][0], effort.num_probes + n), range(len(probes))))
        probes = [(x, start) for x, (_, start) in zip(longer, probes, strict=True)]
        probes = sorted(probes, key=lambda x: x[0].step_us)[:_PLACED]
    return [_found(start.pool, x.parts, x.units, effort) for x, start in probes]


def _found(pool: CandidatePool, parts: list[list[Part]], units: tuple[int, ...],
           effort: Effort) -> Found:
    """The placement of `Placer.place`, completed, and its evaluation."""
    relaxation = pool.relaxation
    placements = order_ranks(relaxation, Placer(relaxation).place(parts, units), effort.over)
    placements = divide_rows(relaxation, placements, effort.over)
    placements = [impose(relaxation.problem.held(t.spec.name), x) for t, x in zip(
        relaxation.tables, spread_copies(relaxation, placements), strict=True)]
    return Found(placements, evaluated(relaxation, placements))


class _Start:
    """Annealings from one relaxed solution, with the candidates of `pool`."""

    def __init__(self, pool: CandidatePool, bound: Bound, effort: Effort,
                 goals: tuple[float, float], seed: int) -> None:
        pool.add_thresholds(_CONFIGURATIONS)
        self.pool, self.effort, self.goals, self.seed = pool, effort, goals, seed
        self._annealing = Annealing(pool, bound)
        self._moves = max(_MOVES, _MOVES_EACH * len(pool.candidates))

    def probes(self) -> list[Packed]:
        """Run short annealings until one reaches the goal; returns their results."""
        found: list[Packed] = []
        most = self.effort.num_probes
        with ThreadPoolExecutor(_CHAINS) as threads:
            while len(found) < most:
                seeds = range(len(found), min(len(found) + _CHAINS, most))
                found += threads.map(lambda n: self.run(_PROBE, None, n), seeds)
                if min(x.step_us for x in found) <= self.goals[0] or self.effort.over():
                    break
        return found

    def run(self, share: float, start: Packed | None, number: int) -> Packed:
        """Run the `number`-th annealing with a share of the moves, continued from `start` if given.
        """
        deadline = self.effort.deadline
        left = 0.0 if deadline is None else max(0.05, deadline - time.monotonic())
        return self._annealing.run(round(share * self._moves), self.goals[1],
                                   1000 * self.seed + number, left, start)
