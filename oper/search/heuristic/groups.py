"""Tables kept together or apart: a plan that breaks a group is made again with ranks named for it.

The relaxation leaves groups out, so that its bound holds for every plan that keeps them. The search
places table by table; a group is kept by giving each of its tables, before the search, the only
ranks that it may use. Several ways of naming those ranks are tried and the fastest plan is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from oper.errors import InvalidInputError, PlanInfeasibleError, fail
from oper.plan import Plan
from oper.search.problem.constraints import TableConstraint, group_violations, units
from oper.search.problem.machine import rank_classes
from oper.search.problem.statement import Problem

Proof = TypeVar("Proof")


def plan_with_groups(problem: Problem, make: Callable[[Problem], tuple[Plan, Proof]]
                     ) -> tuple[Plan, Proof]:
    """A plan of a problem whose constraints may bind several tables at once, and the proof of the
    bound of all plans, whatever ranks they name for the groups.

    Args:
        problem: the problem.
        make: plan and proof of a problem without looking at `keep_together` and `keep_apart`.

    Raises:
        PlanInfeasibleError: nothing fits, or no way of naming ranks keeps every group.
    """
    held = problem.constraints
    plan, proof = make(problem)
    if not group_violations(plan, held):
        return plan, proof
    best: Plan | None = None
    for tables in _assignments(problem):
        try:
            found, _ = make(replace(problem, constraints=replace(held, tables=tables)))
        except (PlanInfeasibleError, InvalidInputError):
            continue  # these ranks are too few, or leave nothing to choose
        if not group_violations(found, held) and (best is None or found.step_us < best.step_us):
            best = found
    if best is None:
        raise PlanInfeasibleError(fail(
            f"no plan fits {problem.topology.name!r} and keeps its groups", "broken",
            group_violations(plan, held), "ranks for every group within memory and pinned ranks",
            "without keep_together and keep_apart it fits: remove a table from a group, or pin "
            "fewer tables"))
    return best, proof


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tables that are kept together, with the ranks that all of them may use."""

    tables: tuple[str, ...]
    ranks: tuple[int, ...]
    num_bytes: float
    apart: frozenset[int]  # units that may share no rank with this one


def _units(problem: Problem) -> list[_Unit]:
    """Largest first."""
    held = problem.constraints
    root = units(held)
    size = {t.spec.name: float(t.spec.num_bytes) for t in problem.tables}
    members: dict[str, list[str]] = {}
    for name, of in root.items():
        members.setdefault(of, []).append(name)
    order = sorted(members, key=lambda of: (-sum(size[n] for n in members[of]), of))
    number = {of: k for k, of in enumerate(order)}
    apart: list[set[int]] = [set() for _ in order]
    for group in held.keep_apart:
        for a in group:
            apart[number[root[a]]] |= {number[root[b]] for b in group if b != a}
    out = []
    for k, of in enumerate(order):
        ranks = set(range(problem.machine.world_size))
        for name in members[of]:
            c = problem.held(name)
            if c.ranks is not None:
                ranks &= set(c.ranks)
            if c.tiers is not None:
                ranks &= {r for tier in c.tiers for r in tier.ranks}
        out.append(_Unit(tuple(members[of]), tuple(sorted(ranks)),
                         sum(size[n] for n in members[of]), frozenset(apart[k])))
    return out


def _assignments(problem: Problem) -> Iterator[dict[str, TableConstraint]]:
    """Table constraints that keep the groups; some of them may not fit."""
    every = _units(problem)
    classes = rank_classes(problem.machine, [
        c.ranks for c in problem.constraints.tables.values() if c.ranks is not None])
    whole = tuple(range(problem.machine.world_size))
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for allowed in (whole, *(tuple(c.tolist()) for c in classes.ranks[:4])):
        for choose in (_slices, _single):
            ranks = choose(problem, every, set(allowed))
            if ranks is not None and tuple(ranks) not in seen:
                seen.add(tuple(ranks))
                tables = _constrained(problem, every, ranks)
                if tables is not None:
                    yield tables


def _single(problem: Problem, every: list[_Unit], allowed: set[int]
            ) -> list[tuple[int, ...]] | None:
    """One rank for each unit, the emptiest that no unit to be kept apart has."""
    machine = problem.machine
    load = np.zeros(machine.world_size)
    out: list[tuple[int, ...]] = []
    for unit in every:
        taken = {out[k][0] for k in unit.apart if k < len(out)}
        free = [r for r in unit.ranks if r in allowed and r not in taken]
        if not free:
            return None
        rank = min(free, key=lambda r: (load[r], r))
        load[rank] += unit.num_bytes
        out.append((rank,))
    return out


def _slices(problem: Problem, every: list[_Unit], allowed: set[int]
            ) -> list[tuple[int, ...]] | None:
    """All ranks for each unit, divided by size among those to be kept apart."""
    colour: list[int] = []
    for unit in every:
        used = {colour[k] for k in unit.apart if k < len(colour)}
        colour.append(next(c for c in range(len(every)) if c not in used)
                      if unit.apart else -1)
    num_colours = max(colour) + 1
    if num_colours > len(allowed):
        return None
    size = np.array([sum(u.num_bytes for u, c in zip(every, colour, strict=True) if c == k)
                     for k in range(num_colours)])
    slices: list[list[int]] = [[] for _ in range(num_colours)]
    for rank in sorted(allowed):  # a rank to whoever has least for its size; one each at first
        have = np.array([len(s) for s in slices])
        if num_colours:
            slices[int(np.lexsort((np.arange(num_colours), have / np.maximum(size, 1.0),
                                   have > 0))[0])].append(rank)
    out = []
    for unit, c in zip(every, colour, strict=True):
        ranks = tuple(r for r in unit.ranks if r in (allowed if c < 0 else slices[c]))
        if not ranks:
            return None
        out.append(ranks)
    return out


def _constrained(problem: Problem, every: list[_Unit], ranks: list[tuple[int, ...]]
                 ) -> dict[str, TableConstraint] | None:
    """The table constraints with these ranks; None where nothing is left to choose."""
    tables = dict(problem.constraints.tables)
    for unit, chosen in zip(every, ranks, strict=True):
        for name in unit.tables:
            c = tables.get(name, TableConstraint())
            if c.tiers is not None:
                continue
            c = replace(c, ranks=chosen)
            if len(unit.tables) > 1 and len(chosen) > 1:
                # Every tier on all ranks of the set: neither owners nor short pushed stripes.
                placements = problem.placements_of(name) - {"owned"}
                c = replace(c, placements=placements, modes=problem.modes_of(name) & {"pull"})
                if not c.placements or not c.modes:
                    return None
            tables[name] = c
    return tables
