"""Mixed precision by hotness: choose the storage type of every row of read-only tables.

Storing a row as a narrower type adds its squared error to every lookup, and saves bytes once.
Minimising bytes under a total error budget decomposes by a Lagrange multiplier, the price of error
(Everett, "Generalized Lagrange multiplier method", 1963): at a given price, every table chooses its
types independently. The price is found by bisection. Many blocks may change to a narrower type at
the same price; the remaining budget is spent on them table by table, block by block. Within a table
hotter rows never get a narrower type than colder rows, so that each type is one range of positions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oper.errors import PlanInfeasibleError, require
from oper.search.problem.statement import IDS, make_table
from oper.stats import AccessStats
from oper.tables import TableSpec, bytes_of_row

ROW_TYPES = ("float16", "int8", "int4")  # widest first
_BISECTIONS = 60
_PARTS = 64  # a block has at most about 1 / 64 of a table's rows
_LARGEST_PRICE = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class RowErrors:
    """Squared errors of storing rows as other types, by block of a table's hotness order.

    Attributes:
        edges: int64 [K + 1], positions; block k is [edges[k], edges[k + 1]).
        energy: float64 [K], squared norm of a row, mean over the block.
        squared: by type, float64 [K], squared norm of a row's rounding error, mean over the block.
    """

    edges: np.ndarray
    energy: np.ndarray
    squared: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Precision:
    """Row types of every table.

    Attributes:
        dtypes: by table, (exclusive end position, type) of each range, hottest first.
        error: expected squared error of all numbers that lookups read, divided by the expected sum
            of their squares.
        num_bytes: bytes of all rows.
    """

    dtypes: dict[str, list[tuple[int, str]]]
    error: float
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of a table's rows in hotness order.

    Attributes:
        edges: int64 [K + 1], positions; block k is [edges[k], edges[k + 1]).
        lookups: float64 [K], expected lookups of each block, in an arbitrary unit.
        head_ids: int64 [H], row ids of the first H positions; empty if ids are positions.
    """

    edges: np.ndarray
    lookups: np.ndarray
    head_ids: np.ndarray


