"""Models for serving a run: on row numbers, or on raw ids with maps from keys to rows."""

from __future__ import annotations

import itertools
import logging
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from oper.integration.checkpoint.follow import KeyChange
from oper.integration.checkpoint.weights import Source, Weights
from oper.integration.keys.key_slots import Elements, KeySlots, buckets_of, changed_buckets
from oper.tables import TableSpec
from oper.train.config import DLRMConfig
from oper.train.model import build_dlrm
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
        """Add a batch's `rows`, int64 [N]; feature k has ``offsets[k]:offsets[k + 1]``."""
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
        seed: seed of the dynamic tables.
        device: device of the maps.

    Attributes:
        keys_read: numbers of keys in all calls, by feature.
    """

    def __init__(self, model: nn.Module, tables: Sequence[TableSpec], seed: int, device: str
                 ) -> None:
        super().__init__()
        self.model = model
        with torch.device(device):
            self.to_rows = nn.ModuleList(KeySlots(t.num_rows - 1, seed) for t in tables)
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


def served_state(source: Source, model: nn.Module, tables: Sequence[TableSpec],
                 seed: int, time_to_live: int | None) -> dict[str, torch.Tensor]:
    """Convert the weights of a training run on raw ids to a ``state_dict`` of `OnRawIds`.

    Args:
        source: source of the run's weights, with the state of its dynamic tables.
        model: the `OnRawIds` to load the state into.
        tables: tables of `model`.
        seed, time_to_live: settings of the dynamic tables; expired keys get no row.

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
        records, clock = (weights.tensor(f"{prefix}{name}") for name in ("keys", "clock"))
        oldest = 0 if time_to_live is None else max(0, int(clock) - time_to_live)
        slots = (records[:, 2] >= oldest).nonzero()[:, 0]
        found[f"to_rows.{k}.buckets"] = buckets_of(
            slots.numpy(), records[slots, 0].numpy(), table.num_rows - 1, seed)
        found[f"{prefix}weight"] = weights.value(f"{prefix}weight")
    return found


def changed_maps(tables: Sequence[TableSpec], seed: int, keys: Mapping[str, KeyChange]
                 ) -> dict[str, Elements]:
    """Return the elements of the maps of `OnRawIds` that change, by ``state_dict`` key of each map.

    Args:
        tables: tables of the model.
        seed: seed of the dynamic tables.
        keys: the changed keys by table, as in a `Change`.
    """
    found: dict[str, Elements] = {}
    for k, table in enumerate(tables):
        change = keys.get(table_name(table.name))
        found[f"to_rows.{k}.buckets"] = [] if change is None else changed_buckets(
            change.slots, change.keys, change.is_held, table.num_rows - 1, seed)
    return found


def build_trained(tables: tuple[TableSpec, ...], num_dense: int, config: dict[str, Any],
                  device: str, seed: int | None = None) -> nn.Module:
    """Build the DLRM of a training run, without its loss, on `device`.

    With `seed`, that of its dynamic tables, it is an `OnRawIds`, which maps raw ids to rows first.
    """
    # Importing TorchRec logs a warning that does not concern the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    model: Any = build_dlrm(tables, num_dense, DLRMConfig(**config), 0, device)
    if seed is not None:
        return OnRawIds(model.model, tables, seed, device).eval()
    return typing.cast("nn.Module", model.model.eval())
