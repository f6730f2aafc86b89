"""The dense parts of a DLRM that copy less, and dense gradients averaged in shared memory."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch

import oper
from oper.errors import PeerLostError
from oper.integration.dense.dlrm import DotInteraction, PooledRows, copy_less
from oper.integration.dense.gradients import average_in_shared_memory
from tests.dlrm_support import EBC, make_batch, make_dlrm, plan_for, sharded_dlrm
from tests.runtime_support import assert_bitwise, assert_near
from tests.world_support import run_world, world


def _reference(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([dense[:, None], sparse], dim=1)
    pairs = [(rows[:, i] * rows[:, j]).sum(-1)
             for i in range(rows.shape[1]) for j in range(i + 1, rows.shape[1])]
    return torch.cat([dense, torch.stack(pairs, dim=1)], dim=1)


@pytest.mark.parametrize("samples,features,dim",
                         [(1, 1, 1), (3, 2, 5), (5, 7, 16), (33, 26, 64), (40, 26, 128),
                          (2, 31, 40), (2, 33, 100), (0, 4, 8)])
def test_interaction_and_its_gradients(samples: int, features: int, dim: int) -> None:
    torch.manual_seed(samples + features)
    dense, sparse = torch.randn(samples, dim), torch.randn(samples, features, dim)
    # As columns of a wider matrix, which nobody may take for contiguous.
    mine = [torch.cat([x, x], dim=-1)[..., :dim].detach().requires_grad_() for x in (dense, sparse)]
    wanted = [x.double().requires_grad_() for x in (dense, sparse)]
    got, want = DotInteraction(features)(*mine), _reference(*wanted)
    direction = torch.randn(want.shape)
    got.backward(direction)
    want.backward(direction.double())
    for name, a, b in zip(("out", "dense", "sparse"), (got, *(x.grad for x in mine)),
                          (want, *(x.grad for x in wanted)), strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-4, msg=name)


def test_a_sample_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    dense, sparse = torch.randn(70, 24), torch.randn(70, 9, 24)
    whole = DotInteraction(9)(dense, sparse)
    for b in (0, 31, 69):
        assert torch.equal(DotInteraction(9)(dense[b:b + 1], sparse[b:b + 1])[0], whole[b])


def test_the_operator_passes_opcheck() -> None:
    DotInteraction(3)(torch.randn(2, 8), torch.randn(2, 3, 8))  # registers its gradient
    arguments = torch.randn(4, 8, requires_grad=True), torch.randn(4, 3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.oper.dot_interaction.default, arguments)


def test_interaction_refuses_rows_of_another_width() -> None:
    with pytest.raises(RuntimeError, match="dot_interaction: expected contiguous dense"):
        DotInteraction(3)(torch.randn(2, 8), torch.randn(2, 3, 9))


def _lean(seed: int = 0) -> Any:
    model = make_dlrm(seed)
    copy_less(model.model)
    return model


def test_copy_less_keeps_outputs_and_gradients() -> None:
    plain, lean = make_dlrm(3), _lean(3)
    assert type(lean.model.sparse_arch) is PooledRows
    assert type(lean.model.inter_arch) is DotInteraction
    assert list(plain.state_dict()) == list(lean.state_dict())
    losses = [model(make_batch(5, 30))[0] for model in (plain, lean)]
    assert_near(losses[1], losses[0], "loss")
    for loss in losses:
        loss.backward()
    wanted = dict(plain.named_parameters())
    for name, p in lean.named_parameters():
        assert p.grad is not None
        assert_near(p.grad, wanted[name].grad, name)


def test_copy_less_keeps_subclasses() -> None:
    class Own(InteractionArch):
        pass

    model = make_dlrm().model
    model.inter_arch.__class__ = Own
    copy_less(model)
    assert type(model.inter_arch) is Own


def test_under_autocast_products_are_float32() -> None:
    dense, sparse = torch.randn(4, 8).bfloat16(), torch.randn(4, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = DotInteraction(3)(dense, sparse)
    assert out.dtype == torch.float32
    assert torch.equal(out, DotInteraction(3)(dense.float(), sparse))


def test_features_in_another_order_are_reordered() -> None:
    model: DLRM = make_dlrm(2).model
    pooled = model.sparse_arch.embedding_bag_collection

    class Turned(torch.nn.Module):
        """Orders features by rank, as TorchRec's sharded collections do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = pooled

        def embedding_bag_configs(self) -> Any:
            return self.inner.embedding_bag_configs()

        def forward(self, features: Any) -> Any:
            from torchrec.sparse.jagged_tensor import KeyedTensor

            found = self.inner(features)
            keys = found.keys()[::-1]
            parts = found.to_dict()
            return KeyedTensor(keys, [parts[k].shape[1] for k in keys],
                               torch.cat([parts[k] for k in keys], dim=1))

    turned: Any = Turned()
    features = make_batch(1, 6).sparse_features
    want = SparseArch(pooled)(features)
    assert torch.equal(PooledRows(turned)(features), want)
    assert torch.equal(PooledRows(pooled)(features), want)


# ---- gradients -----------------------------------------------------------------------------------


def _gradients(model: Any, batch: Any, steps: int = 3) -> list[torch.Tensor]:
    """Return the dense gradients of some steps, and the dense parameters after these steps."""
    found = []
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    for _ in range(steps):
        loss, _ = model(batch)
        loss.backward()
        with torch.no_grad():
            for p in dense:
                assert p.grad is not None
                found.append(p.grad.clone())
                p -= 0.1 * p.grad
                p.grad = None
    return found + [p.detach().clone() for p in dense]


def _average(rank: int, world_size: int, bucket_mb: float) -> None:
    model = make_dlrm(seed=3)
    plan = plan_for(model.get_submodule(EBC), world_size, "striped")
    batch = make_batch(100 * rank, 9 + 3 * rank)
    found = []
    for shares in (False, True):
        sharded = oper.shard(copy.deepcopy(model), plan=plan, optimizer=oper.SGD(lr=0.1))
        wrapped = DDP(sharded, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        if shares:
            assert average_in_shared_memory(wrapped)
        found.append(_gradients(wrapped, batch))
    everyones: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyones, found[1])
    for k, (shared, sent) in enumerate(zip(found[1], found[0], strict=True)):
        assert_bitwise(shared, everyones[0][k], f"tensor {k} as rank 0 has it")
        assert_near(shared, sent, f"tensor {k}")


@pytest.mark.parametrize("world_size,bucket_mb", [(2, 25), (3, 0.0001)])
def test_averages_in_shared_memory_equal_ddps(world_size: int, bucket_mb: float) -> None:
    run_world(world_size, _average, bucket_mb)


def _apart(rank: int, world_size: int) -> None:
    sharded = sharded_dlrm(world_size, optimizer=oper.SGD(lr=0.1))
    assert not average_in_shared_memory(DDP(sharded))
    assert not average_in_shared_memory(DDP(torch.nn.Linear(3, 3)))


def test_ranks_that_share_no_memory_use_messages() -> None:
    run_world(2, _apart, labels="ab")


def _one_ends(rank: int, world_size: int) -> None:
    sharded = sharded_dlrm(world_size, optimizer=oper.SGD(lr=0.1))
    wrapped = DDP(sharded)
    assert average_in_shared_memory(wrapped)
    loss, _ = wrapped(make_batch(rank, 9))
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerLostError, match="rank=1"):
        loss.backward()


def test_a_rank_that_ends_before_the_average_is_named() -> None:
    with world(2, _one_ends) as running:
        running.receive(0)
