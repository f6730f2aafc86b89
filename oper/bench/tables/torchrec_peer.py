"""TorchRec's side of a comparison: the same model sharded by a TorchRec plan, on CPU over gloo.

TorchRec is imported when something is built, not with this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, fail

PLAN_KINDS = ("table_wise", "mixed")
# Its sharders shard no rows on CPU (no row-wise, table-row-wise or grid sharding).
CPU_PLAN_KINDS = (*PLAN_KINDS, "column_wise", "any")
MIXED_MAX_ROWS = 10_000  # tables up to this size are data-parallel in the mixed plan


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How TorchRec shards and trains.

    Attributes:
        kind: ``"table_wise"`` (what TorchRec's planner chooses on CPU by itself), or ``"mixed"``:
            tables of at most `MIXED_MAX_ROWS` rows data-parallel, the others table-wise;
            ``"column_wise"``; ``"any"``: whatever its planner chooses of what CPUs support.
        batch_size: samples per rank and step, for its planner.
        pooling: mean ids per bag, for its planner, of all features or of each.
        learning_rate: of row-wise Adagrad on the tables (fused into the backward pass wherever
            TorchRec fuses it) and of SGD on the dense part.
        eps: of row-wise Adagrad.
        machine: what its planner is told of the machine (fields of its `Topology`, bandwidths in
            bytes per millisecond); by default that all ranks share a host.
    """

    kind: str
    batch_size: int
    pooling: float | tuple[float, ...] = 1.0
    learning_rate: float = 0.02
    eps: float = 1e-8
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in CPU_PLAN_KINDS:
            raise InvalidInputError(fail("cannot build the TorchRec side", "kind", self.kind,
                                         f"one of {CPU_PLAN_KINDS}", "choose one of these"))


@dataclass(slots=True)
class Peer:
    """A model that TorchRec has sharded.

    Attributes:
        model: the `DistributedModelParallel` model.
        plan: sharding type and ranks by table.
        sharding: TorchRec's own `ShardingPlan`.
        optimizers: the optimizers that must step after the backward pass: SGD for the dense part,
            row-wise Adagrad for data-parallel tables (TorchRec does not fuse it there).
    """

    model: nn.Module
    plan: dict[str, str]
    sharding: Any
    optimizers: list[torch.optim.Optimizer]

    def collection(self) -> nn.Module:
        """The sharded embedding bag collection inside the model."""
        from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

        return next(m for m in self.model.modules()
                    if isinstance(m, ShardedEmbeddingBagCollection))


class BagsOnly(nn.Module):
    """A collection alone, as the child that `DistributedModelParallel` expects."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any) -> Any:
        return self.collection(features)


def build_peer(module: nn.Module, options: PeerOptions) -> Peer:
    """Shard `module` by TorchRec. Collective over the default process group (gloo).

    Args:
        module: an `EmbeddingBagCollection` or a model that contains one (`DLRMTrain`), best with
            tables on the meta device: TorchRec fills its tables by their ``init_fn``, whatever
            weights they had.
        options: plan and optimizers.
    """
    import torch.distributed as dist
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    if isinstance(module, EmbeddingBagCollection):
        module = BagsOnly(module)
    adagrad = {"lr": options.learning_rate, "eps": options.eps}
    for child in module.modules():
        if isinstance(child, EmbeddingBagCollection):
            # A copy: sharding takes entries out of the mapping that it is given.
            _apply_optimizer_in_backward(RowWiseAdagrad, child.parameters(), dict(adagrad))
    group = dist.group.WORLD
    assert group is not None
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = _plan(module, options, sharder, group)
    model = DistributedModelParallel(module, env=ShardingEnv.from_process_group(group),
                                     device=torch.device("cpu"), plan=plan, sharders=[sharder])
    peer = Peer(model, {}, plan, [])
    for tables in plan.plan.values():
        for name, where in tables.items():
            peer.plan[name] = f"{where.sharding_type} {where.ranks}"
    _add_optimizers(peer, options, adagrad)
    return peer


def _plan(module: nn.Module, options: PeerOptions, sharder: Any, group: Any) -> Any:
    """What TorchRec's own planner makes of the sharding types that the kind allows."""
    import torch.distributed as dist
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    constraints: dict[str, ParameterConstraints] = {}
    for child in module.modules():
        if not isinstance(child, EmbeddingBagCollection):
            continue
        for config in child.embedding_bag_configs():
            constraints[config.name] = ParameterConstraints(
                sharding_types=_sharding_types(options.kind, config.num_embeddings),
                pooling_factors=[
                    float(options.pooling) if isinstance(options.pooling, int | float)
                    else options.pooling[len(constraints)]] * len(config.feature_names))
    size = group.size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(**{"world_size": size, "compute_device": "cpu", "local_world_size": size,
                             **options.machine}),
        batch_size=options.batch_size, constraints=constraints, debug=False)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # Its own `collective_plan` raises on rank 0 alone where nothing fits; the others would wait.
    made: list[Any] = [None]
    if group.rank() == 0:
        try:
            made = [planner.plan(module, [sharder])]
        except PlannerError as error:
            made = [error]
    dist.broadcast_object_list(made, 0, group=group)
    if isinstance(made[0], PlannerError):
        raise made[0]
    return made[0]


def _sharding_types(kind: str, num_rows: int) -> list[str] | None:
    """What a table may be sharded by; None = anything that the sharder supports."""
    if kind == "any":
        return None
    if kind == "mixed":
        return ["data_parallel" if num_rows <= MIXED_MAX_ROWS else "table_wise"]
    return [kind]


def _add_optimizers(peer: Peer, options: PeerOptions, adagrad: dict[str, float]) -> None:
    from torchrec.optim import RowWiseAdagrad

    tables: list[nn.Parameter] = []
    dense: list[nn.Parameter] = []
    for name, parameter in _unfused(peer.model):
        (tables if ".embedding_bags." in name else dense).append(parameter)
    if tables:
        peer.optimizers.append(RowWiseAdagrad(tables, **adagrad))
    if dense:
        peer.optimizers.append(torch.optim.SGD(dense, lr=options.learning_rate))


def _unfused(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that no optimizer updates in the backward pass."""
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    yield from in_backward_optimizer_filter(model.named_parameters())
