"""Pages about access statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.analysis.summary import skew
from oper.report.figures import MAX_CURVES, axes, line, short, with_legend
from oper.report.page import Plot, Table, render
from oper.stats import AccessStats, TableStats

Named = Sequence[tuple[str, TableStats]]


def stats_page(stats: AccessStats) -> str:
    """Return a page with coverage, hotness, bag lengths, presence and drift; the plots show the
    tables with the most lookups."""
    busiest: Named = [(n, t) for n, t in sorted(
        stats.tables.items(), key=lambda item: -item[1].num_accesses)[:MAX_CURVES]
        if t.num_accesses]
    shown = "" if len(stats.tables) <= MAX_CURVES else f" The {MAX_CURVES} busiest tables."
    every = {n: skew(t) for n, t in stats.tables.items()}
    plots = []
    if busiest:
        plots.append(Plot("How much the hottest rows cover", "Share of a table's lookups that go "
                          f"to its hottest rows.{shown}", _coverage(busiest)))
        plots.append(Plot("How often rows are looked up", "Rows by number of lookups, in powers of "
                          f"two.{shown}", _hotness(busiest)))
    if any(t.presence_samples.size for _, t in busiest):
        plots.append(Plot("Distinct rows of a batch", "Measured presence: mean number of distinct "
                          "rows by number of consecutive samples." + shown, _presence(busiest)))
    if any(t.length_values.size > 1 for _, t in busiest):
        plots.append(Plot("Bag lengths", "Share of bags by ids per bag." + shown,
                          _lengths(busiest)))
    if any(len(t.buckets) > 1 for _, t in busiest):
        plots.append(Plot("Drift", "Total variation distance of the lookups in consecutive time "
                          "buckets: 0 = equal, 1 = disjoint; rare ids add noise." + shown,
                          _drift(busiest)))
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


def _coverage(tables: Named) -> str:
    figure, axis = axes("share of rows, hottest first", "share of lookups", "x")
    for k, (name, t) in enumerate(tables):
        sizes = np.unique(np.geomspace(1, t.num_rows, 200).astype(np.int64))
        axis.plot(sizes / t.num_rows, t.coverage(sizes), **line(k, marked=sizes.size == 1),
                  label=short(name))
    axis.set_ylim(0, 1.02)
    return with_legend(figure, axis, "coverage")


def _hotness(tables: Named) -> str:
    figure, axis = axes("lookups of a row", "rows", "xy")
    for k, (name, t) in enumerate(tables):
        values, rows = t.count_histogram()
        touched = values > 0
        bins = np.floor(np.log2(values[touched])).astype(np.int64)
        total = np.bincount(bins, rows[touched])
        found = np.flatnonzero(total)
        axis.plot(2.0**found, total[found], **line(k), label=short(name))
    return with_legend(figure, axis, "hotness")


def _presence(tables: Named) -> str:
    figure, axis = axes("samples", "distinct rows", "xy")
    for k, (name, t) in enumerate(tables):
        axis.plot(t.presence_samples, t.presence_rows, **line(k), label=short(name))
    return with_legend(figure, axis, "presence")


def _lengths(tables: Named) -> str:
    figure, axis = axes("ids per bag", "share of bags")
    for k, (name, t) in enumerate(tables):
        if t.num_bags:
            axis.plot(t.length_values, t.length_counts / t.num_bags, **line(k), label=short(name))
    top = max(int(t.length_values[-1]) for _, t in tables if t.num_bags)
    axis.set_xscale("symlog" if top > 32 else "linear", **{"linthresh": 16} if top > 32 else {})
    axis.set_xlim(-0.02 * top, 1.1 * top)
    axis.xaxis.set_major_formatter("{x:g}")
    return with_legend(figure, axis, "lengths")


def _drift(tables: Named) -> str:
    from oper.analysis.summary import bucket_distances

    figure, axis = axes("time bucket", "distance from the previous one")
    for k, (name, t) in enumerate(tables):
        found = bucket_distances(t)
        axis.plot(np.arange(1, len(found) + 1), found, **line(k), label=short(name))
    axis.set_ylim(0, 1)
    return with_legend(figure, axis, "drift")
