"""TorchRec's managed-collision modules in one process, and with one map on several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchrec
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KJT

import oper
from oper.errors import InvalidInputError
from tests.runtime_support import assert_bitwise, whole
from tests.world_support import run_world

BATCH, LR, STEPS = 12, 0.1, 6


def make(pooled: bool = True) -> Any:
    torch.manual_seed(0)
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    tables = [config(num_embeddings=20, embedding_dim=8, name="t", feature_names=["f", "g"])]
    inner = (torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection)(
        tables=tables, device=torch.device("cpu"))
    hashing = ManagedCollisionCollection(managed_collision_modules={
        "t": MCHManagedCollisionModule(
            zch_size=20, device=torch.device("cpu"), eviction_interval=2,
            eviction_policy=LFU_EvictionPolicy())}, embedding_configs=tables)
    kind = (ManagedCollisionEmbeddingBagCollection if pooled
            else ManagedCollisionEmbeddingCollection)
    return kind(inner, hashing, return_remapped_features=True)


def batch_of(step: int, rank: int, world_size: int) -> KJT:
    """Return a rank's samples of a batch, with two ids in every bag."""
    g = torch.Generator().manual_seed(step)
    raw = (torch.rand(2, BATCH, 2, generator=g) ** 3 * 40).long() * 10**9 + step % 3
    mine = raw[:, rank * BATCH // world_size:(rank + 1) * BATCH // world_size]
    return KJT.from_lengths_sync(["f", "g"], mine.reshape(-1),
                                 torch.full((2 * mine.shape[1],), 2))


def _train(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(record=True) as said:
        model: Any = oper.shard(make(), optimizer=oper.SGD(lr=LR))
    assert not [w for w in said if "map of ids" in str(w.message)]
    found = {}
    for step in range(STEPS):
        out, ids = model(batch_of(step, rank, world_size))
        found[f"ids {step}"] = ids.values().view(2, -1)
        (out.values().pow(2).sum() * world_size).backward()
    model.eval()
    with torch.no_grad():
        _, ids = model(batch_of(STEPS, 0, 1))  # learns nothing, and no rank waits for another
        if rank == 0:
            model(batch_of(STEPS + 1, 0, 1))
    found["map"] = ids.values().clone()
    return found | whole(model.state_dict())


def test_ranks_learn_one_map() -> None:
    """Two ranks map ids and train rows like a single process with the entire batches."""
    (one,) = run_world(1, _train)
    ranks = run_world(2, _train)
    for step in range(STEPS):
        joint = torch.cat([r[f"ids {step}"] for r in ranks], dim=1)
        assert_bitwise(joint, one[f"ids {step}"], f"ids of step {step}")
    assert one["map"].unique().numel() > 5
    for name in (n for n in one if not n.startswith("ids ")):
        for found in ranks:
            assert torch.allclose(found[name].double(), one[name].double(), rtol=1e-5, atol=1e-6
                                  ), name


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


def _make_hashing() -> tuple[Any, Any]:
    """The model with a module that learns while it maps, and that module; it knows 20 ids."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    model = make()
    maps = HashZchManagedCollisionModule(20, torch.device("cpu"), total_num_buckets=1)
    maps._hash_zch_identities.data[:, 0] = torch.arange(20) * 10**9
    model._managed_collision_collection._managed_collision_modules["t"] = maps
    return model, maps


def _map_frozen(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    model, maps = _make_hashing()
    sharded: Any = oper.shard(model, optimizer=oper.SGD(lr=LR))
    message = ""
    try:
        sharded(batch_of(0, rank, world_size))
    except InvalidInputError as error:
        message = str(error)
    maps.eval()
    _, ids = sharded(batch_of(0, rank, world_size))
    return message, ids.values().view(2, -1)


def test_modules_that_learn_while_mapping_are_refused() -> None:
    """They are refused in training mode; in eval mode, two ranks map ids like one."""
    ranks = run_world(2, _map_frozen)
    for message, _ in ranks:
        assert "HashZchManagedCollisionModule" in message and ".eval()" in message, message
    model, maps = _make_hashing()
    maps.eval()
    _, ids = model(batch_of(0, 0, 1))
    joint = torch.cat([found for _, found in ranks], dim=1)
    assert torch.equal(joint, ids.values().view(2, -1))
    assert joint.unique().numel() > 5
