"""Embedding forwards without gradient: OPER's read-only tables in two processes, TorchRec's sharded
plans in the same two, and unsharded collections in one process with as many threads."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.planning import chosen_plan, slowest, total, world
from oper.bench.core.workload import make_kjt, timed_ids
from oper.bench.tables.lookup_case import (
    PEERS,
    Case,
    aligner,
    make_peers,
    nothing,
    on_threads,
    verify,
)
from oper.bench.tables.sides import Side, build_torchrec, make_collection
from oper.bench.tables.torchrec_peer import PLAN_KINDS
from oper.bench.tables.train_case import Progress


@dataclass(frozen=True, slots=True)
class ForwardCase(Case):
    """A case of lookups beside TorchRec's plans; every process of either has one thread."""

    world_size: int = 2
    rounds: int = 10


@torch.no_grad()
def run_forward_case(value: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build, verify and measure one case; the worker function. Collective.

    Returns:
        The case's entry of the record on rank 0, nothing elsewhere.
    """
    from oper.sharding import shard

    case = ForwardCase.from_json(value)
    work, (rank, world_size) = case.work, world()
    load_before = record.load_average()
    progress(f"{case.name}: drawing batches, planning")
    ids = [timed_ids(work, r, world_size, case.num_batches) for r in range(world_size)]
    plan, _ = chosen_plan(work, case.num_stats_batches, "inference")
    progress(f"{case.name}: building")
    collection = make_collection(work, "cpu")
    model: Any = shard(collection, plan=plan, objective="inference")
    joint = [np.concatenate(x, axis=1) for x in zip(*ids, strict=True)] if rank == 0 else []
    peers = make_peers(work, collection, joint) if rank == 0 else {}
    del collection
    kjts = [make_kjt(work, x) for x in ids[rank]]
    with torch.enable_grad():  # TorchRec puts its optimizers into the backward pass
        sides = {kind: build_torchrec(work, False, kind, world_size)[0] for kind in PLAN_KINDS}
    gc.collect()
    progress(f"{case.name}: comparing with the unsharded collection")
    verification = verify({"oper": functools.partial(_forward, model, kjts), **{
        kind: functools.partial(_in_order, side, kjts) for kind, side in sides.items()}},
        peers, len(kjts))
    runs = {"oper": on_threads(1, functools.partial(_forward, model, kjts))}
    for kind, side in sides.items():
        runs[kind] = on_threads(1, functools.partial(_forward, side.model, kjts))
    for name in PEERS:
        runs[name] = on_threads(world_size if rank == 0 else 1, peers.get(name, nothing))
    progress(f"{case.name}: measuring, {case.rounds} rounds of {case.per_round}")
    align = aligner(model.tables)
    record.interleave(runs, align, 1, 2)
    clock = record.BusyClock()
    mine = record.interleave(runs, align, case.rounds, case.per_round)
    others = clock.others(total)
    timings = {n: record.summary(np.array(slowest(s.tolist()))) for n, s in mine.items()}
    if dist.is_initialized():
        dist.barrier()
    model.tables.close()
    if rank:
        return {}
    return {"name": case.name, **_figures(timings),
            "verified": all(v["passed"] for v in verification.values()),
            "verification": verification, "timings": timings, "workload": work.to_json(),
            "world_size": world_size, "threads_per_rank": 1, "threads_of_unsharded": world_size,
            "num_batches": case.num_batches, "other_busy_cores": round(others, 2),
            "load_before": load_before, "load_after": record.load_average()}


def _forward(model: Any, kjts: list[Any], number: int) -> torch.Tensor:
    values: torch.Tensor = model(kjts[number % len(kjts)]).values()
    return values


def _in_order(side: Side, kjts: list[Any], number: int) -> torch.Tensor:
    return side.lookup(kjts[number])


def _figures(timings: dict[str, Any]) -> dict[str, Any]:
    ms = {name: t["median_ms"] for name, t in timings.items()}
    sharded, unsharded = min(PLAN_KINDS, key=ms.__getitem__), min(PEERS, key=ms.__getitem__)
    return {"ratio_forward": round(ms[sharded] / ms["oper"], 3),
            "ratio_unsharded": round(ms[unsharded] / ms["oper"], 3),
            "torchrec_best": sharded, "unsharded_best": unsharded,
            **{f"{name}_forward_ms": x for name, x in ms.items()}}
