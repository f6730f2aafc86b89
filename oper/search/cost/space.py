"""The space of plans that bounds are about: which plans lie in it, and what parts it has.

It is part of the statement of the problem: the relaxation bounds the plans of this space, the
checker asks whether a plan is one of them, and neither asks the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.rows.traffic import ROW_WISE
from oper.search.cost.model import CostModel, Evaluation, is_ordered
from oper.search.problem.constraints import TableConstraint, violations
from oper.search.problem.machine import RankClasses, copy_sets, rank_classes
from oper.search.problem.space import (
    COLUMN_STEP,
    MAX_REPLICATED,
    MIN_COLUMNS,
    used_by,
)
from oper.search.problem.statement import Problem, TableProblem

_MAX_HIDDEN_SETS = 4


def model_classes(model: CostModel, distinguished: Iterable[Iterable[int]] = ()) -> RankClasses:
    """Classes of ranks that machine, constraints and the sets `distinguished` do not tell apart.

    Dense compute that overlaps the phases also separates ranks, but only where it takes few
    distinct values: with many, averaging over unequal ranks bounds more loosely but keeps the
    relaxation small.
    """
    held = model.problem.constraints.tables.values()
    hidden = [np.flatnonzero((model.hidden == x[:, None]).all(axis=0)).tolist()
              for x in np.unique(model.hidden, axis=1).T]
    return rank_classes(model.machine, [
        *(c.ranks for c in held if c.ranks is not None),
        *(tier.ranks for c in held for tier in c.tiers or ()),
        *(hidden if len(hidden) <= _MAX_HIDDEN_SETS else ()), *distinguished])


def has_copies(model: CostModel) -> bool:
    """Whether plans that push nothing may have replicas on one rank of every host: they are
    allowed, and all ranks are alike (otherwise the minimum of every choice bounds nothing)."""
    return ("per_host" in model.problem.allow and bool(copy_sets(model.machine))
            and len(model_classes(model).ranks) == 1)


def may_rest(problem: Problem, name: str) -> bool:
    """Whether table `name` can be placed without being pushed."""
    places, pinned = problem.placements_of(name), problem.pinned_of(name)
    if sum(x.stop - x.start for x in pinned) == problem.table(name).spec.num_rows:
        return not all(x.mode == "push" and x.placement != "replicated" for x in pinned)
    return "replicated" in places or ("pull" in problem.modes_of(name) and bool(places))


def splits_pay(problem: Problem) -> bool:
    """Whether every column split costs a barrier, for sums of squares."""
    return problem.training and all(
        t.spec.optimizer in ROW_WISE for t in problem.free_tables if problem.may_split(t))


def no_solution(plan: Plan, problem: Problem, found: Evaluation) -> str:
    """Why the bound does not apply to this plan and its evaluation; empty if it does."""
    if not found.fits:
        return "the plan does not fit the memory"
    if plan.message_bits != problem.message_bits:
        return "the plan is for messages of other bits"
    if broken := violations(plan, problem.constraints):
        return f"the plan breaks a constraint: {broken[0]}"
    outside = outside_space(plan, problem)
    return f"the plan lies outside the space of the bound: {outside}" if outside else ""


def outside_space(plan: Plan, problem: Problem) -> str:
    """The first part of the plan that the relaxation cannot represent; empty if there is none.

    Pinned tables and rows are skipped: the relaxation prices them exactly.
    """
    free = [(t, piece, tier) for t in problem.tables for piece in plan.table(t.spec.name).pieces
            for tier in piece.tiers if not _is_pinned(problem, t, tier)]
    pushes = any(x.mode == "push" and x.placement != "replicated" for _, _, x in free)
    copies: bool | None = None
    for t, piece, tier in free:
        name = f"table {t.spec.name!r}"
        extra = sorted(used_by(tier, plan.world_size) - problem.allow)
        if extra:
            return f"{name} uses {extra}, which the plan space does not include"
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
    """Whether the relaxation treats positions in the table as hotness ranks if all its rows are
    pinned; otherwise `other`."""
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
