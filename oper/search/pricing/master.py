"""The certified lower bound: a column-generation master over configurations of tables.

The master chooses for every table a convex combination of configurations so that the sum of the
phase times is minimal and no memory overflows (Dantzig and Wolfe 1960). Its duals are the prices
of the resource rows; each table's pricing problem returns its cheapest configuration at these
prices (`Node.price`). The bound is then recomputed from the prices: any prices that are
non-negative and sum to at most 1 over each phase certify it, whatever status the solver reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from oper.errors import OperError
from oper.search.cost.model import CostModel
from oper.search.pricing.node import Columns, Configuration, Node
from oper.search.problem.statement import Problem
from oper.search.relaxation.relaxation import Relaxation

MAX_ROUNDS = 200  # limit of rounds of column generation
_SEVERAL = 4e-4  # least tolerance if ranks differ: prices of several classes converge slowly
_KEPT = 4  # cheapest configurations per table that a child inherits, besides the solution's
_NEVER = 1e15  # microseconds: the bound of a node without plans
_ELASTIC = 1e3  # cost of missing memory, relative to the step time of the first configurations


@dataclass(eq=False)
class Pool:
    """The columns generated so far: configurations of tables, and their consumption of resources.

    Attributes:
        table: index of each configuration's table.
        configuration: the configurations.
        resources: float64 [R] each, their consumption of the resource rows.
        known: keys that identify the configurations, in the same order.
        weight: float64 [N], value of each configuration in the relaxed solution.
        times: float64 [P], lengths of the phases in the relaxed solution, microseconds.
        basis: final basis of the last simplex run: HiGHS statuses of the columns that are not
            configurations, and of the rows; None before the first run.
        in_basis: whether each configuration was basic in that run.
    """

    table: list[int] = field(default_factory=list)
    configuration: list[Configuration] = field(default_factory=list)
    resources: list[np.ndarray] = field(default_factory=list)
    weight: np.ndarray = field(default_factory=lambda: np.zeros(0))
    times: np.ndarray = field(default_factory=lambda: np.zeros(0))
    known: dict[tuple[Any, ...], None] = field(default_factory=dict)
    basis: tuple[list[Any], list[Any]] | None = None
    in_basis: list[bool] = field(default_factory=list)

    def add(self, columns: Columns, wanted: np.ndarray) -> bool:
        """Add the configurations of the tables `wanted` that are new; returns whether any was."""
        before = len(self.table)
        for k in wanted.tolist():
            found = columns.configurations[k]
            if found is not None and (key := (k, *(p.key for p in found))) not in self.known:
                self._append(key, k, found, columns.resources[k])
        return len(self.table) > before

    def _append(self, key: tuple[Any, ...], table: int, found: Configuration,
                resources: np.ndarray) -> None:
        self.known[key] = None
        self.table.append(table)
        self.configuration.append(found)
        self.resources.append(resources)

    def least_costs(self, prices: np.ndarray, num_tables: int) -> np.ndarray:
        """Cost of each table's cheapest configuration in the pool at `prices`; float64 [T]."""
        out = np.full(num_tables, np.inf)
        np.minimum.at(out, self.table, np.array(self.resources) @ prices)
        return out

    def under(self, node: Node, prices: np.ndarray) -> Pool:
        """The pool for a child node: those configurations of this solved pool that it allows.

        Of them, it has the cheapest few of each table at `prices` (float64 [R]), and those in the
        relaxed solution.
        """
        out = Pool()
        held = (node.holds(np.array(self.table), self.configuration) if self.table
                else np.zeros(0, bool))
        at = np.flatnonzero(held).tolist()
        if not at:
            return out
        tables = np.array(self.table)[at]
        order = np.lexsort((np.array(self.resources)[at] @ prices, tables))
        first = np.searchsorted(tables[order], tables[order])  # first entry of the same table
        keep = np.zeros(tables.size, bool)
        keep[order] = np.arange(tables.size) - first < _KEPT
        keep |= self.weight[at] > 0
        kept, known = [at[i] for i in np.flatnonzero(keep).tolist()], list(self.known)
        rows = node.resources(tables[keep], [self.configuration[n] for n in kept])
        for n, row in zip(kept, rows, strict=True):
            out._append(known[n], self.table[n], self.configuration[n], row)
            out.in_basis.append(self.in_basis[n])
        out.basis = self.basis
        return out


