"""Whether a plan's lower bound holds for a problem, and why not where it does not.

A bound is about the plans of one relaxed space of one problem. A plan therefore carries a digest of
the problem that its bound was computed for, and its gap is certified only where

* the digest is that of the problem in hand,
* the plan fits, keeps the constraints and lies in the relaxed space, and
* the bound is not above the plan's step, which would show an error: nothing caps a bound.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.search.bound.pieces import COLUMN_STEP, MIN_COLUMNS
from oper.search.bound.relaxation import has_copies
from oper.search.cost.model import CostModel, evaluate, is_ordered
from oper.search.problem.constraints import violations
from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.space import used_by
from oper.search.problem.statement import Problem, TableProblem

_ROUNDING = 1e-6  # of a step, by which sums of many terms may differ
_NOTE = "certificate"


def problem_digest(problem: Problem) -> str:
    """SHA-256 (hexadecimal) of all that a bound depends on: tables, access curves, machine, costs,
    objective, batch size, space, constraints and overlap."""
    machine = problem.machine
    stated = {"topology": asdict(problem.topology), "objective": problem.objective,
              "batch_size": problem.batch_size, "allow": sorted(problem.allow),
              "constraints": problem.constraints.to_json(),
              "overlap": overlap_to_json(problem.overlap),
              "tables": [t.spec.to_json() for t in problem.tables]}
    out = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode())
    arrays = [machine.capacity_bytes, machine.host_capacity_bytes]
    for t in problem.tables:
        arrays += [t.edges, t.cumulative, t.traffic.lengths, t.traffic.length_share,
                   np.array([t.traffic.num_ids, t.traffic.num_bags, float(t.ids_are_positions)])]
        if t.spec.name in problem.constraints.tables:  # pinned rows may be named by id
            arrays += [t.explicit_ids, t.explicit]
    for x in arrays:
        out.update(f"{x.dtype}{x.shape}".encode())
        out.update(np.ascontiguousarray(x).tobytes())
    return out.hexdigest()


def with_bound(plan: Plan, problem: Problem, lower_us: float) -> Plan:
    """`plan` with a bound of the problem's space, or with the reason why that does not certify it.

    Args:
        plan: a plan with its step, made for the problem.
        problem: the problem.
        lower_us: microseconds; no plan of the relaxed space is faster.
    """
    why = _reason(plan, problem, lower_us)
    certificate = {"problem": problem_digest(problem)}
    if why:
        certificate["not_certified"] = why
    return replace(plan, lower_bound_us=0.0 if why else min(lower_us, plan.step_us),
                   notes={**plan.notes, _NOTE: certificate})


def not_certified(plan: Plan, problem: Problem) -> str:
    """Why the plan's bound certifies nothing for `problem`; empty where it does."""
    noted = plan.notes.get(_NOTE)
    noted = noted if isinstance(noted, dict) else {}
    if plan.lower_bound_us <= 0:
        return str(noted.get("not_certified", "the plan carries no bound"))
    if not is_for(plan, problem):
        return ("the bound is for another problem: its tables, statistics, machine, batch size, "
                "space, constraints or overlap differ")
    return _reason(plan, problem, plan.lower_bound_us)


def is_for(plan: Plan, problem: Problem) -> bool:
    """Whether the plan's bound was computed for this problem."""
    noted: Any = plan.notes.get(_NOTE)
    return isinstance(noted, dict) and noted.get("problem") == problem_digest(problem)


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
        if held is not None and held.pinned and not is_ordered(t, entry) and any(
                len(p.tiers) > 1 for p in entry.pieces):
            return f"table {t.spec.name!r} has pinned rows, and no hotness order"
    return ""


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
