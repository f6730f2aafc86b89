"""Plots as SVG text for self-contained pages."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oper.errors import needs
from oper.plan import Plan, Tier
from oper.search.cost.model import Evaluation, is_ordered
from oper.search.problem.machine import TERMS
from oper.search.problem.statement import IDS, Problem

# Colours that can be distinguished with any colour vision (Okabe and Ito, 2008).
_TERM_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00",
                 "#882255")
PLACEMENT_COLOURS = {"replicated": "#009E73", "striped": "#56B4E9", "striped push": "#0072B2",
                     "owned": "#E69F00", "owned push": "#D55E00",
                     "host memory": "#882255", "copy per host": "#CC79A7"}
MARK = "#7f7f7f"  # visible on light and on dark pages
MAX_CURVES = 10  # tables in a plot of curves
_MAX_LABEL = 48  # characters
MAX_MAPPED = 40  # tables in the placement map
_WIDTH = 4.8  # inches of every plot, so that its text can be read on a phone
# Label, colour and matplotlib line style of every entry of a legend.
Legend = Sequence[tuple[str, str, str]]


def pyplot() -> Any:
    """Import Matplotlib's pyplot with a backend that needs no display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with needs("cannot draw plots", "oper[report]"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def canvas(height: float, num_rows: int = 1) -> tuple[Any, Any]:
    """Create a figure of the common width, `height` inches high, with `num_rows` axes from top to
    bottom; returns the figure, and the axes (a single one if `num_rows` is 1)."""
    figure, axes = pyplot().subplots(num_rows, 1, figsize=(_WIDTH, height), layout="constrained",
                                     squeeze=False)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(which="both", labelsize=9)
    return figure, axes[0, 0] if num_rows == 1 else axes[:, 0]


def svg_of(figure: Any, name: str, legend: Legend = ()) -> str:
    """Convert a figure to a self-contained SVG element, preceded by its legend.

    The legend is HTML text, so that its lines can wrap on narrow pages.

    Args:
        figure: a matplotlib figure; closed afterwards.
        name: unique name on the page, from which identifiers inside the SVG are derived.
        legend: the entries.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", bbox_inches="tight", transparent=True,
                       metadata={"Date": None})
    pyplot().close(figure)
    text = out.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # implied inside HTML
    lines = {"-": "solid", "--": "dashed", ":": "dotted"}
    entries = "".join(f'<li><i style="border-color: {colour}; border-style: {lines[line]}"></i>'
                      f"{html.escape(label)}</li>" for label, colour, line in legend)
    return (f'<ul class="legend">{entries}</ul>' if entries else "") + text


def short(name: str) -> str:
    """Shorten a name to fit a label."""
    return name if len(name) <= _MAX_LABEL else name[:_MAX_LABEL - 1] + "\u2026"


def plain(name: str) -> str:
    """Shorten a name for an axis label, and escape dollar signs, which would begin a formula."""
    return short(name).replace("$", r"\$")


def loads(found: Evaluation, before: Evaluation | None) -> str:
    """Plot microseconds per rank by term, with one panel per phase; marks show the loads of the
    plan `before`."""
    num_ranks = found.held_bytes.size
    figure, axes = canvas(0.4 + 1.5 * len(found.phases), len(found.phases))
    ranks, legend = np.arange(num_ranks), {TERMS[0]: colour(0)}
    for number, (axis, phase) in enumerate(zip(np.atleast_1d(axes), found.phases, strict=True)):
        us = phase.seconds * 1e6
        # Memory and compute add up. Links have separate bars, which start above own work if it
        # precedes the exchange.
        links = [k for k in range(2, len(TERMS)) if us[k].max() > 0]
        bar = 0.8 / (1 + len(links))
        axis.bar(ranks, us[0], bar, color=colour(0))
        if us[1].max() > 0:
            axis.bar(ranks, us[1], bar, us[0], color=colour(1))
            legend[TERMS[1]] = colour(1)
        for slot, k in enumerate(links, 1):
            below = phase.has_local[k - 1] * (us[0] + us[1])
            axis.bar(ranks + slot * bar, us[k], bar, below, color=colour(k))
            legend[TERMS[k].replace("_", " ")] = colour(k)
        if before is not None:
            level = before.phases[number].groups.max(axis=0) * 1e6
            axis.hlines(level, ranks - bar / 2, ranks + bar * (len(links) + 0.5), MARK,
                        linewidth=2)
            legend["whole tables"] = MARK
        axis.set_title(phase.name, fontsize=10)
        axis.set_xticks((ranks + bar * len(links) / 2)[:: max(1, num_ranks // 16)],
                        ranks[:: max(1, num_ranks // 16)])
        axis.set_ylabel("microseconds")
    axis.set_xlabel("rank")
    return svg_of(figure, "loads", [(label, c, "-") for label, c in legend.items()])


def coverage(problem: Problem) -> str:
    """Plot the share of lookups that each share of hottest rows receives, by table."""
    tables = sorted(problem.tables, key=lambda t: -float(t.total[IDS]) * t.spec.dim)[:MAX_CURVES]
    return curves("coverage", [
        (f"{short(t.spec.name)} ({t.spec.num_rows:,} rows)", t.edges[1:] / t.spec.num_rows,
         t.cumulative[IDS][1:] / max(float(t.total[IDS]), 1e-300)) for t in tables],
        ("share of rows, hottest first", "share of lookups"), ("log", "linear"), 1.02, dense=True)


def stacked(bars: Sequence[tuple[str, Mapping[str, float]]], label: str, name: str) -> str:
    """Plot horizontal bars made of named parts; a part has the same colour in all bars.

    Args:
        bars: for each bar, its title and the size of each of its parts.
        label: label of the value axis; a single part of this name needs no legend.
        name: see `svg_of`.
    """
    parts = list(dict.fromkeys(part for _, found in bars for part in found))
    figure, axis = canvas(0.7 + 0.28 * len(bars))
    for y, (_, found) in enumerate(bars):
        left = 0.0
        for part, value in found.items():
            axis.barh(y, value, 0.7, left, color=colour(parts.index(part)))
            left += value
    name_bars(axis, [title for title, _ in bars], label)
    legend = [(short(part), colour(k), "-") for k, part in enumerate(parts)]
    return svg_of(figure, name, legend if parts != [label] else ())


def name_bars(axis: Any, names: Sequence[str], label: str) -> None:
    """Label horizontal bars (at 0, 1, ... from the top) and their value axis."""
    axis.set_yticks(range(len(names)), [plain(n) for n in names])
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlabel(plain(label))


def colour(k: int) -> str:
    """Return the colour of the k-th part or curve."""
    return _TERM_COLOURS[k % len(_TERM_COLOURS)]


def curves(name: str, found: Sequence[tuple[str, Any, Any]],
           labels: tuple[str, str], scales: tuple[str, str] = ("linear", "linear"),
           top: float | None = None, dense: bool = False, ticks: Sequence[str] = ()) -> str:
    """Plot curves, each in one of 21 combinations of colour and dashes; those without points are
    left out.

    Args:
        name: see `svg_of`.
        found: label, x and y (sequences) of each curve.
        labels: labels of the axes.
        scales: matplotlib's scales of the axes.
        top: end of the y-axis, which then begins at 0.
        dense: whether to mark the points only of curves with fewer than three.
        ticks: names of the places 0, 1, ... on the x-axis; by default their numbers.
    """
    figure, axis = canvas(2.8)
    axis.set(xlabel=labels[0], ylabel=labels[1], xscale=scales[0], yscale=scales[1])
    for k, (label, x, y) in enumerate(found):
        if len(x):
            axis.plot(x, y, color=colour(k), linewidth=1.3, markersize=3.5, label=label,
                      linestyle=("-", "--", ":")[k // len(_TERM_COLOURS) % 3],
                      marker="" if dense and len(x) > 2 else "o")
    if top is not None:
        axis.set_ylim(0, top)
    if ticks:
        axis.set_xticks(range(len(ticks)), [plain(n) for n in ticks], rotation=30, ha="right")
        axis.set_xlim(-0.3, max(1, len(ticks)) - 0.7)
    return svg_of(figure, name, [(x.get_label(), x.get_color(), x.get_linestyle())
                                 for x in axis.get_lines()])


def placement_kind(tier: Tier, world_size: int) -> str:
    """Return the kind of a tier's placement, a key of `PLACEMENT_COLOURS`."""
    if tier.memory == "host":
        return "host memory"
    if tier.placement == "replicated" and len(tier.ranks) < world_size:
        return "copy per host"
    return f"{tier.placement} push" if tier.mode == "push" else tier.placement


