"""Explains why no plan fits: memory needed and available, the largest table, and the smallest
change with which a plan fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from oper.errors import PlanInfeasibleError
from oper.search.cost.model import Evaluation
from oper.search.pricing.master import Bound, lower_bound
from oper.search.problem.constraints import Constraints, without
from oper.search.problem.machine import make_machine
from oper.search.problem.statement import Problem
from oper.search.relaxation.rows import LEAST_CAPACITY
from oper.tables import format_bytes

_REMEDY = "make one of the changes in this message"
_MAX_BLAMED = 16  # constraints whose removal is tried, one at a time


def explain_bound(problem: Problem, bound: Bound) -> PlanInfeasibleError:
    """The error for a problem whose relaxation overflows: even fractionally divided rows do not
    fit."""
    relaxation = bound.relaxation
    machine = problem.machine
    classes = relaxation.classes
    share = relaxation.base[relaxation.phase_of == -1].copy()
    if relaxation.tables:
        # At prices of memory alone, every table takes the configuration that needs least memory.
        cheapest = bound.node.price(np.where(relaxation.phase_of == -1, 1.0, 0.0))
        share += cheapest.resources[:, relaxation.phase_of == -1].sum(axis=0)
    number = np.bincount(classes.of_domain)[classes.of_domain]  # domains of the same class
    need = share[classes.of_domain] * np.maximum(machine.capacity_bytes, LEAST_CAPACITY / number)
    memory = "memory per domain" + " and per host" * relaxation.rows.uses_host
    factor = 1.0 + bound.overflow + _rounding(problem, relaxation.rows.uses_host)
    # More, if rows do not pack: the relaxation divides them in any proportion, even in tables that
    # may only be owned whole, and ignores groups.
    more = factor, f"{_more(problem, memory, factor)} or more"
    return _error(problem, need, more, f"{_blamed(problem)}{_host_memory(problem)}{more[1]}, or "
                                       "accordingly less need per rank: more ranks, a smaller dim "
                                       "or dtype, or an optimizer with less state")


def _rounding(problem: Problem, uses_host: bool) -> float:
    """Share of the memory that whole rows may need beyond fractions of rows: on each rank, of each
    table, a row at the end of its copies and a row of the stripe."""
    row = sum(t.spec.bytes_for(problem.training) / t.spec.num_rows for t in problem.tables)
    each = np.full(problem.machine.world_size, 2 * row)
    return float(problem.machine.memory_used(each, each * uses_host).max())


def _host_memory(problem: Problem) -> str:
    """The remedy "allow host memory", if rows then fit; else ""."""
    if "host" in problem.allow or not problem.topology.host_memory_bytes or not _has_room(
            replace(problem, allow=problem.allow | {"host"})):
        return ""
    return "'host' in `allow`, so that host memory holds cold rows, or "


def _blamed(problem: Problem) -> str:
    """The remedy "remove a constraint", if rows then fit; else ""."""
    if problem.constraints == Constraints():
        return ""
    found = [name for name, held in islice(without(problem.constraints), _MAX_BLAMED)
             if _fits(problem, held)]
    if found:
        return f"removing {' or '.join(found[:4])}, or "
    return "removing all constraints, or " if _fits(problem, Constraints()) else ""


def _fits(problem: Problem, held: Constraints) -> bool:
    """Whether fractionally divided rows fit under the constraints `held`."""
    machine = make_machine(problem.topology, held.reserve_bytes, held.memory_bytes)
    return _has_room(replace(problem, machine=machine, constraints=held))


def _has_room(problem: Problem) -> bool:
    return lower_bound(problem, max_rounds=30).overflow <= 1e-6


def explain_plan(problem: Problem, evaluation: Evaluation) -> PlanInfeasibleError:
    """The error for a problem whose relaxation fits, but whose best plan overflows the memory."""
    factor, held = evaluation.fullest, problem.constraints.tables
    pins = [n for n, c in held.items() if c.pinned or c.unreplicated]
    uses_host = "host" in problem.allow and bool(problem.topology.host_memory_bytes)
    more = _more(problem, "memory per domain" + " and per host" * uses_host, factor)
    if problem.constraints.keep_together or problem.constraints.keep_apart:  # the plan ignores them
        more += " or more"
    ways = [more]
    if any("striped" not in problem.placements_of(t.spec.name) and t.spec.num_rows > 1
           for t in problem.tables):
        ways.insert(0, "striped placement for the tables that may only be owned whole")
    if pins:
        ways.insert(0, f"no constraints on some rows of tables {pins[:4]}")
    return _error(problem, evaluation.domain_bytes, (factor, more), ", or ".join(ways))


def _more(problem: Problem, memory: str, factor: float) -> str:
    """The remedy "`factor` times as much memory", unless constraints leave some domain none."""
    capacity, held = problem.machine.capacity_bytes, problem.constraints
    if (capacity <= 0).any():
        return f"more {memory} than constraints reserve"
    factor = np.ceil(factor * 1000) / 1000
    if held.memory_bytes is not None:  # more memory alone would remain unused above this limit
        whole = make_machine(problem.topology, held.reserve_bytes).capacity_bytes
        is_enough = (whole >= factor * capacity).all()
        memory = "memory_bytes" if is_enough else f"memory_bytes and {memory}"
    return f"{memory} times {factor:.3f}"


def _error(problem: Problem, need: np.ndarray, more: tuple[float, str], change: str
           ) -> PlanInfeasibleError:
    capacity = problem.machine.capacity_bytes
    domains = problem.topology.domains
    num_bytes = {t.spec.name: t.spec.bytes_for(problem.training) for t in problem.tables}
    largest = max(num_bytes, key=lambda name: (num_bytes[name], name))
    worst = sorted(range(need.size), key=lambda k: (-(need[k] - capacity[k]), k))[:8]
    lines = [f"domain {k} (ranks {_ranks(domains[k].ranks)}) needs {format_bytes(float(need[k]))} "
             f"of {format_bytes(max(0.0, float(capacity[k])))}" for k in sorted(worst)]
    if "host" in problem.allow and problem.topology.host_memory_bytes:
        lines.append(f"each host has {format_bytes(problem.topology.host_memory_bytes)} of memory "
                     "in addition")
    what = (f"no plan fits {problem.topology.name!r}: {'; '.join(lines)}; all tables "
            f"{format_bytes(sum(num_bytes.values()))}, largest table {largest!r} with "
            f"{format_bytes(num_bytes[largest])}; "
            f"smallest sufficient change: {change}")
    error = PlanInfeasibleError(what, "need_bytes", int(need.sum()),
                                f"<= {int(max(0.0, capacity.sum()))} in all domains together, "
                                "and each domain within its own", _REMEDY)
    error.more_memory = more
    return error


def _ranks(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
