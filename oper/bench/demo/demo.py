"""``oper demo``: statistics, plan and training of a log, with TorchRec and the unsharded model."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.bench.core import record
from oper.bench.demo.page import page
from oper.errors import InvalidInputError, UsageError, fail
from oper.support.flags import whole

WORLD_SIZE = 2
CHECKED_STEPS = 24     # training steps after which weights are compared; a multiple of 8
TOLERANCE = 1e-5       # max|a - b| / max|b| per tensor: equal up to fp32 re-association
MAX_TABLE_ROWS = 250_000
_CHECKED_BATCH, _MAX_BATCH, _MIN_STEPS = 128, 1024, 64
_MIN_TIMED, _QUICK_STEPS, _MAX_STEPS = 16, 32, 400  # steps after the checked ones
_ROWS, _QUICK_ROWS = 400_000, 30_000


@dataclass(frozen=True, slots=True)
class Job:
    """One demo.

    Attributes:
        folder: where everything is written.
        data: the click log, or None for a synthetic one.
        num_rows: rows of a synthetic log.
        quick: few steps and repetitions.
        seed: of the synthetic log and the initial weights.
    """

    folder: Path
    data: str | None
    num_rows: int
    quick: bool
    seed: int


def configure_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper demo``."""
    parser.add_argument("--data", metavar="F", help="a click log in the Criteo-Kaggle format, "
                        "plain or .gz; without it a synthetic one is written")
    parser.add_argument("--rows", type=whole(1000), metavar="N",
                        help=f"rows of the synthetic log (default {_ROWS:,})")
    parser.add_argument("--out", metavar="DIR", help="keep everything here (default: a new folder "
                        "under the temporary one)")
    parser.add_argument("--json", metavar="F", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true",
                        help="a small log and few steps, to see that it runs")
    parser.add_argument("--seed", type=whole(0), default=1)


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; 1 when OPER's numbers differ from the unsharded model's."""
    if args.rows is not None and args.data:
        raise UsageError(fail("cannot run the demo", "--rows", args.rows,
                              "nothing with --data, whose log has its own", "leave one out"))
    folder = Path(args.out or tempfile.mkdtemp(prefix="oper-demo-"))
    rows = args.rows or (_QUICK_ROWS if args.quick else _ROWS)
    job = Job(folder, args.data, rows, args.quick, args.seed)
    load_before = record.load_average()
    found = demo(job)
    command = " ".join(record.command_line(args, "oper", "demo"))
    found = {"benchmark": "demo", "command": command, "versions": record.versions(),
             "machine": {**record.machine(), "load_before": load_before}, **found}
    record.write(folder / "demo.json", found)
    if args.json:
        record.write(args.json, found)
    print(page(found), end="")
    return 0 if found["verified"] else 1


def demo(job: Job) -> dict[str, Any]:
    """All stages; returns what the page and the JSON show.

    Raises:
        OperError: a stage cannot run.
    """
    # TorchRec's import sets off a remark that means nothing to the reader.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    began = time.monotonic()
    stages = _Stages()
    log = stages.run("click log", lambda: _log(job))
    manifest = stages.run("preprocess", lambda: _preprocess(job, log))
    skew = stages.run("analyze", lambda: _analyze(job))
    case = _case(job, manifest)
    plan = stages.run("plan", lambda: _plan(job, case))
    two = stages.run("train in two processes: OPER and TorchRec on the same batches",
                     lambda: _workers("train_sharded", case, WORLD_SIZE))
    one = stages.run("train the unsharded model in one process",
                     lambda: _workers("train_unsharded", case, 1))
    best = _best(two["sides"], "step")
    check = {name: _compare(job.folder, name) for name in two["sides"]}
    return {
        "synthetic": bool(manifest["synthetic"]),
        "rows": manifest["rows"]["train"] + manifest["rows"]["valid"],
        "seconds": round(time.monotonic() - began, 1), "folder": str(job.folder), "log": log,
        "data": {"rows": manifest["rows"], "bad_rows": manifest["bad_rows"]["count"],
                 "max_table_rows": MAX_TABLE_ROWS, "skew": skew},
        "plan_gap": plan["gap"], "plan": plan,
        "training": {k: case[k] for k in (
            "num_steps", "batch_size", "checked_batch_size", "world_size", "dim")},
        **_correctness(check, best), **_timings(two["sides"], best),
        "auc": {"oper": two["sides"]["oper"]["auc"], "unsharded": one["auc"],
                "torchrec": two["sides"][best]["auc"]},
        "log_loss": {"oper": two["sides"]["oper"]["log_loss"], "unsharded": one["log_loss"],
                     "torchrec": two["sides"][best]["log_loss"]},
        "sides": two["sides"], "page_kind": two["page_kind"],
        "other_busy_cores": two["other_busy_cores"],
    }


class _Stages:
    """Reports on stderr what runs and how long it took."""

    def __init__(self) -> None:
        self._count = 0

    def run(self, name: str, stage: Callable[[], Any]) -> Any:
        self._count += 1
        print(f"[{self._count}/6] {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result = stage()
        print(f"      {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return result


def _log(job: Job) -> str:
    from oper.data import SyntheticLog, write_synthetic_log

    if job.data:
        return job.data
    path = write_synthetic_log(job.folder / "synthetic.txt",
                               SyntheticLog(job.num_rows, job.seed), show_progress=_terminal())
    print(f"      synthetic log: {path}", file=sys.stderr)
    return str(path)


def _preprocess(job: Job, log: str) -> dict[str, Any]:
    from oper.data import PreprocessOptions, load_recipe, preprocess

    return preprocess(load_recipe("criteo-kaggle"), [log], job.folder / "data", PreprocessOptions(
        force=True, max_rows=MAX_TABLE_ROWS, show_progress=_terminal()))


def _analyze(job: Job) -> dict[str, Any]:
    from oper.analysis import describe
    from oper.data import analyze_folder

    stats = analyze_folder(job.folder / "data", show_progress=_terminal())
    stats.save(job.folder / "stats")
    return describe(stats)


def _case(job: Job, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the worker processes get: batch size and steps that suit the size of the log."""
    from oper.bench.demo.worker import MODEL

    train = int(manifest["rows"]["train"])
    batch = _MAX_BATCH
    while batch > 8 and train < _MIN_STEPS * WORLD_SIZE * batch:
        batch //= 2
    epoch = train // (WORLD_SIZE * batch)
    if not epoch:
        raise InvalidInputError(fail("cannot run the demo", "training rows", train,
                                     f">= {WORLD_SIZE * batch}", "use a longer log"))
    most = _QUICK_STEPS if job.quick else _MAX_STEPS
    num_steps = CHECKED_STEPS + max(_MIN_TIMED, min(epoch - CHECKED_STEPS, most))
    return {"folder": str(job.folder), "data": str(job.folder / "data"),
            "plan": str(job.folder / "plan.json"), "seed": job.seed, "batch_size": batch,
            "world_size": WORLD_SIZE, "num_steps": num_steps, "checked_steps": CHECKED_STEPS,
            "checked_batch_size": min(_CHECKED_BATCH, batch),
            "rounds": 2 if job.quick else 12, "dim": MODEL.dim}


