"""How long this machine keeps a busy thread waiting: the noise under every latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_STALL_S = 5e-4  # of a loop whose turns take about 0.1 us


def spin(seconds: float) -> list[float]:
    """Read the clock in a loop; returns the gaps (s) of over half a millisecond."""
    gaps = []
    before = time.perf_counter()
    until = before + seconds
    while before < until:
        now = time.perf_counter()
        if now - before > _STALL_S:
            gaps.append(now - before)
        before = now
    return gaps


@dataclass(slots=True)
class Stalls:
    """Gaps found by `spin` in any number of threads or processes."""

    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def add(self, seconds: float, gaps: Sequence[float]) -> None:
        """Add a measurement."""
        self.seconds += seconds
        self.gaps += gaps

    def to_json(self) -> dict[str, float]:
        """Figures of the stalls as values that JSON can hold.

        Measured seconds (all threads together), share of them that were stalls, stalls per second
        longer than 0.5 and 2 ms, and the longest (ms).
        """
        looked = self.seconds or 1.0
        return {"seconds": round(self.seconds, 2), "share": round(sum(self.gaps) / looked, 5),
                "per_s": round(len(self.gaps) / looked, 2),
                "over_2ms_per_s": round(sum(g > 2e-3 for g in self.gaps) / looked, 2),
                "longest_ms": round(1e3 * max(self.gaps, default=0.0), 2)}
