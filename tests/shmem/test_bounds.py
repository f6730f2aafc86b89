"""Ids outside their tables: an error, or row 0 with or without a warning, as in FBGEMM."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

# This loads FBGEMM's operators as well.
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

import oper
from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.group.groups import SingleGroup
from oper.shmem.micro_batches import MicroBatches
from oper.tables import TableSpec
from tests.optimizer_formulas import EVERY
from tests.runtime_support import (
    Case,
    assert_bitwise,
    make_batch,
    mixed_plan,
    open_tables,
    rich_plan,
    run_ranks,
)

CASE = Case((TableSpec("a", 40, 8, ("f", "g"), "sum"), TableSpec("b", 50, 4, ("f",), "mean")),
            ("g", "zz", "f"), True, max_length=5)


def spoiled(seed: int) -> tuple[Lookup, list[torch.Tensor]]:
    """A batch with ids outside one or both tables, and FBGEMM's replaced ids of each feature."""
    batch = make_batch(CASE, seed, 12).lookup(CASE)
    ids = batch.ids.clone()
    at = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))[:12]
    ids[at] = torch.tensor([40, 45, 49, 50, 1 << 40, -2, -7, 44, 41, -(1 << 50), 48, 47])
    pieces = torch.split(ids, batch.lengths.view(3, 12).sum(1).tolist())
    expected = []
    for (_, table), key in zip(CASE.features, batch.key_of.tolist(), strict=True):
        mine, lengths = pieces[key].clone(), batch.lengths.view(3, 12)[key]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        torch.ops.fbgemm.bounds_check_indices(
            torch.tensor([CASE.table(table).num_rows]), mine, offsets, 2,
            torch.zeros(1, dtype=torch.int64))
        expected.append(mine)
    return replace(batch, ids=ids), expected


def train(group, plan, mode: str, repaired_by_hand: bool, dtype: torch.dtype = torch.int64
          ) -> list[torch.Tensor]:
    tables = open_tables(CASE, plan, group, EVERY["rowwise_adagrad"])
    tables.bounds = BoundsCheck(mode, tables.features, tables.specs)
    found = []
    for step in range(2):
        batch, expected = spoiled(10 * step + group.rank)
        if dtype == torch.int32:
            batch = replace(batch, ids=batch.ids.clamp(-(2**31), 2**31 - 1).int(),
                            lengths=batch.lengths.int())
        weights = batch.weights.clone().requires_grad_()
        if repaired_by_hand:
            lengths = batch.lengths.view(3, 12)[batch.key_of].reshape(-1)
            parts = torch.split(weights, batch.lengths.view(3, 12).sum(1).tolist())
            out = tables.lookup(Lookup(
                torch.cat(expected).to(batch.ids.dtype), lengths, torch.arange(3), 12,
                torch.cat([parts[k] for k in batch.key_of.tolist()])))
        else:
            out = tables.lookup(replace(batch, weights=weights))
        out.pow(2).sum().backward()
        found += [out.detach(), weights.grad]
    tables.barrier()
    return [*found, tables.read("a"), tables.read("b")]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_ids_are_replaced_as_in_fbgemm(world_size: int, dtype: torch.dtype) -> None:
    """Outputs, rows and weight gradients equal those of FBGEMM's replaced ids, under any plan."""
    for plan in (mixed_plan(CASE.tables, world_size, 1),
                 rich_plan(CASE.tables, world_size, 1, True)):
        got, want = (run_ranks(world_size, lambda g, hand=hand, plan=plan: train(
            g, plan, "ignore", hand, dtype)) for hand in (False, True))
        assert_bitwise(got, want, "ignored ids and row 0")


