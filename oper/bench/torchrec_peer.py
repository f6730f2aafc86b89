"""TorchRec's side of a comparison: the same model sharded by a TorchRec plan, on CPU over gloo.

TorchRec is imported when something is built, not with this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, fail

PLAN_KINDS = ("table_wise", "mixed")
MIXED_MAX_ROWS = 10_000  # tables up to this size are data-parallel in the mixed plan


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How TorchRec shards and trains.

    Attributes:
        kind: ``"table_wise"`` (what TorchRec's planner chooses on CPU by itself), or ``"mixed"``:
            tables of at most `MIXED_MAX_ROWS` rows data-parallel, the others table-wise.
        batch_size: samples per rank and step, for its planner.
        pooling: mean ids per bag, for its planner.
        learning_rate: of row-wise Adagrad on the tables (fused into the backward pass wherever
            TorchRec fuses it) and of SGD on the dense part.
        eps: of row-wise Adagrad.
    """

    kind: str
    batch_size: int
    pooling: float = 1.0
    learning_rate: float = 0.02
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.kind not in PLAN_KINDS:
            raise InvalidInputError(fail("cannot build the TorchRec side", "kind", self.kind,
                                         f"one of {PLAN_KINDS}", "correct it"))


@dataclass(slots=True)
class Peer:
    """A model that TorchRec has sharded.

    Attributes:
        model: the `DistributedModelParallel` model.
        plan: sharding type and ranks by table.
        optimizers: the optimizers that must step after the backward pass: SGD for the dense part,
            row-wise Adagrad for data-parallel tables (TorchRec does not fuse it there).
    """

    model: nn.Module
    plan: dict[str, str]
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
    peer = Peer(model, {}, [])
    for tables in plan.plan.values():
        for name, where in tables.items():
            peer.plan[name] = f"{where.sharding_type} {where.ranks}"
    _add_optimizers(peer, options, adagrad)
    return peer


def _plan(module: nn.Module, options: PeerOptions, sharder: Any, group: Any) -> Any:
    """What TorchRec's own planner makes of the sharding types that the kind allows."""
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    constraints = {}
    for child in module.modules():
        if not isinstance(child, EmbeddingBagCollection):
            continue
        for config in child.embedding_bag_configs():
            small = options.kind == "mixed" and config.num_embeddings <= MIXED_MAX_ROWS
            constraints[config.name] = ParameterConstraints(
                sharding_types=["data_parallel" if small else "table_wise"],
                pooling_factors=[float(options.pooling)] * len(config.feature_names))
    size = group.size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu", local_world_size=size),
        batch_size=options.batch_size, constraints=constraints, debug=False)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    return planner.collective_plan(module, [sharder], group)


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
