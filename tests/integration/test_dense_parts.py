"""Dense parts of models: a DLRM that copies less, averaged gradients, pipelines under DDP."""

import copy
import functools
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel as DDP
from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import oper
from oper.errors import InvalidInputError, PeerLostError
from oper.integration.dense.dlrm import DotInteraction, PooledRows, copy_less
from oper.integration.dense.gradients import average_in_shared_memory
from oper.integration.splitting import joined, split_batch
from tests.dlrm_support import (
    EBC,
    KEYS,
    make_batch,
    make_collection,
    make_dlrm,
    make_kjt,
    plan_for,
    sharded_dlrm,
)
from tests.runtime_support import assert_bitwise, assert_near, whole
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
    # As columns of a wider matrix, which is not contiguous.
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


def test_second_derivatives_of_the_interaction() -> None:
    """As a penalty on the norm of gradients takes them."""
    found = []
    for interact, dtype in ((DotInteraction(3), torch.float32), (_reference, torch.float64)):
        torch.manual_seed(2)
        given = [torch.randn(5, *shape).to(dtype).requires_grad_() for shape in ((8,), (3, 8))]
        out = interact(*given)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        sum(x.square().sum() for x in first).backward()
        found.append([out, *first, *(x.grad for x in given)])
    for got, want in zip(*found, strict=True):
        assert got is not None and want is not None
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-2)


def test_the_interaction_in_forward_mode_and_in_transforms() -> None:
    g = torch.Generator().manual_seed(0)
    dense, sparse = torch.randn(3, 4, generator=g), torch.randn(3, 2, 4, generator=g)
    found = []
    for module in (InteractionArch(2), DotInteraction(2)):
        def total(dense: torch.Tensor, of: Any = module) -> torch.Tensor:
            return of(dense, sparse).pow(2).sum()

        with forward_ad.dual_level():
            out = module(forward_ad.make_dual(dense, dense), sparse)
            tangent = forward_ad.unpack_dual(out).tangent
        found.append((tangent, torch.func.grad(total)(dense)))
    torch.testing.assert_close(*found)


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


def _gradients(model: Any, batch: Any) -> list[torch.Tensor]:
    """Return the dense gradients of three steps, and the dense parameters after these steps."""
    found = []
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    for _ in range(3):
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


def _static(rank: int, world_size: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, mode="sum"), torch.nn.Linear(4, 1))
    wrapped = DDP(model, static_graph=True)
    oper.shard(wrapped, optimizer=oper.SGD(lr=0.0))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor([[1, 2 + rank]])).sum().backward()
    rows = model[0].weight.detach().clone()
    return [rows[[1, 2 + r]].sum(dim=0) for r in range(world_size)] + [model[1].weight.grad[0]]


def test_sharding_inside_ddp_keeps_its_static_graph() -> None:
    for first, second, gradient in run_world(2, _static):
        torch.testing.assert_close(gradient, (first + second) / 2)


def _apart(rank: int, world_size: int) -> None:
    sharded = sharded_dlrm(world_size, optimizer=oper.SGD(lr=0.1))
    assert not average_in_shared_memory(DDP(sharded))
    assert not average_in_shared_memory(DDP(torch.nn.Linear(3, 3)))


