"""Plans of the installed TorchRec's planner for an OPER problem, for comparison."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology as PlannerTopology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oper.errors import InvalidInputError
from oper.integration.torchrec_plans import from_torchrec
from oper.plan import Plan
from oper.search.problem.statement import Problem, TableProblem
from oper.tables import TableSpec
from oper.topology import Topology

_DTYPES = {"float32": DataType.FP32, "float16": DataType.FP16, "bfloat16": DataType.BF16}
_SCALE = 1e6  # GB/s in bytes per millisecond, the planner's unit


def torchrec_proposals(problem: Problem, time_limit_s: float = 10.0) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan): the best plan of each of TorchRec's proposers, as an OPER plan.

    The first run, "table-wise only", is restricted to whole tables, because with many tables and
    ranks the other runs may exceed the time limit. A proposer without a plan that fits is skipped.

    TorchRec's planner gets the table sizes, mean pooling factors, memory and bandwidths per rank,
    and ranks per host. No memory is reserved, so that both planners can use all of it. Row ranges
    are returned as stripes, because ids of a TorchRec model are not sorted by hotness.

    Args:
        problem: the problem; its statistics give the mean pooling factors.
        time_limit_s: seconds for all runs together. TorchRec checks the time only between two
            proposals; for a hard limit, run this in a separate process.

    Raises:
        InvalidInputError: the time limit is not positive, or TorchRec's planner does not support a
            table's dtype.
    """
    if not time_limit_s > 0:
        raise InvalidInputError("cannot run TorchRec's planner", "time_limit_s", time_limit_s,
                                "> 0", "pass a limit in seconds")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    begin = time.monotonic()
    topology = planner_topology(problem.topology)
    specs = [t.spec for t in problem.tables]
    module = _module(specs)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    whole = {t.spec.name: _constraint(t, ["table_wise"]) for t in problem.tables}
    free = {t.spec.name: _constraint(t, None) for t in problem.tables}
    # All unrestricted runs share an enumerator, which caches the sharding options.
    enumerator = EmbeddingEnumerator(topology, problem.batch_size, free)
    runs = [("table-wise only", GreedyProposer(), whole, None),
            ("greedy by cost", GreedyProposer(use_depth=False), free, enumerator),
            ("greedy", GreedyProposer(), free, enumerator),
            ("uniform", UniformProposer(), free, enumerator),
            ("dynamic programming", DynamicProgrammingProposer(), free, enumerator)]
    for k, (name, proposer, constraints, options) in enumerate(runs):
        left = time_limit_s - (time.monotonic() - begin)
        if k and left <= 0:
            return
        planner = EmbeddingShardingPlanner(
            topology=topology, batch_size=problem.batch_size, enumerator=options,
            storage_reservation=FixedPercentageStorageReservation(0.0), proposer=[proposer],
            constraints=constraints, debug=False, stats=[],
            timeout_seconds=max(1, round(left / (len(runs) - k))))
        try:
            found = planner.plan(module, sharders)
        except PlannerError:  # no proposal fits
            continue
        yield name, from_torchrec(
            found, specs, problem.machine.world_size, scattered=True,
            objective=problem.objective, batch_size=problem.batch_size,
            topology=problem.topology.name)


def planner_topology(topology: Topology) -> PlannerTopology:
    """Convert a topology to TorchRec's, which has memory per rank but one bandwidth for all ranks.

    If any memory domain has several ranks, ranks become CPU processes, otherwise GPUs. The memory
    bandwidth is the mean per rank; link bandwidths are means over domains.
    """
    domains, world_size = topology.domains, topology.world_size
    shared = any(len(d.ranks) > 1 for d in domains)
    memory = [d.memory_bytes // len(d.ranks) for d in domains for _ in d.ranks]
    read = sum(d.read_gbps for d in domains) / world_size * _SCALE
    local = sum(len(d.ranks) for d in domains if d.host == domains[0].host)
    kind, cap = ("cpu", "ddr_cap") if shared else ("cuda", "hbm_cap")
    quiet = logging.getLogger("torchrec.distributed.planner.types")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        return PlannerTopology(
            world_size, kind, local_world_size=local, hbm_mem_bw=read, ddr_mem_bw=read,
            intra_host_bw=sum(d.link_gbps for d in domains) / len(domains) * _SCALE,
            inter_host_bw=sum(d.cross_gbps for d in domains) / len(domains) * _SCALE,
            custom_topology_data=CustomTopologyData({cap: memory}, world_size))
    finally:
        quiet.setLevel(level)


def _constraint(t: TableProblem, kinds: list[str] | None) -> ParameterConstraints:
    """Return constraints with the table's mean pooling factor, and kernels without UVM."""
    mean = max(t.traffic.num_ids / max(t.traffic.num_bags, 1e-300), 1e-3)
    num_features = max(1, len(t.spec.features))
    return ParameterConstraints(sharding_types=kinds, compute_kernels=["fused", "dense"],
                                pooling_factors=[mean] * num_features)


def _module(specs: list[TableSpec]) -> nn.Module:
    """Return collections of the tables on the meta device, with one for every unpooled table."""
    module, pooled = nn.Module(), []
    device = torch.device("meta")
    for k, spec in enumerate(specs):
        if spec.dtype not in _DTYPES:
            raise InvalidInputError(f"TorchRec's planner cannot place table {spec.name!r}", "dtype",
                                    spec.dtype, f"one of {sorted(_DTYPES)}",
                                    "change the dtype, or do not compare with TorchRec")
        common: dict[str, Any] = {
            "name": spec.name, "num_embeddings": spec.num_rows, "embedding_dim": spec.dim,
            "feature_names": list(spec.features) or [spec.name], "data_type": _DTYPES[spec.dtype]}
        if spec.pooling == "none":
            setattr(module, f"sequence_{k}", EmbeddingCollection(
                tables=[EmbeddingConfig(**common)], device=device))
        else:
            kind = PoolingType.MEAN if spec.pooling == "mean" else PoolingType.SUM
            pooled.append(EmbeddingBagConfig(**common, pooling=kind))
    if pooled:
        module.bags = EmbeddingBagCollection(tables=pooled, device=device)
    return module
