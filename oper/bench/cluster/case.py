"""One case of the cluster benchmark on one rank."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.cluster.constants import limit
from oper.bench.cluster.contenders import (
    IN_PARTS,
    ClusterRun,
    Contender,
    OnCluster,
    Planned,
    plan_all,
    planner_machine,
)
from oper.bench.cluster.network import INTERFACE, Links, num_dropped
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import median_phases, over, paired
from oper.bench.core.planning import gather, slowest
from oper.bench.core.workload import Workload
from oper.bench.tables.sides import Dense, Side
from oper.bench.tables.verify import Checks, Reference, Verdict, verify
from oper.integration.torchrec_plans import from_torchrec
from oper.plan import Plan
from oper.search.cost.model import evaluate
from oper.search.problem.statement import Problem, make_problem
from oper.train.metrics import gather_rows

HEADER_BYTES = 66  # headers of a packet: Ethernet, IPv4 and TCP with time stamps
_SCREENED_STEPS = 3
_TIMED_SHARE = 1.5  # contenders up to this times slower than the fastest are timed
_NEAR_SHARE = 1.15  # as are TorchRec's plans up to this times slower than its fastest
COUNTED_STEPS = 2
_PER_ROUND = 4  # timed steps per contender and round
_ROUNDS = (3, 50)  # minimum and maximum; within them, `Case.timed_s` determines the number


@functools.lru_cache(maxsize=1)
def _unsharded(work: Workload, whole_model: bool) -> tuple[Checks, Reference | None]:
    """Batches and the unsharded model (rank 0), shared by the cases of one workload."""
    checks = Checks(work)
    dense = Dense() if whole_model else None
    return checks, None if checks.rank else Reference(checks, dense)


class _Runner(ClusterRun):
    """Measures a `Case`."""

    def __init__(self, case: Case, progress: Progress) -> None:
        super().__init__(case, progress)
        self.trains = case.objective == "training"
        self.machine: dict[str, Any] = {}  # machine description for TorchRec's planner
        self.verdicts: dict[str, dict[str, Any]] = {}  # results of the verification, by contender

    def run(self) -> dict[str, Any]:
        begin = time.perf_counter()
        num_bytes = sum(t.num_bytes for t in self.work.tables())
        self.prepare(int(num_bytes * self.case.memory_share) if self.case.memory_share else None)
        self.say("planning, OPER and its peers")
        planned_s = time.perf_counter()
        problem = make_problem(
            self.work.tables(), self.stats, self.topology, objective=self.case.objective,
            batch_size=self.work.batch_size // self.world_size) if self.rank == 0 else None
        planned: Planned = gather(plan_all(problem, self.case.whole_model) if problem else None)[0]
        planned_s = time.perf_counter() - planned_s
        every, self.machine = planned.contenders, planner_machine(self.links, self.topology)
        screened = self._screen(every, planned, problem)
        seconds, phases = self._time(screened)
        sent: dict[str, Any] = {"bytes_ratio": None, "bytes_ratio_without_headers": None}
        if not self.case.whole_model:
            # The simulator does not cover the exchange of dense gradients.
            plan = every[0].plan
            assert plan is not None
            sent = bytes_of_step(self, self._call(self.sides["oper"]), plan, self.trains)
        dropped = num_dropped(self.links) if self.rank == 0 else 0
        if self.rank:
            return {}
        return {
            **self._figures(every, screened, seconds, planned), **sent, **self.about(),
            "objective": self.case.objective, "oper_phases_ms": phases,
            "predicted_phases_ms": planned.phases_ms, "binding": planned.binding,
            "left_out": planned.left_out, "dropped_packets": dropped,
            "whole_model": self.case.whole_model, "constants": self.topology.source,
            "num_batches": self.case.num_batches,
            "num_stats_batches": self.case.num_stats_batches, "plan_seconds": planned_s,
            "seconds": time.perf_counter() - begin}

    # ---- verification ----------------------------------------------------------------------------

    def _verify(self, contender: Contender, side: Side) -> dict[str, Any]:
        """Compare a side's results with the unsharded model's; rank 0 returns the verdict.
        Collective."""
        checks, reference = _unsharded(self.work, self.case.whole_model)
        if self.trains:
            tables = side.tables
            side.tables = tables if contender.name in ("oper", IN_PARTS) else None
            found = verify(side, checks, reference)
            side.tables = tables
            return found
        verdict = Verdict()
        for step in range(len(checks.ids)):
            ours = gather_rows(side.lookup(checks.batch(step, self.rank).sparse_features))
            if reference is not None:
                verdict.compare("pooled", ours, reference.step(step, torch.zeros_like(ours))[0])
        return verdict.to_json()

    # ---- time ------------------------------------------------------------------------------------

    def _call(self, side: Side) -> Callable[[int], Any]:
        call = side.step if self.trains else side.forward
        side.model.train(self.trains)
        return over(self.given, call)

    def _screen(self, every: list[Contender], planned: Planned, problem: Problem | None
                ) -> dict[str, float]:
        """Build and verify all contenders, and close those that are too slow to be timed.

        Returns the time (ms) of each contender's fastest step of `_SCREENED_STEPS`. The minimum is
        used because the first steps on newly limited links may send in one direction at a time,
        not in both. A contender that cannot be built moves to `planned.left_out` with the reason.
        """
        found: dict[str, float] = {}
        for contender in list(every):
            self.say(f"building, comparing and screening {contender.name}")
            reason = self._open(contender, problem)
            if reason:
                planned.left_out[contender.name] = reason
                every.remove(contender)
                continue
            runs = {"": self._call(self.sides[contender.name])}
            seconds = record.interleave(runs, dist.barrier, 1, _SCREENED_STEPS, lead_in=0)[""]
            found[contender.name] = min(slowest(seconds.tolist())) * 1e3
            for name in self._hopeless(found):
                self.close(name)
        return found

    def _hopeless(self, screened: dict[str, float]) -> list[str]:
        """Names of the open sides that are too slow to be timed; never OPER's (with and without
        micro-batches) or TorchRec's fastest."""
        limit = _TIMED_SHARE * min(screened.values())
        theirs = {n: ms for n, ms in screened.items() if n.startswith("torchrec-")}
        near = _NEAR_SHARE * min(theirs.values(), default=0.0)
        return [n for n in self.sides if n not in ("oper", IN_PARTS) and screened[n] > limit
                and not theirs.get(n, math.inf) <= near]

    def _open(self, contender: Contender, problem: Problem | None) -> str:
        """Build and verify a side. Returns ``""``, or on all ranks the reason if it cannot be
        built."""
        reason, side, extra = "", None, None
        try:
            side, extra = contender.build(self.work, self.case.objective,
                                          self.case.whole_model, self.machine)
        except contender.refusals() as error:
            if contender.name == "oper":
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if extra is not None and problem is not None:
            theirs = from_torchrec(extra, self.work.tables(), self.world_size, scattered=True,
                                   objective=self.case.objective)
            model = evaluate(theirs, problem)
            contender.predicted_ms = None if self.case.whole_model else model.step_us / 1e3
            reason = "" if model.fits else "its plan does not fit into the memory"
        reason = next((r for r in gather(reason) if r), "")
        if reason or side is None:
            if side is not None and side.tables is not None:
                side.tables.close()
            return reason
        if not self.trains:
            side.gradient = torch.empty(0)
        elif not self.case.whole_model:  # a DLRM's gradient comes from its loss
            self.set_gradient([side], self.given[0])
        self.sides[contender.name] = side
        limit(self.links, False)  # the comparison does not depend on the links
        self.verdicts[contender.name] = self._verify(contender, side)
        limit(self.links)
        if side.pipeline is not None:
            side.pipeline.num_parts, run, step = None, self._call(side), 0
            while side.pipeline.num_parts is None:  # the pipeline first measures which is fastest
                run(step)
                step += 1
        return ""

    def _time(self, screened: dict[str, float]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Times (ms) of interleaved steps by contender, and OPER's `median_phases`."""
        runs = {name: self._call(side) for name, side in self.sides.items()}
        once = sum(screened[name] for name in runs) / 1e3 * _PER_ROUND
        rounds = gather(int(np.clip(self.case.timed_s / once, *_ROUNDS)))[0]
        tables, ticks = self.sides["oper"].tables, []
        assert tables is not None
        plain = runs["oper"]

        def with_phases(k: int) -> None:
            plain(k)
            ticks.append(list(tables.phase_ns().values()))

        seconds = self.time(runs | {"oper": with_phases}, dist.barrier, rounds=(rounds, _PER_ROUND))
        return {n: s * 1e3 for n, s in seconds.items()}, median_phases(tables, ticks)

    # ---- the entry -------------------------------------------------------------------------------

    def _figures(self, every: list[Contender], screened: dict[str, float],
                 seconds: dict[str, np.ndarray], planned: Planned) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for c in every:
            times = seconds.get(c.name)
            known: dict[str, Any] = {
                "runtime": c.runtime, "also": c.also, "predicted_ms": c.predicted_ms,
                "executed_ms": screened[c.name] if times is None else float(np.median(times)),
                "is_screened_only": times is None, "verification": self.verdicts[c.name]}
            if times is not None:
                known["step"] = record.summary(times / 1e3)
                if c.name != "oper":
                    known["over_oper"] = paired(times, seconds["oper"])
            found[c.name] = known
        oper = found["oper"]
        theirs = [n for n, x in found.items() if x["runtime"] == "torchrec"]
        peers = [n for n, x in found.items() if x["runtime"] == "oper" and n != "oper"]
        # Timed contenders come first: the minimum of screening is not comparable with a median.
        best, peer = (min(names, key=lambda n: (found[n]["is_screened_only"],
                                                found[n]["executed_ms"]), default=None)
                      for names in (theirs, peers))
        step_ms, parted, side = oper["executed_ms"], found.get(IN_PARTS), self.sides.get(IN_PARTS)
        bound = None if self.case.whole_model else planned.lower_bound_ms
        return {
            "oper_step_ms": step_ms, "predicted_step_ms": oper["predicted_ms"],
            "torchrec_best": best, "torchrec_step_ms": best and found[best]["executed_ms"],
            "ratio_step": best and found[best]["executed_ms"] / step_ms, "best_peer": peer,
            "ratio_best_peer": peer and found[peer]["executed_ms"] / step_ms,
            "lower_bound_ms": bound,
            "ratio_at_bound": best and bound and found[best]["executed_ms"] / bound,
            "verified": all(x["verification"]["passed"] for x in found.values()),
            # Step time of whole batches / that with micro-batches, which hide exchanges.
            "overlap_ratio": parted and step_ms / parted["executed_ms"],
            "overlap_parts": side and side.pipeline and side.pipeline.num_parts,
            "contenders": found}


@dataclass(frozen=True, slots=True)
class Case(OnCluster):
    """A workload on an emulated cluster.

    Attributes:
        objective: ``"training"`` (steps) or ``"inference"`` (lookups).
        memory_share: memory of a rank as a share of the size of all tables; 0 = the default of
            `measured_topology`.
        whole_model: whether to train a DLRM instead of the collection alone.
        timed_s: approximate total time (s) for timing all contenders.
    """

    objective: str = "training"
    memory_share: float = 0.0
    whole_model: bool = False
    timed_s: float = 12.0
    runner: ClassVar[type[ClusterRun]] = _Runner

    def compare(self, run: _Runner) -> dict[str, Any]:
        """Plan, build, verify and time all contenders. Collective."""
        return run.run()


def bytes_of_step(run: ClusterRun, step: Callable[[int], Any], plan: Plan, trains: bool
                  ) -> dict[str, Any]:
    """Return the bytes of a step under a plan: as counted by the network interfaces of all hosts,
    and as simulated. Ranks other than 0 return an empty dict. Collective.

    Args:
        run: the case's run.
        step: makes step k under the plan.
        plan: the plan, for the simulation.
        trains: whether a step includes the backward pass and the update.
    """
    hosts = sent_by_host(run.links, step)
    if run.rank:
        return {}
    simulated = float(np.mean(run.simulated_bytes(plan, run.links.host_of, trains, COUNTED_STEPS)))
    sent, packets = np.sum(hosts, axis=0)
    return {"counted_bytes": round(sent), "simulated_bytes": round(simulated),
            "bytes_ratio": sent / simulated,
            "bytes_ratio_without_headers": (sent - HEADER_BYTES * packets) / simulated,
            "sent_bytes_by_host": [round(x[0]) for x in hosts]}


def sent_by_host(links: Links, step: Callable[[int], Any]) -> list[np.ndarray]:
    """Return the bytes and packets per step that the interface of every host sends, float64 [2]
    each. Collective.

    Args:
        links: the emulated cluster.
        step: makes step k.
    """
    dist.barrier()
    before = record.interface_counters(INTERFACE)
    dist.barrier()  # no rank sends before all counters have been read
    for k in range(COUNTED_STEPS):
        step(k)
    dist.barrier()
    every: list[np.ndarray] = gather(
        (record.interface_counters(INTERFACE) - before) / COUNTED_STEPS)
    return every[::links.ranks_per_host]
