"""Measure replica groups: racks behind a slow uplink, with rows synchronized every few steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from oper.bench.cluster.constants import limit
from oper.bench.cluster.contenders import ClusterRun, largest_difference
from oper.bench.cluster.network import WithWorkload
from oper.bench.core.launch import Progress
from oper.bench.core.measure import nothing, paired
from oper.bench.tables.sides import Side

_STEPS, _LEAST_ROUNDS = 32, 5  # timed steps of each side, and rounds
_CHECKED = 3  # steps before rows are compared
_TOLERANCE = 1e-4  # of rows, relative to the table's largest; the order of additions differs


@dataclass(frozen=True, slots=True)
class ReplicaGroupsCase(WithWorkload):
    """OPER's plan for all hosts as one group against its plans for replica groups that wait for
    synchronizations, that continue with the next steps (``delayed``), and that wait and send rows
    of 8 bits per number (``rounded``).

    Attributes:
        every: number of steps between two synchronizations, and number of steps during which the
            delayed ones are sent.
    """

    every: int = 4

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make the plans, compare rows and time steps; rank 0 returns the record's entry.
        Collective."""
        run = ClusterRun(self, progress)
        run.prepare()
        options: dict[str, dict[str, int]] = {
            "groups": {}, "delayed": {"synchronize_delay": self.every},
            "rounded": {"synchronize_bits": 8}}
        plans = {"one": run.plan(), **{name: run.plan(synchronize_every=self.every, **given)
                                       for name, given in options.items()}}
        progress("comparing rows with those of one group")
        limit(self.links, False)
        exact = run.trained(replace(plans["groups"], synchronize_every=1), _CHECKED)
        error = largest_difference(exact, run.trained(plans["one"], _CHECKED))
        exact.close()
        limit(self.links)
        progress("timing")
        sides = {name: run.side(plan) for name, plan in plans.items()}
        waiting = sides["delayed"].tables
        assert waiting is not None

        def steps(side: Side, k: int) -> None:
            for step in range(k * self.every, (k + 1) * self.every):
                run.step(side, step)

        def complete(k: int) -> None:
            """Finish the delayed side's synchronization, so that nothing is sent while another side
            is timed."""
            if waiting.replicas is not None:
                waiting.replicas.synchronize()

        # A call has as many steps as an interval. Those of the delayed side that are timed follow
        # untimed ones, so they include the whole time of one synchronization.
        times = run.time({n: functools.partial(steps, s) for n, s in sides.items()}, dist.barrier,
                         before={n: complete if n != "delayed" else nothing for n in sides},
                         rounds=(max(_STEPS // self.every, _LEAST_ROUNDS), 1))
        rounds = {n: t / self.every * 1e3 for n, t in times.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        compared = {name: {x["groups"]: x for x in plans[name].notes["replica_groups"]}
                    for name in options}
        found: dict[str, Any] = {}
        for name, of in compared.items():
            ratio, best = paired(rounds["one"], rounds[name]), of[plans[name].replica_groups]
            found |= {
                f"step_{name}_ms": round(float(rounds[name].mean()), 3),
                f"predicted_{name}_ms": round(best["step_us"] / 1e3, 3),
                f"bound_{name}_ms": round(best["bound_us"] / 1e3, 3),
                f"ratio_{name}": ratio["mean"],
                f"ratio_{name}_interval": [ratio["low"], ratio["high"]]}
        return {
            **run.about(), "synchronize_every": self.every, "options": options,
            "replica_groups": {name: plans[name].replica_groups for name in options},
            "verified": error <= _TOLERANCE, "largest_difference": error,
            "step_one_group_ms": round(float(rounds["one"].mean()), 3),
            "predicted_one_group_ms": round(compared["groups"][1]["step_us"] / 1e3, 3), **found,
            "compared": {name: list(of.values()) for name, of in compared.items()}}
