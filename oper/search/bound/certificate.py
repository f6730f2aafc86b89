"""Whether a plan's lower bound holds for a problem, and why not where it does not.

A bound is about the plans of one relaxed space of one problem. A plan therefore carries a digest of
the problem that its bound was computed for, and its gap is certified only where

* the digest is that of the problem in hand,
* the plan fits, keeps the constraints and lies in the relaxed space, and
* the bound is not above the plan's step, which would show an error: nothing caps a bound.

The plan also carries the proof: the tree and the prices of its leaves (`part_to_json`), which
`oper.search.verify` checks without any of this code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from oper.plan import Plan
from oper.search.bound.branching import SearchTree, TreeNode
from oper.search.bound.master import Bound
from oper.search.bound.relaxation import Relaxation
from oper.search.cost.model import evaluate
from oper.search.cost.space import no_solution
from oper.search.problem.digest import problem_digest
from oper.search.problem.machine import GROUPS
from oper.search.problem.statement import Problem

_ROUNDING = 1e-6  # of a step, by which sums of many terms may differ
_SLACK = 1e-9  # by which bounds of barriers added and taken off may differ
_NOTE = "certificate"


def with_bound(plan: Plan, problem: Problem, lower_us: float,
               proof: dict[str, Any] | None = None) -> Plan:
    """`plan` with a bound of the problem's space, or with the reason why that does not certify it.

    Args:
        plan: a plan with its step, made for the problem.
        problem: the problem.
        lower_us: microseconds; no plan of the relaxed space is faster.
        proof: what shows it: `bound_us`, `cutoff_us` and `parts`.
    """
    why = _reason(plan, problem, lower_us)
    certificate = {"problem": problem_digest(problem), **(proof or {})}
    if why:
        certificate = {"problem": certificate["problem"], "not_certified": why}
    return replace(plan, lower_bound_us=0.0 if why else min(lower_us, plan.step_us),
                   notes={**plan.notes, _NOTE: certificate})


def proof_of(plan: Plan) -> dict[str, Any]:
    """The proof that a plan carries; empty where it has none."""
    noted = _noted(plan)
    return {k: noted[k] for k in ("bound_us", "cutoff_us", "parts") if k in noted}


def part_to_json(tree: SearchTree, plans: tuple[str, ...], target_us: float) -> dict[str, Any]:
    """A part of a proof: the tree down to nodes whose bound is at least `target_us`, with the
    branching of every inner node and the prices of every leaf.

    `rows` names what a price is for: a microsecond of a class of ranks in a phase and group of
    terms, the memory of a class of domains or hosts (see `oper.search.cost.space.model_classes`), a
    row about the owner of the largest piece.
    """
    relaxation = tree.bound.relaxation
    model, classes, uses_host = (relaxation.model, relaxation.classes, relaxation.rows.uses_host)
    by_load = relaxation.distinguished
    load = None if by_load is None else _load_name(relaxation, by_load)
    return {
        "plans": list(plans), "apart": load,
        "rows": [
            *(["load", model.phases[p], g, c] for p, g, c in relaxation.rows.names),
            *(["memory", k] for k in range(classes.num_domain_classes)),
            *(["host memory", k] for k in range(classes.num_host_classes) if uses_host),
            *([x.kind, *_load_name(relaxation, x.at)] for x in relaxation.inequalities)],
        "tree": _tree_to_json(tree.root, target_us)}


def _load_name(relaxation: Relaxation, load: tuple[int, int]) -> list[str]:
    return [relaxation.model.phases[load[0]], GROUPS[load[1]]]


def _tree_to_json(node: TreeNode, target_us: float) -> dict[str, Any]:
    # A child that was left early has its parent's bound, but not its prices.
    if node.branching is None or node.bound.lower_bound_us >= target_us * (1 - _SLACK):
        return {"prices": _prices_to_json(node.bound)}
    relaxation, at = node.bound.relaxation, node.branching.at
    parts = [_tree_to_json(x, target_us) for x in node.children]
    if isinstance(at, int):
        return {"table": relaxation.tables[at].spec.name, "parts": parts}
    at_us = float(node.branching.children[1].limits.least[at])
    return {"load": _load_name(relaxation, at), "at_us": at_us, "parts": parts}


def _prices_to_json(bound: Bound) -> dict[str, float]:
    prices = bound.relaxation.project_prices(bound.prices)
    return {str(k): float(f"{prices[k]:.7g}") for k in np.flatnonzero(prices).tolist()}


def not_certified(plan: Plan, problem: Problem) -> str:
    """Why the plan's bound certifies nothing for `problem`; empty where it does."""
    noted = _noted(plan)
    if plan.lower_bound_us <= 0:
        return str(noted.get("not_certified", "the plan carries no bound"))
    if not is_for(plan, problem):
        return ("the bound is for another problem: its tables, statistics, machine, batch size, "
                "space, constraints, overlap or bits of messages differ")
    return _reason(plan, problem, plan.lower_bound_us)


def is_for(plan: Plan, problem: Problem) -> bool:
    """Whether the plan's bound was computed for this problem."""
    return bool(_noted(plan).get("problem") == problem_digest(problem))


def _noted(plan: Plan) -> dict[str, Any]:
    """What a plan's file says of its bound; empty where it says nothing, or no such thing."""
    noted = plan.notes.get(_NOTE)
    return noted if isinstance(noted, dict) else {}


def _reason(plan: Plan, problem: Problem, lower_us: float) -> str:
    found = evaluate(plan, problem)
    why = no_solution(plan, problem, found)
    if why:
        return why
    if lower_us > found.step_us * (1 + _ROUNDING):
        return (f"the bound of {lower_us:.6g} us is above the step of {found.step_us:.6g} us, "
                "which is an error of the planner: report this")
    return "" if lower_us > 0 else "no bound was found"
