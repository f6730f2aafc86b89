"""Tables kept together or apart, by assigning ranks to groups of tables.

The relaxation ignores groups, so its bound holds for every plan that satisfies them. The search
places table by table; if its plan violates a group, it is repeated with constraints on the ranks of
the grouped tables. Several assignments of ranks are tried, and the fastest plan is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import TypeVar

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.plan import Plan
from oper.search.problem.constraints import TableConstraint, group_violations, units
from oper.search.problem.machine import rank_classes
from oper.search.problem.statement import Problem

Proof = TypeVar("Proof")


def plan_with_groups(problem: Problem, make: Callable[[Problem], tuple[Plan, Proof]]
                     ) -> tuple[Plan, Proof]:
    """Return a plan that satisfies `keep_together` and `keep_apart`, and the proof of its bound.

    The bound holds for all plans, whatever ranks they assign to the groups.

    Args:
        problem: the problem.
        make: returns plan and proof of a problem, ignoring its groups; notes of the plan are about
            the proof.

    Raises:
        PlanInfeasibleError: no plan fits, or no assignment of ranks that was tried satisfies all
            groups.
    """
    held = problem.constraints
    plan, proof = make(problem)
    if not group_violations(plan, held):
        return plan, proof
    best: Plan | None = None
    wanted: list[tuple[float, str]] = []  # more memory, with which assignments would fit
    for tables in _assignments(problem):
        try:
            # Without the groups, which the ranks of the tables satisfy.
            found, _ = make(replace(problem, constraints=replace(
                held, tables=tables, keep_together=(), keep_apart=())))
        except PlanInfeasibleError as error:
            wanted += [error.more_memory] if error.more_memory else []
            continue
        except InvalidInputError:
            continue  # no placement is allowed on these ranks
        if not group_violations(found, held) and (best is None or found.step_us < best.step_us):
            best = found
    if best is None:
        raise PlanInfeasibleError(
            f"no plan fits {problem.topology.name!r} and keeps its groups of tables",
            "groups that the plan without them violates", group_violations(plan, held),
            "none, on ranks with enough memory for each group",
            "remove a table from keep_together or keep_apart, or pin fewer tables"
            + (f"; or pass {min(wanted)[1]}" if wanted else ""))
    return replace(best, notes=plan.notes), proof  # notes are about the bound


class _Units:
    """Units of tables that are kept together, keyed by one table each; the largest units first.

    Attributes:
        tables: the tables of each unit.
        num_bytes: size of each unit.
        apart: the units that must not share a rank with each unit.
        ranks: the ranks that all tables of each unit may use.
    """

    def __init__(self, problem: Problem) -> None:
        held, members = problem.constraints, dict[str, list[str]]()
        root = units(held)
        for name, of in root.items():
            members.setdefault(of, []).append(name)
        size = {of: float(sum(problem.table(n).spec.num_bytes for n in names))
                for of, names in members.items()}
        self.tables = dict(sorted(members.items(), key=lambda x: (-size[x[0]], x[0])))
        self.num_bytes, self.apart = size, {of: set[str]() for of in members}
        for group in held.keep_apart:
            for a, b in permutations(group, 2):
                self.apart[root[a]].add(root[b])
        self.ranks = {of: sorted(set.intersection(*(_named(problem, n) for n in names)))
                      for of, names in members.items()}


def _named(problem: Problem, name: str) -> set[int]:
    """Ranks that a table may use, or to which it is pinned."""
    tiers, ranks = problem.held(name).tiers, set(problem.owners_of(name))
    return ranks if tiers is None else ranks & {r for tier in tiers for r in tier.ranks}


_Ranks = dict[str, tuple[int, ...]]  # by unit


def _assignments(problem: Problem) -> Iterator[dict[str, TableConstraint]]:
    """Yield table constraints that satisfy the groups; for some of them no plan may fit."""
    every = _Units(problem)
    classes = rank_classes(problem.machine, [
        c.ranks for c in problem.constraints.tables.values() if c.ranks is not None])
    seen: list[_Ranks] = []
    for allowed in (range(problem.machine.world_size), *(c.tolist() for c in classes.ranks[:4])):
        for choose in (_slices, _single):
            ranks = choose(every, set(allowed))
            if ranks is not None and ranks not in seen:
                seen.append(ranks)
                tables = _constrained(problem, every, ranks)
                if tables is not None:
                    yield tables


def _single(every: _Units, allowed: set[int]) -> _Ranks | None:
    """One rank for each unit: the least loaded one that has no unit to be kept apart from it; None
    if there is none."""
    load, out = dict.fromkeys(allowed, 0.0), _Ranks()
    for unit in every.tables:
        taken = {out[x] for x in every.apart[unit] if x in out}
        free = [r for r in every.ranks[unit] if r in allowed and (r,) not in taken]
        if not free:
            return None
        rank = min(free, key=lambda r: (load[r], r))
        load[rank] += every.num_bytes[unit]
        out[unit] = (rank,)
    return out


def _slices(every: _Units, allowed: set[int]) -> _Ranks | None:
    """All allowed ranks for each unit, except that units to be kept apart divide them among each
    other in proportion to their sizes; None if there are too few ranks."""
    colour: dict[str, int] = {}
    size: list[float] = []
    for unit in every.tables:
        if every.apart[unit]:
            used = {colour.get(x) for x in every.apart[unit]}
            colour[unit] = next(c for c in range(len(used) + 1) if c not in used)
            size += [0.0] * (colour[unit] == len(size))
            size[colour[unit]] += every.num_bytes[unit]
    if len(size) > len(allowed):
        return None
    slices: list[list[int]] = [[] for _ in size]
    for rank in sorted(allowed) if size else ():  # one to each slice, then to the smallest by size
        slices[min(range(len(size)), key=lambda c: (
            bool(slices[c]), len(slices[c]) / max(size[c], 1.0)))].append(rank)
    out = {unit: tuple(r for r in every.ranks[unit] if r in (
        slices[colour[unit]] if unit in colour else allowed)) for unit in every.tables}
    return out if all(out.values()) else None


def _constrained(problem: Problem, every: _Units, ranks: _Ranks
                 ) -> dict[str, TableConstraint] | None:
    """The table constraints with the units on these ranks; None if a table has no placement left.
    """
    tables = dict(problem.constraints.tables)
    for unit, chosen in ranks.items():
        for name in every.tables[unit]:
            c = problem.held(name)
            if c.tiers is not None:
                continue
            c = replace(c, ranks=chosen)
            if len(every.tables[unit]) > 1 and len(chosen) > 1:
                # All ranks of the set must have rows of every tier: no owners, no weighted stripes.
                placements = problem.placements_of(name) - {"owned"}
                c = replace(c, placements=placements, modes=problem.modes_of(name) & {"pull"})
                if not c.placements or not c.modes:
                    return None
            tables[name] = c
    return tables
