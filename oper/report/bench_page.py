"""HTML pages about benchmark records."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from oper.errors import FileFormatError
from oper.report.figures import NUM_COLOURS, canvas, colour, colours_of, name_bars, stacked, svg_of
from oper.report.page import Plot, Table, render
from oper.support.files import read_json
from oper.tables import format_bytes

_MAX_BARS = 40
# Figures that describe the measurement, which only the table lists.
_SURROUNDINGS = ("other_busy_cores", "load_before", "load_after")


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a benchmark record; raises FileFormatError if the file is not one."""
    what = f"cannot read {os.fspath(path)!r} as a benchmark record"
    value = read_json(path, what)
    try:
        described = all(isinstance(value.get(k, {}), dict) for k in ("machine", "versions"))
        if described and all(isinstance(c["name"], str) for c in value["cases"]) and (
                value["benchmark"]):
            found: dict[str, Any] = value
            return found
        problem: object = {k: value.get(k) for k in ("benchmark", "machine", "versions", "cases")}
    except (KeyError, TypeError, AttributeError) as error:
        problem = str(error)
    raise FileFormatError(what, "content", problem, "a name (benchmark), two objects (machine, "
                          "versions), and cases with names",
                          "pass a record written by oper bench --record")


def bench_page(value: Mapping[str, Any]) -> str:
    """Return an HTML page with every number of a benchmark record.

    It has plots of contenders, of phases of a step and of bytes by link (if the record has them),
    one plot per figure that several cases have, and a table of all figures.
    """
    cases = value["cases"]
    numbers = [{k: float(v) for k, v in c.items() if _is_number(v)} for c in cases]
    keys = list(dict.fromkeys(k for found in numbers for k in found))
    shared = [k for k in keys if k not in _SURROUNDINGS
              and sum(k in found for found in numbers) >= 2]
    plots: list[Plot | Table] = [
        *_contenders(cases), *_phases(cases), *_links(cases), *_hosts(cases), *_predictions(cases)]
    for k in shared:
        bars = [(c["name"], {k: found[k]}) for c, found in zip(cases, numbers, strict=True)
                if k in found]
        only = f" The first {_MAX_BARS} of {len(bars)}." if len(bars) > _MAX_BARS else ""
        plots.append(Plot(k.replace("_", " "), f"{k} by case.{only}",
                          stacked(bars[:_MAX_BARS], k, f"bars {k}")))
    rows = [[k, *(f"{found[k]:,.4g}" if k in found else "-" for found in numbers)] for k in keys]
    names = [c["name"] + ("" if c.get("verified") else " (not verified)") for c in cases]
    machine = value.get("machine", {})
    about = "; ".join(str(x) for x in (value.get("command"), machine.get("cpu"),
                                       f"{machine.get('cores', '?')} cores") if x)
    tiles = [("cases", f"{len(cases)}"),
             ("verified", f"{sum(bool(c.get('verified')) for c in cases)}")]
    versions = sorted(value.get("versions", {}).items())
    return render(f"Benchmark: {value['benchmark']}", about, tiles, [
        *plots, Table("All figures", ["", *names], rows),
        Table("Versions", ["package", "version"], versions)])


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and math.isfinite(value))


