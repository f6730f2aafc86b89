"""`make_plan`: the planner's front door."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanInfeasibleError, fail
from oper.plan import Piece, Plan, uniform_plan
from oper.search.bound.certificate import is_for, proof_of, with_bound
from oper.search.bound.master import Bound
from oper.search.bound.subspaces import Subspace, fit, subspaces, tighten
from oper.search.cost.model import evaluate
from oper.search.explain.infeasible import explain_bound, explain_plan
from oper.search.heuristic.groups import plan_with_groups
from oper.search.heuristic.placing import table_plan
from oper.search.heuristic.search import EFFORTS, Effort, Found, improved, search
from oper.search.heuristic.state import State
from oper.search.peers.baselines import replicate_or_partition
from oper.search.peers.markov import markov_chain, no_plan_found
from oper.search.problem.constraints import Constraints, check_constraints, violations
from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.space import used_features
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

_FEW = 20  # tables, up to which a search begins from nodes of large pieces
_MANY = 200  # tables, above which less is tried
_LEAST_NODES = 8  # then
_SHALLOW = 16  # times fewer nodes before the first search
_CLOSE = 1e-6  # a gap up to which no simpler plan is looked at
_BEHIND = 1.01  # a part in which a search stays so far behind is searched no more
_RISEN = 1.05  # unless its bound has risen so far since, and with it where a search begins
_SETTLED = 3e-3  # what steps of searches that find no more differ by
_ENOUGH = 0.03  # gap above which a search has a third turn, and bounds are raised for longer
_NOTHING_LEFT = 0.2  # of the target gap: a part this close to its own bound is searched once
_Proof = dict[str, Any]  # see `_proof`
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
                                     "choose one of these"))
    if not target_gap >= 0 or (time_budget_s is not None and not time_budget_s > 0):  # NaN too
        raise InvalidInputError(fail("cannot search", "target_gap, time_budget_s",
                                     (target_gap, time_budget_s), ">= 0 and > 0",
                                     "give a target gap of 0 or more and a positive time"))
    if seed < 0:
        raise InvalidInputError(fail("cannot search", "seed", seed, ">= 0",
                                     "choose a seed of 0 or more"))
    budget = EFFORTS[effort]
    if time_budget_s is not None:
        budget = replace(budget, deadline=started + time_budget_s)
    if search not in SEARCHES:
        raise InvalidInputError(fail("cannot search", "search", search, f"one of {SEARCHES}",
                                     "choose one of these"))
    make = _plan if search == "relaxation" else _chained
    try:
        plan, proof = plan_with_groups(problem, lambda p: make(p, budget, target_gap, seed))
    except PlanInfeasibleError:
        if not problem.last_resort:
            raise
        problem = problem.in_need()
        plan, proof = plan_with_groups(problem, lambda p: make(p, budget, target_gap, seed))
    check_constraints(plan, problem.constraints)
    notes = {**plan.notes, "effort": effort, "seed": seed, "search": search,
             "allow": sorted(problem.allow)}
    if problem.constraints != Constraints():
        notes["constraints"] = problem.constraints.to_json()
    if problem.overlap:
        notes["overlap_us"] = overlap_to_json(problem.overlap)
    plan = replace(plan, notes=notes)
    lower_us = _proved_us(proof)
    if plan.step_us > lower_us * (1 + _CLOSE):
        # Even stripes over unequal ranks are one tier, which the search, that deals rows to classes
        # of equal ranks, has not; and in inference it may miss by the rounding of its stripes.
        simple = uniform_plan([t.spec for t in problem.tables], problem.machine.world_size)
        plan = _not_slower(plan, simple, problem)
        if not problem.training:
            plan = _not_slower(plan, replicate_or_partition(problem), problem)
    return with_bound(_not_slower(plan, start, problem), problem, lower_us, proof)


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


def _plan(problem: Problem, budget: Effort, target_gap: float, seed: int) -> tuple[Plan, _Proof]:
    """The search and the bound, without the constraints that bind several tables."""
    parts = _subspaces(problem, budget.deadline)
    fitting = [x for x in parts if not x.bound.is_infeasible]
    best = _search_subspaces(fitting, budget, target_gap, seed)
    if not best[1].evaluation.fits:
        raise explain_plan(problem, best[1].evaluation)
    root_us = min(x.root_us for x in fitting)
    plan = _assemble(problem, best[0].bound, best[1])
    step_us = best[1].evaluation.step_us
    notes = {"constants": problem.topology.source,
             "bound": "whole-table configurations, class means",
             "gap_kind": "branching" if any(x.solved for x in fitting) else "relaxation",
             "bound_boxes": sum(x.solved for x in fitting),
             "relaxation_us": root_us}
    return replace(plan, step_us=step_us, notes=notes), _proof(parts)


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
    parts = subspaces(problem, deadline)
    nodes = tighten([x for x in parts if not x.bound.is_infeasible], max_boxes, step_us,
                    step_us / (1 + goal_gap), deadline, partial(Subspace.prove, patiently=True))
    proof = _proof(parts)
    lower_us = _proved_us(proof)
    if is_for(plan, problem) and plan.lower_bound_us > lower_us:
        lower_us, proof = plan.lower_bound_us, proof_of(plan)
    notes = {**plan.notes, "gap_kind": "branching" if nodes else plan.notes.get("gap_kind"),
             "bound_boxes": nodes}
    plan = replace(plan, batch_size=problem.batch_size, step_us=step_us, lower_bound_us=0.0,
                   notes=notes)
    return with_bound(plan, problem, lower_us, proof)


def _proof(parts: list[Subspace]) -> _Proof:
    """What shows the bound of all parts together: no plan is faster than the lesser of `bound_us`
    and of `cutoff_us`, a known step, which may be missing."""
    lower_us = min(x.lower_bound_us for x in parts)
    cutoff_us = min(x.cutoff_us for x in parts)
    return {"bound_us": min(x.uncapped_us for x in parts),
            "cutoff_us": cutoff_us if np.isfinite(cutoff_us) else None,
            "parts": [x.to_json(lower_us) for x in parts]}


def _proved_us(proof: _Proof) -> float:
    cutoff_us = proof["cutoff_us"]
    return float(min(proof["bound_us"], np.inf if cutoff_us is None else cutoff_us))


def _chained(problem: Problem, budget: Effort, target_gap: float, seed: int
             ) -> tuple[Plan, _Proof]:
    """The Markov chain's plan with the bound of the space."""
    parts = _subspaces(problem, budget.deadline)
    plan = markov_chain(problem, seed, budget.max_trials, deadline=budget.deadline,
                        goal_us=parts[0].lower_bound_us * (1 + target_gap))
    if plan is None:
        raise PlanInfeasibleError(no_plan_found(problem, budget.max_trials))
    return replace(plan, step_us=evaluate(plan, problem).step_us), _proof(parts)


