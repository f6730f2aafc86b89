"""Writes the tables of four pages from the records: README.md, benchmarks/README.md,
docs/explanation/reliability.md and docs/reference/recommender-results.md.

    python benchmarks/tables.py            # rewrites them
    python benchmarks/tables.py --check    # fails where a table is not what the records say

A table stands between ``<!-- records: NAME -->`` and ``<!-- end -->``; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGES = (FOLDER / "README.md", FOLDER.parent / "docs" / "explanation" / "reliability.md",
         FOLDER.parent / "README.md",
         FOLDER.parent / "docs" / "reference" / "recommender-results.md")
_MARKED = re.compile(r"(<!-- records: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def load(name: str) -> dict[str, Any]:
    """Read a record of this folder; `name` is without the suffix."""
    value: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return value


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    """A Markdown table; columns from `numbers_from` on are right-aligned."""
    ruler = ["---" if k < numbers_from else "---:" for k in range(len(headers))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (headers, ruler, *rows))


def records() -> str:
    """By record: its command, its machine, and its number of verified cases."""
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        value = load(path.stem)
        told = [c["verified"] for c in value["cases"] if "verified" in c]
        machine = value["machine"]
        rows.append([f"`{path.name}`", f"`{value['command']}`", f"{len(value['cases'])}",
                     f"{sum(told)}" if told else "-", f"{machine['cpu']}, {machine['cores']} cores",
                     str(value["versions"].get("torch", "-"))])
    return table(["file", "made by", "cases", "verified", "machine", "torch"], rows, 9)


def training() -> str:
    """Times of training steps and forward passes on both machines."""
    pairs = zip(load("train")["cases"], load("train-intel")["cases"], strict=True)
    rows = []
    for case, other in pairs:
        assert case["name"] == other["name"]
        rows.append([f"`{case['name']}`"] + [
            text for c in (case, other) for text in (
                f"{c['oper_step_ms']:.3g} ms", f"{c['ratio_step']:.3g}",
                f"{c['ratio_forward']:.3g}", f"{c['forward_fraction_of_ceiling']:.2f}")])
    columns = ["step, OPER", "ratio", "forward, ratio", "of the ceiling"]
    return table(["case", *(f"AMD: {c}" for c in columns), *(f"Intel: {c}" for c in columns)], rows)


def growth() -> str:
    """Time per byte at each point of every axis, relative to the axis' best point."""
    cases = [c for c in load("lookup")["cases"] if "axis" in c]
    rows = []
    for axis in dict.fromkeys(c["axis"] for c in cases):
        along = [c for c in cases if c["axis"] == axis]
        points = ", ".join(c["name"].removeprefix(f"scale-{axis}-") for c in along)
        for key, what in (("step_ns_per_line_byte", "step"),
                          ("ceiling_ns_per_line_byte", "bare gather and rewrite")):
            if all(key in c for c in along):
                best = min(c[key] for c in along)
                rows.append([axis, points, what, ", ".join(f"{c[key] / best:.2f}" for c in along)])
    return table(["axis", "points", "of", "over the best"], rows, 9)


def calibration() -> str:
    """Predicted and executed steps with two and four processes."""
    two, four = load("calibrate")["cases"][0], load("calibrate-4")["cases"][0]

    def row(what: str, text: Callable[[dict[str, Any]], str]) -> list[str]:
        return [what, text(two), text(four)]

    return table(["", "two processes", "four processes"], [
        row("plans, spread of their measured steps",
            lambda c: f"{c['num_plans']}, {c['spread']:.2g}x"),
        row("median error of the predicted step", lambda c: f"{100 * c['median_error']:.2g} %"),
        row("Spearman, mean over workloads of the order of their plans",
            lambda c: f"{c['spearman']:.2f}"),
        row("Spearman over all plans", lambda c: f"{c['spearman_all']:.2f}"),
        row("ranks waited for their cores",
            lambda c: f"{100 * c['delayed'][0]:.2g} % of the time")])


def faults() -> str:
    """By injected fault: phases, injections in which the guarantee held, longest detection."""
    by_fault: dict[str, list[dict[str, Any]]] = {}
    for case in load("faults")["cases"]:
        by_fault.setdefault(case["name"].partition(", ")[0], []).append(case)
    rows = []
    for fault, cases in sorted(by_fault.items()):
        outcomes = [o for c in cases for o in c["outcomes"]]
        held = [o for o in outcomes if o.get("kept", True) and not o.get("leftovers")]
        times = [o["detection_s"] for o in outcomes if o.get("detection_s") is not None]
        rows.append([fault, ", ".join(c["name"].partition(", ")[2] for c in cases),
                     str(len(outcomes)), str(len(held)), f"{max(times):.2f} s" if times else "-"])
    return table(["fault", "phases", "injections", "guarantee held",
                  "longest time until all knew"], rows, 2)


