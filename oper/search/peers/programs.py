"""Peers that state placement as a mathematical program: RecShard's MILP and UGache's LP.

Both are written from their publications, solved with HiGHS, and use only those parts of the problem
that their papers use: access frequencies, sizes, bandwidths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import MissingDependencyError
from oper.plan import MAX_PATTERN, Piece, Plan, Tier
from oper.search.cost.model import evaluate
from oper.search.problem.machine import Machine, Term
from oper.search.problem.statement import IDS, Problem, TableProblem
from oper.search.rounding.placing import plan_of

_COVERAGE = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # shares of a table's lookups in fast memory
_MAX_BINARIES = 12_000  # size that the solver can handle within `_SECONDS`
_SECONDS = 3.0
_MIP_GAP = 0.01
_HEAT_CLASSES = 30
_MAX_WEIGHT = 16
#: Shares of memory that a program may use, tried in order: it does not know a plan's buffers.
_SHARES = (1.0, 0.9, 0.75, 0.5, 0.25)


def _optimize() -> Any:
    """Import `scipy.optimize`; raises MissingDependencyError."""
    try:
        from scipy import optimize
    except ImportError as error:
        raise MissingDependencyError("cannot solve a baseline's program", "import", str(error),
                                     "scipy", "pip install 'oper[report]'") from error
    return optimize


def _fitting(problem: Problem, solve: Callable[[float], Plan | None]) -> Plan | None:
    """Solve the program with decreasing shares of memory; return the first plan that fits, or None
    if a program has no solution.

    Args:
        problem: the problem.
        solve: returns a plan that uses at most a share of each rank's memory.
    """
    for share in _SHARES:
        plan = solve(share)
        if plan is None or evaluate(plan, problem).fits:
            return plan
    return None


def plan_of_tiers(problem: Problem, tiers: Iterable[tuple[Tier, ...]]) -> Plan:
    """A plan of tables without column splits, given the tiers of each."""
    return plan_of(problem, {t.spec.name: (Piece(0, t.spec.dim, x),)
                             for t, x in zip(problem.tables, tiers, strict=True)})


# -- RecShard --------------------------------------------------------------------------------------


def coverage_milp(problem: Problem, seed: int) -> Plan | None:
    """RecShard (Sethi et al. 2022): the hottest rows of every table on one rank, chosen by MILP.

    A binary per table, rank and step of the table's access distribution: rows up to the step are in
    the rank's fast memory, the others in slow memory. The objective is the largest cost of a rank,
    `lookups x bytes x (hits / fast bandwidth + misses / slow bandwidth)`. There is no slow memory
    here, so the colder rows are striped over all ranks and read across links. Hot rows are pooled
    at their rank (pushed). Returns None if nothing fits, or if tables x ranks exceeds
    `_MAX_BINARIES`; near this limit, the MILP places whole tables only.
    """
    world = problem.machine.world_size
    cells = len(problem.tables) * world
    if cells > _MAX_BINARIES:
        return None
    steps = _COVERAGE if cells * len(_COVERAGE) <= _MAX_BINARIES else _COVERAGE[-1:]
    return _fitting(problem, lambda share: _solve_coverage(problem, steps, share))


def _solve_coverage(problem: Problem, steps: tuple[float, ...], share: float) -> Plan | None:
    """The plan of the MILP; None if the solver finds no solution."""
    optimize, machine = _optimize(), problem.machine
    world, num_tables, num_steps = machine.world_size, len(problem.tables), len(steps)
    stops = np.array([_stops(t, steps) for t in problem.tables])  # [T, K]
    row = np.array([float(t.spec.row_bytes) for t in problem.tables])[:, None]
    size = np.array([float(t.spec.bytes_for(problem.training))
                     for t in problem.tables])[:, None]
    rows = np.array([float(t.spec.num_rows) for t in problem.tables])[:, None]
    hits = np.stack([np.interp(s, t.edges, t.cumulative[IDS])
                     for t, s in zip(problem.tables, stops, strict=True)])
    every = np.array([float(t.total[IDS]) for t in problem.tables])[:, None]
    slow_term = Term.CROSS_IN if problem.topology.num_hosts > 1 else Term.LINK_IN
    fast, slow = machine.seconds_per_unit[Term.MEMORY], machine.seconds_per_unit[slow_term]
    # [T, W, K]: cost at the rank, and bytes there; striped rows count on every rank.
    cost = row[:, None] * (hits[:, None] * fast[:, None] + (every - hits)[:, None] * slow[:, None])
    hot = size * stops / rows
    rest = (size - hot) / world
    cells, each = num_tables * world * num_steps, np.eye(world)
    # Variables: [T, W, K], and the largest cost.
    time = np.einsum("trk,rs->strk", cost * 1e6, each).reshape(world, cells)
    held = (np.einsum("tk,rs->strk", hot, each) + rest[:, None]).reshape(world, cells)
    one = np.repeat(np.eye(num_tables), world * num_steps, axis=1)
    capacity = share * machine.capacity_bytes[machine.domain] / machine.num_domain
    most = max(float(capacity.max()), 1.0)
    found = optimize.milp(
        np.append(np.zeros(cells), 1.0),
        constraints=[
            optimize.LinearConstraint(np.c_[time, -np.ones(world)], -np.inf, 0.0),
            optimize.LinearConstraint(np.c_[held / most, np.zeros(world)], -np.inf,
                                      capacity / most),
            optimize.LinearConstraint(np.c_[one, np.zeros(num_tables)], 1.0, 1.0)],
        bounds=optimize.Bounds(0.0, np.append(np.ones(cells), np.inf)),
        integrality=np.append(np.ones(cells), 0.0),
        options={"time_limit": _SECONDS, "mip_rel_gap": _MIP_GAP})
    if found.x is None:
        return None
    _, ranks, chosen = np.nonzero(found.x[:cells].reshape(num_tables, world, num_steps) > 0.5)
    cold = Tier(0, 0, "striped", tuple(range(world)))
    return plan_of_tiers(problem, (
        hot_and_cold(t, int(stops[n, k]), Tier(0, 0, "owned", (r,), mode="push"), cold)
        for n, (t, r, k) in enumerate(zip(problem.tables, ranks.tolist(), chosen.tolist(),
                                          strict=True))))


def _stops(t: TableProblem, steps: tuple[float, ...]) -> list[int]:
    """Number of hottest rows that receive each share of the table's lookups."""
    block = np.searchsorted(t.cumulative[IDS], np.array(steps) * t.total[IDS] * (1 - 1e-12))
    stops = t.edges[np.minimum(block, t.edges.size - 1)]
    return [t.spec.num_rows if s == 1.0 else int(x) for s, x in zip(steps, stops, strict=True)]


