"""A table as a tensor: reads and writes apply to the rows, or raise an error naming the table."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oper.errors import InvalidInputError, OperError
from tests.integration.module_support import LR, bag, collection, kjt, rows, shard
from tests.programs.weights import WRITES

# ---- reading and writing -------------------------------------------------------------------------

@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_rows(name: str) -> None:
    """All in-place operations from which random programs (tests/programs) draw."""
    want, sharded = bag(), shard(bag())
    values = torch.arange(40.0).view(10, 4)
    for module in (want, sharded):
        torch.manual_seed(0)
        with torch.no_grad():
            WRITES[name](module.weight, values, 0.25)
        if not name.startswith("data"):
            WRITES[name](module.weight.data, values, 0.25)
    assert torch.equal(rows(sharded), want.weight)
    ids = torch.tensor([[0, 3, 9]])
    assert torch.equal(sharded(ids), want(ids))


def test_reading() -> None:
    want, sharded = bag(), shard(bag())
    weight = sharded.weight
    assert torch.equal(weight.norm(), want.weight.norm())
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    file = io.BytesIO()
    torch.save({"w": weight}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], want.weight)
    assert "10, 4" in repr(sharded) and "table='weight'" in repr(weight)


@pytest.mark.parametrize("read", [
    lambda w: w[2:4], lambda w: w.data, lambda w: w.t(), lambda w: w[3], lambda w: w.detach()])
def test_reading_in_inference_mode(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    want, sharded = bag(), shard(bag())
    with torch.inference_mode():
        assert torch.equal(read(sharded.weight).clone(), read(want.weight))
        sharded.weight.data[1] = 3.0
    assert sharded.weight[1].tolist() == [3.0] * 4


@pytest.mark.parametrize("take", [
    lambda w: w.data_ptr(), lambda w: w.storage(), torch.from_dlpack,
    lambda w: w.data.set_(torch.zeros(10, 4)), lambda w: torch.zeros(0).set_(w.detach()),
    lambda w: w.share_memory_(), lambda w: w.apply_(lambda x: 2 * x)])
def test_access_to_storage_is_refused(take: Callable[[torch.Tensor], Any]) -> None:
    sharded = shard(bag())
    for tensor in (sharded.weight, sharded.weight.data):
        with pytest.raises(OperError, match="memory of table"):
            take(tensor)


def test_requires_grad_of_a_collection_freezes_all_tables() -> None:
    model = shard(collection())
    assert "embedding_bags" in repr(model) and "10, 4" in repr(model)
    assert model.fused_optimizer.params["embedding_bags.a.weight"] is (
        model.embedding_bags["a"].weight)
    model.embedding_bags.requires_grad_(False)
    assert not model(kjt(torch.tensor([1, 2, 3, 4]))).values().requires_grad


def test_options_cannot_be_set_after_sharding() -> None:
    sharded = shard(bag())
    with pytest.raises(InvalidInputError, match="max_norm"):
        sharded.max_norm = 1.0
    with pytest.raises(InvalidInputError, match="mode='max', expected 'sum'"):
        sharded.mode = "max"
    with pytest.raises(InvalidInputError, match="cannot set the data"):
        sharded.weight.data = torch.zeros(3, 4)
    buffered = bag()
    buffered.register_buffer("use", torch.zeros(3))
    with pytest.raises(InvalidInputError, match="buffers"):
        shard(buffered, modules=[""])


def replaced(module: nn.Module) -> Any:
    module.weight = nn.Parameter(torch.zeros(10, 4))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "assigned": replaced,
    "gradient of the weight": lambda m: m.weight.pow(2).sum().backward(),
    "tied projection": lambda m: torch.nn.functional.linear(
        torch.ones(4), m.weight).sum().backward(),
    "no ids": lambda m: m(None),
    "ids of three dimensions": lambda m: m(torch.zeros(1, 1, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused_operations_change_nothing(name: str) -> None:
    sharded = shard(bag())
    before = rows(sharded)
    with pytest.raises(OperError):
        REFUSED[name](sharded)
    assert torch.equal(rows(sharded), before) and sharded.weight.grad is None
    sharded(torch.tensor([[1]])).sum().backward()
    before[1] -= LR
    assert torch.equal(rows(sharded), before)


def test_autograd_detects_updates_of_saved_values() -> None:
    sharded = shard(bag())
    x = torch.ones(4, requires_grad=True)
    kept = (sharded.weight.detach() * x).sum()
    sharded(torch.tensor([[1]])).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_strides_of_a_row_slice_count_from_the_table() -> None:
    want, sharded = bag(), shard(bag())
    for take in (lambda w: w[2:4].as_strided((4,), (1,), 0), lambda w: w[3].as_strided((2,), (4,))):
        assert torch.equal(take(sharded.weight.detach()), take(want.weight.detach()))


def test_values_that_need_a_gradient_are_not_written() -> None:
    """Autograd would have to record such writes."""
    sharded = shard(bag()).requires_grad_(False)
    before = rows(sharded)
    with pytest.raises(InvalidInputError, match="cannot write to table"):
        sharded.weight[3] = torch.ones(4, requires_grad=True)
    assert not sharded.weight.requires_grad and torch.equal(rows(sharded), before)
    with torch.no_grad():
        sharded.weight[3] = torch.ones(4, requires_grad=True)
    assert sharded.weight[3].tolist() == [1.0] * 4
