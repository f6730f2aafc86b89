"""A sharded ``EmbeddingBagCollection`` has the interface and results of the unsharded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import oper
from oper.errors import InvalidInputError
from oper.shmem.optim.optimizers import RowWiseAdagrad
from tests.dlrm_support import (
    configs,
    copies,
    make_collection,
    make_kjt,
    plan_for,
    virtual_ranks,
)
from tests.runtime_support import assert_bitwise, run_ranks

OPTIMIZER = RowWiseAdagrad(lr=0.05, eps=1e-8)


def shard(collection: Any, kind: str = "striped", **fields: Any) -> Any:
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(collection, 1, kind)} | fields
    return oper.shard(copy.deepcopy(collection), **fields)


def on_ranks(world_size: int, make: Any, body: Any, kind: str = "striped", **fields: Any
             ) -> list[Any]:
    """Run `body(sharded, group)` on virtual ranks, each with its own copy of `make()`."""
    base = make()
    models = copies(base, world_size)
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(base, world_size, kind)} | fields
    with virtual_ranks() as local:
        def work(group):
            local.group = group
            return body(oper.shard(models[group.rank], **fields), group)

        return run_ranks(world_size, work)


# ---- face ----------------------------------------------------------------------------------------


def test_the_configuration_of_a_collection_is_kept() -> None:
    collection = make_collection()
    sharded = shard(collection)
    assert [c.name for c in sharded.embedding_bag_configs()] == [
        c.name for c in collection.embedding_bag_configs()]
    assert sharded.is_weighted() is False and sharded.device == torch.device("cpu")


def test_a_missing_feature_is_named() -> None:
    kjt = make_kjt(3, 9)
    short = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in ("a", "b", "c", "d")})
    with pytest.raises(InvalidInputError, match=r"missing features=\['e'\]"):
        shard(make_collection())(short)


# ---- numbers -------------------------------------------------------------------------------------


def test_weights_of_the_input_are_used_only_by_collections_that_ask_for_them() -> None:
    tables = [c for c in configs() if c.pooling.name == "SUM"]
    weighted = shard(EmbeddingBagCollection(tables=tables, is_weighted=True))
    assert weighted.is_weighted()
    with pytest.raises(Exception, match="weights"):
        weighted(make_kjt(0, 4))
    sharded = shard(make_collection())
    assert torch.equal(sharded(make_kjt(1, 7, weighted=True)).values(),
                       sharded(make_kjt(1, 7)).values())


@pytest.mark.parametrize("divide", [True, False])
def test_gradient_division_follows_torchrecs_switch(divide: bool) -> None:
    from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

    before = get_gradient_division()
    set_gradient_division(divide)
    try:
        def body(sharded, group):
            sharded(make_kjt(group.rank, 6)).values().sum().backward()
            sharded.tables.barrier()
            return sharded.state_dict()["embedding_bags.t4.weight"]

        got = on_ranks(2, make_collection, body, optimizer=oper.SGD(lr=1.0))[0]
    finally:
        set_gradient_division(before)
    unsharded = make_collection()
    for rank in range(2):
        unsharded(make_kjt(rank, 6)).values().sum().backward()
    weight = unsharded.embedding_bags["t4"].weight
    want = weight - weight.grad * (0.5 if divide else 1.0)
    assert torch.allclose(got, want, atol=1e-5) and not torch.allclose(got, weight, atol=1e-3)


# ---- meta device ---------------------------------------------------------------------------------


def test_meta_tables_get_the_same_values_under_any_plan() -> None:
    def body(sharded, group):
        return dict(sharded.state_dict())

    torch.manual_seed(5)
    want = None
    for world_size, kind in ((1, "striped"), (2, "replicated"), (2, "mixed0"), (4, "mixed1"),
                             (4, "owned")):
        def make() -> Any:
            collection = make_collection(device="meta")
            torch.manual_seed(5)
            return collection

        for state in on_ranks(world_size, make, body, kind):
            want = want or state
            assert_bitwise(state, want, f"W={world_size} {kind}")
    for weight in want.values():
        bound = weight.shape[0] ** -0.5  # TorchRec's default range
        assert weight.abs().max() <= bound
        assert weight.numel() < 100 or weight.std() > bound / 3
    values = [w.flatten()[:8] for w in want.values()]
    assert not any(torch.equal(a / a.abs().max(), b / b.abs().max())
                   for k, a in enumerate(values) for b in values[:k]), "tables share a seed"


def test_the_seed_determines_meta_tables() -> None:
    states = []
    for seed in (1, 1, 2):
        collection = make_collection(device="meta")
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        states.append(shard(collection).state_dict()["embedding_bags.t4.weight"])
        assert torch.equal(torch.random.get_rng_state(), before), "sharding moves the generator"
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_init_functions_are_used() -> None:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"],
                                 init_fn=lambda w: torch.nn.init.constant_(w, 7.0))]
    sharded = shard(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    assert (sharded.state_dict()["embedding_bags.t.weight"] == 7).all()


# ---- state and learning rates --------------------------------------------------------------------


def test_a_tag_takes_precedence_over_the_argument() -> None:
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    collection = make_collection()
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.0})
    still = oper.shard(collection, plan=plan_for(collection, 1), optimizer=oper.SGD(lr=9.0))
    before = dict(still.state_dict())
    still(make_kjt(0, 10)).values().square().sum().backward()
    assert_bitwise(dict(still.state_dict()), before, "weights at the tag's rate 0")


def test_a_variable_batch_needs_inverse_indices() -> None:
    plain = EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f", "g"])])
    sharded = oper.shard(plain, optimizer=oper.SGD())
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])
    strides = [[1], [2]]
    with pytest.raises(InvalidInputError, match="inverse_indices"):
        sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths,
                                  stride_per_key_per_rank=strides))
    with pytest.raises(InvalidInputError, match="'g'"):
        sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths, stride_per_key_per_rank=strides,
                                  inverse_indices=(["f"], torch.zeros(1, 2, dtype=torch.int64))))
    good = torch.zeros(2, 2, dtype=torch.int64)
    for bad in (good.int(), good[0], good[:1], good.to("meta")):
        with pytest.raises(InvalidInputError, match=r"inverse_indices=.*int64 \[2, B\] in host"):
            sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths,
                                      stride_per_key_per_rank=strides,
                                      inverse_indices=(["f", "g"], bad)))
    with pytest.raises(InvalidInputError, match="number of lengths=2, expected 3"):
        sharded(KeyedJaggedTensor(["f", "g"], ids[:2], lengths=lengths[:2],
                                  stride_per_key_per_rank=strides,
                                  inverse_indices=(["f", "g"], good)))


def test_inverse_indices_must_be_bags_of_their_feature() -> None:
    """Even if another feature has that many bags, and in a compiled graph."""
    sharded = oper.shard(EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f", "g"])]),
        optimizer=oper.SGD())

    def batch(of_f: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64),
            stride_per_key_per_rank=[[1], [3]],
            inverse_indices=(["f", "g"], torch.tensor([of_f, [0, 1, 2]])))

    def look_up(features: KeyedJaggedTensor) -> torch.Tensor:
        return sharded(features).values()

    compiled = torch.compile(look_up, backend="aot_eager")
    assert torch.equal(look_up(batch([0, 0, 0])), compiled(batch([0, 0, 0])))
    with pytest.raises(InvalidInputError, match=r"inverse_indices of f=.*0 <= bag < 1"):
        look_up(batch([0, 2, 0]))
    with pytest.raises(IndexError):
        compiled(batch([0, 2, 0]))


@pytest.mark.parametrize("how", ["in place", "another", "none"])
def test_a_prefetched_batch_follows_changed_inverse_indices(how: str) -> None:
    plain = EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f"])])
    sharded = oper.shard(copy.deepcopy(plain), optimizer=oper.SGD())
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    first, later = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])

    def batch(rows: torch.Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f"], ids, lengths=lengths,
                                 inverse_indices=None if rows is None else (["f"], rows))

    kjt = batch(later.clone() if how == "none" else first)
    sharded.prefetch(kjt)
    if how == "in place":
        first.copy_(later)
    else:
        kjt = batch(later if how == "another" else None)
    rows = plain.embedding_bags["t"].weight.detach()[ids]
    assert_bitwise(sharded(kjt).values().detach(), rows if how == "none" else rows.flip(0), how)
