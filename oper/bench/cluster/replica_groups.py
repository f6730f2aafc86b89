"""Measure replica groups: racks behind a slow uplink, with rows synchronized every few steps."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import build_plan
from oper.bench.cluster.network import WithWorkload
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Run
from oper.bench.core.planning import gather, joint_stats, planned
from oper.bench.tables.sides import Side
from oper.plan import Plan
from oper.rl_rec.intervals import difference

_ROUNDS = 8
_CHECKED = 3  # steps before rows are compared
_TOLERANCE = 1e-4  # of rows, relative to the table's largest; the order of additions differs


@dataclass(frozen=True, slots=True)
class ReplicaGroupsCase(WithWorkload):
    """OPER's plan for all hosts as one group against its plan for replica groups.

    Attributes:
        every: number of steps between two synchronizations.
    """

    every: int = 4

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make both plans, compare their rows and time them; rank 0 returns the record's entry.
        Collective."""
        progress("measuring the links")
        links = self.links
        topology, measured = measured_topology(links, self.constants)
        run = _Run(self, progress)
        stats = joint_stats(self.work, self.num_stats_batches)
        plans = {"one": planned(self.work, stats, "training", topology)[0],
                 "groups": planned(self.work, stats, "training", topology,
                                  synchronize_every=self.every)[0]}
        compared = plans["groups"].notes["replica_groups"]
        progress("comparing rows with those of one group")
        limit(links, False)
        error = run.difference(plans)
        limit(links)
        progress("timing")
        sides = {name: run.side(plans[name]) for name in ("one", "groups")}
        times = run.time({n: functools.partial(run.step, s) for n, s in sides.items()},
                         dist.barrier, rounds=(_ROUNDS, self.every))
        # A round has one synchronization.
        rounds = {n: t.reshape(_ROUNDS, self.every).mean(axis=1) * 1e3 for n, t in times.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        ratio = difference(np.log(rounds["one"]), np.log(rounds["groups"]))
        of = {x["groups"]: x for x in compared}
        step_ms = {n: round(float(t.mean()), 3) for n, t in rounds.items()}
        count = plans["groups"].replica_groups
        return {
            "objective": "training", "hosts": links.num_hosts, "in_grid": False,
            "links": asdict(links), "workload": asdict(self.work), "measured": measured,
            "synchronize_every": self.every, "replica_groups": count,
            "verified": error <= _TOLERANCE, "largest_difference": error,
            "step_one_group_ms": step_ms["one"], "step_groups_ms": step_ms["groups"],
            "predicted_one_group_ms": round(of[1]["step_us"] / 1e3, 3),
            "predicted_groups_ms": round(of[count]["step_us"] / 1e3, 3),
            "other_busy_cores": run.others[""],
            "compared": compared,
            "ratio_groups": round(float(np.exp(ratio.mean)), 4),
            "ratio_groups_interval": [round(float(np.exp(x)), 4) for x in (ratio.low, ratio.high)]}


class _Run(Run):
    def __init__(self, case: ReplicaGroupsCase, progress: Progress) -> None:
        super().__init__(case, progress)
        self.given = self.batches()

    def side(self, plan: Plan) -> Side:
        """Build the tables under a plan. Collective."""
        side = build_plan(self.work, plan)
        self.set_gradient([side], self.given[0])
        return side

    def step(self, side: Side, k: int) -> None:
        """Run step `k` (batch `k` modulo the number of batches)."""
        side.step(self.given[k % len(self.given)])

    def difference(self, plans: dict[str, Plan]) -> float:
        """Return the largest difference between rows trained in one group and in replica groups
        synchronized in every step, relative to the table's largest number. Collective."""
        rows = []
        for plan in (plans["one"], replace(plans["groups"], synchronize_every=1)):
            side = self.side(plan)
            for k in range(_CHECKED):
                self.step(side, k)
            assert side.tables is not None
            rows.append({t: side.tables.read(t) for t in side.tables.specs})
            side.close()
        return max(gather(max(float((rows[1][t] - x).abs().max() / x.abs().max())
                              for t, x in rows[0].items())))
