"""``oper demo``: analyze a log, plan, and train, compared with TorchRec and the unsharded model."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oper.bench.core import record
from oper.bench.demo.page import page
from oper.errors import InvalidInputError, UsageError
from oper.support.flags import whole

if TYPE_CHECKING:
    from oper.bench.demo.worker import Training

WORLD_SIZE = 2
CHECKED_STEPS = 24     # training steps before weights are compared; a multiple of PER_TURN
TOLERANCE = 1e-5       # limit of max|a - b| / max|b| of a tensor; the order of additions differs
MAX_TABLE_ROWS = 250_000
_CHECKED_BATCH, _MAX_BATCH, _MIN_STEPS = 128, 1024, 64
_MIN_TIMED, _QUICK_STEPS, _MAX_STEPS = 16, 32, 400  # limits of the steps after CHECKED_STEPS
_ROWS, _QUICK_ROWS = 400_000, 30_000


def configure_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="F", help="a click log in the Criteo-Kaggle format, "
                        "plain or .gz (default: a synthetic log)")
    parser.add_argument("--rows", type=whole(1000), metavar="N",
                        help=f"rows of the synthetic log (default {_ROWS:,})")
    parser.add_argument("--out", metavar="DIR", help="output folder (default: a new temporary "
                        "folder)")
    record.add_flags(parser)
    parser.add_argument("--quick", action="store_true",
                        help="use a small log and few steps, to check that it runs")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N",
                        help="random seed (default 1)")


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; returns 1 if OPER's results differ from the unsharded model's, otherwise 0."""
    record.settle_flags(args)
    if args.rows is not None and args.data:
        raise UsageError("cannot run the demo", "--rows", args.rows,
                         "no value with --data, whose log has a fixed number of rows",
                         "leave one out")
    folder = Path(args.out or tempfile.mkdtemp(prefix="oper-demo-"))
    load_before = record.load_average()
    made = record.rounded(demo(args, folder))
    found = made | record.record("demo", record.command_line(args, "oper", "demo"), [], load_before)
    record.write(folder / "demo.json", found)
    if args.record:
        record.write(args.record, found)
    print(record.as_json(found) if args.json else page(found).rstrip("\n"))
    return 0 if found["verified"] else 1