@dataclass(frozen=True, eq=False)
class Bound:
    """A certified lower bound on the modelled step time of the plans of a node.

    Attributes:
        lower_bound_us: no plan of the node is faster; 0 if nothing was proved.
        relaxed_us: optimum of the restricted master problem when solving stopped.
        prices: float64 [R], the prices that certify the bound.
        node: the node.
        pool: configurations and their weights in the relaxed solution.
        overflow: smallest possible excess of the relaxed solution over memory, as a share of a
            memory (0 = it fits).
        num_rounds: rounds of column generation.
        is_infeasible: whether prices of memory alone prove that no plan fits (Farkas), or a table
            has no configuration.
    """

    lower_bound_us: float
    relaxed_us: float
    prices: np.ndarray
    node: Node
    pool: Pool
    overflow: float
    num_rounds: int
    is_infeasible: bool = False

    @property
    def relaxation(self) -> Relaxation:
        """The relaxation that the prices belong to."""
        return self.node.relaxation

    def total(self) -> np.ndarray:
        """Consumption of each resource by the relaxed solution and `node.base`; float64 [R]."""
        if not self.pool.resources:
            return self.node.base
        return self.node.base + self.pool.weight @ np.array(self.pool.resources)


def lower_bound(problem: Problem, max_rounds: int = MAX_ROUNDS) -> Bound:
    """The certified lower bound of a problem, by up to `max_rounds` rounds of column generation."""
    return solve_node(Node(Relaxation(CostModel(problem))), max_rounds=max_rounds)


def solve_node(node: Node, tolerance: float = 1e-4, max_rounds: int = MAX_ROUNDS,
               deadline: float | None = None, pool: Pool | None = None,
               enough_us: float = np.inf) -> Bound:
    """Solve the relaxation of a node by column generation.

    Args:
        node: the node.
        tolerance: relative difference between relaxed optimum and bound at which to stop.
        max_rounds: limit of rounds of column generation.
        deadline: `time.monotonic()` value after which no further round begins.
        pool: configurations to start from; the generated ones are added to it.
        enough_us: stop when the bound has reached this.
    """
    pool, relaxation = Pool() if pool is None else pool, node.relaxation
    if not relaxation.tables:
        over = max(0.0, float(node.base[relaxation.phase_of == -1].max()) - 1.0)
        prices = _peaks(relaxation, node.base)
        step = node.bound_at(prices, np.zeros(0))
        return Bound(step, step, prices, node, pool, over, 0, over > 1e-6)
    if not relaxation.has_equal_ranks and relaxation.pushes.any():
        tolerance = max(tolerance, _SEVERAL)
    everything = np.arange(len(relaxation.tables))
    missing = np.setdiff1d(everything, pool.table)
    for prices in _starting_prices(relaxation) if missing.size else ():
        columns = node.price(prices)
        pool.add(columns, missing)
        if np.isinf(columns.value).any():
            none = np.zeros(relaxation.num_rows)
            return Bound(np.inf, np.inf, none, node, pool, np.inf, 0, True)
    master = _Master(node, pool)
    best, best_prices, relaxed, over = 0.0, np.zeros(relaxation.num_rows), np.inf, 0.0
    rounds, solved = 0, None
    while rounds < max_rounds:
        rounds += 1
        solved = master.solve()
        if solved is None:
            break
        relaxed, over, raw = solved
        prices = relaxation.project_prices(raw)
        columns = node.price(prices, pool.least_costs(prices, everything.size))
        found = node.bound_at(prices, columns.value)
        if found > best:
            best, best_prices = found, prices
        if best >= enough_us or relaxed - best <= tolerance * abs(relaxed):
            break
        is_new = pool.add(columns, everything)
        if not is_new or rounds == max_rounds or (
                deadline is not None and time.monotonic() > deadline):
            break
        master.add_columns()
    master.store_weights()
    full = None if over <= 0 or solved is None else _full(node, solved[2])
    if full is not None:
        return Bound(_NEVER, relaxed, full, node, pool, over, rounds, True)
    # The margin is far larger than the rounding error of a few thousand additions.
    return Bound(best * (1 - 1e-9), relaxed, best_prices, node, pool, over, rounds)


