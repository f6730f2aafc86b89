"""Calls of sharded ``nn.EmbeddingBag`` and ``nn.Embedding``; tests/programs checks their values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import oper
from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.tables import TableSpec

LR = 0.25


def shard(module: nn.Module, **fields: Any) -> nn.Module:
    """The sharded copy of a bag, planned without statistics."""
    pooling = getattr(module, "mode", "none")
    spec = TableSpec("weight", module.num_embeddings, module.embedding_dim, (), pooling)
    fields = {"optimizer": oper.SGD(lr=LR)} | fields
    return oper.shard(copy.deepcopy(module), plan=uniform_plan([spec], 1), **fields)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_last_offset_beyond_the_ids_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="lengths"):
        shard(nn.EmbeddingBag(40, 12, mode="sum", include_last_offset=True))(
            ids(30), torch.tensor([0, 4, 4, 29, 31]))


def test_weights_that_torch_refuses_are_refused() -> None:
    mean = shard(nn.EmbeddingBag(40, 12, mode="mean"))
    with pytest.raises(InvalidInputError, match="per_sample_weights"):
        mean(ids(30).view(6, 5), None, torch.ones(6, 5))
    sums = shard(nn.EmbeddingBag(40, 12, mode="sum"))
    padded = shard(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    for wrong in (torch.ones(6, 5, dtype=torch.float64), torch.ones(6, 4), torch.ones(30)):
        for bag in (sums, padded):
            with pytest.raises(InvalidInputError, match="weights"):
                bag(ids(30).view(6, 5), None, wrong)


def test_calls_that_torch_refuses_are_refused() -> None:
    sharded = shard(nn.EmbeddingBag(40, 12, mode="sum"))
    with pytest.raises(InvalidInputError, match="offsets"):
        sharded(ids(30))
    for offsets in ([1, 4], [0, 9, 4], [0, 40]):
        with pytest.raises(InvalidInputError, match="lengths"):
            sharded(ids(30), torch.tensor(offsets))
    with pytest.raises(InvalidInputError, match="lengths"):
        sharded(ids(30), torch.tensor([], dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="offsets"):
        sharded(ids(30).view(6, 5), torch.tensor([0, 5]))
    for wrong in (torch.tensor(0), torch.tensor([[0, 4]]), torch.tensor([0.0, 4.0])):
        with pytest.raises(InvalidInputError, match="offsets"):
            sharded(ids(30), wrong)
    with pytest.raises(InvalidInputError, match="id=40,"):
        sharded(torch.tensor([[1, 40]]))
    padded = shard(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    with pytest.raises(InvalidInputError, match="lengths"):
        padded(ids(30), torch.tensor([0, 9, 4]))


class CountsWaits(TorchDispatchMode):
    """Counts torch operators that synchronize with a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "bincount", "repeat_interleave", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in self.WAITS or (name == "index" and any(
                x is not None and x.dtype == torch.bool for x in args[1])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_padding_synchronizes_with_a_device_once() -> None:
    """Once for the number of remaining ids, with and without weights."""
    bag = shard(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    rows = shard(nn.Embedding(40, 12, padding_idx=0))
    calls = [lambda: bag(ids(30), torch.tensor([0, 4, 4, 29])),
             lambda: bag(ids(30).view(6, 5), None, torch.ones(6, 5)),
             lambda: rows(ids(30))]
    for call in calls:
        with CountsWaits() as waits:
            call()
        assert waits.found == ["nonzero"]


@pytest.mark.parametrize("optimizer", [
    oper.RowWiseAdagrad(lr=0.1, eps=1e-8), oper.RowWiseAdagrad(lr=0.1, weight_decay=0.5),
    oper.Adam(lr=0.1, weight_decay=0.5)], ids=str)
def test_padding_rows_keep_weight_and_state(optimizer: Any) -> None:
    """Also with weight decay, which changes other looked-up rows."""
    for module in (nn.Embedding(40, 8, padding_idx=3), nn.EmbeddingBag(40, 8, padding_idx=3)):
        sharded = shard(module, optimizer=optimizer)
        sharded(torch.tensor([[3, 1, 3], [3, 3, 2]])).sum().backward()
        rows = sharded.tables.read("weight")
        momentum = sharded.tables.read("weight", part="momentum1").view(40, -1)
        for changed in (rows != module.weight, momentum != 0):
            assert changed.any(1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_of_a_table_on_meta_is_zero(kind: type) -> None:
    rows = shard(kind(40, 12, padding_idx=3, device="meta")).state_dict()["weight"]
    assert not rows[3].any() and (rows.abs().sum(1) > 0).sum() == 39


def test_values_without_dense_real_rows_are_refused() -> None:
    sharded = shard(nn.EmbeddingBag(40, 12, mode="sum"))
    for wrong in (torch.zeros(40, 12, device="meta"), torch.zeros(40, 12).to_sparse(),
                  torch.zeros(40, 12, dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match="'weight': device, layout, dtype="):
            sharded.load_state_dict({"weight": wrong})


def test_attributes_of_the_unsharded_bag_exist() -> None:
    bag = nn.EmbeddingBag(40, 12, mode="sum", padding_idx=2, include_last_offset=True)
    sharded = shard(bag)
    for name in ("num_embeddings", "embedding_dim", "mode", "padding_idx", "include_last_offset"):
        assert getattr(sharded, name) == getattr(bag, name)


def test_bags_of_length_zero() -> None:
    # torch itself stumbles over [4, 0]; empty bags by offsets are zeros, and so are these.
    for mode, padding in (("sum", None), ("mean", 3)):
        out = shard(nn.EmbeddingBag(40, 12, mode=mode, padding_idx=padding))(ids(0).view(4, 0))
        assert out.shape == (4, 12) and not out.any()
