"""`make_plan`, the planner's entry point."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import PlanInfeasibleError, require
from oper.messages import EXACT, MessageBits
from oper.plan import Plan, TablePlan, uniform_plan
from oper.ranges import Rule
from oper.search.branching.subspaces import Subspace, fit, subspaces, tighten
from oper.search.certificate.carried import as_bounded, is_for, proof_of, with_bound
from oper.search.cost.model import Evaluation, evaluate
from oper.search.cost.space import outside_space
from oper.search.explain.infeasible import explain_bound, explain_plan
from oper.search.peers.baselines import replicate_or_partition
from oper.search.problem.constraints import Constraints, check_constraints, violations
from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.space import used_features
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.search.replica_groups import plan_groups
from oper.search.rounding.groups import plan_with_groups
from oper.search.rounding.placing import plan_of, table_plan
from oper.search.rounding.search import EFFORTS, Effort, Found, search
from oper.search.variance import MOST_PLANS, plan_within
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

_CLOSE = 1e-6  # a plan whose gap is at most this is not compared with simple plans
_MORE = 1.1  # limit of the gap of a plan that is kept, as a multiple of the gap its search left
_SHARE = 5  # divides the work of raising a bound if there is a proof of a similar problem
_WORK = 200_000  # default of `tighten_bound(max_work=)` if there is no time limit
_LEFT = "search_gap"  # a plan's note: the gap left by a search that had time but missed its target
_OPTIONS = ("effort", "seed", "allow", "constraints")  # notes of the options of a search
_Proof = dict[str, Any]  # see `_proof`
_LEAST_0, _ABOVE_0 = Rule(lambda x: x >= 0, ">= 0"), Rule(lambda x: x > 0, "> 0")  # refuse NaN


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
    message_bits: int | tuple[int, int] | Mapping[str, Any] | MessageBits = EXACT,
    message_variance: float | None = None,
    synchronize_every: int | None = None,
    synchronize_delay: int = 0,
    synchronize_bits: int = 32,
) -> Plan:
    """Return a plan of where every row is stored, with a certified bound on the modelled step time.

    Args:
        tables: the tables, in the order of the collection.
        stats: access statistics; None = assume equally hot rows, and warn once.
        topology: the machine; its number of ranks is the plan's world size.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step.
        constraints: constraints that the plan must satisfy, see `oper.search.problem.constraints`.
        effort: ``"fast"`` or ``"thorough"``.
        time_budget_s: seconds after which the best plan so far is returned. None = stop after the
            number of trials that `effort` sets; equal seeds then give equal plans.
        target_gap: stop when (step time - bound) / bound is at most this.
        seed: seed of the random choices.
        allow: features that the plan may use, from `oper.search.problem.space.FEATURES`. Default:
            those that the runtimes execute well on this topology, and host memory if the rows do
            not fit without it.
        overlap: ``{phase: microseconds}``, dense compute during which a phase can run, see
            `oper.search.problem.overlap`. Default: no overlap.
        message_bits: bits per number in messages between hosts: 32 (exact), 16, 8 or 4, or a pair
            (for answers to lookups, for gradients), or a mapping from table names to either, with
            other tables exact; see `oper.messages`.
        message_variance: if given, the planner chooses the bits by table, such that steps are
            short and the mean squared error of rounding is at most this share of the mean square of
            rows read and of their gradients; see `oper.search.variance`. Default: `message_bits`.
        synchronize_every: number of updates between two synchronizations of replica groups. If
            given, for training only, the planner chooses the number of groups, and the plan is for
            the ranks of one group; see `oper.search.replica_groups`. Default: one group.
        synchronize_delay: number of updates during which the rows of a synchronization are sent, at
            most `synchronize_every`; must be 0 if `synchronize_every` is 1. See `oper.shard`.
        synchronize_bits: bits per number in messages between replica groups: 32, 16 or 8; see
            `oper.shard`.

    Raises:
        InvalidInputError: an argument is out of range, or the statistics are for other tables.
        PlanInfeasibleError: no plan fits; the message states the memory needed, the capacity, and
            the smallest change with which a plan fits.
        MissingDependencyError: the planner's native library cannot be used.
    """
    tables = list(tables)

    def plan_on(machine: Topology, share: float = 1.0) -> Plan:
        limit = time_budget_s
        if limit is not None and _ABOVE_0.allows(limit, float):  # `plan_problem` refuses others
            limit *= share
        problem = make_problem(tables, stats, machine, objective=objective, batch_size=batch_size,
                               allow=allow, constraints=constraints)
        problem = replace(with_overlap(problem, overlap),
                          message_bits=MessageBits.parse(message_bits))
        return plan_problem(problem, effort=effort, time_budget_s=limit, target_gap=target_gap,
                            seed=seed, message_variance=message_variance)

    if synchronize_every is None:
        require("cannot plan replica groups", "give synchronize_every as well", (
            "synchronize_delay", synchronize_delay, synchronize_delay == 0, "0 for one group"), (
            "synchronize_bits", synchronize_bits, synchronize_bits == 32, "32 for one group"))
        return plan_on(topology)
    require("cannot plan replica groups", "leave synchronize_every out", (
        "objective", objective, objective == "training", "training"))
    return plan_groups(topology, (synchronize_every, synchronize_delay), synchronize_bits, stats,
                       plan_on)


def plan_problem(problem: Problem, *, effort: str = "fast", time_budget_s: float | None = None,
                 target_gap: float = 0.01, seed: int = 0, start: Plan | None = None,
                 message_variance: float | None = None) -> Plan:
    """Plan a problem made by `make_problem`; other arguments and errors are those of `make_plan`.

    Args:
        start: a plan of the same tables and ranks. If it uses only allowed features, fits the
            memory and satisfies the constraints, the result is never slower. Planning with more
            memory, started from a plan made with less, therefore never gives a slower plan. A plan
            made from other statistics keeps its tiers, which then hold the rows that are hottest
            now. There is no search if the gap of `start` in this problem is at most `target_gap`,
            or hardly larger than the gap that an earlier search with the same options left: then
            `start` is returned with a new bound, found with the branchings of its old proof.
    """
    started = time.monotonic()
    require("cannot search for a plan", "pass effort 'fast' or 'thorough', target_gap and seed of "
            "at least 0, and a positive time_budget_s or None",
            ("effort", effort, isinstance(effort, str) and effort in EFFORTS,
             f"one of {sorted(EFFORTS)}"),
            ("target_gap", target_gap, _LEAST_0.allows(target_gap, float), "a number >= 0"),
            ("time_budget_s", time_budget_s,
             time_budget_s is None or _ABOVE_0.allows(time_budget_s, float), "a number > 0"),
            ("seed", seed, _LEAST_0.allows(seed, int), "an integer >= 0"))
    seed = int(seed)  # not a number of NumPy, which JSON cannot represent
    time_budget_s = None if time_budget_s is None else float(time_budget_s)
    if message_variance is not None:
        require("cannot choose the bits of messages", "give one of the two",
                ("message_bits", problem.message_bits.to_json(), problem.message_bits == EXACT,
                 "32, if message_variance is given"))
        share = None if time_budget_s is None else time_budget_s / MOST_PLANS
        return plan_within(problem, message_variance, lambda p, x: plan_problem(
            p, effort=effort, time_budget_s=share, target_gap=target_gap, seed=seed,
            start=start if x is None else x))
    problem.message_bits.check_for(t.spec for t in problem.tables)
    budget = EFFORTS[effort]
    if time_budget_s is not None:
        budget = replace(budget, deadline=started + time_budget_s)
    if start is not None:
        start = _restated(start, problem)
        kept = _kept(start, problem, budget, target_gap, _options(problem, effort, seed))
        if kept is not None:
            plan, proof = kept
            return with_bound(_noted(plan, problem, effort, seed, time_budget_s), problem,
                              _proved_us(proof), proof)
    problem, plan, proof = _searched(problem, start, budget, target_gap, seed)
    check_constraints(plan, problem.constraints)
    plan = _noted(plan, problem, effort, seed, time_budget_s)
    lower_us = _proved_us(proof)
    if plan.step_us > lower_us * (1 + _CLOSE):
        # The search assigns rows to classes of equal ranks, so it does not produce one tier striped
        # evenly over unequal ranks; for inference, rounding may also make its stripes slower.
        simple = uniform_plan([t.spec for t in problem.tables], problem.machine.world_size)
        plan = _not_slower(plan, simple, problem)
        if not problem.training:
            plan = _not_slower(plan, replicate_or_partition(problem), problem)
    plan = with_bound(_not_slower(plan, start, problem), problem, lower_us, proof)
    if plan.gap > target_gap and time_budget_s is None:
        plan = replace(plan, notes={**plan.notes, _LEFT: plan.gap})
    return plan


def _options(problem: Problem, effort: str, seed: int) -> dict[str, Any]:
    """The search's options, without a time limit, for the notes of its plan."""
    found = {"effort": effort, "seed": seed, "allow": sorted(problem.allow)}
    if problem.constraints != Constraints():
        found["constraints"] = problem.constraints.to_json()
    return found


