"""Half-precision modules: same calls, dtypes and names; one step is exact up to one rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchrec
from torch import nn

import oper

HALVES = [torch.float16, torch.bfloat16]


def step_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance to the next number of `dtype`, element by element."""
    near = values.abs().to(dtype)
    return (torch.nextafter(near, torch.full_like(near, torch.inf)) - near).float()


def ids(count: int, rows: int = 40) -> torch.Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("mode", ["sum", "mean", "none"])
@pytest.mark.parametrize("dtype", HALVES)
def test_torch_modules(dtype: torch.dtype, mode: str) -> None:
    """Outputs in the module's dtype, rounded once; one step of SGD within one rounding step."""
    torch.manual_seed(0)
    module: Any = nn.Embedding(40, 12, dtype=dtype) if mode == "none" else nn.EmbeddingBag(
        40, 12, mode=mode, dtype=dtype)
    sharded: Any = oper.shard(copy.deepcopy(module), optimizer=oper.SGD(lr=0.1))
    assert sharded.weight.dtype == sharded.state_dict()["weight"].dtype == dtype
    assert torch.equal(sharded.state_dict()["weight"], module.weight)
    exact = copy.deepcopy(module).float()
    out, want = sharded(ids(30).view(6, 5)), exact(ids(30).view(6, 5))
    assert out.dtype == dtype == module(ids(30).view(6, 5)).dtype
    assert (out.float() - want).abs().le(step_of(want, dtype)).all()
    target = torch.randn(want.shape)
    ((out.float() - target) ** 2).mean().backward()
    ((want.to(dtype).float() - target) ** 2).mean().backward()
    stepped = exact.weight - 0.1 * exact.weight.grad
    got = sharded.state_dict()["weight"]
    assert (got.float() - stepped).abs().le(1.01 * step_of(stepped, dtype)).all()
    untouched = exact.weight.grad.eq(0).all(1)
    assert torch.equal(got[untouched], module.weight[untouched]) and not untouched.all()


def collection(data_type: str) -> Any:
    torch.manual_seed(1)
    kind = torchrec.types.DataType(data_type)
    return torchrec.EmbeddingBagCollection(tables=[
        torchrec.EmbeddingBagConfig(
            num_embeddings=50, embedding_dim=24, name="a", feature_names=["f", "g"],
            data_type=kind, pooling=torchrec.PoolingType.MEAN),
        torchrec.EmbeddingBagConfig(
            num_embeddings=30, embedding_dim=8, name="b", feature_names=["g"])], device="cpu")


def jagged(seed: int, size: int = 5) -> Any:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=g)
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f", "g"], torch.randint(0, 30, (int(lengths.sum()),), generator=g), lengths)


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_torchrec_collection(data_type: str) -> None:
    """Outputs are float32, as of the unsharded collection; rows have the configuration's dtype."""
    plain = collection(data_type)
    sharded = oper.shard(copy.deepcopy(plain), optimizer=oper.RowWiseAdagrad(lr=0.1))
    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16}[data_type]
    state = sharded.state_dict()
    assert state["embedding_bags.a.weight"].dtype == dtype
    assert state["embedding_bags.b.weight"].dtype == torch.float32
    assert sharded.embedding_bags.a.weight.dtype == dtype
    batch = jagged(0)
    got, want = sharded(batch), plain(batch)
    assert got.keys() == want.keys() and got.values().dtype == want.values().dtype == torch.float32
    assert torch.allclose(got.values(), want.values(), rtol=1e-2, atol=2e-2)
    got.values().pow(2).sum().backward()
    fused = sharded.fused_optimizer.state_dict()["state"]
    assert fused["embedding_bags.a.weight"]["a.momentum1"].dtype == torch.float32
    # Loads what it saved, and an fp32 model's tables, rounded to nearest.
    other = oper.shard(collection(data_type), optimizer=oper.RowWiseAdagrad(lr=0.1))
    other.load_state_dict(sharded.state_dict())
    for key, value in sharded.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    wide = {k: torch.randn(v.shape) for k, v in state.items()}
    other.load_state_dict(wide)
    assert torch.equal(other.state_dict()["embedding_bags.a.weight"],
                       wide["embedding_bags.a.weight"].to(dtype))
