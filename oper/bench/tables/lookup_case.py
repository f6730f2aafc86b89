"""One case of the lookup benchmark, as every rank runs it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.planning import bytes_read, chosen_plan, slowest, total, world
from oper.bench.core.workload import Workload, make_kjt, timed_ids
from oper.bench.tables.ceiling import Ceiling
from oper.bench.tables.sides import make_collection
from oper.bench.tables.train_case import Progress, moved_bytes
from oper.bench.tables.verify import Verdict

PEERS = ("nn_embedding_bag", "ebc", "fbgemm")  # single process
_CHECKED_BATCHES = 2
_OVERHEAD_CALLS = 65


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: for the record.
        work: the workload.
        world_size: OPER's processes.
        num_threads: threads over all processes, and of the one process of each peer.
        num_batches: distinct batches that are timed.
        num_stats_batches: other batches that the statistics come from.
        rounds, per_round: see `record.interleave`.
    """

    name: str
    work: Workload
    world_size: int
    num_threads: int = 2
    num_batches: int = 32
    num_stats_batches: int = 32
    rounds: int = 12
    per_round: int = 5

    def to_json(self) -> dict[str, Any]:
        """For `from_json` in a worker."""
        return {**asdict(self), "work": self.work.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The case written by `to_json`."""
        return cls(**{**value, "work": Workload.from_json(value["work"])})


@torch.no_grad()
def run_case(value: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build, verify and measure one case; the worker function. Collective.

    Returns:
        The case's entry of the record on rank 0, nothing elsewhere.
    """
    from oper.sharding import shard

    case = Case.from_json(value)
    work, (rank, world_size) = case.work, world()
    load_before = record.load_average()
    progress(f"{case.name}: drawing batches, planning")
    ids = [timed_ids(work, r, world_size, case.num_batches) for r in range(world_size)]
    plan, plan_s = chosen_plan(work, case.num_stats_batches, "inference")
    progress(f"{case.name}: building")
    collection = make_collection(work, "cpu")
    model: Any = shard(collection, plan=plan, objective="inference")
    peers = {}
    if rank == 0:
        joint = [np.concatenate(x, axis=1) for x in zip(*ids, strict=True)]
        peers = make_peers(work, collection, joint)
    del collection
    kjts = [make_kjt(work, x) for x in ids[rank]]
    ceiling = Ceiling(model.tables, ids[rank], work.pooling)
    ceiling.tune(aligner(model.tables), slowest)
    gc.collect()
    progress(f"{case.name}: comparing with the unsharded collection")

    def gathered(number: int) -> torch.Tensor:
        ceiling.run(number)
        return ceiling.out

    verdicts = verify({"oper": lambda k: model(kjts[k]).values(), "ceiling": gathered}, peers,
                      len(kjts))
    progress(f"{case.name}: measuring, {case.rounds} rounds of {case.per_round}")
    timings, others = _measure(case, model, kjts, ceiling, peers)
    overhead = _overhead(model, kjts, work)
    moved = int(total([moved_bytes(work, ids[rank])["forward"]])[0])
    page_kind, read = model.tables.page_kind, bytes_read(model.tables)
    if dist.is_initialized():
        dist.barrier()
    model.tables.close()
    if rank:
        return {}
    return {
        "name": case.name, **_figures(timings, moved), **overhead,
        "verified": all(v["passed"] for v in verdicts.values()), "verification": verdicts,
        "bytes_moved": {"forward": moved}, "bytes_read": read, "timings": timings,
        "page_kind": page_kind,
        "ceiling": ceiling.settings, "workload": work.to_json(), "world_size": world_size,
        "threads_per_rank": case.num_threads // world_size, "threads_of_peers": case.num_threads,
        "num_batches": case.num_batches, "num_stats_batches": case.num_stats_batches,
        "plan_seconds": round(plan_s, 3), "other_busy_cores": round(others, 2),
        "load_before": load_before, "load_after": record.load_average()}


def _measure(case: Case, model: Any, kjts: list[Any], ceiling: Ceiling,
             peers: dict[str, Callable[[int], Any]]) -> tuple[dict[str, Any], float]:
    """Timings by contender, the slower rank's, and the cores that other programs kept busy."""
    rank, world_size = world()
    own = max(1, case.num_threads // world_size)
    runs = {"oper": on_threads(own, lambda k: model(kjts[k % len(kjts)]).values()),
            "ceiling": on_threads(own, ceiling.run)}
    for name in PEERS:
        runs[name] = (on_threads(case.num_threads, peers[name]) if rank == 0
                      else on_threads(own, nothing))
    align = aligner(model.tables)
    record.interleave(runs, align, 1, 2)
    clock = record.BusyClock()
    mine = record.interleave(runs, align, case.rounds, case.per_round)
    others = clock.others(total)
    return {n: record.summary(np.array(slowest(s.tolist()))) for n, s in mine.items()}, others


def _overhead(model: Any, kjts: list[Any], work: Workload) -> dict[str, float]:
    """Median microseconds of a call outside the kernels, the slower rank's: on the case's batches,
    which push Python's code out of the caches, and on one of 32 samples, which does not."""
    _, world_size = world()
    ids = timed_ids(work, 0, world_size, len(kjts))[0].reshape(len(work.num_rows), -1, work.pooling)
    small = make_kjt(work, ids[:, :32].reshape(len(work.num_rows), -1))
    align, found = aligner(model.tables), []
    for batches in (kjts, [small]):
        spent = []
        for k in range(_OVERHEAD_CALLS):
            align()
            begin = time.perf_counter()
            model(batches[k % len(batches)]).values()
            call_s = time.perf_counter() - begin
            spent.append(call_s - model.tables.phase_ns()["forward"] / 1e9)
        found.append(1e6 * float(np.median(spent[5:])))
    cold, warm = slowest(found)
    return {"python_overhead_us": round(cold, 1), "python_overhead_small_batch_us": round(warm, 1)}


def _figures(timings: dict[str, Any], moved: int) -> dict[str, Any]:
    """The headline numbers; `moved` bytes by all ranks and batch."""
    fastest = min(PEERS, key=lambda n: timings[n]["median_ms"])
    oper_ms, ceiling_ms = timings["oper"]["median_ms"], timings["ceiling"]["median_ms"]
    return {
        "oper_forward_ms": oper_ms, **{f"{n}_forward_ms": timings[n]["median_ms"] for n in PEERS},
        "fastest_peer": fastest, "ratio_forward": round(timings[fastest]["median_ms"] / oper_ms, 3),
        "gather_ceiling_ms": ceiling_ms,
        "gather_ceiling_gbps": round(moved / ceiling_ms / 1e6, 3),
        "forward_fraction_of_ceiling": round(ceiling_ms / oper_ms, 4)}


def make_peers(work: Workload, collection: Any, ids: list[np.ndarray]
               ) -> dict[str, Callable[[int], Any]]:
    """Unsharded lookups of whole batches in one process, by name; each takes a batch number.

    Args:
        work: the workload.
        collection: `EmbeddingBagCollection` on CPU; its weights are shared or copied.
        ids: ids of each batch of all ranks together, int64 [F, batch_size * pooling].
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kjts = [make_kjt(work, x) for x in ids]
    bags = list(collection.embedding_bags.values())
    starts = torch.arange(0, work.batch_size * work.pooling, work.pooling)
    columns = [[torch.from_numpy(row) for row in x] for x in ids]
    fused = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in work.num_rows],
        pooling_mode=PoolingMode.SUM, device=torch.device("cpu"))
    for copy, bag in zip(fused.split_embedding_weights(), bags, strict=True):
        copy.copy_(bag.weight)
    flat = [(k.values(), k.offsets().long()) for k in kjts]
    return {
        "nn_embedding_bag": lambda k: [
            torch.nn.functional.embedding_bag(row, bag.weight, starts, mode="sum")
            for bag, row in zip(bags, columns[k % len(columns)], strict=True)],
        "ebc": lambda k: collection(kjts[k % len(kjts)]).values(),
        "fbgemm": lambda k: fused(*flat[k % len(flat)])}


def verify(lookups: Mapping[str, Callable[[int], torch.Tensor]],
           peers: Mapping[str, Callable[[int], Any]], num_batches: int
           ) -> dict[str, dict[str, Any]]:
    """Pooled rows of all contenders against the unsharded collection's; verdicts on rank 0.

    Args:
        lookups: by name, this rank's rows of a batch by its number.
        peers: what `make_peers` made on rank 0, nothing elsewhere.
        num_batches: how many are there.
    """
    verdicts = {name: Verdict() for name in (*lookups, "nn_embedding_bag", "fbgemm")}
    for k in range(min(_CHECKED_BATCHES, num_batches)):
        found = {name: _all_rows(call(k)) for name, call in lookups.items()}
        if not peers:
            continue
        found["nn_embedding_bag"] = torch.cat(peers["nn_embedding_bag"](k), dim=1)
        found["fbgemm"] = peers["fbgemm"](k)
        for name, values in found.items():
            verdicts[name].compare("pooled", values, peers["ebc"](k))
    return {name: v.to_json() for name, v in verdicts.items()} if peers else {}


def _all_rows(value: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, one after another."""
    _, world_size = world()
    if world_size == 1:
        return value
    found = [torch.empty_like(value) for _ in range(world_size)]
    dist.all_gather(found, value.contiguous())
    return torch.cat(found)


def aligner(tables: Any) -> Callable[[], None]:
    """Brings the ranks together, asleep first: a peer of one process has the machine for itself."""
    def align() -> None:
        if dist.is_initialized():
            dist.barrier()
        tables.barrier()

    return align


def on_threads(count: int, call: Callable[[int], Any]) -> Callable[[int], Any]:
    """`call` with `count` threads; they change in the untimed first call of a round only."""
    def run(number: int) -> Any:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return call(number)

    return run


def nothing(number: int) -> None:
    """What a rank does while rank 0 runs a peer of a single process."""