def _noted(plan: Plan, problem: Problem, effort: str, seed: int, time_budget_s: float | None
           ) -> Plan:
    """The plan with notes of how it was made."""
    notes = {**plan.notes, **_options(problem, effort, seed)}
    if time_budget_s is not None:
        notes["time_budget_s"] = time_budget_s
    if problem.overlap:
        notes["overlap_us"] = overlap_to_json(problem.overlap)
    return replace(plan, notes=notes, message_bits=problem.message_bits)


def _restated(start: Plan, problem: Problem) -> Plan:
    """`start` with the hotness order of the problem: its tiers keep their numbers of rows.

    The cost model takes a plan's head for the hottest rows of the problem's statistics. It would
    attribute other rows to the tiers of a plan that was made from other statistics.
    """
    start.check_for([t.spec for t in problem.tables], problem.machine.world_size)
    tables = []
    for t in problem.tables:
        entry = start.table(t.spec.name)
        new = table_plan(t, entry.pieces)
        tables.append(entry if np.array_equal(entry.head_ids, new.head_ids) else new)
    return replace(start, tables=tuple(tables), message_bits=problem.message_bits)


def _kept(start: Plan, problem: Problem, budget: Effort, target_gap: float,
          options: dict[str, Any]) -> tuple[Plan, _Proof] | None:
    """`start` with a proof for this problem, if that shows it to be as good as a search would.

    It is as good if its gap is at most `target_gap`, or not much larger than the gap that a search
    with the same options and without a time limit left, which is noted in the plan: at most a tenth
    larger, and by at most `target_gap`. This note is passed on from plan to plan unchanged, so that
    gaps do not grow each time that a plan is kept. A search that ended because it had reached its
    own `target_gap` leaves no note.
    """
    found, proof = evaluate(start, problem), proof_of(start)
    planned = start.notes.get("effort") == options["effort"] and (
        "time_budget_s" not in start.notes)
    if not (proof and planned and start.gap >= 0 and _is_allowed(start, found, problem)
            and not outside_space(start, problem)):
        return None
    left = start.notes.get(_LEFT)
    if not isinstance(left, float) or json.dumps([start.notes.get(x) for x in _OPTIONS]) != (
            json.dumps([options.get(x) for x in _OPTIONS])):
        left = 0.0
    goal_us = found.step_us / (1 + max(target_gap, min(_MORE * left, left + target_gap)))
    parts = subspaces(problem, budget.deadline)
    fitting = [x for x in parts if not x.bound.is_infeasible]
    if not fitting:
        return None
    try:
        for part in fitting:
            part.grow_as(proof, found.step_us, found.step_us / start.step_us)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None  # the notes of a plan that no planner wrote
    tighten(fitting, budget.max_work // _SHARE, found.step_us, goal_us, budget.deadline)
    lower_us = min(x.lower_bound_us for x in fitting)
    if not lower_us >= goal_us:  # also if a price is not a number
        return None
    plan = _made(start.tables, problem, found.step_us, parts)
    notes = {**plan.notes, "bound_method": "branching"} | ({_LEFT: left} if left else {})
    return replace(plan, notes=notes), _proof(parts)


def _made(tables: tuple[TablePlan, ...], problem: Problem, step_us: float, parts: list[Subspace]
          ) -> Plan:
    """A plan with notes of how its bound was found; `parts` bound all plans."""
    fitting = [x for x in parts if not x.bound.is_infeasible]
    notes = {"constants": problem.topology.source,
             "bound_method": "branching" if any(x.solved for x in fitting) else "relaxation",
             "bnb_nodes": sum(x.solved for x in fitting),
             "relaxation_us": min(x.root_us for x in fitting)}
    return Plan(problem.machine.world_size, tables, problem.objective, problem.batch_size,
                problem.topology.name, step_us, notes=notes)


def _is_allowed(plan: Plan, found: Evaluation, problem: Problem) -> bool:
    """Whether a plan with this evaluation fits the memory, uses only allowed features and satisfies
    the constraints."""
    used = used_features(plan, (t.spec.name for t in problem.free_tables))
    return found.fits and used <= problem.allow and not violations(plan, problem.constraints)


def _not_slower(plan: Plan, start: Plan | None, problem: Problem) -> Plan:
    """`plan`, with the placement of `start` if that is allowed and faster."""
    if start is None:
        return plan
    found = evaluate(start, problem)
    if not (_is_allowed(start, found, problem) and found.step_us < plan.step_us):
        return plan
    return replace(plan, tables=start.tables, step_us=found.step_us)


def _searched(problem: Problem, start: Plan | None, budget: Effort, target_gap: float, seed: int
              ) -> tuple[Problem, Plan, _Proof]:
    """Search a problem, and if no plan fits, again with the features of its fallback.

    Returns:
        The problem with the features that were allowed, the plan, and the proof of its bound. The
        plan is `start` if the search finds none and `start` fits: if memory is scarce, few plans
        fit, and the search may miss them all.
    """
    try:
        return problem, *plan_with_groups(problem, lambda p: _plan(p, budget, target_gap, seed))
    except PlanInfeasibleError:
        if problem.fallback:
            return _searched(problem.with_fallback(), start, budget, target_gap, seed)
        if start is None:
            raise
        found = evaluate(start, problem)
        if not _is_allowed(start, found, problem):
            raise
    parts = subspaces(problem, budget.deadline)
    return problem, _made(start.tables, problem, found.step_us, parts), _proof(parts)


def _plan(problem: Problem, budget: Effort, target_gap: float, seed: int) -> tuple[Plan, _Proof]:
    """Search and bound a problem without `keep_together` and `keep_apart` groups."""
    parts = subspaces(problem, budget.deadline)
    if not fit(parts):
        raise explain_bound(problem, parts[0].bound)
    fitting = [x for x in parts if not x.bound.is_infeasible]
    best = _search_subspaces(fitting, budget, target_gap, seed)
    if not best[1].evaluation.fits:
        raise explain_plan(problem, best[1].evaluation)
    tables = best[0].bound.relaxation.tables
    plan = plan_of(problem, {t.spec.name: pieces for t, pieces in zip(
        tables, best[1].placements, strict=True)})
    return _made(plan.tables, problem, best[1].step_us, parts), _proof(parts)


def tighten_bound(plan: Plan, problem: Problem, *, goal_gap: float = 0.0,
                  max_work: int | None = None, time_budget_s: float | None = None) -> Plan:
    """Return the plan with its lower bound raised by branch and price, beyond what planning does.

    Args:
        plan: a plan of the problem that fits the memory.
        problem: the problem.
        goal_gap: stop when the gap is at most this.
        max_work: approximate number of tables to price while branching. Default: unlimited if
            `time_budget_s` is given, else 200,000.
        time_budget_s: seconds after which the best bound so far is returned; None = no limit.

    Raises:
        PlanError: the plan is for other tables or another number of ranks.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    if max_work is None:
        max_work = _WORK if deadline is None else sys.maxsize
    problem = as_bounded(plan, problem)
    step_us = evaluate(plan, problem).step_us
    parts = subspaces(problem, deadline)
    nodes = tighten([x for x in parts if not x.bound.is_infeasible], max_work, step_us,
                    step_us / (1 + goal_gap), deadline)
    proof = _proof(parts)
    lower_us = _proved_us(proof)
    if is_for(plan, problem) and plan.lower_bound_us > lower_us:
        lower_us, proof = plan.lower_bound_us, proof_of(plan)
    notes = {**plan.notes, "bound_method": "branching" if nodes else plan.notes.get("bound_method"),
             "bnb_nodes": nodes}
    plan = replace(plan, batch_size=problem.batch_size, step_us=step_us, lower_bound_us=0.0,
                   notes=notes)
    return with_bound(plan, problem, lower_us, proof)


def _proof(parts: list[Subspace]) -> _Proof:
    """The proof of the bound over all parts: no plan is faster than min(`bound_us`, `cutoff_us`).

    The cutoff is the step time of a known plan; None if there is none.
    """
    lower_us = min(x.lower_bound_us for x in parts)
    cutoff_us = min(x.cutoff_us for x in parts)
    return {"bound_us": min(x.uncapped_us for x in parts),
            "cutoff_us": cutoff_us if np.isfinite(cutoff_us) else None,
            "parts": [x.to_json(lower_us) for x in parts]}


def _proved_us(proof: _Proof) -> float:
    cutoff_us = proof["cutoff_us"]
    return float(min(proof["bound_us"], np.inf if cutoff_us is None else cutoff_us))


def _search_subspaces(parts: list[Subspace], budget: Effort, target_gap: float, seed: int
                     ) -> tuple[Subspace, Found]:
    """Return the best placement found in any part, after raising the parts' bounds.

    Every part that may contain the best plan is searched from its node with the least bound. The
    part with the best placement is then branched on, with that placement's step time as cutoff,
    and searched again from several nodes.
    """
    now = time.monotonic()
    first = None if budget.deadline is None else now + 0.3 * max(0.0, budget.deadline - now)
    tighten(parts, budget.max_work // 2, np.inf, np.inf, first)  # gives better starting solutions
    best: tuple[Subspace, Found] | None = None

    def is_enough() -> bool:
        lower_us = min(x.lower_bound_us for x in parts)
        return best is not None and (
            budget.over() or best[1].step_us <= lower_us * (1 + target_gap))

    for part in sorted(parts, key=lambda x: x.lower_bound_us):
        known = np.inf if best is None else best[1].step_us
        if is_enough() or known <= part.lower_bound_us or any(part.is_part_of(x) for x in parts):
            continue
        lower_us = min(x.lower_bound_us for x in parts)
        found = search(part.lowest(1), budget, lower_us, target_gap, seed)
        if best is None or found.score < best[1].score:
            best = part, found
    assert best is not None
    for turn in range(2):
        part, found = best
        tighten(parts, budget.max_work, found.step_us, found.step_us / (1 + target_gap),
                budget.deadline)
        if turn == 1 or is_enough() or found.step_us <= part.lower_bound_us:
            break
        again = search(part.lowest(budget.num_starts), budget,
                       min(x.lower_bound_us for x in parts), target_gap, seed + 1)
        best = part, min(found, again, key=lambda x: x.score)
    return best
