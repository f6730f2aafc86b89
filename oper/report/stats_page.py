"""Pages about access statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oper.analysis.summary import bucket_distances, skew
from oper.report.figures import MAX_CURVES, curves, short
from oper.report.page import Plot, Table, render
from oper.stats import AccessStats, TableStats

Points = tuple[np.ndarray, np.ndarray]  # x and y


def stats_page(stats: AccessStats) -> str:
    """Return a page with coverage, hotness, bag lengths, presence and drift; the plots show the
    tables with the most lookups."""
    busiest = [(n, t) for n, t in sorted(
        stats.tables.items(), key=lambda item: -item[1].num_accesses)[:MAX_CURVES]
        if t.num_accesses]
    shown = "" if len(stats.tables) <= MAX_CURVES else f" The {MAX_CURVES} busiest tables."
    every = {n: skew(t) for n, t in stats.tables.items()}
    plots: list[Plot] = []

    def plot(heading: str, caption: str, of: Callable[[TableStats], Points],
             labels: tuple[str, str], scales: tuple[str, str] = ("linear", "linear"),
             **options: Any) -> None:
        plots.append(Plot(heading, caption + shown, curves(
            heading, [(short(n), *of(t)) for n, t in busiest], labels, scales, **options)))

    if busiest:
        plot("How much the hottest rows cover",
             "Share of a table's lookups that go to its hottest rows.", _coverage,
             ("share of rows, hottest first", "share of lookups"), ("log", "linear"),
             top=1.02, dense=True)
        plot("How often rows are looked up", "Rows by number of lookups, in powers of two.",
             _hotness, ("lookups of a row", "rows"), ("log", "log"))
    if any(t.presence_samples.size for _, t in busiest):
        plot("Distinct rows of a batch", "Measured presence: mean number of distinct rows by "
             "number of consecutive samples.", lambda t: (t.presence_samples, t.presence_rows),
             ("samples", "distinct rows"), ("log", "log"))
    if any(t.length_values.size > 1 for _, t in busiest):
        longest = max(int(t.length_values[-1]) for _, t in busiest if t.num_bags)
        plot("Bag lengths", "Share of bags by ids per bag.",
             lambda t: (t.length_values, t.length_counts / max(1, t.num_bags)),
             ("ids per bag", "share of bags"), ("symlog" if longest > 32 else "linear", "linear"))
    if any(len(t.buckets) > 1 for _, t in busiest):
        sketched = [short(n) for n, t in busiest if t.sketch is not None]
        plot("Drift", "Total variation distance of the lookups in consecutive time buckets: "
             "0 = equal, 1 = disjoint; rare ids add noise." + (
                 f" Only of the most frequent ids of a bucket, hence usually lower: "
                 f"{', '.join(sketched)}." if sketched else ""), _drift,
             ("time bucket", "distance from the previous one"), top=1.0)
    rows = [[n, f"{s.num_rows:,}", f"{s.num_touched_rows:,}", f"{s.num_accesses:,}",
             f"{s.pooling_factor:.2f}", f"{s.hottest:.3f}", f"{s.top_1pct:.3f}",
             f"{s.top_10pct:.3f}", f"{s.rows_for_90pct:,}", f"{s.unseen_mass:.4f}",
             "-" if np.isnan(s.drift) else f"{s.drift:.3f}"] for n, s in every.items()]
    head = ["table", "rows", "touched", "lookups", "ids per bag", "hottest", "top 1%", "top 10%",
            "rows for 90%", "unseen mass", "drift"]
    tiles = [("samples", f"{stats.num_samples:,}"), ("tables", f"{len(stats.tables):,}"),
             ("rows", f"{sum(t.num_rows for t in stats.tables.values()):,}"),
             ("touched", f"{sum(t.num_touched_rows for t in stats.tables.values()):,}"),
             ("lookups", f"{sum(t.num_accesses for t in stats.tables.values()):,}")]
    inexact = sum(not t.is_exact for t in stats.tables.values())
    about = stats.source + (f"; {inexact} tables with an estimated or modelled tail" if inexact
                            else "; exact counts")
    return render("Access statistics", about, tiles, [*plots, Table("All tables", head, rows)])


def _coverage(t: TableStats) -> Points:
    sizes = np.unique(np.geomspace(1, t.num_rows, 200).astype(np.int64))
    return sizes / t.num_rows, t.coverage(sizes)


def _hotness(t: TableStats) -> Points:
    values, rows = t.count_histogram()
    touched = values > 0
    total = np.bincount(np.floor(np.log2(values[touched])).astype(np.int64), rows[touched])
    found = np.flatnonzero(total)
    return 2.0**found, total[found]


def _drift(t: TableStats) -> Points:
    found = np.array(bucket_distances(t))
    return np.arange(1, found.size + 1), found
