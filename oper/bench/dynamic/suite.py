"""``oper bench train --tables dynamic``: steps on raw keys, on row numbers, and TorchRec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oper.bench.core import record
from oper.bench.core.workload import Workload
from oper.bench.dynamic.case import DynamicCase

WORLD_SIZE = 2
NUM_TABLES, NUM_KEYS = 26, 50_000
# Keys per row that is there for them. With eviction in every step: more keys than rows.
LOADS = {"pool1": 0.5, "pool20": 0.5, "pool1-load95": 0.95, "pool1-full": 1.1}


def cases(quick: bool) -> list[DynamicCase]:
    """The cases in the order of the record; with few repetitions when `quick`."""
    found = []
    for name, load in LOADS.items():
        work = Workload(num_rows=(NUM_KEYS,) * NUM_TABLES, exponent=1.05,
                        pooling=20 if name == "pool20" else 1)
        case = DynamicCase(name, work, load=load)
        found.append(replace(case, num_stats_batches=8, rounds=6, per_round=3) if quick else case)
    return found


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    table = record.table_of(entries, {
        "case": "{name}", "dynamic step": "{dynamic_step_ms:.2f} ms",
        "static": "{static_step_ms:.2f} ms", "dynamic / static": "{ratio_static:.2f}x",
        "planned static": "{planned_step_ms:.2f} ms", "dynamic / planned": "{ratio_planned:.2f}x",
        "TorchRec MCH": "{mch_step_ms:.2f} ms", "MCH / dynamic": "{ratio_mch:.2f}x",
        "bytes per slot": "{bytes_per_slot:.2f}", "without a row": "{missed:.2%}",
        "evicted per step": "{evicted_per_step:.1f}", "verified": record.yes})
    notes = "".join(f"{e['name']}: differs from its formulas: {e['verification']}\n"
                    for e in entries if not e["verified"])
    return (table + f"{WORLD_SIZE} processes, 1 thread each; medians of the slower rank; TorchRec's"
            " maps in front of fbgemm's tables in one process with as many threads; MCH / dynamic"
            " = ratio of means; planned static: by statistics of rows, which others lack\n"
            + record.noise_note(entries) + notes)
