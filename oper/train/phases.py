"""Time spent in the phases of lookups and updates, for the metrics file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.shmem.counters.phases import BUCKETS_US, PHASES
from oper.shmem.tables import ShardedTables

_BOUNDS = (*map(str, BUCKETS_US), "inf")


def take_phases(tables: Sequence[ShardedTables]) -> torch.Tensor:
    """Return and reset the phase times of this rank's tables, summed over collections.

    Returns:
        float64 [phases * (1 + buckets)]: for each of `PHASES`, nanoseconds of all batches, then the
        number of batches in each bucket of `Histogram`; [0] without tables.
    """
    if not tables:
        return torch.zeros(0, dtype=torch.float64)
    found = [t.phase_histograms(reset=True) for t in tables]
    return torch.tensor([[[x[name].sum_ns, *x[name].counts] for name in PHASES] for x in found],
                        dtype=torch.float64).sum(dim=0).reshape(-1)


def by_phase(phases: torch.Tensor) -> dict[str, Any]:
    """Convert the result of `take_phases`, or its sum over ranks, to JSON-serializable values.

    Returns:
        By phase, except phases without a batch: ``count``, the number of batches; ``sum_s``, their
        total time in seconds; and ``below_us``, which maps the upper bound b of a bucket, in
        microseconds, to the number of batches in [b / 2, b), or [0, 1) for b = 1. The bound
        ``"inf"`` is for all longer ones.
    """
    found: dict[str, Any] = {}
    for name, row in zip(PHASES, phases.reshape(-1, 1 + len(_BOUNDS)).tolist(), strict=False):
        sum_ns, *counts = row
        if any(counts):
            found[name] = {
                "count": round(sum(counts)), "sum_s": round(sum_ns * 1e-9, 9),
                "below_us": {b: round(n) for b, n in zip(_BOUNDS, counts, strict=True) if n}}
    return found
