"""Whether the bound that a plan carries is about that plan and this problem.

The bound holds for the placements of the relaxed space. A plan that lies outside of it (a pinned
tier, a hand-edited file) may be faster than the bound, and a bound of another problem says nothing.
Such a plan has no bound, and says why.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import numpy as np

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.copies import copy_sets
from oper.search.overlap import overlap_to_json
from oper.search.pieces import COLUMN_STEP, MIN_COLUMNS
from oper.search.problem import Problem, TableProblem
from oper.search.relax import symmetry_classes
from oper.search.space import used_by

PROBLEM, REASON = "problem_digest", "not_certified"  # keys of `Plan.notes`
_ROUNDING = 1e-6  # relative difference of two evaluations of one step


def digest(problem: Problem) -> str:
    """What a bound depends on as a SHA-256 in hexadecimal: tables, access curves, machine, costs,
    space, constraints, overlap."""
    told = {"tables": [t.spec.to_json() for t in problem.tables],
            "topology": asdict(problem.topology), "objective": problem.objective,
            "batch_size": problem.batch_size, "allow": sorted(problem.allow),
            "constraints": problem.constraints.to_json(),
            "overlap_us": overlap_to_json(problem.overlap)}
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for t in problem.tables:
        arrays = [t.edges, t.cumulative, t.traffic.lengths, t.traffic.length_share,
                  np.array([t.traffic.num_ids, t.traffic.num_bags, t.ids_are_positions])]
        if t.spec.name in problem.constraints.tables:  # which may name rows by id
            arrays += [t.explicit_ids, t.explicit]
        for array in arrays:
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def certified(plan: Plan, problem: Problem, step_us: float, lower_bound_us: float,
              root_us: float | None = None) -> Plan:
    """The plan with its step, and with a bound of the problem where that covers the plan.

    Args:
        plan: a plan of the problem.
        step_us: its modelled step.
        lower_bound_us: bound of all plans of the space that are faster than a plan in hand; more
            than `step_us` says that there is none.
        root_us: bound of all plans of the space, none left out; by default `lower_bound_us`.

    Returns:
        The plan; without a bound, and with the reason in ``notes``, where it is not covered.
    """
    root_us = lower_bound_us if root_us is None else root_us
    why = outside(plan, problem)
    if not why and root_us > step_us * (1 + _ROUNDING):
        why = (f"the bound of the space, {root_us:.3f} us, is above the plan's step, which shows a "
               "fault in the bound: please report it")
    if not why and lower_bound_us <= 0:
        why = "no bound was found"
    notes = {k: v for k, v in plan.notes.items() if k != REASON}
    notes[PROBLEM] = digest(problem)
    if why:
        notes[REASON] = why
    return replace(plan, batch_size=problem.batch_size, step_us=step_us, notes=notes,
                   lower_bound_us=0.0 if why else min(lower_bound_us, step_us))


def outside(plan: Plan, problem: Problem) -> str:
    """Why a plan may lie outside of the relaxed space; empty where it lies inside."""
    tiers = [x for t in plan.tables for piece in t.pieces for x in piece.tiers]
    pushes = any(x.placement != "replicated" and x.mode == "push" for x in tiers)
    splits = any(len(t.pieces) > 1 for t in plan.tables)
    copies = not (pushes or splits) and _copies_per_host(problem)
    for t in problem.tables:
        entry = plan.table(t.spec.name)
        held = problem.constraints.tables.get(t.spec.name)
        if held is not None and held.tiers is not None:
            continue  # pinned as a whole, and part of every plan's load
        why = _pieces_outside(problem, t, entry) or next((
            why for piece in entry.pieces for tier in piece.tiers
            if (why := _tier_outside(problem, t, tier, copies))), "")
        if why:
            return f"table {t.spec.name!r} {why}, which the bound does not cover"
    return ""


def _pieces_outside(problem: Problem, t: TableProblem, entry: TablePlan) -> str:
    if len(entry.pieces) > 1 and not (problem.may_split(t) and _edges_fit(entry.pieces)):
        return (f"is split at columns {[p.start for p in entry.pieces[1:]]}, not a multiple of "
                f"{COLUMN_STEP} at least {MIN_COLUMNS} apart" if problem.may_split(t)
                else "is split by columns")
    several = any(len(p.tiers) > 1 for p in entry.pieces)
    if several and not (t.ids_are_positions or entry.head_ids.size):
        return "is cut into tiers of ids that are in no order of frequency"
    return ""


def _edges_fit(pieces: tuple[Piece, ...]) -> bool:
    return all(p.start % COLUMN_STEP == 0 and p.stop - p.start >= MIN_COLUMNS for p in pieces)


def _tier_outside(problem: Problem, t: TableProblem, tier: Tier, copies: bool) -> str:
    """Why a tier is none of the relaxation's options; empty where it is one."""
    if tier.placement == "replicated" and len(tier.ranks) < problem.machine.world_size:
        hosts = sorted(problem.machine.host[list(tier.ranks)].tolist())
        if not copies or hosts != list(range(problem.machine.host_capacity_bytes.size)):
            return f"is replicated on ranks {list(tier.ranks)} alone"
    if tier.memory == "host" and (tier.placement == "replicated" or tier.mode == "push"):
        return "has rows in host memory that are not pulled"
    name = t.spec.name
    owned = tier.placement != "replicated"
    if (used_by(tier, problem.machine.world_size) - problem.allow
            or tier.placement not in problem.placements_of(name)
            or tier.memory not in problem.memories_of(name)
            or (owned and tier.mode not in problem.modes_of(name))):
        mode = f" by {tier.mode}" if owned else ""
        return f"has rows that are {tier.placement}{mode} in {tier.memory} memory"
    held = problem.constraints.tables.get(name)
    if held is not None and held.ranks is not None and not set(tier.ranks) <= set(held.ranks):
        return f"has rows on ranks {list(tier.ranks)}"
    return ""


def _copies_per_host(problem: Problem) -> bool:
    """Whether the relaxation knows copies on one rank of every host."""
    return ("per_host" in problem.allow and bool(copy_sets(problem.machine))
            and len(symmetry_classes(problem).ranks) == 1)
