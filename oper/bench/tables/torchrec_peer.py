"""TorchRec's side of a comparison: the same model sharded by a TorchRec plan, on CPU over gloo.

TorchRec is imported when something is built, not with this module.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, fail
from oper.train.engines import is_table, shard_by_torchrec, unfused_tables

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
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    if isinstance(module, EmbeddingBagCollection):
        module = BagsOnly(module)
    pooling = itertools.repeat(options.pooling) if isinstance(
        options.pooling, int | float) else iter(options.pooling)

    def constrain(config: Any) -> ParameterConstraints:
        return ParameterConstraints(
            sharding_types=_sharding_types(options.kind, config.num_embeddings),
            pooling_factors=[float(next(pooling))] * len(config.feature_names))

    adagrad = {"lr": options.learning_rate, "eps": options.eps}
    model, plan = shard_by_torchrec(module, RowWiseAdagrad, adagrad, options.batch_size, constrain,
                                    options.machine)
    optimizers: list[torch.optim.Optimizer] = []
    if tables := unfused_tables(model):
        optimizers.append(RowWiseAdagrad(tables, **adagrad))
    if dense := [p for n, p in model.named_parameters() if not is_table(n)]:
        optimizers.append(torch.optim.SGD(dense, lr=options.learning_rate))
    return Peer(model, {name: f"{where.sharding_type} {where.ranks}"
                        for tables in plan.plan.values() for name, where in tables.items()},
                plan, optimizers)


def _sharding_types(kind: str, num_rows: int) -> list[str] | None:
    """What a table may be sharded by; None = anything that the sharder supports."""
    if kind == "any":
        return None
    if kind == "mixed":
        return ["data_parallel" if num_rows <= MIXED_MAX_ROWS else "table_wise"]
    return [kind]
