"""``python -m tests.faults.delta_cost``: what delta checkpoints cost a training loop.

Two ranks train eight tables and a small dense model, in alternating series of steps with and
without deltas. The stall is the additional time of a series with deltas, which includes effects of
writing to disk in the background. A second run, which touches one row in a hundred, compares the
bytes of deltas and full checkpoints.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import oper
from oper.bench.core import record
from oper.data import power_law_ids
from oper.integration.checkpoint.delta_files import folder_of
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from tests.world_support import run_world

ROWS, DIM, TABLES = 250_000, 32, 8


class Model(nn.Module):
    """Embedding bags with a dense model on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES))
        self.over = nn.Sequential(nn.Linear(TABLES * DIM, 512), nn.ReLU(), nn.Linear(512, 256),
                                  nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: list[torch.Tensor]) -> torch.Tensor:
        offsets = torch.arange(0, ids[0].numel(), 4)
        pooled = [bag(i, offsets) for bag, i in zip(self.bags, ids, strict=True)]
        return self.over(torch.cat(pooled, 1)).square().mean()


def _batches(rank: int, batch_size: int, rows: int) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(rank)
    return [[torch.from_numpy(power_law_ids(rows, 4 * batch_size, 1.05, rng))
             for _ in range(TABLES)] for _ in range(16)]


def _steps(model: nn.Module, batches: list[list[torch.Tensor]], steps: range,
           saver: DeltaCheckpoints | None, every: int) -> tuple[float, float]:
    """Return the seconds of all steps, and those of the longest call of `save`."""
    longest, begin = 0.0, time.perf_counter()
    for step in steps:
        model(batches[step % len(batches)]).backward()
        for parameter in model.parameters():
            parameter.grad = None
        if saver is not None and step % every == 0:
            at = time.perf_counter()
            saver.save(step)
            longest = max(longest, time.perf_counter() - at)
    return time.perf_counter() - begin, longest


def measure(rank: int, world_size: int, folder: str, every: int, turns: int) -> dict[str, Any]:
    """Measure the stall on one rank."""
    torch.set_num_threads(1)
    model: Any = Model()
    model = oper.shard(model, optimizer=oper.RowWiseAdagrad(lr=0.1))
    batches = _batches(rank, 2048, ROWS)
    with DeltaCheckpoints(Path(folder) / "run", model) as saver:
        saver.save_full(0)
        _steps(model, batches, range(1, 20), saver, every)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        # Series of at least 50 steps, short and often alternating, since machines drift.
        calls, length = [], every * max(1, 50 // every)
        for turn in range(turns):
            for k, kind in enumerate(("without", "with") if turn % 2 else ("with", "without")):
                saver.flush()
                start = 20 + (2 * turn + k) * length
                spent, longest = _steps(model, batches, range(start, start + length),
                                        saver if kind == "with" else None, every)
                seconds[kind].append(spent / length)
                calls += [longest] * (kind == "with")
        saver.flush()
    return {"step_ms": 1e3 * float(np.median(seconds["without"])),
            "step_with_deltas_ms": 1e3 * float(np.median(seconds["with"])),
            "stall": float(np.median(np.array(seconds["with"]) / seconds["without"])) - 1,
            "save_call_ms": 1e3 * float(np.median(calls))}


def size(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Measure bytes on one rank of a run that touches one row in a hundred."""
    model: Any = oper.shard(Model(), optimizer=oper.RowWiseAdagrad(lr=0.1))
    place = Path(folder) / "small"
    with DeltaCheckpoints(place, model) as saver:
        saver.save_full(0)
        for k in range(5):
            part = np.arange(ROWS // 100).reshape(5, -1)[k] * 100  # spread over the table
            ids = torch.from_numpy(np.resize(part, 4 * 128))
            model([ids] * TABLES).backward()
        saver.save(5)
        saver.flush()
    torch.distributed.barrier()
    full = sum(p.stat().st_size for p in place.iterdir())
    return {"full_bytes": full, "delta_bytes": sum(
        p.stat().st_size for p in folder_of(place).rglob("*.npz"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.delta_cost", description=__doc__)
    parser.add_argument("--every", type=int, nargs="+", default=[10, 50], metavar="STEPS",
                        help="between deltas, one case each")
    parser.add_argument("--turns", type=int, default=12, help="stretches of each kind")
    parser.add_argument("--json", type=Path, metavar="F", help="write the result there")
    args, load = parser.parse_args(), record.load_average()
    with tempfile.TemporaryDirectory(prefix="oper-deltas-") as folder:
        cases: list[dict[str, Any]] = [
            {"name": f"a delta every {every} steps", "delta_every": every,
             "ranks": run_world(2, measure, folder, every, args.turns, timeout_s=280)}
            for every in args.every]
        sizes = run_world(2, size, folder)[0]
    cases.append({"name": "1 % of the rows", **sizes,
                  "share": sizes["delta_bytes"] / sizes["full_bytes"]})
    print(json.dumps(cases, indent=1))
    if args.json is not None:
        record.write(args.json, record.record(
            "delta", ["python", "-m", "tests.faults.delta_cost", *sys.argv[1:]], cases, load))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
