"""Timeline of steps with work, waiting and overlap, written as a Chrome trace.

Every rank has lanes for lookups and dense compute, one per direction and class of link, and one for
its link to host memory. A training step on a rank: requests and a barrier (if there are several
hosts), forward (and, with pushed tiers, a barrier), dense compute, backward, barrier, update,
barrier. Ranks do not wait for each other between forward and backward. With K batches in flight,
the work that needs only ids (sorting) of up to K - 1 later batches runs in the lookup lane during
dense compute; rows are never read before the previous update. An inference rank serves its batches
in order, with up to K of them in its lanes at a time. The only dense compute is that of the
schedule: overlap that a plan declares does not shorten phases here. Messages between hosts are
drawn after all of a phase's own work, although some of that work follows them.

The trace (`oper.support.trace_events`) has one process per rank and one thread per lane.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oper.errors import require_fields
from oper.ranges import Amount, Positive, rules_of
from oper.search.cost.model import Phase
from oper.search.problem.machine import REFRESH, REQUEST, TERMS, Term
from oper.search.problem.overlap import RESOLVE
from oper.search.replay.realized import StepLoad
from oper.support.trace_events import Bar, trace_of, write_trace

LOOKUPS, DENSE = 0, 1
_LINKS = slice(Term.LINK_IN, None)  # terms with lanes of their own, which have the same index
LANES = ("lookups", "dense", *TERMS[_LINKS])


@dataclass(frozen=True, slots=True)
class Schedule:
    """How steps are executed one after the other.

    Attributes:
        training: whether steps end with updates that all ranks wait for.
        has_push: whether ranks wait for owners at the end of forward.
        dense_us: dense compute per step and rank, between forward and backward (inference: after
            the lookup), microseconds.
        in_flight: batches processed at a time, K >= 1.
    """

    training: bool
    has_push: bool = False
    dense_us: Amount = 0.0
    in_flight: Positive = 1

    def __post_init__(self) -> None:
        require_fields(self, "cannot replay steps", "pass a number in that range", *rules_of(self))


@dataclass(slots=True, eq=False)
class Timeline:
    """The timeline of a run.

    Attributes:
        bars: intervals in which ranks work or wait, unordered. A bar's `process` is the rank, its
            `thread` the lane (an index of `LANES`), and its `args` are the number of the step and
            the bytes that pass over the link or memory.
        ends_us: by step, the time at which its slowest rank ended it, microseconds.
    """

    world_size: int
    bars: list[Bar] = field(default_factory=list)
    ends_us: list[float] = field(default_factory=list)

    @property
    def step_us(self) -> float:
        """Mean microseconds per step."""
        return self.ends_us[-1] / len(self.ends_us) if self.ends_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """The trace: metadata, then events in time order."""
        used = sorted({(x.process, x.thread) for x in self.bars})
        return trace_of(self.bars, {rank: f"rank {rank}" for rank in range(self.world_size)},
                        {(rank, lane): LANES[lane] for rank, lane in used})

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, atomically."""
        write_trace(path, self.to_json())


def run(steps: Sequence[StepLoad], schedule: Schedule, world_size: int) -> Timeline:
    """Simulate the steps and return their timeline."""
    player = _Player(steps, schedule, world_size)
    for number in range(len(steps)):
        (player.train if schedule.training else player.answer)(number)
    return player.timeline


