"""A sharded ``EmbeddingBagCollection`` in one process: the unsharded one's face and numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TheirAdagrad

import oper
from oper.errors import InvalidInputError, PlanError
from tests.dlrm_support import (
    KEYS,
    assert_close,
    configs,
    copies,
    make_collection,
    make_dlrm,
    make_kjt,
    plan_for,
    virtual_ranks,
)
from tests.runtime_support import RowWiseAdagrad, apply_optimizer, assert_bitwise, run_ranks

KINDS = ["replicated", "striped", "owned", "mixed0", "mixed3"]
OPTIMIZER = RowWiseAdagrad(lr=0.05, eps=1e-8)


def shard(collection: Any, kind: str = "striped", **fields: Any) -> Any:
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(collection, 1, kind)} | fields
    return oper.shard(copy.deepcopy(collection), **fields)


def on_ranks(world_size: int, make: Any, body: Any, kind: str = "striped", **fields: Any
             ) -> list[Any]:
    """`body(sharded, group)` on virtual ranks, each with its own copy of `make()`."""
    base = make()
    models = copies(base, world_size)
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(base, world_size, kind)} | fields
    with virtual_ranks() as local:
        def work(group):
            local.group = group
            return body(oper.shard(models[group.rank], **fields), group)

        return run_ranks(world_size, work)


# ---- face ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_names_shapes_and_weights_are_kept(kind: str) -> None:
    collection = make_collection()
    sharded = shard(collection, kind)
    want, got = collection.state_dict(), sharded.state_dict()
    assert list(got) == list(want)
    assert_bitwise(dict(got), dict(want), "weights")
    assert [c.name for c in sharded.embedding_bag_configs()] == [
        c.name for c in collection.embedding_bag_configs()]
    assert sharded.is_weighted() is False and sharded.device == torch.device("cpu")
    assert [n for n, _ in sharded.named_parameters()] == list(want) and not list(sharded.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_output_has_the_order_and_values_of_the_unsharded_one(kind: str) -> None:
    collection = make_collection()
    sharded = shard(collection, kind)
    for int32 in (False, True):
        kjt = make_kjt(3, 9, int32=int32)
        want = collection(kjt)
        got = sharded(kjt)
        assert got.keys() == want.keys() == ["a@t0", "b", "c", "d", "a@t3", "e"]
        assert got.length_per_key() == want.length_per_key()
        assert got.values().shape == want.values().shape
        for key, value in want.to_dict().items():
            assert_close(got[key], value, key)


def test_keys_in_any_order() -> None:
    sharded = shard(make_collection())
    kjt = make_kjt(3, 9)
    want = sharded(kjt).values()
    for order in (KEYS[::-1], sorted(KEYS), [k for k in KEYS if k != "unused"]):
        other = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in order})
        assert list(other.keys()) == order
        assert torch.equal(sharded(other).values(), want)


def test_a_missing_feature_is_named() -> None:
    kjt = make_kjt(3, 9)
    short = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in ("a", "b", "c", "d")})
    with pytest.raises(InvalidInputError, match=r"missing features=\['e'\]"):
        shard(make_collection())(short)


def test_a_bad_id_names_feature_and_table() -> None:
    sharded = shard(make_collection())
    kjt = make_kjt(3, 9)
    at = kjt.offset_per_key()[KEYS.index("c")]
    kjt.values()[at] = 60
    with pytest.raises(InvalidInputError, match=r"feature 'c' in table 't1': id=60,.* id < 60"):
        sharded(kjt)


def test_variable_batch_per_feature_is_refused() -> None:
    kjt = KeyedJaggedTensor(
        keys=["a", "b", "c", "d", "e"], values=torch.zeros(6, dtype=torch.int64),
        lengths=torch.ones(6, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [1], [1], [1], [2]])
    with pytest.raises(InvalidInputError, match="variable batch"):
        shard(make_collection())(kjt)


def test_an_empty_batch() -> None:
    sharded = shard(make_collection())
    out = sharded(make_kjt(0, 0))
    assert out.values().shape == (0, sum(out.length_per_key()))
    out.values().sum().backward()


# ---- numbers -------------------------------------------------------------------------------------


def train(module: Any, weighted: bool, optimizer: Any = None, steps: int = 20) -> list[Any]:
    """Train a sharded (or, with `optimizer`, an unsharded) collection on squared error."""
    outs = []
    states = {n: {"momentum1": torch.zeros(p.shape[0])} for n, p in module.named_parameters()}
    for step in range(steps):
        out = module(make_kjt(step, 10, weighted)).values()
        target = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        ((out - target) ** 2).sum(1).mean().backward()
        outs.append(out.detach().clone())
        for name, p in module.named_parameters():
            if p.grad is None:  # of a sharded table
                continue
            touched = (p.grad != 0).any(1)
            apply_optimizer(optimizer, step + 1, p.data, states[name], p.grad, touched)
            p.grad = None
    return outs


@pytest.mark.parametrize("kind", ["striped", "mixed0"])
def test_mean_beside_sum_trains_as_unsharded(kind: str) -> None:
    """TorchRec 1.8 divides the sum tables' outputs too when a mean table is split by rows."""
    collection = make_collection()
    sharded = shard(collection, kind)
    want, got = train(collection, False, OPTIMIZER), train(sharded, False)
    assert_close(torch.stack(got), torch.stack(want), "outputs")
    for name, weight in collection.state_dict().items():
        assert_close(sharded.state_dict()[name], weight, name)


