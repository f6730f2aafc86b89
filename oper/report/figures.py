"""Plots as SVG text for pages that are complete in themselves."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oper.errors import MissingDependencyError, fail
from oper.plan import Plan, Tier
from oper.search.cost.model import Evaluation, is_ordered
from oper.search.problem.machine import TERMS
from oper.search.problem.statement import IDS, Problem

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_TERM_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00",
                 "#882255")
PLACEMENT_COLOURS = {"replicated": "#009E73", "striped": "#56B4E9", "striped push": "#0072B2",
                     "owned": "#E69F00", "owned push": "#D55E00",
                     "host memory": "#882255", "copy per host": "#CC79A7"}
NUM_COLOURS = len(_TERM_COLOURS)
_MARK = "#7f7f7f"  # seen on light and on dark pages
_MAX_CURVES = 10
_MAX_LABEL = 48  # characters
MAX_MAPPED = 40  # tables in the placement map


def pyplot() -> Any:
    """Matplotlib's pyplot without a display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError(fail("cannot draw plots", "matplotlib", None, "installed",
                                          "pip install 'oper[report]'")) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def svg_of(figure: Any, name: str) -> str:
    """A figure as an SVG element without anything that refers outside of it.

    Args:
        figure: a matplotlib figure; closed afterwards.
        name: makes the identifiers inside differ from those of other figures of the page.
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
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # implied inside HTML


def plain(name: str) -> str:
    """A name as a label: dollar signs are no formula, an underscore in front hides nothing."""
    short = name if len(name) <= _MAX_LABEL else name[:_MAX_LABEL - 1] + "\u2026"
    return ("\u200b" if short.startswith("_") else "") + short.replace("$", r"\$")


def loads(found: Evaluation, before: Evaluation | None) -> str:
    """Microseconds per rank by term, one panel per phase; the plan compared with as marks."""
    plt = pyplot()
    num_ranks = found.held_bytes.size
    figure, axes = plt.subplots(len(found.phases), 1, figsize=(9.0, 0.5 + 2.1 * len(found.phases)),
                                squeeze=False)
    ranks = np.arange(num_ranks)
    for number, (axis, phase) in enumerate(zip(axes[:, 0], found.phases, strict=True)):
        us = phase.seconds * 1e6
        # Memory and compute add up; links get bars of their own, on top of them or beside them.
        links = [k for k in range(2, len(TERMS)) if us[k].max() > 0]
        bar = 0.8 / (1 + len(links))
        axis.bar(ranks, us[0], bar, color=_TERM_COLOURS[0], label=TERMS[0])
        if us[1].max() > 0:
            axis.bar(ranks, us[1], bar, us[0], color=_TERM_COLOURS[1], label=TERMS[1])
        for slot, k in enumerate(links, 1):
            below = phase.has_local[k - 1] * (us[0] + us[1])
            axis.bar(ranks + slot * bar, us[k], bar, below, color=_TERM_COLOURS[k],
                     label=TERMS[k].replace("_", " "))
        if before is not None:
            level = before.phases[number].groups.max(axis=0) * 1e6
            axis.hlines(level, ranks - bar / 2, ranks + bar * (len(links) + 0.5), _MARK,
                        linewidth=2, label="whole tables")
        axis.set_title(phase.name, fontsize=10)
        axis.set_xticks((ranks + bar * len(links) / 2)[:: max(1, num_ranks // 16)],
                        ranks[:: max(1, num_ranks // 16)])
        axis.set_ylabel("microseconds")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("rank")
    handles = {label: h for a in axes[:, 0] for h, label in zip(
        *a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower left", ncols=len(handles),
                  bbox_to_anchor=(0.05, 1.0), frameon=False, fontsize=9)
    figure.tight_layout()
    return svg_of(figure, "loads")


def coverage(problem: Problem) -> str:
    """Share of a table's lookups that go to its hottest rows, for the tables looked up most."""
    figure, axis = axes("share of rows, hottest first", "share of lookups", "x")
    tables = sorted(problem.tables, key=lambda t: -float(t.total[IDS]) * t.spec.dim)[:_MAX_CURVES]
    for k, t in enumerate(tables):
        share = t.cumulative[IDS] / max(float(t.total[IDS]), 1e-300)
        axis.plot(t.edges[1:] / t.spec.num_rows, share[1:], **line(k, marked=False),
                  label=f"{plain(t.spec.name)} ({t.spec.num_rows:,} rows)")
    axis.set_ylim(0, 1.02)
    return with_legend(figure, axis, "coverage")


