"""Who is compared on a cluster: OPER's plan, the plans of its peers, TorchRec, data parallelism."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from oper.bench.cluster.network import Links
from oper.bench.core.planning import gather, world
from oper.bench.core.workload import Workload
from oper.bench.tables.sides import (
    Dense,
    Side,
    build_data_parallel,
    build_oper,
    build_torchrec,
    make_collection,
)
from oper.bench.tables.torchrec_peer import CPU_PLAN_KINDS
from oper.errors import OperError
from oper.plan import Plan
from oper.search.certificate.carried import not_certified
from oper.search.cost.model import Evaluation, evaluate
from oper.search.peers.baselines import peers
from oper.search.planner import plan_problem
from oper.search.problem.statement import Problem
from oper.topology import Topology

IN_PARTS = "oper-micro-batches"
_COMPARED_PARTS = 3  # of a batch, with the unsharded model; how many are timed is measured
_DENSE_S = 10.0  # DDP is left out where its gradients alone keep a link busy for longer


@dataclass(slots=True)
class Contender:
    """A contender, not built yet.

    Attributes:
        name: for the record.
        runtime: what executes it: ``"oper"``, ``"oper in parts"`` (`MicroBatchPipeline`),
            ``"torchrec"`` or ``"torch"``.
        build: makes what is measured and, for TorchRec, the plan that `from_torchrec` reads.
            Collective.
        predicted_ms: modelled step of its plan by OPER's cost model; None where there is none.
        also: peers that propose the very same plan.
        plan: the plan, where OPER's runtime executes it.
    """

    name: str
    runtime: str
    build: Callable[[], tuple[Side, Any]]
    predicted_ms: float | None = None
    also: list[str] = field(default_factory=list)
    plan: Plan | None = None

    @property
    def key(self) -> Any:
        """Equal for equal placements."""
        return self.name if self.plan is None else placement_of(self.plan)


@dataclass(slots=True)
class Planned:
    """The plans that rank 0 has made.

    Attributes:
        plans: by contender, OPER's first; plans that are equal are kept once.
        also: other contenders with the same plan, by the name under which it is kept.
        predicted_ms: predicted step, by contender.
        left_out: why a contender has no plan, by name.
        lower_bound_ms: of OPER's certificate; None where its plan is not certified.
        phases_ms: modelled phases of OPER's plan.
        binding: binding resource of each phase.
    """

    plans: dict[str, Plan] = field(default_factory=dict)
    also: dict[str, list[str]] = field(default_factory=dict)
    predicted_ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    lower_bound_ms: float | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    binding: dict[str, str] = field(default_factory=dict)


def placement_of(plan: Plan) -> Any:
    """Equal for plans that place all rows alike."""
    return tuple((t.table.name, t.pieces, t.head_ids.tobytes()) for t in plan.tables)


def plan_all(problem: Problem) -> Planned:
    """OPER's plan, as ``oper plan`` chooses it, and those of all peers that fit."""
    found, known = Planned(), dict[Any, str]()
    plan = plan_problem(problem)
    candidates: dict[str, Plan | None] = {"oper": plan}
    for name, make in peers().items():
        try:
            candidates[name] = make(problem, 0)
        except OperError as error:
            found.left_out[name] = str(error)
    for name, candidate in candidates.items():
        if candidate is None:
            found.left_out[name] = "its rule finds no placement that fits"
            continue
        model = evaluate(candidate, problem)
        if not model.fits:
            found.left_out[name] = "its plan does not fit into the memory"
            continue
        same = known.setdefault(placement_of(candidate), name)
        if same != name:
            found.also.setdefault(same, []).append(name)
            continue
        found.plans[name], found.predicted_ms[name] = candidate, model.step_us / 1e3
        if name == "oper":
            _explain(found, model)
    if not not_certified(plan, problem):
        found.lower_bound_ms = plan.lower_bound_us / 1e3
    return found


def _explain(found: Planned, model: Evaluation) -> None:
    found.phases_ms = {p.name: round(p.time_us / 1e3, 3) for p in model.phases}
    found.binding = {p.name: p.binding for p in model.phases}