@pytest.mark.parametrize("kind", ["replicated", "striped", "mixed0"])
def test_mean_by_rows_beside_other_placements(kind: str) -> None:
    """Row-split mean next to an owned and a replicated sum table, at two ranks."""
    from oper.integration.torchrec_modules import table_specs
    from oper.plan import Piece, Plan, TablePlan, Tier
    base = make_collection()
    placements = [("owned", (1,)), ("striped", (0, 1)), ("replicated", (0, 1)),
                  ("striped", (1, 0)), ("owned", (0,))]
    tables = tuple(
        TablePlan(s, (Piece(0, s.dim, (Tier(0, s.num_rows, place, ranks),)),))
        for s, (place, ranks) in zip(table_specs(base), placements, strict=True))
    plan = Plan(2, tables) if kind == "striped" else plan_for(base, 2, kind)
    kjts = [make_kjt(rank, 8) for rank in range(2)]

    def body(sharded, group):
        return sharded(kjts[group.rank]).values().detach().clone()

    for rank, got in enumerate(on_ranks(2, make_collection, body, plan=plan)):
        assert_close(got, base(kjts[rank]).values(), f"outputs of rank {rank}")


def test_weighted_collections() -> None:
    torch.manual_seed(0)
    tables = [c for c in configs() if c.pooling.name == "SUM"]
    collection = EmbeddingBagCollection(tables=tables, is_weighted=True)
    sharded = shard(collection, "mixed0")
    assert sharded.is_weighted()
    want, got = train(collection, True, OPTIMIZER, 5), train(sharded, True, steps=5)
    assert_close(torch.stack(got), torch.stack(want), "outputs")
    with pytest.raises(Exception, match="weights"):
        sharded(make_kjt(0, 4))  # a weighted collection needs weights


def test_weights_of_the_input_are_ignored_unless_asked_for() -> None:
    sharded = shard(make_collection())
    assert torch.equal(sharded(make_kjt(1, 7, weighted=True)).values(),
                       sharded(make_kjt(1, 7)).values())


