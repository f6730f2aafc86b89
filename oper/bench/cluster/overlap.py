"""Measure how much of a DLRM's exchanges micro-batches hide, and how much they could hide."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.case import paired, sent_by_host
from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import build_in_parts, build_plan
from oper.bench.cluster.network import WithWorkload
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Run, over
from oper.bench.core.planning import gather, joint_stats, planned
from oper.bench.tables.sides import Dense, Side, make_collection, make_dlrm
from oper.bench.tables.verify import Checks, Reference, verify

WHOLE = "whole batches"
_PARTS = (1, 2)
_ROUNDS = (6, 4)  # rounds, and steps per side and round


@dataclass(frozen=True, slots=True)
class Overlap(WithWorkload):
    """Steps of a whole DLRM in whole batches and in micro-batches, on limited and on unlimited
    links. If messages overlapped all other work, a side's step would take the longer of two times:
    that for which its bytes keep the busiest link busy, and its step on unlimited links."""

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make, compare and time all sides; rank 0 returns the record's entry. Collective."""
        progress("measuring the links")
        topology, measured = measured_topology(self.links, self.constants)
        run = Run(self, progress)
        given, stats = run.batches(), joint_stats(self.work, self.num_stats_batches)
        progress("planning")
        plan = planned(self.work, stats, "training", topology)[0]
        progress("comparing with the unsharded model")
        limit(self.links, False)
        checks = Checks.make(self.work, run.rank, run.world_size)
        reference = None if run.rank else Reference(
            make_dlrm(self.work, make_collection(self.work, "cpu")), checks)
        sides = {WHOLE: build_plan(self.work, plan, dense=Dense()), **{
            f"{n} micro-batch{'es' * (n > 1)}": build_in_parts(self.work, plan, n)
            for n in _PARTS}}
        passed = all(self._verified(side, checks, reference) for side in sides.values())
        runs = {name: over(given, side.step) for name, side in sides.items()}
        unlimited = run.time(runs, dist.barrier, "unlimited", rounds=(_ROUNDS[0] // 2, _ROUNDS[1]))
        limit(self.links)
        times = run.time(runs, dist.barrier, "limited", rounds=_ROUNDS)
        sent = {name: [float(x[0]) for x in sent_by_host(self.links, call)]
                for name, call in runs.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, seconds in times.items():
            link_ms = max(8e-3 * x / rate for x, rate in zip(
                sent[name], measured["link_mbits"], strict=True))
            compute_ms = float(np.median(unlimited[name])) * 1e3
            found[name] = {
                "executed_ms": round(float(np.median(seconds)) * 1e3, 3),
                "unlimited_ms": round(compute_ms, 3), "link_ms": round(float(link_ms), 3),
                "least_ms": round(max(compute_ms, float(link_ms)), 3),
                "sent_bytes_by_host": [round(x) for x in sent[name]],
                "step": record.summary(seconds)}
            if name != WHOLE:
                found[name]["over_whole"] = paired(seconds, times[WHOLE])
        whole_ms = found[WHOLE]["executed_ms"]
        best = min((x for n, x in found.items() if n != WHOLE), key=lambda x: x["executed_ms"])
        return {
            "objective": "training", "hosts": self.links.num_hosts, "in_grid": False,
            "overlap_ratio": round(whole_ms / best["executed_ms"], 4),
            "overlap_limit": round(whole_ms / min(
                x["least_ms"] for n, x in found.items() if n != WHOLE), 4),
            "verified": passed, "sides": found, "links": asdict(self.links),
            "workload": asdict(self.work), "measured": measured, "other_busy_cores": run.others}

    def _verified(self, side: Side, checks: Checks, reference: Reference | None) -> bool:
        verdict = verify([side], checks, reference, lambda text: None)
        return bool(gather(verdict.get(side.name, {}).get("passed"))[0])
