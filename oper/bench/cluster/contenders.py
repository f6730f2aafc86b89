"""The contenders on a cluster: OPER's plan, peer planners' plans, TorchRec, data parallelism."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from oper.bench.cluster.constants import measured_topology
from oper.bench.cluster.network import Links, OnHosts
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Run
from oper.bench.core.planning import gather, joint_stats, planned
from oper.bench.core.workload import Workload
from oper.bench.tables.sides import (
    CPU_PLAN_KINDS,
    Dense,
    Side,
    build_data_parallel,
    build_oper,
    build_torchrec,
    make_collection,
)
from oper.errors import OperError
from oper.plan import Plan
from oper.search.certificate.carried import not_certified
from oper.search.cost.model import evaluate
from oper.search.peers.baselines import peers
from oper.search.planner import plan_problem
from oper.search.problem.statement import Problem
from oper.stats import AccessStats
from oper.topology import Topology
from oper.train.model import ranks

IN_PARTS = "oper-micro-batches"
_TORCHREC = "torchrec-"  # prefix of TorchRec's contenders; the kind of plan follows
_COMPARED_PARTS = 3  # micro-batches during verification; for timing the pipeline chooses
# DDP's bucket size (MiB) with micro-batches: about one layer, so that averaging overlaps with the
# backward pass. A single bucket would be averaged only after it.
_BUCKET_MB = 0.4
_DENSE_S = 10.0  # DDP is left out if its gradients keep a link busy for longer, seconds per step


@dataclass(slots=True)
class Contender:
    """A contender, before it is built.

    Attributes:
        name: the contender's name in the record.
        runtime: the runtime that executes it: ``"oper"``, ``"oper in parts"``
            (`MicroBatchPipeline`), ``"torchrec"`` or ``"torch"``.
        plan: the plan that OPER's runtime executes; None on other runtimes.
        predicted_ms: step time (ms) predicted by OPER's cost model; None without a prediction.
        also: names of peers that propose the same plan.
    """

    name: str
    runtime: str
    plan: Plan | None = None
    predicted_ms: float | None = None
    also: list[str] = field(default_factory=list)

    def refusals(self) -> tuple[type[Exception], ...]:
        """Exceptions by which the planner or runtime rejects a case; any other is a bug."""
        if self.runtime != "torchrec":
            return (OperError,)
        from torchrec.distributed.planner.types import PlannerError

        return (PlannerError,)

    def build(self, work: Workload, objective: str, whole_model: bool, machine: Mapping[str, Any]
              ) -> tuple[Side, Any]:
        """Build the side to measure; returns it and TorchRec's `ShardingPlan` or None. Collective.

        Args:
            work: the workload.
            objective: ``"training"`` or ``"inference"``.
            whole_model: whether to build a DLRM around the tables.
            machine: machine description for TorchRec's planner, see `planner_machine`.
        """
        if self.runtime == "torchrec":
            return build_torchrec(work, Dense() if whole_model else None,
                                  self.name.removeprefix(_TORCHREC), machine)
        if self.plan is None:
            return build_data_parallel(work), None
        if self.runtime == "oper in parts":
            return build_in_parts(work, self.plan, _COMPARED_PARTS), None
        return build_plan(work, self.plan, objective, Dense() if whole_model else None), None


@dataclass(slots=True)
class Planned:
    """The result of planning on rank 0.

    Attributes:
        contenders: the contenders that can run, OPER's plan first, without equal plans.
        left_out: for each contender that cannot run, the reason.
        lower_bound_ms: OPER's certified lower bound; None if its plan is not certified.
        phases_ms: modelled time (ms) of each phase of OPER's plan.
        binding: resource that limits each of these phases.
    """

    contenders: list[Contender]
    left_out: dict[str, str]
    lower_bound_ms: float | None
    phases_ms: dict[str, float]
    binding: dict[str, str]


def placement_of(plan: Plan) -> Any:
    """A hashable key, equal for plans that place all rows equally."""
    return tuple((t.table.name, t.pieces, t.head_ids.tobytes()) for t in plan.tables)


def plan_all(problem: Problem, whole_model: bool) -> Planned:
    """Make the contenders: the plan that ``oper plan`` chooses, peer planners' plans that fit into
    the memory, TorchRec, and DDP.

    Steps of a whole DLRM are not predicted, since the cost model covers only its tables.
    """
    plan = plan_problem(problem)
    phases = evaluate(plan, problem).phases
    found = Planned(
        [], {}, None if not_certified(plan, problem) else plan.lower_bound_us / 1e3,
        {p.name: p.time_us / 1e3 for p in phases}, {p.name: p.binding for p in phases})
    known: dict[Any, Contender] = {}
    for name, make in {"oper": lambda *_: plan, **peers()}.items():
        try:
            candidate = make(problem, 0)
        except OperError as error:
            found.left_out[name] = str(error)
            continue
        model = evaluate(candidate, problem) if candidate else None
        if candidate is None or model is None or not model.fits:
            found.left_out[name] = ("its plan does not fit into the memory" if model else
                                    "its rule finds no placement that fits")
            continue
        kept = known.setdefault(placement_of(candidate), Contender(
            name, "oper", candidate, None if whole_model else model.step_us / 1e3))
        if kept.name != name:
            kept.also.append(name)
    oper, *others = known.values()
    found.contenders = [oper, *(Contender(_TORCHREC + kind, "torchrec") for kind in CPU_PLAN_KINDS),
                        *others]
    seconds = _dense_s(problem)
    if whole_model:
        found.contenders.append(Contender(IN_PARTS, "oper in parts", plan))
    elif problem.objective == "inference":
        found.left_out["ddp-dense"] = "whole tables on every rank do not fit into the memory"
    elif seconds > _DENSE_S:
        found.left_out["ddp-dense"] = (
            f"its dense gradients alone take {seconds:.0f} s per step on these links")
    else:
        found.contenders.append(Contender("ddp-dense", "torch"))
    return found


def build_plan(work: Workload, plan: Plan, objective: str = "training", dense: Dense | None = None
               ) -> Side:
    """OPER as a contender under a plan, with the dense part `dense` if any. Collective."""
    return build_oper(work, dense, plan, objective, _collection(work))


def build_in_parts(work: Workload, plan: Plan, num_parts: int) -> Side:
    """OPER's contender for a whole DLRM that trains in micro-batches. Collective."""
    from oper.pipeline import MicroBatchPipeline

    side = build_plan(work, plan, dense=Dense(bucket_mb=_BUCKET_MB))
    side.name = IN_PARTS
    side.pipeline = MicroBatchPipeline(side.model, side.optimizers[0], num_parts)
    return side


