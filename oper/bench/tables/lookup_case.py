"""Forward passes without gradient, as every rank runs them.

OPER's read-only tables beside unsharded tables in one process with as many threads; and beside the
bare gather of the same rows, or TorchRec's plans in the same processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core.launch import Progress
from oper.bench.core.measure import Call, Case, Run, aligner, nothing, on_threads, over, summaries
from oper.bench.core.planning import bytes_read, chosen_plan, slowest, total, world
from oper.bench.core.workload import make_kjt, timed_ids
from oper.bench.tables.ceiling import Ceiling
from oper.bench.tables.sides import build_torchrec, make_collection, moved_bytes
from oper.bench.tables.torchrec_peer import PLAN_KINDS
from oper.bench.tables.unsharded import PEERS, make_peers
from oper.bench.tables.verify import Verdict

_CHECKED_BATCHES = 2
_OVERHEAD_CALLS = 65


@dataclass(frozen=True, slots=True)
class LookupCase(Case):
    """One case.

    Attributes:
        torchrec: beside TorchRec's plans; else beside the bare gather.
    """

    torchrec: bool = False

    @torch.no_grad()
    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; what rank 0 returns stands in the record. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        run.say("drawing batches, planning")
        plan, plan_s = chosen_plan(work, self.num_stats_batches, "inference")
        run.say("building")
        collection = make_collection(work, "cpu")
        model: Any = shard(collection, plan=plan, objective="inference")
        peers = make_peers(work, collection, run.everyones_ids()) if run.rank == 0 else {}
        del collection
        kjts = [make_kjt(work, x) for x in run.ids()]
        align = aligner(model.tables)
        timed: dict[str, Call] = {"oper": over(kjts, lambda kjt: model(kjt).values())}
        checked = dict(timed)
        figures: dict[str, Any] = {}
        if self.torchrec:
            for kind in PLAN_KINDS:
                with torch.enable_grad():  # TorchRec puts its optimizers into the backward pass
                    side = build_torchrec(work, None, kind, run.world_size)[0]
                timed[kind] = over(kjts, side.forward_values)
                checked[kind] = over(kjts, side.lookup)
        else:
            ceiling = Ceiling(model.tables, run.ids(), work.pooling)
            ceiling.tune(align, slowest)
            figures["ceiling"] = ceiling.settings
            timed["ceiling"] = ceiling.run
            checked["ceiling"] = ceiling.gathered
        run.say("comparing with the unsharded collection")
        verdicts = verify(checked, peers, len(kjts))
        own = self.threads_per_rank
        runs = {name: on_threads(own, call) for name, call in timed.items()}
        for name in PEERS:
            runs[name] = (on_threads(self.num_threads, peers[name]) if run.rank == 0
                          else on_threads(own, nothing))
        timings = summaries(run.time(runs, align))
        moved = int(total([moved_bytes(work, run.ids())["forward"]])[0])
        if not self.torchrec:
            figures |= _overhead(model, kjts, self)
        return run.finish(model.tables, {
            **figures, **_figures(timings, moved),
            "verified": all(v["passed"] for v in verdicts.values()), "verification": verdicts,
            "bytes_moved": {"forward": moved}, "bytes_read": bytes_read(model.tables),
            "timings": timings, "threads_of_peers": self.num_threads,
            "threads_of_unsharded": self.num_threads, "plan_seconds": round(plan_s, 3)})


def _overhead(model: Any, kjts: list[Any], case: LookupCase) -> dict[str, float]:
    """Median microseconds of a call outside the kernels, the slower rank's: on the case's batches,
    which push Python's code out of the caches, and on one of 32 samples, which does not."""
    work, (_, world_size) = case.work, world()
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
    ms = {name: t["median_ms"] for name, t in timings.items()}
    unsharded = min(PEERS, key=ms.__getitem__)
    ratio = round(ms[unsharded] / ms["oper"], 3)
    found = {f"{n}_forward_ms": x for n, x in ms.items() if n != "ceiling"}
    if "ceiling" not in ms:
        sharded = min(PLAN_KINDS, key=ms.__getitem__)
        return {"ratio_forward": round(ms[sharded] / ms["oper"], 3), "ratio_unsharded": ratio,
                "torchrec_best": sharded, "unsharded_best": unsharded, **found}
    return {**found, "fastest_peer": unsharded, "ratio_forward": ratio,
            "gather_ceiling_ms": ms["ceiling"],
            "gather_ceiling_gbps": round(moved / ms["ceiling"] / 1e6, 3),
            "forward_fraction_of_ceiling": round(ms["ceiling"] / ms["oper"], 4)}


def verify(lookups: Mapping[str, Call], peers: Mapping[str, Call], num_batches: int
           ) -> dict[str, dict[str, Any]]:
    """Pooled rows of all contenders against the unsharded collection's; verdicts on rank 0.

    Args:
        lookups: by name, this rank's rows of a batch by its number, features in the order of the
            configuration.
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
