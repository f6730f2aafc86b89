"""Row types by hotness: the fewest bytes within an error budget, wider types for hotter rows."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.search.precision import ROW_TYPES, RowErrors, blocks_of, choose_dtypes
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec, bytes_of_row

TABLES = [TableSpec("hot", 4000, 64, ("a",)), TableSpec("flat", 300, 16, ("b",)),
          TableSpec("odd", 50, 7, ("c",))]


def nominal_errors(spec: TableSpec, edges: np.ndarray) -> RowErrors:
    """Approximate errors for rows of normally distributed numbers."""
    blocks, dim = np.random.default_rng(spec.num_rows).uniform(0.9, 1.1, edges.size - 1), spec.dim
    step = {"int8": 4.5 / 255, "int4": 4.5 / 15}
    squared = {"float16": dim * 2.0 ** -22 / 6 * blocks,
               **{d: dim * x ** 2 / 12 * blocks for d, x in step.items()}}
    if dim % 2:
        del squared["int4"]
    return RowErrors(edges, dim * blocks, squared)


def stats() -> AccessStats:
    """Counts like 1/k in the first table, equal ones elsewhere."""
    found = {}
    for t in TABLES:
        ids = np.random.default_rng(t.dim).permutation(t.num_rows)
        counts = np.maximum(1, 40_000 // np.arange(1, t.num_rows + 1)) if t.name == "hot" else \
            np.full(t.num_rows, 100)
        lengths = np.array([1]), np.array([int(counts.sum())])
        found[t.name] = TableStats.from_counts(t.num_rows, ids, counts, lengths)
    return AccessStats(30_000, found)


def errors(given: AccessStats) -> dict[str, RowErrors]:
    return {t.name: nominal_errors(t, blocks_of(t, given).edges) for t in TABLES}


def expected(given: AccessStats, known: dict[str, RowErrors],
             dtypes: dict[str, list[tuple[int, str]]]) -> tuple[float, int]:
    """Error and bytes of types of rows, row by row."""
    lost = energy = num_bytes = 0.0
    for t in TABLES:
        lookups, e = blocks_of(t, given).lookups, known[t.name]
        energy += float(lookups @ e.energy)
        rows = np.diff(e.edges)
        begin = 0
        for end, dtype in dtypes[t.name]:
            lost += float(np.repeat(lookups / rows * e.squared[dtype], rows)[begin:end].sum())
            num_bytes += (end - begin) * bytes_of_row(dtype, t.dim)
            begin = end
    return lost / energy, round(num_bytes)


def test_a_budget_is_kept_and_used() -> None:
    given = stats()
    known = errors(given)
    last = 0
    for budget in (1.0, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6):
        found = choose_dtypes(TABLES, given, known, budget)
        assert found.error <= budget
        if budget <= 1e-3:  # what is left would not pay for a block of each table
            assert found.error > 0.93 * budget
        error, num_bytes = expected(given, known, found.dtypes)
        assert error == pytest.approx(found.error)
        assert num_bytes == found.num_bytes >= last
        last = num_bytes
        for t in TABLES:
            ranges = found.dtypes[t.name]
            assert ranges[-1][0] == t.num_rows
            assert [s for s, _ in ranges] == sorted({s for s, _ in ranges})
            order = [ROW_TYPES.index(d) for _, d in ranges]
            assert order == sorted(set(order))
    cheap = choose_dtypes(TABLES, given, known, 1.0).dtypes
    assert cheap == {"hot": [(4000, "int4")], "flat": [(300, "int4")], "odd": [(50, "int8")]}
    middle = choose_dtypes(TABLES, given, known, 1e-3)
    assert len(middle.dtypes["hot"]) > 1


def test_rows_that_were_never_looked_up_cross_together() -> None:
    """Their order of hotness is unknown, so they are not divided."""
    table = replace(TABLES[0], num_rows=50_000)
    counts = np.maximum(2, 40_000 // np.arange(1, 2001))
    given = AccessStats(30_000, {table.name: TableStats.from_counts(
        table.num_rows, np.arange(2000)[::-1], counts,
        (np.array([1]), np.array([int(counts.sum())])))})
    known = {table.name: nominal_errors(table, blocks_of(table, given).edges)}
    ends = {end for budget in np.geomspace(1e-5, 1e-2, 40)
            for end, _ in choose_dtypes([table], given, known, float(budget)).dtypes[table.name]}
    assert len(ends) > 20 and all(end <= 2000 or end == table.num_rows for end in ends)


def test_nothing_with_less_error_takes_fewer_bytes() -> None:
    """Compared with all divisions of a table into three ranges."""
    table = TABLES[0]
    given = stats()
    known = errors(given)[table.name]
    lookups = blocks_of(table, given).lookups
    rows = np.diff(known.edges)
    blocks = range(rows.size + 1)
    cuts = [(a, b) for a in blocks for b in blocks if a <= b]
    tried = []
    for a, b in cuts:
        parts = [slice(0, a), slice(a, b), slice(b, rows.size)]
        tried.append((
            sum(float(lookups[p] @ known.squared[d][p])
                for p, d in zip(parts, ROW_TYPES, strict=True)),
            sum(int(rows[p].sum()) * bytes_of_row(d, table.dim)
                for p, d in zip(parts, ROW_TYPES, strict=True))))
    energy = float(lookups @ known.energy)
    for budget in (3e-3, 1e-3, 3e-4, 1e-4):
        found = choose_dtypes([table], given, {table.name: known}, budget)
        better = [x for x in tried if x[0] <= found.error * energy * (1 - 1e-9)
                  and x[1] < found.num_bytes]
        assert not better


def test_measured_errors_decide() -> None:
    """Rows that a narrow type stores exactly get it even if they are hot."""
    given = stats()
    known = errors(given)
    exact = {d: 0.0 * x for d, x in known["hot"].squared.items()}
    known["hot"] = RowErrors(known["hot"].edges, known["hot"].energy, exact)
    found = choose_dtypes(TABLES, given, known, 1e-4)
    assert found.dtypes["hot"] == [(4000, "int4")]


def test_what_is_refused() -> None:
    given = stats()
    known = errors(given)
    for bad in (0.0, -1.0, float("nan"), float("inf"), "1e-4"):
        with pytest.raises(InvalidInputError, match="error_budget"):
            choose_dtypes(TABLES, given, known, bad)  # type: ignore[arg-type]
    with pytest.raises(PlanInfeasibleError, match="the error of the widest types"):
        choose_dtypes(TABLES, given, known, 1e-12)
    edges = np.array([0, 17, 4000])
    known["hot"] = nominal_errors(TABLES[0], edges)
    with pytest.raises(InvalidInputError, match="the same statistics"):
        choose_dtypes(TABLES, given, known, 1e-3)


def test_a_type_that_cannot_hold_a_row_is_not_given_to_it() -> None:
    """Its measured error is infinite, e.g. that of 1e5 as float16."""
    given = stats()
    known = errors(given)["hot"]
    known.squared["float16"][3] = np.inf
    for budget in (1e-2, 1e-3, 1e-4):
        with warnings.catch_warnings(action="error"):
            found = choose_dtypes(TABLES[:1], given, {"hot": known}, budget)
        begin, end = known.edges[3:5]
        ranges = found.dtypes["hot"]
        starts = [0, *(stop for stop, _ in ranges)]
        assert not any(dtype == "float16" and start < end and stop > begin
                       for start, (stop, dtype) in zip(starts, ranges, strict=False))
        assert found.error <= budget