class ClusterRun(Run):
    """A `Run` on an emulated cluster.

    Attributes:
        links: the case's links.
        sides: the open sides by name.
        topology, measured: see `measured_topology`; set by `prepare`, as are the next ones.
        given: the timed batches.
        stats: access statistics from other batches.
    """

    topology: Topology
    measured: dict[str, Any]
    stats: AccessStats

    def __init__(self, case: OnCluster, progress: Progress) -> None:
        super().__init__(case, progress)
        self.links = case.links
        self.given: list[Any] = []
        self.sides: dict[str, Side] = {}

    def prepare(self, memory_bytes: int | None = None) -> None:
        """Measure the links, draw batches and collect statistics; `memory_bytes`: see
        `measured_topology`. Collective."""
        self.say("measuring the links")
        self.topology, self.measured = measured_topology(self.links, self.case.constants,
                                                         memory_bytes)
        self.say("drawing batches")
        self.given = self.batches()
        self.stats = joint_stats(self.work, self.case.num_stats_batches)

    def plan(self, **options: Any) -> Plan:
        """OPER's plan for training on `topology`, with options of `make_plan`. Collective."""
        return planned(self.work, self.stats, "training", self.topology, **options)[0]

    def about(self) -> dict[str, Any]:
        """The items that all cases' entries have."""
        return {"objective": "training", "hosts": self.links.num_hosts,
                "in_grid": self.case.in_grid, "links": asdict(self.links),
                "workload": asdict(self.work), "measured": self.measured,
                "other_busy_cores": self.others.get("", self.others)}

    def open(self, name: str, plan: Plan, num_steps: int = 0) -> Side:
        """Build the tables under a plan as the side `name`, and train the first steps. Collective.
        """
        side = self.sides[name] = build_plan(self.work, plan)
        self.set_gradient([side], self.given[0])
        for k in range(num_steps):
            self.step(side, k)
        return side

    def step(self, side: Side, k: int) -> None:
        """Run step `k` (batch `k` modulo the number of batches)."""
        side.step(self.given[k % len(self.given)])

    def close(self, name: str) -> None:
        """Close a contender and free its memory. Collective."""
        self.sides.pop(name).close()
        gc.collect()


