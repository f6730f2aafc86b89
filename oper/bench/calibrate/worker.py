"""Measurements of every rank for ``oper calibrate``: bare gathers, and steps under placements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.planning import bytes_read, joint_stats
from oper.bench.core.workload import TIMED, Workload, batch_ids
from oper.bench.tables.ceiling import Ceiling
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import Group, default_group
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.passes import Backward
from oper.shmem.rows import CHUNK_ROWS
from oper.shmem.tables import ShardedTables
from oper.stats import AccessStats
from oper.tables import TableSpec

#: Placements under which steps are measured; those with pushed rows come last.
KINDS = ("striped", "owned on one rank", "owned, balanced", "striped 3:1", "replicated",
         "head replicated", "head on one rank", "half owned", "pushed", "owned, pushed",
         "head replicated, tail pushed")
_HEAD = 0.02  # share of a table's rows in its head
_BAG = 16  # rows summed per bag in the bare gather, so that reads dominate writes
_GATHER_ROWS = 1 << 19
_HELD_BYTES = 4 << 30  # limit of the tables that are open at the same time
_LEAD_IN, _TIMED = 2, 3  # untimed and timed steps of a plan per round
_FEWEST = 8  # least number of steps of which a median is taken
#: Share of a step. A step is disturbed if a rank waited longer than this for its core.
_DELAYED = 0.02
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
INTERVAL = 0.03  # rounds repeat until half the 95 % interval of each median is below this share
_PATIENCE = 4  # upper limit of the rounds, as a multiple of the requested number


def plan_of(kind: str, tables: Sequence[TableSpec], stats: AccessStats, world_size: int) -> Plan:
    """A plan that places every table by `kind`, one of `KINDS`; except in ``owned on one rank``,
    the owners of entire tables alternate."""
    entries = []
    for k, spec in enumerate(tables):
        tiers = tuple(_tiers(kind, k, spec.num_rows, world_size))
        ids = np.zeros(0, np.int64)
        if not stats.ids_in_hotness_order:  # like the planner, list only the ids before the tail
            ids = stats.tables[spec.name].head_ids[:tiers[-1].start]
        entries.append(TablePlan(spec, (Piece(0, spec.dim, tiers),), ids))
    return Plan(world_size, tuple(entries))


def _tiers(kind: str, number: int, n: int, world_size: int) -> list[Tier]:
    """The tiers of table `number`, which has `n` rows."""
    every = tuple((number + r) % world_size for r in range(world_size))
    head = max(1, min(n - 1, round(_HEAD * n)))
    copies, tail = Tier(0, head, "replicated", every), Tier(head, n, "striped", every)
    striped, on_one_rank = Tier(0, n, "striped", every), Tier(0, n, "owned", (0,))
    return {
        "striped": [striped],
        "owned on one rank": [on_one_rank],
        "owned, balanced": [Tier(0, n, "owned", every[:1])],
        "striped 3:1": [Tier(0, n, "striped", tuple(range(world_size)),
                             (3,) + (1,) * (world_size - 1))],
        "replicated": [Tier(0, n, "replicated", every)],
        "head replicated": [copies, tail],
        "head on one rank": [Tier(0, head, "owned", (0,)), tail],
        "half owned": [on_one_rank if number % 2 else striped],
        "pushed": [replace(striped, mode="push")],
        "owned, pushed": [Tier(0, n, "owned", every[:1], mode="push")],
        "head replicated, tail pushed": [copies, replace(tail, mode="push")]}[kind]


@dataclass(frozen=True, slots=True)
class Placements:
    """Case that times steps of a workload under several placements.

    Attributes:
        work: the workload.
        kinds: the placements, each one of `KINDS`.
        rounds: see `_rounds`.
        stats: file to which rank 0 writes the workload's access statistics.
    """

    work: Workload
    kinds: tuple[str, ...]
    rounds: int
    stats: str

    @property
    def name(self) -> str:
        """The name of the workload."""
        return self.work.name

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Time the steps; returns `_summary` and ``bytes_read`` by kind. Collective."""
        work, group = self.work, default_group()
        stats = joint_stats(work, 8)
        if group.rank == 0:
            stats.save(self.stats)
        # Enough batches that repeated steps do not find all of their rows in cache.
        batches = [_lookup(work, batch_ids(work, group.rank, group.world_size, k, TIMED), group)
                   for k in range(8)]
        plans = {kind: plan_of(kind, work.tables(), stats, group.world_size) for kind in self.kinds}
        # Upper limit of a plan's memory: the masters and one copy per rank.
        each = (1 + group.world_size) * sum(t.num_bytes for t in work.tables())
        together = max(1, _HELD_BYTES // each)
        found: dict[str, Any] = {}
        for at in range(0, len(plans), together):
            some = dict(list(plans.items())[at:at + together])
            progress(", ".join(some))
            found |= _rounds(some, work, batches, group, self.rounds)
        return found


def _lookup(work: Workload, ids: np.ndarray, group: Group) -> Lookup:
    size = work.batch_size // group.world_size
    lengths = torch.full((ids.shape[0] * size,), work.pooling, dtype=torch.int64)
    return Lookup(torch.from_numpy(ids.reshape(-1)), lengths, torch.arange(ids.shape[0]), size)


def _open(plan: Plan, features: list[tuple[str, str]], group: Group) -> ShardedTables:
    """Open the tables of a plan and write all rows, so that all pages are resident."""
    tables = ShardedTables(plan, features, group, RowWiseAdagrad(lr=0.01, eps=1e-8),
                           1.0 / group.world_size)
    for spec in tables.specs.values():
        for at in range(0, spec.num_rows, CHUNK_ROWS):
            n = min(CHUNK_ROWS, spec.num_rows - at)
            tables.write(spec.name, torch.full((n, spec.dim), 0.01), at)
    tables.flush_replicas()
    tables.use_huge_pages()
    return tables


def _rounds(plans: dict[str, Plan], work: Workload, batches: Sequence[Lookup],
            group: Group, rounds: int) -> dict[str, Any]:
    """Time steps of all plans in alternation, so that disturbances of the machine affect all plans.
    After `rounds` rounds, further ones follow until every median is known within `INTERVAL`, up to
    `_PATIENCE * rounds`."""
    features = [(f, f"t{k}") for k, f in enumerate(work.features)]
    tables = {kind: _open(plan, features, group) for kind, plan in plans.items()}
    taken: dict[str, list[tuple[float, list[int], float]]] = {kind: [] for kind in plans}
    gradient = torch.full((batches[0].batch_size, work.dim * len(features)), 1e-3)
    number = 0
    found: dict[str, Any] = {}
    for turn in range(1 + _PATIENCE * rounds):
        for kind in plans:
            # Untimed steps: in the first round they fault in the send buffer's pages, later they
            # refill the caches.
            for k in range((4 if turn == 0 else _LEAD_IN) + _TIMED):
                timed = _step(tables[kind], batches[number % len(batches)], gradient)
                number += 1
                if k >= _LEAD_IN and turn > 0:
                    taken[kind].append(timed)
        if turn >= rounds:  # summaries are equal on all ranks, so all ranks stop in the same round
            found = {kind: _summary(steps, group) for kind, steps in taken.items()}
            if all(x["interval"] < INTERVAL for x in found.values()):
                break
    for kind, opened in tables.items():
        found[kind]["bytes_read"] = bytes_read(opened)
    for opened in tables.values():
        opened.barrier()
        opened.close()
    return found


def _step(tables: ShardedTables, batch: Lookup, gradient: torch.Tensor
          ) -> tuple[float, list[int], float]:
    """Run one step from a barrier on.

    Returns:
        Its wall time (s), its ``phase_ns()`` values, and the time (s) that this thread was runnable
        but waited for a core.
    """
    tables.barrier()
    delayed = _run_delay()
    begin = time.perf_counter()
    _, offsets = tables.forward(batch, collective=True)
    tables.apply_all([Backward((gradient,), batch, offsets)])
    took = time.perf_counter() - begin
    return took, list(tables.phase_ns().values()), _run_delay() - delayed


def _run_delay() -> float:
    """Seconds that this thread has waited for a core so far; 0 if the kernel does not report it."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def _summary(steps: Sequence[tuple[float, list[int], float]], group: Group) -> dict[str, Any]:
    """Summarize one plan's results of `_step`. Collective.

    A step is undisturbed if no rank waited for a core for more than the share `_DELAYED` of it.
    Medians are over undisturbed steps, or over the `_FEWEST` steps with the shortest waits if there
    are fewer undisturbed ones.

    Returns:
        ``wall_us``: median time (us) of the slowest rank. ``interval``: half the width of its 95 %
        interval, relative (McGill, Tukey and Larsen 1978). ``num_steps``, ``num_undisturbed``.
        ``delayed``: share of a step that the most delayed rank waited for a core, mean over all
        steps. ``phases_us``: median time (us) by rank and runtime phase, float [W][6].
    """
    every = group.all_gather([np.array(x, float) for x in zip(*steps, strict=True)])
    seconds, clocks, delays = (np.stack(x) for x in zip(*every, strict=True))
    walls = seconds * 1e6
    slowest = walls.max(axis=0)
    delayed = 1e6 * delays.max(axis=0) / slowest
    limit = max(_DELAYED, float(np.sort(delayed)[min(_FEWEST, slowest.size) - 1]))
    kept = delayed <= limit
    low, middle, high = np.percentile(slowest[kept], [25, 50, 75])
    return {"wall_us": float(middle),
            "interval": float(1.57 * (high - low) / np.sqrt(kept.sum()) / middle),
            "num_steps": slowest.size, "num_undisturbed": int((delayed <= _DELAYED).sum()),
            "delayed": float(delayed.mean()),
            "phases_us": (np.median(clocks[:, kept], axis=1) / 1e3).tolist()}


def gather(progress: Progress, cache_bytes: int) -> dict[str, Any]:
    """Measure bare gathers of 256-byte rows. Collective.

    Args:
        progress: function that reports the current activity.
        cache_bytes: effective size of the last-level cache, see `last_level_cache_bytes`.

    Returns:
        ``read_gbps``: GB/s of all ranks together over a table much larger than the cache.
    """
    progress("reading rows at random")
    group = default_group()
    spec = TableSpec("rows", max(_GATHER_ROWS, 8 * cache_bytes // 256), 64, ("f",))
    tables = _open(uniform_plan([spec], group.world_size), [("f", "rows")], group)
    ids = np.random.default_rng(group.rank).integers(0, spec.num_rows, 1 << 18)
    seconds = Ceiling(tables, [ids[None]], _BAG).tune(tables.barrier)
    tables.barrier()
    tables.close()
    return {"read_gbps": group.world_size * ids.size * 256 / seconds / 1e9}
