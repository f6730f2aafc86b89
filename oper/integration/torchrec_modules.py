"""The adapter to TorchRec: embedding collections sharded according to a plan.

`ShardedEmbeddingBags` and `ShardedEmbeddings` are TorchRec ``ShardedModule``s that replace the
unsharded collections of a model. They work without a wrapper, in DistributedDataParallel, in
DistributedModelParallel (which leaves modules that are already sharded as they are) and in
TrainPipelineSparseDist. Their tables appear in ``named_parameters()`` and ``state_dict()`` under
the names and with the shapes of the unsharded module.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import torch
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait, ShardedModule
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
    EmbeddingCollection as QuantEmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from oper.errors import InvalidInputError
from oper.integration.optim.table_optimizer import TableOptimizer
from oper.integration.prefetch import PrefetchQueue
from oper.integration.table_module import (
    FixedEntries,
    TableBag,
    TableEmbedding,
    TableModules,
    refuse_lookup,
    refuse_script,
    skip_in_fully_shard,
)
from oper.integration.variable_batch import padded_lengths, spread
from oper.shmem.batch import Lookup
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_QUANTISED = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)
Collection: TypeAlias = (EmbeddingBagCollection | EmbeddingCollection | QuantEmbeddingBagCollection
              | QuantEmbeddingCollection)


def configs_of(collection: Collection) -> Sequence[BaseEmbeddingConfig]:
    """Return a collection's table configurations in the order of its outputs."""
    if isinstance(collection, _QUANTISED):  # their outputs are grouped by pooling or data type
        return [c for group in collection._key_to_tables.values() for c in group]
    if isinstance(collection, EmbeddingCollection):
        return collection.embedding_configs()
    return collection.embedding_bag_configs()


def table_specs(collection: Collection,
                optimizer: str | Mapping[str, str] = "rowwise_adagrad") -> list[TableSpec]:
    """Describe the tables of a collection, in the order of its outputs.

    Args:
        collection: pooled or unpooled; float, or quantised by TorchRec.
        optimizer: `TableSpec.optimizer` of all tables, or a mapping from table names to it.

    Raises:
        InvalidInputError: a table has an unsupported dtype, is virtual, has pruned rows, or was
            converted to another dtype than its configuration states.
    """
    specs = []
    _check_tables(collection)
    quantised = {DataType.INT8: "int8", DataType.INT4: "int4"}
    known = _DTYPES | (quantised if isinstance(collection, _QUANTISED) else {})
    for config in configs_of(collection):
        dtype = known.get(config.data_type)
        if dtype is None:
            raise InvalidInputError(f"cannot shard table {config.name!r}", "data_type",
                                    config.data_type, f"one of {[d.name for d in known]}",
                                    "convert its weights, and set data_type in its configuration")
        if getattr(config, "use_virtual_table", False):
            raise InvalidInputError(f"cannot shard table {config.name!r}", "use_virtual_table",
                                    True, "False",
                                    "use a plain table, or leave the module out of modules=")
        kept = getattr(config, "num_embeddings_post_pruning", None)
        if kept not in (None, config.num_embeddings):
            raise InvalidInputError(f"cannot shard table {config.name!r}",
                                    "num_embeddings_post_pruning", kept,
                                    f"None or num_embeddings={config.num_embeddings}",
                                    "quantise without pruning")
        pooling = "none"
        if isinstance(config, EmbeddingBagConfig):
            pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
        name = optimizer if isinstance(optimizer, str) else optimizer[config.name]
        specs.append(TableSpec(config.name, config.num_embeddings, config.embedding_dim,
                               tuple(config.feature_names), pooling, dtype, name))
    return specs


