"""Access statistics from a loader of lookups, without importing torch or torchrec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oper.analysis.counting import CountOptions
from oper.analysis.presence import Lookups
from oper.errors import InvalidInputError, require
from oper.stats import AccessStats
from oper.tables import TableSpec, check_unique, plan_names


def collect(
    batches: Iterable[Any],
    model_or_tables: Any,
    *,
    options: CountOptions | None = None,
    bucket_of: Callable[[Any], str] | None = None,
    source: str = "collected",
) -> AccessStats:
    """Count the lookups of a model's tables exactly and return the statistics.

    Args:
        batches: an iterable of batches. A batch is a `KeyedJaggedTensor`, an object with
            `sparse_features` (TorchRec's `Batch`), a mapping ``{feature: (ids, lengths)}`` or
            ``{feature: ids}`` (one id per sample), or a tuple or list that contains some of these.
            Features may be missing in a batch. Pass only batches of the training split.
        model_or_tables: a module that contains `EmbeddingBagCollection`, `EmbeddingCollection`,
            `nn.EmbeddingBag` or `nn.Embedding` (the last two get their path in the module as table
            and feature name), or a sequence of `TableSpec`.
        options: presence windows and limits of memory and time.
        bucket_of: returns the label of a batch's time bucket, for drift; batches of a bucket should
            be consecutive.
        source: description of the origin of the lookups, free text.

    Returns:
        Statistics by table name. Presence is measured on sampled windows (see `PresenceSampler`),
        everything else on all ids.

    Raises:
        InvalidInputError: an id is out of range, a batch has an unknown type, the model has no
            tables, or no batch has a feature of some table.
    """
    if _is_kjt(batches) or isinstance(batches, Mapping) or not (
            hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise InvalidInputError("cannot collect statistics", "batches", type(batches).__name__,
                                "batches that can be iterated over",
                                "pass a loader, or a list of one batch")
    collector = Collector(model_or_tables, options)
    for batch in batches:
        collector.add(batch, bucket_of(batch) if bucket_of else None)
    return collector.finish(source)


class Collector:
    """Counts batches one at a time, e.g. in a running training loop, for `AccessStats`."""

    def __init__(self, model_or_tables: Any, options: CountOptions | None = None) -> None:
        """Start a count; arguments as for `collect`. A table without features has one feature of
        the table's name."""
        options = options or CountOptions()
        self._tables = tables_of(model_or_tables)
        self._counters = options.counters([t.name for t in self._tables],
                                          [t.num_rows for t in self._tables])
        self._num_samples = 0
        self._seen: set[str] = set()
        self._share = options.max_overhead
        self._begin: float | None = None
        self._longest = 0.0
        self.seconds = 0.0     # time spent on counting; measured only with `max_overhead`
        self.num_left_out = 0  # batches skipped because of `max_overhead`

    def add(self, batch: Any, bucket: str | None = None) -> None:
        """Count one batch, in a form that `collect` accepts; raises InvalidInputError.

        With `max_overhead`, a batch is skipped (and counted in `num_left_out`) if the time spent
        on counting plus that of the slowest batch so far would exceed this share of the time since
        the first call.
        """
        if self._share is None:
            self._add(batch, bucket)
            return
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        elif self.seconds + self._longest > self._share * (now - self._begin):
            self.num_left_out += 1
            return
        self._add(batch, bucket)
        took = time.perf_counter() - now
        self.seconds, self._longest = self.seconds + took, max(self._longest, took)

    def _add(self, batch: Any, bucket: str | None) -> None:
        features: dict[str, Lookups] = {}
        num_samples = 0
        for source in _sources(batch):
            found, samples = _read(source)
            num_samples = max(num_samples, samples)
            twice = sorted(features.keys() & found.keys())
            require("cannot read a batch", "pass each feature in one part of the batch only",
                    ("repeated features", twice, not twice, "none"))
            features.update(found)
        for table, counter in zip(self._tables, self._counters, strict=True):
            lookups = [features[f] for f in table.features or (table.name,) if f in features]
            if lookups:
                counter.add(lookups, bucket)
        self._seen.update(features)
        self._num_samples += num_samples

    def finish(self, source: str = "collected") -> AccessStats:
        """Return the statistics of all batches; raises InvalidInputError if no batch has a feature
        of some table."""
        unseen = [t.name for t in self._tables
                  if not self._seen.intersection(t.features or (t.name,))]
        require("cannot collect statistics of tables without lookups",
                "pass batches with these features, or only the other tables",
                ("tables", unseen, not unseen, "at least one feature of each table in the batches, "
                 f"which have only {sorted(self._seen)[:12]}"))
        return AccessStats(
            self._num_samples,
            {t.name: c.finish() for t, c in zip(self._tables, self._counters, strict=True)},
            source)


def tables_of(model_or_tables: Any) -> tuple[TableSpec, ...]:
    """Return the tables of a module tree or of a sequence of `TableSpec`.

    Modules are recognised by their methods and attributes: `embedding_bag_configs()`,
    `embedding_configs()`, or `num_embeddings` and `embedding_dim`. If tables of two collections
    have the same name, the path of the collection becomes a prefix, as in `oper.shard`. Raises
    InvalidInputError if there is no table.
    """
    if hasattr(model_or_tables, "named_modules"):
        found = list(_module_tables(model_or_tables))
        names = plan_names((path, t.name) for path, t in found)
        tables = [replace(t, name=names[path, t.name]) for path, t in found]
        require("cannot collect statistics", "pass the model or its tables",
                ("model", type(model_or_tables).__name__, bool(tables),
                 "a module with embedding tables"))
        return check_unique(tables)
    if isinstance(model_or_tables, TableSpec):
        return (model_or_tables,)
    if isinstance(model_or_tables, Iterable):
        tables = list(model_or_tables)
        if all(isinstance(t, TableSpec) for t in tables):
            return check_unique(tables)
    raise InvalidInputError("cannot collect statistics", "model_or_tables",
                            type(model_or_tables).__name__, "a module or a sequence of TableSpec",
                            "pass the model or its tables")


def _module_tables(model: Any) -> Iterator[tuple[str, TableSpec]]:
    """Yield the tables with their own names, each preceded by the path of its module."""
    collections: list[str] = []
    for path, module in model.named_modules():
        if any(path == c or path.startswith(f"{c}." if c else "") for c in collections):
            continue  # inside a collection whose tables are already listed
        for method in ("embedding_bag_configs", "embedding_configs"):
            if callable(getattr(module, method, None)):
                collections.append(path)
                for config in getattr(module, method)():
                    yield path, TableSpec(
                        config.name, int(config.num_embeddings), int(config.embedding_dim),
                        tuple(config.feature_names))
                break
        else:
            rows, dim = (getattr(module, n, None) for n in ("num_embeddings", "embedding_dim"))
            if isinstance(rows, int) and isinstance(dim, int):
                # The names that oper.shard uses; a bare module has the empty path.
                yield path, TableSpec(path or "weight", rows, dim, (path,))


def _is_kjt(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths"))


def _sources(batch: Any) -> list[Any]:
    """List the `KeyedJaggedTensor`s and mappings in a batch."""
    if isinstance(batch, Mapping) or _is_kjt(batch):
        return [batch]
    if hasattr(batch, "sparse_features"):
        return _sources(batch.sparse_features)
    if isinstance(batch, tuple | list):
        found = [part for part in batch if isinstance(part, Mapping) or _is_kjt(part)
                 or hasattr(part, "sparse_features")]
        if found:
            return [source for part in found for source in _sources(part)]
    raise InvalidInputError(
        "cannot read a batch", "type", type(batch).__name__,
        "a KeyedJaggedTensor, an object with sparse_features, {feature: (ids, lengths)}, or a "
        "tuple with one of these", "pass the part of the batch that has the ids")


def _read(source: Any) -> tuple[dict[str, Lookups], int]:
    """Return the lookups by feature, and the number of samples."""
    if isinstance(source, Mapping):
        features = {str(name): _pair(str(name), value) for name, value in source.items()}
        return features, max((x.num_samples for x in features.values()), default=0)
    return _read_kjt(source)


def _pair(name: str, value: Any) -> Lookups:
    if isinstance(value, tuple | list) and len(value) == 2 and not np.isscalar(value[0]):
        return Lookups(_array(value[0]), None if value[1] is None else _array(value[1]))
    array = _array(value)
    require(f"cannot read feature {name!r}", "convert the ids to a 1-d integer array",
            ("ids", (array.dtype.name, array.shape), array.dtype.kind in "iu" and array.ndim == 1,
             "(ids, lengths) or a flat integer array"))
    return Lookups(array)


def _read_kjt(kjt: Any) -> tuple[dict[str, Lookups], int]:
    names: Sequence[str] = list(kjt.keys())
    if callable(getattr(kjt, "variable_stride_per_key", None)) and kjt.variable_stride_per_key():
        raise InvalidInputError("cannot read a KeyedJaggedTensor", "stride_per_key",
                                kjt.stride_per_key(), "one batch size for all features",
                                "expand the de-duplicated features first")
    values, lengths = _array(kjt.values()), _array(kjt.lengths())
    if not names:
        return {}, 0
    if lengths.size % len(names) or int(lengths.sum()) != values.size:
        raise InvalidInputError(
            "cannot read a KeyedJaggedTensor", "len(lengths), sum(lengths)",
            (lengths.size, int(lengths.sum())),
            f"a multiple of {len(names)} (features), and len(values)={values.size}",
            "build it with one length per feature and sample")
    per_feature = lengths.reshape(len(names), -1)
    ends = np.concatenate([[0], np.cumsum(per_feature.sum(axis=1))])
    features = {}
    for k, name in enumerate(names):
        bag_lengths = per_feature[k]
        one_each = bag_lengths.size > 0 and bag_lengths.min() == 1 == bag_lengths.max()
        features[name] = Lookups(values[ends[k]:ends[k + 1]], None if one_each else bag_lengths)
    return features, per_feature.shape[1]


def _array(value: Any) -> np.ndarray:
    """Return a NumPy view (or a copy from a device) of a tensor, array or sequence."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    # An empty list would become a float array.
    return array if array.size or array.dtype.kind in "iu" else array.astype(np.int64)