def _full(node: Node, prices: np.ndarray) -> np.ndarray | None:
    """Memory prices that prove that no plan fits (Farkas), or None.

    At such prices the tables' least cost exceeds the price of all memory. They are scaled so that
    the bound they certify is at least `_NEVER`. `prices`, float64 [R], gives their ratios.
    """
    memory = np.where(node.relaxation.phase_of == -1, np.maximum(prices, 0.0), 0.0)
    need = node.price(memory).value.sum() + float(memory @ node.base)
    missing = need - float(memory.sum()) * (1 + 1e-9)
    return memory * (1.01 * _NEVER / missing) if missing > 0 else None


def _peaks(relaxation: Relaxation, total: np.ndarray) -> np.ndarray:
    """Prices of 1 on the row with the largest load of each phase, else 0."""
    prices = np.zeros(relaxation.num_rows)
    for phase in range(int(relaxation.phase_of.max()) + 1):
        at = np.flatnonzero(relaxation.phase_of == phase)
        worst = at[int(total[at].argmax())]
        prices[worst] = float(total[worst] > 0)
    return prices


def _starting_prices(relaxation: Relaxation) -> Iterator[np.ndarray]:
    """Prices for the first columns: equal prices, memory only, and each group of terms only."""
    memory = relaxation.phase_of == -1
    yield relaxation.project_prices(np.where(memory, 0.0, 1.0))
    yield np.where(memory, 1e6, 1e-6)
    for group in sorted({name[1] for name in relaxation.rows.names}):
        one = np.zeros(relaxation.num_rows)
        one[:len(relaxation.rows.names)] = [name[1] == group for name in relaxation.rows.names]
        yield relaxation.project_prices(one + 1e-6 * ~memory)


def silent_solver() -> Any:
    """A HiGHS simplex solver that prints nothing, uses one thread and always takes the same path.

    Raises:
        OperError: the release of highspy has other options.
    """
    solver = highspy.Highs()
    for name, value in (("output_flag", False), ("solver", "simplex"), ("threads", 1),
                        ("random_seed", 0), ("simplex_strategy", 4)):
        if solver.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise OperError("the LP solver refuses an option", name, value, "accepted",
                            "install the release of highspy that this package requires")
    return solver


