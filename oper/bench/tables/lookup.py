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
from oper.bench.core.measure import Case
from oper.bench.core.workload import Workload
from oper.bench.device import suite
from oper.bench.tables.lookup_case import LookupCase, run_case
from oper.bench.tables.scale_case import ScaleCase, run_scale_case, scale_cases, scale_table
from oper.bench.tables.unsharded import PEERS
from oper.bench.tables.update_case import UpdateCase, run_update_case

WORLD_SIZES = (1, 2)
_WORKERS: dict[Any, Any] = {LookupCase: run_case, UpdateCase: run_update_case,
                            ScaleCase: run_scale_case}
CASE_OPTIONS = ("device",)
_EXPONENTS = {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    suite.configure(parser)


def cases(quick: bool, device: str = "") -> list[Any]:
    """All dims at exponent 1.05 and all exponents at dim 64, by world size; updates; growth."""
    if device == "cuda":
        return suite.cases(quick, "lookup")
    found: list[Case] = []
    for world_size in WORLD_SIZES:
        for dim, (suffix, exponent) in itertools.product((16, 64, 128), _EXPONENTS.items()):
            if (suffix and dim != 64) or (quick and (suffix or dim != 64)):
                continue
            for pooling in (1, 20):
                work = Workload(dim=dim, pooling=pooling, exponent=exponent)
                name = f"lookup-d{dim}-pool{pooling}{suffix}-w{world_size}"
                case = LookupCase(name, work, world_size)
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


def run(args: argparse.Namespace, chosen: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases; those of one kind and world size share their processes."""
    if args.device == "cuda":
        yield from suite.run(chosen, args.device)
        return
    for (kind, world_size), group in itertools.groupby(
            chosen, key=lambda c: (type(c), c.world_size)):
        together = list(group)
        yield from run_workers(_WORKERS[kind], together, world_size,
                               max(1, together[0].num_threads // world_size))


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    if "device" in entries[0]:
        return suite.report(entries)
    forward = record.table_of([e for e in entries if "oper_forward_ms" in e], {
        "forward": "{name}", "OPER": "{oper_forward_ms:.2f} ms",
        **{name: f"{{{peer}_forward_ms:.2f}} ms" for name, peer in zip(
            ("nn.EmbeddingBag", "EBC", "fbgemm"), PEERS, strict=True)},
        "ratio": "{ratio_forward:.2f}x", "ceiling": "{gather_ceiling_ms:.2f} ms",
        "GB/s": "{gather_ceiling_gbps:.1f}", "of ceiling": "{forward_fraction_of_ceiling:.0%}",
        "Python": "{python_overhead_us:.0f} us", "verified": record.yes})
    update = record.table_of([e for e in entries if "oper_update_ms" in e], {
        "backward and update": "{name}", "OPER": "{oper_update_ms:.2f} ms",
        "fbgemm": "{fbgemm_update_ms:.2f} ms", "ratio": "{ratio_update:.2f}x",
        "verified": record.yes})
    scale = scale_table([e for e in entries if "axis" in e])
    wrong = "".join(f"{e['name']}: {n} differs from the unsharded collection: {v}\n"
                    for e in entries for n, v in e["verification"].items() if not v["passed"])
    return ("\n".join(t for t in (forward, update, scale) if t)
            + "\nw = OPER's processes; the others: one process; 2 threads in "
            "all; medians; ratio = fastest baseline / OPER\n" + record.noise_note(entries) + wrong)
