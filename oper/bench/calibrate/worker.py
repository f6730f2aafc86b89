"""The measurements that every rank makes for ``oper calibrate``: gathers, and steps under given
placements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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

#: Placements that a step is measured under; pulled ones first.
KINDS = ("striped", "owned on one rank", "owned, balanced", "striped 3:1", "replicated",
         "head replicated", "head on one rank", "half owned", "pushed", "owned, pushed",
         "head replicated, tail pushed")
_HEAD = 0.02  # share of a table's rows that counts as its head
_BAG = 16  # rows summed per bag in the bare gather: little is written
_GATHER_ROWS = 1 << 19
_HELD_BYTES = 4 << 30  # tables that are open at a time
_LEAD_IN, _TIMED = 2, 3  # steps of a plan in each round
_FEWEST = 8  # undisturbed steps that make a median
_DELAYED = 0.02  # share of an undisturbed step that a rank may have waited for its core
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
INTERVAL = 0.03  # half a median's 95 % interval, relative: what rounds are repeated for
_PATIENCE = 4  # times the rounds asked for, at most


def plan_of(kind: str, tables: Sequence[TableSpec], stats: AccessStats, world_size: int) -> Plan:
    """A plan with the same placement for every table; if tables have a single owner, the ranks own
    them in turn."""
    entries = []
    for k, spec in enumerate(tables):
        tiers = tuple(_tiers(kind, k, spec.num_rows, world_size))
        ids = np.zeros(0, np.int64)
        if not stats.ids_in_hotness_order:  # as in the planner's plans, no more than tiers need
            ids = stats.tables[spec.name].head_ids[:tiers[-1].start]
        entries.append(TablePlan(spec, (Piece(0, spec.dim, tiers),), ids))
    return Plan(world_size, tuple(entries))


def _tiers(kind: str, number: int, num_rows: int, world_size: int) -> list[Tier]:
    every = tuple((number + r) % world_size for r in range(world_size))
    head = max(1, min(num_rows - 1, round(_HEAD * num_rows)))
    whole = {
        "striped": Tier(0, num_rows, "striped", every),
        "owned on one rank": Tier(0, num_rows, "owned", (0,)),
        "owned, balanced": Tier(0, num_rows, "owned", every[:1]),
        "striped 3:1": Tier(0, num_rows, "striped", tuple(range(world_size)),
                            (3,) + (1,) * (world_size - 1)),
        "replicated": Tier(0, num_rows, "replicated", every),
        "pushed": Tier(0, num_rows, "striped", every, mode="push"),
        "owned, pushed": Tier(0, num_rows, "owned", every[:1], mode="push")}
    if kind in whole:
        return [whole[kind]]
    tail = Tier(head, num_rows, "striped", every)
    if kind == "half owned":
        one = Tier(0, num_rows, "owned", (0,))
        return [one if number % 2 else Tier(0, num_rows, "striped", every)]
    if kind == "head on one rank":
        return [Tier(0, head, "owned", (0,)), tail]
    copies = Tier(0, head, "replicated", every)
    if kind == "head replicated":
        return [copies, tail]
    return [copies, Tier(head, num_rows, "striped", every, mode="push")]


@dataclass(frozen=True, slots=True)
class Gather:
    """Bandwidths of bare gathers, GB/s of all ranks together: ``read_gbps`` and ``cache_gbps``.

    Attributes:
        cache_bytes: effective size of the last-level cache for lookups.
    """

    cache_bytes: int
    name: ClassVar[str] = "bandwidth"

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Measure the bandwidths; rank 0 returns them. Collective."""
        progress("reading rows at random")
        return _gather(default_group(), self.cache_bytes)


