"""``oper bench train``: training steps of OPER and of TorchRec side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import run_workers
from oper.bench.core.workload import Workload
from oper.bench.tables.model_steps import MODELS
from oper.bench.tables.train_case import Case

WORLD_SIZE = 2


on_device = True  # see oper.bench.verbs


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


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    parser.add_argument("--model", choices=MODELS, default="",
                        help="a recommender over a synthetic catalogue instead, see "
                             "docs/how-to/recommenders.md")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: OPER's ranks act as separate hosts, over gloo")


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    chosen = [replace(c, exchange=args.exchange) for c in chosen]
    yield from run_workers("oper.bench.tables.train_case:run_case", [c.to_json() for c in chosen],
                           WORLD_SIZE)


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    headers = ["case", "OPER step", "TorchRec", "ratio", "OPER fwd", "TorchRec", "ratio",
               "ceiling", "GB/s", "of ceiling", "best plan", "verified"]
    rows = [[
        e["name"], f"{e['oper_step_ms']:.2f} ms", f"{e['torchrec_step_ms']:.2f} ms",
        f"{e['ratio_step']:.2f}x", f"{e['oper_forward_ms']:.2f} ms",
        f"{e['torchrec_forward_ms']:.2f} ms", f"{e['ratio_forward']:.2f}x",
        *_limit(e), e["torchrec_best"],
        "yes" if e["verified"] else "NO"] for e in entries]
    notes = "".join(_complaints(e) for e in entries if not e["verified"])
    return (record.table(headers, rows) + f"\n{WORLD_SIZE} processes, 1 thread each; medians of the"
            " slower rank; ratio = TorchRec's best plan / OPER\n"
            + record.noise_note(entries) + "".join(map(_wire, entries)) + notes)


def _limit(entry: dict[str, Any]) -> list[str]:
    """The columns of the gather ceiling, which reads shared memory."""
    if entry["exchange"] != "shared":
        return ["-", "-", "-"]
    return [f"{entry['gather_ceiling_ms']:.2f} ms", f"{entry['gather_ceiling_gbps']:.1f}",
            f"{entry['forward_fraction_of_ceiling']:.0%}"]


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
