"""A link that slows down in the middle of training: `oper.Replanner`, executed."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.analysis import merge_stats
from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import build_plan, set_gradient
from oper.bench.cluster.network import Links
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.planning import gather, slowest
from oper.bench.core.workload import TIMED, Workload, collect_stats, make_batch, timed_ids
from oper.bench.tables.sides import Side
from oper.plan import Plan
from oper.replanning import Event, Replanner, WatchOptions
from oper.search.planner import plan_problem
from oper.search.problem.statement import make_problem
from oper.topology import Topology

_WINDOW = 8  # steps
_BEFORE = 4 * _WINDOW  # steps on the links as they were
_MOST_STEPS = 300  # after the change; tables that a move does not pay for stay
_ROUNDS, _PER_ROUND = 6, 4  # of timing the moved tables beside a plan that is new from the start
_TOLERANCE = 1e-4  # of rows, since the order of additions changes where tiers are pushed


@dataclass(frozen=True, slots=True)
class LinkChange:
    """One case: host 0's link loses speed while a model trains.

    Attributes:
        name: for the record.
        links: the cluster as training begins.
        work: the workload.
        share_after: what host 0's link keeps of its rate.
        num_batches: distinct batches, which repeat.
        num_stats_batches: other batches that the statistics come from.
        in_grid: never; it is reported beside the grid.
    """

    name: str
    links: Links
    work: Workload
    share_after: float = 0.25
    num_batches: int = 32
    num_stats_batches: int = 32
    in_grid: bool = False


class _Run:
    """The case as one rank runs it."""

    def __init__(self, case: LinkChange, alone: Topology, progress: Progress) -> None:
        self.case, self.work, self.alone, self.progress = case, case.work, alone, progress
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        ids = timed_ids(self.work, self.rank, self.world_size, case.num_batches)
        self.batches = [make_batch(self.work, x, (TIMED, self.rank, k)) for k, x in enumerate(ids)]
        self.stats = merge_stats(gather(
            collect_stats(self.work, self.rank, self.world_size, case.num_stats_batches)))
        self.step_ms: list[float] = []

    def plan(self, topology: Topology) -> Plan:
        """OPER's plan, made by rank 0. Collective."""
        made = None
        if self.rank == 0:
            made = plan_problem(make_problem(
                self.work.tables(), self.stats, topology, objective="training",
                batch_size=self.work.batch_size // self.world_size))
        return gather(made)[0]

    def side(self, plan: Plan) -> Side:
        side = build_plan(self.work, plan)
        set_gradient(side, self.work, self.batches[0])
        return side

    def step(self, side: Side, k: int) -> None:
        side.step(self.batches[k % len(self.batches)])

    def train(self, side: Side, watch: Replanner, num_steps: int,
              until: Callable[[Event], bool] = lambda event: False) -> list[Event]:
        """Train and watch; what the watch has told. Collective."""
        events = []
        for _ in range(num_steps):
            taken = record.elapsed(functools.partial(self.step, side, len(self.step_ms)))
            self.step_ms.append(taken * 1e3)
            event = watch.step()
            if event is not None:
                self.progress(f"{event.kind} after {event.step} steps")
                events.append(event)
                if until(event):
                    break
        return events


def run(case: LinkChange, alone: Topology, progress: Progress) -> dict[str, Any]:
    """The case's entry of the record on rank 0, nothing elsewhere. Collective."""
    progress("measuring the links")
    links, slower = case.links, replace(case.links, slow_host_share=case.share_after)
    topology, measured = measured_topology(links, alone)
    begun = _Run(case, alone, progress)
    first = begun.plan(topology)
    side = begun.side(first)
    watch = Replanner(side.model, begun.stats, topology, WatchOptions(window=_WINDOW))
    progress(f"{_BEFORE} steps, then host 0's link goes down to {case.share_after:g} of its rate")
    early = begun.train(side, watch, _BEFORE)
    limit(slower)
    changed_at = len(begun.step_ms)
    events = begun.train(side, watch, _MOST_STEPS, lambda event: event.kind == "moved")
    moved_at = len(begun.step_ms)
    has_moved = bool(events) and events[-1].kind == "moved"
    limit(slower, False)
    progress("comparing rows with a run that never moved")
    error = _difference(begun, side, first)
    limit(slower)
    progress("timing beside a plan that is made for these links")
    now, _ = measured_topology(slower, alone)
    fresh = begun.side(begun.plan(now))
    both = {"moved": side, "fresh": fresh}
    times = record.interleave({n: functools.partial(begun.step, s) for n, s in both.items()},
                              dist.barrier, _ROUNDS, _PER_ROUND)
    after = {n: float(np.median(slowest(t.tolist()))) * 1e3 for n, t in times.items()}
    steps = slowest(begun.step_ms)
    for x in both.values():
        dist.barrier()
        x.tables.close()  # type: ignore[union-attr]
    if begun.rank:
        return {}
    before_ms = statistics.median(steps[changed_at - 2 * _WINDOW:changed_at])
    slow_ms = statistics.median(steps[changed_at:moved_at])
    entry: dict[str, Any] = {
        "name": case.name, "objective": "training", "hosts": links.num_hosts, "in_grid": False,
        "links": asdict(links), "workload": asdict(case.work), "measured": measured,
        "share_after": case.share_after, "verified": error <= _TOLERANCE,
        "largest_difference": error, "step_before_ms": round(before_ms, 2),
        "step_slow_ms": round(slow_ms, 2), "step_after_ms": round(after["moved"], 2),
        "step_fresh_ms": round(after["fresh"], 2),
        "ratio_fresh": round(after["moved"] / after["fresh"], 4),
        "steps_until_moved": moved_at - changed_at if has_moved else None,
        "events": [{"step": e.step, "kind": e.kind, "seconds": round(e.seconds, 3),
                    "link_mbits": [round(8e3 * x, 2) for x in e.link_gbps]}
                   for e in early + events]}
    if has_moved:
        found, gain_ms = events[-1].replanning, slow_ms - after["moved"]
        assert found is not None
        executed = events[-1].seconds * 1e3 / gain_ms if gain_ms > 0 else float("inf")
        entry |= {"move_ms": round(events[-1].seconds * 1e3, 1),
                  "predicted_move_ms": round(found.copy_us / 1e3, 1),
                  "network_bytes": found.network_bytes,
                  "break_even_steps": round(executed, 1),
                  "predicted_break_even_steps": round(found.break_even_steps, 1)}
    return entry


def _difference(begun: _Run, side: Side, first: Plan) -> float:
    """Largest difference of a row's number, relative to the largest number of its table, from a run
    of the same steps under the first plan. Collective."""
    other = begun.side(first)
    for k in range(len(begun.step_ms)):
        begun.step(other, k)
    worst = 0.0
    assert side.tables is not None and other.tables is not None
    for table in side.tables.specs:
        moved, stayed = side.tables.read(table), other.tables.read(table)
        found = float((moved - stayed).abs().max() / stayed.abs().max())
        worst = max(worst, found if math.isfinite(found) else math.inf)
    dist.barrier()
    other.tables.close()
    return max(gather(worst))


def report(entries: Sequence[dict[str, Any]]) -> str:
    """What has come of the cases, for a person."""
    text = ""
    for e in (e for e in entries if "step_fresh_ms" in e):
        text += (f"{e['name']}: {e['step_before_ms']:.0f} ms a step, {e['step_slow_ms']:.0f} ms "
                 f"with host 0's link at {e['share_after']:g}, {e['step_after_ms']:.0f} ms at "
                 f"the end ({e['ratio_fresh']:.2f} of a plan made for these links)")
        if "move_ms" in e:
            text += (f"; moved after {e['steps_until_moved']} steps, in {e['move_ms']:.0f} ms "
                     f"(predicted {e['predicted_move_ms']:.0f}); break-even "
                     f"{e['break_even_steps']:.0f} steps (predicted "
                     f"{e['predicted_break_even_steps']:.0f})")
        text += f"; {'same rows' if e['verified'] else 'NOT VERIFIED'}\n"
    return text
