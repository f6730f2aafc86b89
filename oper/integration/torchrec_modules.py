"""TorchRec's edge: a pooled collection whose tables a plan has placed.

`ShardedEmbeddingBags` is a TorchRec ``ShardedModule`` that can be put straight into a model: it
works unwrapped, under DistributedDataParallel, under DistributedModelParallel (which keeps modules
that are sharded already) and in TrainPipelineSparseDist. Its tables are no parameters: they appear
in ``state_dict`` under the names and with the shapes of the unsharded module, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait, ShardedModule
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from oper.errors import InvalidInputError, fail
from oper.integration.table_state import load_entry, table_entry
from oper.shmem.optimizers import SGD, Optimizer, RowWiseAdagrad
from oper.shmem.runtime import Lookup, ShardedTables
from oper.tables import TableSpec

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}


def table_specs(collection: EmbeddingBagCollection, optimizer: str = "rowwise_adagrad"
                ) -> list[TableSpec]:
    """The tables of a collection as plain data."""
    specs = []
    for config in collection.embedding_bag_configs():
        dtype = _DTYPES.get(config.data_type)
        if dtype is None:
            raise InvalidInputError(
                fail(f"cannot shard table {config.name!r}", "data_type", config.data_type,
                     f"one of {[d.name for d in _DTYPES]}", "convert the table"))
        pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
        specs.append(TableSpec(config.name, config.num_embeddings, config.embedding_dim,
                               tuple(config.feature_names), pooling, dtype, optimizer))
    return specs


def tagged_optimizer(parameter: torch.Tensor) -> Optimizer | None:
    """The optimizer that ``apply_optimizer_in_backward`` has tagged a table with, or None.

    Raises:
        InvalidInputError: an optimizer or an argument that is not supported.
    """
    classes = getattr(parameter, "_optimizer_classes", None)
    if not classes:
        return None
    kwargs: Mapping[str, Any] = getattr(parameter, "_optimizer_kwargs", [{}])[0]
    name = classes[0].__name__
    what = "cannot use the optimizer of apply_optimizer_in_backward"
    known = {"SGD": {"lr"}, "RowWiseAdagrad": {"lr", "eps"}}
    if len(classes) != 1 or name not in known:
        raise InvalidInputError(
            fail(what, "optimizer", [c.__name__ for c in classes], f"one of {sorted(known)}",
                 "tag the tables with one of these"))
    neutral = {"weight_decay": 0, "momentum": 0, "dampening": 0, "nesterov": False, "lr_decay": 0,
               "initial_accumulator_value": 0, "maximize": False}
    for key, value in kwargs.items():
        if key not in known[name] and (key not in neutral or value != neutral[key]):
            raise InvalidInputError(
                fail(what, f"{name}.{key}", value, f"{neutral.get(key, 'not given')}",
                     "leave that argument out"))
    if name == "SGD":
        return SGD(lr=float(kwargs.get("lr", 1e-3)))
    return RowWiseAdagrad(lr=float(kwargs.get("lr", 1e-2)), eps=float(kwargs.get("eps", 1e-10)))


class _Context(Multistreamable):
    """What TorchRec's pipelines carry between input_dist and compute."""

    def __init__(self) -> None:
        self.sharding_contexts: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        """Nothing of ours lives on a stream."""


class _FusedOptimizer(FusedOptimizer):
    """The face that learning-rate schedulers and TorchRec see; updates happen in backward."""

    def __init__(self, tables: ShardedTables, names: list[str]) -> None:
        self._tables = tables
        # Keys need tensors to stand for the tables, which are no parameters.
        params = {f"embedding_bags.{n}.weight": torch.empty(0) for n in names}
        group = tables.param_groups[0]
        group["params"] = list(params.values())
        super().__init__(params, {}, tables.param_groups)

    def step(self, closure: Any = None) -> None:
        """Nothing to do: the backward pass has updated the tables."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to do: table gradients are never stored."""


