"""``oper bench cluster``: OPER's plans on emulated hosts, compared with peers' and TorchRec's."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench.calibrate.calibrate import measure_and_fit
from oper.bench.cluster.case import Case
from oper.bench.cluster.comparisons import (
    EXACT,
    FEWER,
    FewerBits,
    LinkChange,
    Overlap,
    ReplicaGroupsCase,
)
from oper.bench.cluster.network import Links, check_possible, why_no_quota
from oper.bench.cluster.quality import LOG, LogQuality
from oper.bench.core.launch import measured
from oper.bench.core.workload import Workload, data_files
from oper.data.generate.published import CRITEO_KAGGLE_ROWS
from oper.topology import Topology

_ROWS = tuple(min(n, 200_000) for n in CRITEO_KAGGLE_ROWS)
_QUICK_ROWS = (20_000, 5_000, 800, 40)
_LENGTHS = {"1": (1,) * len(_ROWS), "20": (20,) * len(_ROWS),
            "mixed": tuple(1 if k % 2 == 0 else 20 for k in range(len(_ROWS)))}
_HOSTS, _MBITS, _GRID_HOSTS = (2, 4, 8), (100, 200, 400), 4
_MEMORY_SHARE = 0.5  # a rank's memory in inference cases, relative to the size of all tables
_DIFFERENT = 1.05  # ratio of executed steps above which the order of two contenders is checked
_CALIBRATED = 2  # processes with which the constants of this machine are measured
FIGURES = (
    ("oper_step_ms", "predicted_step_ms", "lower_bound_ms", "torchrec_step_ms", "ratio_step",
     "ratio_at_bound", "ratio_best_peer", "bytes_ratio", "overlap_ratio", "overlap_limit",
     "overlap_parts", "ratio_groups", "ratio_delayed", "ratio_rounded"),
    ("fewer_bytes", "fewer_bits_speedup",
     *(f"contenders.{name}.{key}" for key in ("executed_ms", "predicted_ms", "bytes_ratio")
       for name in (EXACT, FEWER)), "log_loss_difference", "auc_difference",
     *(f"models.{name}.{key}" for name in ("groups", "delayed", "rounded")
       for key in ("log_loss_difference", "auc_difference")), "num_seeds"),
    ("median_error", "worst_error", "ordered", "num_predicted", "num_ordered_pairs"))
NOTE = ("emulated links; medians over steps of the slowest rank; ratio = TorchRec's best plan / "
        "OPER, at bound = the same over the bound; best peer = its plan on OPER's runtime / OPER; "
        "bytes = counted on the interfaces / simulated; error = predicted against executed\n")


def workload(ids: str, rows: tuple[int, ...] = _ROWS, batch_size: int = 4096) -> Workload:
    """A workload on Criteo's tables with ``"1"``, ``"20"`` or ``"mixed"`` ids per bag."""
    lengths = _LENGTHS[ids][:len(rows)]
    return Workload(rows, 64, batch_size, max(lengths), 1.05,
                    lengths=lengths if len(set(lengths)) > 1 else ())


def cases(quick: bool) -> list[Any]:
    """The cases of the grid and on irregular clusters; if `quick`, two small ones. Cases with the
    same hosts are consecutive, because they share processes."""
    if quick:
        return [Case(f"quick/2x200/{ids}", Links(2, 200), workload(ids, _QUICK_ROWS, 512),
                     num_batches=8, num_stats_batches=8, timed_s=2.0)
                for ids in ("1", "mixed")]
    found: list[Any] = []
    for hosts in _HOSTS:
        found += [Case(f"training/{hosts}x{mbits}/{ids}", Links(hosts, mbits), workload(ids),
                       in_grid=True) for ids, mbits in itertools.product(_LENGTHS, _MBITS)]
        if hosts == _GRID_HOSTS:
            found += [Case(f"inference/{hosts}x{mbits}/{ids}", Links(hosts, mbits), workload(ids),
                           in_grid=True, objective="inference", memory_share=_MEMORY_SHARE)
                      for ids, mbits in itertools.product(_LENGTHS, _MBITS)]
    others = {
        "16x200": Links(16, 200), "4x1000": Links(4, 1000), "4x2000": Links(4, 2000),
        "4x200-two-ranks": Links(4, 200, ranks_per_host=2),
        "4x400-one-slow-link": Links(4, 400, slow_host_share=0.25),
        "4x400-two-racks-100": Links(4, 400, uplink_mbits=100),
        "4x400-one-slow-host": Links(4, 400, host_0_cpu=0.5)}
    found += [Case(f"training/{name}/mixed", links, workload("mixed"))
              for name, links in others.items()]
    found += [Case("training/4x400-dlrm/mixed", Links(4, 400), workload("mixed"), whole_model=True),
              Overlap("overlap/4x400-dlrm/mixed", Links(4, 400), workload("mixed")),
              LinkChange("link-drops/4x400/mixed", Links(4, 400), workload("mixed")),
              *(ReplicaGroupsCase(f"replica-groups/4x400-two-racks-100/1/every-{every}",
                                  Links(4, 400, uplink_mbits=100), workload("1"), every=every)
                for every in (4, 16)),
              FewerBits("training/4x400-fewer-bits/mixed", Links(4, 400), workload("mixed"))]
    if data_files(LOG):
        found.append(LogQuality("quality/4x400-fewer-bits/movietweetings", Links(4, 400),
                                {EXACT: {}, FEWER: {"message_variance": 5e-4}}))
        found += [LogQuality(
            f"quality/4x400-replica-groups/movietweetings/every-{every}", Links(4, 400),
            {"one": {}, "groups": {"replica_groups": 2, "synchronize_every": every},
             "delayed": {"replica_groups": 2, "synchronize_every": every,
                         "synchronize_delay": every},
             "rounded": {"replica_groups": 2, "synchronize_every": every,
                         "synchronize_bits": 8}}) for every in (4, 16)]
    shapes = list(dict.fromkeys(c.shape for c in found))
    return sorted(found, key=lambda c: shapes.index(c.shape))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--constants", metavar="TOPOLOGY", default="",
                        help="topology file of 'oper calibrate' with this machine's constants "
                             "(default: measure them first; with --quick: assume them)")