def _check_tables(collection: Collection) -> None:
    """Raise InvalidInputError if a table's module no longer has the shape, dtype and options that
    its configuration states, which sharded tables have."""
    if isinstance(collection, _QUANTISED):
        return
    for config in configs_of(collection):
        pooled = isinstance(config, EmbeddingBagConfig)
        tables: Any = collection.embedding_bags if pooled else collection.embeddings
        table = tables[config.name]
        wanted: dict[str, Any] = {"max_norm": None, "scale_grad_by_freq": False,
                                  "padding_idx": None}
        if isinstance(config, EmbeddingBagConfig):
            mean = config.pooling == PoolingType.MEAN
            wanted |= {"mode": "mean" if mean else "sum", "include_last_offset": True}
        found = {option: getattr(table, option, value) for option, value in wanted.items()}
        wanted["shape of weight"] = (config.num_embeddings, config.embedding_dim)
        found["shape of weight"] = tuple(table.weight.shape)
        for option, value in wanted.items():
            if found[option] != value:
                raise InvalidInputError(
                    f"cannot shard table {config.name!r}", option, found[option],
                    f"{value}, as in the configuration of the collection",
                    "undo the change to the table, or leave the module out of modules=")
        declared = _DTYPES.get(config.data_type)
        held = str(table.weight.dtype).removeprefix("torch.")
        # TorchRec's unsharded collection allocates BF16 tables as float16.
        if declared not in (None, held) and (declared, held) != ("bfloat16", "float16"):
            raise InvalidInputError(
                f"cannot shard table {config.name!r}", "dtype of its weight", held,
                f"{declared}, the data_type in its configuration",
                "set data_type in its configuration instead of converting the module")


class _Context(Multistreamable):
    """The context that TorchRec's pipelines pass from input_dist to compute."""

    def __init__(self) -> None:
        self.sharding_contexts: list[Any] = []
        self.features: KeyedJaggedTensor | None = None
        self.prefetched: Future[Lookup] | None = None
        self.shares = False  # `_ShardedCollection._shares` when the lookup was created

    def record_stream(self, stream: Any) -> None:
        """Keep the allocator from reusing the features' memory while `stream` reads it."""
        if self.features is not None:
            self.features.record_stream(stream)


