"""``oper bench lookup``: forward passes of OPER, torch and fbgemm, beside the gather ceiling."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench import record
from oper.bench.launch import run_workers
from oper.bench.lookup_case import PEERS, Case
from oper.bench.workload import Workload

WORLD_SIZES = (1, 2)
_EXPONENTS = {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}


def cases(quick: bool) -> list[Case]:
    """All dims at exponent 1.05 and all exponents at dim 64, by world size."""
    found = []
    for world_size in WORLD_SIZES:
        for dim, (suffix, exponent) in itertools.product((16, 64, 128), _EXPONENTS.items()):
            if (suffix and dim != 64) or (quick and (suffix or dim != 64)):
                continue
            for pooling in (1, 20):
                work = Workload(dim=dim, pooling=pooling, exponent=exponent)
                name = f"lookup-d{dim}-pool{pooling}{suffix}-w{world_size}"
                case = Case(name, work, world_size)
                found.append(replace(case, rounds=6, per_round=3, num_stats_batches=8)
                             if quick else case)
    return found


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases; those of one world size share their processes."""
    for world_size, group in itertools.groupby(chosen, key=lambda c: c.world_size):
        together = list(group)
        yield from run_workers("oper.bench.lookup_case:run_case", [c.to_json() for c in together],
                               world_size, max(1, together[0].num_threads // world_size))


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    headers = ["case", "OPER", "nn.EmbeddingBag", "EBC", "fbgemm", "ratio", "ceiling", "GB/s",
               "of ceiling", "verified"]
    rows = [[
        e["name"], f"{e['oper_forward_ms']:.2f} ms",
        *(f"{e[f'{n}_forward_ms']:.2f} ms" for n in PEERS), f"{e['ratio_forward']:.2f}x",
        f"{e['gather_ceiling_ms']:.2f} ms", f"{e['gather_ceiling_gbps']:.1f}",
        f"{e['forward_fraction_of_ceiling']:.0%}", "yes" if e["verified"] else "NO"]
        for e in entries]
    wrong = "".join(f"{e['name']}: {n} differs from the unsharded collection: {v}\n"
                    for e in entries for n, v in e["verification"].items() if not v["passed"])
    return (record.table(headers, rows) + "\nforward passes of whole batches, medians; w = OPER's "
            "processes; the others: one process; 2 threads in all; ratio = fastest peer / OPER\n"
            + record.noise_note(entries) + wrong)
