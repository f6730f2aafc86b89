"""Rows by raw key: moved between kinds of tables, and published in maps that change in place."""

import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from hypothesis import given, strategies as st
from torch import nn

import oper
from oper.errors import InvalidInputError
from oper.integration.keys.key_slots import KeySlots, buckets_of, changed_buckets
from oper.shmem.keys.places import (
    buckets_of_keys,
    num_buckets,
    num_candidates,
    slots_of_buckets,
    slots_of_keys,
)
from tests.integration import test_managed_collision as torchrec_maps
from tests.integration.module_support import bag, shard
from tests.references import BUCKET, CANDIDATES, Oracle, hash_of
from tests.world_support import run_world

ROWS, DIM = 200, 4
SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1
RULE = oper.DynamicTable(eviction="lfu", admit_after=2, init_bound=0.5, seed=9)
UNKNOWN = torch.tensor([[123456789], [-5]])


def dynamic(rule: oper.DynamicTable = RULE, rows: int = ROWS) -> Any:
    return shard(bag(rows, DIM), dynamic=rule, optimizer=oper.RowWiseAdagrad(lr=0.1))


def train(model: Any, steps: int = 4) -> torch.Tensor:
    """Return keys of different frequencies, [n, 1]."""
    keys = torch.cat([torch.tensor([SMALLEST, LARGEST, 0]), torch.arange(1, 60) * 10**15])
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        at = (torch.rand(200, generator=g) ** 2 * keys.numel()).long()
        (model(keys[at][:, None]) * torch.randn(200, DIM, generator=g)).sum().backward()
    return keys[:, None]


@given(st.lists(st.integers(SMALLEST, LARGEST), max_size=50), st.integers(1, 10**6),
       st.integers(SMALLEST, LARGEST))
def test_places_equal_the_directorys(keys: list[int], slots: int, seed: int) -> None:
    oracle = Oracle(slots, oper.DynamicTable(seed=seed))
    buckets, hashes = buckets_of_keys(np.array(keys, np.int64), slots, seed)
    assert buckets.tolist() == [oracle.bucket_of(k) for k in keys]
    assert hashes.tolist() == [hash_of(k, seed) for k in keys]
    assert (num_buckets(slots), num_candidates(slots)) == (
        oracle.buckets, oracle.buckets * CANDIDATES)
    begin, end = slots_of_buckets(buckets, slots)
    assert [range(b + 1, e + 1) for b, e in zip(begin, end, strict=True)] == [
        oracle.rows_of(b) for b in buckets.tolist()]


@pytest.mark.parametrize("rows", [ROWS, 90, 1000])
@pytest.mark.parametrize("rule", [RULE, oper.DynamicTable(seed=1)])
def test_keys_move_to_a_table_of_another_rule_and_size(rule: oper.DynamicTable, rows: int) -> None:
    model = dynamic()
    keys = train(model)
    moved = oper.KeyedRows.of_entries(model.state_dict())
    assert moved.keys.numel() == model.tables.keys.counts("weight").occupied > 40
    other = dynamic(rule, rows)
    other.load_state_dict(moved.entries(rows, rule))
    with torch.no_grad():
        for ids in (keys, UNKNOWN):
            assert torch.equal(other(ids), model(ids))
    again = oper.KeyedRows.of_entries(other.state_dict())
    for name in ("keys", "rows", "default_row", "counts", "clocks", "clock"):
        assert torch.equal(torch.as_tensor(getattr(again, name)),
                           torch.as_tensor(getattr(moved, name))), name
    train(other, 1)  # goes on
    assert other.tables.keys.clock("weight") == moved.clock + 1


def _load(rank: int, world_size: int, entries: Any) -> Any:
    model = dynamic()
    model.load_state_dict(entries)
    keys = entries["keys"][entries["keys"][:, 2] >= 0][:, :1]
    model(keys[rank::world_size]).sum().mul(world_size).backward()
    saved = oper.KeyedRows.of_entries(model.state_dict())  # split over the ranks
    return saved.keys, saved.counts, saved.rows


