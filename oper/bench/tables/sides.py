"""Contenders of the training benchmark: OPER and TorchRec with the same model and weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from oper.bench.core.planning import rows_by_placement
from oper.bench.core.workload import NO_ID, NUM_DENSE, Workload
from oper.bench.tables.unsharded import EPS, LEARNING_RATE
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.train.config import DLRMConfig
from oper.train.engines import data_parallel, is_table, shard_by_torchrec, unfused_tables
from oper.train.model import dlrm_over, ranks

if TYPE_CHECKING:
    from oper.pipeline import MicroBatchPipeline
    from oper.plan import Plan
    from oper.shmem.tables import ShardedTables

OPTIMIZER = RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS)  # optimizer of OPER's tables
PLAN_KINDS = ("table_wise", "mixed")  # plans of TorchRec, see `sharding_types`
# On CPU, TorchRec has no row-wise, table-row-wise or grid sharding of pooled tables.
CPU_PLAN_KINDS = (*PLAN_KINDS, "column_wise", "any")
MIXED_MAX_ROWS = 10_000  # tables up to this size are data-parallel in the mixed plan


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense part of a DLRM, equal for all contenders.

    Attributes:
        layers: layer sizes; `over` sets ``dim`` to that of the workload's tables.
        dtype: dtype of matrix products' operands, ``"float32"`` or ``"bfloat16"`` (torch's
            autocast); weights, updates and lookups are float32.
        bucket_mb: DDP's bucket size (MiB); the default is that of TorchRec's DDP wrapper.
        as_shipped: whether to use TorchRec's modules between tables and layers, see `dlrm_over`.
    """

    layers: DLRMConfig = field(default_factory=lambda: DLRMConfig(
        dense_layers=(512, 256), over_layers=(512, 512, 256)))
    dtype: str = "float32"
    bucket_mb: float = 25
    as_shipped: bool = False

    def over(self, work: Workload) -> DLRMConfig:
        """The layer sizes with ``dim`` set to that of the workload's tables."""
        return replace(self.layers, dim=work.dim)


