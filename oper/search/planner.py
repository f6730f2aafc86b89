"""`make_plan`: the planner's front door."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanInfeasibleError, fail
from oper.plan import Piece, Plan, uniform_plan
from oper.search.bound.branching import Branching
from oper.search.bound.certificate import is_for, with_bound
from oper.search.bound.master import Bound, solve_node
from oper.search.bound.node import Node
from oper.search.bound.owner_rows import neighbourhoods
from oper.search.bound.relaxation import Relaxation
from oper.search.cost.model import CostModel, evaluate
from oper.search.explain.infeasible import explain_bound, explain_plan
from oper.search.heuristic.groups import plan_with_groups
from oper.search.heuristic.placing import table_plan
from oper.search.heuristic.search import EFFORTS, Effort, Found, improved, search
from oper.search.heuristic.state import State
from oper.search.peers.baselines import replicate_or_partition
from oper.search.peers.markov import markov_chain, no_plan_found
from oper.search.problem.constraints import Constraints, check_constraints, violations
from oper.search.problem.machine import GROUPS
from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.space import used_features
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology
from oper.traffic import ROW_WISE

_FEW = 20  # tables, up to which a search begins from large boxes
_MANY = 200  # tables, above which less is tried
_LEAST_BOXES = 8  # then
_SHALLOW = 16  # times fewer boxes before the first search
_CLOSE = 1e-6  # a gap up to which no simpler plan is looked at
_NEGLIGIBLE = 1e-2  # of a step
_MANY_HOSTS = 4  # above which planning looks at none of them apart where ranks differ, and less
_MANY_CLASSES = 2  # of ranks, above which prices with a host apart take too long
_HOST_BOXES = 2  # what a box with one of many hosts apart costs, in others
_BEHIND = 1.01  # a branch in which a search stays so far behind is searched no more
_RISEN = 1.05  # unless its bound has risen so far since, and with it where a search begins
_SETTLED = 3e-3  # what steps of searches that find no more differ by
_ENOUGH = 0.03  # gap above which a search has a third turn, and bounds are raised for longer
_NOTHING_LEFT = 0.2  # of the target gap: a branch this close to its own bound is searched once
_OVERFLOW = 1e-6  # of a memory, up to which a relaxed solution fits
_TURN = 6  # boxes of one branch before another may have its turn: one cut at every load tried
SEARCHES = ("relaxation", "markov-chain")


def make_plan(
    tables: Iterable[TableSpec],
    stats: AccessStats | None,
    topology: Topology,
    *,
    objective: str = "training",
    batch_size: int,
    constraints: Constraints | Mapping[str, Any] | None = None,
    effort: str = "fast",
    time_budget_s: float | None = None,
    target_gap: float = 0.01,
    seed: int = 0,
    allow: Iterable[str] | None = None,
    overlap: Mapping[str, Any] | None = None,
    search: str = "relaxation",
) -> Plan:
    """Plan where every row lives, with a certified lower bound of the modelled step.

    Args:
        tables: the tables, in the order of the collection.
        stats: access statistics; None = plan from sizes alone, with one warning.
        topology: the machine; its number of ranks is the plan's world size.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step.
        constraints: what the plan is held to, see `oper.search.problem.constraints`.
        effort: ``"fast"`` or ``"thorough"``.
        time_budget_s: seconds after which the best plan so far is returned; None = the effort's
            number of trials decides, and equal seeds give equal plans.
        target_gap: stop when (step - bound) / bound is at most this.
        seed: of the random choices.
        allow: what the plan may use, names of
            `oper.search.problem.space.FEATURES`; by default what the runtimes execute well on this
            topology, and host memory where the rows do not fit without it.
        overlap: dense compute that phases may hide behind, ``{phase: microseconds}``, see
            `oper.search.problem.overlap`; by default nothing hides.
        search: ``"relaxation"``, or ``"markov-chain"`` for comparison, see
            `oper.search.peers.markov`.

    Raises:
        InvalidInputError: an argument is out of range, or the statistics are for other tables.
        PlanInfeasibleError: nothing fits; names need, capacity and the smallest relaxation.
        MissingDependencyError: highspy is not installed.
    """
    problem = make_problem(tables, stats, topology, objective=objective, batch_size=batch_size,
                           allow=allow, constraints=constraints)
    return plan_problem(with_overlap(problem, overlap), effort=effort, time_budget_s=time_budget_s,
                        target_gap=target_gap, seed=seed, search=search)


def plan_problem(problem: Problem, *, effort: str = "fast", time_budget_s: float | None = None,
                 target_gap: float = 0.01, seed: int = 0, search: str = "relaxation",
                 start: Plan | None = None) -> Plan:
    """Plan a problem that is already stated; arguments and errors as `make_plan`.

    Args:
        start: a plan of the same tables and ranks; the result is never slower than it, if it lies
            in the problem's space, fits and keeps the constraints. So a plan made with more memory,
            started from the one made with less, is never worse.
    """
    started = time.monotonic()
    if effort not in EFFORTS:
        raise InvalidInputError(fail("cannot search", "effort", effort, f"one of {sorted(EFFORTS)}",
                                     "correct it"))
    if not target_gap >= 0 or (time_budget_s is not None and not time_budget_s > 0):  # NaN too
        raise InvalidInputError(fail("cannot search", "target_gap, time_budget_s",
                                     (target_gap, time_budget_s), ">= 0 and > 0", "correct it"))
    if seed < 0:
        raise InvalidInputError(fail("cannot search", "seed", seed, ">= 0", "correct it"))
    budget = EFFORTS[effort]
    if time_budget_s is not None:
        budget = replace(budget, deadline=started + time_budget_s)
    if search not in SEARCHES:
        raise InvalidInputError(fail("cannot search", "search", search, f"one of {SEARCHES}",
                                     "correct it"))
    make = _plan if search == "relaxation" else _chained
    try:
        plan, lower_us = plan_with_groups(problem, lambda p: make(p, budget, target_gap, seed))
    except PlanInfeasibleError:
        if not problem.last_resort:
            raise
        problem = problem.in_need()
        plan, lower_us = plan_with_groups(problem, lambda p: make(p, budget, target_gap, seed))
    check_constraints(plan, problem.constraints)
    notes = {**plan.notes, "effort": effort, "seed": seed, "search": search,
             "allow": sorted(problem.allow)}
    if problem.constraints != Constraints():
        notes["constraints"] = problem.constraints.to_json()
    if problem.overlap:
        notes["overlap_us"] = overlap_to_json(problem.overlap)
    plan = replace(plan, notes=notes)
    if plan.step_us > lower_us * (1 + _CLOSE):
        # Even stripes over unequal ranks are one tier, which the search, that deals rows to classes
        # of equal ranks, has not; and in inference it may miss by the rounding of its stripes.
        simple = uniform_plan([t.spec for t in problem.tables], problem.machine.world_size)
        plan = _not_slower(plan, simple, problem)
        if not problem.training:
            plan = _not_slower(plan, replicate_or_partition(problem), problem)
    return with_bound(_not_slower(plan, start, problem), problem, lower_us)


def _not_slower(plan: Plan, start: Plan | None, problem: Problem) -> Plan:
    """`plan`, or the placement of `start` where that is allowed and faster."""
    if start is None:
        return plan
    found = evaluate(start, problem)
    allowed = used_features(start) <= problem.allow and not violations(start, problem.constraints)
    if not (allowed and found.fits and found.step_us < plan.step_us):
        return plan
    tables = tuple(start.table(t.spec.name) for t in problem.tables)
    return replace(plan, tables=tables, step_us=found.step_us)


def _plan(problem: Problem, budget: Effort, target_gap: float, seed: int) -> tuple[Plan, float]:
    """The search and the bound, without the constraints that bind several tables."""
    fitting = _bounds(problem, budget.deadline)
    best = _search_branches(fitting, budget, target_gap, seed)
    if not best[1].evaluation.fits:
        raise explain_plan(problem, best[1].evaluation)
    root_us = min(x.root_us for x in fitting)
    lower_us = max(root_us, min(x.lower_bound_us for x in fitting))
    plan = _assemble(problem, best[0].bound, best[1])
    step_us = best[1].evaluation.step_us
    notes = {"constants": problem.topology.source,
             "bound": "whole-table configurations, class means",
             "gap_kind": "branching" if any(x.solved for x in fitting) else "relaxation",
             "bound_boxes": sum(x.solved for x in fitting),
             "relaxation_us": root_us}
    return replace(plan, step_us=step_us, notes=notes), lower_us


def proved(plan: Plan, problem: Problem, *, goal_gap: float = 0.0, max_boxes: int = 2000,
           time_budget_s: float | None = None) -> Plan:
    """`plan` with its lower bound raised by branch and price, for longer than planning may take.

    Args:
        plan: a plan of the problem that fits.
        problem: the problem.
        goal_gap: stop when the gap is at most this.
        max_boxes: relaxations to solve at most, about.
        time_budget_s: seconds after which the bound so far is returned; None = no limit.

    Raises:
        PlanError: the plan is for other tables or another number of ranks.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    step_us = evaluate(plan, problem).step_us
    branches = _bounds(problem, deadline)
    boxes = _tighten(branches, max_boxes, step_us, step_us / (1 + goal_gap), deadline,
                     partial(_Branch.prove, patiently=True))
    lower_us = max(plan.lower_bound_us if is_for(plan, problem) else 0.0,
                   min(x.lower_bound_us for x in branches), min(x.root_us for x in branches))
    notes = {**plan.notes, "gap_kind": "branching" if boxes else plan.notes.get("gap_kind"),
             "bound_boxes": boxes}
    plan = replace(plan, batch_size=problem.batch_size, step_us=step_us, lower_bound_us=0.0,
                   notes=notes)
    return with_bound(plan, problem, lower_us)


