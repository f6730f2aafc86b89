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

from oper.plan import Piece, Plan, Tier
from oper.search.bound.branching import SearchTree, TreeNode
from oper.search.bound.master import Bound
from oper.search.bound.pieces import COLUMN_STEP, MIN_COLUMNS
from oper.search.bound.relaxation import Relaxation, has_copies
from oper.search.cost.model import CostModel, evaluate, is_ordered
from oper.search.problem.constraints import TableConstraint, violations
from oper.search.problem.digest import problem_digest
from oper.search.problem.machine import GROUPS
from oper.search.problem.space import MAX_REPLICATED, used_by
from oper.search.problem.statement import Problem, TableProblem

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

    Classes of ranks, memories and hosts are listed by what prices do not tell apart; `rows` names
    what a price is for: a microsecond of a class in a phase and group of terms, a whole memory, or
    a row about the owner of the largest piece.
    """
    relaxation = tree.bound.relaxation
    model, classes = relaxation.model, relaxation.classes
    by_load = relaxation.distinguished
    load = None if by_load is None else _load_name(relaxation, by_load)
    return {
        "plans": list(plans), "apart": load,
        "classes": [r.tolist() for r in classes.ranks],
        "memories": _groups(classes.of_domain),
        "hosts": _groups(classes.of_host) if relaxation.rows.uses_host else [],
        "own_time_beside_reader": relaxation.pieces.beside_reader,
        "rows": [
            *(["load", model.phases[p], g, c] for p, g, c in relaxation.rows.names),
            *(["memory", k] for k in range(classes.num_domain_classes)),
            *(["host memory", k] for k in range(
                classes.num_host_classes if relaxation.rows.uses_host else 0)),
            *([kind, *_load_name(relaxation, (p, g))] for kind, (_, p, g) in zip(
                relaxation.inequality_kinds, relaxation.inequalities, strict=True))],
        "tree": _tree_to_json(tree.root, target_us)}


def _groups(of: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(of == k).tolist() for k in range(int(of.max()) + 1)]


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
                "space, constraints or overlap differ")
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
    if not found.fits:
        return "the plan does not fit the memory"
    broken = violations(plan, problem.constraints)
    if broken:
        return f"the plan breaks a constraint: {broken[0]}"
    outside = outside_space(plan, problem)
    if outside:
        return f"the plan lies outside the space of the bound: {outside}"
    if lower_us > found.step_us * (1 + _ROUNDING):
        return (f"the bound of {lower_us:.6g} us is above the step of {found.step_us:.6g} us, "
                "which is an error of the planner: report this")
    return "" if lower_us > 0 else "no bound was found"


def outside_space(plan: Plan, problem: Problem) -> str:
    """What of a plan the relaxation has no configuration for; empty where it has all.

    Tables and rows that are pinned are not asked: the relaxation takes exactly their cost.
    """
    free = [(t, piece, tier) for t in problem.tables for piece in plan.table(t.spec.name).pieces
            for tier in piece.tiers if not _is_pinned(problem, t, tier)]
    pushes = any(x.mode == "push" and x.placement != "replicated" for _, _, x in free)
    copies: bool | None = None
    for t, piece, tier in free:
        name = f"table {t.spec.name!r}"
        extra = sorted(used_by(tier, plan.world_size) - problem.allow)
        if extra:
            return f"{name} uses {extra}, which the space has not"
        if len(plan.table(t.spec.name).pieces) > 1 and not problem.may_split(t):
            return f"{name} is cut by columns"
        if tier.memory == "host" and (tier.placement == "replicated" or tier.mode == "push"):
            return f"{name} has rows in host memory that are not pulled"
        if tier.placement == "replicated":
            if len(tier.ranks) < plan.world_size:
                copies = has_copies(CostModel(problem)) if copies is None else copies
                if not copies or pushes or not _one_per_host(problem, tier):
                    return f"{name} is replicated on ranks {list(tier.ranks)}"
        elif tier.mode == "push" and not _has_width(t, piece):
            return f"{name} pushes columns {piece.start}:{piece.stop}"
    for t in problem.tables:
        held = problem.constraints.tables.get(t.spec.name)
        entry = plan.table(t.spec.name)
        if any(sum(x.placement == "replicated" and len(x.ranks) == plan.world_size
                   and not _is_pinned(problem, t, x) for x in piece.tiers)
               > MAX_REPLICATED + len(problem.pinned_of(t.spec.name)) for piece in entry.pieces):
            return f"table {t.spec.name!r} has more than {MAX_REPLICATED} replicated tiers"
        ordered = is_ordered(t, entry)
        if held is not None and ordered != _is_taken_as_ordered(t, held, ordered):
            return (f"table {t.spec.name!r} has {'a' if ordered else 'no'} hotness order, and its "
                    "pinned rows are priced otherwise")
        if held is not None and held.pinned and not ordered and any(
                len(p.tiers) > 1 for p in entry.pieces):
            return f"table {t.spec.name!r} has pinned rows, and no hotness order"
    return ""


def _is_taken_as_ordered(t: TableProblem, held: TableConstraint, other: bool) -> bool:
    """Whether the relaxation takes positions of a wholly pinned table to be hotness ranks; `other`
    where it is not wholly pinned."""
    if held.tiers is not None:
        return t.ids_are_positions or len(held.tiers) > 1
    whole = len(held.pinned) == 1 and (
        held.pinned[0].stop - held.pinned[0].start == t.spec.num_rows)
    return t.ids_are_positions if whole else other


def _is_pinned(problem: Problem, t: TableProblem, tier: Tier) -> bool:
    held = problem.constraints.tables.get(t.spec.name)
    return held is not None and (held.tiers is not None or tier in held.pinned)


def _one_per_host(problem: Problem, tier: Tier) -> bool:
    hosts = problem.machine.host[list(tier.ranks)].tolist()
    return sorted(hosts) == list(range(int(problem.machine.host.max()) + 1))


def _has_width(t: TableProblem, piece: Piece) -> bool:
    """Whether the relaxation has pushed pieces of this width (see `oper.search.bound.pieces`)."""
    width = piece.stop - piece.start
    return width == t.spec.dim or (width >= MIN_COLUMNS and (
        width % COLUMN_STEP == 0 or (t.spec.dim - width) % COLUMN_STEP == 0))