@dataclass(slots=True)
class Side:
    """One contender.

    Attributes:
        name: the contender's name in the record.
        model: the module that a step calls.
        collection: the sharded embedding bag collection inside `model`.
        optimizers: optimizers to step after every backward pass.
        gradient: output gradient float32 [B, sum of dims], in the order of the collection's keys;
            None for a whole DLRM, whose loss gives the gradient.
        features: feature names in the order of the configuration.
        plan: summary of the contender's plan, for the benchmark record.
        tables: OPER's tables; None for other contenders.
        pipeline: pipeline that trains OPER's DLRM in micro-batches, or None.
    """

    name: str
    model: nn.Module
    collection: nn.Module
    optimizers: list[torch.optim.Optimizer]
    gradient: torch.Tensor | None
    features: list[str]
    plan: dict[str, Any] = field(default_factory=dict)
    tables: ShardedTables | None = None
    pipeline: MicroBatchPipeline | None = None

    def step(self, batch: Any) -> torch.Tensor:
        """Train on a batch; returns pooled embeddings [B, sum of dims] or a DLRM's logits [B]."""
        if self.pipeline is not None:
            logits: torch.Tensor = self.pipeline.progress(iter([batch]))[1][1]
            return logits
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.gradient is not None:
            out = self.model(batch.sparse_features).values()
            out.backward(self.gradient)
        else:
            loss, (_, out, _) = self.model(batch)
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return out

    def forward(self, batch: Any) -> torch.Tensor:
        """Forward pass without gradient; the result is that of `step`."""
        with torch.no_grad():
            if self.gradient is not None:
                return self.model(batch.sparse_features).values()
            return self.model(batch)[1][1]

    def close(self) -> None:
        """Close OPER's tables, if this is OPER's contender. Collective."""
        if self.tables is not None:
            dist.barrier()
            self.tables.close()

    def traced_step(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A step that also returns the collection's output and its gradient.

        Returns:
            Output of the collection and gradient of the rank's loss with respect to it, each
            float32 [B, sum of dims] with features in the order of the configuration; and logits
            float32 [B], None for a collection alone.
        """
        seen: dict[str, list[torch.Tensor]] = {"pooled": [], "gradient": []}  # by micro-batch

        def in_order(keys: list[str], values: torch.Tensor) -> torch.Tensor:
            blocks = dict(zip(keys, values.detach().chunk(len(keys), dim=1), strict=True))
            return torch.cat([blocks[f] for f in self.features], dim=1)

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            keys, values = list(output.keys()), output.values()
            seen["pooled"].append(in_order(keys, values))
            values.register_hook(lambda g: seen["gradient"].append(in_order(keys, g)))

        handle = self.collection.register_forward_hook(watch)
        try:
            out = self.step(batch).detach()
        finally:
            handle.remove()
        return (torch.cat(seen["pooled"]), torch.cat(seen["gradient"]),
                out.float() if self.gradient is None else None)

    def lookup(self, features: Any) -> torch.Tensor:
        """Pooled embeddings float32 [B, sum of dims] of a KJT, without gradient, features in the
        order of the configuration."""
        with torch.no_grad():
            found = self.collection(features).to_dict()
            return torch.cat([found[f] for f in self.features], dim=1)

    def order_gradient(self, gradient: torch.Tensor, batch: Any) -> None:
        """Set the output gradient, float32 [B, sum of dims] in the order of the configuration.
        `batch` is any batch; a lookup of it shows the order of the collection's keys."""
        with torch.no_grad():
            keys = list(self.collection(batch.sparse_features).keys())
        blocks = dict(zip(self.features, gradient.chunk(len(keys), dim=1), strict=True))
        self.gradient = torch.cat([blocks[k] for k in keys], dim=1).contiguous()

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Dense parameters by name, without the prefixes of wrapper modules."""
        found = {}
        for name, value in self.model.named_parameters():
            if "embedding_bag" not in name:
                plain = name.replace("_dmp_wrapped_module.", "").replace("module.", "")
                found[plain] = value.detach()
        return found


_PERIOD = 1_000_003  # prime, so equal rows are 1,000,003 rows apart for any dim


def _initialise(weight: torch.Tensor, num_rows: int, seed: int) -> torch.Tensor:
    """Fill a table with uniform random numbers in TorchRec's default range, the same for every
    contender.

    Only `_PERIOD` numbers are drawn and then repeated: drawing all of them would take longer than
    the measurement.
    """
    bound = math.sqrt(1.0 / num_rows)
    with torch.no_grad():
        flat = weight.view(-1)
        block = torch.empty(min(_PERIOD, flat.numel()))
        block.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        for at in range(0, flat.numel(), _PERIOD):
            part = flat[at:at + _PERIOD]
            part.copy_(block[:part.numel()])
        return weight


def make_collection(work: Workload, device: str) -> Any:
    """The unsharded `EmbeddingBagCollection` of a workload on device ``"cpu"`` or ``"meta"``."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            num_embeddings=t.num_rows, embedding_dim=t.dim, name=t.name,
            feature_names=list(t.features),
            init_fn=functools.partial(_initialise, num_rows=t.num_rows, seed=work.seed + k))
        for k, t in enumerate(work.tables())]
    return EmbeddingBagCollection(tables=configs, device=torch.device(device))


class BagsOnly(nn.Module):
    """A collection alone, as the child that `DistributedModelParallel` expects."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any) -> Any:
        return self.collection(features)


class Bfloat16(nn.Module):
    """Runs a model under torch's CPU autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(batch)


def make_model(work: Workload, collection: Any, dense: Dense | None) -> Any:
    """A `DLRMTrain` around a collection with dense part `dense`; without one, the collection alone.
    """
    from torchrec.models.dlrm import DLRMTrain

    if dense is None:
        return BagsOnly(collection)
    torch.manual_seed(work.seed)
    model = DLRMTrain(dlrm_over(collection, NUM_DENSE, dense.over(work), dense.as_shipped))
    return Bfloat16(model) if dense.dtype == "bfloat16" else model


def collections_of(model: nn.Module) -> list[Any]:
    """The embedding collections of a model, unsharded or sharded by OPER or TorchRec, in the order
    of its lookups."""
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    from oper.integration.torchrec_modules import ShardedEmbeddingBags, ShardedEmbeddings

    kinds = (ShardedEmbeddingBags, ShardedEmbeddings, ShardedEmbeddingCollection,
             ShardedEmbeddingBagCollection, EmbeddingCollection, EmbeddingBagCollection)
    return [m for m in model.modules() if isinstance(m, kinds)]


