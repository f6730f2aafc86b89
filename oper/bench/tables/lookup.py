"""``oper bench lookup``: forward passes of OPER, torch and fbgemm, beside the gather ceiling; and
backward passes with the update of the tables beside fbgemm's; and how a step's time grows."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

from oper.bench.core.measure import Case
from oper.bench.core.workload import Workload
from oper.bench.device import suite
from oper.bench.tables.lookup_case import LookupCase
from oper.bench.tables.scale_case import scale_cases
from oper.bench.tables.unsharded import PEERS
from oper.bench.tables.update_case import UpdateCase

WORLD_SIZES = (1, 2)
_EXPONENTS = {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}
FIGURES = (
    *suite.FIGURES,
    ("fastest_peer", "oper_forward_ms", *(f"{peer}_forward_ms" for peer in PEERS), "ratio_forward",
     "gather_ceiling_ms", "gather_ceiling_gbps", "forward_fraction_of_ceiling",
     "python_overhead_us"),
    ("axis", "table_gigabytes", "oper_step_ms", "bytes_moved.lines", "step_ns_per_line_byte",
     "ceiling_ns_per_line_byte"),
    ("oper_update_ms", "fbgemm_update_ms", "ratio_update"))
NOTE = ("w = OPER's processes; the others: one process; 2 threads in all; medians; ratio = fastest "
        "baseline / OPER\n")


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
            found += [LookupCase(f"lookup-d{dim}-pool{pooling}{suffix}-w{world_size}",
                                 Workload(dim=dim, pooling=pooling, exponent=exponent), world_size)
                      for pooling in (1, 20)]
    found += [UpdateCase(f"update-d64-pool{pooling}{suffix}-w2",
                         Workload(pooling=pooling, exponent=exponent), 2)
              for pooling, (suffix, exponent) in itertools.product((1, 20), _EXPONENTS.items())
              if not (quick and suffix)]
    if quick:
        return [replace(case, rounds=6, per_round=3, num_stats_batches=8) for case in found]
    return [*found, *scale_cases()]
