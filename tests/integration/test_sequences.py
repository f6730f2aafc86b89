"""Unpooled lookups under every plan and in pipelines; tests/programs checks their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules import embedding_configs
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.errors import InvalidInputError
from oper.tables import TableSpec
from tests.checkpoint_support import random_kjt
from tests.runtime_support import (
    Case,
    assert_bitwise,
    make_steps,
    plans_for,
    same_bits,
    train_virtual,
    whole,
)
from tests.world_support import run_world

DIM = 20
TABLES = {"t0": (50, ["a", "b"]), "t1": (30, ["b", "c"]), "t2": (1, ["d"]), "t3": (700, ["e"])}
ROWS = {"c": 30, "unused": 10**9, "a": 50, "e": 700, "d": 1, "b": 30}


def collection() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(
        [embedding_configs.EmbeddingConfig(name=n, num_embeddings=rows, embedding_dim=DIM,
                                           feature_names=features)
         for n, (rows, features) in TABLES.items()])


# ---- every plan and world size -------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_plans_are_bitwise_equal(world_size: int) -> None:
    case = Case(tuple(TableSpec(n, rows, DIM, tuple(features), "none")
                      for n, (rows, features) in TABLES.items()), tuple(ROWS))
    steps = make_steps(case, world_size, 5)
    want, *others = (train_virtual(case, plan, steps, oper.Adam(lr=0.01, eps=1e-4))
                     for plan in plans_for(case.tables, world_size).values())
    assert any(not out.shape[0] for step in want.outputs for out in step)  # an empty batch
    for other in others:
        same_bits(other, want)


# ---- gradients of features -----------------------------------------------------------------------


def _trained(apart: bool, gradients: str) -> dict[str, torch.Tensor]:
    """Return the tables after three steps with one gradient tensor per feature, or a single one."""
    torch.manual_seed(1)
    model = oper.shard(collection(), optimizer=oper.Adam(lr=0.1))
    names = list(model(random_kjt(ROWS, 3, 0)))
    for seed in range(3):
        features = random_kjt(ROWS, 9, seed)
        batch = model.lookup_of(features)
        batch.apart = apart
        found = model._jagged(model.tables.lookup(batch), features)
        assert list(found) == names
        g = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        for name in names:
            rows = found[name].values()
            factor = torch.rand(rows.shape, generator=g)
            if gradients == "one of several" and name != "b@t1":
                continue  # the other rows have gradients of 0
            # That of a sum is one number, seen as a tensor; of a column, every other number.
            loss = loss + {"sums": rows.sum(), "columns": (rows.T * factor.T)[::2].sum(),
                           }.get(gradients, (rows * factor).sum())
        loss.backward()
    return whole(model.state_dict())


@pytest.mark.parametrize("gradients", ["all", "one of several", "sums", "columns"])
def test_gradients_by_feature_equal_one_gradient(gradients: str) -> None:
    apart, one = (_trained(x, gradients) for x in (True, False))
    assert_bitwise([apart], [one], gradients)
    start = collection().state_dict()
    assert not torch.equal(apart["embeddings.t1.weight"], start["embeddings.t1.weight"])


def test_lengths_ids_and_errors_by_feature() -> None:
    """Keys in the collection's order, in another order, and with one that is not looked up."""
    model = oper.shard(EmbeddingCollection(collection().embedding_configs(), need_indices=True),
                       optimizer=oper.SGD(lr=0.1))
    features = random_kjt(ROWS, 6, 4)
    asked = features.to_dict()
    with torch.no_grad():
        alone = model(features)
    for name, found in model(features).items():
        of = asked[name.split("@")[0]]
        assert torch.equal(found.lengths(), of.lengths())
        assert torch.equal(found.weights(), of.values())
        assert torch.equal(found.offsets(), of.offsets())
        assert torch.equal(found.values(), alone[name].values())
        assert found.values().shape == (of.values().numel(), DIM)
    wrong = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths() + 1)
    with pytest.raises(InvalidInputError, match="lengths do not fit the ids"):
        model(wrong)


# ---- processes -----------------------------------------------------------------------------------


class SequenceModel(nn.Module):
    """A collection, a bare embedding and a dense layer; returns (loss, its value)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = collection()
        self.positions = nn.Embedding(16, DIM, padding_idx=0)
        self.dense = nn.Linear(DIM, 3)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.items(batch.sparse_features)
        names = ["a", "b@t0", "b@t1", "c", "d", "e"]
        rows = torch.cat([found[n].values() for n in names])
        places = self.positions(batch.labels)
        total = self.dense(rows).tanh().sum() + self.dense(places).square().sum()
        loss = total / (batch.dense_features.shape[0] + 1)
        return loss, loss.detach()


def make_batch(seed: int, batch_size: int) -> Any:
    from torchrec.datasets.utils import Batch

    g = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(batch_size, 1, generator=g), random_kjt(ROWS, batch_size, seed),
                 torch.randint(0, 16, (batch_size, 5), generator=g))


def batches_of(rank: int, steps: int) -> list[Any]:
    """Batch sizes differ between ranks, and rank 1 has an empty batch."""
    return [make_batch(100 * rank + s, (7, 4, 11, 2)[(rank + s) % 4] if (rank, s) != (1, 2) else 0)
            for s in range(steps)]


def _body(rank: int, world_size: int, steps: int, pipelined: bool) -> dict[str, torch.Tensor]:
    import torchrec.distributed as trec
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    torch.manual_seed(0)
    model = oper.shard(SequenceModel(), optimizer=oper.RowWiseAdagrad(lr=0.1), batch_size=8)
    wrapped = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=trec.types.ShardingPlan({}), sharders=[])
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    batches = batches_of(rank, steps)
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(wrapped, dense, torch.device("cpu"),
                                           execute_all_batches=True)
        iterator = iter(batches)
        for _ in range(steps):
            losses.append(pipeline.progress(iterator))
    else:
        for batch in batches:
            dense.zero_grad()
            loss, value = wrapped(batch)
            loss.backward()
            dense.step()
            losses.append(value)
    return whole(wrapped.state_dict()) | {"losses": torch.stack(losses)}


def test_pipelined_and_plain_training_are_equal() -> None:
    """tests/programs and tests/rl_rec/test_sharded_models.py compare with unsharded models."""
    plain, piped = (run_world(2, _body, 6, pipelined) for pipelined in (False, True))
    assert_bitwise(piped, plain, "pipelined and not")
    start = SequenceModel().state_dict()["items.embeddings.t0.weight"]
    assert not torch.equal(plain[0]["items.embeddings.t0.weight"], start)
