"""The highest rate at which LoadGen's runs are VALID.

A p99 at a tight bound is decided by a few stalls of the machine, so no single run counts: a rate
is VALID when the majority of three (or five) runs are. All contenders try rates of one grid and
take turns, run by run, so that they meet the same arrivals and share the machine's disturbances.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oper.bench.serve.loadgen import Result

STEP = 1.08  # between neighbouring rates of the grid
_STRIDE = 5  # steps while only valid, or only invalid, rates are known
_CLEARLY_VALID = 0.7  # of the bound: with a p99 below it the search walks on after one run


@dataclass(slots=True)
class Search:
    """The search for a contender's highest valid rate.

    Attributes:
        start: approximate rate to begin with, queries per second.
        bound_ms: latency bound of 99 % of the queries.
        max_runs: number of runs after which the search only confirms the highest rate that has not
            failed; it gives up after twice as many.
        votes: number of runs that decide on a rate by majority: 3 or 5.
        runs: the grid's steps tried, with LoadGen's results.
    """

    start: float
    bound_ms: float
    max_runs: int = 10
    votes: int = 2
    runs: list[tuple[int, Result]] = field(default_factory=list)

    def verdict(self, step: int, is_final: bool = False) -> bool | None:
        """Whether a rate is VALID; None = not known yet.

        Args:
            step: of the grid.
            is_final: count votes only; otherwise a single run far from the bound decides where to
                search next.
        """
        found = [r for k, r in self.runs if k == step]
        valid = sum(r.valid for r in found)
        for votes, verdict in ((valid, True), (len(found) - valid, False)):
            if votes >= self.votes:
                return verdict
        if not found or is_final:
            return None
        latency = found[-1].latency_ms
        if found[-1].valid and latency["p99"] <= _CLEARLY_VALID * self.bound_ms:
            return True
        # Stalls delay a few queries; a tenth of them are late when there are too many.
        return False if len(found) == 1 and latency["p90"] > self.bound_ms else None

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
        if len(self.runs) >= self.max_runs:
            return self._step_to_confirm() if len(self.runs) < 2 * self.max_runs else None
        last = self.runs[-1][0]
        if self.verdict(last) is None:
            return last
        low, high = self.bracket()
        if low is None:
            assert high is not None
            return max(0, high - _STRIDE) if high > 0 else None
        if high is None:
            return low + _STRIDE
        if high - low > 1:
            return (low + high) // 2
        return low if self.verdict(low, is_final=True) is None else None

    def _step_to_confirm(self) -> int | None:
        """The highest rate below all that failed, of those tried; None when it is confirmed.

        A search that ends without this has found no rate, or one far below, where it only ran out
        of runs.
        """
        tried = {k for k, _ in self.runs}
        failed = min((k for k in tried if self.verdict(k) is False), default=math.inf)
        below = [k for k in tried if k < failed]
        if below:
            return None if self.verdict(max(below), is_final=True) else max(below)
        return max(0, int(failed) - _STRIDE) if failed > 0 else None

    def best(self) -> tuple[float, Result]:
        """The highest rate that enough runs have confirmed, and the slowest VALID run at that rate.

        Without a confirmed rate: 0 and the last run.
        """
        confirmed = [k for k, _ in self.runs if self.verdict(k, is_final=True)]
        if not confirmed:
            return 0.0, self.runs[-1][1]
        step = max(confirmed)
        slowest = max((r for k, r in self.runs if k == step and r.valid),
                     key=lambda r: r.latency_ms["p99"])
        return rate_of(step), slowest

    def to_json(self) -> list[list[float | bool]]:
        """Every run: rate, p50, p90, p99 (ms), whether VALID."""
        return [[round(rate_of(k), 1), *(r.latency_ms[p] for p in ("p50", "p90", "p99")), r.valid]
                for k, r in self.runs]


def rate_of(step: int) -> float:
    """Queries per second of a step of the grid."""
    return float(STEP ** step)


def search(searches: Mapping[str, Search], run: Callable[[str, float, int], Result],
           seconds: float = math.inf) -> None:
    """Run all searches, turn by turn.

    Args:
        searches: by contender.
        run: of a contender at a rate; told how often it has run at it before.
        seconds: no turn begins after this time.
    """
    names = list(searches)
    until = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < until:
        steps = {n: s for n in names if (s := searches[n].next_step()) is not None}
        if not steps:
            return
        shift = turn % len(names)
        turn += 1
        for name in names[shift:] + names[:shift]:
            if name in steps and time.monotonic() < until:
                step = steps[name]
                before = sum(k == step for k, _ in searches[name].runs)
                result = run(name, rate_of(step), before)
                searches[name].runs.append((step, result))
