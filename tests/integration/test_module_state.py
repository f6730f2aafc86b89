"""What programs do to a module and its parameters: the sharded one follows, or refuses by name."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oper
from oper.errors import InvalidInputError, OperError
from oper.plan import Plan, uniform_plan
from oper.tables import TableSpec
from tests.world_support import run_world

pytest.importorskip("torchrec")
import torchrec
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KJT

LR = 0.5


def bag(rows: int = 10, dim: int = 4, **fields: Any) -> nn.EmbeddingBag:
    torch.manual_seed(3)
    return nn.EmbeddingBag(rows, dim, **{"mode": "sum"} | fields)


def shard(module: nn.Module, **fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without statistics.*")
        warnings.filterwarnings("ignore", message=".*table sizes.*")
        return oper.shard(module, **{"optimizer": oper.SGD(lr=LR)} | fields)


def collection(names: tuple[str, ...] = ("a", "b"), **fields: Any) -> Any:
    torch.manual_seed(5)
    return torchrec.EmbeddingBagCollection(tables=[
        torchrec.EmbeddingBagConfig(name=n, num_embeddings=10, embedding_dim=4,
                                    feature_names=[f"f_{n}"]) for n in names], **fields)


def kjt(ids: torch.Tensor, keys: tuple[str, ...] = ("f_a", "f_b")) -> KJT:
    return KJT(list(keys), ids, lengths=torch.full((len(keys),), ids.numel() // len(keys)))


def rows(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight").detach().clone()


# ---- reading and writing -------------------------------------------------------------------------

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill_": lambda w: w.fill_(2.0),
    "a row": lambda w: w.__setitem__(3, 7.0),
    "rows by index": lambda w: w.__setitem__(torch.tensor([1, 5]), torch.ones(2, 4)),
    "a mask": lambda w: w.__setitem__(w > 0, 0.0),
    "a view of rows": lambda w: w[2:6].mul_(3),
    "a view of a view": lambda w: w[2:6][1].add_(1),
    "negative row": lambda w: w[-1].zero_(),
    "strided rows": lambda w: w[1:9:3].fill_(4),
    "columns": lambda w: w[:, 1:3].add_(1),
    "transposed": lambda w: w.t()[0].fill_(3),
    "flat": lambda w: w.view(-1)[7:9].fill_(5),
    "split": lambda w: w.split(4)[1].zero_(),
    "init": nn.init.ones_,
    "copy_": lambda w: w.copy_(torch.arange(40.0).view(10, 4)),
    "itself": lambda w: w.mul_(w),
    "foreach": lambda w: torch._foreach_lerp_([w], [torch.zeros(10, 4)], 0.25),
    "out=": lambda w: torch.add(w, 1.0, out=w),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_rows(name: str) -> None:
    want, sharded = bag(), shard(bag())
    for module in (want, sharded):
        with torch.no_grad():
            WRITES[name](module.weight)
        WRITES[name](module.weight.data)
    assert torch.equal(rows(sharded), want.weight)
    ids = torch.tensor([[0, 3, 9]])
    assert torch.equal(sharded(ids), want(ids))


def test_initialisers_and_assigned_data() -> None:
    want, sharded = nn.Sequential(bag(), nn.Linear(4, 2)), nn.Sequential(bag(), nn.Linear(4, 2))
    shard(sharded)

    def start(module: nn.Module) -> None:
        if hasattr(module, "weight"):
            nn.init.constant_(module.weight, 0.5)
            module.weight.data = module.weight.data * 3

    for model in (want, sharded):
        model.apply(start)
    assert torch.equal(rows(sharded[0]), want[0].weight)
    with pytest.raises(InvalidInputError, match="cannot set the data"):
        sharded[0].weight.data = torch.zeros(3, 4)


def test_reading() -> None:
    want, sharded = bag(), shard(bag())
    weight = sharded.weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf
    assert (weight.shape, weight.dtype, weight.device) == (
        want.weight.shape, want.weight.dtype, want.weight.device)
    assert torch.equal(weight.norm(), want.weight.norm())
    assert weight[3].tolist() == want.weight[3].tolist()
    values = weight.detach().numpy()
    assert (values == want.weight.detach().numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1.0
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
    lambda w: w.data_ptr(), lambda w: w.untyped_storage(), torch.from_dlpack,
    lambda w: w.share_memory_(), lambda w: w.apply_(lambda x: 2 * x)])
def test_memory_of_its_own_is_not_given_out(take: Callable[[torch.Tensor], Any]) -> None:
    sharded = shard(bag())
    for tensor in (sharded.weight, sharded.weight.data):
        with pytest.raises(OperError, match="memory of table"):
            take(tensor)


def test_a_collections_tables_are_frozen_together() -> None:
    model = shard(collection())
    model.embedding_bags.requires_grad_(False)
    assert not model(kjt(torch.tensor([1, 2, 3, 4]))).values().requires_grad


def test_options_cannot_be_set_later() -> None:
    sharded = shard(bag())
    with pytest.raises(InvalidInputError, match="max_norm"):
        sharded.max_norm = 1.0
    buffered = bag()
    buffered.register_buffer("use", torch.zeros(3))
    with pytest.raises(InvalidInputError, match="buffers"):
        shard(buffered, modules=[""])


def test_parameters_are_those_of_the_unsharded_model() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"c": collection(), "bag": bag(), "dense": nn.Linear(3, 2)})

    want, sharded = model(), shard(model())
    assert [(n, p.shape, p.requires_grad) for n, p in sharded.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in want.named_parameters()]
    assert list(sharded.state_dict()) == list(want.state_dict())
    assert "embedding_bags" in repr(sharded) and "10, 4" in repr(sharded)
    assert sharded["c"].fused_optimizer.params["embedding_bags.a.weight"] is (
        sharded["c"].embedding_bags["a"].weight)


def replaced(module: nn.Module) -> Any:
    module.weight = nn.Parameter(torch.zeros(10, 4))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "assigned": replaced,
    "deleted": lambda m: delattr(m, "weight"),
    "swapped": lambda m: torch.utils.swap_tensors(m.weight, nn.Parameter(torch.zeros(10, 4))),
    "functional_call": lambda m: torch.func.functional_call(
        m, {"weight": torch.zeros(10, 4)}, (torch.tensor([[1]]),)),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "meta": lambda m: m.to("meta"),
    "gradient of the weight": lambda m: m.weight.pow(2).sum().backward(),
    "tied projection": lambda m: torch.nn.functional.linear(
        torch.ones(4), m.weight).sum().backward(),
    "pickled": lambda m: torch.save(m, io.BytesIO()),
    "scripted": torch.jit.script,
    "traced": lambda m: torch.jit.trace(m, (torch.tensor([[1]]),)),
    "gradient hook": lambda m: m.weight.register_hook(lambda g: 2 * g),
    "accumulation hook": lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
    "no ids": lambda m: m(None),
    "ids of three dimensions": lambda m: m(torch.zeros(1, 1, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused_and_nothing_changes(name: str) -> None:
    sharded = shard(bag())
    before = rows(sharded)
    with pytest.raises(OperError):
        REFUSED[name](sharded)
    assert torch.equal(rows(sharded), before) and sharded.weight.grad is None
    sharded(torch.tensor([[1]])).sum().backward()
    before[1] -= LR
    assert torch.equal(rows(sharded), before)


def test_conversions_that_change_nothing() -> None:
    sharded = shard(nn.Sequential(bag()))
    assert sharded.to("cpu").float().cpu() is sharded
    sharded.share_memory()


def test_a_value_that_a_graph_keeps_is_not_silently_updated() -> None:
    sharded = shard(bag())
    x = torch.ones(4, requires_grad=True)
    kept = (sharded.weight.detach() * x).sum()
    sharded(torch.tensor([[1]])).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


# ---- freezing ------------------------------------------------------------------------------------

@pytest.mark.parametrize("optimizer", [oper.SGD(lr=LR), oper.Adam(lr=LR)], ids=lambda o: o.name)
def test_frozen_tables_stay_as_they_are_and_go_on_where_they_were(optimizer: Any) -> None:
    ids = torch.tensor([1, 2, 3, 4])

    def trained(freeze: Callable[[nn.Module, bool], Any] | None) -> dict[str, torch.Tensor]:
        model = shard(nn.Sequential(collection()), optimizer=optimizer)
        for step in range(4):
            if freeze is not None and step in (1, 3):
                freeze(model, step == 3)
            if freeze is None and step in (1, 2):
                continue
            out = model(kjt(ids)).values().sum()
            assert out.requires_grad == (freeze is None or step in (0, 3))
            if out.requires_grad:
                out.backward()
        state = model.state_dict()
        return state | {f"{key} {n}": x for key, s in model[0].fused_optimizer.state_dict()[
            "state"].items() for n, x in s.items()}

    want = trained(None)
    for freeze in (lambda m, on: m.requires_grad_(on), lambda m, on: m[0].requires_grad_(on),
                   lambda m, on: [p.requires_grad_(on) for p in m.parameters()]):
        got = trained(freeze)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("optimizer", [oper.SGD(lr=LR), oper.Adam(lr=LR, weight_decay=0.1),
                                       oper.RowWiseAdagrad(lr=LR, max_row_norm=0.1)],
                         ids=lambda o: o.name)
def test_one_table_of_a_collection_is_frozen(optimizer: Any) -> None:
    model = shard(collection(), optimizer=optimizer)
    ids = torch.tensor([1, 2, 3, 4])
    model(kjt(ids)).values().sum().backward()
    before = {n: rows(m) for n, m in model.embedding_bags.items()}
    states = copy.deepcopy(model.fused_optimizer.state_dict())
    model.embedding_bags["a"].weight.requires_grad = False
    for _ in range(2):
        model(kjt(ids)).values().sum().backward()
    assert torch.equal(rows(model.embedding_bags["a"]), before["a"])
    assert not torch.equal(rows(model.embedding_bags["b"]), before["b"])
    key = "embedding_bags.a.weight"
    after = model.fused_optimizer.state_dict()["state"].get(key, {})
    for name, value in states["state"].get(key, {}).items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_table_is_trained_that_is_not_frozen_in_either_pass(when: str) -> None:
    model = shard(bag())
    before = rows(model)
    model.weight.requires_grad = when != "forward"
    weights = torch.ones(1, 1, requires_grad=True)
    out = model(torch.tensor([[1]]), per_sample_weights=weights)
    model.weight.requires_grad = when == "forward"
    out.sum().backward()
    assert torch.equal(rows(model), before)
    assert torch.equal(weights.grad, before[1].sum().view(1, 1))


def test_frozen_before_sharding_and_read_only() -> None:
    plain = bag()
    plain.weight.requires_grad = False
    model = shard(plain)
    assert not model.weight.requires_grad and not model(torch.tensor([[1]])).requires_grad
    model.requires_grad_(True)
    assert model(torch.tensor([[1]])).requires_grad
    served = shard(bag(), objective="inference", optimizer=None)
    assert not served.weight.requires_grad
    with pytest.raises(InvalidInputError, match="sharded for inference"):
        served.requires_grad_(True)


# ---- what a backward pass updates ----------------------------------------------------------------

def reference(optimizer: type[torch.optim.Optimizer], **fields: Any) -> tuple[Any, Any]:
    module = bag()
    return module, optimizer(module.parameters(), **fields)


def test_two_lookups_in_one_backward_pass_are_one_update() -> None:
    want, adagrad = reference(torch.optim.Adagrad, lr=LR, eps=1e-8)
    model = shard(bag(), optimizer=oper.Adagrad(lr=LR, eps=1e-8))
    for _ in range(2):
        for module in (want, model):
            first, second = module(torch.tensor([[1, 2]])), module(torch.tensor([[2, 3]]))
            (first.sum() + second.pow(2).sum()).backward()
        adagrad.step()
        adagrad.zero_grad()
    torch.testing.assert_close(rows(model), want.weight.detach())
    assert model.tables.num_steps == 2


def test_gradients_that_are_asked_for_by_name_update_nothing() -> None:
    model = shard(bag())
    before = rows(model)
    dense, weights = torch.ones(4, requires_grad=True), torch.ones(1, 1, requires_grad=True)

    def loss() -> torch.Tensor:
        return (model(torch.tensor([[1]]), per_sample_weights=weights) * dense).sum()

    (gradient,) = torch.autograd.grad(loss(), weights)
    assert torch.equal(gradient, before[1].sum().view(1, 1))
    torch.autograd.grad(loss(), dense)
    loss().backward(inputs=[dense])
    assert torch.equal(rows(model), before) and torch.equal(dense.grad, before[1])
    loss().backward()
    before[1] -= LR
    assert torch.equal(rows(model), before)


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            raise RuntimeError("on purpose")

    model = shard(bag())
    before = rows(model)
    early = model(torch.tensor([[1]]), per_sample_weights=Fails.apply(
        torch.ones(1, 1, requires_grad=True)))
    late = Fails.apply(model(torch.tensor([[2]])))
    with pytest.raises(RuntimeError, match="on purpose"):
        (early.sum() + late.sum()).backward()
    updated = rows(model)
    model(torch.tensor([[3]])).sum().backward()
    updated[3] -= LR
    assert torch.equal(rows(model), updated)
    assert torch.equal(updated[2], before[2])
    assert not model.tables.collected._parts


def test_assigned_state_keeps_the_dtype() -> None:
    for model, key in ((shard(bag()), "weight"), (shard(collection()), "embedding_bags.a.weight")):
        state = model.state_dict()
        state[key] = state[key].double()
        with pytest.warns(UserWarning, match="keeps its dtype"):
            model.load_state_dict(state, assign=True)
        assert model.state_dict()[key].dtype == torch.float32
        model.load_state_dict(dict(state))
        model.load_state_dict({k: x.float() for k, x in state.items()}, assign=True)


def test_initialisers_that_ask_for_the_class() -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.EmbeddingBag | nn.Embedding):
            nn.init.constant_(module.weight, 0.25)

    model = shard(nn.ModuleDict({"bag": bag(), "one": nn.Embedding(5, 4), "c": collection()}))
    model.apply(start)
    assert all(bool((x == 0.25).all()) for x in model.state_dict().values())
    with pytest.raises(OperError, match="call the collection"):
        model["c"].embedding_bags["a"](torch.tensor([[1]]))


# ---- tensors that change between passes ----------------------------------------------------------

@pytest.mark.parametrize("what", ["ids", "weights"])
def test_a_batch_that_changes_before_its_backward_pass_is_refused(what: str) -> None:
    model = shard(bag())
    before = rows(model)
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2)
    out = model(ids, per_sample_weights=weights)
    (ids if what == "ids" else weights).fill_(3)
    with pytest.raises(InvalidInputError, match="changed in place since the lookup"):
        out.sum().backward()
    assert torch.equal(rows(model), before)


def test_a_collection_refuses_changed_ids_and_keeps_lengths() -> None:
    model = shard(collection(("a",)))
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    batch = KJT(["f_a"], ids, lengths=lengths)
    before = rows(model.embedding_bags["a"])
    out = model(batch).values()
    lengths.copy_(torch.tensor([2, 1]))  # the forward pass has read them
    out[1].sum().backward()
    before[2:4] -= LR
    assert torch.equal(rows(model.embedding_bags["a"]), before)
    out = model(batch).values()
    ids.fill_(7)
    with pytest.raises(InvalidInputError, match=r"changed in place.*ids"):
        out.sum().backward()


def test_buffers_used_again_while_gradients_accumulate() -> None:
    want, model = shard(bag()), shard(bag())
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(want) if not last else warnings.catch_warnings():
            want(torch.tensor([batch])).pow(2).sum().backward()
    ids, gradient = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4)
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(model) if not last else warnings.catch_warnings():
            ids.copy_(torch.tensor([batch]))
            out = model(ids)
            gradient.copy_(2 * out.detach())
            out.backward(gradient)
    assert torch.equal(rows(model), rows(want))


def test_ids_that_change_after_they_were_announced() -> None:
    model = shard(collection(("a",)))
    ids = torch.tensor([1, 2])
    batch = kjt(ids, ("f_a",))
    model.prefetch(batch)
    for _, coming in model._ahead._coming.values():
        coming.result()
    ids.copy_(torch.tensor([5, 6]))
    want = rows(model.embedding_bags["a"])
    assert torch.equal(model(batch).values()[0], want[5] + want[6])


# ---- copies --------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [bag, lambda: nn.Embedding(10, 4), collection],
                         ids=["bag", "embedding", "collection"])
def test_deepcopy_is_independent(make: Callable[[], nn.Module]) -> None:
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        out = model(kjt(ids)).values() if hasattr(model, "embedding_bags") else model(ids[None])
        out.pow(2).sum().backward()
        return out.detach()

    ids = torch.tensor([1, 2, 3, 4])
    model = shard(make(), optimizer=oper.Adam(lr=LR))
    step(model, ids)
    model.tables.param_groups[0]["lr"] = 0.25
    twin = copy.deepcopy(model)
    assert twin.tables.param_groups[0]["lr"] == 0.25
    before = {k: x.clone() for k, x in twin.state_dict().items()}
    out = step(model, ids)
    assert all(torch.equal(x, before[k]) for k, x in twin.state_dict().items())
    assert torch.equal(step(twin, ids), out)
    state = twin.state_dict()
    assert all(torch.equal(x, state[k]) for k, x in model.state_dict().items())
    for p in twin.parameters():
        p.data.zero_()
    assert not any(torch.equal(x, torch.zeros_like(x)) for x in model.state_dict().values())


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_models(average: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(bag(), nn.Linear(4, 2, bias=False))

    want, sharded = model(), shard(model())
    averages = [AveragedModel(m, multi_avg_fn=average) for m in (want, sharded)]
    ids = torch.tensor([[1, 2]])
    for _ in range(3):
        want.zero_grad()
        for m in (want, sharded):
            m(ids).sum().backward()
        with torch.no_grad():
            want[0].weight -= LR * want[0].weight.grad
        for a, m in zip(averages, (want, sharded), strict=True):
            a.update_parameters(m)
    for a, b in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(b.detach().clone(), a.detach())
    torch.testing.assert_close(averages[1](ids), averages[0](ids))


def test_tables_end_with_their_module() -> None:
    model = shard(collection())
    tables = weakref.ref(model.tables)
    model(kjt(torch.tensor([1, 2, 3, 4]))).values().sum().backward()
    gc.disable()
    try:
        del model
        assert tables() is None
    finally:
        gc.enable()


# ---- which modules are sharded -------------------------------------------------------------------

class Named(torchrec.EmbeddingBagCollection):  # type: ignore[misc]
    """A collection under another name."""


class Doubling(torchrec.EmbeddingBagCollection):  # type: ignore[misc]
    def forward(self, features: KJT) -> Any:
        return super().forward(features)


class Position(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_subclasses() -> None:
    configs = collection().embedding_bag_configs()
    model = shard(nn.Sequential(Named(tables=configs)))
    assert isinstance(model[0], oper.integration.torchrec_modules.ShardedEmbeddingBags)
    assert list(model[0].fused_optimizer.params) == [
        "embedding_bags.a.weight", "embedding_bags.b.weight"]
    kept = nn.ModuleDict({"c": Doubling(tables=configs), "p": Position(5, 4), "bag": bag()})
    with pytest.warns(UserWarning, match="stay unsharded") as said:
        model = oper.shard(kept, optimizer=oper.SGD(lr=LR))
    assert any("Doubling overrides forward" in str(w.message) for w in said)
    assert isinstance(model["c"], Doubling) and isinstance(model["p"], Position)
    with pytest.raises(InvalidInputError, match="overrides forward"):
        shard(nn.Sequential(Position(5, 4)), modules=["0"])


def test_fused_collections_and_virtual_tables() -> None:
    fused = FusedEmbeddingBagCollection(
        tables=collection().embedding_bag_configs(), optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1})
    with pytest.warns(UserWarning, match="FusedEmbeddingBagCollection"):
        oper.shard(nn.ModuleDict({"fused": fused, "bag": bag()}), optimizer=oper.SGD(lr=LR))
    config = torchrec.EmbeddingBagConfig(name="v", num_embeddings=10, embedding_dim=4,
                                         feature_names=["f"], use_virtual_table=True,
                                         total_num_buckets=10)
    plain = collection(("v",))
    plain._embedding_bag_configs[0] = config
    with pytest.raises(InvalidInputError, match="use_virtual_table"):
        shard(plain)
    half = collection().half()
    with pytest.raises(InvalidInputError, match="data_type"):
        shard(half)
    assert collection().embedding_bag_configs()[0].data_type == DataType.FP32


def test_hooks_stay_and_gradient_hooks_are_refused() -> None:
    seen: list[str] = []
    module = bag()
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    model = shard(module.eval())
    assert not model.training
    model(torch.tensor([[1]])).sum().backward()
    model.state_dict()
    assert seen == ["forward", "backward", "state"]
    hooked = bag()
    hooked.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(InvalidInputError, match="hooks on its gradient"):
        shard(hooked)


def test_a_topology_of_another_world() -> None:
    with pytest.raises(InvalidInputError, match="ranks of the topology"):
        shard(bag(), topology="h100-8")


def test_resharding_by_torchrec_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"oper\.migrate"):
        shard(collection()).update_shards({}, None, None)


# ---- two processes -------------------------------------------------------------------------------

def striped(name: str, world_size: int) -> Plan:
    return uniform_plan([TableSpec(name, 10, 4, (name,), optimizer="sgd")], world_size)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(10, 4, mode="sum")
        self.dense = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.bag(ids))


def _ddp(rank: int, world_size: int, order: str) -> dict[str, torch.Tensor]:
    from torch.nn.parallel import DistributedDataParallel as DDP

    inner = Net()

    if order == "before":
        model: Any = DDP(shard(inner, plan=striped("bag", world_size)))
    elif order == "child":
        inner.bag = shard(inner.bag, plan=striped("weight", world_size))
        model = DDP(inner)
    elif order == "around":
        model = shard(DDP(inner), plan=striped("module.bag", world_size))
    else:
        model = DDP(inner)
        shard(inner, plan=striped("bag", world_size))
    optimizer = torch.optim.SGD(inner.parameters(), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[step, 2 * step + rank]])).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(inner.dense.parameters(), 0.1)
        optimizer.step()
    twin = copy.deepcopy(inner)
    with torch.no_grad():
        inner.bag.weight[3] += 1
    found = {"bag": inner.bag.weight.detach().clone(), "twin": twin.bag.weight.detach().clone(),
             "dense": inner.dense.weight.detach().clone()}
    # Values that differ between ranks: rank 0's are everyone's.
    inner.bag.weight.data.fill_(float(rank + 1))
    assert torch.equal(inner.bag.weight, torch.ones(10, 4))
    return found


@pytest.mark.parametrize("order", ["before", "child", "around", "inside"])
def test_data_parallel_in_either_order(order: str) -> None:
    want = Net()
    dense = torch.optim.SGD(want.parameters(), lr=LR)
    for step in range(3):
        dense.zero_grad()
        losses = [want(torch.tensor([[step, 2 * step + r]])).pow(2).mean() for r in range(2)]
        (sum(losses) / 2).backward()
        torch.nn.utils.clip_grad_norm_(want.dense.parameters(), 0.1)
        dense.step()
    first, second = run_world(2, _ddp, order)
    for found in (first, second):
        torch.testing.assert_close(found["twin"], want.bag.weight.detach())
        torch.testing.assert_close(found["dense"], want.dense.weight.detach())
        after = want.bag.weight.detach().clone()
        after[3] += 1
        torch.testing.assert_close(found["bag"], after)


def _wrapped(rank: int, world_size: int) -> bool:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    inner = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])], is_weighted=True)
    model = shard(nn.Sequential(FeatureProcessedEmbeddingBagCollection(
        inner, PositionWeightedModuleCollection({"f": 10}, torch.device("cpu")))))
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    names = [n for n, _ in parallel.named_parameters()]
    before = {n: p.detach().clone() for n, p in parallel.named_parameters()}
    ids = torch.tensor([1, 2 + rank])
    parallel(KJT(["f"], ids, lengths=torch.tensor([2]))).values().sum().backward()
    (table,) = [n for n in names if n.endswith("embedding_bags.t.weight")]
    after = dict(parallel.named_parameters())[table].detach().clone()
    return bool((after != before[table]).any(dim=1).nonzero()[:, 0].tolist() == [1, 2, 3])


def test_model_parallel_with_default_sharders_around_feature_processors() -> None:
    assert run_world(2, _wrapped) == [True, True]


def _collisions(rank: int, world_size: int) -> bool:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from tests.integration.test_managed_collision import batch_of, make

    model = shard(nn.Sequential(make()))
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    out, _ = parallel(batch_of(0, rank, world_size))
    out.values().sum().backward()
    return True


def test_model_parallel_with_default_sharders_around_managed_collisions() -> None:
    assert run_world(2, _collisions) == [True, True]