def test_all_ranks_load_keyed_rows() -> None:
    model = dynamic()
    train(model)
    entries = oper.KeyedRows.of_entries(model.state_dict()).entries(ROWS, RULE)
    ranks = run_world(2, _load, entries)
    (one,) = run_world(1, _load, entries)
    for keys, counts, rows in ranks:
        assert torch.equal(keys, one[0]) and torch.equal(counts, one[1])
        assert torch.allclose(rows, one[2], rtol=1e-5, atol=1e-6)


def test_a_dynamic_table_that_is_too_small() -> None:
    """With drop=True, the keys with the lowest counts of each bucket are left out."""
    n, rule = 500, oper.DynamicTable(seed=4)
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(np.unique(rng.integers(SMALLEST, LARGEST, n)))
    counts = torch.from_numpy(rng.permutation(n))
    every = oper.KeyedRows(keys, torch.randn(n, DIM), torch.zeros(DIM), counts,
                           torch.zeros_like(keys), 0)
    rows = 3 * BUCKET + 1
    with pytest.raises(InvalidInputError, match=r"keys that exceed their buckets=\d+"):
        every.entries(rows, rule)
    kept = oper.KeyedRows.of_entries(every.entries(rows, rule, "t.", drop=True), "t.")
    oracle = Oracle(rows - 1, rule)
    wanted: list[int] = []
    for bucket in range(oracle.buckets):
        mine = [(-c, k) for k, c in zip(keys.tolist(), counts.tolist(), strict=True)
                if oracle.bucket_of(k) == bucket]
        wanted += [k for _, k in sorted(mine)[:BUCKET]]
    assert kept.keys.tolist() == sorted(wanted)
    at = torch.searchsorted(keys, kept.keys)
    assert torch.equal(kept.rows, every.rows[at]) and torch.equal(kept.counts, counts[at])


def test_expired_keys_are_left_out() -> None:
    rule = oper.DynamicTable(time_to_live=1, init_bound=0.5)
    model = dynamic(rule)
    for key in (1, 2, 3):
        model(torch.tensor([[key]])).sum().backward()
    state = model.state_dict()
    assert oper.KeyedRows.of_entries(state).keys.tolist() == [1, 2, 3]
    live = oper.KeyedRows.of_entries(state, time_to_live=rule.time_to_live)
    assert live.keys.tolist() == [2, 3]
    with torch.no_grad():
        assert torch.equal(model(live.keys[:, None]), live.rows)
        assert torch.equal(model(torch.tensor([[1]]))[0], live.default_row)