class _ShardedCollection(ShardedModule, FusedOptimizerModule):
    """Base class of pooled and unpooled sharded collections.

    Attributes:
        features: names of the features that the collection looks up, table by table.
        output_dtype: dtype of the returned embeddings.
    """

    _prefix: str  # prefix of the names of table parameters in the state_dict
    _unsharded: type
    _pooled: bool

    def __init__(self, collection: Collection, tables: ShardedTables, names: Mapping[str, str]
                 ) -> None:
        super().__init__()
        quantised = isinstance(collection, _QUANTISED)
        self.output_dtype = collection.output_dtype() if quantised else torch.float32
        self._converts = self.output_dtype != torch.float32  # lookups return float32
        self._configs = list(configs_of(collection))
        self.tables = tables
        self._names = dict(names)
        self.features = [f for c in self._configs for f in c.feature_names]
        self._output_names = [
            n for group in get_embedding_names_by_table(self._configs) for n in group]
        self._key_of: dict[tuple[str, ...], torch.Tensor] = {}
        self._last_keys: tuple[list[str], torch.Tensor] = ([], torch.empty(0, dtype=torch.int64))
        self._is_weighted = False
        self._parameters_of = {
            c.name: f"{self._prefix}.{c.name}.weight" for c in self._configs}
        trains = {p.split(".")[1]: x.requires_grad for p, x in collection.named_parameters()}
        table_module = TableBag if self._pooled else TableEmbedding
        self._table_modules = {
            c.name: table_module(tables, names[c.name], trains.get(c.name, False))
            for c in self._configs}
        setattr(self, self._prefix, TableModules(self._table_modules))
        self._modules: dict[str, torch.nn.Module | None] = FixedEntries(self._modules)
        self._optimizer = TableOptimizer(tables, names, self._parameters_of, {
            name: m.weight for name, m in self._table_modules.items()})
        self._prefetched = PrefetchQueue(tables)
        skip_in_fully_shard(self)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Start preprocessing the ids of the next batch on a separate thread.

        For training loops without `TrainPipelineSparseDist`, which prefetches automatically: call
        this method with the next batch before the current batch's forward pass. Results are
        identical. The forward pass for the same `features` (the same tensor objects) uses the
        preprocessed ids and raises their errors; at most 8 batches are retained, and the oldest is
        dropped first. Not collective, except within `oper.micro_batches`: it starts the entire
        lookup.
        """
        with contextlib.suppress(Exception):  # the forward pass raises it, and notifies all ranks
            self._prefetched.enqueue(features, self.lookup_of(features))

    def lookup_of(self, features: KeyedJaggedTensor) -> Lookup:
        """Return the `Lookup` of a batch, with preprocessed ids if `prefetch` got the batch."""
        if self._prefetched.queued:
            known = self._prefetched.pop(features)
            if known is not None and (known.shared is None or self._shares):
                if known.weights is not None:  # gradients may have been disabled at `prefetch`
                    known = replace(known, weights=self._weights_of(features))
                return known
        if torch._C._get_tracing_state() is not None:
            refuse_script(self)
        last_keys, key_of = self._last_keys
        if last_keys != features.keys():
            key_of = self._match(tuple(features.keys()))
        weights = self._weights_of(features) if self._is_weighted else None
        shared = None
        if features.variable_stride_per_key() or (
                self._pooled and features.inverse_indices_or_none() is not None):
            lengths, size, shared = padded_lengths(features, self.features, self._pooled,
                                                   self._shares)
        else:
            lengths, size = features.lengths(), features.stride()
        return Lookup(features.values().contiguous(), lengths.contiguous(), key_of, size, weights,
                      self._pooled, shared)

    @staticmethod
    def _weights_of(features: KeyedJaggedTensor) -> torch.Tensor:
        weights = features.weights().contiguous()
        return weights if weights.dtype == torch.float32 else weights.float()

    @property
    def _shares(self) -> bool:
        """Whether lookups expand pooled rows of shared bags to samples; if not, `spread` does."""
        return self.tables.shares_bags and not torch.compiler.is_compiling()

    def _match(self, keys: tuple[str, ...]) -> torch.Tensor:
        key_of = self._key_of.get(keys)
        if key_of is None:
            key_of = self._key_of[keys] = self._find(keys)
        # Comparing lists is fast: equal strings are mostly identical objects.
        self._last_keys = (list(keys), key_of)
        return key_of

    def _find(self, keys: tuple[str, ...]) -> torch.Tensor:
        at = {key: k for k, key in enumerate(keys)}
        missing = [f for f in self.features if f not in at]
        if missing:
            raise InvalidInputError("cannot look up", "missing features", missing[:8],
                                    f"all of {self.features[:8]}... among the keys",
                                    "add them to the KeyedJaggedTensor")
        with torch.inference_mode(False):  # cached, and also used outside inference mode
            return torch.tensor([at[f] for f in self.features], dtype=torch.int64)

    # ---- TorchRec's pipelines --------------------------------------------------------------------

    def create_context(self) -> _Context:
        return _Context()

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        # Called one batch early, so ids are preprocessed while the previous batch is trained.
        ctx.shares = self._shares
        with contextlib.suppress(Exception):  # `compute` raises it, and notifies all ranks
            ctx.prefetched = self._prefetched.start(self.lookup_of(features))
        # TrainPipelineSparseDist flattens `.awaitables`; there is nothing to exchange.
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def compute(self, ctx: _Context, dist_input: Any) -> Any:
        ctx.features = dist_input[0]
        if ctx.prefetched:
            return self.tables.lookup(ctx.prefetched.result())
        ctx.shares = self._shares
        try:
            batch = self.lookup_of(ctx.features)
        except Exception as error:
            refuse_lookup(self.tables, error, ctx.features)
            raise
        return self.tables.lookup(batch)

    @property
    def unsharded_module_type(self) -> type:
        return self._unsharded

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optimizer

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.tables.device

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield names of the table parameters, which data-parallel wrappers must ignore."""
        for name in self._parameters_of.values():
            yield f"{prefix}.{name}" if prefix and not prefix.endswith(".") else f"{prefix}{name}"

    def reset_parameters(self) -> None:
        """Initialise all tables by their ``init_fn``, like the unsharded collection. Collective."""
        for config in self._configs:
            assert config.init_fn is not None
            config.init_fn(self._table_modules[config.name].weight)

    def update_shards(self, *_: Any) -> NoReturn:
        """Refuse ``DistributedModelParallel.reshard``, which calls this method."""
        raise InvalidInputError("cannot reshard tables that are placed by a plan", "tables",
                                list(self._names)[:8], "tables sharded by TorchRec",
                                "call oper.migrate(model, plan) with another plan")

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)


