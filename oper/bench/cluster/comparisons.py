"""Cases that compare plans of OPER on an emulated cluster: micro-batches, messages of fewer bits,
replica groups, and a link that slows down during training."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.cluster.case import HEADER_BYTES, bytes_of_step, sent_by_host
from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import (
    ClusterRun,
    OnCluster,
    build_in_parts,
    build_plan,
    largest_difference,
)
from oper.bench.core import record
from oper.bench.core.measure import nothing, over, paired
from oper.bench.core.planning import gather, slowest
from oper.bench.tables.sides import Dense, Side
from oper.bench.tables.verify import Checks, Reference, verify
from oper.plan import Plan
from oper.replanning import Event, Replanner, WatchOptions
from oper.train.metrics import gather_rows

_ROUNDS = (6, 4)  # rounds, and steps per side and round
_TOLERANCE = 1e-4  # error of rows, relative to the table's largest; the order of additions differs


# ---- micro-batches -------------------------------------------------------------------------------

WHOLE = "whole batches"
_PARTS = (1, 2)
_TURNS = 3  # on unlimited and on limited links, so that both see the same load of other programs
_OVERLAP_ROUNDS = {"unlimited": (1, 4), "limited": (2, 4)}  # per turn, and steps per side and round


@dataclass(frozen=True, slots=True)
class Overlap(OnCluster):
    """Steps of a whole DLRM in whole batches and in micro-batches, on limited and on unlimited
    links.

    ``least_ms`` is the time of a step if messages overlapped all other work: the longer of
    ``link_ms``, during which the payload keeps the busiest link busy at its measured rate, and
    ``unlimited_ms``, the time of a step on unlimited links.
    """

    def compare(self, run: ClusterRun) -> dict[str, Any]:
        """Compare and time whole batches and micro-batches. Collective."""
        run.prepare()
        run.say("planning")
        plan = run.plan()
        run.say("comparing with the unsharded model")
        limit(self.links, False)
        checks = Checks(self.work)
        reference = None if run.rank else Reference(checks, Dense())
        sides = run.sides = {WHOLE: build_plan(self.work, plan, dense=Dense()), **{
            f"{n} micro-batch{'es' * (n > 1)}": build_in_parts(self.work, plan, n)
            for n in _PARTS}}
        passed = all([gather(verify(side, checks, reference).get("passed"))[0]
                      for side in sides.values()])
        unlimited, times = self._timed(run, sides)
        sent = {name: sent_by_host(self.links, over(run.given, side.step))
                for name, side in sides.items()}
        found: dict[str, dict[str, Any]] = {}
        for name, seconds in times.items():
            payloads = [num_bytes - HEADER_BYTES * packets for num_bytes, packets in sent[name]]
            link_ms = float(max(8e-3 * x / rate for x, rate in zip(
                payloads, run.measured["link_mbits"], strict=True)))
            unlimited_ms = float(np.median(unlimited[name])) * 1e3
            found[name] = {
                "executed_ms": float(np.median(seconds)) * 1e3, "unlimited_ms": unlimited_ms,
                "link_ms": link_ms, "least_ms": max(unlimited_ms, link_ms),
                "sent_bytes_by_host": [round(x[0]) for x in sent[name]],
                "step": record.summary(seconds)}
            if name != WHOLE:
                found[name]["over_whole"] = paired(seconds, times[WHOLE])
        best_ms, least_ms = (min(x[key] for n, x in found.items() if n != WHOLE)
                             for key in ("executed_ms", "least_ms"))
        whole_ms = found[WHOLE]["executed_ms"]
        return {**run.about(), "overlap_ratio": whole_ms / best_ms,
                "overlap_limit": whole_ms / least_ms, "verified": passed, "sides": found}

    def _timed(self, run: ClusterRun, sides: Mapping[str, Side]) -> list[dict[str, np.ndarray]]:
        """Times (s) of steps by contender, on unlimited and on limited links. Collective."""
        found: dict[str, list[dict[str, np.ndarray]]] = {phase: [] for phase in _OVERLAP_ROUNDS}
        busy: dict[str, list[float]] = {phase: [] for phase in _OVERLAP_ROUNDS}
        for turn, phase in itertools.product(range(_TURNS), _OVERLAP_ROUNDS):
            at = turn * len(run.given) // _TURNS  # every turn has other batches
            runs = {name: over([*run.given[at:], *run.given[:at]], side.step)
                    for name, side in sides.items()}
            limit(self.links, phase == "limited")
            found[phase].append(run.time(runs, dist.barrier, phase, rounds=_OVERLAP_ROUNDS[phase]))
            busy[phase].append(run.others[phase])
        run.others = {phase: max(cores) for phase, cores in busy.items()}
        return [{name: np.concatenate([times[name] for times in turns]) for name in sides}
                for turns in found.values()]


# ---- messages of fewer bits ----------------------------------------------------------------------

EXACT, FEWER = "oper", "oper-fewer-bits"
# By bits: largest rounding error of a number, relative to the largest magnitude in its row.
_ERROR = {32: 0.0, 16: 2.0**-8, 8: 1 / 255, 4: 1 / 15}
_ADDITIONS = 1e-5  # relative error due to another order of additions


@dataclass(frozen=True, slots=True)
class FewerBits(OnCluster):
    """OPER's plan with exact messages against its plan under a variance budget, in training.

    Attributes:
        message_variance: the budget, see `oper.search.variance`.
    """

    message_variance: float = 5e-4

    def compare(self, run: ClusterRun) -> dict[str, Any]:
        """Compare and time both plans. Collective."""
        run.prepare()
        run.say("planning")
        plans = {name: run.plan(message_variance=budget)
                 for name, budget in ((EXACT, None), (FEWER, self.message_variance))}
        sides = {name: run.open(name, plan) for name, plan in plans.items()}
        run.say("comparing answers, and the exact side with the unsharded model")
        limit(self.links, False)
        checks = Checks(self.work)
        error, largest = _rounding(sides, checks, plans[FEWER])
        verdict = verify(sides[EXACT], checks, None if run.rank else Reference(checks))
        limit(self.links)
        steps = {name: over(run.given, side.step) for name, side in sides.items()}
        times = run.time(steps, dist.barrier, rounds=_ROUNDS)
        sent = {n: bytes_of_step(run, steps[n], plan, True)
                for n, plan in plans.items()}
        if run.rank:
            return {}
        found = {name: {
            "runtime": name, "predicted_ms": plan.step_us / 1e3,
            "executed_ms": float(np.median(times[name])) * 1e3,
            "step": record.summary(times[name]), "message_bits": plan.message_bits.to_json(),
            "lower_bound_ms": plan.lower_bound_us / 1e3, **sent[name]}
            for name, plan in plans.items()}
        found[FEWER]["over_oper"] = paired(times[FEWER], times[EXACT])
        bytes_of = {name: x["counted_bytes"] for name, x in found.items()}
        return {
            **run.about(), "fewer_bytes": bytes_of[EXACT] / bytes_of[FEWER],
            "fewer_bits_speedup": 1 / found[FEWER]["over_oper"]["mean"],
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


# ---- replica groups ------------------------------------------------------------------------------

_STEPS, _LEAST_ROUNDS = 32, 5  # timed steps of each side, and rounds
_CHECKED = 3  # steps before rows are compared


@dataclass(frozen=True, slots=True)
class ReplicaGroupsCase(OnCluster):
    """OPER's plan for all hosts as one group against its plans for replica groups that wait for
    synchronizations, that continue with the next steps (``delayed``), and that wait and send rows
    of 8 bits per number (``rounded``).

    Attributes:
        every: number of steps between two synchronizations, and number of steps during which the
            delayed ones are sent.
    """

    every: int = 4

    def compare(self, run: ClusterRun) -> dict[str, Any]:
        """Make the plans, compare rows and time steps. Collective."""
        run.prepare()
        options: dict[str, dict[str, int]] = {
            "groups": {}, "delayed": {"synchronize_delay": self.every},
            "rounded": {"synchronize_bits": 8}}
        plans = {"one": run.plan(), **{name: run.plan(synchronize_every=self.every, **given)
                                       for name, given in options.items()}}
        run.say("comparing rows with those of one group")
        limit(self.links, False)
        error = largest_difference(*(run.open(name, plan, _CHECKED) for name, plan in (
            ("exact", replace(plans["groups"], synchronize_every=1)), ("one", plans["one"]))))
        for name in list(run.sides):
            run.close(name)
        limit(self.links)
        run.say("timing")
        sides = {name: run.open(name, plan) for name, plan in plans.items()}
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
        compared = {name: {x["groups"]: x for x in plans[name].notes["replica_groups"]}
                    for name in options}
        found: dict[str, Any] = {}
        for name, of in compared.items():
            ratio, best = paired(rounds["one"], rounds[name]), of[plans[name].replica_groups]
            found |= {
                f"step_{name}_ms": rounds[name].mean(),
                f"predicted_{name}_ms": best["step_us"] / 1e3,
                f"bound_{name}_ms": best["bound_us"] / 1e3, f"ratio_{name}": ratio["mean"],
                f"ratio_{name}_interval": [ratio["low"], ratio["high"]]}
        return {
            **run.about(), "synchronize_every": self.every, "options": options,
            "replica_groups": {name: plans[name].replica_groups for name in options},
            "verified": error <= _TOLERANCE, "largest_difference": error,
            "step_one_group_ms": rounds["one"].mean(),
            "predicted_one_group_ms": compared["groups"][1]["step_us"] / 1e3, **found,
            "compared": {name: list(of.values()) for name, of in compared.items()}}


# ---- a slower link -------------------------------------------------------------------------------

_WINDOW = 8  # steps
_BEFORE = 4 * _WINDOW  # steps before the change
_MOST_STEPS = 300  # limit of the steps after the change, in case the replanner moves no rows


@dataclass(frozen=True, slots=True)
class LinkChange(OnCluster):
    """A case in which host 0's link slows down during training.

    Attributes:
        share_after: rate of host 0's link after the change, relative to that before.
    """

    share_after: float = 0.25

    def compare(self, run: ClusterRun) -> dict[str, Any]:
        """Train, slow the link down and compare. Collective."""
        slower = replace(self.links, slow_host_share=self.share_after)
        run.prepare()
        first = run.plan()
        side = run.open("moved", first)
        watch = Replanner(side.model, run.stats, run.topology, WatchOptions(window=_WINDOW))
        step_ms: list[float] = []  # this rank's time of each step
        events: list[Event] = []

        def train(num_steps: int, until: str = "") -> None:
            """Train for `num_steps`, or up to the first event of the kind `until`."""
            for _ in range(num_steps):
                step_ms.append(1e3 * record.elapsed(
                    functools.partial(run.step, side, len(step_ms))))
                if event := watch.step():
                    run.say(f"{event.kind} after {event.step} steps")
                    events.append(event)
                    if event.kind == until:
                        return

        run.say(f"{_BEFORE} steps, then host 0's link goes down to {self.share_after:g} of its "
                "rate")
        train(_BEFORE)
        limit(slower)
        changed_at, num_early = len(step_ms), len(events)
        train(_MOST_STEPS, "moved")
        moved_at = len(step_ms)
        limit(slower, False)
        run.say("comparing rows with a run that never moved")
        error = largest_difference(side, run.open("still", first, len(step_ms)))
        run.close("still")
        limit(slower)
        run.say("comparing step times with those of a plan made for these links")
        run.topology, _ = measured_topology(slower, self.constants)
        run.open("fresh", run.plan())
        times = run.time({n: functools.partial(run.step, s) for n, s in run.sides.items()},
                         dist.barrier, rounds=_ROUNDS)
        after = {n: float(np.median(t)) * 1e3 for n, t in times.items()}
        steps = slowest(step_ms)
        if run.rank:
            return {}
        before_ms = statistics.median(steps[changed_at - 2 * _WINDOW:changed_at])
        slow_ms = statistics.median(steps[changed_at:moved_at])
        entry: dict[str, Any] = {
            **run.about(), "share_after": self.share_after, "verified": error <= _TOLERANCE,
            "largest_difference": error, "step_before_ms": before_ms, "step_slow_ms": slow_ms,
            "step_after_ms": after["moved"], "step_fresh_ms": after["fresh"],
            "ratio_fresh": after["moved"] / after["fresh"], "steps_until_moved": None,
            "events": [{"step": e.step, "kind": e.kind, "seconds": e.seconds,
                        "link_mbits": [8e3 * x for x in e.link_gbps]} for e in events]}
        if events[num_early:] and events[-1].kind == "moved":
            found, gain_ms = events[-1].replanning, slow_ms - after["moved"]
            assert found is not None
            move_ms = events[-1].seconds * 1e3
            entry |= {"steps_until_moved": moved_at - changed_at, "move_ms": move_ms,
                      "predicted_move_ms": found.copy_us / 1e3,
                      "network_bytes": found.network_bytes,
                      "break_even_steps": move_ms / gain_ms if gain_ms > 0 else float("inf"),
                      "predicted_break_even_steps": found.break_even_steps}
        return entry