def demo(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all stages in a folder; returns the figures for the printed page and ``demo.json``.

    Raises:
        OperError: a stage failed.
    """
    from oper.analysis import describe
    from oper.bench.core.launch import Task, run_workers
    from oper.bench.demo.worker import Training, train_sharded, train_unsharded
    from oper.data import (
        PreprocessOptions,
        SyntheticLog,
        analyze_folder,
        load_recipe,
        preprocess,
        write_synthetic_log,
    )

    # Importing TorchRec logs a warning that does not concern the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    began, is_terminal = time.monotonic(), sys.stderr.isatty()
    with _stage(1, "click log"):
        log = args.data
        if not log:
            log = str(write_synthetic_log(folder / "synthetic.txt", SyntheticLog(
                args.rows or (_QUICK_ROWS if args.quick else _ROWS), args.seed),
                show_progress=is_terminal))
            print(f"      synthetic log: {log}", file=sys.stderr)
    with _stage(2, "preprocess"):
        manifest = preprocess(load_recipe("criteo-kaggle"), [log], folder / "data",
                              PreprocessOptions(force=True, max_rows=MAX_TABLE_ROWS,
                                                show_progress=is_terminal))
    with _stage(3, "analyze"):
        stats = analyze_folder(folder / "data", show_progress=is_terminal)
        stats.save(folder / "stats")
    case = Training(str(folder), args.seed, WORLD_SIZE, CHECKED_STEPS,
                    *_sizes(manifest["rows"]["train"], args.quick))
    with _stage(4, "plan"):
        plan = _plan(folder, case)
    with _stage(5, "train in two processes: OPER and TorchRec on the same batches"):
        two, = run_workers([Task("demo", train_sharded, (case,))], WORLD_SIZE)
    with _stage(6, "train the unsharded model in one process"):
        one, = run_workers([Task("demo", train_unsharded, (case,))], 1)
    best = _best(two["sides"], "step")
    check = {name: _compare(folder, name) for name in two["sides"]}
    quality = {"oper": two["sides"]["oper"], "unsharded": one, "torchrec": two["sides"][best]}
    return {
        "synthetic": bool(manifest["synthetic"]),
        "rows": manifest["rows"]["train"] + manifest["rows"]["valid"],
        "seconds": time.monotonic() - began, "folder": str(folder), "log": log,
        "data": {"rows": manifest["rows"], "bad_rows": manifest["bad_rows"]["count"],
                 "max_table_rows": MAX_TABLE_ROWS, "skew": describe(stats)},
        "plan_gap": plan["gap"], "plan": plan,
        "training": {"num_steps": case.num_steps, "batch_size": case.batch_size,
                     "checked_batch_size": case.checked_batch_size, "world_size": WORLD_SIZE,
                     "dim": case.dim},
        **_correctness(check, best), **_timings(two["sides"], best),
        **{key: {name: found[key] for name, found in quality.items()}
           for key in ("auc", "log_loss")}, **two,
    }


@contextlib.contextmanager
def _stage(number: int, name: str) -> Iterator[None]:
    """Print a stage's name before the block and its duration afterwards, to stderr."""
    print(f"[{number}/6] {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    yield
    print(f"      {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _sizes(rows: int, quick: bool) -> tuple[int, int, int, int]:
    """Number of steps, batch size, batch size of the checked steps, and rounds of `Training`.
    Raises InvalidInputError if the log has too few rows for a step."""
    from oper.bench.demo.worker import PER_TURN

    batch = _MAX_BATCH
    while batch > 8 and rows < _MIN_STEPS * WORLD_SIZE * batch:
        batch //= 2
    epoch = rows // (WORLD_SIZE * batch)
    if not epoch:
        raise InvalidInputError("cannot run the demo", "training rows", rows,
                                f">= {WORLD_SIZE * batch}", "use a longer log")
    most = _QUICK_STEPS if quick else _MAX_STEPS
    num_steps = CHECKED_STEPS + max(_MIN_TIMED, min(epoch - CHECKED_STEPS, most))
    return num_steps // PER_TURN * PER_TURN, batch, min(_CHECKED_BATCH, batch), 2 if quick else 12


def _plan(folder: Path, case: Training) -> dict[str, Any]:
    from oper.bench.core.planning import rows_by_placement
    from oper.data import Folder
    from oper.search.explain.summary import as_json
    from oper.search.planner import plan_problem
    from oper.search.problem.statement import make_problem
    from oper.stats import AccessStats
    from oper.topology import Topology

    problem = make_problem(
        Folder.open(case.data).tables(case.dim), AccessStats.load(folder / "stats"),
        Topology.this_host(WORLD_SIZE), objective="training", batch_size=case.batch_size)
    plan = plan_problem(problem)
    plan.save(case.plan)
    count = Counter(f"{tier.placement} {tier.mode}" for entry in plan.tables
                    for piece in entry.pieces for tier in piece.tiers)
    return as_json(plan, problem) | {"tiers": {
        kind: {"tiers": count[kind], "rows": n}
        for kind, n in rows_by_placement(plan.tables).items()}}


def _best(sides: dict[str, Any], what: str) -> str:
    """Name of TorchRec's plan with the lowest median time of `what`."""
    return min((n for n in sides if n != "oper"), key=lambda n: sides[n][what]["median_ms"])


def _compare(folder: Path, name: str) -> dict[str, float]:
    """Largest absolute differences of ``logits`` and ``weights`` from the unsharded model after the
    checked steps, and the largest ``relative`` one (see `TOLERANCE`)."""
    from oper.train.model import load_state

    ours, reference = load_state(folder / f"{name}.pt"), load_state(folder / "unsharded.pt")
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
        # Training may amplify rounding (see `worker._training_batches`). How much it does so in
        # this run is seen from TorchRec, whose difference from the unsharded model is rounding too.
        "verified": ours["relative"] <= max(TOLERANCE, 4 * theirs["relative"]),
        "checked_steps": CHECKED_STEPS,
        "torchrec_max_abs_diff": max(theirs["logits"], theirs["weights"]),
        "torchrec_max_relative_diff": theirs["relative"]}


def _timings(sides: dict[str, Any], best: str) -> dict[str, Any]:
    """Median times (ms) and ratios for the embedding collection alone and for the whole DLRM."""
    forward, whole = _best(sides, "forward"), _best(sides, "train_step")
    found: dict[str, Any] = {
        "step_is": "forward + backward + update of the embedding collection alone, prebuilt "
                   "batches and a given output gradient; dlrm_step: the whole DLRM training step",
        "torchrec_plan": best, "torchrec_forward_plan": forward, "dlrm_torchrec_plan": whole}
    for prefix, what, key, plan in (("", "step", "step", best), ("", "forward", "forward", forward),
                                    ("dlrm_", "step", "train_step", whole)):
        mine, other = (sides[name][key]["median_ms"] for name in ("oper", plan))
        found |= {f"{prefix}oper_{what}_ms": mine, f"{prefix}torchrec_{what}_ms": other,
                  f"{prefix}ratio_{what}": other / mine}
    return found