class ShardedEmbeddingBags(
    ShardedModule[KeyedJaggedTensor, torch.Tensor, KeyedTensor, _Context], FusedOptimizerModule
):
    """An ``EmbeddingBagCollection`` executed by a plan.

    Args:
        collection: the unsharded collection; gives configuration, not memory.
        tables: its tables, already filled.
        names: table names in `tables` by config name.

    ``forward(KJT) -> KeyedTensor`` with keys in config order (``feature@table`` for a feature of
    several tables), values float32 [B, sum of dims].
    """

    def __init__(self, collection: EmbeddingBagCollection, tables: ShardedTables,
                 names: Mapping[str, str]) -> None:
        super().__init__()
        configs = collection.embedding_bag_configs()
        self._configs = configs
        self._is_weighted = collection.is_weighted()
        self.tables = tables
        self._names = dict(names)
        self._features = [f for c in configs for f in c.feature_names]
        self._output_names = [n for group in get_embedding_names_by_table(configs) for n in group]
        self._dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        self._offsets = [0]
        for dim in self._dims:
            self._offsets.append(self._offsets[-1] + dim)
        self._index = {name: k for k, name in enumerate(self._output_names)}
        self._key_of: dict[tuple[str, ...], torch.Tensor] = {}
        self._optimizer = _FusedOptimizer(tables, [c.name for c in configs])

    # ---- lookup ----------------------------------------------------------------------------------

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of all features."""
        return self._keyed(self.tables.lookup(self._lookup(features)))

    def _lookup(self, features: KeyedJaggedTensor) -> Lookup:
        if features.variable_stride_per_key():
            raise InvalidInputError(
                fail("cannot look up", "KeyedJaggedTensor", "variable batch per feature",
                     "one batch size for all features", "pad the batch"))
        keys = tuple(features.keys())
        key_of = self._key_of.get(keys)
        if key_of is None:
            key_of = self._match(keys)
        weights = features.weights().contiguous() if self._is_weighted else None
        if weights is not None and weights.dtype != torch.float32:
            weights = weights.float()
        return Lookup(features.values().contiguous(), features.lengths().contiguous(), key_of,
                      features.stride(), weights)

    def _match(self, keys: tuple[str, ...]) -> torch.Tensor:
        at = {key: k for k, key in enumerate(keys)}
        missing = [f for f in self._features if f not in at]
        if missing:
            raise InvalidInputError(
                fail("cannot look up", "missing features", missing[:8],
                     f"keys {self._features[:8]}...", "add them to the KeyedJaggedTensor"))
        key_of = torch.tensor([at[f] for f in self._features], dtype=torch.int64)
        self._key_of[keys] = key_of
        return key_of

    def _keyed(self, values: torch.Tensor) -> KeyedTensor:
        return KeyedTensor(self._output_names, self._dims, values, 1, self._offsets, self._index)

    # ---- TorchRec's pipelines --------------------------------------------------------------------

    def create_context(self) -> _Context:
        return _Context()

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor
                   ) -> Awaitable[Awaitable[Any]]:
        # TrainPipelineSparseDist flattens `.awaitables`; there is nothing to exchange.
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def compute(self, ctx: _Context, dist_input: Any) -> torch.Tensor:
        return self.tables.lookup(self._lookup(dist_input[0]))

    def output_dist(self, ctx: _Context, output: torch.Tensor) -> LazyAwaitable[KeyedTensor]:
        return LazyNoWait(self._keyed(output))

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        return EmbeddingBagCollection

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optimizer

    # ---- what the unsharded collection offers ----------------------------------------------------

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configurations, as the unsharded collection."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether lookups carry per-sample weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return torch.device("cpu")

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables, which data-parallel wrappers must leave alone."""
        for config in self._configs:
            yield _join(prefix, f"embedding_bags.{config.name}.weight")

    # ---- state -----------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool
                            ) -> None:
        for config in self._configs:
            destination[f"{prefix}embedding_bags.{config.name}.weight"] = table_entry(
                self.tables, self._names[config.name])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str,
                              local_metadata: Mapping[str, Any], strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str],
                              error_msgs: list[str]) -> None:
        wanted = {f"{prefix}embedding_bags.{c.name}.weight": c.name for c in self._configs}
        for key, name in wanted.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            try:
                load_entry(self.tables, self._names[name], state_dict[key])
            except InvalidInputError as error:
                error_msgs.append(str(error))
        unexpected_keys.extend(k for k in state_dict if k.startswith(prefix) and k not in wanted)
        self.tables.publish()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and not prefix.endswith(".") else f"{prefix}{name}"
