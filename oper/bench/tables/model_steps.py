"""``oper bench train --model NAME``: a recommender's training steps, beside TorchRec's plans."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import run_workers
from oper.bench.tables.model_case import Case

WORLD_SIZE = 2
MODELS = ("cdt4rec", "sasrec", "cadvae")
# CaD-VAE's tables are 400 columns wide together, and every contender holds its own.
LARGE = {"cadvae": ("500k", 500_000)}


def cases(quick: bool, model: str) -> list[Case]:
    """A small and a large catalogue; the small one only when `quick`."""
    if quick:
        return [Case(f"{model}-20k", model, 20_000, 16, num_batches=4, rounds=2, per_round=1)]
    size, num_items = LARGE.get(model, ("2m", 2_000_000))
    return [Case(f"{model}-100k", model, 100_000), Case(f"{model}-{size}", model, num_items)]


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    yield from run_workers("oper.bench.tables.model_case:run_case", [c.to_json() for c in chosen],
                           WORLD_SIZE)


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    headers = ["case", "OPER tables", "TorchRec", "ratio", "best plan", "OPER step", "TorchRec",
               "ratio", "best plan", "verified"]
    rows = [[e["name"], *(text for phase in ("embedding", "step") for text in (
        f"{e[f'oper_{phase}_ms']:.2f} ms", f"{e[f'torchrec_{phase}_ms']:.2f} ms",
        f"{e[f'ratio_{phase}']:.2f}x", e[f"torchrec_best_{phase}"])),
        "yes" if e["verified"] else "NO"] for e in entries]
    notes = "".join(f"{e['name']}: largest relative difference of a loss: "
                    f"{e['max_relative_diff']}\n" for e in entries if not e["verified"])
    return (record.table(headers, rows) + f"\n{WORLD_SIZE} processes, 1 thread each; medians of the"
            " slower rank; ratio = TorchRec's best plan / OPER; tables = lookups, backward and "
            "update of the collections alone, step = the whole model\n"
            + record.noise_note(entries) + notes)
