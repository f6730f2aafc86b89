"""Writes the tables of four pages from the records: README.md, benchmarks/README.md,
docs/explanation/reliability.md and docs/reference/recommender-results.md.

    python benchmarks/tables.py            # rewrites them
    python benchmarks/tables.py --check    # fails if a table differs from the records

A table stands between ``<!-- records: NAME -->`` and ``<!-- end -->``; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
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
    """By record: its command, its machines, and its number of verified cases. Cases that were
    resumed from another machine's record name it."""
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        value = load(path.stem)
        verified = [c["verified"] for c in value["cases"] if "verified" in c]
        machines = Counter(_machine(c.get("machine", value["machine"])) for c in value["cases"])
        torch = dict.fromkeys(str(c.get("versions", value["versions"]).get("torch", "-"))
                              for c in value["cases"])
        rows.append([f"`{path.name}`", f"`{value['command']}`", f"{len(value['cases'])}",
                     f"{sum(verified)}" if verified else "-",
                     "; ".join(f"{name}{f' ({n} cases)' * (len(machines) > 1)}"
                               for name, n in machines.most_common()), ", ".join(torch)])
    return table(["file", "made by", "cases", "verified", "machine", "torch"], rows, 9)


def _machine(about: dict[str, Any]) -> str:
    return f"{about['cpu']}, {about['cores']} cores"


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


def _held(outcome: dict[str, Any]) -> bool:
    """Whether the guarantee held in an injection, and nothing was left behind."""
    return bool(outcome.get("kept", True)) and not outcome.get("leftovers")


def faults() -> str:
    """By injected fault: phases, injections in which the guarantee held, longest detection."""
    by_fault: dict[str, list[dict[str, Any]]] = {}
    for case in load("faults")["cases"]:
        by_fault.setdefault(case["name"].partition(", ")[0], []).append(case)
    rows = []
    for fault, cases in sorted(by_fault.items()):
        outcomes = [o for c in cases for o in c["outcomes"]]
        num_held = sum(map(_held, outcomes))
        times = [o["detection_s"] for o in outcomes if o.get("detection_s") is not None]
        rows.append([fault, ", ".join(c["name"].partition(", ")[2] for c in cases),
                     str(len(outcomes)), str(num_held), f"{max(times):.2f} s" if times else "-"])
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
            for name in ("cluster", "cluster-others") for c in load(name)["cases"]
            if "oper_step_ms" in c]
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


def between(values: Sequence[float], digits: str) -> str:
    """Range of some figures as text; a single number if both ends round to it."""
    return " to ".join(dict.fromkeys(format(x, digits) for x in (min(values), max(values))))


def cases_of(record: str) -> dict[str, dict[str, Any]]:
    """The cases of a record by their names."""
    return {case["name"]: case for case in load(record)["cases"]}


def front() -> str:
    """The front page's table: the results of the records."""
    rows = [*_front_training(), *_front_plans(), *_front_serving(), *_front_rest()]
    return table(["what", "result", "record"], rows, 3)


