"""Measure how much of a DLRM's exchanges micro-batches hide, and how much they could hide."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.case import HEADER_BYTES, sent_by_host
from oper.bench.cluster.constants import limit
from oper.bench.cluster.contenders import ClusterRun, build_in_parts, build_plan
from oper.bench.cluster.network import WithWorkload
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import over, paired
from oper.bench.core.planning import gather
from oper.bench.tables.sides import Dense, Side
from oper.bench.tables.verify import Checks, Reference, verify

WHOLE = "whole batches"
_PARTS = (1, 2)
_TURNS = 3  # on unlimited and on limited links, so that both see the same load of other programs
_ROUNDS = {"unlimited": (1, 4), "limited": (2, 4)}  # per turn, and steps per side and round


@dataclass(frozen=True, slots=True)
class Overlap(WithWorkload):
    """Steps of a whole DLRM in whole batches and in micro-batches, on limited and on unlimited
    links.

    ``least_ms`` is the time of a step if messages overlapped all other work: the longer of
    ``link_ms``, during which the payload keeps the busiest link busy at its measured rate, and
    ``unlimited_ms``, the time of a step on unlimited links.
    """

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make, compare and time all sides; rank 0 returns the record's entry. Collective."""
        run = ClusterRun(self, progress)
        run.prepare()
        progress("planning")
        plan = run.plan()
        progress("comparing with the unsharded model")
        limit(self.links, False)
        checks = Checks(self.work)
        reference = None if run.rank else Reference(checks, Dense())
        sides = {WHOLE: build_plan(self.work, plan, dense=Dense()), **{
            f"{n} micro-batch{'es' * (n > 1)}": build_in_parts(self.work, plan, n)
            for n in _PARTS}}
        passed = all([gather(verify(side, checks, reference).get("passed"))[0]
                      for side in sides.values()])
        unlimited, times = self._timed(run, sides)
        sent = {name: sent_by_host(self.links, over(run.given, side.step))
                for name, side in sides.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, seconds in times.items():
            payloads = [num_bytes - HEADER_BYTES * packets for num_bytes, packets in sent[name]]
            link_ms = max(8e-3 * x / rate for x, rate in zip(
                payloads, run.measured["link_mbits"], strict=True))
            compute_ms = float(np.median(unlimited[name])) * 1e3
            found[name] = {
                "executed_ms": round(float(np.median(seconds)) * 1e3, 3),
                "unlimited_ms": round(compute_ms, 3), "link_ms": round(float(link_ms), 3),
                "least_ms": round(max(compute_ms, float(link_ms)), 3),
                "sent_bytes_by_host": [round(x[0]) for x in sent[name]],
                "step": record.summary(seconds)}
            if name != WHOLE:
                found[name]["over_whole"] = paired(seconds, times[WHOLE])
        whole_ms = found[WHOLE]["executed_ms"]
        best = min((x for n, x in found.items() if n != WHOLE), key=lambda x: x["executed_ms"])
        return {
            **run.about(), "overlap_ratio": round(whole_ms / best["executed_ms"], 4),
            "overlap_limit": round(whole_ms / min(
                x["least_ms"] for n, x in found.items() if n != WHOLE), 4),
            "verified": passed, "sides": found}

    def _timed(self, run: ClusterRun, sides: Mapping[str, Side]) -> list[dict[str, np.ndarray]]:
        """Times (s) of steps by side, on unlimited and on limited links. Collective."""
        found: dict[str, list[dict[str, np.ndarray]]] = {phase: [] for phase in _ROUNDS}
        busy: dict[str, list[float]] = {phase: [] for phase in _ROUNDS}
        for turn, phase in itertools.product(range(_TURNS), _ROUNDS):
            at = turn * len(run.given) // _TURNS  # every turn has other batches
            runs = {name: over([*run.given[at:], *run.given[:at]], side.step)
                    for name, side in sides.items()}
            limit(self.links, phase == "limited")
            found[phase].append(run.time(runs, dist.barrier, phase, rounds=_ROUNDS[phase]))
            busy[phase].append(run.others[phase])
        run.others = {phase: max(cores) for phase, cores in busy.items()}
        return [{name: np.concatenate([times[name] for times in turns]) for name in sides}
                for turns in found.values()]