def hot_and_cold(t: TableProblem, stop: int, hot: Tier, cold: Tier) -> tuple[Tier, ...]:
    """Tiers of a table whose `stop` hottest rows are placed like `hot`, and the others like
    `cold`."""
    tiers = replace(hot, start=0, stop=stop), replace(cold, start=stop, stop=t.spec.num_rows)
    return tuple(x for x in tiers if x.start < x.stop)


# -- UGache ----------------------------------------------------------------------------------------


def extraction_lp(problem: Problem, seed: int) -> Plan | None:
    """UGache (Song et al. 2023): replicate, partition or mix, for ranks and links of any speed.

    Rows of similar hotness form a class across all tables. The LP divides each class into a share
    that every rank holds and shares that single ranks hold. It minimises the slowest extraction
    (local reads and each direction of each link, all concurrent) within the memory. The solution is
    rounded: the hottest rows are replicated, and the others assigned in proportion to the ranks'
    shares. The paper's symmetric closed form is the peer ``ugache-replicate-or-partition``.
    """
    return _fitting(problem, lambda share: _solve_extraction(problem, share))


def _heat_classes(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hotness class of every block of every table (0 = hottest), and bytes held and bytes read by
    class."""
    heat = np.concatenate([t.blocks[:, IDS] / (np.diff(t.edges) * t.spec.row_bytes)
                           for t in problem.tables])
    held = np.concatenate([np.diff(t.edges) * float(t.spec.row_bytes) for t in problem.tables])
    read = np.concatenate([t.blocks[:, IDS] * t.spec.row_bytes for t in problem.tables])
    order = np.argsort(-heat, kind="stable")
    # Class edges by the mean of two shares, of reads and of bytes: resolves hot and cold rows.
    level = (np.cumsum(read[order]) / max(read.sum(), 1e-300)
             + np.cumsum(held[order]) / held.sum()) / 2
    of_block = np.empty(order.size, np.int64)
    of_block[order] = np.minimum((level * _HEAT_CLASSES).astype(np.int64), _HEAT_CLASSES - 1)
    return (of_block, np.bincount(of_block, held, _HEAT_CLASSES),
            np.bincount(of_block, read, _HEAT_CLASSES))


def _solve_extraction(problem: Problem, share: float) -> Plan | None:
    """The rounded solution of the LP; None if it has none."""
    optimize, machine = _optimize(), problem.machine
    of_block, held, read = _heat_classes(problem)
    world, each = machine.world_size, np.eye(held.size)
    rows, limit = _extraction_rows(machine, held, read, share, problem.training)
    equal = np.c_[each, np.repeat(each, world, axis=1), np.zeros(held.size)]
    found = optimize.linprog(np.append(np.zeros(rows.shape[1] - 1), 1.0), A_ub=rows, b_ub=limit,
                             A_eq=equal, b_eq=np.ones(held.size), bounds=(0, None), method="highs")
    if found.x is None:
        return None
    replicated, part, _ = np.split(found.x, [held.size, -1])
    return _rounded(problem, of_block, replicated, part.reshape(-1, world).T @ held)


def _extraction_rows(machine: Machine, held: np.ndarray, read: np.ndarray, share: float,
                     training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows A and limits b (A x <= b) of memory and extraction; x = (replicated [H], part [H, W],
    time)."""
    world, classes = machine.world_size, held.size
    unit = machine.seconds_per_unit * 1e6
    near = machine.domain[:, None] == machine.domain
    host = machine.host[:, None] == machine.host
    rows, limit = [], []

    def add(replicated: np.ndarray, part: np.ndarray, time: float, most: float) -> None:
        rows.append(np.concatenate([replicated, part.reshape(-1), [time]]))
        limit.append(most)

    none = np.zeros(classes)
    for k in range(machine.capacity_bytes.size):
        inside = (machine.domain == k).astype(float)
        capacity = max(share * float(machine.capacity_bytes[k]), 1.0)
        copies = inside.sum() if training else 1.0
        add(held * copies / capacity, np.outer(held, inside) / capacity, 0.0, 1.0)
    for r in range(world):
        reached = near[r].astype(float)
        add(read * unit[Term.MEMORY, r], np.outer(read, reached) * unit[Term.MEMORY, r], -1.0, 0.0)
        for term, afar in ((Term.LINK_IN, host[r] & ~near[r]), (Term.CROSS_IN, ~host[r])):
            if afar.any():
                add(none, np.outer(read, afar) * unit[term, r], -1.0, 0.0)
                own = np.zeros(world)
                own[r] = afar.sum()
                add(none, np.outer(read, own) * unit[term, r], -1.0, 0.0)
    return np.array(rows), np.array(limit)


def _rounded(problem: Problem, of_block: np.ndarray, replicated: np.ndarray,
             by_rank: np.ndarray) -> Plan:
    """Turn the solution of the linear program into a plan.

    Args:
        of_block: class of every block, over all tables.
        replicated: share of each class that is replicated, float64 [H].
        by_rank: bytes of other rows on each rank, float64 [W].
    """
    world = problem.machine.world_size
    weight = np.rint(by_rank / max(float(by_rank.max()), 1e-300) * _MAX_WEIGHT).astype(np.int64)
    if weight.max() == 0 or weight.sum() > MAX_PATTERN:
        weight = np.ones(world, np.int64)
    ranks = np.flatnonzero(weight)
    even = np.unique(weight[ranks]).size == 1
    hot = Tier(0, 0, "replicated", tuple(range(world)))
    cold = Tier(0, 0, "striped", tuple(ranks.tolist()),
                () if even else tuple(weight[ranks].tolist()))
    sizes = [t.edges.size - 1 for t in problem.tables]
    blocks = np.split(replicated[of_block], np.cumsum(sizes)[:-1])
    return plan_of_tiers(problem, (
        hot_and_cold(t, round(float(x @ np.diff(t.edges))), hot, cold)
        for t, x in zip(problem.tables, blocks, strict=True)))