def _front_training() -> list[list[str]]:
    def ratios(record: str, key: str, cases: Sequence[str]) -> str:
        return " and ".join(f"{cases_of(record)[c][key]:.{1 + (c[:3] != 'ebc')}f}" for c in cases)

    tables, whole = ("ebc-pool1", "ebc-pool20"), ("dlrm-pool1", "dlrm-pool20")
    amd, intel = ({key: ratios(record, f"ratio_{key}", tables) for key in ("step", "forward")}
                  for record in ("train", "train-intel"))
    cadvae, cdt4rec = (load(f"train-{model}")["cases"] for model in ("cadvae", "cdt4rec"))
    update, forward, unsharded = (
        [c[key] for c in cases_of(record).values() if key in c] for record, key in (
            ("lookup", "ratio_update"), ("serve", "ratio_forward"), ("serve", "ratio_unsharded")))
    return [
        ["training steps (forward, backward, update), 1 and 20 ids per bag of a power law of "
         "exponent 1.05, two processes with a thread each",
         f"26 tables alone, compared with the faster of two TorchRec plans: steps {amd['step']} "
         f"times as fast on an AMD machine, {intel['step']} times on an Intel one; forward passes "
         f"{amd['forward']}, and {intel['forward']} times. A whole DLRM, whose dense layers take "
         f"most of the time (AMD): {ratios('train', 'ratio_step', whole)} times with the same "
         f"dense code on both sides, {ratios('train', 'ratio_shipped', whole)} times compared with "
         "TorchRec's DLRM as shipped under its table-wise plan, which is not its faster one",
         "`train.json`, `train-intel.json`"],
        ["lookups without gradient, fp32, 26 tables, 1 and 20 ids per bag, two processes with a "
         "thread each",
         f"{' and '.join(f'{x:.1f}' for x in forward)} times as fast as the faster of two TorchRec "
         f"plans, {' and '.join(f'{x:.1f}' for x in unsharded)} times as fast as unsharded "
         "`nn.EmbeddingBag`s in one process with two threads", "`serve.json`"],
        ["backward pass and update of the same tables, compared with fbgemm's CPU kernels, two "
         "threads", f"{between(update, '.1f')} times as fast (AMD)", "`lookup.json`"],
        ["training steps of CaD-VAE's tables, and of the whole model",
         f"{between([c['ratio_embedding'] for c in cadvae], '.1f')}, and "
         f"{between([c['ratio_step'] for c in cadvae], '.1f')} times as fast as TorchRec's best "
         "sharding (an earlier version, in which OPER reused splits of a batch that an earlier "
         "call had cached)", "`train-cadvae.json`"],
        ["the same for CDT4Rec, whose transformer takes nearly all the time",
         f"tables {between([c['ratio_embedding'] for c in cdt4rec], '.1f')} times as fast; whole "
         f"model {between([c['ratio_step'] for c in cdt4rec], '.2f')} times: no gain",
         "`train-cdt4rec.json`"]]


def _front_plans() -> list[list[str]]:
    grid = [c for c in load("cluster")["cases"] if c["in_grid"]]
    kinds = {kind: [c["ratio_step"] for c in grid if c["objective"] == kind]
             for kind in ("training", "inference")}
    training, lookups = (
        f"{median(x):.2f} times as long (median of {len(x)} cases; {between(x, '.2g')})"
        for x in kinds.values())
    modelled = [c for c in load("plan")["cases"] if "gap" in c]
    gaps, seconds = ([c[key] for c in modelled] for key in ("gap", "seconds"))
    other = [c["ratio_vs_torchrec"] for c in modelled if c["ratio_vs_torchrec"]]
    fitted = load("calibrate")["cases"][0]
    return [
        ["plans executed on 2, 4 and 8 emulated hosts: 26 tables, links of 100 to 400 Mbit/s, 1, "
         "20 and mixed ids per bag",
         f"training steps: the best of four TorchRec layouts takes {training}; lookups, each rank "
         f"holding at most half of the tables' bytes: {lookups}. On OPER's runtime the best plan "
         f"of another planner takes {between([c['ratio_best_peer'] for c in grid], '.2f')} times "
         f"as long as OPER's plan; the steps of {load('cluster')['num_predicted']} plans were "
         f"predicted {100 * load('cluster')['median_error']:.1f} % off (median)",
         "`cluster.json`"],
        [f"plans of training for 8 to 128 ranks, {len(modelled)} modelled cases with published "
         "constants",
         f"within {100 * median(gaps):.1f} % of the optimum in the median and "
         f"{100 * max(gaps):.1f} % at worst, each certified and checked, found in "
         f"{median(seconds):.1f} s (median; {max(seconds):.0f} s at worst); plans of TorchRec's "
         f"planner take {median(other):.1f} times as long (median)", "`plan.json`"],
        [f"predicted compared with executed steps of {fitted['num_plans']} plans that were not "
         "used in the fit",
         f"{100 * fitted['median_error']:.1f} % off (median), rank correlation "
         f"{fitted['spearman']:.2f} (on another machine, not quiet and not recorded: 9.9 % and "
         "0.93, with pushed plans predicted 10 to 30 % too fast)", "`calibrate.json`"]]


