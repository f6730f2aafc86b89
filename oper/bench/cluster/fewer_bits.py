"""Measure messages of fewer bits: steps and bytes of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.case import bytes_of_step
from oper.bench.cluster.constants import limit
from oper.bench.cluster.contenders import ClusterRun
from oper.bench.cluster.network import WithWorkload
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import over, paired
from oper.bench.tables.sides import Side
from oper.bench.tables.verify import Checks, Reference, verify
from oper.plan import Plan
from oper.train.metrics import gather_rows

EXACT, FEWER = "oper", "oper-fewer-bits"
_ROUNDS = (6, 4)  # rounds, and steps per contender and round
# By bits: largest rounding error of a number, relative to the largest magnitude in its row.
_ERROR = {32: 0.0, 16: 2.0**-8, 8: 1 / 255, 4: 1 / 15}
_ADDITIONS = 1e-5  # relative error due to another order of additions


@dataclass(frozen=True, slots=True)
class FewerBits(WithWorkload):
    """OPER's plan with exact messages against its plan under a variance budget, in training.

    Attributes:
        message_variance: the budget, see `oper.search.variance`.
    """

    message_variance: float = 5e-4

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make, compare and time both plans; rank 0 returns the record's entry. Collective."""
        run = ClusterRun(self, progress)
        run.prepare()
        progress("planning")
        plans = {name: run.plan(message_variance=budget)
                 for name, budget in ((EXACT, None), (FEWER, self.message_variance))}
        sides = {name: run.side(plan) for name, plan in plans.items()}
        progress("comparing answers, and the exact side with the unsharded model")
        limit(self.links, False)
        checks = Checks(self.work)
        error, largest = _rounding(sides, checks, plans[FEWER])
        verdict = verify(sides[EXACT], checks, None if run.rank else Reference(checks))
        limit(self.links)
        steps = {name: over(run.given, side.step) for name, side in sides.items()}
        times = run.time(steps, dist.barrier, rounds=_ROUNDS)
        sent = {n: bytes_of_step(run, steps[n], plan, True)
                for n, plan in plans.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        found = {name: {
            "runtime": name, "predicted_ms": round(plan.step_us / 1e3, 3),
            "executed_ms": round(float(np.median(times[name])) * 1e3, 3),
            "step": record.summary(times[name]), "message_bits": plan.message_bits.to_json(),
            "lower_bound_ms": plan.lower_bound_us / 1e3, **sent[name]}
            for name, plan in plans.items()}
        found[FEWER]["over_oper"] = paired(times[FEWER], times[EXACT])
        bytes_of = {name: x["counted_bytes"] for name, x in found.items()}
        return {
            **run.about(), "fewer_bytes": round(bytes_of[EXACT] / bytes_of[FEWER], 4),
            "fewer_bits_speedup": round(1 / found[FEWER]["over_oper"]["mean"], 4),
            "message_variance": plans[FEWER].notes["message_variance"],
            "answers_error": error, "largest_rounding": largest,
            "verified": verdict["passed"] and largest <= 1, "verification": verdict,
            "contenders": found}


def _rounding(sides: Mapping[str, Side], checks: Checks, plan: Plan) -> tuple[float, float]:
    """Compare lookups of both sides before training, when their rows are equal. Collective.

    Returns:
        The squared difference of all pooled rows relative to their squares; and the largest
        difference of a number relative to its limit. In a bag of L ids whose rows have magnitudes
        of at most m, the limit is L m / 255 with 8 bits and L m / 15 with 4 bits: a step is at most
        2 m / 255 or 2 m / 15, and a number in an answer is off by at most half a step.
    """
    ours, exact = (gather_rows(sides[n].lookup(checks.batch(0, checks.rank).sparse_features))
                   for n in (FEWER, EXACT))
    off, size, worst = (ours - exact).double(), len(checks.work.num_rows), 0.0
    tables = sides[EXACT].tables
    assert tables is not None
    for part, table, length in zip(off.chunk(size, 1), checks.work.tables(),
                                   checks.work.bag_lengths, strict=True):
        most = length * float(tables.read(table.name).abs().max())
        allowed = most * (_ERROR[plan.message_bits.of(table.name).answers] + _ADDITIONS)
        worst = max(worst, float(part.abs().max()) / allowed)
    return float(off.square().sum() / exact.double().square().sum()), worst
