"""A plan's bottlenecks: the tiers that load its slowest rank most, and what moving each saves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from oper.plan import Plan, TablePlan, Tier
from oper.search.cost.load_vector import LoadVector
from oper.search.cost.model import CostModel, Evaluation, is_ordered
from oper.search.problem.machine import GROUPS
from oper.search.problem.statement import Problem, TableProblem

_TARGETS = 4  # least loaded ranks that are tried as the new owner


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A tier that loads the slowest rank of the longest phase.

    Attributes:
        table: name of the table.
        columns, rows: half-open ranges of columns and of positions that the tier covers.
        tier: its placement, in the notation of `describe`.
        load_us: its load on the binding resource of that rank, microseconds.
        is_cut: whether the table is split by columns.
        move: the placement that would shorten the step most if only this tier were moved, or "" if
            no move shortens it.
        saves_us: microseconds by which `move` shortens the step.
    """

    table: str
    columns: tuple[int, int]
    rows: tuple[int, int]
    tier: str
    load_us: float
    is_cut: bool
    move: str
    saves_us: float


def describe(tier: Tier) -> str:
    """A placement in split / broadcast / partial notation with its rank, or the number of its
    ranks: ``"S@3"``, ``"Bx8"``."""
    ranks = f"@{tier.ranks[0]}" if len(tier.ranks) == 1 else f"x{len(tier.ranks)}"
    return tier.notation() + ranks + ("" if tier.memory == "device" else " host memory")


def bottlenecks(plan: Plan, problem: Problem, count: int = 5) -> list[Bottleneck]:
    """Find the `count` tiers that load the slowest rank of the longest phase most, heaviest first.

    Raises:
        PlanError: the plan is for other tables or another number of ranks.
    """
    plan.check_for([t.spec for t in problem.tables], problem.machine.world_size)
    model, load_vectors = CostModel(problem), {}
    total = model.base()
    for t in problem.tables:
        entry = plan.table(t.spec.name)
        load_vectors[t.spec.name] = model.load_vector(t, entry.pieces, is_ordered(t, entry))
        total = total.plus(load_vectors[t.spec.name])
    found = model.evaluation(total)
    number = int(np.argmax([p.time_us for p in found.phases]))
    phase = found.phases[number]
    heavy = []
    for t in problem.tables:
        entry = plan.table(t.spec.name)
        for i, piece in enumerate(entry.pieces):
            for n, tier in enumerate(piece.tiers):
                alone = model.load_vector(t, (replace(piece, tiers=(tier,)),), is_ordered(t, entry))
                us = model.group_us(model.units(alone))[number]
                load = float(us[GROUPS.index(phase.binding), phase.slowest_rank])
                if load > 0:
                    heavy.append((-load, t.spec.name, i, n))
    out = []
    for negative, name, i, n in sorted(heavy)[:count]:
        entry, t = plan.table(name), problem.table(name)
        piece = entry.pieces[i]
        rest = total.plus(load_vectors[name], -1)
        move, step = _best_move(model, t, entry, (i, n), rest, found)
        saves = max(0.0, found.step_us - step)
        out.append(Bottleneck(
            name, (piece.start, piece.stop), (piece.tiers[n].start, piece.tiers[n].stop),
            describe(piece.tiers[n]), -negative, len(entry.pieces) > 1,
            move if saves > 1e-9 * found.step_us else "", saves))
    return out


def _best_move(model: CostModel, t: TableProblem, entry: TablePlan, place: tuple[int, int],
               rest: LoadVector, found: Evaluation) -> tuple[str, float]:
    """The other placement of tier `n` of piece `i` (`place`) with the least step time among those
    that fit the memory, and that time in microseconds; ("", infinity) if there is none."""
    i, n = place
    best = ("", np.inf)
    for tier in _placements(model.problem, t, entry.pieces[i].tiers[n], found):
        pieces = list(entry.pieces)
        tiers = pieces[i].tiers
        pieces[i] = replace(pieces[i], tiers=(*tiers[:n], tier, *tiers[n + 1:]))
        vector = model.load_vector(t, tuple(pieces), is_ordered(t, entry))
        after = model.evaluation(rest.plus(vector))
        if (after.fits or not found.fits) and after.step_us < best[1]:
            best = (describe(tier), after.step_us)
    return best


def _placements(problem: Problem, t: TableProblem, tier: Tier, found: Evaluation) -> list[Tier]:
    """Alternative placements of a tier that the constraints allow."""
    held = problem.held(t.spec.name)
    if held.tiers is not None or tier in held.pinned:
        return []
    world, owners = range(problem.machine.world_size), tuple(problem.owners_of(t.spec.name))
    level = sum((p.groups.max(axis=0) for p in found.phases), np.zeros(len(world)))
    places = problem.placements_of(t.spec.name)
    memories = problem.memories_of(t.spec.name)
    plain = replace(tier, weights=(), memory="device")
    made = []
    if "host" in memories and "striped" in places and "pull" in problem.modes_of(t.spec.name):
        made.append(replace(plain, placement="striped", ranks=owners, mode="pull", memory="host"))
    for mode in sorted(problem.modes_of(t.spec.name)) if "device" in memories else ():
        if "owned" in places:
            idle = sorted(owners, key=lambda r: (level[r], r))[:_TARGETS]
            made += [replace(plain, placement="owned", ranks=(r,), mode=mode) for r in idle]
        if "striped" in places:
            made.append(replace(plain, placement="striped", ranks=owners, mode=mode))
            made.append(replace(plain, placement="striped", ranks=owners[::-1], mode=mode))
    if "replicated" in places:
        made.append(replace(plain, placement="replicated", ranks=tuple(world), mode="pull"))
    return [one for one in made if one != tier]