def _contenders(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plot every contender's median milliseconds with 10th and 90th percentiles."""
    found = []
    for what in ("step", "forward"):
        bars: list[tuple[str, list[tuple[str, Mapping[str, Any]]]]] = []
        for c in cases:
            plans = c.get("plans", c.get("contenders"))
            times: list[tuple[str, Mapping[str, Any]]] = [
                (name, {**p[what], "predicted_ms": p.get("predicted_ms")})
                     for name, p in plans.items()
                     if isinstance(p, dict) and isinstance(p.get(what), dict)
                     and all(_is_number(p[what].get(k)) for k in ("median_ms", "p10_ms", "p90_ms"))
                     ] if isinstance(plans, dict) else []
            if times:
                bars.append((c["name"], times))
        if bars:
            title = "training steps" if what == "step" else "forward passes"
            mark = (" Diamonds: predictions of the cost model." if any(
                _is_number(t["predicted_ms"]) for _, times in bars for _, t in times) else "")
            found.append(Plot(f"Contenders: {title}", "Median; the line spans the 10th to the 90th "
                              f"percentile.{mark}", _grouped(bars, what)))
    return found


def _grouped(cases: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]], name: str
             ) -> str:
    """Plot the bars of all cases below each other; `cases` has for each case its title, and the
    name and times of each contender."""
    names = list(dict.fromkeys(n for _, times in cases for n, _ in times))
    figure, axis = canvas(0.7 + 0.2 * sum(len(t) + 1 for _, t in cases))
    y, ticks = 0, []
    by_colour = len(names) <= NUM_COLOURS  # otherwise every bar is labelled
    for title, times in cases:
        if by_colour:
            ticks.append((y + (len(times) - 1) / 2, title))
        else:
            ticks += [(y, title), *((y + 1 + k, n) for k, (n, _) in enumerate(times))]
            y += 1
        for contender, t in times:
            number = names.index(contender) if by_colour else int(contender != "oper")
            axis.barh(y, t["median_ms"], 0.8, color=colour(number))
            axis.plot([t["p10_ms"], t["p90_ms"]], [y, y], color="#7f7f7f", linewidth=1.5)
            if _is_number(t["predicted_ms"]):
                axis.plot(t["predicted_ms"], y, marker="D", markersize=4, color="#7f7f7f")
            y += 1
        y += by_colour
    name_bars(axis, [title for _, title in ticks], "milliseconds", [at for at, _ in ticks])
    return svg_of(figure, f"contenders {name}", colours_of(names) if by_colour else ())


def _stacked(heading: str, caption: str, unit: str,
             bars: Sequence[tuple[str, Mapping[str, float]]]) -> list[Plot]:
    """Plot bars made of parts, see `stacked`; nothing without bars."""
    return [Plot(heading, caption, stacked(bars, unit, heading))] if bars else []


def _phases(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    return _stacked(
        "OPER's step, phase by phase", "Median milliseconds inside the library, mean over ranks.",
        "milliseconds", [
            (c["name"], {k: float(v) for k, v in c["oper_phases_ms"].items() if _is_number(v)})
            for c in cases if isinstance(c.get("oper_phases_ms"), dict)])


def _predictions(cases: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tabulate executed and predicted step times of the contenders of a cluster benchmark."""
    rows = [[c["name"], name, x["runtime"],
             *(f"{x[k]:,.4g}" if _is_number(x.get(k)) else "-"
               for k in ("executed_ms", "predicted_ms")),
             "{low:.2f} to {high:.2f}".format(**x["over_oper"]) if "over_oper" in x else "-"]
            for c in cases if isinstance(c.get("contenders"), dict)
            for name, x in c["contenders"].items()
            if isinstance(x, dict) and "runtime" in x]  # other benchmarks have contenders, too
    if not rows:
        return []
    return [Table("Contenders, executed and predicted", [
        "case", "contender", "runtime", "executed ms", "predicted ms", "over OPER, 95 %"], rows)]


def _hosts(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plot the bytes sent by the hosts' network interfaces."""
    return _stacked(
        "Bytes by host", "Bytes that each host's network interface sends in a step of OPER's plan, "
        "as counted by the kernel.", "megabytes", [
            (c["name"], {f"host {h}": x / 1e6 for h, x in enumerate(c["sent_bytes_by_host"])
                         if _is_number(x)})
            for c in cases if isinstance(c.get("sent_bytes_by_host"), list)])


def _links(cases: Sequence[Mapping[str, Any]]) -> list[Plot | Table]:
    """Plot and tabulate the bytes read under OPER's plan, by class of link."""
    bars, rows = [], []
    for c in cases:
        if not isinstance(c.get("bytes_read"), dict):
            continue
        links: dict[str, float] = {}
        for phase, found in c["bytes_read"].items():
            for link, count in found.items() if isinstance(found, dict) else ():
                if _is_number(count):
                    links[link] = links.get(link, 0.0) + count / 1e6
                    rows.append([c["name"], phase, link, format_bytes(int(count))])
        if links:
            bars.append((c["name"], links))
    if not bars:
        return []
    return [*_stacked("Bytes by link", "Rows, gradients and partial sums that all ranks read in a "
                      "step, by the link over which they are read.", "megabytes", bars),
            Table("Bytes by phase and link", ["case", "phase", "link", "bytes"], rows)]