def cluster() -> str:
    """Steps on emulated hosts: OPER's executed, predicted and lower-bound ones, and contenders'."""
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = [[f"`{c['name']}`", *(number(c[k], 0 if c[k] and c[k] > 100 else 1) for k in (
                "oper_step_ms", "predicted_step_ms", "lower_bound_ms", "torchrec_step_ms")),
             *(number(c[k], 2) for k in ("ratio_step", "ratio_at_bound", "ratio_best_peer")),
             number(c["bytes_ratio_without_headers"], 3)]
            for c in load("cluster")["cases"] if "oper_step_ms" in c]
    return table(["case", "OPER, ms", "predicted", "bound", "TorchRec's best", "ratio", "at bound",
                  "best peer's plan", "bytes counted / simulated"], rows)


def dynamic() -> str:
    """Steps on raw keys, on static tables, and with TorchRec's managed-collision modules."""
    rows = [[f"`{c['name']}`", f"{c['load']:.3g}", f"{c['dynamic_step_ms']:.3g} ms",
             f"{c['ratio_static']:.2f}", f"{c['ratio_planned']:.2f}", f"{c['ratio_mch']:.1f}",
             f"{c['bytes_per_slot']:.2f}", f"{100 * c['missed']:.2g} %",
             f"{c['evicted_per_step']:.0f}"] for c in load("dynamic")["cases"]]
    return table(["case", "keys per row", "step", "over static", "over planned static",
                  "MCH over it", "bytes per slot", "without a row", "evicted per step"], rows)


def between(cases: Sequence[dict[str, Any]], key: str, digits: str) -> str:
    """Range of a figure over cases as text; a single number if both ends round to it."""
    values = [c[key] for c in cases]
    return " to ".join(dict.fromkeys(format(x, digits) for x in (min(values), max(values))))


def front() -> str:
    """Rows of the front page's table: dynamic tables and, if recorded, precision by tier."""
    cases = load("dynamic")["cases"]
    rows = [[
        "training steps on raw 64-bit keys (dynamic tables), two processes with a thread each",
        f"{between(cases, 'ratio_planned', '.2f')} times the step on row numbers under a plan; "
        "with TorchRec's managed-collision modules a step takes "
        f"{between(cases, 'ratio_mch', '.1f')} times as long as OPER's; "
        f"{between(cases, 'bytes_per_slot', '.1f')} bytes per row for its key; with "
        f"{between(cases, 'load', '.2g')} keys per row at most "
        f"{100 * max(c['missed'] for c in cases):.2g} % of the lookups find no row",
        "`dynamic.json`"]]
    for path in sorted(FOLDER.glob("serve*.json")):
        rows += [[
            f"serving rows whose precision depends on their tier instead of int8 (`{c['name']}`)",
            f"{100 * c['bytes_ratio']:.0f} % of the bytes, {c['queries_ratio']:.2f} times the "
            "queries per second; AUC differs by {mean:+.1e} ({low:+.1e} to {high:+.1e})".format(
                **c["auc_difference"]), f"`{path.name}`"]
            for c in load(path.stem)["cases"] if "auc_difference" in c]
    return table(["what", "result", "record"], rows, 3)


def drift() -> str:
    """AUC on logs whose ids drift, by mapping from keys to rows."""
    def interval(x: dict[str, float]) -> str:
        return f"{x['mean']:+.4f} [{x['low']:+.4f}, {x['high']:+.4f}]"

    rows = []
    for c in load("drift")["cases"]:
        rows.append([c["name"], str(c["days"]), *(f"{x['mean']:.4f}" for x in c["auc"].values()),
                     *(interval(x) for of in c["auc_over"].values() for x in of.values())])
    case = load("drift")["cases"][0]
    return table(["log", "days", *(f"AUC, {n}" for n in case["auc"]),
                  *(f"{n} - {o}" for n, of in case["auc_over"].items() for o in of)], rows)


def gpu() -> str:
    """Lookups, updates and steps on an H200, compared with fbgemm's."""
    rows = []
    for case in load("lookup-h200")["cases"]:
        if "oper_step_ms" not in case:  # the forward pass in a CUDA graph
            continue
        row = [f"`{case['name'].removeprefix('lookup-').removesuffix('-uniform')}`"]
        for phase in ("forward", "update", "step"):
            peer = case.get(f"fbgemm_{phase}_ms")
            row += [f"{case[f'oper_{phase}_ms']:.3f}", "" if peer is None else f"{peer:.3f}",
                    f"{case[f'{phase}_fraction_of_floor']:.2f}"]
        rows.append(row)
    return table(["case, ms", *(f"{phase} {what}" for phase in ("forward", "update", "step")
                                for what in ("OPER", "fbgemm", "of floor"))], rows)