class Served(nn.Module):
    """A static table with a `KeyMap` in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_rows = oper.KeyMap(ROWS - 1)
        self.bag = bag(ROWS, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.bag(self.to_rows(ids))
        return pooled

    @staticmethod
    def state_of(model: Any) -> dict[str, torch.Tensor]:
        keys, weight = oper.KeyedRows.of_entries(model.state_dict()).static(ROWS)
        return {"to_rows.keys": keys, "bag.weight": weight}


def test_published_tables_equal_the_dynamic_one() -> None:
    """They are equal before and after a second publication; unknown keys get the default row."""
    model = dynamic()
    plain = Served()
    publication = oper.publish(plain, "test-keyed-rows", weights=Served.state_of(model))
    served = oper.attach(Served(), "test-keyed-rows")
    try:
        for steps in (0, 3, 5):
            keys = train(model, steps)
            publication.publish(Served.state_of(model))
            plain.load_state_dict(Served.state_of(model))
            with torch.no_grad():
                for ids in (keys, UNKNOWN, keys.int(), torch.cat([keys[:6], UNKNOWN]).T):
                    want = model(ids.contiguous())
                    assert torch.allclose(served(ids), want, rtol=1e-6, atol=1e-6)
                    assert torch.allclose(plain(ids), want, rtol=1e-6, atol=1e-6)
                assert torch.equal(served(keys), model(keys))
    finally:
        served.close()
        publication.close()


def test_a_map_without_keys() -> None:
    empty = oper.KeyedRows.of_entries(dynamic().state_dict())
    keys, weight = empty.static(5)
    to_rows = oper.KeyMap(4)
    to_rows.load_state_dict({"keys": keys})
    rows = weight[to_rows(torch.tensor([0, 1, SMALLEST]))]
    assert torch.equal(rows, empty.default_row.expand(3, -1))


def test_key_maps_refuse_floats_and_unsorted_keys() -> None:
    with pytest.raises(InvalidInputError, match="num_keys=0"):
        oper.KeyMap(0)
    to_rows = oper.KeyMap(3)
    with pytest.raises(InvalidInputError, match="unsorted keys"):
        to_rows.load_state_dict({"keys": torch.tensor([5, 1, 9])})
    with pytest.raises(InvalidInputError, match="float32"):
        to_rows(torch.tensor([1.7]))


def test_torchrec_maps_become_dynamic_tables() -> None:
    """Ids in TorchRec's map keep their rows; other ids read the map's row for unknown ids."""
    there = torchrec_maps.make()
    optimizer = torch.optim.SGD(there.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        out, _ = there(torchrec_maps.batch_of(step, 0, 1))
        out.values().pow(2).sum().backward()
        optimizer.step()
    there.eval()
    state = there.state_dict()
    moved = oper.KeyedRows.of_managed_collision(state, "t")
    assert 5 < moved.keys.numel() < 20 and int(moved.counts.max()) > 0
    torch.manual_seed(1)
    here = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
        num_embeddings=50, embedding_dim=8, name="t", feature_names=["f", "g"])])
    here = shard(here, dynamic=oper.DynamicTable())
    here.load_state_dict(moved.entries(50, oper.DynamicTable(), "embedding_bags.t."))
    with torch.no_grad():
        batch = torchrec_maps.batch_of(7, 0, 1)
        unknown = set(batch.values().tolist()) - set(moved.keys.tolist())
        assert unknown and unknown != set(batch.values().tolist())
        want, _ = there(batch)
        assert torch.allclose(here(batch).values(), want.values(), rtol=1e-6, atol=1e-6)
    with pytest.raises(InvalidInputError, match="one that ends with"):
        oper.KeyedRows.of_managed_collision(state, "no")
    spoiled = {k: v[:-1] if k.endswith("weight") else v for k, v in state.items()}
    with pytest.raises(InvalidInputError, match="a map that contains every row once"):
        oper.KeyedRows.of_managed_collision(spoiled, "t")


GOOD = oper.KeyedRows(torch.tensor([-1, 5]), torch.zeros(2, DIM), torch.zeros(DIM),
                      torch.tensor([1, 2]), torch.tensor([0, 3]), 3)


@pytest.mark.parametrize("message, fields", [
    ("keys='unsorted or repeated keys'", {"keys": torch.tensor([5, 5])}),
    ("keys=", {"keys": torch.tensor([1.0, 2.0])}),
    ("rows=", {"rows": torch.zeros(3, DIM)}),
    ("counts=\\[-1, 2\\]", {"counts": torch.tensor([-1, 2])}),
    ("clocks=\\[0, 4\\]", {"clocks": torch.tensor([0, 4])}),
    ("clock=-1", {"clock": -1}), ("clock=3.5", {"clock": 3.5}),
])
def test_invalid_states_are_refused(message: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(GOOD, **fields)


def test_a_static_table_that_is_too_small() -> None:
    with pytest.raises(InvalidInputError, match="num_embeddings=2"):
        GOOD.static(2)
    state = dynamic().state_dict()
    with pytest.raises(InvalidInputError, match="keys="):
        oper.KeyedRows.of_entries(state | {"keys": state["keys"][1:]})
    with pytest.raises(InvalidInputError, match=r"one named 'a\.weight'"):
        oper.KeyedRows.of_entries(state, "a.")


def test_counts_report_full_buckets_and_default_rows() -> None:
    model = dynamic(oper.DynamicTable(), 2 * BUCKET + 1)
    oracle = Oracle(2 * BUCKET, oper.DynamicTable())
    first = [k for k in range(1000) if oracle.bucket_of(k) == 0][:BUCKET + 5]
    for keys in (first[:BUCKET - 1], first):
        model(torch.tensor([keys])).sum().backward()
    counts = model.tables.keys.counts("weight")
    assert (counts.buckets, counts.full_buckets) == (2, 1)
    assert counts.occupancy == 0.5
    # All of the first batch and six of the second had no row yet.
    assert counts.default_share == (BUCKET - 1 + 6) / (2 * BUCKET + 4)
    assert counts.refused == 5 and counts.evicted == 0


# ---- maps of raw keys that change in place -------------------------------------------------------

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