@dataclass(frozen=True, slots=True)
class Placements:
    """Steps of a workload under given placements.

    Attributes:
        work: the workload.
        kinds: placements, each one of `KINDS`.
        rounds: see `_rounds`.
        stats: the file to which its statistics are written.
    """

    work: Workload
    kinds: tuple[str, ...]
    rounds: int
    stats: str

    @property
    def name(self) -> str:
        """Name of the workload."""
        return self.work.name

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Time the steps; rank 0 returns `_summary` of each kind, and ``bytes_read``. Collective.
        """
        work, group = self.work, default_group()
        stats = joint_stats(work, 8)
        if group.rank == 0:
            stats.save(self.stats)
        # As many batches as keep repeated steps from finding all of their rows in cache.
        batches = [_lookup(work, batch_ids(work, group.rank, group.world_size, k, TIMED), group)
                   for k in range(8)]
        plans = {kind: plan_of(kind, work.tables(), stats, group.world_size) for kind in self.kinds}
        # Copies of a replicated table and its masters: all that a plan may hold of the tables.
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
    """Open the tables under a plan, with all their pages in memory."""
    tables = ShardedTables(plan, features, group, RowWiseAdagrad(lr=0.01, eps=1e-8),
                           1.0 / group.world_size)
    for spec in tables.specs.values():
        for at in range(0, spec.num_rows, CHUNK_ROWS):
            n = min(CHUNK_ROWS, spec.num_rows - at)
            tables.write(spec.name, torch.full((n, spec.dim), 0.01), at)
    tables.publish()
    tables.use_huge_pages()
    return tables


def _rounds(plans: dict[str, Plan], work: Workload, batches: Sequence[Lookup],
            group: Group, rounds: int) -> dict[str, Any]:
    """Time steps under all plans in turn, so that disturbances of the machine affect all of them.

    After `rounds` turns, more are made until every plan's median is known within `INTERVAL`.
    """
    features = [(f, f"t{k}") for k, f in enumerate(work.features)]
    tables = {kind: _open(plan, features, group) for kind, plan in plans.items()}
    taken: dict[str, list[tuple[float, list[int], float]]] = {kind: [] for kind in plans}
    gradient = torch.full((batches[0].batch_size, work.dim * len(features)), 1e-3)
    number = 0
    found: dict[str, Any] = {}
    for turn in range(1 + _PATIENCE * rounds):
        for kind in plans:
            # The first steps touch the outbox for the first time; later on, caches fill again.
            for k in range((4 if turn == 0 else _LEAD_IN) + _TIMED):
                timed = _step(tables[kind], batches[number % len(batches)], gradient)
                number += 1
                if k >= _LEAD_IN and turn > 0:
                    taken[kind].append(timed)
        if turn >= rounds:  # all ranks have the same numbers, and decide alike
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
    """Run one step, which all ranks begin together; returns its seconds, nanoseconds by phase of
    the runtime's clock, and the seconds in which this rank was ready to run but other programs had
    its core."""
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
    """Times of the undisturbed steps of one plan, see `_step`. Collective.

    A step is undisturbed if no rank waited for its core for more than a share `_DELAYED` of it. If
    there are too few such steps, those with the shortest waits are used instead.

    Returns:
        ``wall_us`` (slowest rank, median), ``interval`` (half the width of that median's 95 %
        interval, relative: McGill, Tukey and Larsen 1978), ``num_steps``, ``num_undisturbed``,
        ``delayed`` (mean share of all steps that a rank waited for its core) and ``phases_us``,
        float [W][6] (medians).
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


def _gather(group: Group, cache_bytes: int) -> dict[str, Any]:
    """GB/s of all ranks together: gathers of rows of 256 bytes from memory, and repeated gathers
    from cache."""
    spec = TableSpec("rows", max(_GATHER_ROWS, 8 * cache_bytes // 256), 64, ("f",))
    tables = _open(uniform_plan([spec], group.world_size), [("f", "rows")], group)
    near = max(1024, cache_bytes // group.world_size // 4 // 256)
    rng = np.random.default_rng(group.rank)
    found = {}
    for name, num_rows in (("read_gbps", spec.num_rows), ("cache_gbps", near)):
        ids = rng.integers(0, num_rows, 1 << 18)
        seconds = Ceiling(tables, [ids[None]], _BAG).tune(tables.barrier)
        found[name] = group.world_size * ids.size * 256 / seconds / 1e9
    tables.barrier()
    tables.close()
    return found
