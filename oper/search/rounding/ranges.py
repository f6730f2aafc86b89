"""Rows of pushed tables that may not be striped, divided into ranges with one owner each.

Annealing assigns each column piece of such a table to one rank. A local search on the exact step
then moves rows to other ranks: a move takes a share of the lookups from either end of a range and
gives it to another rank, as a new range or added to an adjacent range of that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from oper.plan import Tier
from oper.search.cost.model import Evaluation
from oper.search.cost.space import table_load_vector
from oper.search.problem.statement import IDS, Problem, TableProblem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, plan_load_vector

_SHARES = 1.0, 0.5, 0.25, 0.125, 1 / 32, 1 / 128  # shares of a range's lookups that are moved
_MAX_TIERS = 8  # upper limit of the tiers of a piece
_MOST_RANKS = 8  # candidate owners tried for a range, least loaded first
_TRIALS = 4000  # upper limit of the moves tried
_MIN_GAIN = 1e-5  # least relative improvement of the step time for a move to be accepted


def divide_rows(relaxation: Relaxation, placements: Sequence[Placement],
                over: Callable[[], bool]) -> list[Placement]:
    """Divide the pushed rows of each table that may not be striped into ranges with one owner each.

    Args:
        relaxation: the cost model and the tables.
        placements: the current placement of each table.
        over: returns whether the time limit has passed.

    Returns:
        The new placement of each table.
    """
    model, tables, out = relaxation.model, relaxation.tables, list(placements)
    free = [k for k, t in enumerate(tables) if _may_divide(relaxation.problem, t)]
    if not free:
        return out
    total = plan_load_vector(relaxation, out)
    known, trials = model.evaluation(total), 0
    found = True
    while found:
        found = False
        for k in free:
            rest = total.plus(table_load_vector(model, tables[k], out[k]), -1)
            for pieces in _neighbours(relaxation.problem, tables[k], out[k], known):
                trials += 1
                if trials > _TRIALS or over():
                    return out
                vector = rest.plus(table_load_vector(model, tables[k], pieces))
                new = model.evaluation(vector)
                if new.fullest <= max(1.0, known.fullest) and (
                        new.step_us < known.step_us * (1 - _MIN_GAIN)):
                    out[k], total, known, found = pieces, vector, new, True
                    break
    return out


def _may_divide(problem: Problem, t: TableProblem) -> bool:
    places = problem.placements_of(t.spec.name)
    return ("striped" not in places and "owned" in places and problem.machine.world_size > 1
            and "push" in problem.modes_of(t.spec.name) and not problem.held(t.spec.name).pinned)


def _neighbours(problem: Problem, t: TableProblem, pieces: Placement, known: Evaluation
                ) -> Iterator[Placement]:
    """Yield placements of a table that are one move away, starting with ranges of busy ranks."""
    load = sum((x.groups.max(axis=0) for x in known.phases), np.zeros(problem.machine.world_size))
    idle = sorted(problem.owners_of(t.spec.name), key=lambda r: (load[r], r))[:_MOST_RANKS]
    ranges = [(i, n) for i, piece in enumerate(pieces) for n, x in enumerate(piece.tiers)
              if _is_range(x)]
    for i, n in sorted(ranges, key=lambda at: -load[pieces[at[0]].tiers[at[1]].ranks[0]]):
        tiers = pieces[i].tiers
        for share in _SHARES:
            for rank in idle:
                for back in (True, False)[:1 + (share < 1)]:
                    moved = _moved(t, tiers, n, share if back else -share, rank)
                    if moved is not None:
                        yield (*pieces[:i], replace(pieces[i], tiers=moved), *pieces[i + 1:])


def _is_range(x: Tier) -> bool:
    return x.placement == "owned" and x.mode == "push" and x.memory == "device"


def _moved(t: TableProblem, tiers: tuple[Tier, ...], n: int, share: float, rank: int
           ) -> tuple[Tier, ...] | None:
    """`tiers` with the given share of the n-th tier's lookups moved to `rank`, from its last rows
    (first rows if negative); None if nothing changes or if `_MAX_TIERS` would be exceeded."""
    tier = tiers[n]
    if tier.ranks == (rank,):
        return None
    low, high = t.prefix(np.array([tier.start, tier.stop], float))[IDS]
    inner = t.edges[(t.edges > tier.start) & (t.edges < tier.stop)]
    rows = np.concatenate([[tier.start], inner, [tier.stop]])
    mass = (high - share * (high - low)) if share > 0 else (low - share * (high - low))
    cut = round(float(np.interp(mass, t.prefix(rows.astype(float))[IDS], rows)))
    given = (cut, tier.stop) if share > 0 else (tier.start, cut)
    parts = [replace(tier, start=a, stop=b, ranks=(rank,) if (a, b) == given else tier.ranks)
             for a, b in ((tier.start, cut), (cut, tier.stop)) if a < b]
    out: list[Tier] = []
    for x in (*tiers[:n], *parts, *tiers[n + 1:]):
        if out and _is_range(x) and _is_range(out[-1]) and out[-1].ranks == x.ranks:
            out[-1] = replace(out[-1], stop=x.stop)
        else:
            out.append(x)
    return tuple(out) if tuple(out) != tiers and len(out) <= _MAX_TIERS else None
