"""Collective helpers of benchmarks: planning, and reductions over ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from oper.analysis import merge_stats
from oper.bench.core.workload import Workload, collect_stats
from oper.plan import Plan, TablePlan
from oper.rows.traffic import LINKS
from oper.stats import AccessStats
from oper.topology import Topology
from oper.train.model import ranks

if TYPE_CHECKING:
    from oper.shmem.tables import ShardedTables

_SHARED = ("own rank", "memory domain")  # links of processes on one machine


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    _, world_size = ranks()
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def slowest(values: Sequence[float]) -> list[float]:
    """The maximum over ranks of each value. Collective."""
    return np.max(gather(list(values)), axis=0).tolist()


def total(values: Sequence[float]) -> list[float]:
    """The sum over ranks of each value. Collective."""
    return np.sum(gather(list(values)), axis=0).tolist()


def bytes_read(tables: ShardedTables) -> dict[str, dict[str, int]]:
    """Bytes that all ranks together read per pass, averaged since the counters' last reset.
    Collective.

    Keyed by phase (``forward``, ``backward``), then by class of link: ``own rank`` or ``memory
    domain``, since all processes share one memory domain.
    """
    mine = tables.traffic()
    passes = {"forward": mine.num_forward, "backward": mine.num_backward}
    every = [t.by_link() for t in gather(mine)]
    return {phase: {link: round(sum(x[phase][link] for x in every) / number)
                    for link in LINKS if link in _SHARED}
            for phase, number in passes.items() if number}


def rows_by_placement(entries: Iterable[TablePlan]) -> dict[str, int]:
    """Total number of rows by ``"<placement> <mode>"`` of their tier."""
    rows: Counter[str] = Counter()
    for tier in (t for entry in entries for piece in entry.pieces for t in piece.tiers):
        rows[f"{tier.placement} {tier.mode}"] += tier.stop - tier.start
    return dict(rows)


def joint_stats(work: Workload, num_stats_batches: int) -> AccessStats:
    """Access statistics of `num_stats_batches` untimed batches, merged over ranks. Collective."""
    return merge_stats(gather(collect_stats(work, *ranks(), num_stats_batches)))


def chosen_plan(work: Workload, num_stats_batches: int, objective: str, is_one_host: bool = True
                ) -> tuple[Plan, float]:
    """The plan that `oper.shard` chooses for this host, and the planning time (s). Collective. If
    not `is_one_host`, the plan is made as if every rank ran on a separate host."""
    world_size = ranks()[1]
    topology = Topology.of_domains([0] * world_size if is_one_host else range(world_size))
    return planned(work, joint_stats(work, num_stats_batches), objective, topology)


def planned(work: Workload, stats: AccessStats, objective: str, topology: Topology, **options: Any
            ) -> tuple[Plan, float]:
    """OPER's plan for a topology, made by rank 0 with further options of `make_plan`, and the
    planning time (s). Collective."""
    from oper.search import make_plan

    made: Any = None
    begin = time.perf_counter()
    if ranks()[0] == 0:
        made = make_plan(work.tables(), stats, topology, objective=objective,
                         batch_size=work.batch_size // topology.world_size, **options)
    return gather((made, time.perf_counter() - begin))[0]