def placement_map(plan: Plan, problem: Problem) -> str:
    """Plot one bar per table: its lookups, hottest rows first, coloured by the rows' placement."""
    tables = sorted(problem.tables, key=lambda t: -float(t.total[IDS]) * t.spec.dim)[:MAX_MAPPED]
    figure, axis = canvas(0.6 + 0.22 * len(tables))
    for y, t in enumerate(tables):
        entry = plan.table(t.spec.name)
        every = max(float(t.total[IDS]), 1e-300)
        for piece in entry.pieces:
            left, low = 0.0, y - 0.4 + 0.8 * piece.start / t.spec.dim
            high = 0.8 * (piece.stop - piece.start) / t.spec.dim
            for tier in piece.tiers:
                part = t.features(tier.start, tier.stop, is_ordered(t, entry))[IDS] / every
                axis.barh(low, part, high, left, align="edge", edgecolor=MARK, linewidth=0.4,
                          color=PLACEMENT_COLOURS[placement_kind(tier, plan.world_size)])
                if tier.placement == "owned" and part > 0.04 and high > 0.5:
                    # The page's style sheet selects labels inside bars by this id.
                    axis.text(left + part / 2, low + high / 2, str(tier.ranks[0]), fontsize=8,
                              ha="center", va="center", gid=f"inside{y}-{piece.start}-{tier.start}")
                left += part
    name_bars(axis, [t.spec.name for t in tables],
              "share of lookups, hottest rows first")
    axis.set_xlim(0, 1)
    axis.spines["left"].set_visible(False)
    used = {placement_kind(x, plan.world_size)
            for e in plan.tables for p in e.pieces for x in p.tiers}
    return svg_of(figure, "placement", [(k, c, "-") for k, c in PLACEMENT_COLOURS.items()
                                        if k in used])
