"""HTML pages about benchmark records."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from oper.errors import FileFormatError
from oper.report.figures import MARK, canvas, colour, name_bars, stacked, svg_of
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
    numbers = [_numbers(c) for c in cases]
    keys = list(dict.fromkeys(k for found in numbers for k in found))
    plots: list[Plot | Table] = [
        *_contenders(cases), *_phases(cases), *_links(cases), *_hosts(cases), *_predictions(cases)]
    for k in keys:
        bars = [(c["name"], {k: found[k]}) for c, found in zip(cases, numbers, strict=True)
                if k in found]
        if len(bars) > 1 and k not in _SURROUNDINGS:
            only = f" The first {_MAX_BARS} of {len(bars)}." if len(bars) > _MAX_BARS else ""
            plots.append(Plot(k.replace("_", " "), f"{k} by case.{only}",
                              stacked(bars[:_MAX_BARS], k, f"bars {k}")))
    rows = [[k, *(_text(found, k) for found in numbers)] for k in keys]
    checked = [c["verified"] for c in cases if "verified" in c]  # some benchmarks compare nothing
    names = [c["name"] + ("" if c.get("verified", True) else " (not verified)") for c in cases]
    machine = value.get("machine", {})
    about = "; ".join(str(x) for x in (value.get("command"), machine.get("cpu"),
                                       f"{machine.get('cores', '?')} cores") if x)
    tiles = [("cases", f"{len(cases)}")]
    if checked:
        tiles.append(("verified", f"{sum(map(bool, checked))}"))
    versions = sorted(value.get("versions", {}).items())
    return render(f"Benchmark: {value['benchmark']}", about, tiles, [
        *plots, Table("All figures", ["", *names], rows),
        Table("Versions", ["package", "version"], versions)])


def _numbers(value: Any) -> dict[str, float]:
    """The finite numbers in a JSON object, by name; none in a value of another type."""
    return {k: float(v) for k, v in value.items() if isinstance(v, int | float)
            and not isinstance(v, bool) and math.isfinite(v)} if isinstance(value, dict) else {}


def _objects(value: Any) -> dict[str, dict[str, Any]]:
    """The objects in a JSON object, by name; none in a value of another type."""
    return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(
        value, dict) else {}


def _text(numbers: Mapping[str, float], key: str) -> str:
    return f"{numbers[key]:,.4g}" if key in numbers else "-"


def _contenders(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plot every contender's median milliseconds with 10th and 90th percentiles."""
    found = []
    for what, title in (("step", "training steps"), ("forward", "forward passes")):
        bars: list[tuple[str, dict[str, float]]] = []  # name and times; the case's name has none
        for c in cases:
            times = {name: _numbers(p) | _numbers(p.get(what))
                     for name, p in _objects(c.get("plans", c.get("contenders"))).items()}
            known = [(name, t) for name, t in times.items()
                     if {"median_ms", "p10_ms", "p90_ms"} <= t.keys()]
            bars += [(c["name"], {}), *known] if known else []
        if bars:
            mark = (" Diamonds: predictions of the cost model." if any(
                "predicted_ms" in t for _, t in bars) else "")
            found.append(Plot(f"Contenders: {title}", "Median; the line spans the 10th to the 90th "
                              f"percentile.{mark}", _ranges(bars, what)))
    return found


def _ranges(bars: Sequence[tuple[str, Mapping[str, float]]], name: str) -> str:
    """Plot bars of median times with lines between percentiles; OPER's have another colour."""
    figure, axis = canvas(0.7 + 0.2 * len(bars))
    for y, (contender, t) in enumerate(bars):
        if t:
            axis.barh(y, t["median_ms"], 0.8, color=colour(int(contender != "oper")))
            axis.plot([t["p10_ms"], t["p90_ms"]], [y, y], color=MARK, linewidth=1.5)
        if "predicted_ms" in t:
            axis.plot(t["predicted_ms"], y, marker="D", markersize=4, color=MARK)
    name_bars(axis, [title for title, _ in bars], "milliseconds")
    return svg_of(figure, f"contenders {name}")


def _stacked(heading: str, caption: str, unit: str,
             bars: Sequence[tuple[str, Mapping[str, float]]]) -> list[Plot]:
    """Plot those bars that have parts, see `stacked`; no plot if there are none."""
    known = [(name, parts) for name, parts in bars if parts]
    return [Plot(heading, caption, stacked(known, unit, heading))] if known else []


def _phases(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    return _stacked(
        "OPER's step, phase by phase", "Median milliseconds inside the library, mean over ranks.",
        "milliseconds", [(c["name"], _numbers(c.get("oper_phases_ms"))) for c in cases])


def _predictions(cases: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tabulate executed and predicted step times of the contenders of a cluster benchmark."""
    rows = [[c["name"], name, x["runtime"],
             *(_text(_numbers(x), k) for k in ("executed_ms", "predicted_ms")),
             "{low:.2f} to {high:.2f}".format(**x["over_oper"]) if "over_oper" in x else "-"]
            for c in cases for name, x in _objects(c.get("contenders")).items()
            if "runtime" in x]  # other benchmarks have contenders, too
    head = ["case", "contender", "runtime", "executed ms", "predicted ms", "over OPER, 95 %"]
    return [Table("Contenders, executed and predicted", head, rows)] if rows else []


def _hosts(cases: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plot the bytes sent by the hosts' network interfaces."""
    sent = [(c["name"], _numbers(dict(enumerate(c.get("sent_bytes_by_host", ()))))) for c in cases]
    return _stacked(
        "Bytes by host", "Bytes that each host's network interface sends in a step of OPER's plan, "
        "as counted by the kernel.", "megabytes", [
            (name, {f"host {h}": x / 1e6 for h, x in hosts.items()}) for name, hosts in sent])


def _links(cases: Sequence[Mapping[str, Any]]) -> list[Plot | Table]:
    """Plot and tabulate the bytes read under OPER's plan, by class of link."""
    bars, rows = [], []
    for c in cases:
        links = dict[str, float]()
        for phase, found in _objects(c.get("bytes_read")).items():
            for link, count in _numbers(found).items():
                links[link] = links.get(link, 0.0) + count / 1e6
                rows.append([c["name"], phase, link, format_bytes(int(count))])
        bars.append((c["name"], links))
    table = [Table("Bytes by phase and link", ["case", "phase", "link", "bytes"], rows)]
    return [*_stacked("Bytes by link", "Rows, gradients and partial sums that all ranks read in a "
                      "step, by the link over which they are read.", "megabytes", bars),
            *(table if rows else ())]
