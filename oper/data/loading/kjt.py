"""Make batches with a KeyedJaggedTensor from columns of rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from oper.data.folder import Folder
from oper.data.loading.groups import Column, joined
from oper.data.loading.windows import Window
from oper.errors import FileFormatError, needs, require
from oper.support.own_rows import note_own_rows


def torchrec_batch(dense: torch.Tensor, features: dict[str, Any], labels: torch.Tensor) -> Any:
    """Make a TorchRec ``Batch`` of B samples.

    Args:
        dense: float32 [B, D].
        features: arguments of the KeyedJaggedTensor. Offsets are computed here if not given, so
            that their time counts as loading, not as training.
        labels: float32 [B].

    Raises:
        MissingDependencyError: TorchRec is not installed.
    """
    with needs("cannot make a KeyedJaggedTensor", "oper[torchrec]"):
        from torchrec.datasets.utils import Batch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    kjt = KeyedJaggedTensor(**features)
    kjt.offsets()
    return Batch(dense, kjt, labels)


class Assembly:
    """Makes batches from windows of rows.

    Attributes:
        columns: names of the Parquet columns to read.
        bags: names of the columns that hold lists.
        weights: by sparse column, the name of the Parquet column with its per-sample weights.
        deduplicate: sparse columns whose equal bags in a batch are stored once.
    """

    def __init__(self, folder: Folder, weights: Mapping[str, str], deduplicate: Sequence[str]
                 ) -> None:
        what = "cannot make a loader"
        unknown = [n for n in [*weights, *deduplicate] if n not in folder.sparse]
        require(what, "name sparse columns of the folder",
                ("unknown columns in weights, deduplicate", unknown, not unknown,
                 f"only sparse columns, which are {list(folder.sparse)}"))
        require(what, "leave one of them out: equal bags may differ in their weights",
                ("weights, deduplicate", (dict(weights), tuple(deduplicate)),
                 not weights or not deduplicate, "one of them"))
        require(what, "map sparse columns to columns of weights",
                ("weights", dict(weights), not set(weights.values()) & set(folder.sparse),
                 "values that are names of numeric columns, not of sparse ones"))
        self.folder, self.weights, self.deduplicate = folder, dict(weights), tuple(deduplicate)
        self.columns = tuple(dict.fromkeys(
            (folder.label, *folder.dense, *folder.sparse, *weights.values())))
        self.bags = frozenset([*folder.multi_hot, *(w for n, w in weights.items()
                                                    if n in folder.multi_hot)])

    def batches(self, window: Window, size: int, wanted: Sequence[int], pin: bool) -> list[Any]:
        """Make the batches `wanted` of a window, see `torchrec_batch`.

        Args:
            window: the rows; batch k has the rows `window.order[k * size:(k + 1) * size]`.
            size: samples of a full batch.
            wanted: indices of batches in the window, ascending. A batch past the last row is empty.
            pin: whether to use page-locked memory.
        """
        order, folder = window.order, self.folder
        counts = [min(size, max(0, order.size - k * size)) for k in wanted]
        if sum(counts) < order.size:
            order = np.concatenate([order[k * size:(k + 1) * size] for k in wanted])
        columns = {name: joined(pieces).take(order) for name, pieces in window.columns.items()}
        self._check_weights(columns)
        made = []
        for start, stop in itertools.pairwise(np.cumsum([0, *counts]).tolist()):
            rows = {name: column.part(start, stop) for name, column in columns.items()}
            dense = _empty((stop - start, len(folder.dense)), torch.float32, pin)
            for c, name in enumerate(folder.dense):
                dense.numpy()[:, c] = rows[name].values
            labels = _empty((stop - start,), torch.float32, pin)
            labels.numpy()[:] = rows[folder.label].values
            made.append(torchrec_batch(dense, self._features(rows, stop - start, pin), labels))
        return made

    def _features(self, rows: Mapping[str, Column], size: int, pin: bool) -> dict[str, Any]:
        """Make the arguments of the KeyedJaggedTensor of a batch, whose `size` rows are `rows`."""
        keys = self.folder.sparse
        ids = [rows[name] for name in keys]
        lengths = _empty((len(keys), size), torch.int32, pin).fill_(1)
        for c, column in enumerate(ids):
            if column.ends is not None:
                lengths[c] = torch.from_numpy(column.lengths)
        per_key = [column.values.size for column in ids]
        values = _empty((sum(per_key),), torch.int64, pin)
        np.concatenate([column.values for column in ids], out=values.numpy())
        if self.deduplicate:
            return _deduplicated(keys, self.deduplicate, values, lengths, per_key)
        weights = None
        if self.weights:
            weights = _empty(values.shape, torch.float32, pin)
            np.concatenate([rows[self.weights[name]].values if name in self.weights
                            else np.ones(count, np.float32)
                            for name, count in zip(keys, per_key, strict=True)],
                           out=weights.numpy())
        offsets = None if self.bags else torch.arange(values.numel() + 1, dtype=torch.int32,
                                                      pin_memory=pin)
        return {"keys": list(keys), "values": values, "lengths": lengths.view(-1),
                "offsets": offsets, "stride": size, "length_per_key": per_key, "weights": weights}

    def _check_weights(self, columns: Mapping[str, Column]) -> None:
        for name, own in self.weights.items():
            ends, own_ends = columns[name].ends, columns[own].ends
            if name in self.bags and (ends is None or own_ends is None
                                      or not np.array_equal(own_ends, ends)):
                raise FileFormatError(f"cannot read {str(self.folder.path)!r}",
                                      f"bag lengths of {own!r}", "different",
                                      f"those of {name!r}, one weight per id",
                                      "regenerate the column")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=pin)


def _deduplicated(keys: Sequence[str], chosen: Sequence[str], values: torch.Tensor,
                  lengths: torch.Tensor, per_key: Sequence[int]) -> dict[str, Any]:
    """Make the arguments of a KeyedJaggedTensor in which equal bags of some keys are stored once.

    Args:
        keys: names of the C features.
        chosen: names of the features to deduplicate; distinct bags are in the order of their first
            occurrence.
        values: int64 [L], key by key.
        lengths: int32 [C, B].
        per_key: number of values of each key.

    Returns:
        Values and lengths of the distinct bags, the number of bags and of values by key, and
        ``inverse_indices``: the keys, and the index of each sample's bag, int64 [C, B].
    """
    size = lengths.shape[1]
    own = torch.arange(size)
    inverse = [own] * len(keys)
    parts, found, strides, counts = list(values.split(list(per_key))), list(lengths), [], []
    for c, name in enumerate(keys):
        if name in chosen:
            ids, ends = parts[c].numpy(), np.concatenate([[0], np.cumsum(found[c].numpy())])
            # Each bag becomes a binary value; Arrow numbers these by first occurrence.
            bags = pa.Array.from_buffers(pa.large_binary(), size, [
                None, pa.py_buffer(8 * ends.astype(np.int64)), pa.py_buffer(ids)])
            places = bags.dictionary_encode().indices.to_numpy()
            first = np.unique(places, return_index=True)[1]
            if len(first) == size:  # no two bags are equal
                strides.append([size])
                counts.append(parts[c].numel())
                continue
            inverse[c] = torch.from_numpy(places.astype(np.int64))
            kept = Column(ids, ends).take(first)
            parts[c], found[c] = torch.tensor(kept.values), found[c][first]
        strides.append([found[c].numel()])
        counts.append(parts[c].numel())
    pin = values.is_pinned() if values.numel() and torch.cuda.is_available() else False
    joined = [torch.cat(parts), torch.cat(found), torch.stack(inverse)]
    joined = [x.pin_memory() for x in joined] if pin else joined
    if all(x is own for x in inverse):
        note_own_rows(joined[2])
    return {"keys": list(keys), "values": joined[0], "lengths": joined[1],
            "stride_per_key_per_rank": strides, "length_per_key": counts,
            "inverse_indices": (list(keys), joined[2])}
