"""Freezing, and what a backward pass updates."""

from __future__ import annotations

import warnings

import pytest
import torch

import oper
from oper.errors import InvalidInputError, OperError
from tests.integration.module_support import KJT, LR, bag, collection, rows, shard

# ---- freezing ------------------------------------------------------------------------------------


def test_frozen_before_sharding_and_read_only() -> None:
    plain = bag()
    plain.weight.requires_grad = False
    model = shard(plain)
    assert not model.weight.requires_grad and not model(torch.tensor([[1]])).requires_grad
    model.requires_grad_(True)
    before = rows(model)
    model(torch.tensor([[1]])).sum().backward()
    assert not torch.equal(rows(model), before)
    served = shard(bag(), objective="inference", optimizer=None)
    assert not served.weight.requires_grad
    with pytest.raises(InvalidInputError, match="sharded for inference"):
        served.requires_grad_(True)


# ---- what a backward pass updates ----------------------------------------------------------------


def test_autograd_grad_updates_nothing() -> None:
    model = shard(bag())
    before = rows(model)
    dense, weights = torch.ones(4, requires_grad=True), torch.ones(1, 1, requires_grad=True)

    def loss() -> torch.Tensor:
        return (model(torch.tensor([[1]]), per_sample_weights=weights) * dense).sum()

    (gradient,) = torch.autograd.grad(loss(), weights)
    assert torch.equal(gradient, before[1].sum().view(1, 1))
    torch.autograd.grad(loss(), dense)
    loss().backward(inputs=[dense])
    assert torch.equal(rows(model), before) and torch.equal(dense.grad, before[1])
    loss().backward()
    before[1] -= LR
    assert torch.equal(rows(model), before)


def test_assigned_state_keeps_the_dtype() -> None:
    for model, key in ((shard(bag()), "weight"), (shard(collection()), "embedding_bags.a.weight")):
        state = model.state_dict()
        state[key] = state[key].double()
        with pytest.warns(UserWarning, match="keeps its dtype"):
            model.load_state_dict(state, assign=True)
        assert model.state_dict()[key].dtype == torch.float32
        model.load_state_dict(dict(state))
        model.load_state_dict({k: x.float() for k, x in state.items()}, assign=True)


def test_calling_one_table_of_a_collection_is_refused() -> None:
    with pytest.raises(OperError, match="call the collection"):
        shard(collection()).embedding_bags["a"](torch.tensor([[1]]))


# ---- tensors that change between passes ----------------------------------------------------------


def test_a_collection_refuses_changed_ids_and_keeps_lengths() -> None:
    model = shard(collection(("a",)))
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    batch = KJT(["f_a"], ids, lengths=lengths)
    before = rows(model.embedding_bags["a"])
    out = model(batch).values()
    lengths.copy_(torch.tensor([2, 1]))  # the forward pass has read them
    out[1].sum().backward()
    before[2:4] -= LR
    assert torch.equal(rows(model.embedding_bags["a"]), before)
    out = model(batch).values()
    ids.fill_(7)
    with pytest.raises(InvalidInputError, match=r"changed in place.*ids"):
        out.sum().backward()


def test_buffers_may_be_reused_while_gradients_accumulate() -> None:
    want, model = shard(bag()), shard(bag())
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(want) if not last else warnings.catch_warnings():
            want(torch.tensor([batch])).pow(2).sum().backward()
    ids, gradient = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4)
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(model) if not last else warnings.catch_warnings():
            ids.copy_(torch.tensor([batch]))
            out = model(ids)
            gradient.copy_(2 * out.detach())
            out.backward(gradient)
    assert torch.equal(rows(model), rows(want))


@pytest.mark.parametrize(("values", "lengths", "changed", "to", "read"), [
    ([1, 2], [2], 0, [5, 6], (5, 6)),
    ([1, 2, 3], [1, 2], 1, [2, 1], (1, 2)),
], ids=["ids", "lengths"])
def test_a_prefetched_batch_that_changes(values: list[int], lengths: list[int], changed: int,
                                         to: list[int], read: tuple[int, int]) -> None:
    model = shard(collection(("a",)))
    parts = torch.tensor(values), torch.tensor(lengths)
    batch = KJT(["f_a"], parts[0], lengths=parts[1])
    model.prefetch(batch)
    for *_, started in model._prefetched.queued.values():
        started.result()
    parts[changed].copy_(torch.tensor(to))
    want = rows(model.embedding_bags["a"])
    assert torch.equal(model(batch).values()[0], want[read[0]] + want[read[1]])


def test_second_derivatives_through_a_lookup_are_refused() -> None:
    sharded = shard(bag())
    weights = torch.ones(1, 2, requires_grad=True)
    out = sharded(torch.tensor([[1, 2]]), per_sample_weights=weights)
    first, = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_weights_other_than_the_prefetched_ones() -> None:
    """Batches with the same ids may have different weights."""
    model = shard(collection(("a",), is_weighted=True))
    ids, lengths = torch.tensor([1, 2]), torch.tensor([2])
    old = KJT(["f_a"], ids, torch.tensor([1.0, 1.0]), lengths)
    model.prefetch(old)
    weights = torch.tensor([3.0, 0.5], requires_grad=True)
    table = rows(model.embedding_bags["a"])
    out = model(KJT(["f_a"], ids, weights, lengths)).values()
    assert torch.equal(out[0], 3 * table[1] + table[2] / 2)
    out.sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, table[1:3].sum(dim=1))
    split = KJT(["f_a"], ids, torch.tensor([1.0, 1.0]), torch.tensor([1, 1]))
    with torch.no_grad():
        model.prefetch(old)
        assert model(split).values().shape == (2, 4)
        assert model(old).values().shape == (1, 4)  # still queued
    assert not model._prefetched.queued