class _Master:
    """The restricted master LP in HiGHS, solved by simplex from the last basis.

    Rows: resource rows `resources x - weighted phase times <= -base` (memory: `<= 1 - base`), then
    one convexity row per table. An elastic column with a high cost keeps memory rows feasible, so
    that a solution always exists; its value is the missing memory.
    """

    def __init__(self, node: Node, pool: Pool) -> None:
        self.pool = pool
        self.relaxation = relaxation = node.relaxation
        self.highs = silent_solver()
        inf = highspy.kHighsInf
        phases = int(relaxation.phase_of.max()) + 1
        memory = np.flatnonzero(relaxation.phase_of == -1)
        self.num_fixed = phases + 1  # phase times and the elastic column
        upper = np.where(relaxation.phase_of == -1, 1.0, 0.0) - node.base
        for value in upper:
            self.highs.addRow(-inf, float(value), 0, np.zeros(0, np.int32), np.zeros(0))
        for _ in relaxation.tables:
            self.highs.addRow(1.0, 1.0, 0, np.zeros(0, np.int32), np.zeros(0))
        for phase in range(phases):
            weight = relaxation.phase_weight[:, phase]
            rows = np.flatnonzero(weight).astype(np.int32)
            self.highs.addCol(1.0, 0.0, inf, rows.size, rows, -weight[rows])
        first = node.base + np.sum([pool.resources[0]], axis=0)
        scale = max(1.0, float(first[relaxation.phase_of >= 0].sum()) * len(relaxation.tables))
        self.highs.addCol(_ELASTIC * scale, 0.0, inf, memory.size, memory.astype(np.int32),
                          -np.ones(memory.size))
        self.num_columns = 0  # configurations of the pool that are in the LP
        self.add_columns()
        if pool.basis is not None:
            self._begin_at(*pool.basis)

    def _begin_at(self, fixed: list[Any], rows: list[Any]) -> None:
        """Start the simplex from the final basis of the parent node."""
        status = highspy.HighsBasisStatus
        basis = highspy.HighsBasis()
        known = self.pool.in_basis + [False] * (len(self.pool.table) - len(self.pool.in_basis))
        basis.col_status = fixed + [status.kBasic if x else status.kLower for x in known]
        basis.row_status = rows
        # Some of its columns may not be in this pool; HiGHS then completes the basis ("alien").
        basis.valid = basis.alien = True
        self.highs.setBasis(basis)

    def add_columns(self) -> None:
        """Add the pool's new configurations to the LP."""
        tables = np.array(self.pool.table)[self.num_columns:]
        # The resources, and a 1 in the convexity row of the column's table.
        num_rows, number = self.relaxation.num_rows, tables.size
        dense = np.ones((number, num_rows + 1))
        dense[:, :num_rows] = self.pool.resources[self.num_columns:]
        column, row = np.nonzero(dense)
        value = dense[column, row]
        row = np.where(row == num_rows, num_rows + tables[column], row)
        starts = np.searchsorted(column, np.arange(number)).astype(np.int32)
        zero = np.zeros(number)
        self.highs.addCols(number, zero, zero, np.full(number, highspy.kHighsInf),
                           row.size, starts, row.astype(np.int32), value)
        self.num_columns += number

    def solve(self) -> tuple[float, float, np.ndarray] | None:
        """Relaxed step time (us), missing memory and raw prices [R]; None if the solver finds no
        optimum."""
        optimal = highspy.HighsModelStatus.kOptimal
        self.highs.run()
        if self.highs.getModelStatus() != optimal:
            # Try once more without the basis, which may be numerically singular.
            self.highs.clearSolver()
            self.highs.run()
            if self.highs.getModelStatus() != optimal:
                return None
        solution = self.highs.getSolution()
        values = np.array(solution.col_value)
        prices = -np.array(solution.row_dual)[:self.relaxation.num_rows]
        times = float(values[:self.num_fixed - 1].sum())
        return times + self.relaxation.fixed_us, float(values[self.num_fixed - 1]), prices

    def store_weights(self) -> None:
        """Write the last solution, its phase times and basis into the pool."""
        values = np.array(self.highs.getSolution().col_value)
        self.pool.times, values = values[:self.num_fixed - 1], values[self.num_fixed:]
        self.pool.weight = np.zeros(len(self.pool.table))
        self.pool.weight[:values.size] = np.maximum(values, 0.0)
        basis = self.highs.getBasis()
        status, basic = list(basis.col_status), highspy.HighsBasisStatus.kBasic
        self.pool.basis = status[:self.num_fixed], list(basis.row_status)
        known = [x == basic for x in status[self.num_fixed:]]
        self.pool.in_basis = known + [False] * (len(self.pool.table) - len(known))
