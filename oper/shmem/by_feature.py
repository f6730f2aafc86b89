"""Operations per feature: splitting the output of unpooled lookups, and checking ids."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup, SharedBags, is_fit
from oper.tables import TableSpec

#: Treatments of ids outside their tables, named as in FBGEMM (``BoundsCheckMode``).
BOUNDS_MODES = ("fatal", "warning", "ignore")


def key_bounds(batch: Lookup, offsets: torch.Tensor) -> list[int]:
    """Return the offsets of each key's ids, [num_keys + 1]; the last one is the number of ids.

    `offsets`: int64 [num_keys * B + 1], bounds of the bags.
    """
    if batch.batch_size == 0:
        return [0] * (int(batch.key_of.max()) + 2)
    return offsets[::batch.batch_size].tolist()


def by_feature(rows: torch.Tensor, batch: Lookup, offsets: torch.Tensor
               ) -> tuple[torch.Tensor, ...]:
    """Split the output of an unpooled lookup, float32 [N, D], into one tensor per feature, float32
    [ids of the feature, D]. `offsets`: int64 [num_keys * B + 1], bounds of the bags."""
    bounds = key_bounds(batch, offsets)
    # `unsafe`: outputs of `split` could not be changed in place. They overlap nowhere.
    return torch.unsafe_split_with_sizes(
        rows, [bounds[k + 1] - bounds[k] for k in batch.key_of.tolist()])


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the offsets of bags, int64 [n + 1], from their lengths, int64 [n]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class BoundsCheck:
    """The treatment of ids outside their tables, as in FBGEMM.

    ``"fatal"`` raises an error that names feature, table and id. ``"warning"`` and ``"ignore"``
    look up row 0 instead, which also receives the gradient; ``"warning"`` warns once. Unlike in
    FBGEMM, where -1 stands for a pruned row, -1 is outside the table, and lengths that do not fit
    the ids are an error in every mode.

    Args:
        mode: one of `BOUNDS_MODES`, or a ``BoundsCheckMode`` of FBGEMM or TorchRec; ``NONE`` (no
            check) is treated as ``"fatal"``, since the kernels always check.
        features: (feature name, table name) in output order.
        specs: the tables by name.

    Attributes:
        mode: one of `BOUNDS_MODES`.
        num_bad_ids: number of ids replaced so far, counted for each feature that looks them up.

    Raises:
        InvalidInputError: `mode` is none of these.
    """

    def __init__(self, mode: Any, features: Sequence[tuple[str, str]],
                 specs: Mapping[str, TableSpec]) -> None:
        name = str(getattr(mode, "name", mode)).lower().removeprefix("v2_")
        name = "fatal" if name == "none" else name
        if name not in BOUNDS_MODES:
            raise InvalidInputError("cannot check the range of ids", "bounds_check mode", mode,
                                    f"one of {BOUNDS_MODES}", "correct the mode")
        self.mode = name
        self.num_bad_ids = 0
        self._counting = threading.Lock()
        self._features = list(features)
        self._num_rows = [specs[table].num_rows for _, table in features]

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundsCheck:
        twin = copy.copy(self)
        twin._counting = threading.Lock()
        return twin

    def repair(self, batch: Lookup, device: torch.device) -> Lookup:
        """Replace ids outside their tables by row 0.

        Returns `batch` itself if all ids are valid, in mode ``"fatal"``, and for batches that the
        lookup will refuse for another reason. `device` is the tables' device.
        """
        if not self.replaces(batch, device):
            return batch
        return self._replace(batch, key_bounds(batch, offsets_of(batch.lengths.long())),
                             batch.key_of.tolist())

    def replaces(self, batch: Lookup, device: torch.device) -> bool:
        """Return whether `repair` would replace ids of a batch; neither counts nor warns."""
        if self.mode == "fatal" or not is_fit(batch, device) or not batch.ids.numel():
            return False
        lengths = batch.lengths.long()
        offsets = offsets_of(lengths)
        if (lengths < 0).any() or int(offsets[-1]) != batch.ids.numel():
            return False
        bounds = key_bounds(batch, offsets)
        for key, num_rows in set(zip(batch.key_of.tolist(), self._num_rows, strict=True)):
            ids = batch.ids[bounds[key]:bounds[key + 1]]
            if ids.numel():
                low, high = torch.aminmax(ids)
                if int(low) < 0 or int(high) >= num_rows:
                    return True
        return False

    def _replace(self, batch: Lookup, bounds: list[int], keys: list[int]) -> Lookup:
        """Return the batch with invalid ids replaced and one key per feature, since the tables of
        features that share a key may differ in their numbers of rows."""
        ids, lengths, weights = [], [], []
        for key, num_rows, feature in zip(keys, self._num_rows, self._features, strict=True):
            mine = batch.ids[bounds[key]:bounds[key + 1]]
            bad = (mine < 0) | (mine >= num_rows)
            count = int(bad.sum())
            if count and self.mode == "warning" and not self.num_bad_ids:
                warnings.warn(
                    f"feature {feature[0]!r} has the id {int(mine[bad][0])}, which table "
                    f"{feature[1]!r} of {num_rows} rows lacks: row 0 is looked up instead; "
                    "further ones only increase the tables' bounds.num_bad_ids", stacklevel=4)
            with self._counting:
                self.num_bad_ids += count
            ids.append(mine.masked_fill(bad, 0) if count else mine)
            lengths.append(batch.lengths[key * batch.batch_size:(key + 1) * batch.batch_size])
            if batch.weights is not None:
                weights.append(batch.weights[bounds[key]:bounds[key + 1]])
        shared = batch.shared
        if shared is not None:
            shared = SharedBags(shared.bags[batch.key_of], shared.samples)
        return Lookup(torch.cat(ids), torch.cat(lengths), torch.arange(len(keys)),
                      batch.batch_size, torch.cat(weights) if weights else None, batch.pooled,
                      shared, seen=batch.seen, apart=batch.apart)
