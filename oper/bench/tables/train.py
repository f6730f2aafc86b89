"""``oper bench train``: training steps of OPER and of TorchRec side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import run_workers
from oper.bench.core.workload import Workload
from oper.bench.device import suite
from oper.bench.dynamic import case as dynamic_case, drift, suite as dynamic_suite
from oper.bench.tables import model_case, model_steps
from oper.bench.tables.sides import Dense
from oper.bench.tables.train_case import TrainCase, run_case
from oper.data.generate.published import CRITEO_1TB_DISTINCT, MLPERF_CAP, MLPERF_MULTI_HOT
from oper.train.config import DLRMConfig

WORLD_SIZE = 2
CASE_OPTIONS = ("device", "model", "tables")
# MLPerf's models: layers of its reference implementations, ids per bag of its multi-hot data, rows
# of its tables up to a hundredth of its own limit.
MLPERF = {
    "dlrm": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256)),
    "dlrm-dcnv2": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256),
                             cross_layers=3, cross_rank=512)}
_MAX_ROWS = MLPERF_CAP // 100


def cases(quick: bool, device: str = "", model: str = "", tables: str = "") -> list[Any]:
    """The cases in the order of the record; the main ones only when `quick`."""
    if device == "cuda":
        return suite.cases(quick, "train")
    if model in MLPERF:
        return mlperf_cases(quick, model)
    if model:
        return model_steps.cases(quick, model)
    if tables == "drift":
        return drift.cases(quick)
    if tables:
        return dynamic_suite.cases(quick)
    found = []
    exponents = {"": 1.05} if quick else {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}
    for suffix, exponent in exponents.items():
        for whole in (False, True):
            for pooling in (1, 20):
                if whole and suffix:
                    continue  # other skews are reported for the collection alone
                case = TrainCase(f"{'dlrm' if whole else 'ebc'}-pool{pooling}{suffix}",
                                 Workload(pooling=pooling, exponent=exponent),
                                 dense=Dense() if whole else None)
                if whole:
                    case = replace(case, rounds=10, per_round=3)
                if quick:
                    case = replace(case, num_stats_batches=8, rounds=3 if whole else 6,
                                   per_round=2 if whole else 3)
                found.append(case)
    return found


def mlperf_cases(quick: bool, model: str) -> list[TrainCase]:
    """One of `MLPERF` with matrix products of float32 and of bfloat16; small when `quick`."""
    most, batch_size = (2_000, 64) if quick else (_MAX_ROWS, 1024)
    work = Workload(tuple(min(n, most) for n in CRITEO_1TB_DISTINCT), dim=128,
                    batch_size=batch_size, pooling=max(MLPERF_MULTI_HOT), lengths=MLPERF_MULTI_HOT)
    rounds, per_round, batches = (2, 1, 4) if quick else (6, 2, 8)
    return [TrainCase(f"{model}-{dtype}", work, num_batches=batches, num_stats_batches=batches,
                      rounds=rounds, per_round=per_round, dense=Dense(MLPERF[model], dtype))
            for dtype in ("float32", "bfloat16")]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    suite.configure(parser)
    parser.add_argument("--model", choices=(*MLPERF, *model_steps.MODELS), default="",
                        help="instead: a DLRM or DLRM-DCNv2 of MLPerf's layers, or a recommender "
                             "over a synthetic catalogue, see docs/how-to/recommenders.md")
    parser.add_argument("--tables", choices=("dynamic", "drift"), default="",
                        help="dynamic: of raw keys, beside OPER's static ones and TorchRec's "
                             "managed-collision modules; drift: their quality on logs whose ids "
                             "come and go, beside hashing and a fixed vocabulary")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: OPER's ranks act as separate hosts")


def run(args: argparse.Namespace, chosen: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    if args.device == "cuda":
        return suite.run(chosen, args.device)
    if args.model in model_steps.MODELS:
        return run_workers(model_case.run_case, chosen, WORLD_SIZE)
    if args.tables == "drift":
        return map(drift.run_case, chosen)
    if args.tables:
        return run_workers(dynamic_case.run_case, chosen, WORLD_SIZE)
    chosen = [replace(c, exchange=args.exchange) for c in chosen]
    return run_workers(run_case, chosen, WORLD_SIZE)


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    if "device" in entries[0]:
        return suite.report(entries)
    if "model" in entries[0]:
        return model_steps.report(entries)
    if "auc_over" in entries[0]:
        return drift.report(entries)
    if "ratio_static" in entries[0]:
        return dynamic_suite.report(entries)
    table = record.table_of(entries, {
        "case": "{name}", "OPER step": "{oper_step_ms:.2f} ms",
        "TorchRec": "{torchrec_step_ms:.2f} ms", "ratio": "{ratio_step:.2f}x",
        "OPER fwd": "{oper_forward_ms:.2f} ms", "TorchRec fwd": "{torchrec_forward_ms:.2f} ms",
        "ratio fwd": "{ratio_forward:.2f}x", "ceiling": _limit("{gather_ceiling_ms:.2f} ms"),
        "GB/s": _limit("{gather_ceiling_gbps:.1f}"),
        "of ceiling": _limit("{forward_fraction_of_ceiling:.0%}"), "best plan": "{torchrec_best}",
        "verified": record.yes})
    notes = "".join(_complaints(e) for e in entries if not e["verified"])
    return (table + f"{WORLD_SIZE} processes, 1 thread each; medians of the"
            " slower rank; ratio = TorchRec's best plan / OPER\n"
            + record.noise_note(entries) + "".join(map(_throughput, entries))
            + "".join(map(_wire, entries)) + notes)


def _limit(text: str) -> record.Column:
    """A column of the gather ceiling, which reads shared memory."""
    return lambda e: text.format(**e) if e["exchange"] == "shared" else "-"


def _throughput(entry: dict[str, Any]) -> str:
    """Samples per core of a whole model."""
    if "dense" not in entry:
        return ""
    each = entry["samples_per_core_s"]
    return (f"{entry['name']}: {entry['dense']['dtype']}, samples/s per core: OPER "
            f"{each['oper']:,.0f}, TorchRec {each[entry['torchrec_best']]:,.0f}\n")


def _wire(entry: dict[str, Any]) -> str:
    """What the ranks send each other in a step."""
    if entry["exchange"] == "shared":
        return ""
    names = {"oper": "OPER", entry["torchrec_best"]: f"TorchRec {entry['torchrec_best']}"}
    sent = ", ".join(f"{label} {entry['loopback_bytes_per_step'][name] / 1e6:.2f} MB"
                     for name, label in names.items())
    own = sum(entry["oper_sent_bytes_per_step"].values())
    equal = "the same" if entry["simulated_equals_sent"] else "OTHERS"
    return (f"{entry['name']}: sent per step over loopback: {sent}; OPER counts {own / 1e6:.2f} MB "
            f"of it, its simulator {entry['simulated_bytes_per_step'] / 1e6:.2f} MB ({equal})\n")


def _complaints(entry: dict[str, Any]) -> str:
    """What differs from the unsharded model, by contender."""
    return "".join(f"{entry['name']}: {name} differs from the unsharded model: "
                   f"{plan['verification']}\n" for name, plan in entry["plans"].items()
                   if not plan["verification"] or not plan["verification"]["passed"])
