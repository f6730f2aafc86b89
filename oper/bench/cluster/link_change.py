"""Measure `oper.Replanner` when a link slows down during training."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import ClusterRun, largest_difference
from oper.bench.cluster.network import WithWorkload
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.planning import slowest
from oper.bench.tables.sides import Side
from oper.replanning import Event, Replanner, WatchOptions

_WINDOW = 8  # steps
_BEFORE = 4 * _WINDOW  # steps before the change
_MOST_STEPS = 300  # limit of the steps after the change, in case the replanner moves no rows
_ROUNDS = (6, 4)  # rounds, and steps per contender and round
_TOLERANCE = 1e-4  # relative error of rows; pushed tiers change the order of additions


@dataclass(frozen=True, slots=True)
class LinkChange(WithWorkload):
    """A case in which host 0's link slows down during training.

    Attributes:
        share_after: rate of host 0's link after the change, relative to that before.
    """

    share_after: float = 0.25

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Train, slow the link down and compare; rank 0 returns the record's entry. Collective."""
        slower = replace(self.links, slow_host_share=self.share_after)
        begun = _Run(self, progress)
        begun.prepare()
        first = begun.plan()
        side = begun.side(first)
        watch = Replanner(side.model, begun.stats, begun.topology, WatchOptions(window=_WINDOW))
        progress(f"{_BEFORE} steps, then host 0's link goes down to {self.share_after:g} of its "
                 "rate")
        early = begun.train(side, watch, _BEFORE)
        limit(slower)
        changed_at = len(begun.step_ms)
        events = begun.train(side, watch, _MOST_STEPS, lambda event: event.kind == "moved")
        moved_at = len(begun.step_ms)
        limit(slower, False)
        progress("comparing rows with a run that never moved")
        error = largest_difference(side, begun.trained(first, len(begun.step_ms)))
        limit(slower)
        progress("comparing step times with those of a plan made for these links")
        begun.topology, _ = measured_topology(slower, self.constants)
        fresh = begun.side(begun.plan())
        both = {"moved": side, "fresh": fresh}
        times = begun.time({n: functools.partial(begun.step, s) for n, s in both.items()},
                           dist.barrier, rounds=_ROUNDS)
        after = {n: float(np.median(t)) * 1e3 for n, t in times.items()}
        steps = slowest(begun.step_ms)
        for x in both.values():
            x.close()
        if begun.rank:
            return {}
        before_ms = statistics.median(steps[changed_at - 2 * _WINDOW:changed_at])
        slow_ms = statistics.median(steps[changed_at:moved_at])
        entry: dict[str, Any] = {
            **begun.about(), "share_after": self.share_after, "verified": error <= _TOLERANCE,
            "largest_difference": error, "step_before_ms": round(before_ms, 2),
            "step_slow_ms": round(slow_ms, 2), "step_after_ms": round(after["moved"], 2),
            "step_fresh_ms": round(after["fresh"], 2),
            "ratio_fresh": round(after["moved"] / after["fresh"], 4),
            "steps_until_moved": None,
            "events": [{"step": e.step, "kind": e.kind, "seconds": round(e.seconds, 3),
                        "link_mbits": [round(8e3 * x, 2) for x in e.link_gbps]}
                       for e in early + events]}
        if events and events[-1].kind == "moved":
            found, gain_ms = events[-1].replanning, slow_ms - after["moved"]
            assert found is not None
            executed = events[-1].seconds * 1e3 / gain_ms if gain_ms > 0 else float("inf")
            entry |= {"steps_until_moved": moved_at - changed_at,
                      "move_ms": round(events[-1].seconds * 1e3, 1),
                      "predicted_move_ms": round(found.copy_us / 1e3, 1),
                      "network_bytes": found.network_bytes,
                      "break_even_steps": round(executed, 1),
                      "predicted_break_even_steps": round(found.break_even_steps, 1)}
        return entry


class _Run(ClusterRun):
    """A run that watches the links while it trains; `step_ms` has this rank's time of each step."""

    def __init__(self, case: LinkChange, progress: Progress) -> None:
        super().__init__(case, progress)
        self.step_ms: list[float] = []

    def train(self, side: Side, watch: Replanner, num_steps: int,
              until: Callable[[Event], bool] = lambda event: False) -> list[Event]:
        """Train for `num_steps`, or up to the first event for which `until` is true; returns the
        replanner's events. Collective."""
        events = []
        for _ in range(num_steps):
            taken = record.elapsed(functools.partial(self.step, side, len(self.step_ms)))
            self.step_ms.append(taken * 1e3)
            event = watch.step()
            if event is not None:
                self.say(f"{event.kind} after {event.step} steps")
                events.append(event)
                if until(event):
                    break
        return events
