"""Measure replica groups: racks behind a slow uplink, with rows synchronized every few steps."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from oper.bench.cluster.case import paired
from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import PlannedRun, largest_difference
from oper.bench.cluster.network import WithWorkload
from oper.bench.core.launch import Progress
from oper.bench.core.planning import joint_stats, planned

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
        run = PlannedRun(self, progress)
        stats = joint_stats(self.work, self.num_stats_batches)
        plans = {"one": planned(self.work, stats, "training", topology)[0],
                 "groups": planned(self.work, stats, "training", topology,
                                  synchronize_every=self.every)[0]}
        compared = plans["groups"].notes["replica_groups"]
        progress("comparing rows with those of one group")
        limit(links, False)
        exact = run.trained(replace(plans["groups"], synchronize_every=1), _CHECKED)
        error = largest_difference(exact, run.trained(plans["one"], _CHECKED))
        exact.close()
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
        ratio = paired(rounds["one"], rounds["groups"])
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
            "ratio_groups": ratio["mean"],
            "ratio_groups_interval": [ratio["low"], ratio["high"]]}