def _interval(x: dict[str, float], digits: int = 4, scale: float = 1.0, sign: str = "") -> str:
    mean, low, high = (format(scale * x[key], f"{sign}.{digits}f") for key in (
        "mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _relative(case: dict[str, Any], other: dict[str, Any]) -> str:
    """Paired difference of nDCG@10 from `other`, in percent of its mean."""
    return _interval(case["against"][other["model"]]["ndcg@10"], 1,
                     100 / other["metrics"]["ndcg@10"]["mean"], "+")


def ablations() -> str:
    """Variants of CDT4Rec by their validation on MovieTweetings, beside SASRec."""
    logs = ("movietweetings/last-two", "online-retail/last-invoice")
    by_log = {log: {c["model"]: c for c in load("recommenders-ablations")["cases"]
                    if c["name"].startswith(log)} for log in logs}

    def valid(case: dict[str, Any]) -> float:
        runs = [r["valid_ndcg@10"] for r in case["runs"]]
        return sum(runs) / len(runs)

    rows = []
    for name in sorted(by_log[logs[0]], key=lambda x: -valid(by_log[logs[0]][x])):
        row = [f"`{name}`"]
        for log in logs:
            case, other = by_log[log].get(name), by_log[log]["sasrec"]
            row += ["-"] * 4 if case is None else [
                str(len(case["runs"])), f"{valid(case):.4f}", _interval(case["metrics"]["ndcg@10"]),
                "-" if name == "sasrec" else _relative(case, other)]
        rows.append(row)
    columns = ("seeds", "validation", "test", "difference from SASRec, %")
    return table(["variant", *(f"{log}: {what}" for log in ("MovieTweetings", "Online Retail")
                               for what in columns)], rows)


def _less(case: dict[str, Any], other: dict[str, Any]) -> str:
    """`_relative`, whichever of the two was run first."""
    turned = other["against"].get(case["model"])
    if turned is None:
        return _relative(case, other) if other["model"] in case["against"] else "-"
    low, mean, high = (-turned["ndcg@10"][key] for key in ("high", "mean", "low"))
    return _relative({"against": {other["model"]: {"ndcg@10": {
        "low": low, "mean": mean, "high": high}}}}, other)


def _by_test(cases: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(cases.items(), key=lambda x: -x[1]["metrics"]["ndcg@10"]["mean"])


def searched() -> str:
    """Models after a search with equally many trials, beside SASRec."""
    cases = {c["model"]: c for c in load("recommenders-searched")["cases"]}
    rows = []
    for name, c in _by_test(cases):
        tried, best = c["search"]["trials"], c["search"]["chosen"]
        settings = ", ".join(f"{key} {value}" for key, value in tried[best]["settings"].items())
        rows.append([f"`{name}`", f"{sum(t['seconds'] for t in tried) / 60:.1f}",
                     *(f"{tried[k]['valid_ndcg@10']:.4f}" for k in (0, best)),
                     settings or "its own", str(len(c["runs"])),
                     _interval(c["metrics"]["ndcg@10"]), _less(c, cases["sasrec"])])
    return table(["model", "search, minutes of a core", "validation, own settings", "chosen",
                  "settings chosen", "seeds", "test nDCG@10", "difference from SASRec, %"], rows)


def baselines() -> str:
    """Models on MovieTweetings beside SASRec, under one protocol."""
    cases = {c["model"]: c for c in load("recommenders-baselines")["cases"]}
    other = cases["sasrec"]
    rows = [[f"`{name}`", str(len(c["runs"])), *(
        _interval(c["metrics"][m]) for m in ("ndcg@10", "recall@10")), _less(c, other)]
        for name, c in _by_test(cases)]
    return table(["model", "seeds", "nDCG@10", "recall@10", "nDCG@10 less SASRec's, %"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "all": records, "training": training, "growth": growth, "calibration": calibration,
    "faults": faults, "cluster": cluster, "dynamic": dynamic, "drift": drift, "front": front,
    "gpu": gpu, "ablations": ablations, "baselines": baselines,
    "searched": searched}


def rendered(text: str) -> str:
    """The text of a page with its tables regenerated from the records."""
    return _MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def main() -> int:
    """Rewrite or check the pages; returns 1 if a check fails, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    for page in stale:
        if not check:
            page.write_text(rendered(page.read_text()))
        print(f"{'not what the records say' if check else 'rewritten'}: {page}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
