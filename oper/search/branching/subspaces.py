"""The space of plans in parts that pay different barriers, each with its bound and its tree.

A step with pushed rows has an additional barrier for their partial sums, and one with tables cut by
columns another one if their owners exchange sums of squares. The relaxation does not contain these
fixed costs. So plans that push nothing, that push whole rows and that push columns are bounded
separately, and the barriers are added to each bound. Cutting tables that are not pushed only adds
cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oper.search.branching.proof import part_to_json
from oper.search.branching.tree import SearchTree
from oper.search.cost.model import CostModel
from oper.search.cost.space import hosts_are_alike, may_rest, restricted, splits_pay
from oper.search.pricing.master import Bound, solve_node
from oper.search.pricing.node import Node
from oper.search.problem.machine import GROUPS, neighbourhoods
from oper.search.problem.space import STILL, WITH_COLUMNS, WITH_ROWS
from oper.search.problem.statement import Problem
from oper.search.relaxation.relaxation import Relaxation

_MANY = 200  # tables, above which less is tried
_NEGLIGIBLE = 1e-2  # of a step
_MANY_HOSTS = 4  # with more hosts and unequal ranks, planning distinguishes none
_MANY_CLASSES = 2  # of ranks, above which prices with a distinguished host take too long
_OVERFLOW = 1e-6  # of a memory, up to which a relaxed solution fits
#: Whether the host of the largest piece is distinguished, which gives no solutions to search
#: from: never, where that takes little time, or wherever it may gain something.
NEVER, BRIEFLY, PATIENTLY = range(3)


class Subspace:
    """A part of the space with its bound; every plan lies in some part.

    Args:
        problem: the problem restricted to the plans of the part.
        plans: the plans it has, by names of `oper.search.problem.space.PLANS`.
        deadline: `time.monotonic()` value after which no further round begins.

    Attributes:
        trees: trees that give the bound. The first has relaxed solutions from which a search can
            begin. A second one, made on request and only if it is a different relaxation,
            distinguishes the host of the largest piece.
        extra_us: barriers that every plan of the part pays and the relaxation does not contain.
        cutoff_us: the least known step used as a limit: nodes were bounded only over plans below
            it.
        root_us: the bound before any branching, independent of known steps.
    """

    def __init__(self, problem: Problem, plans: tuple[str, ...], deadline: float | None) -> None:
        bound = solve_node(Node(Relaxation(CostModel(problem))), deadline=deadline)
        self.plans = plans
        self.trees = [SearchTree(bound)]
        self._distinguished = _distinguished_load(bound.relaxation)
        base = bound.relaxation.fixed_tally
        model = bound.relaxation.model
        extra_us = model.push_us * (STILL not in plans and not base.num_pushed) + (
            model.costs.phase_us * (plans == (WITH_COLUMNS,) and not base.num_split))
        self.extra_us = extra_us * bool(bound.relaxation.tables)
        self.cutoff_us = np.inf
        self.root_us = self.lower_bound_us

    @property
    def bound(self) -> Bound:
        """The bound of the part's relaxation."""
        return self.trees[0].bound

    @property
    def lower_bound_us(self) -> float:
        """No plan of the part is faster."""
        return min(self.uncapped_us, self.cutoff_us)

    @property
    def uncapped_us(self) -> float:
        """The bound of the better tree: no plan within its limits is faster."""
        return max(x.bound.lower_bound_us for x in self.trees) + self.extra_us

    @property
    def solved(self) -> int:
        """Relaxations solved while branching."""
        return sum(x.solved for x in self.trees)

    @property
    def work(self) -> int:
        """Work of these relaxations, see `SearchTree`."""
        return sum(x.work for x in self.trees)

    def is_part_of(self, other: Subspace) -> bool:
        """Whether `other` contains all plans of this part at nearly the same barriers.

        A search in the other part then serves both.
        """
        mine, theirs = (x.bound.relaxation.problem.allow for x in (self, other))
        spared = other.extra_us - self.extra_us
        return "push" in mine and mine < theirs and spared <= _NEGLIGIBLE * self.lower_bound_us

    def takes_in(self, part: Problem, plans: tuple[str, ...]) -> bool:
        """Merge other plans into this part, if tables are many and its barriers are negligible.

        The bound then leaves those barriers out. Returns whether the plans were merged.
        """
        relaxation = self.bound.relaxation
        if (len(relaxation.tables) <= _MANY or not part.allow < relaxation.problem.allow
                or self.bound.overflow > 1e-6
                or self.extra_us > _NEGLIGIBLE * self.lower_bound_us):
            return False
        self.root_us -= self.extra_us
        self.extra_us = 0.0
        self.plans = (*plans, *self.plans)
        return True

    def branch(self, step_us: float, goal_us: float, deadline: float | None, apart: int) -> None:
        """Branch once to raise the bound for plans faster than `step_us`.

        `apart` states how much to use the second tree: NEVER, BRIEFLY or PATIENTLY.
        """
        if len(self.trees) == 1 and self._distinguished is not None and (
                not self.trees[0].is_single) and (apart == PATIENTLY or (
                    apart == BRIEFLY and _is_short(self.bound.relaxation))):
            model = CostModel(self.bound.relaxation.problem)
            self.trees.append(SearchTree(solve_node(
                Node(Relaxation(model, self._distinguished)), deadline=deadline)))
        self.cutoff_us = min(self.cutoff_us, step_us)
        tree = self.trees[0 if apart == NEVER else -1]
        tree.run(1, step_us=step_us - self.extra_us, goal_us=goal_us - self.extra_us,
                 deadline=deadline)

    def lowest(self, number: int) -> list[Bound]:
        """Relaxed solutions of the nodes with the least bounds, in ascending order."""
        if len(self.trees) == 1:
            return self.trees[0].lowest(number)
        relaxation, out = self.bound.relaxation, []
        for found in self.trees[1].lowest(number):
            node = Node(relaxation, found.node.limits, found.node.pushes)
            bound = solve_node(node, pool=self.bound.pool.under(node, self.bound.prices))
            out.append(self.bound if bound.is_infeasible else bound)
        return out

    def to_json(self, target_us: float) -> dict[str, Any]:
        """The part of a certificate that proves a bound of `target_us` for its plans."""
        best = max(self.trees, key=lambda x: x.bound.lower_bound_us)
        return part_to_json(best, self.plans, target_us - self.extra_us)