def contenders(work: Workload, planned: Planned, links: Links, topology: Topology,
               objective: str, whole_model: bool = False) -> list[Contender]:
    """All that can run, OPER first; why others cannot goes into `planned.left_out`.

    Steps of a whole DLRM are not predicted: the cost model knows its tables alone.
    """
    found = [Contender(name, "oper", _oper(work, plan, objective, whole_model),
                       None if whole_model else planned.predicted_ms[name],
                       planned.also.get(name, []), plan)
             for name, plan in planned.plans.items()]
    machine = planner_machine(links, topology)
    theirs = [Contender(f"torchrec-{kind}", "torchrec",
                        _torchrec(work, kind, links, machine, whole_model))
              for kind in CPU_PLAN_KINDS]
    found[1:1] = theirs
    if whole_model:
        found.append(Contender(IN_PARTS, "oper in parts", _oper_in_parts(work, planned)))
        return found
    seconds = _dense_s(work, links, topology)
    if objective == "inference":
        planned.left_out["ddp-dense"] = "whole tables on every rank do not fit into the memory"
    elif seconds > _DENSE_S:
        planned.left_out["ddp-dense"] = (
            f"its dense gradients alone take {seconds:.0f} s per step on these links")
    else:
        found.append(Contender("ddp-dense", "torch", lambda: (build_data_parallel(work), None)))
    return found


def _oper(work: Workload, plan: Plan, objective: str, whole_model: bool
          ) -> Callable[[], tuple[Side, Any]]:
    return lambda: (build_plan(work, plan, objective, whole_model), None)


def _oper_in_parts(work: Workload, planned: Planned) -> Callable[[], tuple[Side, Any]]:
    def build() -> tuple[Side, Any]:
        from oper.pipeline import MicroBatchPipeline

        side = build_plan(work, planned.plans["oper"], whole_model=True)
        side.name = IN_PARTS
        side.pipeline = MicroBatchPipeline(side.model, side.optimizers[0], _COMPARED_PARTS)
        return side, None
    return build


def build_plan(work: Workload, plan: Plan, objective: str = "training", whole_model: bool = False
               ) -> Side:
    """The tables of a workload under a plan, alone or in a DLRM, on OPER's runtime. Collective."""
    dense = Dense() if whole_model else None
    return build_oper(work, dense, plan, False, objective, _collection(work))[0]


@functools.lru_cache(maxsize=1)
def _collection(work: Workload) -> Any:
    """The tables that all sides of OPER's runtime copy their rows from. Collective.

    All ranks are on one machine and map them from one file: a copy each, of sixteen ranks, would
    not fit into its memory.
    """
    collection = make_collection(work, "meta")
    is_first = world()[0] == 0
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    bags = collection.embedding_bags.values()
    numel = sum(bag.weight.numel() for bag in bags)
    with contextlib.ExitStack() as stack:  # the mapping outlives the file's name
        file = None
        if is_first:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="oper-cluster-",
                                                                   dir=folder))
            file.truncate(4 * numel)
        path = gather(file.name if file else None)[0]
        flat, at = torch.from_file(path, shared=True, size=numel), 0
        if is_first:
            torch.cat([b.weight.detach().view(-1) for b in
                       make_collection(work, "cpu").embedding_bags.values()], out=flat)
        gather(None)
    for bag in bags:
        weight = flat[at:at + bag.weight.numel()].view(bag.weight.shape)
        bag.weight, at = torch.nn.Parameter(weight), at + weight.numel()
    return collection


def _torchrec(work: Workload, kind: str, links: Links, machine: Mapping[str, Any],
              whole_model: bool) -> Callable[[], tuple[Side, Any]]:
    dense = Dense() if whole_model else None
    return lambda: build_torchrec(work, dense, kind, links.world_size, machine)


def planner_machine(links: Links, topology: Topology) -> dict[str, Any]:
    """What TorchRec's planner is told: the same bandwidths, the mean where hosts differ."""
    mean = [sum(getattr(d, k) for d in topology.domains) / len(topology.domains) * 1e6
            for k in ("link_gbps", "cross_gbps", "read_gbps")]
    return {"local_world_size": links.ranks_per_host, "intra_host_bw": mean[0],
            "inter_host_bw": mean[1], "ddr_mem_bw": mean[2]}


def _dense_s(work: Workload, links: Links, topology: Topology) -> float:
    """Seconds that a ring all-reduce of whole tables keeps the slowest link busy."""
    num_bytes = sum(t.num_bytes for t in work.tables())
    slowest = min(d.cross_gbps * len(d.ranks) for d in topology.domains)
    return 2 * (links.num_hosts - 1) / links.num_hosts * num_bytes / (slowest * 1e9)


def set_gradient(side: Side, work: Workload, batch: Any) -> None:
    """The same output gradient for every side and every step. Collective."""
    rank, world_size = world()
    columns = work.dim * len(work.num_rows)
    generator = torch.Generator().manual_seed(work.seed + rank)
    gradient = torch.randn(work.batch_size // world_size, columns, generator=generator) * 1e-3
    side.order_gradient(gradient, batch)