def stacked(bars: Sequence[tuple[str, Mapping[str, float]]], label: str, name: str) -> str:
    """Horizontal bars made of named parts; a part has the same colour in all of them."""
    plt = pyplot()
    parts = list(dict.fromkeys(part for _, found in bars for part in found))
    figure, axis = plt.subplots(figsize=(8.0, 0.9 + 0.3 * len(bars)))
    for y, (_, found) in enumerate(bars):
        left = 0.0
        for part, value in found.items():
            axis.barh(y, value, 0.7, left, color=colour(parts.index(part)), label=part)
            left += value
    axis.set_yticks(range(len(bars)), [plain(title) for title, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    name_colours(axis, parts)
    return svg_of(figure, name)


def name_colours(axis: Any, names: Sequence[str]) -> None:
    """Say above the axes what the k-th colour stands for."""
    handles = [pyplot().Rectangle((0, 0), 1, 1, color=colour(k)) for k in range(len(names))]
    axis.legend(handles, [plain(n) for n in names], loc="lower left", bbox_to_anchor=(0.0, 1.0),
                ncols=4, frameon=False, fontsize=8)


def colour(k: int) -> str:
    """The colour of the k-th of several parts or curves."""
    return _TERM_COLOURS[k % len(_TERM_COLOURS)]


def line(k: int, marked: bool = True) -> dict[str, Any]:
    """The look of the k-th curve: colour and dashes together tell 21 apart."""
    look: dict[str, Any] = {"color": colour(k), "linewidth": 1.3,
                            "linestyle": ("-", "--", ":")[k // len(_TERM_COLOURS) % 3]}
    return {**look, "marker": "o", "markersize": 3.5} if marked else look


def axes(xlabel: str, ylabel: str, log: str = "") -> tuple[Any, Any]:
    """A figure for curves and its axes; `log` names the logarithmic ones."""
    figure, axis = pyplot().subplots(figsize=(7.6, 3.8))
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")
    return figure, axis


def with_legend(figure: Any, axis: Any, name: str) -> str:
    """The figure with the names of its curves beside them, as SVG."""
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return svg_of(figure, name)


def placement_kind(tier: Tier, world_size: int) -> str:
    """Key of `PLACEMENT_COLOURS`."""
    if tier.memory == "host":
        return "host memory"
    if tier.placement == "replicated" and len(tier.ranks) < world_size:
        return "copy per host"
    return f"{tier.placement} push" if tier.mode == "push" else tier.placement


def placement_map(plan: Plan, problem: Problem) -> str:
    """One bar per table, its lookups from the hottest row on, coloured by where rows live."""
    plt = pyplot()
    tables = sorted(problem.tables, key=lambda t: -float(t.total[IDS]) * t.spec.dim)[:MAX_MAPPED]
    figure, axis = plt.subplots(figsize=(9.0, 0.6 + 0.24 * len(tables)))
    for y, t in enumerate(tables):
        entry = plan.table(t.spec.name)
        every = max(float(t.total[IDS]), 1e-300)
        for piece in entry.pieces:
            left, low = 0.0, y - 0.4 + 0.8 * piece.start / t.spec.dim
            high = 0.8 * (piece.stop - piece.start) / t.spec.dim
            for tier in piece.tiers:
                part = t.features(tier.start, tier.stop, is_ordered(t, entry))[IDS] / every
                axis.barh(low, part, high, left, align="edge", edgecolor=_MARK, linewidth=0.4,
                          color=PLACEMENT_COLOURS[placement_kind(tier, plan.world_size)])
                if tier.placement == "owned" and part > 0.04 and high > 0.5:
                    # The page finds labels inside of bars by this name.
                    axis.text(left + part / 2, low + high / 2, str(tier.ranks[0]), fontsize=7,
                              ha="center", va="center", gid=f"inside{y}-{piece.start}-{tier.start}")
                left += part
    axis.set_yticks(range(len(tables)), [plain(t.spec.name) for t in tables], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the table's lookups, hottest rows first (number = owner)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    used = {placement_kind(x, plan.world_size)
            for e in plan.tables for p in e.pieces for x in p.tiers}
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for k, c in PLACEMENT_COLOURS.items()
               if k in used]
    axis.legend(handles, [k for k in PLACEMENT_COLOURS if k in used], loc="lower left",
                bbox_to_anchor=(0.0, 1.0), ncols=5, frameon=False, fontsize=8)
    return svg_of(figure, "placement")
