"""Precision by hotness: which rows of read-only tables are stored as which type.

Storing a row as a narrower type costs its squared error each time the row is looked up, and saves
bytes once. Under an error budget the bytes are least when, for a single price of error, every range
of every table takes the cheapest type (Everett, "Generalized Lagrange multiplier method", 1963):
the price is found by bisection. A large block of rows may change its type at that price, which
changes the error by much; the rest of the budget is spent by changing only a part of its rows. In
each table hotter rows never get a narrower type than colder ones, so a table has at most as many
ranges as there are types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oper.errors import PlanInfeasibleError, require
from oper.search.problem.statement import IDS, TableProblem, make_table
from oper.stats import AccessStats
from oper.tables import TableSpec, bytes_of_row

ROW_TYPES = ("float16", "int8", "int4")  # widest first
_BISECTIONS = 60
_LARGEST_PRICE = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class RowErrors:
    """Errors of storing rows as other types, by block of a table's hotness order.

    Attributes:
        edges: int64 [K + 1], positions; block k is [edges[k], edges[k + 1]).
        energy: float64 [K], sum of the squares of a row, mean over the block.
        squared: by type, float64 [K], sum of the squared differences of a row, mean over the block.
    """

    edges: np.ndarray
    energy: np.ndarray
    squared: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Precision:
    """A choice of row types.

    Attributes:
        dtypes: by table, (last position + 1, type) of each range, hottest first.
        error: expected squared error of the numbers that lookups read, relative to their squares.
        num_bytes: bytes of all rows.
    """

    dtypes: dict[str, list[tuple[int, str]]]
    error: float
    num_bytes: int


def blocks_of(spec: TableSpec, stats: AccessStats | None) -> TableProblem:
    """Cut a table into blocks of about equal hotness, for which `RowErrors` can be measured.

    Of the result, `edges` are the ends of the blocks and `head_ids` the ids in order of hotness;
    `head_ids` is empty if ids are positions.
    """
    return make_table(spec, stats, 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Sums over the blocks before each edge, by type [D, K + 1].

    The first `num_known` positions are those of known rows.
    """

    edges: np.ndarray
    num_known: int
    dtypes: list[str]
    num_bytes: np.ndarray
    error: np.ndarray
    energy: float

    def ranges(self, price: float) -> list[int]:
        """The positions at which the types end, in order, when error has a price."""
        cost = self.num_bytes + price * self.error
        every = np.arange(self.edges.size)
        least, begins = cost[0], []
        for mine in cost[1:]:
            before = least - mine  # of ending the wider types at an edge
            best = np.minimum.accumulate(before)
            begins.append(np.maximum.accumulate(np.where(before == best, every, 0)))
            least = best + mine
        stops = [self.edges.size - 1]
        for begin in reversed(begins):
            stops.append(int(begin[stops[-1]]))
        return [int(self.edges[stop]) for stop in stops[::-1]]

    def total(self, sums: np.ndarray, ends: Sequence[int]) -> float:
        """Of bytes or errors, of all ranges; rows of a block have its mean."""
        begins = [0, *ends[:-1]]
        return float(sum(np.diff(np.interp([begin, end], self.edges, mine))[0]
                         for mine, begin, end in zip(sums, begins, ends, strict=True)))


def choose_dtypes(tables: Sequence[TableSpec], stats: AccessStats | None,
                  errors: Mapping[str, RowErrors], error_budget: float) -> Precision:
    """The types of rows that take the fewest bytes within an error budget.

    Args:
        tables: the tables.
        stats: access statistics; None = all rows are looked up equally often.
        errors: by table, for the types that it may have; its `edges` are those of `blocks_of`.
        error_budget: most squared error relative to the squares of all numbers that lookups read:
            1e-4 is a root mean square error of 1 %.

    Raises:
        InvalidInputError: the budget is not a positive number.
        PlanInfeasibleError: even the widest types exceed the budget.
    """
    what = "cannot choose types of rows"
    is_right = isinstance(error_budget, int | float) and 0 < error_budget < math.inf
    require(what, "pass for example 1e-4", ("error_budget", error_budget, is_right, "a number > 0"))
    found = {t.name: _sums(t, stats, errors[t.name]) for t in tables}
    energy = sum(t.energy for t in found.values())
    allowed = error_budget * energy

    def at(price: float) -> tuple[float, dict[str, list[int]]]:
        ends = {name: t.ranges(price) for name, t in found.items()}
        return sum(t.total(t.error, ends[name]) for name, t in found.items()), ends

    lost, ends = at(0.0)
    if lost > allowed:
        beyond = ends  # more error than allowed, at the highest price that has been tried
        lost, ends = at(_LARGEST_PRICE)
        if lost > allowed:
            raise PlanInfeasibleError(what, "error_budget", error_budget,
                                      f">= {lost / energy:.3g}, what the widest type loses",
                                      "allow more, or keep these tables in float32")
        low, high = -float(_BISECTIONS), math.log(_LARGEST_PRICE)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            more, there = at(math.exp(middle))
            if more <= allowed:
                high, lost, ends = middle, more, there
            else:
                low, beyond = middle, there
        for name, t in found.items():
            before = t.total(t.error, ends[name])
            more = t.total(t.error, beyond[name]) - before
            # Colder rows cross first and add less error: a share of them adds at most that share.
            share = min(1.0, (allowed - lost) / more) if more > 0 else 0.0
            part = [mine + int(share * (theirs - mine))
                    for mine, theirs in zip(ends[name], beyond[name], strict=True)]
            # Rows that were never looked up have no order, so that only all of them may cross.
            part = [end if end <= t.num_known or end in (mine, theirs) else mine
                    for end, mine, theirs in zip(part, ends[name], beyond[name], strict=True)]
            after = lost + t.total(t.error, part) - before
            if after <= allowed:
                ends[name], lost = part, after
    dtypes = {}
    for name, t in found.items():
        ranges = zip(ends[name], [0, *ends[name][:-1]], t.dtypes, strict=True)
        dtypes[name] = [(end, dtype) for end, begin, dtype in ranges if end > begin]
    return Precision(dtypes, lost / energy if energy else 0.0, round(sum(
        t.total(t.num_bytes, ends[name]) for name, t in found.items())))


def _sums(spec: TableSpec, stats: AccessStats | None, errors: RowErrors) -> _Table:
    problem = blocks_of(spec, stats)
    rows, lookups = np.diff(errors.edges), problem.blocks[:, IDS]
    require(f"cannot choose types of table {spec.name!r}",
            "measure the errors by the same statistics",
            ("edges", errors.edges[:4].tolist(), np.array_equal(problem.edges, errors.edges),
             f"{problem.edges[:4].tolist()}..."))
    dtypes = [dtype for dtype in ROW_TYPES if dtype in errors.squared]

    def sums(each: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(1), np.cumsum(each)])

    return _Table(errors.edges, problem.head_ids.size or spec.num_rows, dtypes,
                  np.stack([sums(rows * float(bytes_of_row(d, spec.dim))) for d in dtypes]),
                  np.stack([sums(lookups * errors.squared[d]) for d in dtypes]),
                  float(lookups @ errors.energy))
