"""Sharded ``nn.EmbeddingBag`` and ``nn.Embedding``: calls, half precision, a table as a tensor."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import oper
from oper.errors import InvalidInputError, OperError
from oper.plan import uniform_plan
from oper.tables import TableSpec
from tests.checkpoint_support import random_kjt
from tests.integration.module_support import LR, bag, collection, kjt, rows, shard
from tests.programs.weights import WRITES

RATE = 0.25


def shard_bag(module: nn.Module, **fields: Any) -> nn.Module:
    """The sharded copy of a bag, planned without statistics."""
    pooling = getattr(module, "mode", "none")
    spec = TableSpec("weight", module.num_embeddings, module.embedding_dim, (), pooling)
    fields = {"optimizer": oper.SGD(lr=RATE)} | fields
    return oper.shard(copy.deepcopy(module), plan=uniform_plan([spec], 1), **fields)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_last_offset_beyond_the_ids_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="lengths"):
        shard_bag(nn.EmbeddingBag(40, 12, mode="sum", include_last_offset=True))(
            ids(30), torch.tensor([0, 4, 4, 29, 31]))


def test_weights_that_torch_refuses_are_refused() -> None:
    mean = shard_bag(nn.EmbeddingBag(40, 12, mode="mean"))
    with pytest.raises(InvalidInputError, match="per_sample_weights"):
        mean(ids(30).view(6, 5), None, torch.ones(6, 5))
    sums = shard_bag(nn.EmbeddingBag(40, 12, mode="sum"))
    padded = shard_bag(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    for wrong in (torch.ones(6, 5, dtype=torch.float64), torch.ones(6, 4), torch.ones(30)):
        for each in (sums, padded):
            with pytest.raises(InvalidInputError, match="weights"):
                each(ids(30).view(6, 5), None, wrong)


def test_calls_that_torch_refuses_are_refused() -> None:
    sharded = shard_bag(nn.EmbeddingBag(40, 12, mode="sum"))
    with pytest.raises(InvalidInputError, match="offsets"):
        sharded(ids(30))
    for offsets in ([1, 4], [0, 9, 4], [0, 40]):
        with pytest.raises(InvalidInputError, match="lengths"):
            sharded(ids(30), torch.tensor(offsets))
    with pytest.raises(InvalidInputError, match="lengths"):
        sharded(ids(30), torch.tensor([], dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="offsets"):
        sharded(ids(30).view(6, 5), torch.tensor([0, 5]))
    for wrong in (torch.tensor(0), torch.tensor([[0, 4]]), torch.tensor([0.0, 4.0])):
        with pytest.raises(InvalidInputError, match="offsets"):
            sharded(ids(30), wrong)
    with pytest.raises(InvalidInputError, match="id=40,"):
        sharded(torch.tensor([[1, 40]]))
    padded = shard_bag(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    with pytest.raises(InvalidInputError, match="lengths"):
        padded(ids(30), torch.tensor([0, 9, 4]))


class CountsWaits(TorchDispatchMode):
    """Counts torch operators that synchronize with a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "bincount", "repeat_interleave", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in self.WAITS or (name == "index" and any(
                x is not None and x.dtype == torch.bool for x in args[1])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_padding_synchronizes_with_a_device_once() -> None:
    """Once for the number of remaining ids, with and without weights."""
    each = shard_bag(nn.EmbeddingBag(40, 12, mode="sum", padding_idx=0))
    rows = shard_bag(nn.Embedding(40, 12, padding_idx=0))
    calls = [lambda: each(ids(30), torch.tensor([0, 4, 4, 29])),
             lambda: each(ids(30).view(6, 5), None, torch.ones(6, 5)),
             lambda: rows(ids(30))]
    for call in calls:
        with CountsWaits() as waits:
            call()
        assert waits.found == ["nonzero"]


@pytest.mark.parametrize("optimizer", [
    oper.RowWiseAdagrad(lr=0.1, eps=1e-8), oper.RowWiseAdagrad(lr=0.1, weight_decay=0.5),
    oper.Adam(lr=0.1, weight_decay=0.5)], ids=str)
def test_padding_rows_keep_weight_and_state(optimizer: Any) -> None:
    """Weight decay changes the other rows that are looked up, but not the padding rows."""
    for module in (nn.Embedding(40, 8, padding_idx=3), nn.EmbeddingBag(40, 8, padding_idx=3)):
        sharded = shard_bag(module, optimizer=optimizer)
        sharded(torch.tensor([[3, 1, 3], [3, 3, 2]])).sum().backward()
        rows = sharded.tables.read("weight")
        momentum = sharded.tables.read("weight", part="momentum1").view(40, -1)
        for changed in (rows != module.weight, momentum != 0):
            assert changed.any(1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_of_a_table_on_meta_is_zero(kind: type) -> None:
    rows = shard_bag(kind(40, 12, padding_idx=3, device="meta")).state_dict()["weight"]
    assert not rows[3].any() and (rows.abs().sum(1) > 0).sum() == 39


def test_values_without_dense_real_rows_are_refused() -> None:
    sharded = shard_bag(nn.EmbeddingBag(40, 12, mode="sum"))
    for wrong in (torch.zeros(40, 12, device="meta"), torch.zeros(40, 12).to_sparse(),
                  torch.zeros(40, 12, dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match="'weight': device, layout, dtype="):
            sharded.load_state_dict({"weight": wrong})


def test_bags_of_length_zero() -> None:
    # torch itself stumbles over [4, 0]; empty bags by offsets are zeros, and so are these.
    for mode, padding in (("sum", None), ("mean", 3)):
        out = shard_bag(nn.EmbeddingBag(40, 12, mode=mode, padding_idx=padding))(ids(0).view(4, 0))
        assert out.shape == (4, 12) and not out.any()


# ---- half precision ------------------------------------------------------------------------------

HALVES = [torch.float16, torch.bfloat16]


def step_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance to the next number of `dtype`, element by element."""
    near = values.abs().to(dtype)
    return (torch.nextafter(near, torch.full_like(near, torch.inf)) - near).float()


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


def half_collection(data_type: str) -> Any:
    torch.manual_seed(1)
    kind = torchrec.types.DataType(data_type)
    return torchrec.EmbeddingBagCollection(tables=[
        torchrec.EmbeddingBagConfig(
            num_embeddings=50, embedding_dim=24, name="a", feature_names=["f", "g"],
            data_type=kind, pooling=torchrec.PoolingType.MEAN),
        torchrec.EmbeddingBagConfig(
            num_embeddings=30, embedding_dim=8, name="b", feature_names=["g"])], device="cpu")


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_torchrec_collection(data_type: str) -> None:
    """Outputs are float32, as of the unsharded collection; rows have the configuration's dtype."""
    plain = half_collection(data_type)
    sharded = oper.shard(copy.deepcopy(plain), optimizer=oper.RowWiseAdagrad(lr=0.1))
    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16}[data_type]
    state = sharded.state_dict()
    assert state["embedding_bags.a.weight"].dtype == dtype
    assert state["embedding_bags.b.weight"].dtype == torch.float32
    assert sharded.embedding_bags.a.weight.dtype == dtype
    batch = random_kjt({"f": 30, "g": 30}, 5, 0)
    got, want = sharded(batch), plain(batch)
    assert got.keys() == want.keys() and got.values().dtype == want.values().dtype == torch.float32
    assert torch.allclose(got.values(), want.values(), rtol=1e-2, atol=2e-2)
    got.values().pow(2).sum().backward()
    fused = sharded.fused_optimizer.state_dict()["state"]
    assert fused["embedding_bags.a.weight"]["a.momentum1"].dtype == torch.float32
    # Loads its own checkpoint, and an fp32 model's tables, rounded to nearest.
    other = oper.shard(half_collection(data_type), optimizer=oper.RowWiseAdagrad(lr=0.1))
    other.load_state_dict(sharded.state_dict())
    for key, value in sharded.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    wide = {k: torch.randn(v.shape) for k, v in state.items()}
    other.load_state_dict(wide)
    assert torch.equal(other.state_dict()["embedding_bags.a.weight"],
                       wide["embedding_bags.a.weight"].to(dtype))


# ---- a table as a tensor: reading and writing ----------------------------------------------------


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_rows(name: str) -> None:
    """All in-place operations from which random programs (tests/programs) draw."""
    want, sharded = bag(), shard(bag())
    values = torch.arange(40.0).view(10, 4)
    for module in (want, sharded):
        torch.manual_seed(0)
        with torch.no_grad():
            WRITES[name](module.weight, values, 0.25)
        if not name.startswith("data"):
            WRITES[name](module.weight.data, values, 0.25)
    assert torch.equal(rows(sharded), want.weight)
    ids = torch.tensor([[0, 3, 9]])
    assert torch.equal(sharded(ids), want(ids))


def test_reading() -> None:
    want, sharded = bag(), shard(bag())
    weight = sharded.weight
    assert torch.equal(weight.norm(), want.weight.norm())
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    file = io.BytesIO()
    torch.save({"w": weight}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], want.weight)
    assert "10, 4" in repr(sharded) and "table='weight'" in repr(weight)


@pytest.mark.parametrize("read", [
    lambda w: w[2:4], lambda w: w.data, lambda w: w.t(), lambda w: w[3], lambda w: w.detach()])
def test_reading_in_inference_mode(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    want, sharded = bag(), shard(bag())
    with torch.inference_mode():
        assert torch.equal(read(sharded.weight).clone(), read(want.weight))
        sharded.weight.data[1] = 3.0
    assert sharded.weight[1].tolist() == [3.0] * 4


@pytest.mark.parametrize("take", [
    lambda w: w.data_ptr(), lambda w: w.storage(), torch.from_dlpack,
    lambda w: w.data.set_(torch.zeros(10, 4)), lambda w: torch.zeros(0).set_(w.detach()),
    lambda w: w.share_memory_(), lambda w: w.apply_(lambda x: 2 * x)])
def test_access_to_storage_is_refused(take: Callable[[torch.Tensor], Any]) -> None:
    sharded = shard(bag())
    for tensor in (sharded.weight, sharded.weight.data):
        with pytest.raises(OperError, match="memory of table"):
            take(tensor)


def test_requires_grad_of_a_collection_freezes_all_tables() -> None:
    model = shard(collection())
    assert "embedding_bags" in repr(model) and "10, 4" in repr(model)
    assert model.fused_optimizer.params["embedding_bags.a.weight"] is (
        model.embedding_bags["a"].weight)
    model.embedding_bags.requires_grad_(False)
    assert not model(kjt(torch.tensor([1, 2, 3, 4]))).values().requires_grad


def test_options_cannot_be_set_after_sharding() -> None:
    sharded = shard(bag())
    with pytest.raises(InvalidInputError, match="max_norm"):
        sharded.max_norm = 1.0
    with pytest.raises(InvalidInputError, match="mode='max', expected 'sum'"):
        sharded.mode = "max"
    with pytest.raises(InvalidInputError, match="cannot set the data"):
        sharded.weight.data = torch.zeros(3, 4)
    buffered = bag()
    buffered.register_buffer("use", torch.zeros(3))
    with pytest.raises(InvalidInputError, match="buffers"):
        shard(buffered, modules=[""])


def replaced(module: nn.Module) -> Any:
    module.weight = nn.Parameter(torch.zeros(10, 4))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "assigned": replaced,
    "gradient of the weight": lambda m: m.weight.pow(2).sum().backward(),
    "tied projection": lambda m: torch.nn.functional.linear(
        torch.ones(4), m.weight).sum().backward(),
    "no ids": lambda m: m(None),
    "ids of three dimensions": lambda m: m(torch.zeros(1, 1, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused_operations_change_nothing(name: str) -> None:
    sharded = shard(bag())
    before = rows(sharded)
    with pytest.raises(OperError):
        REFUSED[name](sharded)
    assert torch.equal(rows(sharded), before) and sharded.weight.grad is None
    sharded(torch.tensor([[1]])).sum().backward()
    before[1] -= LR
    assert torch.equal(rows(sharded), before)


def test_autograd_detects_updates_of_saved_values() -> None:
    sharded = shard(bag())
    x = torch.ones(4, requires_grad=True)
    kept = (sharded.weight.detach() * x).sum()
    sharded(torch.tensor([[1]])).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_strides_of_a_row_slice_count_from_the_table() -> None:
    want, sharded = bag(), shard(bag())
    for take in (lambda w: w[2:4].as_strided((4,), (1,), 0), lambda w: w[3].as_strided((2,), (4,))):
        assert torch.equal(take(sharded.weight.detach()), take(want.weight.detach()))


def test_values_that_need_a_gradient_are_not_written() -> None:
    """Autograd would have to record such writes."""
    sharded = shard(bag()).requires_grad_(False)
    before = rows(sharded)
    with pytest.raises(InvalidInputError, match="cannot write to table"):
        sharded.weight[3] = torch.ones(4, requires_grad=True)
    assert not sharded.weight.requires_grad and torch.equal(rows(sharded), before)
    with torch.no_grad():
        sharded.weight[3] = torch.ones(4, requires_grad=True)
    assert sharded.weight[3].tolist() == [1.0] * 4
