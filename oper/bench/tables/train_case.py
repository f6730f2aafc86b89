"""One case of the training benchmark, as every rank runs it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.planning import bytes_read, chosen_plan, slowest, total
from oper.bench.core.workload import TIMED, Workload, make_batch, timed_ids
from oper.bench.tables.ceiling import Ceiling
from oper.bench.tables.sides import Side, build_oper, build_torchrec
from oper.bench.tables.torchrec_peer import PLAN_KINDS
from oper.bench.tables.verify import Checks, Reference, Verdict, verify
from oper.plan import Plan
from oper.search.replay.simulate import Bags
from oper.search.replay.wire import WireReplay
from oper.shmem.group.domains import DOMAIN_ENV

_PHASE_STEPS = 16

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: for the record.
        work: the workload.
        whole_model: a DLRM instead of the collection alone.
        num_batches: distinct batches that are timed.
        num_stats_batches: other batches that the statistics come from.
        rounds, per_round: see `record.interleave`.
        exchange: ``"shared"``: OPER's ranks share memory. ``"collective"``: each acts as a host of
            its own and exchanges over gloo, as TorchRec's ranks do.
    """

    name: str
    work: Workload
    whole_model: bool
    num_batches: int = 32
    num_stats_batches: int = 32
    rounds: int = 20
    per_round: int = 5
    exchange: str = "shared"

    def to_json(self) -> dict[str, Any]:
        """For `from_json` in a worker."""
        return {**asdict(self), "work": self.work.to_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Case:
        """The case written by `to_json`."""
        return Case(**{**value, "work": Workload.from_json(value["work"])})


def run_case(value: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build, verify and measure one case; the worker function. Collective.

    Returns:
        The case's entry of the record on rank 0, nothing elsewhere.
    """
    case = Case.from_json(value)
    if case.exchange == "collective":
        os.environ[DOMAIN_ENV] = str(dist.get_rank())
    else:
        os.environ.pop(DOMAIN_ENV, None)
    runner = _Runner(case, lambda text: progress(f"{case.name}: {text}"))
    try:
        return runner.run()
    finally:
        runner.close()


class _Runner:
    def __init__(self, case: Case, progress: Progress) -> None:
        self.case, self.work, self.progress = case, case.work, progress
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sides: list[Side] = []
        self.is_shared = case.exchange == "shared"

    def run(self) -> dict[str, Any]:
        load_before = record.load_average()
        self.progress("drawing batches")
        ids = timed_ids(self.work, self.rank, self.world_size, self.case.num_batches)
        batches = [make_batch(self.work, x, (TIMED, self.rank, k)) for k, x in enumerate(ids)]
        self.progress("collecting statistics and planning")
        plan, plan_s = chosen_plan(self.work, self.case.num_stats_batches, "training",
                                   self.is_shared)
        checks = Checks.make(self.work, self.rank, self.world_size)
        reference = self._build(plan, checks)
        verdicts = verify(self.sides, checks, reference, self.progress)
        reference = None
        gc.collect()
        gc.freeze()
        # The ceiling reads all arenas in place.
        ceiling = Ceiling(self._tables, ids, self.work.pooling) if self.is_shared else None
        timings = self._measure(batches, ceiling)
        if ceiling is not None:
            # Collective where it meets OPER's lookup.
            verdict = self._check(ceiling, batches[0])
            if self.rank == 0:
                verdicts["ceiling"] = verdict
        wire = {} if self.is_shared else self._wire_bytes(batches)
        phases = self._phases(batches)
        read = bytes_read(self._tables)
        entry = {
            "name": self.case.name, **self._figures(timings, verdicts, ids),
            "oper_phases_ms": phases, "bytes_read": read, "exchange": self.case.exchange, **wire,
            "ceiling": ceiling.settings if ceiling else None,
            "page_kind": self._tables.page_kind,
            "workload": self.work.to_json(), "world_size": self.world_size,
            "threads_per_rank": torch.get_num_threads(), "num_batches": self.case.num_batches,
            "num_stats_batches": self.case.num_stats_batches, "plan_seconds": round(plan_s, 3),
            "load_before": load_before, "load_after": record.load_average()}
        return entry if self.rank == 0 else {}

    @property
    def _tables(self) -> Any:
        assert self.sides[0].tables is not None
        return self.sides[0].tables

    def close(self) -> None:
        """Free the models; the next case needs the memory."""
        if self.sides:
            dist.barrier()
            self._tables.close()
        self.sides = []
        gc.unfreeze()
        gc.collect()

    def _build(self, plan: Plan, checks: Checks) -> Reference | None:
        """All contenders, alive together; the unsharded model on rank 0."""
        whole = self.case.whole_model
        self.progress("building OPER's side")
        oper, model = build_oper(self.work, whole, plan, keep_reference=self.rank == 0)
        self.sides = [oper]
        for kind in PLAN_KINDS:
            self.progress(f"building TorchRec's {kind} side")
            self.sides.append(build_torchrec(self.work, whole, kind, self.world_size)[0])
        if not whole:
            # The same output gradient for every side and every step.
            columns = self.work.dim * len(self.work.num_rows)
            generator = torch.Generator().manual_seed(self.work.seed + self.rank)
            size = self.work.batch_size // self.world_size
            gradient = torch.randn(size, columns, generator=generator) * 1e-3
            for side in self.sides:
                side.order_gradient(gradient, checks.batch(0, self.rank))
        return None if self.rank else Reference(model, checks)

    def _measure(self, batches: Sequence[Any], ceiling: Ceiling | None) -> dict[str, np.ndarray]:
        """Seconds by phase and contender, the maximum over ranks of every call."""
        align = self._tables.barrier
        rounds, per_round = self.case.rounds, self.case.per_round
        if ceiling is not None:
            self.progress("finding the gather ceiling's best settings")
            ceiling.tune(align, slowest)
        found: dict[str, np.ndarray] = {}
        for phase in ("step", "forward"):
            runs: dict[str, Callable[[int], Any]] = {}
            for side in self.sides:
                side.model.train(phase == "step")
                runs[side.name] = _over(batches, side.step if phase == "step" else side.forward)
            if phase == "forward" and ceiling is not None:
                runs["ceiling"] = ceiling.run
            self.progress(f"warming up: {phase}")
            record.interleave(runs, align, 1, 2)
            self.progress(f"measuring: {phase}, {rounds} rounds of {per_round}")
            clock = record.BusyClock()
            mine = record.interleave(runs, align, rounds, per_round)
            found[f"{phase} other cores"] = np.array([clock.others(total)])
            for name, seconds in mine.items():
                found[f"{phase} {name}"] = np.array(slowest(seconds.tolist()))
        return found

    def _check(self, ceiling: Ceiling, batch: Any) -> dict[str, Any]:
        """Whether the bare gather has summed the rows that a lookup sums."""
        ceiling.run(0)
        verdict = Verdict()
        verdict.compare("ceiling", ceiling.out, self.sides[0].lookup(batch.sparse_features))
        return verdict.to_json()

    def _wire_bytes(self, batches: Sequence[Any]) -> dict[str, Any]:
        """Bytes that all ranks send per training step: by contender, as the loopback interface
        counts them (with TCP's headers), and OPER's own count by kind."""
        found: dict[str, Any] = {}
        self._tables.sent_bytes(reset=True)
        for side in self.sides:
            side.model.train()
            dist.barrier()
            before = record.loopback_bytes()
            for k in range(_PHASE_STEPS):
                side.step(batches[k % len(batches)])
            dist.barrier()
            found[side.name] = round((record.loopback_bytes() - before) / _PHASE_STEPS)
        sent = {kind: sum(to) for kind, to in self._tables.sent_bytes().items()}
        joint = total(list(sent.values()))
        return {"loopback_bytes_per_step": found, "oper_sent_bytes_per_step": {
            kind: round(x / _PHASE_STEPS) for kind, x in zip(sent, joint, strict=True)},
            **self._simulated_bytes(round(sum(joint)))}

    def _simulated_bytes(self, executed: int) -> dict[str, Any]:
        """What the simulator says of the bytes that all ranks have sent in the counted steps."""
        if self.rank:
            return {}
        everyone = [timed_ids(self.work, r, self.world_size, self.case.num_batches)
                    for r in range(self.world_size)]
        lengths = np.full(self.work.batch_size // self.world_size, self.work.pooling, np.int64)
        replay = WireReplay(self._tables.plan, range(self.world_size), training=True)
        simulated = 0
        for k in range(_PHASE_STEPS):
            simulated += int(replay.step([
                {f: Bags(ids[k % len(ids)][n], lengths) for n, f in enumerate(self.work.features)}
                for ids in everyone]).sum())
        return {"simulated_bytes_per_step": round(simulated / _PHASE_STEPS),
                "simulated_equals_sent": simulated == executed}

    def _phases(self, batches: Sequence[Any]) -> dict[str, float]:
        """Where OPER's step goes: median milliseconds by phase, mean over ranks."""
        tables = self._tables
        taken = []
        self.sides[0].model.train()
        tables.traffic(reset=True)
        for batch in batches[:_PHASE_STEPS]:
            tables.barrier()
            self.sides[0].step(batch)
            taken.append(list(tables.phase_ns().values()))
        mine = np.median(np.array(taken, np.float64), axis=0) / 1e6
        return {name: round(x / self.world_size, 4)
                for name, x in zip(tables.phase_ns(), total(mine.tolist()), strict=True)}

    def _figures(self, timings: dict[str, np.ndarray], verdicts: dict[str, dict[str, Any]],
                 ids: Sequence[np.ndarray]) -> dict[str, Any]:
        moved = moved_bytes(self.work, ids)
        joint = {k: int(x) for k, x in zip(moved, total(list(moved.values())), strict=True)}
        plans: dict[str, Any] = {}
        for side in self.sides:
            plans[side.name] = {
                phase: record.summary(timings[f"{phase} {side.name}"])
                for phase in ("step", "forward")}
            plans[side.name]["plan"] = side.plan
            plans[side.name]["verification"] = verdicts.get(side.name)
        best = min(PLAN_KINDS, key=lambda kind: plans[kind]["step"]["median_ms"])

        def median(name: str, phase: str) -> float:
            return float(np.median(timings[f"{phase} {name}"]))

        limit: dict[str, Any] = {}
        if self.is_shared:
            plans["ceiling"] = {"forward": record.summary(timings["forward ceiling"]),
                                "verification": verdicts.get("ceiling")}
            ceiling = median("ceiling", "forward")
            limit = {"gather_ceiling_ms": plans["ceiling"]["forward"]["median_ms"],
                     "gather_ceiling_gbps": round(joint["forward"] / ceiling / 1e9, 3),
                     "forward_fraction_of_ceiling": round(ceiling / median("oper", "forward"), 4)}
        return {
            **limit,
            "ratio_step": round(median(best, "step") / median("oper", "step"), 3),
            "ratio_forward": round(median(best, "forward") / median("oper", "forward"), 3),
            "oper_step_ms": plans["oper"]["step"]["median_ms"],
            "oper_forward_ms": plans["oper"]["forward"]["median_ms"],
            "torchrec_best": best,
            "torchrec_step_ms": plans[best]["step"]["median_ms"],
            "torchrec_forward_ms": plans[best]["forward"]["median_ms"],
            "verified": bool(verdicts) and all(v["passed"] for v in verdicts.values()),
            "bytes_moved": joint, "plans": plans,
            "other_busy_cores": {phase: round(float(timings[f"{phase} other cores"][0]), 2)
                                 for phase in ("step", "forward")}}


def _over(batches: Sequence[Any], call: Callable[[Any], Any]) -> Callable[[int], Any]:
    """`call` on batch number k, modulo their number."""
    return lambda k: call(batches[k % len(batches)])


def moved_bytes(work: Workload, ids: Sequence[np.ndarray]) -> dict[str, int]:
    """Bytes that a rank has to move per batch, mean over batches.

    Returns:
        ``forward``: rows read, one per id, and outputs written. ``step``: that, plus the output
        gradient read once per id, a gradient row written and read per distinct row of the batch,
        and weight and row-wise state of each of them read and written.
    """
    row = work.dim * 4
    forward = distinct = 0
    for batch in ids:
        forward += batch.size * row + batch.size // work.pooling * row
        distinct += sum(np.unique(x).size for x in batch)
    lookups = sum(x.size for x in ids)
    step = forward + lookups * row + distinct * (2 * row + 2 * (row + 4))
    return {"forward": forward // len(ids), "step": step // len(ids),
            "distinct_rows": distinct // len(ids)}
