"""The bound stored in a plan, and the conditions under which it applies to a problem.

A bound applies to the plans of one relaxed space of one problem. A plan therefore stores a digest
of the problem for which its bound was computed, and its gap is certified only if

* the digest equals that of the problem that the plan is evaluated for,
* the plan fits, satisfies the constraints and is in the relaxed space,
* its hottest rows are those of the statistics, in their order, and
* the bound is not above the plan's step time. This is tested before the bound is limited to that
  time, so that an error of the planner is reported instead of hidden.

The plan also stores the proof: branch-and-bound trees and the prices of their leaves. `verify_plan`
checks the proof without any of the code that computed it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from oper.plan import Plan
from oper.search.cost.model import evaluate
from oper.search.cost.space import no_solution
from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.statement import Problem

ROUNDING = 1e-6  # relative rounding error of sums of many terms; prices have seven digits
_NOTE = "certificate"


def problem_digest(problem: Problem) -> str:
    """SHA-256 (hexadecimal) of everything that a bound depends on: tables, access curves, machine,
    costs, objective, batch size, plan space, constraints, overlap and message bits."""
    machine = problem.machine
    stated = {"topology": asdict(problem.topology), "objective": problem.objective,
              "batch_size": problem.batch_size, "allow": sorted(problem.allow),
              "constraints": problem.constraints.to_json(),
              "overlap": overlap_to_json(problem.overlap),
              "tables": [t.spec.to_json() for t in problem.tables],
              "message_bits": problem.message_bits.to_json()}
    out = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode())
    arrays = [machine.capacity_bytes, machine.host_capacity_bytes]
    for t in problem.tables:
        arrays += [t.edges, t.cumulative, t.traffic.lengths, t.traffic.length_share,
                   np.array([t.traffic.num_ids, t.traffic.num_bags, float(t.ids_are_positions)])]
        if t.default_share is not None:
            arrays.append(np.array([t.default_share]))
        if t.traffic.samples_per_bag != 1:
            arrays.append(np.array([t.traffic.samples_per_bag]))
        if t.spec.name in problem.constraints.tables:  # pinned rows may be named by id
            arrays += [t.explicit_ids, t.explicit]
    for x in arrays:
        out.update(f"{x.dtype}{x.shape}".encode())
        out.update(np.ascontiguousarray(x).tobytes())
    return out.hexdigest()


def with_bound(plan: Plan, problem: Problem, lower_us: float,
               proof: dict[str, Any] | None = None) -> Plan:
    """Return `plan` with a bound and its proof, or with the reason why the bound does not apply.

    Args:
        plan: a plan made for the problem, with its `step_us`.
        problem: the problem.
        lower_us: lower bound in microseconds: no plan of the relaxed space is faster.
        proof: the proof of the bound, with the keys ``bound_us``, ``cutoff_us`` and ``parts``; None
            = the bound is stored without proof.
    """
    why = _reason(plan, problem, lower_us)
    certificate = {"problem": problem_digest(problem),
                   **({"not_certified": why} if why else proof or {})}
    return replace(plan, lower_bound_us=0.0 if why else min(lower_us, plan.step_us),
                   notes={**plan.notes, _NOTE: certificate})


def noted(plan: Plan) -> dict[str, Any]:
    """The plan's notes about its bound; empty if there are none or they are malformed."""
    found = plan.notes.get(_NOTE)
    return found if isinstance(found, dict) else {}


def proof_of(plan: Plan) -> dict[str, Any]:
    """The proof stored in a plan; empty if there is none."""
    return {k: x for k, x in noted(plan).items() if k in ("bound_us", "cutoff_us", "parts")}


def is_for(plan: Plan, problem: Problem) -> bool:
    """Whether the plan's bound was computed for this problem."""
    return bool(noted(plan).get("problem") == problem_digest(problem))


def as_bounded(plan: Plan, problem: Problem) -> Problem:
    """The problem, with the features of its fallback if the plan's bound was computed with them."""
    if problem.fallback and is_for(plan, wider := problem.with_fallback()):
        return wider
    return problem


def not_certified(plan: Plan, problem: Problem) -> str:
    """Why the plan's bound certifies nothing for `problem`; "" if it does."""
    if plan.lower_bound_us <= 0:
        return str(noted(plan).get("not_certified", "the plan stores no bound"))
    problem = as_bounded(plan, problem)
    if not is_for(plan, problem):
        return ("the bound is for another problem: its tables, statistics, machine, batch size, "
                "space, constraints, overlap or message bits differ")
    return _reason(plan, problem, plan.lower_bound_us)


def _reason(plan: Plan, problem: Problem, lower_us: float) -> str:
    found = evaluate(plan, problem)
    why = no_solution(plan, problem, found)
    if why:
        return why
    for t in problem.tables:  # the model takes the head for the problem's hottest rows
        head = plan.table(t.spec.name).head_ids
        hottest = np.arange(head.size) if t.ids_are_positions else t.head_ids[:head.size]
        if not np.array_equal(head, hottest):
            return (f"the head of table {t.spec.name!r} has other rows than the hottest ones of "
                    "the statistics, or in another order")
    if lower_us > found.step_us * (1 + ROUNDING):
        return (f"the bound of {lower_us:.6g} us is above the step of {found.step_us:.6g} us, "
                "which is an error of the planner: report this")
    return "" if lower_us > 0 else "no bound was found"