def blocks_of(spec: TableSpec, stats: AccessStats | None) -> Blocks:
    """Cut a table into blocks of about equal hotness, for which `RowErrors` are to be measured.

    A block has at most about 1/64 of the table's rows. Rows whose order is not known come last, in
    the order of their ids.

    Args:
        spec: the table.
        stats: access statistics; None = all rows are looked up equally often.
    """
    problem = make_table(spec, stats, 1, 1)
    sizes = np.diff(problem.edges)
    parts = -(-sizes * _PARTS // spec.num_rows)
    block = np.repeat(np.arange(sizes.size), parts)
    nth = np.arange(block.size) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = problem.edges[block] + nth * sizes[block] // parts[block]
    edges = np.unique(np.append(begins, spec.num_rows))
    inside = np.searchsorted(problem.edges, edges[:-1], side="right") - 1
    lookups = problem.blocks[inside, IDS] * np.diff(edges) / sizes[inside]
    return Blocks(edges, lookups, problem.head_ids)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Cumulative sums over the blocks before each edge; arrays are float64 [num_types, K + 1]."""

    edges: np.ndarray
    dtypes: list[str]
    num_bytes: np.ndarray
    error: np.ndarray
    energy: float

    def ranges(self, price: float) -> list[int]:
        """Indices of the edges at which the types' ranges end, widest type first, if a unit of
        error costs `price` bytes."""
        cost = self.num_bytes + (price * self.error if price else 0.0)  # errors may be infinite
        every = np.arange(self.edges.size)
        least, begins = cost[0], []
        for mine in cost[1:]:
            before = least - mine  # cost of ending the wider types at each edge
            best = np.minimum.accumulate(before)
            begins.append(np.maximum.accumulate(np.where(before == best, every, 0)))
            least = best + mine
        stops = [self.edges.size - 1]
        for begin in reversed(begins):
            stops.append(int(begin[stops[-1]]))
        return stops[::-1]

    def narrowed(self, within: Sequence[int], beyond: Sequence[int], allowed: float) -> list[int]:
        """Move the ends of the ranges from `within`, whose error is at most `allowed`, towards
        `beyond`, as far as the error stays at most `allowed`."""
        most = max(1, *(abs(b - a) for a, b in zip(within, beyond, strict=True)))

        def after(steps: int) -> list[int]:
            return [a + (b - a) * steps // most for a, b in zip(within, beyond, strict=True)]

        return after(max(0, bisect.bisect_right(
            range(most + 1), allowed, key=lambda k: self.total(self.error, after(k))) - 1))

    def total(self, sums: np.ndarray, stops: Sequence[int]) -> float:
        """Sum `num_bytes` or `error` over the ranges that end at `stops`."""
        begins = [0, *stops[:-1]]
        return float(sum(mine[stop] - mine[begin]
                         for mine, begin, stop in zip(sums, begins, stops, strict=True)))


def choose_dtypes(tables: Sequence[TableSpec], stats: AccessStats | None,
                  errors: Mapping[str, RowErrors], error_budget: float) -> Precision:
    """Choose the row dtypes that take the fewest bytes within an error budget.

    Args:
        tables: the tables.
        stats: access statistics; None = all rows are looked up equally often.
        errors: by table, the errors of the dtypes that the table may use, for the blocks that
            `blocks_of` returns.
        error_budget: upper limit of `Precision.error`; 1e-4 is a relative root mean square error
            of 1 %.

    Raises:
        InvalidInputError: the budget is not a positive number, or `errors` has other blocks.
        PlanInfeasibleError: even the widest types exceed the budget.
    """
    what = "cannot choose row dtypes"
    is_right = isinstance(error_budget, int | float) and 0 < error_budget < math.inf
    require(what, "pass for example 1e-4", ("error_budget", error_budget, is_right, "a number > 0"))
    found = {t.name: _sums(t, stats, errors[t.name]) for t in tables}
    energy = sum(t.energy for t in found.values())
    allowed = error_budget * energy

    def at(price: float) -> tuple[float, dict[str, list[int]]]:
        stops = {name: t.ranges(price) for name, t in found.items()}
        return sum(t.total(t.error, stops[name]) for name, t in found.items()), stops

    lost, stops = at(0.0)
    if lost > allowed:
        beyond = stops  # the ranges at the highest price at which the error exceeds the budget
        lost, stops = at(_LARGEST_PRICE)
        if lost > allowed:
            raise PlanInfeasibleError(what, "error_budget", error_budget,
                                      f">= {lost / energy:.3g}, the error of the widest types",
                                      "raise the budget, or keep these tables in float32")
        low, high = -float(_BISECTIONS), math.log(_LARGEST_PRICE)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            more, there = at(math.exp(middle))
            if more <= allowed:
                high, lost, stops = middle, more, there
            else:
                low, beyond = middle, there
        for name, t in found.items():
            lost -= t.total(t.error, stops[name])
            stops[name] = t.narrowed(stops[name], beyond[name], allowed - lost)
            lost += t.total(t.error, stops[name])
    dtypes = {}
    for name, t in found.items():
        ends = zip(stops[name], [0, *stops[name][:-1]], t.dtypes, strict=True)
        dtypes[name] = [(int(t.edges[stop]), dtype) for stop, begin, dtype in ends if stop > begin]
    return Precision(dtypes, lost / energy if energy else 0.0, round(sum(
        t.total(t.num_bytes, stops[name]) for name, t in found.items())))


def _sums(spec: TableSpec, stats: AccessStats | None, errors: RowErrors) -> _Table:
    """Cumulative bytes and errors of a table; raises InvalidInputError if the errors were measured
    for other blocks."""
    blocks = blocks_of(spec, stats)
    rows, lookups = np.diff(errors.edges), blocks.lookups
    require(f"cannot choose row dtypes for table {spec.name!r}",
            "measure the errors for the blocks that blocks_of returns with the same statistics",
            ("edges", errors.edges[:4].tolist(), np.array_equal(blocks.edges, errors.edges),
             f"{blocks.edges[:4].tolist()}..."))
    dtypes = [dtype for dtype in ROW_TYPES if dtype in errors.squared]

    def sums(each: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(1), np.cumsum(each)])

    return _Table(errors.edges, dtypes,
                  np.stack([sums(rows * float(bytes_of_row(d, spec.dim))) for d in dtypes]),
                  np.stack([sums(lookups * errors.squared[d]) for d in dtypes]),
                  float(lookups @ errors.energy))
