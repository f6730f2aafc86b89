"""A page about a training run: losses, validations, phases, and keys of dynamic tables."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oper.errors import FileFormatError
from oper.report.figures import MAX_CURVES, curves, short, stacked
from oper.report.page import Plot, Table, render

METRICS = "metrics.jsonl"  # as oper.train writes it
_EVENTS = ("admitted", "evicted", "expired", "refused")


def load_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Load the lines of a run's ``metrics.jsonl``, without those about steps that the run has made
    again after an interruption. The last line may be incomplete, since the run may be writing it,
    and is then left out.

    Raises:
        FileFormatError: another line is damaged, or there is no ``train`` line.
        FileNotFoundError: there is no such file.
    """
    path = Path(folder) / METRICS
    what = f"cannot read {os.fspath(path)!r} as the metrics of a training run"
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        found = _latest([json.loads(text) for text in lines])
        if any(x["event"] == "train" and {"step", "loss", "samples_per_s"} <= x.keys()
               for x in found):
            return found
        problem = "none"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise FileFormatError(what, "train lines", problem, "one or more, as oper train writes them",
                          "pass the folder that oper train wrote (--out)")


def _latest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines whose steps no later line covers again. A run that resumes appends to the
    file, from the step of its checkpoint on."""
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    first = math.inf  # least step of the later ``train`` lines
    for x in reversed(lines):
        step = x.get("step", x.get("steps", 0))
        if step < first:
            kept.setdefault((x["event"], step), x)
            first = step if x["event"] == "train" else first
    return [*kept.values()][::-1]


def run_page(lines: Sequence[dict[str, Any]], name: str) -> str:
    """Return an HTML page on the run `name` with the metrics `lines`."""
    steps = [x for x in lines if x["event"] == "train"]
    checks = [x for x in lines if x["event"] in ("valid", "end") and ("auc" in x or "ndcg@10" in x)]
    last = steps[-1]
    tiles = [("steps", f"{last['step']:,}"), ("last loss", _number(last["loss"])),
             ("samples/s", f"{last['samples_per_s']:,.0f}")]
    blocks: list[Plot | Table] = [Plot(
        "Loss", "Mean loss of the training samples since the previous point.",
        _curves("loss", [("loss", [(x["step"], x["loss"]) for x in steps])]))]
    if checks:
        names = list(dict.fromkeys(n for x in checks for n, v in x.items()
                                   if isinstance(v, float) and n != "time"))
        titles = [n.replace("_", " ") for n in names]
        tiles += [(f"{title}, validation", _number(checks[-1].get(n)))
                  for n, title in zip(names[:2], titles, strict=False)]
        blocks.append(Table("Validation", ["step", *titles], [
            [f"{x.get('step', x.get('steps', 0)):,}", *(_number(x.get(n)) for n in names)]
            for x in checks]))
    phases = Counter[str]()
    for x in steps:
        for phase, of in x.get("phases", {}).items():
            phases[phase] += of["sum_s"]
    if phases:
        blocks.append(Plot("Phases", "Seconds in phases of lookups and updates, over all ranks.",
                           stacked([("all steps", phases)], "seconds", "phases")))
    return render("Training run", f"Folder {name}.", tiles, [*blocks, *_keys(steps, checks)])


def _keys(steps: Sequence[dict[str, Any]], checks: Sequence[dict[str, Any]]
          ) -> list[Plot | Table]:
    """Return the blocks on dynamic tables."""
    counted = [(x["step"], x["keys"]) for x in steps if "keys" in x]
    if not counted:
        return []
    totals = {name: {e: sum(of[name][e] for _, of in counted) for e in (*_EVENTS, "lookups")}
              for name in counted[-1][1]}
    names = sorted(totals, key=lambda n: -totals[n]["lookups"])
    shares: dict[str, float] = next(
        (x["default_share"] for x in reversed(checks) if "default_share" in x), {})
    rows = [[n, f"{of['occupancy']:.1%}", f"{of['full_buckets']:.1%}",
             *(f"{totals[n][e]:,}" for e in _EVENTS), f"{of['default_share']:.2%}",
             f"{shares[n]:.2%}" if n in shares else "-"]
            for n in names for of in [counted[-1][1][n]]]
    note = f"For the {MAX_CURVES} tables with the most lookups."

    def plot(heading: str, about: str, value: str) -> Plot:
        return Plot(heading, f"{about} {note}" if len(names) > MAX_CURVES else about, _curves(
            value, [(short(n), [(step, of[n][value]) for step, of in counted])
                    for n in names[:MAX_CURVES]]))

    return [
        plot("Default rows", "Share of the lookups that read the default row, since their key had "
             "no row.", "default_share"),
        plot("Occupancy", "Share of the rows that have a key.", "occupancy"),
        Table("Dynamic tables", [
            "table", "occupancy", "full buckets", *_EVENTS, "default row", "in validation"], rows,
            "Keys admitted, evicted, expired and refused in all steps; the rest at the last line.")]


def _curves(what: str, found: Sequence[tuple[str, Sequence[tuple[int, Any]]]]) -> str:
    """Plot values by step, without those that are None."""
    known = [(title, [p for p in points if p[1] is not None]) for title, points in found]
    return curves(what, [(title, [x for x, _ in points], [y for _, y in points])
                         for title, points in known], ("step", what.replace("_", " ")), dense=True)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}"
