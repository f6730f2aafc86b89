"""Pages about access statistics and about benchmark records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oper.analysis.summary import skew
from oper.errors import FileFormatError, fail
from oper.report.figures import pyplot, svg_of
from oper.report.page import render
from oper.stats import AccessStats, TableStats

_MAX_CURVES = 10
_MAX_BARS = 40
Named = Sequence[tuple[str, TableStats]]


def stats_page(stats: AccessStats) -> str:
    """Coverage, hotness, bag lengths, presence and drift of all tables; plots of the busiest."""
    busiest: Named = sorted(stats.tables.items(), key=lambda item: -item[1].num_accesses)
    busiest = busiest[:_MAX_CURVES]
    shown = "" if len(stats.tables) <= _MAX_CURVES else f" The {_MAX_CURVES} busiest tables."
    every = {n: skew(t) for n, t in stats.tables.items()}
    plots = [
        ("How much the hottest rows cover", "Share of a table's lookups that meet its hottest "
         f"rows.{shown}", _coverage(busiest)),
        ("How often rows are looked up", "Rows by number of lookups, in powers of two." + shown,
         _hotness(busiest))]
    if any(t.presence_samples.size for _, t in busiest):
        plots.append(("Distinct rows of a batch", "Measured presence: mean distinct rows that so "
                      "many consecutive samples touch." + shown, _presence(busiest)))
    if any(t.length_values.size > 1 for _, t in busiest):
        plots.append(("Bag lengths", "Share of bags by ids per bag." + shown, _lengths(busiest)))
    if any(len(t.buckets) > 1 for _, t in busiest):
        plots.append(("Drift", "Total variation distance of the lookups in neighbouring time "
                      "buckets, 0 = alike, 1 = nothing in common; rare ids add noise." + shown,
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
    return render("Access statistics", about, tiles, plots, [("All tables", head, rows)])


def _axes(xlabel: str, ylabel: str, log: str = "") -> tuple[Any, Any]:
    figure, axis = pyplot().subplots(figsize=(7.6, 3.8))
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")
    return figure, axis


def _colour(k: int, count: int) -> Any:
    return pyplot().get_cmap("viridis")(0.9 * k / max(1, count - 1))


def _finish(figure: Any, axis: Any, name: str) -> str:
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return svg_of(figure, name)


def _coverage(tables: Named) -> str:
    figure, axis = _axes("share of rows, hottest first", "share of lookups", "x")
    for k, (name, t) in enumerate(tables):
        sizes = np.unique(np.geomspace(1, t.num_rows, 200).astype(np.int64))
        axis.plot(sizes / t.num_rows, t.coverage(sizes), color=_colour(k, len(tables)), label=name)
    axis.set_ylim(0, 1.02)
    return _finish(figure, axis, "coverage")


def _hotness(tables: Named) -> str:
    figure, axis = _axes("lookups of a row", "rows", "xy")
    for k, (name, t) in enumerate(tables):
        values, rows = t.count_histogram()
        touched = values > 0
        bins = np.floor(np.log2(values[touched])).astype(np.int64)
        total = np.bincount(bins, rows[touched])
        found = np.flatnonzero(total)
        axis.plot(2.0**found, total[found], "o-", markersize=3, linewidth=1, label=name,
                  color=_colour(k, len(tables)))
    return _finish(figure, axis, "hotness")


def _presence(tables: Named) -> str:
    figure, axis = _axes("samples", "distinct rows", "xy")
    for k, (name, t) in enumerate(tables):
        axis.plot(t.presence_samples, t.presence_rows, "o-", markersize=3, linewidth=1, label=name,
                  color=_colour(k, len(tables)))
    return _finish(figure, axis, "presence")


def _lengths(tables: Named) -> str:
    figure, axis = _axes("ids per bag", "share of bags")
    for k, (name, t) in enumerate(tables):
        if t.num_bags:
            axis.plot(t.length_values, t.length_counts / t.num_bags, "o-", markersize=3,
                      linewidth=1, label=name, color=_colour(k, len(tables)))
    axis.set_xscale("symlog", linthresh=16)
    axis.set_xlim(left=0)
    return _finish(figure, axis, "lengths")


def _drift(tables: Named) -> str:
    from oper.analysis.summary import bucket_distances

    figure, axis = _axes("time bucket", "distance from the one before")
    for k, (name, t) in enumerate(tables):
        found = bucket_distances(t)
        axis.plot(np.arange(1, len(found) + 1), found, "o-", markersize=3, linewidth=1, label=name,
                  color=_colour(k, len(tables)))
    axis.set_ylim(0, 1)
    return _finish(figure, axis, "drift")


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A benchmark record; raises FileFormatError."""
    what = f"cannot read {os.fspath(path)!r} as a benchmark record"
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if all(isinstance(c["name"], str) for c in value["cases"]) and value["benchmark"]:
            found: dict[str, Any] = value
            return found
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(fail(what, "content", str(error), "what oper bench --json writes",
                                   "pass such a file")) from None
    raise FileFormatError(fail(what, "cases", value.get("cases"), "cases with names",
                               "pass what oper bench --json writes"))


def bench_page(value: Mapping[str, Any]) -> str:
    """Every number of a benchmark record: a plot per key that several cases share, and a table."""
    cases = value["cases"]
    numbers = [{k: float(v) for k, v in c.items()
                if isinstance(v, int | float) and not isinstance(v, bool)} for c in cases]
    keys = list(dict.fromkeys(k for found in numbers for k in found))
    shared = [k for k in keys if sum(k in found for found in numbers) >= 2]
    plots = [(k.replace("_", " "), f"{k} by case.", _bars(k, [
        (c["name"], found[k]) for c, found in zip(cases, numbers, strict=True) if k in found]))
        for k in shared]
    rows = [[c["name"], "yes" if c.get("verified") else "no",
             *(f"{found[k]:,.4g}" if k in found else "-" for k in keys)]
            for c, found in zip(cases, numbers, strict=True)]
    machine = value.get("machine", {})
    about = "; ".join(str(x) for x in (value.get("command"), machine.get("cpu"),
                                       f"{machine.get('cores', '?')} cores") if x)
    tiles = [("cases", f"{len(cases)}"),
             ("verified", f"{sum(bool(c.get('verified')) for c in cases)}")]
    versions = sorted(value.get("versions", {}).items())
    return render(f"Benchmark: {value['benchmark']}", about, tiles, plots, [
        ("All figures", ["case", "verified", *keys], rows),
        ("Versions", ["package", "version"], versions)])


def _bars(key: str, values: Sequence[tuple[str, float]]) -> str:
    values = values[:_MAX_BARS]
    figure, axis = pyplot().subplots(figsize=(7.6, 0.7 + 0.26 * len(values)))
    axis.barh(range(len(values)), [v for _, v in values], color="#0072B2")
    axis.set_yticks(range(len(values)), [n for n, _ in values], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(key)
    axis.spines[["top", "right"]].set_visible(False)
    return svg_of(figure, f"bars {key}")
