"""Freezing, and what a backward pass updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError, OperError
from tests.integration.module_support import KJT, LR, bag, collection, kjt, rows, shard

# ---- freezing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [oper.SGD(lr=LR), oper.Adam(lr=LR)], ids=lambda o: o.name)
def test_frozen_tables_stay_as_they_are_and_go_on_where_they_were(optimizer: Any) -> None:
    ids = torch.tensor([1, 2, 3, 4])

    def trained(freeze: Callable[[nn.Module, bool], Any] | None) -> dict[str, torch.Tensor]:
        model = shard(nn.Sequential(collection()), optimizer=optimizer)
        for step in range(4):
            if freeze is not None and step in (1, 3):
                freeze(model, step == 3)
            if freeze is None and step in (1, 2):
                continue
            out = model(kjt(ids)).values().sum()
            assert out.requires_grad == (freeze is None or step in (0, 3))
            if out.requires_grad:
                out.backward()
        state = model.state_dict()
        return state | {f"{key} {n}": x for key, s in model[0].fused_optimizer.state_dict()[
            "state"].items() for n, x in s.items()}

    want = trained(None)
    for freeze in (lambda m, on: m.requires_grad_(on), lambda m, on: m[0].requires_grad_(on),
                   lambda m, on: [p.requires_grad_(on) for p in m.parameters()]):
        got = trained(freeze)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("optimizer", [oper.SGD(lr=LR), oper.Adam(lr=LR, weight_decay=0.1),
                                       oper.RowWiseAdagrad(lr=LR, max_row_norm=0.1)],
                         ids=lambda o: o.name)
def test_one_table_of_a_collection_is_frozen(optimizer: Any) -> None:
    model = shard(collection(), optimizer=optimizer)
    ids = torch.tensor([1, 2, 3, 4])
    model(kjt(ids)).values().sum().backward()
    before = {n: rows(m) for n, m in model.embedding_bags.items()}
    states = copy.deepcopy(model.fused_optimizer.state_dict())
    model.embedding_bags["a"].weight.requires_grad = False
    for _ in range(2):
        model(kjt(ids)).values().sum().backward()
    assert torch.equal(rows(model.embedding_bags["a"]), before["a"])
    assert not torch.equal(rows(model.embedding_bags["b"]), before["b"])
    key = "embedding_bags.a.weight"
    after = model.fused_optimizer.state_dict()["state"].get(key, {})
    for name, value in states["state"].get(key, {}).items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_table_is_trained_that_is_not_frozen_in_either_pass(when: str) -> None:
    model = shard(bag())
    before = rows(model)
    model.weight.requires_grad = when != "forward"
    weights = torch.ones(1, 1, requires_grad=True)
    out = model(torch.tensor([[1]]), per_sample_weights=weights)
    model.weight.requires_grad = when == "forward"
    out.sum().backward()
    assert torch.equal(rows(model), before)
    assert torch.equal(weights.grad, before[1].sum().view(1, 1))


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


def reference(optimizer: type[torch.optim.Optimizer], **fields: Any) -> tuple[Any, Any]:
    module = bag()
    return module, optimizer(module.parameters(), **fields)


def test_two_lookups_in_one_backward_pass_are_one_update() -> None:
    want, adagrad = reference(torch.optim.Adagrad, lr=LR, eps=1e-8)
    model = shard(bag(), optimizer=oper.Adagrad(lr=LR, eps=1e-8))
    for _ in range(2):
        for module in (want, model):
            first, second = module(torch.tensor([[1, 2]])), module(torch.tensor([[2, 3]]))
            (first.sum() + second.pow(2).sum()).backward()
        adagrad.step()
        adagrad.zero_grad()
    torch.testing.assert_close(rows(model), want.weight.detach())
    assert model.tables.num_steps == 2


def test_gradients_that_are_asked_for_by_name_update_nothing() -> None:
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


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            raise RuntimeError("on purpose")

    model = shard(bag())
    before = rows(model)
    early = model(torch.tensor([[1]]), per_sample_weights=Fails.apply(
        torch.ones(1, 1, requires_grad=True)))
    late = Fails.apply(model(torch.tensor([[2]])))
    with pytest.raises(RuntimeError, match="on purpose"):
        (early.sum() + late.sum()).backward()
    updated = rows(model)
    model(torch.tensor([[3]])).sum().backward()
    updated[3] -= LR
    assert torch.equal(rows(model), updated)
    assert torch.equal(updated[2], before[2])
    assert not model.tables.collected.parts


def test_assigned_state_keeps_the_dtype() -> None:
    for model, key in ((shard(bag()), "weight"), (shard(collection()), "embedding_bags.a.weight")):
        state = model.state_dict()
        state[key] = state[key].double()
        with pytest.warns(UserWarning, match="keeps its dtype"):
            model.load_state_dict(state, assign=True)
        assert model.state_dict()[key].dtype == torch.float32
        model.load_state_dict(dict(state))
        model.load_state_dict({k: x.float() for k, x in state.items()}, assign=True)


def test_initialisers_that_ask_for_the_class() -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.EmbeddingBag | nn.Embedding):
            nn.init.constant_(module.weight, 0.25)

    model = shard(nn.ModuleDict({"bag": bag(), "one": nn.Embedding(5, 4), "c": collection()}))
    model.apply(start)
    assert all(bool((x == 0.25).all()) for x in model.state_dict().values())
    with pytest.raises(OperError, match="call the collection"):
        model["c"].embedding_bags["a"](torch.tensor([[1]]))


# ---- tensors that change between passes ----------------------------------------------------------


@pytest.mark.parametrize("what", ["ids", "weights"])
def test_a_batch_that_changes_before_its_backward_pass_is_refused(what: str) -> None:
    model = shard(bag())
    before = rows(model)
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2)
    out = model(ids, per_sample_weights=weights)
    (ids if what == "ids" else weights).fill_(3)
    with pytest.raises(InvalidInputError, match="changed in place since the lookup"):
        out.sum().backward()
    assert torch.equal(rows(model), before)


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


def test_buffers_used_again_while_gradients_accumulate() -> None:
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


def test_ids_that_change_after_they_were_announced() -> None:
    model = shard(collection(("a",)))
    ids = torch.tensor([1, 2])
    batch = kjt(ids, ("f_a",))
    model.prefetch(batch)
    for _, coming in model._ahead.coming.values():
        coming.result()
    ids.copy_(torch.tensor([5, 6]))
    want = rows(model.embedding_bags["a"])
    assert torch.equal(model(batch).values()[0], want[5] + want[6])


def test_second_derivatives_through_a_lookup_are_refused() -> None:
    sharded = shard(bag())
    weights = torch.ones(1, 2, requires_grad=True)
    out = sharded(torch.tensor([[1, 2]]), per_sample_weights=weights)
    first, = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
