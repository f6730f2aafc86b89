"""The bound in a plan: whether it applies to a problem, and why not otherwise.

A bound applies to the plans of one relaxed space of one problem. A plan therefore contains a digest
of the problem for which its bound was computed, and its gap is certified only if

* the digest is that of the problem in hand,
* the plan fits, keeps the constraints and lies in the relaxed space, and
* the bound is not above the plan's step. Bounds are not capped, so this would reveal an error.

The plan also contains the proof: the tree and the prices of its leaves, which `verify_plan` checks
without any of the code that found them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oper.plan import Plan
from oper.search.cost.model import evaluate
from oper.search.cost.space import no_solution
from oper.search.problem.digest import problem_digest
from oper.search.problem.statement import Problem

ROUNDING = 1e-6  # of a step, by which sums of many terms may differ; prices have seven digits
_NOTE = "certificate"


def with_bound(plan: Plan, problem: Problem, lower_us: float,
               proof: dict[str, Any] | None = None) -> Plan:
    """`plan` with a bound of the problem's space, or with the reason why the bound does not apply.

    Args:
        plan: a plan with its step, made for the problem.
        problem: the problem.
        lower_us: microseconds; no plan of the relaxed space is faster.
        proof: its proof: `bound_us`, `cutoff_us` and `parts`.
    """
    why = _reason(plan, problem, lower_us)
    certificate = {"problem": problem_digest(problem),
                   **({"not_certified": why} if why else proof or {})}
    return replace(plan, lower_bound_us=0.0 if why else min(lower_us, plan.step_us),
                   notes={**plan.notes, _NOTE: certificate})


def noted(plan: Plan) -> dict[str, Any]:
    """The notes in a plan about its bound; empty if there are none, or they are malformed."""
    found = plan.notes.get(_NOTE)
    return found if isinstance(found, dict) else {}


def proof_of(plan: Plan) -> dict[str, Any]:
    """The proof in a plan; empty if it has none."""
    return {k: x for k, x in noted(plan).items() if k in ("bound_us", "cutoff_us", "parts")}


def is_for(plan: Plan, problem: Problem) -> bool:
    """Whether the plan's bound was computed for this problem."""
    return bool(noted(plan).get("problem") == problem_digest(problem))


def not_certified(plan: Plan, problem: Problem) -> str:
    """Why the plan's bound certifies nothing for `problem`; "" if it does."""
    if plan.lower_bound_us <= 0:
        return str(noted(plan).get("not_certified", "the plan carries no bound"))
    if not is_for(plan, problem):
        return ("the bound is for another problem: its tables, statistics, machine, batch size, "
                "space, constraints, overlap or bits of messages differ")
    return _reason(plan, problem, plan.lower_bound_us)


def _reason(plan: Plan, problem: Problem, lower_us: float) -> str:
    found = evaluate(plan, problem)
    why = no_solution(plan, problem, found)
    if why:
        return why
    if lower_us > found.step_us * (1 + ROUNDING):
        return (f"the bound of {lower_us:.6g} us is above the step of {found.step_us:.6g} us, "
                "which is an error of the planner: report this")
    return "" if lower_us > 0 else "no bound was found"
