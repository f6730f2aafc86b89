"""What TorchRec's collections take beside what tests/programs draws at random."""

from __future__ import annotations

import pytest
import torch
import torchrec

import oper
from oper.errors import InvalidInputError
from tests.integration.test_managed_collision import make

KJT = torchrec.KeyedJaggedTensor
LR = 0.5


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