class _Player:
    """Simulates steps one after the other and draws their bars."""

    def __init__(self, steps: Sequence[StepLoad], schedule: Schedule, world_size: int) -> None:
        self.steps, self.schedule = steps, schedule
        self.timeline = Timeline(world_size)
        self.now = np.zeros(world_size)  # when each rank's lookup lane is free
        #: float64 [steps, W], remaining part of `StepLoad.ids_us`, which may still run ahead.
        self.left = np.array([s.ids_us for s in steps]).reshape(len(steps), world_size)
        self.answered: list[np.ndarray] = []  # time at which each batch's dense compute ended, [W]

    def add(self, rank: int, lane: int, name: str, step: int, span: tuple[float, float],
            num_bytes: float = 0.0) -> None:
        if span[1] > span[0]:
            self.timeline.bars.append(Bar(rank, lane, name, LANES[lane], span[0], span[1] - span[0],
                                          {"step": step, "bytes": round(num_bytes)}))

    def phase(self, number: int, phase: Phase, less_us: np.ndarray | float = 0.0) -> None:
        """Draw one phase on all ranks, each from the time at which the rank is free. `less_us` is
        own work of the phase that was already done earlier."""
        own = phase.seconds[Term.MEMORY] + phase.seconds[Term.COMPUTE]
        local = np.maximum(own * 1e6 - less_us, 0.0)
        links = phase.seconds[_LINKS] * 1e6
        first = local * phase.has_local[1:, None]  # own work before each link's
        for rank, start in enumerate(self.now.tolist()):
            busy = start + float(local[rank])
            self.add(rank, LOOKUPS, phase.name, number, (start, busy), phase.units[0, rank])
            for k, (before, took) in enumerate(zip(first[:, rank], links[:, rank], strict=True)):
                begin, lane = start + float(before), Term.LINK_IN + k
                self.add(rank, lane, phase.name, number, (begin, begin + float(took)),
                         phase.units[lane, rank])
        self.now = self.now + np.maximum(local, (first + links).max(axis=0)) + phase.fixed_us

    def barrier(self, number: int) -> None:
        end = float(self.now.max())
        for rank, start in enumerate(self.now.tolist()):
            self.add(rank, LOOKUPS, "wait", number, (start, end))
        self.now = np.full(self.now.shape, end)

    def train(self, number: int) -> None:
        step = self.steps[number]
        forward, backward, *last = step.phases[-3 - (step.phases[-1].name == REFRESH):]
        # Sorting that ran ahead during earlier dense compute is subtracted.
        ahead = step.ids_us - self.left[number]
        sorts_first = step.phases[0].name == RESOLVE
        if sorts_first:
            self.phase(number, step.phases[0], ahead)
        self.ask(number)
        self.phase(number, forward)
        if self.schedule.has_push:
            self.barrier(number)
        self._dense(number)
        self.phase(number, backward, 0.0 if sorts_first else ahead)
        self.barrier(number)
        for phase in last:  # update, and refresh if there is one
            self.phase(number, phase)
            self.barrier(number)
        self.timeline.ends_us.append(float(self.now.max()))

    def ask(self, number: int) -> None:
        """Draw the request phase, if there is one, and the barrier after it."""
        for phase in self.steps[number].phases:
            if phase.name == REQUEST:
                self.phase(number, phase)
                self.barrier(number)

    def _dense(self, number: int) -> None:
        dense = self.schedule.dense_us
        for rank, start in enumerate(self.now.tolist()):
            self.add(rank, DENSE, "dense", number, (start, start + dense))
            at = start
            for ahead in range(number + 1, min(number + self.schedule.in_flight, len(self.steps))):
                length = min(float(self.left[ahead, rank]), start + dense - at)
                self.add(rank, LOOKUPS, "ids ahead", ahead, (at, at + length))
                self.left[ahead, rank] -= length
                at += length
        self.now = self.now + dense

    def answer(self, number: int) -> None:
        before = number - self.schedule.in_flight
        if before >= 0:
            self.now = np.maximum(self.now, self.answered[before])
        self.ask(number)
        self.phase(number, self.steps[number].phases[-1])
        dense = self.schedule.dense_us
        start = np.maximum(self.now, self.answered[-1]) if self.answered else self.now
        for rank, at in enumerate(start.tolist()):
            self.add(rank, DENSE, "dense", number, (at, at + dense))
        self.answered.append(start + dense)
        self.timeline.ends_us.append(float(self.answered[-1].max()))
