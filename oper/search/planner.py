"""`make_plan`: the planner's front door."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from oper.errors import InvalidInputError, fail
from oper.plan import Piece, Plan
from oper.search.bound import Bound, solve_relaxation
from oper.search.cost import CostModel, evaluate
from oper.search.heuristic import EFFORTS, Effort, search
from oper.search.infeasible import explain_bound, explain_plan
from oper.search.placing import table_plan
from oper.search.problem import Problem, make_problem
from oper.search.relax import Relaxation
from oper.search.space import EXECUTABLE, Constraints
from oper.search.state import State
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology


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
    allow: Iterable[str] = EXECUTABLE,
) -> Plan:
    """Plan where every row lives, with a certified lower bound of the modelled step.

    Args:
        tables: the tables, in the order of the collection.
        stats: access statistics; None = plan from sizes alone, with one warning.
        topology: the machine; its number of ranks is the plan's world size.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step.
        constraints: what single tables are held to, see `oper.search.space.parse_constraints`.
        effort: ``"fast"`` or ``"thorough"``.
        time_budget_s: seconds after which the best plan so far is returned; None = the effort's
            number of trials decides, and equal seeds give equal plans.
        target_gap: stop when (step - bound) / bound is at most this.
        seed: of the random choices.
        allow: what the plan may use, `oper.search.space.FEATURES`; by default what every runtime of
            this package executes.

    Raises:
        InvalidInputError: an argument is out of range, or the statistics are for other tables.
        PlanInfeasibleError: nothing fits; names need, capacity and the smallest relaxation.
        MissingDependencyError: highspy is not installed.
    """
    problem = make_problem(tables, stats, topology, objective=objective, batch_size=batch_size,
                           allow=allow, constraints=constraints)
    return plan_problem(problem, effort=effort, time_budget_s=time_budget_s, target_gap=target_gap,
                        seed=seed)


def plan_problem(problem: Problem, *, effort: str = "fast", time_budget_s: float | None = None,
                 target_gap: float = 0.01, seed: int = 0) -> Plan:
    """Plan a problem that is already stated; arguments and errors as `make_plan`."""
    started = time.monotonic()
    if effort not in EFFORTS:
        raise InvalidInputError(fail("cannot search", "effort", effort, f"one of {sorted(EFFORTS)}",
                                     "correct it"))
    if target_gap < 0 or (time_budget_s is not None and time_budget_s <= 0):
        raise InvalidInputError(fail("cannot search", "target_gap, time_budget_s",
                                     (target_gap, time_budget_s), ">= 0 and > 0", "correct it"))
    budget = EFFORTS[effort]
    if time_budget_s is not None:
        budget = replace(budget, deadline=started + time_budget_s)
    bound = solve_relaxation(Relaxation(CostModel(problem)), deadline=budget.deadline)
    if bound.overflow > 1e-6:
        raise explain_bound(problem, bound)
    state = _best_state(bound, budget, target_gap, seed)
    if not state.evaluation.fits:
        raise explain_plan(problem, state.evaluation)
    plan = _assemble(problem, bound, state)
    notes = {"effort": effort, "seed": seed, "source": problem.topology.source,
             "bound": "whole-table configurations, class means", "trials_rounds": bound.num_rounds}
    step_us = evaluate(plan, problem).step_us
    return replace(plan, step_us=step_us, lower_bound_us=min(bound.lower_bound_us, step_us),
                   notes=notes)


def _best_state(bound: Bound, budget: Effort, target_gap: float, seed: int) -> State:
    return search(bound, budget, target_gap, seed)


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