def _front_serving() -> list[list[str]]:
    server, = load("serve-server")["cases"]
    delta, = load("serve-delta")["cases"]
    made = delta["case"]
    num_timed = made["rounds"] * made["steps"]
    http = cases_of("serve-http")
    longer, = load("serve-http-intel")["cases"]
    rates = server["queries_per_s_at_bound"]
    ours, theirs = (server["contenders"][n]["memory"]["total_pss_bytes"]
                    for n in ("oper-2w", "torchrec-2p"))
    work = server["case"]["served"]["work"]
    unread = 2 * sum(work["num_rows"]) * (work["dim"] + 4)  # int8 rows with scale and shift
    rows = [
        ["highest query rate at p99 <= 10 ms, DLRM with int8 rows, two processes",
         f"{rates['oper-2w']:.0f}/s, TorchRec quantised {rates['torchrec-2p']:.0f}/s: "
         f"{server['ratio_throughput']:.1f} times, with less memory by a factor of "
         f"{server['ratio_memory']:.1f}, or {(theirs - unread) / ours:.1f} without the second copy "
         "of the rows that TorchRec's modules keep and do not read", "`serve-server.json`"],
        ["the same over HTTP, the client on the same two cores",
         "{queries_per_s:.0f}/s, TorchRec quantised behind the same HTTP front end "
         "{torchrec_queries_per_s:.0f}/s: {ratio_torchrec:.1f} times (a slower machine than in "
         "the row above); ".format(**http["http-10ms"])
         + "with at least 3,000 queries in each run, on an Intel machine, {queries_per_s:.0f} and "
         "{torchrec_queries_per_s:.0f}/s: {ratio_torchrec:.1f} times; a single query takes ".format(
             **longer) + f"{http['http-10ms']['single_ms']:.1f} ms; "
         "requests that name the user's features once for 128 candidates reach "
         f"{http['candidates']['ratio_full']:.1f} times the rate of full ones",
         "`serve-http.json`, `serve-http-intel.json`"],
        [f"{delta['deltas']:,} deltas under {made['rate']:.0f} requests/s over HTTP: {num_timed} "
         f"of {100 * made['changed']:.3g} % of the rows, then {delta['deltas'] - num_timed} of "
         f"{100 * made['changed'] * made['small']:.3g} %",
         f"{delta['errors']} failed, {delta['torn']} torn; those of {100 * made['changed']:.3g} %: "
         f"in service within {delta['lag_p99_s']:.2f} s (p99); {100 * delta['time_share']:.1f} % "
         "of a whole "
         f"publication's time, peak memory {delta['peak_ratio']:.2f} times that of the weights; "
         f"p99 of requests {delta['p99_ratio']:.2f} times that without deltas",
         "`serve-delta.json`"]]
    return rows + [[
        f"serving rows whose precision depends on their tier instead of int8 (`{c['name']}`)",
        f"{100 * c['bytes_ratio']:.0f} % of the bytes, {c['queries_ratio']:.2f} times the "
        "queries per second; AUC differs by {mean:+.1e} ({low:+.1e} to {high:+.1e})".format(
            **c["auc_difference"]), "`serve-tiers.json`"]
        for c in load("serve-tiers")["cases"]]


