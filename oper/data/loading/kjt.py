"""Make batches with a KeyedJaggedTensor from columns of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from oper.data.folder import Folder
from oper.data.loading.groups import Column, joined
from oper.data.loading.windows import Window
from oper.errors import FileFormatError, MissingDependencyError, require
from oper.support import native
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
    try:
        from torchrec.datasets.utils import Batch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except ImportError as error:
        raise MissingDependencyError("cannot make a KeyedJaggedTensor", "import", str(error),
                                     "torchrec",
                                     "install it: pip install 'oper[torchrec]'") from None
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
        width = len(folder.dense)
        dense = [_empty((n, width), torch.float32, pin) for n in counts]
        labels = [_empty((n,), torch.float32, pin) for n in counts]
        to = native.Outputs([x.view(-1).numpy() for x in dense])
        for c, name in enumerate(folder.dense):
            native.take(_floats(window.columns[name]), None, order, size, to,
                        np.full(len(dense), c), width)
        native.take(_floats(window.columns[folder.label]), None, order, size,
                    native.Outputs([x.numpy() for x in labels]), np.zeros(len(labels), np.int64))
        return [torchrec_batch(d, f, x) for d, f, x in zip(
            dense, self._features(window, order, size, counts, pin), labels, strict=True)]

    def _features(self, window: Window, order: np.ndarray, size: int, counts: Sequence[int],
                  pin: bool) -> list[dict[str, Any]]:
        keys = self.folder.sparse
        columns = {n: [joined(pieces)] if n in self.bags else pieces
                   for n, pieces in window.columns.items()}
        lengths = [_empty((len(keys), n), torch.int32, pin).fill_(1) for n in counts]
        for c, name in enumerate(keys):
            if name in self.bags:
                found_lengths = torch.from_numpy(
                    columns[name][0].lengths.astype(np.int32)[order])
                for batch, own in zip(lengths, found_lengths.split(size), strict=False):
                    batch[c] = own
        per_key = [x.sum(1).tolist() if self.bags else [n] * len(keys)
                   for x, n in zip(lengths, counts, strict=True)]
        ends = np.array([np.cumsum([0, *x]) for x in per_key], np.int64)
        values = [_empty((int(e[-1]),), torch.int64, pin) for e in ends]
        weights = [_empty(v.shape, torch.float32, pin).fill_(1) for v in values
                   ] if self.weights else None
        to = native.Outputs([v.numpy() for v in values])
        for c, name in enumerate(keys):
            native.take([p.values for p in columns[name]], columns[name][0].ends, order, size, to,
                        ends[:, c])
        if weights is not None:
            to = native.Outputs([w.numpy() for w in weights])
            for name in self.weights:
                native.take(*self._weights_of(name, columns), order, size, to,
                            ends[:, keys.index(name)])
        found: list[dict[str, Any]] = []
        upto = torch.arange(0 if self.bags else len(keys) * max(counts, default=0) + 1,
                            dtype=torch.int32)
        for k, n in enumerate(counts):
            if self.deduplicate:
                found.append(_deduplicated(keys, self.deduplicate, values[k], lengths[k],
                                           per_key[k]))
                continue
            offsets = None if self.bags else _empty((len(keys) * n + 1,), torch.int32, pin).copy_(
                upto[:len(keys) * n + 1])
            found.append({
                "keys": list(keys), "values": values[k], "lengths": lengths[k].view(-1),
                "offsets": offsets, "stride": n, "length_per_key": per_key[k],
                "weights": None if weights is None else weights[k]})
        return found

    def _weights_of(self, name: str, columns: Mapping[str, list[Column]]
                    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        own, ids = columns[self.weights[name]], columns[name]
        if own[0].ends is not None and ids[0].ends is not None and not np.array_equal(
                own[0].ends, ids[0].ends):
            raise FileFormatError(f"cannot read {str(self.folder.path)!r}",
                                  f"bag lengths of {self.weights[name]!r}", "different",
                                  f"those of {name!r}, one weight per id", "regenerate the column")
        return _floats(own), own[0].ends


def _floats(pieces: Sequence[Column]) -> list[np.ndarray]:
    return [p.values.astype(np.float32, copy=False) for p in pieces]


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
            parts[c], found[c] = torch.from_numpy(kept.values), found[c][first]
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
