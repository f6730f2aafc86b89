"""TorchRec's side of a comparison: the same model sharded by a TorchRec plan, on CPU over gloo.

TorchRec is imported only when a model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from oper.train.engines import is_table, shard_by_torchrec, unfused_tables

PLAN_KINDS = ("table_wise", "mixed")
# On CPU, TorchRec has no row-wise, table-row-wise or grid sharding of pooled tables.
CPU_PLAN_KINDS = (*PLAN_KINDS, "column_wise", "any")
MIXED_MAX_ROWS = 10_000  # tables up to this size are data-parallel in the mixed plan


class BagsOnly(nn.Module):
    """A collection alone, as the child that `DistributedModelParallel` expects."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any) -> Any:
        return self.collection(features)


def build_peer(module: nn.Module, kind: str, batch_size: int, pooling: Iterable[float],
               adagrad: Mapping[str, float], machine: Mapping[str, Any] | None = None
               ) -> tuple[nn.Module, nn.Module, Any, list[torch.optim.Optimizer]]:
    """Shard `module` by TorchRec. Collective over the default process group (gloo).

    Args:
        module: a model that contains an `EmbeddingBagCollection`. Its tables should be on the meta
            device: TorchRec ignores their weights and fills its shards with ``init_fn``.
        kind: ``"table_wise"``; ``"column_wise"``; ``"mixed"`` (tables of at most `MIXED_MAX_ROWS`
            rows data-parallel, larger ones table-wise); or ``"any"`` (the planner's choice among
            all types that TorchRec supports on CPU).
        batch_size: samples per rank and step, for TorchRec's planner.
        pooling: mean ids per bag of each table, for TorchRec's planner.
        adagrad: ``lr`` and ``eps`` of the tables' row-wise Adagrad, which TorchRec fuses into the
            backward pass where it can; the dense part has SGD with the same ``lr``.
        machine: fields of TorchRec's planner `Topology` (bandwidths in bytes per millisecond); by
            default all ranks share a host.

    Returns:
        The `DistributedModelParallel` model; the sharded embedding bag collection inside it;
        TorchRec's `ShardingPlan`; and the optimizers to step after the backward pass: row-wise
        Adagrad for data-parallel tables (which TorchRec does not fuse), SGD for the dense part.
    """
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.optim import RowWiseAdagrad

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    each = iter(pooling)

    def constrain(config: Any) -> ParameterConstraints:
        return ParameterConstraints(
            sharding_types=_sharding_types(kind, config.num_embeddings),
            pooling_factors=[float(next(each))] * len(config.feature_names))

    model, plan = shard_by_torchrec(module, RowWiseAdagrad, dict(adagrad), batch_size, constrain,
                                    machine)
    optimizers: list[torch.optim.Optimizer] = []
    if tables := unfused_tables(model):
        optimizers.append(RowWiseAdagrad(tables, **adagrad))
    if dense := [p for n, p in model.named_parameters() if not is_table(n)]:
        optimizers.append(torch.optim.SGD(dense, lr=adagrad["lr"]))
    bags = next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
    return model, bags, plan, optimizers


def _sharding_types(kind: str, num_rows: int) -> list[str] | None:
    """The sharding types allowed for a table; None = all that TorchRec's sharder supports."""
    if kind == "any":
        return None
    if kind == "mixed":
        return ["data_parallel" if num_rows <= MIXED_MAX_ROWS else "table_wise"]
    return [kind]
