"""Maps of raw keys that change in place: equal to a dict, and published atomically."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError
from oper.integration.keys.key_slots import KeySlots, buckets_of, changed_buckets
from oper.shmem.keys.places import slots_of_keys

SEED = 5
EXTREMES = [-(1 << 63), (1 << 63) - 1, 0, -1]


def keys_in_slots(rng: np.random.Generator, n: int, num_slots: int
                  ) -> tuple[np.ndarray, np.ndarray]:
    """At most n keys with a slot, and their slots."""
    keys = np.unique(np.concatenate([EXTREMES, rng.integers(-(1 << 63), 1 << 63, n)])[:n])
    slots = slots_of_keys(keys, np.ones(keys.size, np.int64), num_slots, SEED)
    return keys[slots >= 0], slots[slots >= 0]


def assert_maps(to_rows: KeySlots, held: dict[int, int], others: np.ndarray) -> None:
    keys = np.concatenate([np.array(list(held), np.int64), others])
    want = [held.get(int(k), -1) + 1 for k in keys]
    assert to_rows(torch.from_numpy(keys)).tolist() == want


@pytest.mark.parametrize("num_slots", [1, 39, 64, 65, 300, 5000])
def test_changes_in_place_equal_a_dict(num_slots: int) -> None:
    """Keys come, go and replace one another; the result equals a new map, bit for bit."""
    rng = np.random.default_rng(num_slots)
    to_rows = KeySlots(num_slots, SEED)
    none = np.zeros(0, np.int64)
    to_rows.buckets.copy_(buckets_of(none, none, num_slots, SEED))
    held: dict[int, int] = {}
    for _ in range(8):
        keys, slots = keys_in_slots(rng, 2 * num_slots // 3 + 1, num_slots)
        some = (rng.random(keys.size) < 0.5) & ~np.isin(keys, list(held))
        keys, slots = keys[some], slots[some]
        is_held = rng.random(keys.size) < 0.7
        for places, values in changed_buckets(slots, keys, is_held, num_slots, SEED):
            to_rows.buckets.view(-1).view(values.dtype)[places] = values
        gone = set(slots.tolist())
        held = {k: s for k, s in held.items() if s not in gone}
        held |= {int(k): int(s) for k, s, h in zip(keys, slots, is_held, strict=True) if h}
        assert_maps(to_rows, held, rng.integers(-(1 << 63), 1 << 63, 50))
        fresh = buckets_of(np.array(list(held.values()), np.int64),
                           np.array(list(held), np.int64), num_slots, SEED)
        assert torch.equal(fresh, to_rows.buckets)


def test_a_large_lookup_of_any_shape_and_type() -> None:
    keys, slots = keys_in_slots(np.random.default_rng(0), 3000, 5000)
    to_rows = KeySlots(5000, SEED)
    to_rows.buckets.copy_(buckets_of(slots, keys, 5000, SEED))
    many = torch.from_numpy(keys).repeat(50)[:140_000].view(7, -1)
    assert torch.equal(to_rows(many)[0, :keys.size], torch.from_numpy(slots) + 1)
    assert to_rows(torch.zeros(0, 3, dtype=torch.int32)).shape == (0, 3)
    with pytest.raises(InvalidInputError, match="dtype"):
        to_rows(torch.zeros(1))


def test_keys_of_other_slots_are_refused() -> None:
    keys, slots = keys_in_slots(np.random.default_rng(0), 200, 300)
    far = int(np.argmax(np.abs(slots - slots[0])))
    swapped = slots.copy()
    swapped[[0, far]] = slots[[far, 0]]
    with pytest.raises(InvalidInputError, match="key of slot"):
        buckets_of(swapped, keys, 300, SEED)
    with pytest.raises(InvalidInputError, match="slots"):
        buckets_of(slots + 200, keys, 300, SEED)


class Keyed(nn.Module):
    """A table behind a map of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.to_rows = KeySlots(64, SEED)
        self.table = nn.EmbeddingBag(65, 4, mode="sum")

    def forward(self, keys: torch.Tensor) -> Any:
        return self.table(self.to_rows(keys))


def test_readers_see_keys_and_rows_of_one_epoch() -> None:
    """Two keys with opposite rows change their slots in every epoch. While they do, a bag of both
    is zero, and an unknown key reads the default row."""
    model = Keyed()
    with torch.no_grad():
        model.table.weight.zero_()
    one, other = 11, -(1 << 62)
    name = f"slots-{os.getpid()}"
    with oper.publish(model, name) as publication:
        served = oper.attach(Keyed(), name)
        wrong: list[Any] = []
        seen: set[float] = set()
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                bags = served(torch.tensor([[one, other], [one, 5], [other, 5]]))
                sums = bags[:, 0].tolist()
                seen.add(sums[1])
                if sums[0] or sums[1] != -sums[2] or (bags != bags[:, :1]).any():
                    wrong.append(sums)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for k in range(1, 300):
                slots = np.array([k, k + 1, k + 2, k + 3]) % 64  # the first two lose their keys
                rows = torch.tensor([[9.0], [9.0], [k], [-k]]).expand(4, 4)
                elements = changed_buckets(slots, np.array([0, 0, one, other]),
                                           np.array([False, False, True, True]), 64, SEED)
                publication.apply({"table": (slots + 1, rows)},
                                  elements={"to_rows.buckets": elements})
        finally:
            stop.set()
            asking.join()
        assert not wrong and len(seen) > 3
        with pytest.raises(InvalidInputError, match=r"\[0, 576\)"):
            publication.apply({}, elements={"to_rows.buckets": [
                (torch.tensor([576]), torch.zeros(1, dtype=torch.uint8))]})
        served.close()