def run(args: argparse.Namespace, chosen: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Run the cases; yields the entry of each.

    If this machine cannot limit processor time, the entries of cases that need it come last, are
    ``skipped`` with the reason and count as verified.

    Raises OperError if this machine cannot emulate a cluster.
    """
    check_possible()
    alone, reason = _alone(args), why_no_quota()
    possible = [c for c in chosen if not reason or c.links.host_0_cpu == 1]
    yield from measured([replace(c, constants=alone) for c in possible])
    for case in chosen:
        if case not in possible:
            yield {"name": case.name, "verified": True, "skipped": reason}


def _alone(args: argparse.Namespace) -> Topology:
    """The topology of processes that share this machine."""
    if args.constants:
        return Topology.from_toml(args.constants)
    if args.quick:
        return Topology.this_host(_CALIBRATED)
    print("  measuring the costs of a single rank", file=sys.stderr, flush=True)
    return measure_and_fit(True, _CALIBRATED, [])[0]


def totals(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy of the step times predicted for contenders on OPER's runtime.

    Counts the cases of the grid, or all cases if none of them is in the grid.

    Returns:
        ``median_error``, ``worst_error``: relative to the executed step time. ``num_predicted``:
        number of contenders compared. ``ordered``: among the ``num_ordered_pairs`` pairs of a
        case's contenders whose executed step times differ by more than 5 %, the share whose order
        is predicted correctly. A figure is None if there is nothing to count.
    """
    errors, pairs = [], []
    for entry in [e for e in entries if e.get("in_grid")] or entries:
        steps = [(x["executed_ms"], x["predicted_ms"]) for x in entry.get("contenders", {}).values()
                 if x["runtime"] == "oper" and x["predicted_ms"] is not None]
        errors += [abs(predicted / executed - 1) for executed, predicted in steps]
        pairs += [(a[1] - b[1]) * (a[0] - b[0]) > 0 for a, b in itertools.combinations(steps, 2)
                  if max(a[0], b[0]) > _DIFFERENT * min(a[0], b[0])]
    return {"median_error": round(statistics.median(errors), 4) if errors else None,
            "worst_error": round(max(errors), 4) if errors else None,
            "ordered": round(sum(pairs) / len(pairs), 4) if pairs else None,
            "num_predicted": len(errors), "num_ordered_pairs": len(pairs)}


def remarks(entries: Sequence[dict[str, Any]]) -> str:
    """Text: ratios over the grid, and the cases in which a peer's plan is faster by over 2 %."""
    done, text = [e for e in entries if "contenders" in e], ""
    for objective in ("training", "inference"):
        ratios = [e["ratio_step"] for e in done
                  if e["objective"] == objective and e["in_grid"] and e["ratio_step"]]
        if ratios:
            text += (f"{objective}, {len(ratios)} cases of the grid: TorchRec's best / OPER median "
                     f"{statistics.median(ratios):.2f}, minimum {min(ratios):.2f}\n")
    behind = [e["name"] for e in done
              if any(x["runtime"] == "oper" and x.get("over_oper", {}).get("high", 1) < 0.98
                     for x in e["contenders"].values())]
    return text + (f"a peer's plan executes faster, beyond 2 %: {', '.join(behind)}\n" if behind
                   else "")
