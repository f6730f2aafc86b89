"""Maps of raw keys for serving that change in place, key by key."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.shmem.keys.places import (
    BUCKET_BYTES,
    buckets_of_keys,
    empty_buckets,
    num_buckets,
    places_of_slots,
)
from oper.shmem.library import load

# Elements of a tensor that change: their places in it, viewed as a vector of the values' dtype,
# int64 [n], and the new values [n].
Elements = list[tuple[torch.Tensor, torch.Tensor]]


class KeySlots(nn.Module):
    """Maps raw keys to row numbers as a dynamic table's directory does: slot s has row s + 1, and
    unknown keys have row 0.

    Its only state is the buffer ``buckets``, uint8 [num_buckets, BUCKET_BYTES], in the layout of
    csrc/host/keys/directory.h. `oper.KeyMap` does the same with plain torch operators, but a new
    key moves all later ones.

    Args:
        num_slots: number of slots, one less than the table's rows.
        seed: seed of the table's `oper.DynamicTable`.
    """

    buckets: torch.Tensor

    def __init__(self, num_slots: int, seed: int) -> None:
        super().__init__()
        load()
        self._num_slots, self._seed = num_slots, seed
        # On the device of an enclosing ``torch.device`` block.
        self.register_buffer("buckets", torch.zeros(num_buckets(num_slots), BUCKET_BYTES,
                                                    dtype=torch.uint8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of integer keys `ids`, int64 of the same shape."""
        if ids.is_floating_point():
            raise InvalidInputError("cannot map keys to rows", "dtype", ids.dtype, "integers",
                                    "pass integer keys, since floats cannot represent large ones")
        rows: torch.Tensor = torch.ops.oper.keys_rows(
            self.buckets, self._num_slots, self._seed, ids.long().contiguous())
        return rows.view(ids.shape)


def buckets_of(slots: np.ndarray, keys: np.ndarray, num_slots: int, seed: int) -> torch.Tensor:
    """Return ``buckets`` of a `KeySlots` in which `keys` (int64 [n]) have `slots` (int64 [n])."""
    found = torch.from_numpy(empty_buckets(num_slots))
    for places, values in changed_buckets(slots, keys, np.ones(slots.size, bool), num_slots, seed):
        found.view(-1).view(values.dtype)[places] = values
    return found


def changed_buckets(slots: np.ndarray, keys: np.ndarray, is_held: np.ndarray, num_slots: int,
                    seed: int) -> Elements:
    """Return the elements of ``buckets`` of a `KeySlots` that change.

    Args:
        slots: int64 [n], distinct.
        keys: int64 [n], the slots' new keys; without meaning where `is_held` is false.
        is_held: bool [n]; False = the slot has no key any more.
        num_slots, seed: as for `KeySlots`.

    Raises:
        InvalidInputError: there is no such slot, or a key does not belong in its slot.
    """
    what = "cannot change the keys of a table"
    if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise InvalidInputError(what, "slots", [int(slots.min()), int(slots.max())],
                                f"numbers in [0, {num_slots})", "publish weights of the same model")
    buckets, tag_places, hash_places, free_hashes = places_of_slots(slots, num_slots)
    expected, hashes = buckets_of_keys(keys, num_slots, seed)
    bad = np.flatnonzero(is_held & (expected != buckets))
    if bad.size:
        raise InvalidInputError(what, f"key of slot {int(slots[bad[0]])}", int(keys[bad[0]]),
                                f"a key of the slot's bucket {int(buckets[bad[0]])}",
                                "publish weights of a run with the same rows and seed")
    tags = (hashes & np.uint64(0xFF)).astype(np.uint8)
    tags = np.where(is_held, np.maximum(tags, 1), 0).astype(np.uint8)
    stored = np.where(is_held, hashes, free_hashes).view(np.int64)
    return [(torch.from_numpy(tag_places), torch.from_numpy(tags)),
            (torch.from_numpy(hash_places), torch.from_numpy(stored))]
