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
from oper.bench.dynamic import case as dynamic_case, suite as dynamic_suite
from oper.bench.tables import model_case, model_steps
from oper.bench.tables.train_case import TrainCase, run_case

WORLD_SIZE = 2
CASE_OPTIONS = ("device", "model", "tables")


def cases(quick: bool, device: str = "", model: str = "", tables: str = "") -> list[Any]:
    """The cases in the order of the record; the main ones only when `quick`."""
    if device == "cuda":
        return suite.cases(quick, "train")
    if model:
        return model_steps.cases(quick, model)
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
                                 Workload(pooling=pooling, exponent=exponent), whole_model=whole)
                if whole:
                    case = replace(case, rounds=10, per_round=3)
                if quick:
                    case = replace(case, num_stats_batches=8, rounds=3 if whole else 6,
                                   per_round=2 if whole else 3)
                found.append(case)
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    suite.configure(parser)
    parser.add_argument("--model", choices=model_steps.MODELS, default="",
                        help="a recommender over a synthetic catalogue instead, see "
                             "docs/how-to/recommenders.md")
    parser.add_argument("--tables", choices=("dynamic",), default="",
                        help="dynamic: of raw keys, beside OPER's static ones and TorchRec's "
                             "managed-collision modules")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: OPER's ranks act as separate hosts")


def run(args: argparse.Namespace, chosen: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    if args.device == "cuda":
        return suite.run(chosen, args.device)
    if args.model:
        return run_workers(model_case.run_case, chosen, WORLD_SIZE)
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
            + record.noise_note(entries) + "".join(map(_wire, entries)) + notes)


def _limit(text: str) -> record.Column:
    """A column of the gather ceiling, which reads shared memory."""
    return lambda e: text.format(**e) if e["exchange"] == "shared" else "-"


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