def subspaces(problem: Problem, deadline: float | None) -> list[Subspace]:
    """All parts of the space, those that may hold plans first, by bound."""
    out: list[Subspace] = []
    for plans in reversed(_parts(problem)):  # those that may do most first
        part = restricted(problem, plans)
        if not any(x.takes_in(part, plans) for x in out):
            out.append(Subspace(part, plans, deadline))
    return sorted(out, key=lambda x: (x.bound.is_infeasible, x.lower_bound_us))


def fit(parts: list[Subspace]) -> bool:
    """Whether any part can contain plans, that is, has a relaxed solution that fits the memory."""
    return any(x.bound.overflow <= _OVERFLOW for x in parts)


def tighten(parts: list[Subspace], max_work: int, step_us: float, goal_us: float,
            deadline: float | None, apart: int = NEVER) -> int:
    """Raise the least bound of the parts by `Subspace.branch`, with about `max_work` work.

    Work is defined in `SearchTree`. Returns the number of nodes solved.
    """
    before = sum(x.solved for x in parts)
    end = max_work + sum(x.work for x in parts)
    while sum(x.work for x in parts) < end:
        lowest = min(parts, key=lambda x: x.lower_bound_us)
        solved, known = lowest.solved, lowest.lower_bound_us
        lowest.branch(step_us, goal_us, deadline, apart)
        if lowest.solved == solved and lowest.lower_bound_us <= known:
            break
    return sum(x.solved for x in parts) - before


def _is_short(relaxation: Relaxation) -> bool:
    """Whether planning should spend time on a relaxation with a distinguished host. On a single
    host, other nodes raise the bound more."""
    num_hosts = len(set(relaxation.model.machine.host))
    return len(relaxation.tables) <= _MANY and (
        1 < num_hosts <= _MANY_HOSTS or (num_hosts > 1 and relaxation.alike))


def _distinguished_load(relaxation: Relaxation) -> tuple[int, int] | None:
    """The load whose largest piece determines the distinguished host (on a single host: memory
    domain): the bytes that a rank receives from others before it pools rows. None if hosts differ,
    or if there are many classes of ranks."""
    model = relaxation.model
    of_rank, group = neighbourhoods(model.machine)
    if not (relaxation.inequalities and of_rank.any() and hosts_are_alike(model)
            and len(relaxation.classes.ranks) <= _MANY_CLASSES):
        return None
    return model.request_phase, GROUPS.index(group)


def _parts(problem: Problem) -> list[tuple[str, ...]]:
    """The plans of each part, as names of `oper.search.problem.space.PLANS`."""
    if "push" not in problem.allow:
        return [(STILL,)]
    rest = all(may_rest(problem, t.spec.name) for t in problem.free_tables)
    out: list[tuple[str, ...]] = [(STILL,)] if rest else []
    if "columns" not in problem.allow:
        return [*out, (WITH_ROWS,)]
    if not splits_pay(problem):
        return [*out, (WITH_ROWS, WITH_COLUMNS)]
    return [*out, (WITH_ROWS,), (WITH_COLUMNS,)]