def _chained(problem: Problem, budget: Effort, target_gap: float, seed: int
             ) -> tuple[Plan, float]:
    """The Markov chain's plan with the bound of the space."""
    bounds = _bounds(problem, budget.deadline)
    plan = markov_chain(problem, seed, budget.max_trials, deadline=budget.deadline,
                        goal_us=bounds[0].lower_bound_us * (1 + target_gap))
    if plan is None:
        raise PlanInfeasibleError(no_plan_found(problem, budget.max_trials))
    return replace(plan, step_us=evaluate(plan, problem).step_us), bounds[0].lower_bound_us


def _bounds(problem: Problem, deadline: float | None) -> list[_Branch]:
    """The branches that fit, by bound; raises PlanInfeasibleError where there is none."""
    branches: list[_Branch] = []
    for part in reversed(_branches(problem)):  # those that may do most first
        if not any(x.takes_in(part) for x in branches):
            branches.append(_Branch(part, deadline))
    branches.sort(key=lambda x: x.lower_bound_us)
    if all(x.bound.overflow > _OVERFLOW for x in branches):
        raise explain_bound(problem, branches[0].bound)
    return [x for x in branches if not x.bound.is_infeasible]


class _Branch:
    """A part of the space with its bound; every plan lies in some branch.

    Attributes:
        boxes: what the bound comes from, and relaxed solutions to begin a search from.
        hosts: boxes of the relaxation with the host of the largest piece apart; None before
            `prove`, or where that is no other relaxation.
        extra_us: barriers that every plan of the branch pays and the relaxation does not see.
        cutoff_us: the least known step that any box was bounded below; slower plans may be missing.
        root_us: the bound before any branching, of which no known step is a part.
    """

    def __init__(self, problem: Problem, deadline: float | None) -> None:
        bound = solve_node(Node(Relaxation(CostModel(problem))), deadline=deadline)
        self.boxes = Branching(bound)
        self.hosts: Branching | None = None
        self._apart = _load_apart(bound.relaxation)
        is_cheap = (len(set(problem.machine.host)) <= _MANY_HOSTS
                    or len(bound.relaxation.tables) <= _FEW)
        self._host_boxes = 1 if is_cheap else _HOST_BOXES
        base = bound.relaxation.fixed_tally
        barriers = ("push" in problem.allow and not base.num_pushed) + (
            {"push", "columns"} <= problem.allow and not base.num_split and _splits_pay(problem))
        self.extra_us = problem.topology.costs.phase_us * barriers * bool(bound.relaxation.tables)
        self.cutoff_us = np.inf
        self.root_us = self.lower_bound_us

    @property
    def bound(self) -> Bound:
        """The bound of the branch's relaxation."""
        return self.boxes.bound

    @property
    def lower_bound_us(self) -> float:
        """No plan of the branch is faster."""
        by_hosts = 0.0 if self.hosts is None else self.hosts.bound.lower_bound_us
        return min(max(self.bound.lower_bound_us, by_hosts) + self.extra_us, self.cutoff_us)

    @property
    def solved(self) -> int:
        """Relaxations solved while branching."""
        return self.boxes.solved + (0 if self.hosts is None else self.hosts.solved)

    @property
    def effort(self) -> int:
        """What they cost, in relaxations without a host apart."""
        return self.boxes.solved + (0 if self.hosts is None
                                    else self._host_boxes * self.hosts.solved)

    def is_part_of(self, other: _Branch) -> bool:
        """Whether `other` has all plans of this branch and its barriers hardly count, so that a
        search there serves both."""
        mine, theirs = (x.bound.relaxation.problem.allow for x in (self, other))
        spared = other.extra_us - self.extra_us
        return "push" in mine and mine < theirs and spared <= _NEGLIGIBLE * self.lower_bound_us

    def takes_in(self, part: Problem) -> bool:
        """Stand for `part` of the space, too, where tables are many and this branch's barriers
        hardly count, which its bound then leaves out; whether it does."""
        relaxation = self.bound.relaxation
        if (len(relaxation.tables) <= _MANY or not part.allow < relaxation.problem.allow
                or self.bound.overflow > 1e-6
                or self.extra_us > _NEGLIGIBLE * self.lower_bound_us):
            return False
        self.root_us -= self.extra_us
        self.extra_us = 0.0
        return True

    def tighten(self, max_boxes: int, step_us: float, goal_us: float,
                deadline: float | None) -> None:
        """Raise the bound; only plans faster than `step_us` count."""
        self.cutoff_us = min(self.cutoff_us, step_us)
        self.boxes.run(max_boxes, step_us=step_us - self.extra_us, goal_us=goal_us - self.extra_us,
                       deadline=deadline)

    def prove(self, max_boxes: int, step_us: float, goal_us: float, deadline: float | None,
              patiently: bool = False) -> None:
        """As `tighten`, for the bound alone, with the host of the largest piece apart where that
        may gain something; where it takes long as well, if `patiently`."""
        if (self._apart is None or self.boxes.is_uncut
                or not (patiently or self.hosts or _is_short(self.bound.relaxation))):
            self.tighten(max_boxes, step_us, goal_us, deadline)
            return
        self.cutoff_us = min(self.cutoff_us, step_us)
        if self.hosts is None:
            model = CostModel(self.bound.relaxation.problem)
            self.hosts = Branching(solve_node(Node(Relaxation(model, self._apart)),
                                              deadline=deadline))
        self.hosts.run(max_boxes, step_us=step_us - self.extra_us, goal_us=goal_us - self.extra_us,
                       deadline=deadline)

    def lowest(self, number: int) -> list[Bound]:
        """Relaxed solutions of the boxes with the least bounds, least first."""
        if self.hosts is None:
            return self.boxes.lowest(number)
        relaxation, out = self.bound.relaxation, []
        for found in self.hosts.lowest(number):
            node = Node(relaxation, found.node.box, found.node.pushes)
            bound = solve_node(node, pool=self.bound.pool.under(node, self.bound.prices))
            out.append(self.bound if bound.is_infeasible else bound)
        return out