def _overlapping(rank: int, world_size: int) -> bool:
    """Groups of equal size, in which some ranks have the same number, but not the same members."""
    tables, dense = [[torch.distributed.new_group(ranks) for ranks in some]
                     for some in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
    bag = torch.nn.EmbeddingBag(9, 4, mode="sum")
    sharded = torch.nn.Sequential(oper.shard(
        bag, optimizer=oper.SGD(lr=0.1), process_group=tables[rank // 2]), torch.nn.Linear(4, 1))
    return average_in_shared_memory(DDP(sharded, process_group=dense[rank % 2]))


def test_other_groups_of_the_same_size_use_messages() -> None:
    assert run_world(4, _overlapping) == [False] * 4


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


# ---- pipelines under DistributedDataParallel -----------------------------------------------------

LR, STEPS = 0.2, 4


def _train(rank: int, world_size: int, num_parts: int | tuple[int, ...] | None
           ) -> tuple[Any, list[Any], Any]:
    """Return the state, the results of the steps, and the number of parts."""
    model = sharded_dlrm(world_size, "mixed0", optimizer=oper.RowWiseAdagrad(lr=LR))
    wrapped = DDP(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.is_leaf], lr=LR)
    pipeline = oper.MicroBatchPipeline(wrapped, optimizer, num_parts)
    steps = STEPS if num_parts else 19
    batches = iter([make_batch(100 * rank + s, 9 + 3 * rank) for s in range(steps)])
    found = []
    with pytest.raises(StopIteration):
        while True:
            found.append(pipeline.progress(batches))
    assert len(found) == steps and model.get_submodule(EBC).tables.num_steps == steps
    assert not model.get_submodule(EBC)._prefetched.queued  # each was looked up
    return whole(model.state_dict()), found, pipeline.num_parts


def _both(rank: int, world_size: int) -> None:
    want, outputs, _ = _train(rank, world_size, 1)
    for num_parts in (3, (1, 2)):
        got, parted, _ = _train(rank, world_size, num_parts)
        assert_near(got, want, "state")
        for (loss, (_, logits, labels)), (loss_3, (_, logits_3, labels_3)) in zip(
                outputs, parted, strict=True):
            assert_near(loss_3, loss, "loss")
            assert_near(logits_3, logits, "logits")
            assert torch.equal(labels, labels_3)


def test_equals_whole_batches_under_ddp() -> None:
    run_world(2, _both, labels="ab")


def _noted(beside: set[str], call: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call; add its name to `beside` unless the main thread makes it."""
    if threading.current_thread() is not threading.main_thread():
        beside.add(call.__name__)
    return call(*args, **kwargs)


def _whole_batches(rank: int, world_size: int) -> set[str]:
    """Train whole batches in a plain loop and in the pipeline, with bitwise equal results; return
    the names of the calls that the pipeline has made on another thread."""
    found = []
    for is_plain in (True, False):
        model = sharded_dlrm(world_size, "mixed0", optimizer=oper.RowWiseAdagrad(lr=LR))
        tables, beside = model.get_submodule(EBC).tables, set[str]()
        for name in ("forward", "step"):
            setattr(tables, name, functools.partial(_noted, beside, getattr(tables, name)))
        wrapped = DDP(model, static_graph=True, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.is_leaf], lr=LR)
        pipeline = oper.MicroBatchPipeline(wrapped, optimizer, 1)
        for s in range(STEPS):
            batch = make_batch(100 * rank + s, 9 + 3 * rank)
            if s == 2:
                beside.clear()
            if is_plain:
                optimizer.zero_grad(set_to_none=True)
                wrapped(batch)[0].backward()
                optimizer.step()
            else:
                pipeline.progress(iter([batch]))
        found.append((whole(model.state_dict()), beside))
    (want, none), (got, hidden) = found
    assert_bitwise(got, want, "state")
    assert not none
    return hidden


@pytest.mark.parametrize("labels", ["ab", "aa"])
def test_the_exchange_of_a_whole_batch_overlaps_dense_layers(labels: str) -> None:
    """A thread makes the exchanges, with the bits of a plain loop. One domain has none."""
    for hidden in run_world(2, _whole_batches, labels=labels):
        assert hidden == ({"forward", "step"} if labels == "ab" else set())


def _choose(rank: int, world_size: int) -> Any:
    return _train(rank, world_size, None)[2]


def test_all_ranks_choose_the_same_number_of_parts() -> None:
    found = run_world(2, _choose, labels="ab")
    assert found[0] == found[1] and found[0] in (1, 2, (1, 2), 3, 4, 6)


@pytest.mark.filterwarnings("ignore:no access statistics")
def test_no_more_parts_than_samples_are_tried() -> None:
    pipeline = oper.MicroBatchPipeline(oper.shard(Remapping(0), optimizer=oper.SGD(lr=LR)))
    for seed in range(16):
        pipeline.progress(iter([make_batch(seed, 4)]))
    assert pipeline.num_parts in (1, 2, (1, 2), 3, 4)


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_have_the_samples_of_the_batch_in_order(weighted: bool) -> None:
    features, dense = make_kjt(1, 11, weighted), torch.randn(11, 3)
    bags = features[KEYS[0]]
    parts, sizes = split_batch({"x": (features, dense), "name": "kept", "bags": bags,
                                "array": dense.numpy(), "scalar": np.array(3)}, 3)
    assert sizes == [3, 4, 4]
    assert all(p["name"] == "kept" for p in parts)
    assert torch.equal(torch.cat([p["x"][1] for p in parts]), dense)
    assert np.array_equal(np.concatenate([p["array"] for p in parts]), dense.numpy())
    assert all(p["scalar"] == 3 for p in parts)
    for part, offset in zip(parts, (0, 3, 7), strict=True):
        got, want = part["bags"].to_dense(), bags.to_dense()[offset:]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))
        if weighted:
            got, want = part["bags"].to_dense_weights(), bags.to_dense_weights()[offset:]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))
    for key in KEYS:
        got = [p["x"][0][key] for p in parts]
        want = features[key]
        assert torch.equal(torch.cat([x.lengths() for x in got]), want.lengths())
        assert torch.equal(torch.cat([x.values() for x in got]), want.values())
        if weighted:
            assert torch.equal(torch.cat([x.weights() for x in got]), want.weights())


def test_pooled_rows_are_split_and_unknown_objects_are_refused() -> None:
    values = torch.randn(5, 3)
    parts, _ = split_batch((values, KeyedTensor(["a", "b"], [1, 2], values)), 2)
    for dense, pooled in parts:
        assert torch.equal(pooled.values(), dense) and torch.equal(pooled["b"], dense[:, 1:])
    with pytest.raises(InvalidInputError, match="samples"):
        split_batch((values, KeyedTensor(["a", "b"], [2, 3], values, key_dim=0)), 2)
    with pytest.raises(InvalidInputError, match=r"tensors in SimpleNamespace=\['ids'\]"):
        split_batch((values, SimpleNamespace(ids=torch.arange(5))), 2)


def test_outputs_of_parts_are_joined() -> None:
    parts = [(torch.tensor(1.0), [torch.ones(2, 3)], "a"), (torch.tensor(4.0), [torch.zeros(1, 3)],
                                                           "a")]
    mean, (rows,), name = joined(parts, [2, 1])
    assert float(mean) == 2.0 and name == "a"
    assert_bitwise(rows, torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]), "rows")
    share, array, same = joined([(0.5, np.ones(2), None), (2.0, np.zeros(1), None)], [2, 1])
    assert share == 1.0 and array.tolist() == [1, 1, 0] and same is None
    with pytest.raises(InvalidInputError, match="cannot join"):
        joined([{"name": "a"}, {"name": "b"}], [2, 1])


class Remapping(torch.nn.Module):
    """Looks up other ids than the batch has."""

    def __init__(self, shift: int = 10**6) -> None:
        super().__init__()
        self.bags, self.shift = make_collection(1), shift
        self.top = torch.nn.Linear(16 * 6, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        kjt = batch.sparse_features
        ids = KeyedJaggedTensor(kjt.keys(), kjt.values() - self.shift, lengths=kjt.lengths())
        return self.top(self.bags(ids).values()).square().mean()


def test_ids_that_the_model_maps_are_not_prefetched() -> None:
    rows = []
    for num_parts in (1, 3):
        torch.manual_seed(0)
        model = oper.shard(Remapping(), optimizer=oper.SGD(lr=LR))
        pipeline = oper.MicroBatchPipeline(model, num_parts=num_parts)
        for seed in range(3):
            batch = make_batch(seed, 9)
            batch.sparse_features = KeyedJaggedTensor(
                batch.sparse_features.keys(), batch.sparse_features.values() + 10**6,
                lengths=batch.sparse_features.lengths())
            pipeline.progress(iter([batch]))
        rows.append(model.bags.tables.read("t4"))
    assert_near(rows[1], rows[0], "rows")


class Weighting(torch.nn.Module):
    """Looks up the ids of the batch, which have no weights, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = make_collection(1, is_weighted=True)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        weights = torch.arange(kjt.values().numel(), dtype=torch.float32)
        return self.bags(KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())
                         ).values().square().mean()


def test_features_that_the_model_weights_are_not_prefetched() -> None:
    model = oper.shard(Weighting(), optimizer=oper.SGD(lr=LR))
    pipeline = oper.MicroBatchPipeline(model, num_parts=3)
    for seed in range(2):
        pipeline.progress(iter([make_batch(seed, 9).sparse_features]))
    assert pipeline._direct == [] and model.bags.tables.num_steps == 2


def test_refusals() -> None:
    with pytest.raises(InvalidInputError, match="samples"):
        split_batch(make_batch(1, 2), 3)
    with pytest.raises(InvalidInputError, match="samples"):
        split_batch((torch.zeros(4, 1), torch.zeros(5, 1)), 2)
    uneven = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]),
                               stride_per_key_per_rank=[[2]])
    with pytest.raises(InvalidInputError, match="split="):
        split_batch((uneven,), 2)
    with pytest.raises(InvalidInputError, match="in parts"):
        oper.MicroBatchPipeline(torch.nn.Linear(1, 1))
    bag = oper.shard(torch.nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    for wrong in (0, (1, 0), (True, 2), ()):
        with pytest.raises(InvalidInputError, match="num_parts"):
            oper.MicroBatchPipeline(bag, num_parts=wrong)
    with pytest.raises(InvalidInputError, match=r"no part of num_parts=\(1, 5\) without a sample"):
        split_batch((torch.zeros(5, 1),), (1, 5))
    assert split_batch((torch.zeros(5, 1),), (1, 2))[1] == [1, 4]