@dataclass(frozen=True, slots=True)
class OnCluster(OnHosts):
    """Base of the cases that open contenders for the tables of a workload in a `ClusterRun`.

    Attributes:
        work: the workload.
        num_batches: number of distinct timed batches.
        num_stats_batches: number of untimed batches from which access statistics are collected.
        in_grid: whether the case counts for the summary of the grid.
    """

    work: Workload
    num_batches: int = 32
    num_stats_batches: int = 32
    in_grid: bool = False
    runner: ClassVar[type[ClusterRun]] = ClusterRun

    def compare(self, run: Any) -> dict[str, Any]:
        """Open, compare and time the contenders; rank 0 returns the record's entry. Collective."""
        raise NotImplementedError

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Run `compare` and close all contenders. Collective."""
        run = self.runner(self, progress)
        try:
            return self.compare(run)
        finally:  # the next case needs the memory
            for name in list(run.sides):
                run.close(name)


def largest_difference(side: Side, expected: Side) -> float:
    """Return the maximum over tables of max|a - b| / max|b|, where b are the rows of `expected`;
    infinite if it is not a number. Collective."""
    worst = 0.0
    assert side.tables is not None and expected.tables is not None
    for table in side.tables.specs:
        rows, others = side.tables.read(table), expected.tables.read(table)
        found = float((rows - others).abs().max() / others.abs().max())
        worst = max(worst, found if math.isfinite(found) else math.inf)
    return max(gather(worst))


@functools.lru_cache(maxsize=1)
def _collection(work: Workload) -> Any:
    """The unsharded tables from which all sides of OPER's runtime copy their rows. Collective.

    All ranks run on one machine and map the same memory of rank 0, since a copy per rank would not
    fit. The memory is anonymous (memfd), so that the kernel frees it with the processes.
    """
    collection = make_collection(work, "meta")
    bags = collection.embedding_bags.values()
    numel, file = sum(bag.weight.numel() for bag in bags), -1
    if ranks()[0] == 0:
        file = os.memfd_create("oper-cluster")
        os.truncate(file, 4 * numel)
    path = gather(f"/proc/{os.getpid()}/fd/{file}")[0]
    flat, at = torch.from_file(path, shared=True, size=numel), 0
    if file >= 0:
        torch.cat([b.weight.detach().view(-1) for b in
                   make_collection(work, "cpu").embedding_bags.values()], out=flat)
    gather(None)
    if file >= 0:
        os.close(file)  # all ranks have mapped it
    for bag in bags:
        weight = flat[at:at + bag.weight.numel()].view(bag.weight.shape)
        bag.weight, at = torch.nn.Parameter(weight), at + weight.numel()
    return collection


def planner_machine(links: Links, topology: Topology) -> dict[str, Any]:
    """Fields of TorchRec's planner `Topology` (bytes per ms), with the mean bandwidths of the
    hosts."""
    mean = [sum(getattr(d, k) for d in topology.domains) / len(topology.domains) * 1e6
            for k in ("link_gbps", "cross_gbps", "read_gbps")]
    return {"local_world_size": links.ranks_per_host, "intra_host_bw": mean[0],
            "inter_host_bw": mean[1], "ddr_mem_bw": mean[2]}


def _dense_s(problem: Problem) -> float:
    """Time (s) that a ring all-reduce of all tables keeps the slowest link busy."""
    num_bytes, hosts = sum(t.spec.num_bytes for t in problem.tables), problem.topology.num_hosts
    slowest = min(d.cross_gbps * len(d.ranks) for d in problem.topology.domains)
    return 2 * (hosts - 1) / hosts * num_bytes / (slowest * 1e9)

