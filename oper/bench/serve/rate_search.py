"""Search the highest rate at which LoadGen's runs are VALID.

A few stalls of the machine decide the p99 at a tight bound, so that a single run is not reliable: a
rate is VALID if the majority of three (or five) runs are. All contenders try rates of one grid,
and their runs alternate, so that they have equal arrivals and share the machine's disturbances.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oper.bench.serve.loadgen import Result

STEP = 1.08  # ratio of neighbouring rates of the grid
_STRIDE = 5  # grid steps to skip while only valid, or only invalid, rates are known


@dataclass(slots=True)
class Search:
    """The search for a contender's highest valid rate.

    Attributes:
        start: approximate first rate, queries per second.
        votes: number of equal verdicts that decide on a rate: 2 (of three runs) or 3 (of five).
        runs: grid step and LoadGen's result of each run.
    """

    start: float
    votes: int = 2
    runs: list[tuple[int, Result]] = field(default_factory=list)

    def verdict(self, step: int) -> bool | None:
        """Whether the rate of a grid step is VALID; None = more runs are needed."""
        found = [r.valid for k, r in self.runs if k == step]
        if max(sum(found), len(found) - sum(found)) < self.votes:
            return None
        return sum(found) >= self.votes

    def bracket(self) -> tuple[int | None, int | None]:
        """The highest valid step, and the lowest invalid one above it.

        A valid rate makes all lower ones valid: a failure below it was a disturbance.
        """
        steps = {k: self.verdict(k) for k, _ in self.runs}
        low = max((k for k, v in steps.items() if v), default=None)
        high = min((k for k, v in steps.items() if v is False and (low is None or k > low)),
                   default=None)
        return low, high

    def next_step(self) -> int | None:
        """The next step of the grid to try; None when the search is over."""
        if not self.runs:
            return round(math.log(max(self.start, 1.0)) / math.log(STEP))
        last = self.runs[-1][0]
        if self.verdict(last) is None:
            return last
        low, high = self.bracket()
        if high is None:
            return last + _STRIDE
        if low is None:
            return max(0, high - _STRIDE) if high > 0 else None
        return (low + high) // 2 if high - low > 1 else None

    def best(self) -> tuple[float, Result]:
        """The highest rate (queries per second) that LoadGen found VALID, and of its VALID runs the
        one with the highest p99 latency. If no rate is valid, 0 and the last run."""
        step, _ = self.bracket()
        if step is None:
            return 0.0, self.runs[-1][1]
        slowest = max((r for k, r in self.runs if k == step and r.valid),
                     key=lambda r: r.latency_ms["p99"])
        return rate_of(step), slowest

    def to_json(self) -> list[list[float | bool]]:
        """Every run: rate, p50, p90, p99 (ms), whether VALID."""
        return [[rate_of(k), *(r.latency_ms[p] for p in ("p50", "p90", "p99")), r.valid]
                for k, r in self.runs]


def rate_of(step: int) -> float:
    """Queries per second of a step of the grid."""
    return float(STEP ** step)


def search(searches: Mapping[str, Search], run: Callable[[str, float, int], Result],
           seconds: float = math.inf) -> None:
    """Run all searches, one run of each in turn.

    Args:
        searches: the searches by contender.
        run: function that runs LoadGen, from a contender's name, the rate, and the number of its
            earlier runs at that rate.
        seconds: time after which no run starts; every contender has at least one run.
    """
    names, until = list(searches), time.monotonic() + seconds
    for turn in itertools.count():
        steps = {n: s for n in names if (s := searches[n].next_step()) is not None}
        if not steps or (turn and time.monotonic() >= until):
            return
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if name in steps and (not turn or time.monotonic() < until):
                step = steps[name]
                before = sum(k == step for k, _ in searches[name].runs)
                result = run(name, rate_of(step), before)
                searches[name].runs.append((step, result))
