"""TorchRec's unsharded collections, by property: any tables, features, pooling, ids and batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from hypothesis import given, settings, strategies as st

import oper
from oper.errors import InvalidInputError
from oper.integration.torchrec_modules import table_specs
from tests.integration.test_managed_collision import make
from tests.runtime_support import rich_plan
from tests.support import pulled

KJT = torchrec.KeyedJaggedTensor
LR = 0.5
FEATURES = ["f0", "f1", "f2", "f3"]
PARITY = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def cases(draw: Any, pooled: bool) -> dict[str, Any]:
    tables = [{"num_embeddings": draw(st.integers(1, 30)),
               "embedding_dim": draw(st.sampled_from([4, 12, 17])) if pooled else 12,
               "features": draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=3,
                                         unique=True)),
               "mean": draw(st.booleans())} for _ in range(draw(st.integers(1, 3)))]
    return {"tables": tables, "weighted": pooled and draw(st.booleans()),
            "ids": draw(st.sampled_from([torch.int64, torch.int32])),
            "lengths": draw(st.sampled_from([torch.int64, torch.int32])),
            "variable": draw(st.booleans()), "batch": draw(st.integers(0, 6)),
            "seed": draw(st.integers(0, 10**6)), "need_indices": draw(st.booleans())}


def collection(case: dict[str, Any], pooled: bool) -> Any:
    torch.manual_seed(case["seed"])
    common = [{"num_embeddings": t["num_embeddings"], "embedding_dim": t["embedding_dim"],
               "name": f"t{k}", "feature_names": t["features"]}
              for k, t in enumerate(case["tables"])]
    if not pooled:
        return torchrec.EmbeddingCollection(
            tables=[torchrec.EmbeddingConfig(**c) for c in common], device="cpu",
            need_indices=case["need_indices"])
    poolings = [torchrec.PoolingType.MEAN if t["mean"] else torchrec.PoolingType.SUM
                for t in case["tables"]]
    # torch's nn.EmbeddingBag takes weights with sums only.
    return torchrec.EmbeddingBagCollection(
        tables=[torchrec.EmbeddingBagConfig(
            **c, pooling=torchrec.PoolingType.SUM if case["weighted"] else p)
            for c, p in zip(common, poolings, strict=True)],
        is_weighted=case["weighted"], device="cpu")


def jagged(case: dict[str, Any], pooled: bool) -> Any:
    """A batch: keys in another order with one that no table has; variable strides if asked."""
    rng = np.random.default_rng(case["seed"])
    keys = rng.permutation([*FEATURES, "extra"]).tolist()
    rows = {k: min((t["num_embeddings"] for t in case["tables"] if k in t["features"]),
                   default=1) for k in keys}
    variable = case["variable"] and case["batch"] > 0
    strides = [int(rng.integers(1, case["batch"] + 1)) if variable else case["batch"]
               for _ in keys]
    lengths = [rng.integers(0, 4, s) for s in strides]
    ids = [rng.integers(0, rows[k], int(n.sum())) for k, n in zip(keys, lengths, strict=True)]
    flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids])).to(case["ids"])
    weights = torch.from_numpy(rng.random(flat.numel()).astype(np.float32))
    extra: dict[str, Any] = {}
    if variable:
        inverse = np.stack([rng.integers(0, s, case["batch"]) for s in strides])
        extra = {"stride_per_key_per_rank": [[s] for s in strides]}
        if pooled:
            extra["inverse_indices"] = (keys, torch.from_numpy(inverse))
    return KJT(keys, flat, weights if case["weighted"] else None,
               torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *lengths])).to(
                   case["lengths"]),
               **({"stride": case["batch"]} if not variable else {}), **extra)


def sharded_copy(plain: Any, seed: int) -> Any:
    """By a plan with tiers of all kinds, push and column splits."""
    specs = table_specs(plain, "sgd")
    plan = rich_plan(specs, 1, seed, True)
    if specs[0].pooling == "none":  # push pools
        plan = pulled(plan)
    return oper.shard(copy.deepcopy(plain), plan=plan, optimizer=oper.SGD(lr=LR))


def check_step(plain: Any, sharded: Any) -> None:
    """The rows after one step of SGD, then forget the gradients."""
    for name, parameter in plain.named_parameters():
        step = 0 if parameter.grad is None else LR * parameter.grad
        assert torch.allclose(sharded.state_dict()[name], parameter - step, rtol=1e-5, atol=1e-5)


@PARITY
@given(cases(True))
def test_pooled(case: dict[str, Any]) -> None:
    plain = collection(case, True)
    sharded = sharded_copy(plain, case["seed"])
    batch = jagged(case, True)
    if not case["batch"]:  # torch's unsharded collection cannot split an empty batch by key
        out = sharded(batch)
        assert out.values().shape == (0, sum(out.length_per_key()))
        return
    got, want = sharded(batch), plain(batch)
    assert got.keys() == want.keys() and got.length_per_key() == want.length_per_key()
    assert got.values().dtype == want.values().dtype
    assert torch.allclose(got.values(), want.values(), rtol=1e-5, atol=1e-6)
    grad = torch.randn(want.values().shape)
    want.values().backward(grad)
    got.values().backward(grad)
    check_step(plain, sharded)


@PARITY
@given(cases(False))
def test_unpooled(case: dict[str, Any]) -> None:
    plain = collection(case, False)
    sharded = sharded_copy(plain, case["seed"])
    batch = jagged(case, False)
    if not case["batch"]:
        assert all(x.values().shape == (0, 12) for x in sharded(batch).values())
        return
    got, want = sharded(batch), plain(batch)
    assert list(got) == list(want)
    for name, jt in want.items():
        mine = got[name]
        assert torch.equal(mine.values(), jt.values())
        assert torch.equal(mine.lengths(), jt.lengths())
        assert mine.lengths().dtype == jt.lengths().dtype
        assert (mine.weights_or_none() is None) == (jt.weights_or_none() is None)
        if jt.weights_or_none() is not None:
            assert torch.equal(mine.weights(), jt.weights())
    grads = {name: torch.randn(jt.values().shape) for name, jt in want.items()}
    for out in (got, want):
        sum((jt.values() * grads[name]).sum() for name, jt in out.items()).backward()
    check_step(plain, sharded)


def test_a_variable_batch_needs_its_inverse() -> None:
    plain = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f", "g"])])
    sharded = oper.shard(plain, optimizer=oper.SGD())
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])
    strides = [[1], [2]]
    with pytest.raises(InvalidInputError, match="inverse_indices"):
        sharded(KJT(["f", "g"], ids, lengths=lengths, stride_per_key_per_rank=strides))
    with pytest.raises(InvalidInputError, match="'g'"):
        sharded(KJT(["f", "g"], ids, lengths=lengths, stride_per_key_per_rank=strides,
                    inverse_indices=(["f"], torch.zeros(1, 2, dtype=torch.int64))))


@pytest.mark.parametrize("pooled", [True, False])
def test_managed_collisions(pooled: bool) -> None:
    """Zero-collision hashing in front of the tables: the same remapped ids, outputs and rows."""
    plain, sharded = make(pooled), oper.shard(make(pooled), optimizer=oper.SGD(lr=LR))
    assert type(sharded).__name__ == type(plain).__name__
    for step in range(6):
        g = torch.Generator().manual_seed(step)
        raw = (torch.rand(24, generator=g) ** 3 * 1e15).long() % (10**12 + step % 3)
        batch = KJT.from_lengths_sync(["f", "g"], raw, torch.full((12,), 2))
        (got, ids), (want, true_ids) = sharded(batch), plain(batch)
        assert torch.equal(ids.values(), true_ids.values())
        values = [(x.values() if pooled else torch.cat([j.values() for j in x.values()]))
                  for x in (got, want)]
        assert torch.allclose(values[0], values[1], rtol=1e-5, atol=1e-6)
        for v in values:
            v.pow(2).sum().backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= LR * p.grad
                    p.grad = None
    state = plain.state_dict()
    assert sharded.state_dict().keys() == state.keys()
    for name, value in sharded.state_dict().items():
        assert torch.allclose(value.double(), state[name].double(), rtol=1e-5, atol=1e-5), name
