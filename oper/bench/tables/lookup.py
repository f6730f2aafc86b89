"""``oper bench lookup``: forward passes of OPER, torch and fbgemm, beside the gather ceiling; and
backward passes with the update of the tables beside fbgemm's; and how a step's time grows."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import run_workers
from oper.bench.core.workload import Workload
from oper.bench.tables.lookup_case import PEERS, Case
from oper.bench.tables.scale_case import ScaleCase, scale_cases, scale_table
from oper.bench.tables.update_case import UpdateCase

WORLD_SIZES = (1, 2)
_WORKERS = {Case: "oper.bench.tables.lookup_case:run_case",
            UpdateCase: "oper.bench.tables.update_case:run_update_case",
            ScaleCase: "oper.bench.tables.scale_case:run_scale_case"}
on_device = True  # see oper.bench.verbs
_EXPONENTS = {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}


def cases(quick: bool) -> list[Case]:
    """All dims at exponent 1.05 and all exponents at dim 64, by world size; updates; growth."""
    found: list[Case] = []
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
    for pooling, (suffix, exponent) in itertools.product((1, 20), _EXPONENTS.items()):
        if quick and suffix:
            continue
        update = UpdateCase(f"update-d64-pool{pooling}{suffix}-w2",
                            Workload(pooling=pooling, exponent=exponent), 2)
        found.append(replace(update, rounds=6, per_round=3, num_stats_batches=8) if quick
                     else update)
    return found + ([] if quick else scale_cases(quick))


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases; those of one kind and world size share their processes."""
    for (kind, world_size), group in itertools.groupby(
            chosen, key=lambda c: (type(c), c.world_size)):
        together = list(group)
        worker = _WORKERS[kind]
        yield from run_workers(worker, [c.to_json() for c in together], world_size,
                               max(1, together[0].num_threads // world_size))


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    forward = [e for e in entries if "oper_forward_ms" in e]
    update = [e for e in entries if "oper_update_ms" in e]
    scale = scale_table([e for e in entries if "axis" in e])
    wrong = "".join(f"{e['name']}: {n} differs from the unsharded collection: {v}\n"
                    for e in entries for n, v in e["verification"].items() if not v["passed"])
    tables = [t for t in (_forward_table(forward), _update_table(update), scale) if t]
    return ("\n".join(tables) + "\nw = OPER's processes; the others: one process; 2 threads in "
            "all; medians; ratio = fastest baseline / OPER\n" + record.noise_note(entries) + wrong)


def _forward_table(entries: Sequence[dict[str, Any]]) -> str:
    headers = ["forward", "OPER", "nn.EmbeddingBag", "EBC", "fbgemm", "ratio", "ceiling", "GB/s",
               "of ceiling", "Python", "verified"]
    rows = [[
        e["name"], f"{e['oper_forward_ms']:.2f} ms",
        *(f"{e[f'{n}_forward_ms']:.2f} ms" for n in PEERS), f"{e['ratio_forward']:.2f}x",
        f"{e['gather_ceiling_ms']:.2f} ms", f"{e['gather_ceiling_gbps']:.1f}",
        f"{e['forward_fraction_of_ceiling']:.0%}", f"{e['python_overhead_us']:.0f} us",
        "yes" if e["verified"] else "NO"]
        for e in entries]
    return record.table(headers, rows) + "\n" if rows else ""


def _update_table(entries: Sequence[dict[str, Any]]) -> str:
    rows = [[e["name"], f"{e['oper_update_ms']:.2f} ms", f"{e['fbgemm_update_ms']:.2f} ms",
             f"{e['ratio_update']:.2f}x", "yes" if e["verified"] else "NO"] for e in entries]
    headers = ["backward and update", "OPER", "fbgemm", "ratio", "verified"]
    return record.table(headers, rows) + "\n" if rows else ""