def _is_short(relaxation: Relaxation) -> bool:
    """Whether planning has the time for a relaxation with a host apart; on one host it gains less
    than other boxes at first."""
    num_hosts = len(set(relaxation.model.machine.host))
    return len(relaxation.tables) <= _MANY and (
        1 < num_hosts <= _MANY_HOSTS or (num_hosts > 1 and relaxation.alike))


def _load_apart(relaxation: Relaxation) -> tuple[int, int] | None:
    """The load by which the host of the largest piece (on a single host: its memory domain) is
    looked at apart: what a rank receives from others in the forward phase; None where hosts
    differ, or ranks differ much."""
    model = relaxation.model
    of_rank, group = neighbourhoods(model.machine)
    number = int(of_rank.max()) + 1
    members = [np.bincount(of_rank[r], minlength=number) for r in relaxation.classes.ranks]
    if not (relaxation.owner_rows and number > 1 and relaxation.is_symmetric
            and len(relaxation.classes.ranks) <= _MANY_CLASSES
            and all((n == n[0]).all() for n in members)):
        return None
    return model.phases.index("forward"), GROUPS.index(group)


def _search_branches(branches: list[_Branch], budget: Effort, target_gap: float, seed: int
                     ) -> tuple[_Branch, State]:
    """The best placement of all branches, and bounds tightened around it."""
    best: tuple[_Branch, Found] | None = None
    num_tables = len(branches[0].bound.relaxation.tables)
    boxes = round(budget.max_boxes * 100 / max(50, num_tables))  # each time; more tables, fewer
    relaxation = branches[0].bound.relaxation
    # Prices of several classes across hosts take longer.
    slow = len(relaxation.classes.ranks) > 1 and len(set(relaxation.model.machine.host)) > 1
    # Boxes from which it begins. Large ones are good starts where tables are few, small ones where
    # pieces are many: begin from one of the former and, when a step is known, from the latter.
    turns, shallow = [1, budget.num_starts], max(2, boxes // _SHALLOW)
    if num_tables > _FEW:
        turns = [1, budget.num_starts, 1][:2 if slow else 3]
        shallow = boxes // 2 if slow else boxes
    if num_tables > _MANY:
        boxes = shallow = max(boxes, _LEAST_BOXES)
        moves = budget.max_moves * _MANY // num_tables
        budget, turns = replace(budget, max_moves=moves), [1]
    now = time.monotonic()
    first = None if budget.deadline is None else now + 0.3 * max(0.0, budget.deadline - now)
    _tighten(branches, shallow, np.inf, np.inf, first)
    # Steps found in branches, their bounds then, and whether it was much the same step again.
    seen: dict[int, tuple[float, float, bool]] = {}
    for turn, num_starts in enumerate(turns):
        if best is not None:
            known = best[1].step_us
            _tighten(branches, boxes, known, known / (1 + target_gap), budget.deadline,
                     _Branch.prove)
        for branch in sorted(branches, key=lambda x: x.lower_bound_us):
            known = np.inf if best is None else best[1].step_us
            lower_us = min(x.lower_bound_us for x in branches)
            # A branch whose own bound is above what is already found cannot hold a better plan.
            enough = max(target_gap, _ENOUGH) if turn == len(turns) - 1 else target_gap
            if best is not None and (budget.over() or known <= max(
                    branch.lower_bound_us, lower_us * (1 + enough))):
                continue
            if known <= branch.lower_bound_us or any(branch.is_part_of(x) for x in branches):
                continue
            step, bound, settled = seen.get(id(branch), (0.0, 0.0, False))
            behind = step > _BEHIND * known and branch.lower_bound_us < _RISEN * bound
            at_best = 0 < step < branch.lower_bound_us * (1 + _NOTHING_LEFT * target_gap)
            if behind or settled or at_best:
                continue
            starts = branch.lowest(num_starts)
            looks = budget.num_looks // (2 if turn == 0 and len(turns) > 1 else 1)
            found = search(starts, replace(budget, num_looks=looks), lower_us, target_gap,
                           seed + turn)
            again = num_tables <= _FEW and found.spread < _SETTLED and (
                abs(found.step_us / max(step, 1e-9) - 1) < _SETTLED)
            seen[id(branch)] = min(found.step_us, step or np.inf), branch.lower_bound_us, again
            if best is None or found.score < best[1].score:
                best = branch, found
    assert best is not None
    branch, found = best
    if found.is_annealed and (num_tables <= _FEW or not found.state.evaluation.fits):
        lower_us = min(x.lower_bound_us for x in branches)
        found = improved(found, budget, lower_us * (1 + target_gap), seed)
    known = found.step_us
    # Boxes of few tables take less time than one search more.
    left = boxes if num_tables <= _FEW else boxes // (4 if num_tables <= _MANY else 2)
    _tighten(branches, left, known, known / (1 + target_gap), budget.deadline, _Branch.prove)
    if num_tables <= _MANY:
        left, enough = boxes * (2 if num_tables <= _FEW else 1), max(target_gap, _ENOUGH)
        _tighten(branches, left, known, known / (1 + enough), budget.deadline, _Branch.prove)
    return branch, found.state


def _tighten(branches: list[_Branch], max_boxes: int, step_us: float, goal_us: float,
             deadline: float | None, raise_: Callable[..., None] = _Branch.tighten) -> int:
    """Raise the bound of whichever branch holds it down, by `_Branch.tighten` or `_Branch.prove`;
    returns the boxes solved."""
    before = sum(x.solved for x in branches)
    end = max_boxes + sum(x.effort for x in branches)
    while sum(x.effort for x in branches) < end:
        lowest = min(branches, key=lambda x: x.lower_bound_us)
        solved, known = lowest.solved, lowest.lower_bound_us
        raise_(lowest, min(max_boxes, _TURN), step_us, goal_us, deadline)
        if lowest.solved == solved and lowest.lower_bound_us <= known:
            break
    return sum(x.solved for x in branches) - before


def _splits_pay(problem: Problem) -> bool:
    """Whether every column split costs a barrier."""
    pinned = problem.constraints.tables
    return problem.training and all(
        t.spec.optimizer in ROW_WISE for t in problem.tables if problem.may_split(t)
        and (t.spec.name not in pinned or pinned[t.spec.name].tiers is None))


def _branches(problem: Problem) -> list[Problem]:
    """Plans that push nothing, that push whole rows, and that push columns; those that push keep
    no copies per host."""
    if "push" not in problem.allow:
        return [problem]
    if "per_host" in problem.allow:
        still = replace(problem, allow=problem.allow - {"push", "columns"})
        others = _branches(replace(problem, allow=problem.allow - {"per_host"}))
        pinned = problem.constraints.tables
        if all(_may_rest(problem, t.spec.name) for t in problem.tables
               if t.spec.name not in pinned or pinned[t.spec.name].tiers is None):
            # Those that push nothing are among the ones with copies.
            return [still, *(x for x in others if "push" in x.allow)]
        return others
    pinned = problem.constraints.tables
    free = [t.spec.name for t in problem.tables
            if t.spec.name not in pinned or pinned[t.spec.name].tiers is None]
    out = [problem]
    if "columns" in problem.allow and _splits_pay(problem):
        out.insert(0, replace(problem, allow=problem.allow - {"columns"}))
    if all(_may_rest(problem, name) for name in free):
        out.insert(0, replace(problem, allow=problem.allow - {"push", "columns"}))
    return out


def _may_rest(problem: Problem, name: str) -> bool:
    """Whether table `name` can be placed without being pushed."""
    places = problem.placements_of(name)
    return "replicated" in places or ("pull" in problem.modes_of(name) and bool(places))


def space_bound(problem: Problem, max_boxes: int = 0) -> float:
    """Certified lower bound (us) over all plans of the space; 0 where memory fits none.

    Args:
        problem: the problem.
        max_boxes: relaxations to solve while branching, about, without the cutoff of a known step.
    """
    found = [x for x in (_Branch(p, None) for p in _branches(problem)) if not x.bound.is_infeasible]
    if all(x.bound.overflow > _OVERFLOW for x in found):
        return 0.0
    if max_boxes:
        _tighten(found, max_boxes, np.inf, np.inf, None, partial(_Branch.prove, patiently=True))
    return min(x.lower_bound_us for x in found)


def _assemble(problem: Problem, bound: Bound, state: State) -> Plan:
    free = {t.spec.name: table_plan(t, pieces)
            for t, pieces in zip(bound.relaxation.tables, state.pieces, strict=True)}
    entries = []
    for t in problem.tables:
        entry = free.get(t.spec.name)
        if entry is None:
            tiers = problem.constraints.tables[t.spec.name].tiers or ()
            entry = table_plan(t, (Piece(0, t.spec.dim, tiers),))
        entries.append(entry)
    return Plan(problem.machine.world_size, tuple(entries), problem.objective, problem.batch_size,
                problem.topology.name)