def _front_rest() -> list[list[str]]:
    gpu_cases = cases_of("lookup-h200")

    def ratio(phase: str, *names: str) -> str:
        *first, last = (
            f"{gpu_cases[f'lookup-{name}'][f'ratio_{phase}_fbgemm']:.2f}" for name in names)
        return f"{', '.join(first)} and {last}" if first else last

    uniform = [f"b8192-t26-{x}-uniform" for x in ("pool1-d128", "pool10-d128", "pool20-d64")]
    skewed = [f"b8192-t26-{x}-zipf1.05" for x in ("pool1-d128", "pool10-d128")]
    half = "b4096-t100-pool20-d128-fp16"
    outcomes = [o for c in load("faults")["cases"] for o in c["outcomes"]]
    num_held = sum(map(_held, outcomes))
    cases = load("dynamic")["cases"]
    return [
        ["26 tables of fp32 rows on one H200, 1, 10 and 20 ids per bag, compared with fbgemm's "
         "kernels",
         f"forward {ratio('forward', *uniform)} times as fast, steps {ratio('step', *uniform)} "
         f"times; skewed ids, 1 and 10 per bag: forward {ratio('forward', *skewed)} times, steps "
         f"{ratio('step', *skewed)} times; 100 tables of fp16 rows, 20 uniform ids: "
         f"{ratio('forward', f'{half}-uniform')} and {ratio('step', f'{half}-uniform')} times, "
         f"skewed: {ratio('forward', f'{half}-zipf1.05')} and "
         f"{ratio('step', f'{half}-zipf1.05')} times", "`lookup-h200.json`"],
        [f"{len(outcomes)} faults injected into ranks, networks, disks and files",
         f"the guarantee held in {num_held}", "`faults.json`"],
        ["training steps on raw 64-bit keys (dynamic tables), two processes with a thread each",
         f"{between([c['ratio_planned'] for c in cases], '.2f')} times the step on row numbers "
         "under a plan; with TorchRec's managed-collision modules a step takes "
         f"{between([c['ratio_mch'] for c in cases], '.1f')} times as long as OPER's; "
         f"{between([c['bytes_per_slot'] for c in cases], '.1f')} bytes per row for its key; with "
         f"{between([c['load'] for c in cases], '.2g')} keys per row at most "
         f"{100 * max(c['missed'] for c in cases):.2g} % of the lookups find no row",
         "`dynamic.json`"]]


def drift() -> str:
    """AUC on logs whose ids drift, by mapping from keys to rows."""
    rows = [[c["name"], str(c["days"]), *(f"{x['mean']:.4f}" for x in c["auc"].values()),
             *(_interval(x, sign="+") for of in c["auc_over"].values() for x in of.values())]
            for c in load("drift")["cases"]]
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


def _less(case: dict[str, Any], other: dict[str, Any]) -> str:
    """Paired difference of nDCG@10 from `other`, in percent of its mean, whichever of the two was
    run first; a dash if there is none."""
    scale = 100 / other["metrics"]["ndcg@10"]["mean"]
    if other["model"] in case["against"]:
        return _interval(case["against"][other["model"]]["ndcg@10"], 1, scale, "+")
    if case["model"] not in other["against"]:
        return "-"
    turned = other["against"][case["model"]]["ndcg@10"]
    return _interval({"mean": -turned["mean"], "low": -turned["high"], "high": -turned["low"]}, 1,
                     scale, "+")


def ablations() -> str:
    """Variants of CDT4Rec beside SASRec, by their validation on MovieTweetings, or else on Online
    Retail."""
    logs = {"movietweetings/last-two": "recommenders-ablations",
            "online-retail/last-invoice": "recommenders-ablations-retail"}
    by_log = [{c["model"]: c for c in load(record)["cases"] if c["name"].startswith(log)}
              for log, record in logs.items()]

    def valid(case: dict[str, Any]) -> float:
        runs = [r["valid_ndcg@10"] for r in case["runs"]]
        return sum(runs) / len(runs)

    rows = []
    for name in dict.fromkeys(n for cases in by_log for n in sorted(
            cases, key=lambda x: -valid(cases[x]))):
        row = [f"`{name}`"]
        for cases in by_log:
            case, other = cases.get(name), cases["sasrec"]
            row += ["-"] * 4 if case is None else [
                str(len(case["runs"])), f"{valid(case):.4f}", _interval(case["metrics"]["ndcg@10"]),
                _less(case, other)]
        rows.append(row)
    columns = ("seeds", "validation", "test", "difference from SASRec, %")
    return table(["variant", *(f"{log}: {what}" for log in ("MovieTweetings", "Online Retail")
                               for what in columns)], rows)


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
    return table(["model", "seeds", "nDCG@10", "recall@10", "nDCG@10 minus SASRec's, %"], rows)


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
        print(f"{'differs from the records' if check else 'rewritten'}: {page}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