def _plan(job: Job, case: dict[str, Any]) -> dict[str, Any]:
    from oper.data import Folder
    from oper.search.explain.summary import as_json
    from oper.search.planner import plan_problem
    from oper.search.problem.statement import make_problem
    from oper.stats import AccessStats
    from oper.topology import Topology

    problem = make_problem(
        Folder.open(case["data"]).tables(case["dim"]), AccessStats.load(job.folder / "stats"),
        Topology.this_host(WORLD_SIZE), objective="training", batch_size=case["batch_size"])
    plan = plan_problem(problem)
    plan.save(case["plan"])
    tiers: dict[str, dict[str, int]] = {}
    for entry in plan.tables:
        for tier in (t for piece in entry.pieces for t in piece.tiers):
            sums = tiers.setdefault(f"{tier.placement} {tier.mode}", {"tiers": 0, "rows": 0})
            sums["tiers"] += 1
            sums["rows"] += tier.stop - tier.start
    return as_json(plan, problem) | {"tiers": tiers}


def _workers(function: str, case: dict[str, Any], world_size: int) -> dict[str, Any]:
    from oper.bench.core.launch import run_workers
    from oper.bench.demo import worker

    (result,) = run_workers(getattr(worker, function), [case], world_size)
    return result


def _best(sides: dict[str, Any], what: str) -> str:
    """TorchRec's plan with the lowest median of `what`."""
    return min((n for n in sides if n != "oper"), key=lambda n: sides[n][what]["median_ms"])


def _compare(folder: Path, name: str) -> dict[str, float]:
    """A side against the unsharded model after the checked steps: the largest differences."""
    from oper.train.model import load_state

    ours, reference = load_state(folder / f"{name}.pt"), load_state(folder / "unsharded.pt")
    if ours.keys() != reference.keys():
        raise InvalidInputError(fail(f"cannot compare {name} with the unsharded model", "tensors",
                                     sorted(ours.keys() ^ reference.keys())[:5], "the same names",
                                     "report this as a bug"))
    absolute: dict[str, float] = {}
    relative = 0.0
    for key, value in reference.items():
        difference = float((ours[key] - value).abs().max())
        kind = key.partition("/")[0]
        absolute[kind] = max(absolute.get(kind, 0.0), difference)
        relative = max(relative, difference / max(float(value.abs().max()), 1e-30))
        if difference != difference:  # max() would lose a NaN
            absolute[kind] = relative = float("inf")
    return {"logits": absolute["logits"], "weights": absolute["weights"], "relative": relative}


def _correctness(check: dict[str, dict[str, float]], best: str) -> dict[str, Any]:
    ours, theirs = check["oper"], check[best]
    return {
        "max_abs_diff": max(ours["logits"], ours["weights"]),
        "max_abs_diff_logits": ours["logits"], "max_abs_diff_weights": ours["weights"],
        "max_relative_diff": ours["relative"], "tolerance": TOLERANCE,
        # Where rounding is amplified (see demo_worker), TorchRec shows by how much.
        "verified": ours["relative"] <= max(TOLERANCE, 4 * theirs["relative"]),
        "checked_steps": CHECKED_STEPS,
        "torchrec_max_abs_diff": max(theirs["logits"], theirs["weights"]),
        "torchrec_max_relative_diff": theirs["relative"]}


def _timings(sides: dict[str, Any], best: str) -> dict[str, Any]:
    """Medians and their ratios: of the embedding collection alone, and of the whole DLRM."""
    whole = _best(sides, "train_step")
    found: dict[str, Any] = {
        "step_is": "forward + backward + update of the embedding collection alone, prebuilt "
                   "batches and a given output gradient; dlrm_step: the whole DLRM training step",
        "torchrec_plan": best, "dlrm_torchrec_plan": whole}
    for prefix, what, key, plan in (("", "step", "step", best), ("", "forward", "forward", best),
                                    ("dlrm_", "step", "train_step", whole)):
        mine, other = (sides[name][key]["median_ms"] for name in ("oper", plan))
        found |= {f"{prefix}oper_{what}_ms": mine, f"{prefix}torchrec_{what}_ms": other,
                  f"{prefix}ratio_{what}": round(other / mine, 3)}
    return found


def _terminal() -> bool:
    return sys.stderr.isatty()