def test_invalid_ids_are_counted_and_warned_of_once() -> None:
    def body(group) -> int:
        tables = open_tables(CASE, mixed_plan(CASE.tables, 1, 1), group, None)
        tables.bounds = BoundsCheck("warning", tables.features, tables.specs)
        batch, _ = spoiled(3)
        good = make_batch(CASE, 5, 12).lookup(CASE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tables.lookup(good)
            assert not caught and not tables.bounds.num_bad_ids
            for _ in range(3):
                tables.lookup(batch)
        assert len(caught) == 1 and "row 0" in str(caught[0].message)
        return tables.bounds.num_bad_ids

    (count,) = run_ranks(1, body)
    batch, expected = spoiled(3)
    pieces = torch.split(batch.ids, batch.lengths.view(3, 12).sum(1).tolist())
    changed = sum(int((pieces[k] != e).sum())
                  for k, e in zip(batch.key_of.tolist(), expected, strict=True))
    assert count == 3 * changed > 0


def _opened(group, optimizer=None):
    tables = open_tables(CASE, mixed_plan(CASE.tables, group.world_size, 1), group, optimizer)
    tables.bounds = BoundsCheck("warning", tables.features, tables.specs)
    return tables


def test_a_batch_resolved_in_advance_is_repaired_by_its_lookup() -> None:
    """The lookup, not `resolve`, replaces the ids and counts them, once."""
    ahead, plain = _opened(SingleGroup()), _opened(SingleGroup())
    batch, _ = spoiled(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = ahead.resolve(batch)
    assert ahead.bounds.num_bad_ids == 0 and resolved.ids is batch.ids
    with pytest.warns(UserWarning, match="row 0 is looked up instead"):
        found = ahead.lookup(resolved)
    with pytest.warns(UserWarning, match="row 0 is looked up instead"):
        assert torch.equal(found, plain.lookup(batch))
    assert ahead.bounds.num_bad_ids == plain.bounds.num_bad_ids > 0

    again = ahead.resolve(batch)
    batch.ids.copy_(spoiled(4)[0].ids[:batch.ids.numel()].repeat(2)[:batch.ids.numel()])
    batch.weights.mul_(2)
    assert torch.equal(ahead.lookup(again), plain.lookup(batch))
    twice = replace(again, weights=3 * batch.weights)  # a feature processor's
    assert torch.equal(ahead.lookup(twice), plain.lookup(replace(batch, weights=twice.weights)))
    assert ahead.bounds.num_bad_ids == plain.bounds.num_bad_ids


def test_ids_of_a_prefetched_part_must_not_change() -> None:
    tables = _opened(SingleGroup(), EVERY["rowwise_adagrad"])
    batch, _ = spoiled(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with MicroBatches([tables]), torch.no_grad():
            begun = tables.turns.parts.start(batch).result()
            found = tables.lookup(begun)
            count = tables.bounds.num_bad_ids
            batch.ids.zero_()
            with pytest.raises(InvalidInputError, match="changed in place"):
                tables.lookup(begun)
        assert torch.equal(found, tables.lookup(spoiled(3)[0]))
    assert tables.bounds.num_bad_ids == 2 * count > 0


def test_fatal_is_the_default_and_lengths_are_always_checked() -> None:
    for mode, word in (("fatal", "id="), ("ignore", "lengths")):
        bag = oper.shard(torch.nn.EmbeddingBag(10, 4, mode="sum"), optimizer=oper.SGD(),
                         **({} if mode == "fatal" else {"bounds_check": mode}))
        with pytest.raises(InvalidInputError, match=word):
            bag(torch.tensor([1, 10]), torch.tensor([0, 1 if mode == "fatal" else 5]))
    assert torch.equal(bag(torch.tensor([[10, -3]])), 2 * bag(torch.tensor([[0]])))


def test_fbgemm_modes_are_accepted() -> None:
    bag = torch.nn.EmbeddingBag(10, 4, mode="sum")
    for mode in BoundsCheckMode:
        want = {"NONE": "fatal"}.get(mode.name, mode.name.removeprefix("V2_").lower())
        assert oper.shard(torch.nn.EmbeddingBag(10, 4, mode="sum"), optimizer=oper.SGD(),
                          bounds_check=mode).tables.bounds.mode == want
    with pytest.raises(InvalidInputError, match=r"bounds check.*loud"):
        oper.shard(bag, optimizer=oper.SGD(), bounds_check="loud")
