"""Parts of the plan space that pay different barriers, each with its own bound and tree.

Pushed rows add a barrier to a step, for their partial sums; column splits add another one if the
owners of a row's columns exchange sums of squares. The relaxation does not contain these fixed
costs. So plans that push nothing, plans that push whole rows and plans that push columns are
bounded separately, and the barriers are added to each bound. Column splits of tables that are not
pushed only add cost and need no separate bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oper.search.branching.proof import grow_as, load_name, part_to_json
from oper.search.branching.tree import SearchTree
from oper.search.cost.model import CostModel
from oper.search.cost.space import hosts_are_interchangeable, may_rest, restricted, splits_pay
from oper.search.pricing.master import Bound, solve_node
from oper.search.pricing.node import Node
from oper.search.problem.machine import GROUPS, neighbourhoods
from oper.search.problem.space import STILL, WITH_COLUMNS, WITH_ROWS
from oper.search.problem.statement import Problem
from oper.search.relaxation.inequalities import Load
from oper.search.relaxation.relaxation import Relaxation

_MANY = 200  # tables; with more, each tree takes so long that fewer are better
_NEGLIGIBLE, _NEGLIGIBLE_OF_MANY = 1e-3, 1e-2  # barriers up to this share of the bound are ignored
_LEAST_SHARE = 1 / 8  # share of the work for every tree, once the first is done
_MANY_CLASSES = 2  # with more classes of ranks, pricing with a distinguished host takes too long
_OVERFLOW = 1e-6  # share of a memory by which a relaxed solution that fits may exceed it


class Subspace:
    """A part of the plan space with its bound; every plan is in some part.

    Args:
        problem: the problem restricted to the plans of the part.
        plans: the kinds of plans in the part, from `oper.search.problem.space.PLANS`.
        deadline: `time.monotonic()` value after which no further round begins.

    Attributes:
        trees: branch-and-bound trees; the largest of their bounds counts. The first has relaxed
            solutions that can be rounded. The others, made by `branch` once a plan is known and the
            first is done, relax a problem in which the host of the piece with the largest load
            of one kind is distinguished. Their nodes take longer, and which of them proves most
            differs from problem to problem.
        extra_us: barriers that every plan of the part pays and the relaxation does not contain,
            microseconds.
        cutoff_us: the smallest cutoff so far, microseconds: only faster plans are bounded.
        root_us: the bound before any branching, independent of cutoffs, microseconds.
    """

    def __init__(self, problem: Problem, plans: tuple[str, ...], deadline: float | None) -> None:
        bound = solve_node(Node(Relaxation(CostModel(problem))), deadline=deadline)
        self.plans = plans
        self.trees = [SearchTree(bound)]
        self._loads = _host_loads(bound.relaxation)
        base = bound.relaxation.fixed_load_vector
        model = bound.relaxation.model
        extra_us = model.push_us * (STILL not in plans and not base.num_pushed) + (
            model.split_us * (plans == (WITH_COLUMNS,) and not base.num_split))
        self.extra_us = extra_us * bool(bound.relaxation.tables)
        self.cutoff_us = np.inf
        self.root_us = self.lower_bound_us

    @property
    def bound(self) -> Bound:
        """The bound of the part's relaxation."""
        return self.trees[0].bound

    @property
    def lower_bound_us(self) -> float:
        """A lower bound on the step time of every plan of the part, microseconds."""
        return min(self.uncapped_us, self.cutoff_us)

    @property
    def uncapped_us(self) -> float:
        """The best tree's bound; it bounds only plans with a step time below `cutoff_us`."""
        return max(x.bound.lower_bound_us for x in self.trees) + self.extra_us

    @property
    def solved(self) -> int:
        """Number of relaxations solved while branching."""
        return sum(x.solved for x in self.trees)

    @property
    def work(self) -> int:
        """Work of the relaxations solved while branching, in the unit of `SearchTree.work`."""
        return sum(x.work for x in self.trees)

    def is_part_of(self, other: Subspace) -> bool:
        """Whether `other` contains all plans of this part and charges nearly the same barriers.

        A search in the other part then also covers this one.
        """
        mine, theirs = (x.bound.relaxation.problem.allow for x in (self, other))
        spared = other.extra_us - self.extra_us
        return "push" in mine and mine < theirs and (
            spared <= _NEGLIGIBLE_OF_MANY * self.lower_bound_us)

    def takes_in(self, part: Problem, plans: tuple[str, ...]) -> bool:
        """Merge the plans of another part into this one, whose bound then leaves out its barriers.

        They are merged if this part contains all of them and the barriers are negligible.

        Args:
            part: the problem restricted to the other plans.
            plans: the kinds of the other plans.

        Returns:
            Whether the plans were merged.
        """
        relaxation = self.bound.relaxation
        share = _NEGLIGIBLE_OF_MANY if len(relaxation.tables) > _MANY else _NEGLIGIBLE
        if (not part.allow < relaxation.problem.allow or self.bound.overflow > _OVERFLOW
                or self.extra_us > share * self.lower_bound_us):
            return False
        self.root_us -= self.extra_us
        self.extra_us = 0.0
        self.plans = (*plans, *self.plans)
        return True

    def branch(self, step_us: float, goal_us: float, deadline: float | None) -> None:
        """Branch once to raise the bound of all plans with a step time below `step_us`.

        Args:
            step_us: the step time of a known plan, microseconds.
            goal_us: stop when the bound has reached this.
            deadline: `time.monotonic()` value at which to stop.
        """
        if step_us < self.cutoff_us:  # there may be more to branch on
            self.cutoff_us = step_us
            for tree in self.trees:
                tree.is_done = False
        step_us, goal_us = step_us - self.extra_us, goal_us - self.extra_us
        first = self.trees[0]
        if len(self.trees) == 1 and not first.is_done:
            first.run(1, step_us=step_us, goal_us=goal_us, deadline=deadline)
            if not first.is_done:
                return
        if np.isfinite(step_us) and len(self.trees) == 1 and first.solved:
            self.trees += [self._with_host(x, deadline) for x in self._loads]
        # Every tree has a share of the work; the most promising one has the rest.
        for tree in sorted((x for x in self.trees if not x.is_done), key=lambda x: (
                x.work >= _LEAST_SHARE * self.work, -x.rise_us - x.bound.lower_bound_us)):
            solved, known = tree.solved, tree.bound
            tree.run(1, step_us=step_us, goal_us=goal_us, deadline=deadline)
            if tree.solved > solved or tree.bound is not known:
                return

    def grow_as(self, proof: dict[str, Any], step_us: float, scale: float) -> None:
        """Branch as a proof of a similar problem did, to bound plans faster than `step_us`.

        The loads at which that proof branched are multiplied by `scale`: a plan's step time in this
        problem divided by its step time in that one.
        """
        self.cutoff_us = min(self.cutoff_us, step_us)
        loads = {tuple(load_name(self.bound.relaxation, x)): x for x in self._loads}
        for part in proof["parts"]:
            host = None if part["apart"] is None else loads.get(tuple(part["apart"]))
            if set(part["plans"]) != set(self.plans) or (host is None) != (part["apart"] is None):
                continue
            tree = self.trees[0] if host is None else self._with_host(host, None)
            if host is not None:
                self.trees.append(tree)
            grow_as(tree, part, step_us - self.extra_us, scale)

    def _with_host(self, load: Load, deadline: float | None) -> SearchTree:
        """A tree in which the host of the piece with the largest such load is distinguished."""
        relaxation = Relaxation(self.bound.relaxation.model, load)
        return SearchTree(solve_node(Node(relaxation), deadline=deadline))

    def lowest(self, number: int) -> list[Bound]:
        """Relaxed solutions of the `number` nodes with the least bounds, in ascending order."""
        return self.trees[0].lowest(number)

    def to_json(self, target_us: float) -> dict[str, Any]:
        """The part's entry in a certificate that proves a bound of `target_us` for its plans."""
        best = max(self.trees, key=lambda x: x.bound.lower_bound_us)
        return part_to_json(best, self.plans, target_us - self.extra_us)


