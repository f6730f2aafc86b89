"""Backward passes with the update of the tables: OPER beside fbgemm's table-batched bags on CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.planning import chosen_plan, gather, slowest, total, world
from oper.bench.core.workload import CHECKED, Workload, batch_ids, make_kjt, timed_ids
from oper.bench.tables.lookup_case import Case, aligner, on_threads
from oper.bench.tables.sides import EPS, LEARNING_RATE, make_collection
from oper.bench.tables.train_case import Progress, moved_bytes
from oper.bench.tables.verify import Verdict

_CHECKED_STEPS = 2


@dataclass(frozen=True, slots=True)
class UpdateCase(Case):
    """A case of backward passes; fbgemm's one process takes all the threads."""

    num_batches: int = 16


class _Contender:
    """Forward passes that remember what the backward pass is for."""

    def __init__(self, forward: Callable[[int], torch.Tensor], gradient: torch.Tensor) -> None:
        self._forward, self._gradient = forward, gradient
        self._out: torch.Tensor | None = None

    def forward(self, number: int) -> None:
        self._out = self._forward(number)

    def backward(self, number: int) -> None:
        assert self._out is not None
        self._out.backward(self._gradient)
        self._out = None


def run_update_case(value: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build, verify and measure one case; the worker function. Collective.

    Returns:
        The case's entry of the record on rank 0, nothing elsewhere.
    """
    from oper.sharding import shard
    from oper.shmem.optim.optimizers import RowWiseAdagrad

    case = UpdateCase.from_json(value)
    work, (rank, world_size) = case.work, world()
    load_before = record.load_average()
    progress(f"{case.name}: drawing batches, planning")
    checks = [[batch_ids(work, r, world_size, k, CHECKED) for r in range(world_size)]
              for k in range(_CHECKED_STEPS)]
    ids = [timed_ids(work, r, world_size, case.num_batches) for r in range(world_size)]
    plan, _ = chosen_plan(work, case.num_stats_batches, "training")
    progress(f"{case.name}: building")
    collection = make_collection(work, "cpu")
    fused = make_fbgemm(work, collection) if rank == 0 else None
    model: Any = shard(collection, plan=plan, optimizer=RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS))
    del collection
    shape = (work.batch_size, work.dim * len(work.num_rows))
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(work.seed)) * 1e-3
    own_gradient = gradient.chunk(world_size)[rank].clone()

    def contenders(batches: list[list[np.ndarray]]) -> dict[str, _Contender]:
        """By name, on batches given by number and rank."""
        kjts = [make_kjt(work, x[rank]) for x in batches]
        found = {"oper": _Contender(lambda k: model(kjts[k % len(kjts)]).values(), own_gradient)}
        if fused is not None:
            joint = [make_kjt(work, np.concatenate(x, axis=1)) for x in batches]
            flat = [(k.values(), k.offsets().long()) for k in joint]
            # The gradient of the mean of the ranks' losses, as OPER takes it.
            found["fbgemm"] = _Contender(lambda k: fused(*flat[k % len(flat)]),
                                         gradient / world_size)
        return found

    progress(f"{case.name}: comparing tables after {_CHECKED_STEPS} steps")
    verification = _verify(model, fused, contenders(checks))
    sides = contenders([list(x) for x in zip(*ids, strict=True)])
    gc.collect()
    progress(f"{case.name}: measuring, {case.rounds} rounds of {case.per_round}")
    timings, others = _measure(case, model, sides)
    moved = moved_bytes(work, ids[rank])
    step = int(total([moved["step"] - moved["forward"]])[0])
    page_kind = model.tables.page_kind
    if dist.is_initialized():
        dist.barrier()
    model.tables.close()
    if rank:
        return {}
    oper_ms, fbgemm_ms = (timings[n]["median_ms"] for n in ("oper", "fbgemm"))
    return {
        "name": case.name, "oper_update_ms": oper_ms, "fbgemm_update_ms": fbgemm_ms,
        "ratio_update": round(fbgemm_ms / oper_ms, 3),
        "verified": verification["passed"], "verification": {"oper": verification},
        "bytes_moved": {"update": step}, "timings": timings, "page_kind": page_kind,
        "workload": work.to_json(), "world_size": world_size,
        "threads_per_rank": case.num_threads // world_size, "threads_of_peers": case.num_threads,
        "num_batches": case.num_batches, "num_stats_batches": case.num_stats_batches,
        "other_busy_cores": round(others, 2), "load_before": load_before,
        "load_after": record.load_average()}


def make_fbgemm(work: Workload, collection: Any) -> Any:
    """fbgemm's table-batched bags on CPU with exact row-wise Adagrad and a collection's weights."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    fused = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in work.num_rows],
        pooling_mode=PoolingMode.SUM, device=torch.device("cpu"),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LEARNING_RATE, eps=EPS)
    bags = collection.embedding_bags.values()
    for copy, bag in zip(fused.split_embedding_weights(), bags, strict=True):
        copy.copy_(bag.weight.detach())
    return fused


def _verify(model: Any, fused: Any, sides: dict[str, _Contender]) -> dict[str, Any]:
    """Whole tables after the same steps of both; a verdict on rank 0."""
    for number in range(_CHECKED_STEPS):
        for side in sides.values():
            side.forward(number)
            side.backward(number)
    gather(None)  # nobody reads while others update
    verdict = Verdict()
    if fused is not None:
        names = list(model.tables.specs)
        for name, weight in zip(names, fused.split_embedding_weights(), strict=True):
            verdict.compare("tables", model.tables.read(name), weight)
    gather(None)
    return verdict.to_json()


def _measure(case: UpdateCase, model: Any, sides: dict[str, _Contender]
             ) -> tuple[dict[str, Any], float]:
    """Timings by contender, the slower rank's, and the cores that other programs kept busy."""
    rank, world_size = world()
    own = max(1, case.num_threads // world_size)
    runs = {"oper": on_threads(own, sides["oper"].backward),
            "fbgemm": on_threads(own, lambda number: None)}
    before = {"oper": on_threads(own, sides["oper"].forward),
              "fbgemm": on_threads(own, lambda number: None)}
    if rank == 0:
        runs["fbgemm"] = on_threads(case.num_threads, sides["fbgemm"].backward)
        before["fbgemm"] = on_threads(case.num_threads, sides["fbgemm"].forward)
    align = aligner(model.tables)
    record.interleave(runs, align, 1, 2, before=before)
    clock = record.BusyClock()
    mine = record.interleave(runs, align, case.rounds, case.per_round, before=before)
    others = clock.others(total)
    return {n: record.summary(np.array(slowest(s.tolist()))) for n, s in mine.items()}, others
