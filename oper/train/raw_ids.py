"""Models for serving runs on raw ids: static tables, each with a map from keys to rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from oper.integration.checkpoint.weights import Source, Weights
from oper.integration.keys.keyed_rows import KeyedRows, KeyMap
from oper.tables import TableSpec
from oper.train.names import table_name

_TABLES = "model.sparse_arch.embedding_bag_collection.embedding_bags"
_OF_KEYS = ("weight", "keys", "clock")  # entries of a dynamic table's state


class KeysRead:
    """Counts keys by feature. Copies of a model share one object, so that they count together.

    Args:
        features: names of the features.

    Attributes:
        counts: by feature, numbers of keys looked up so far and of those without a row.
    """

    def __init__(self, features: Iterable[str]) -> None:
        self.counts = {name: (0, 0) for name in features}

    def __deepcopy__(self, memo: dict[int, Any]) -> KeysRead:
        return self

    def add(self, features: Sequence[str], offsets: Sequence[int], rows: torch.Tensor) -> None:
        """Add a batch's `rows`, int64 [N], of which feature k has ``offsets[k]:offsets[k + 1]``."""
        unknown = (rows == 0).nonzero()[:, 0].cpu().numpy()
        found = np.diff(np.searchsorted(unknown, offsets)).tolist()
        for name, (begin, end), missed in zip(features, itertools.pairwise(offsets), found,
                                              strict=True):
            keys, before = self.counts[name]
            self.counts[name] = keys + end - begin, before + missed


class OnRawIds(nn.Module):
    """A DLRM whose ids are keys, any int64; keys without a row read the default row.

    Args:
        model: the DLRM, with ``forward(dense, kjt, ...)`` on row numbers.
        tables: its tables; the number of rows includes the default row.
        device: device of the keys.

    Attributes:
        keys_read: numbers of keys in all calls, by feature.
    """

    def __init__(self, model: nn.Module, tables: Sequence[TableSpec], device: str) -> None:
        super().__init__()
        self.model = model
        with torch.device(device):
            self.to_rows = nn.ModuleList(KeyMap(t.num_rows - 1) for t in tables)
        self._table_of = {f: k for k, t in enumerate(tables) for f in t.features}
        self.keys_read = KeysRead(self._table_of)

    def forward(self, dense: torch.Tensor, keys: Any, *rest: Any) -> Any:
        """Return the DLRM's result for the rows of `keys`, a ``KeyedJaggedTensor``."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        names, offsets = keys.keys(), keys.offset_per_key()
        rows = torch.cat([self.to_rows[self._table_of[f]](keys.values()[begin:end]) for f, (
            begin, end) in zip(names, itertools.pairwise(offsets), strict=True)])
        self.keys_read.add(names, offsets, rows)
        return self.model(dense, KeyedJaggedTensor(
            names, rows, lengths=keys.lengths(), stride=keys.stride()), *rest)


def static_state(source: Source, model: OnRawIds, tables: Sequence[TableSpec],
                 time_to_live: int | None) -> dict[str, torch.Tensor]:
    """Convert the weights of a training run on raw ids to a ``state_dict`` of `OnRawIds`.

    Args:
        source: source of the run's weights, with the state of its dynamic tables.
        model: the model to load the state into.
        tables: tables of `model`.
        time_to_live: `time_to_live` of the dynamic tables; expired keys get no row. None = keys do
            not expire.

    Raises:
        InvalidInputError: the weights are of another model.
        FileFormatError: the source is damaged.
    """
    prefixes = [f"{_TABLES}.{table_name(t.name)}." for t in tables]
    entries = {p: [f"{p}{name}" for name in _OF_KEYS] for p in prefixes}
    dense = [name for name in model.state_dict()
             if not name.startswith(("to_rows.", f"{_TABLES}."))]
    weights = Weights(source, [*dense, *itertools.chain(*entries.values())])
    found = {name: weights.tensor(name) for name in dense}
    for k, (table, prefix) in enumerate(zip(tables, prefixes, strict=True)):
        state = {name: weights.value(name) for name in entries[prefix]}
        known = KeyedRows.of_entries(state, prefix, time_to_live)
        found[f"to_rows.{k}.keys"], found[f"{prefix}weight"] = known.static(table.num_rows)
    return found