def subspaces(problem: Problem, deadline: float | None) -> list[Subspace]:
    """All parts of the space in ascending order of their bounds, infeasible parts last."""
    out: list[Subspace] = []
    for plans in reversed(_parts(problem)):  # the part with most features can absorb others
        part = restricted(problem, plans)
        if not any(x.takes_in(part, plans) for x in out):
            out.append(Subspace(part, plans, deadline))
    return sorted(out, key=lambda x: (x.bound.is_infeasible, x.lower_bound_us))


def fit(parts: list[Subspace]) -> bool:
    """Whether any part can contain plans, that is, has a relaxed solution that fits the memory."""
    return any(x.bound.overflow <= _OVERFLOW for x in parts)


def tighten(parts: list[Subspace], max_work: int, step_us: float, goal_us: float,
            deadline: float | None) -> int:
    """Branch on the part with the least bound until it reaches `goal_us`, or work or time run out.

    `max_work` is in the unit of `SearchTree.work`. Returns the number of relaxations solved.
    """
    before = sum(x.solved for x in parts)
    end = max_work + sum(x.work for x in parts)
    while sum(x.work for x in parts) < end:
        lowest = min(parts, key=lambda x: x.lower_bound_us)
        solved, known = lowest.solved, lowest.lower_bound_us
        lowest.branch(step_us, goal_us, deadline)
        if lowest.solved == solved and lowest.lower_bound_us <= known:
            break
    return sum(x.solved for x in parts) - before


def _host_loads(relaxation: Relaxation) -> list[Load]:
    """The loads (phase, group) whose largest piece may determine the distinguished host (on a
    single host: memory domain): bytes received over links in each phase that pieces load. Empty if
    hosts differ, if no link is slow, or if there are more than two classes of ranks."""
    model = relaxation.model
    of_rank, group = neighbourhoods(model.machine)
    if not (relaxation.inequalities and of_rank.any() and hosts_are_interchangeable(model)
            and len(relaxation.classes.ranks) <= _MANY_CLASSES):
        return []
    return sorted({x.load for x in relaxation.inequalities if GROUPS[x.load[1]] == group})


def _parts(problem: Problem) -> list[tuple[str, ...]]:
    """The kinds of plans in each part, from `oper.search.problem.space.PLANS`."""
    if "push" not in problem.allow:
        return [(STILL,)]
    rest = all(may_rest(problem, t.spec.name) for t in problem.free_tables)
    out: list[tuple[str, ...]] = [(STILL,)] if rest else []
    if "columns" not in problem.allow:
        return [*out, (WITH_ROWS,)]
    if not splits_pay(problem):
        return [*out, (WITH_ROWS, WITH_COLUMNS)]
    return [*out, (WITH_ROWS,), (WITH_COLUMNS,)]