def build_oper(work: Workload, dense: Dense | None, plan: Plan, objective: str = "training",
               collection: Any = None) -> Side:
    """Build OPER's contender. Collective.

    Without `dense` the side is the collection alone; with `objective` ``"inference"`` its tables
    are read-only. `collection` has the weights to copy, by default those of `make_collection`.
    """
    from oper.sharding import shard

    if collection is None:
        collection = make_collection(work, "cpu")
    sharded = shard(make_model(work, collection, dense), plan=plan, objective=objective,
                    optimizer=OPTIMIZER if objective == "training" else None)
    bags, = collections_of(sharded)
    optimizers: list[torch.optim.Optimizer] = []
    if dense:
        optimizers.append(torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE))
        sharded = data_parallel(sharded, broadcast_buffers=False, bucket_cap_mb=dense.bucket_mb)
    about = {"rows": rows_by_placement(plan.tables), "step_us": plan.step_us,
             "lower_bound_us": plan.lower_bound_us, "notes": plan.notes}
    return Side("oper", sharded, bags, optimizers, None, work.features, about, bags.tables)


def build_data_parallel(work: Workload) -> Side:
    """Build the contender with all tables on every rank under DDP, with dense gradients.
    Collective."""
    from torchrec.optim import RowWiseAdagrad as Adagrad

    collection = make_collection(work, "cpu")
    model = nn.parallel.DistributedDataParallel(BagsOnly(collection), gradient_as_bucket_view=True)
    return Side("ddp-dense", model, collection,
                [Adagrad(collection.parameters(), lr=LEARNING_RATE, eps=EPS)], None, work.features)


def sharding_types(kind: str, num_rows: int) -> list[str] | None:
    """The sharding types that a table of `num_rows` rows may have; None = all that TorchRec
    supports.

    Args:
        kind: ``"table_wise"``; ``"column_wise"``; ``"mixed"`` (tables of at most `MIXED_MAX_ROWS`
            rows data-parallel, larger ones table-wise); or ``"any"`` (the planner's choice).
        num_rows: rows of the table.
    """
    if kind == "any":
        return None
    if kind == "mixed":
        return ["data_parallel" if num_rows <= MIXED_MAX_ROWS else "table_wise"]
    return [kind]


def build_torchrec(work: Workload, dense: Dense | None, kind: str,
                   machine: Mapping[str, Any] | None = None) -> tuple[Side, Any]:
    """Build TorchRec's contender under one of its plans; returns it and its `ShardingPlan`.
    Collective.

    TorchRec fuses row-wise Adagrad into the backward pass, except for data-parallel tables.

    Args:
        work: the workload.
        dense: the dense part around the tables; None = the collection alone.
        kind: see `sharding_types`.
        machine: see `shard_by_torchrec`.
    """
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.optim import RowWiseAdagrad as Adagrad

    rule = {"lr": LEARNING_RATE, "eps": EPS}
    lengths = {t.name: float(x) for t, x in zip(work.tables(), work.bag_lengths, strict=True)}
    model, sharding = shard_by_torchrec(
        make_model(work, make_collection(work, "meta"), dense), Adagrad, rule,
        work.batch_size // ranks()[1], lambda table: ParameterConstraints(
            sharding_types=sharding_types(kind, table.num_embeddings),
            pooling_factors=[lengths[table.name]]), machine)
    bags, = collections_of(model)
    optimizers: list[torch.optim.Optimizer] = []
    if tables := unfused_tables(model):
        optimizers.append(Adagrad(tables, **rule))
    if dense:
        optimizers.append(torch.optim.SGD(
            [p for n, p in model.named_parameters() if not is_table(n)], lr=LEARNING_RATE))
    placed = {name: f"{where.sharding_type} {where.ranks}"
              for found in sharding.plan.values() for name, where in found.items()}
    side = Side(kind, model, bags, optimizers, None, work.features,
                {"tables": placed, "optimizers": [type(o).__name__ for o in optimizers]})
    return side, sharding


def moved_bytes(work: Workload, ids: Sequence[np.ndarray]) -> dict[str, int]:
    """Bytes that a rank must move per batch, mean over `ids` (its batches).

    Returns:
        ``forward``: one row read per id, and outputs written. ``step``: ``forward``, one output
        gradient read per id, and for each distinct row of the batch a gradient written and read,
        and the row and its 4-byte state read and written. ``distinct_rows``: their number.
    """
    row = work.dim * 4
    forward = distinct = lookups = 0
    for batch in ids:
        found = [x[x != NO_ID] for x in batch]
        read = sum(x.size for x in found)
        forward += read * row + batch.size // work.pooling * row
        distinct += sum(np.unique(x).size for x in found)
        lookups += read
    step = forward + lookups * row + distinct * (2 * row + 2 * (row + 4))
    return {"forward": forward // len(ids), "step": step // len(ids),
            "distinct_rows": distinct // len(ids)}
