"""``oper bench train``: training steps of OPER and of TorchRec side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench import record
from oper.bench.launch import run_workers
from oper.bench.train_case import Case
from oper.bench.workload import Workload

WORLD_SIZE = 2


def cases(quick: bool) -> list[Case]:
    """The cases in the order of the record; the main ones only when `quick`."""
    found = []
    exponents = {"": 1.05} if quick else {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}
    for suffix, exponent in exponents.items():
        for whole in (False, True):
            for pooling in (1, 20):
                if whole and suffix:
                    continue  # other skews are reported for the collection alone
                case = Case(f"{'dlrm' if whole else 'ebc'}-pool{pooling}{suffix}",
                            Workload(pooling=pooling, exponent=exponent), whole)
                if whole:
                    case = replace(case, rounds=10, per_round=3)
                if quick:
                    case = replace(case, num_stats_batches=8, rounds=3 if whole else 6,
                                   per_round=2 if whole else 3)
                found.append(case)
    return found


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    yield from run_workers("oper.bench.train_case:run_case", [c.to_json() for c in chosen],
                           WORLD_SIZE)


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    headers = ["case", "OPER step", "TorchRec", "ratio", "OPER fwd", "TorchRec", "ratio",
               "ceiling", "GB/s", "of ceiling", "best plan", "verified"]
    rows = [[
        e["name"], f"{e['oper_step_ms']:.2f} ms", f"{e['torchrec_step_ms']:.2f} ms",
        f"{e['ratio_step']:.2f}x", f"{e['oper_forward_ms']:.2f} ms",
        f"{e['torchrec_forward_ms']:.2f} ms", f"{e['ratio_forward']:.2f}x",
        f"{e['gather_ceiling_ms']:.2f} ms", f"{e['gather_ceiling_gbps']:.1f}",
        f"{e['forward_fraction_of_ceiling']:.0%}", e["torchrec_best"],
        "yes" if e["verified"] else "NO"] for e in entries]
    notes = "".join(_complaints(e) for e in entries if not e["verified"])
    return (record.table(headers, rows) + f"\n{WORLD_SIZE} processes, 1 thread each; medians of the"
            " slower rank; ratio = TorchRec's best plan / OPER\n"
            + record.noise_note(entries) + notes)


def _complaints(entry: dict[str, Any]) -> str:
    """What differs from the unsharded model, by contender."""
    return "".join(f"{entry['name']}: {name} differs from the unsharded model: "
                   f"{plan['verification']}\n" for name, plan in entry["plans"].items()
                   if not plan["verification"] or not plan["verification"]["passed"])