def test_equals_torchrecs_fused_collection() -> None:
    """All tables sum: with mean among them TorchRec 1.8's fused collection mixes up its keys."""
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    tables = [replace(c, pooling=PoolingType.SUM) for c in configs()]
    collection = EmbeddingBagCollection(tables=tables)
    fused = FusedEmbeddingBagCollection(
        tables=tables, optimizer_type=TheirAdagrad,
        optimizer_kwargs={"lr": OPTIMIZER.lr, "eps": OPTIMIZER.eps}, device=torch.device("cpu"))
    fused.load_state_dict(collection.state_dict())
    sharded = shard(collection, "mixed0")
    for step in range(20):
        kjt = make_kjt(step, 10)
        outs = {"fused": fused(kjt), "ours": sharded(kjt)}
        assert outs["ours"].keys() == outs["fused"].keys()
        theirs, ours = outs["fused"].values(), outs["ours"].values()
        assert_close(ours.detach(), theirs.detach(), f"outputs of step {step}")
        for out in (theirs, ours):
            ((out - 1) ** 2).sum(1).mean().backward()
    for name, weight in fused.state_dict().items():
        assert_close(sharded.state_dict()[name], weight, name)


@pytest.mark.parametrize("divide", [True, False])
def test_gradient_division_is_torchrecs_switch(divide: bool) -> None:
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


def test_meta_tables_get_the_same_numbers_whatever_the_plan() -> None:
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


def test_the_seed_rules_meta_tables() -> None:
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


def test_state_goes_round_through_other_plans() -> None:
    first = shard(make_collection(), "mixed0")
    train(first, False, steps=3)
    state = first.state_dict()
    unsharded = make_collection(seed=9)
    assert str(unsharded.load_state_dict(state)) == "<All keys matched successfully>"
    second = shard(make_collection(seed=8), "owned")
    second.load_state_dict(unsharded.state_dict())
    assert_bitwise(dict(second.state_dict()), dict(state), "state after the round trip")


def test_loading_reaches_replicas() -> None:
    sharded = shard(make_collection(), "replicated")
    other = make_collection(seed=9)
    sharded.load_state_dict(other.state_dict())
    kjt = make_kjt(0, 8)
    assert torch.allclose(sharded(kjt).values(), other(kjt).values(), atol=1e-6)


def test_load_refuses_other_shapes_and_keys() -> None:
    sharded = shard(make_collection())
    good = sharded.state_dict()
    key = "embedding_bags.t1.weight"
    with pytest.raises(RuntimeError, match="'t1'"):
        sharded.load_state_dict({**good, key: torch.zeros(61, 16)})
    with pytest.raises(RuntimeError, match=f"Missing.*{key}"):
        sharded.load_state_dict({k: v for k, v in good.items() if k != key})
    with pytest.raises(RuntimeError, match="Unexpected"):
        sharded.load_state_dict({**good, "embedding_bags.t9.weight": torch.zeros(1)})
    assert sharded.load_state_dict({}, strict=False).missing_keys == list(good)


def test_tags_are_honoured() -> None:
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    def tagged(kind: Any, **arguments: Any) -> Any:
        collection = make_collection()
        apply_optimizer_in_backward(kind, collection.parameters(), arguments)
        return collection

    collection = tagged(TheirAdagrad, lr=0.05, eps=1e-8)
    sharded = oper.shard(collection, plan=plan_for(collection, 1))
    by_argument = shard(make_collection())
    assert torch.equal(torch.stack(train(sharded, False, steps=4)),
                       torch.stack(train(by_argument, False, steps=4)))
    # A tag wins over the argument.
    collection = tagged(torch.optim.SGD, lr=0.0)
    still = oper.shard(collection, plan=plan_for(collection, 1), optimizer=oper.SGD(lr=9.0))
    before = dict(still.state_dict())
    train(still, False, steps=2)
    assert_bitwise(dict(still.state_dict()), before, "weights at the tag's rate 0")


def test_plans_for_other_models_and_worlds() -> None:
    collection = make_collection()
    with pytest.raises(PlanError, match="world"):
        oper.shard(make_collection(), plan=plan_for(collection, 2), optimizer=OPTIMIZER)
    with pytest.raises(PlanError, match="t3"):
        oper.shard(make_dlrm(), plan=plan_for(collection, 1), optimizer=OPTIMIZER)
