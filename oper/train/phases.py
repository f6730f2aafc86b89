"""Times of the tables' phases, for the lines of a metrics file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.shmem.counters.phases import BUCKETS_US, PHASES
from oper.shmem.tables import ShardedTables

_BOUNDS = (*map(str, BUCKETS_US), "inf")


def take_phases(tables: Sequence[ShardedTables]) -> torch.Tensor:
    """Sum of the phase times counted by this rank's tables since the last call.

    Returns:
        float64 [6 * (1 + 24)], by phase the nanoseconds of all batches and the batches by bucket
        (see `Histogram`); [0] without tables.
    """
    if not tables:
        return torch.zeros(0, dtype=torch.float64)
    found = [t.phase_histograms(reset=True) for t in tables]
    return torch.tensor([[[x[name].sum_ns, *x[name].counts] for name in PHASES] for x in found],
                        dtype=torch.float64).sum(dim=0).reshape(-1)


def by_phase(phases: torch.Tensor) -> dict[str, Any]:
    """The result of `take_phases`, or its sum over ranks, by phase, JSON-serializable.

    ``count`` batches took ``sum_s`` seconds; ``below_us`` maps an upper bound in microseconds to
    the number of batches from half of it to just below it (``"inf"``: the longest ones). Phases
    without a batch are left out.
    """
    found: dict[str, Any] = {}
    for name, row in zip(PHASES, phases.reshape(-1, 1 + len(_BOUNDS)).tolist(), strict=False):
        sum_ns, *counts = row
        if any(counts):
            found[name] = {
                "count": round(sum(counts)), "sum_s": round(sum_ns * 1e-9, 9),
                "below_us": {b: round(n) for b, n in zip(_BOUNDS, counts, strict=True) if n}}
    return found