def _subspaces(problem: Problem, deadline: float | None) -> list[Subspace]:
    """The parts of the space; raises PlanInfeasibleError where none fits the memory."""
    parts = subspaces(problem, deadline)
    if not fit(parts):
        raise explain_bound(problem, parts[0].bound)
    return parts


def _search_subspaces(parts: list[Subspace], budget: Effort, target_gap: float, seed: int
                     ) -> tuple[Subspace, State]:
    """The best placement of all parts of the space, and bounds tightened around it."""
    best: tuple[Subspace, Found] | None = None
    num_tables = len(parts[0].bound.relaxation.tables)
    nodes = round(budget.max_boxes * 100 / max(50, num_tables))  # each time; more tables, fewer
    relaxation = parts[0].bound.relaxation
    # Prices of several classes across hosts take longer.
    slow = len(relaxation.classes.ranks) > 1 and len(set(relaxation.model.machine.host)) > 1
    # Nodes from which it begins. Large ones are good starts where tables are few, small ones where
    # pieces are many: begin from one of the former and, when a step is known, from the latter.
    turns, shallow = [1, budget.num_starts], max(2, nodes // _SHALLOW)
    if num_tables > _FEW:
        turns = [1, budget.num_starts, 1][:2 if slow else 3]
        shallow = nodes // 2 if slow else nodes
    if num_tables > _MANY:
        nodes = shallow = max(nodes, _LEAST_NODES)
        moves = budget.max_moves * _MANY // num_tables
        budget, turns = replace(budget, max_moves=moves), [1]
    now = time.monotonic()
    first = None if budget.deadline is None else now + 0.3 * max(0.0, budget.deadline - now)
    tighten(parts, shallow, np.inf, np.inf, first)
    # Steps found in parts, their bounds then, and whether it was much the same step again.
    seen: dict[int, tuple[float, float, bool]] = {}
    for turn, num_starts in enumerate(turns):
        if best is not None:
            known = best[1].step_us
            tighten(parts, nodes, known, known / (1 + target_gap), budget.deadline,
                     Subspace.prove)
        for part in sorted(parts, key=lambda x: x.lower_bound_us):
            known = np.inf if best is None else best[1].step_us
            lower_us = min(x.lower_bound_us for x in parts)
            # A part whose own bound is above what is already found cannot hold a better plan.
            enough = max(target_gap, _ENOUGH) if turn == len(turns) - 1 else target_gap
            if best is not None and (budget.over() or known <= max(
                    part.lower_bound_us, lower_us * (1 + enough))):
                continue
            if known <= part.lower_bound_us or any(part.is_part_of(x) for x in parts):
                continue
            step, bound, settled = seen.get(id(part), (0.0, 0.0, False))
            behind = step > _BEHIND * known and part.lower_bound_us < _RISEN * bound
            at_best = 0 < step < part.lower_bound_us * (1 + _NOTHING_LEFT * target_gap)
            if behind or settled or at_best:
                continue
            starts = part.lowest(num_starts)
            looks = budget.num_looks // (2 if turn == 0 and len(turns) > 1 else 1)
            found = search(starts, replace(budget, num_looks=looks), lower_us, target_gap,
                           seed + turn)
            again = num_tables <= _FEW and found.spread < _SETTLED and (
                abs(found.step_us / max(step, 1e-9) - 1) < _SETTLED)
            seen[id(part)] = min(found.step_us, step or np.inf), part.lower_bound_us, again
            if best is None or found.score < best[1].score:
                best = part, found
    assert best is not None
    part, found = best
    if found.is_annealed and (num_tables <= _FEW or not found.state.evaluation.fits):
        lower_us = min(x.lower_bound_us for x in parts)
        found = improved(found, budget, lower_us * (1 + target_gap), seed)
    known = found.step_us
    # Nodes of few tables take less time than one search more.
    left = nodes if num_tables <= _FEW else nodes // (4 if num_tables <= _MANY else 2)
    tighten(parts, left, known, known / (1 + target_gap), budget.deadline, Subspace.prove)
    if num_tables <= _MANY:
        left, enough = nodes * (2 if num_tables <= _FEW else 1), max(target_gap, _ENOUGH)
        tighten(parts, left, known, known / (1 + enough), budget.deadline, Subspace.prove)
    return part, found.state


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