class ShardedEmbeddingBags(_ShardedCollection):
    """An ``EmbeddingBagCollection`` sharded according to a plan.

    Args:
        collection: the unsharded collection; only its configuration is used.
        tables: holds the tables, already filled.
        names: maps the configurations' table names to names in `tables`.

    ``forward(KJT) -> KeyedTensor`` with keys in config order (``feature@table`` for a feature of
    several tables), values [B, sum of dims] in `output_dtype` (float32 unless quantised).
    """

    _prefix, _unsharded, _pooled = "embedding_bags", EmbeddingBagCollection, True

    def __init__(self, collection: EmbeddingBagCollection | QuantEmbeddingBagCollection,
                 tables: ShardedTables, names: Mapping[str, str]) -> None:
        super().__init__(collection, tables, names)
        self._is_weighted = collection.is_weighted()
        self._dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]
        self._offsets = [*itertools.accumulate(self._dims, initial=0)]
        self._index = {name: k for k, name in enumerate(self._output_names)}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled embeddings of all features; see the class."""
        try:  # a helper for this would cost time in every step
            batch = self.lookup_of(features)
        except Exception as error:
            refuse_lookup(self.tables, error, features)
            raise
        values = self.tables.lookup(batch)
        if features.inverse_indices_or_none() is not None or self._converts:
            values = self._finish(values, features, self._shares)
        return KeyedTensor(self._output_names, self._dims, values, 1, self._offsets, self._index)

    def output_dist(self, ctx: _Context, output: torch.Tensor) -> LazyAwaitable[KeyedTensor]:
        assert ctx.features is not None
        values = self._finish(output, ctx.features, ctx.shares)
        return LazyNoWait(
            KeyedTensor(self._output_names, self._dims, values, 1, self._offsets, self._index))

    def _finish(self, values: torch.Tensor, features: KeyedJaggedTensor, shares: bool
                ) -> torch.Tensor:
        if not shares and features.inverse_indices_or_none() is not None:
            values = spread(values, self._offsets, self.features, features)
        # Skipped if there is nothing to convert: even a no-op `to` takes 1 % of a step.
        return values.to(self.output_dtype) if self._converts else values

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the unsharded collection's table configurations."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether lookups carry per-sample weights."""
        return self._is_weighted


class ShardedEmbeddings(_ShardedCollection):
    """An ``EmbeddingCollection`` (unpooled embeddings) sharded according to a plan.

    Args:
        collection: the unsharded collection; only its configuration is used.
        tables: holds the tables, already filled.
        names: maps the configurations' table names to names in `tables`.

    ``forward(KJT) -> {feature: JaggedTensor}`` in config order (``feature@table`` for a feature of
    several tables), values [ids of the feature, D] in `output_dtype` (float32 unless quantised),
    lengths as in the input.
    """

    _prefix, _unsharded, _pooled = "embeddings", EmbeddingCollection, False

    def __init__(self, collection: EmbeddingCollection | QuantEmbeddingCollection,
                 tables: ShardedTables, names: Mapping[str, str]) -> None:
        super().__init__(collection, tables, names)
        self._need_indices = collection.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return one embedding per id for every feature; see the class."""
        try:
            batch = self.lookup_of(features)
        except Exception as error:
            refuse_lookup(self.tables, error, features)
            raise
        return self._jagged(self.tables.lookup(batch), features)

    def output_dist(self, ctx: _Context, output: Any
                    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.features is not None
        return LazyNoWait(self._jagged(output, ctx.features))

    def lookup_of(self, features: KeyedJaggedTensor) -> Lookup:
        batch = super().lookup_of(features)
        batch.apart = (len(self.features) > 1 and self.tables.takes_parts
                       and not torch.compiler.is_compiling())
        return batch

    def _jagged(self, values: torch.Tensor | Sequence[torch.Tensor], features: KeyedJaggedTensor
                ) -> dict[str, JaggedTensor]:
        # Not `to_dict`, which also computes offsets; a JaggedTensor computes them on first use.
        keys, at = features.keys(), list(range(len(self.features)))
        if keys != self.features:
            place = {key: k for k, key in enumerate(keys)}
            at = [place[f] for f in self.features]
        lengths = (torch.split(features.lengths(), features.stride_per_key())
                   if features.variable_stride_per_key()
                   else features.lengths().view(len(keys), features.stride()).unbind())
        if isinstance(values, torch.Tensor):
            counts = features.length_per_key()
            # As in `by_feature`; a graph keeps no track of views.
            split = (torch.split if torch.compiler.is_compiling()
                     else torch.unsafe_split_with_sizes)
            values = split(values, [counts[k] for k in at])
        if self._converts:
            values = [x.to(self.output_dtype) for x in values]
        ids = (torch.split(features.values(), features.length_per_key()) if self._need_indices
               else None)
        return {
            name: JaggedTensor(values=part, lengths=lengths[k],
                               weights=None if ids is None else ids[k])
            for name, part, k in zip(self._output_names, values, at, strict=True)}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the unsharded collection's table configurations."""
        return self._configs

    def embedding_dim(self) -> int:
        """Return the number of columns D, which all tables share."""
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        """Whether the outputs' ``weights()`` are the input ids, as in TorchRec."""
        return self._need_indices
