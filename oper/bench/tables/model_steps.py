"""``oper bench train --model NAME``: a recommender's training steps, beside TorchRec's plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oper.bench.core import record
from oper.bench.tables.model_case import ModelCase

WORLD_SIZE = 2
MODELS = ("cdt4rec", "sasrec", "hstu", "cadvae")
# CaD-VAE's tables are 400 columns wide together, and every contender holds its own.
LARGE = {"cadvae": ("500k", 500_000)}


def cases(quick: bool, model: str) -> list[ModelCase]:
    """A small and a large catalogue; the small one only when `quick`."""
    if quick:
        return [ModelCase(f"{model}-20k", model, 20_000, 16, num_batches=4, rounds=2, per_round=1)]
    size, num_items = LARGE.get(model, ("2m", 2_000_000))
    return [ModelCase(f"{model}-100k", model, 100_000),
            ModelCase(f"{model}-{size}", model, num_items)]


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    columns: dict[str, record.Column] = {"case": "{name}"}
    for what, phase in (("tables", "embedding"), ("step", "step")):
        columns |= {f"OPER {what}": f"{{oper_{phase}_ms:.2f}} ms",
                    f"TorchRec {what}": f"{{torchrec_{phase}_ms:.2f}} ms",
                    f"{what} ratio": f"{{ratio_{phase}:.2f}}x",
                    f"best plan, {what}": f"{{torchrec_best_{phase}}}"}
    notes = "".join(f"{e['name']}: largest relative difference of a loss: "
                    f"{e['max_relative_diff']}\n" for e in entries if not e["verified"])
    return (record.table_of(entries, {**columns, "verified": record.yes})
            + f"{WORLD_SIZE} processes, 1 thread each; medians of the slower rank; ratio = "
            "TorchRec's best plan / OPER; tables = lookups, backward and update of the "
            "collections alone, step = the whole model\n" + record.noise_note(entries) + notes)
