"""Backward passes with the update of the tables: OPER beside fbgemm's table-batched bags on CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.measure import Case, Run, aligner, nothing, on_threads, over, summaries
from oper.bench.core.planning import chosen_plan, gather, total
from oper.bench.core.workload import CHECKED, batch_ids, make_kjt
from oper.bench.tables.sides import OPTIMIZER, make_collection, moved_bytes
from oper.bench.tables.unsharded import fbgemm_of, whole_batches
from oper.bench.tables.verify import Verdict

_CHECKED_STEPS = 2


@dataclass(frozen=True, slots=True)
class UpdateCase(Case):
    """A case of backward passes; fbgemm's one process takes all the threads."""

    num_batches: int = 16

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; what rank 0 returns stands in the record. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        rank, world_size = run.rank, run.world_size
        run.say("drawing batches, planning")
        checks = [[batch_ids(work, r, world_size, k, CHECKED) for r in range(world_size)]
                  for k in range(_CHECKED_STEPS)]
        plan, _ = chosen_plan(work, self.num_stats_batches, "training")
        run.say("building")
        collection = make_collection(work, "cpu")
        fused = fbgemm_of(collection) if rank == 0 else None
        model: Any = shard(collection, plan=plan, optimizer=OPTIMIZER)
        del collection
        gradient = run.gradient(work.seed, work.batch_size)
        own_gradient = gradient.chunk(world_size)[rank].clone()

        def contenders(batches: list[list[np.ndarray]]) -> dict[str, Steps]:
            """The contenders by name, on batches that are given by number and rank."""
            kjts = [make_kjt(work, x[rank]) for x in batches]
            found = {"oper": Steps(over(kjts, lambda kjt: model(kjt).values()), own_gradient)}
            if fused is not None:
                # The gradient of the mean of the ranks' losses, as OPER takes it.
                found["fbgemm"] = Steps(over(whole_batches(work, batches), lambda x: fused(*x)),
                                        gradient / world_size)
            return found

        run.say(f"comparing tables after {_CHECKED_STEPS} steps")
        verification = _verify(model, fused, contenders(checks))
        sides = contenders(run.everyones_ids())
        own = self.threads_per_rank
        threads = {"oper": own, "fbgemm": own if rank else self.num_threads}
        runs, before = (
            {n: on_threads(threads[n], getattr(sides[n], way) if n in sides else nothing)
             for n in threads} for way in ("backward", "forward"))
        timings = summaries(run.time(runs, aligner(model.tables), before=before))
        moved = moved_bytes(work, run.ids())
        oper_ms, fbgemm_ms = (timings[n]["median_ms"] for n in threads)
        return run.finish(model.tables, {
            "oper_update_ms": oper_ms, "fbgemm_update_ms": fbgemm_ms,
            "ratio_update": round(fbgemm_ms / oper_ms, 3),
            "verified": verification["passed"], "verification": {"oper": verification},
            "bytes_moved": {"update": int(total([moved["step"] - moved["forward"]])[0])},
            "timings": timings, "threads_of_peers": self.num_threads})


class Steps:
    """Forward passes that remember what the backward pass is for.

    Args:
        forward: outputs of a batch by its number.
        gradient: of every output.
    """

    def __init__(self, forward: Callable[[int], torch.Tensor], gradient: torch.Tensor) -> None:
        self._forward, self._gradient = forward, gradient
        self._out: torch.Tensor | None = None

    def forward(self, number: int) -> None:
        """Look a batch up."""
        self._out = self._forward(number)

    def backward(self, number: int) -> None:
        """Backward and update of the last forward pass."""
        assert self._out is not None
        self._out.backward(self._gradient)
        self._out = None


def _verify(model: Any, fused: Any, sides: dict[str, Steps]) -> dict[str, Any]:
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
