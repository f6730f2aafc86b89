"""Operations on modules: as on unsharded modules, or an error; few Python calls per batch."""

import contextlib
import copy
import gc
import itertools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

import oper
from oper.errors import InvalidInputError
from oper.plan import Plan, uniform_plan
from oper.tables import TableSpec
from tests.integration.module_support import KJT, LR, bag, collection, kjt, shard
from tests.support import frames_of
from tests.world_support import run_world

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


def test_copies_made_in_inference_mode_can_be_trained() -> None:
    model = shard(bag())
    with torch.inference_mode():
        twin = copy.deepcopy(model)
    twin(torch.tensor([[1]])).sum().backward()
    assert torch.equal(twin.weight[1], model.weight[1] - LR)


def test_tables_are_released_with_their_module() -> None:
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
    """A subclass that overrides nothing."""


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


def test_hooks_are_kept_and_gradient_hooks_are_refused() -> None:
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


def test_resharding_by_torchrec_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"oper\.migrate"):
        shard(collection()).update_shards({}, None, None)


def test_tables_of_a_collection_look_like_separate_modules() -> None:
    plain, model = collection(), shard(collection())
    for name, module in plain.embedding_bags.items():
        ours = model.embedding_bags[name]
        assert (ours.num_embeddings, ours.embedding_dim, ours.mode) == (
            module.num_embeddings, module.embedding_dim, module.mode)
    for module in (plain, model):
        torch.manual_seed(8)
        module.reset_parameters()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("change", [
    lambda m: m.embedding_bags.__setitem__("a", bag()), lambda m: m.embedding_bags.pop("a"),
    lambda m: m.embedding_bags.clear(), lambda m: m.embedding_bags.update({"a": bag()}),
    lambda m: setattr(m, "embedding_bags", nn.ModuleDict())])
def test_tables_of_a_collection_cannot_be_replaced(change: Callable[[Any], Any]) -> None:
    model = shard(collection())
    with pytest.raises(InvalidInputError, match="cannot replace a parameter or child"):
        change(model)
    assert sorted(model.embedding_bags) == ["a", "b"]


# ---- two processes -------------------------------------------------------------------------------


def striped(name: str, world_size: int) -> Plan:
    return uniform_plan([TableSpec(name, 10, 4, (name,), optimizer="sgd")], world_size)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(10, 4, mode="sum")
        self.dense = nn.Linear(4, 2)


def _wrapped(rank: int, world_size: int) -> bool:
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    model = shard(nn.Sequential(FeatureProcessedEmbeddingBagCollection(
        collection("t", is_weighted=True),
        PositionWeightedModuleCollection({"f_t": 10}, torch.device("cpu")))))
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    names = [n for n, _ in parallel.named_parameters()]
    before = {n: p.detach().clone() for n, p in parallel.named_parameters()}
    ids = torch.tensor([1, 2 + rank])
    parallel(KJT(["f_t"], ids, lengths=torch.tensor([2]))).values().sum().backward()
    (table,) = [n for n in names if n.endswith("embedding_bags.t.weight")]
    after = dict(parallel.named_parameters())[table].detach().clone()
    return bool((after != before[table]).any(dim=1).nonzero()[:, 0].tolist() == [1, 2, 3])


def test_model_parallel_with_default_sharders_around_feature_processors() -> None:
    assert run_world(2, _wrapped) == [True, True]


def _collisions(rank: int, world_size: int) -> bool:
    from tests.integration.test_managed_collision import batch_of, make

    model = shard(nn.Sequential(make()))
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    out, _ = parallel(batch_of(0, rank, world_size))
    out.values().sum().backward()
    return True


def test_model_parallel_with_default_sharders_around_managed_collisions() -> None:
    assert run_world(2, _collisions) == [True, True]


def _load_different(rank: int, world_size: int, dynamic: bool) -> list[str]:
    """Rank 1 loads a damaged state; returns its errors, after which all ranks continue."""
    model: Any = shard(Net(), dynamic=oper.DynamicTable() if dynamic else None, modules=["bag"])
    good = {name: getattr(x, "full_tensor", x.clone)() for name, x in model.state_dict().items()}
    entry = "bag.keys" if dynamic else "bag.weight"
    errors = []
    bad_values = [good[entry][:3], good[entry].to_sparse()]
    if not dynamic:
        bad_values.append(torch.quantize_per_tensor(good[entry], 0.1, 0, torch.qint8))
        bad_values.append(torch.nested.as_nested_tensor([good[entry][0]]))
    for bad in ({n: x for n, x in good.items() if n != entry},
                good | {entry: model.state_dict()[entry]},  # distributed
                *(good | {entry: value} for value in bad_values)):
        for strict in (True, False):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(bad if rank else good, strict=strict)
            errors.append(str(caught.value))
    for name, value in model.state_dict().items():
        assert torch.equal(getattr(value, "full_tensor", value.clone)(), good[name])
    model.load_state_dict(good)
    return errors


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_all_ranks_get_the_error_of_a_rank_that_cannot_load(dynamic: bool) -> None:
    first, second = run_world(2, _load_different, dynamic, env={"OPER_DEADLINE_S": "20"})
    name = "bag.keys" if dynamic else "bag.weight"
    for k, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        lacks = f"{name} as a plain tensor" if k > 1 else name
        wanted = (f"missing only on rank 0 or 1=([], ['{lacks}'])" if k < 4
                  else "rank 1: cannot load")
        assert wanted in mine and wanted.removeprefix("rank 1: ") in theirs


def _write_different(rank: int, world_size: int) -> None:
    model = shard(bag())
    model.weight.data.fill_(float(rank + 1))
    assert torch.equal(model.weight, torch.ones(10, 4))


def test_of_values_that_differ_between_ranks_those_of_rank_0_are_written() -> None:
    run_world(2, _write_different)


def _optimizer_state(rank: int, world_size: int) -> list[str]:
    """Rank 1 loads damaged states of the fused optimizer, after which all ranks continue."""
    model = shard(collection(), optimizer=oper.RowWiseAdagrad(lr=LR))
    good = model.fused_optimizer.state_dict()
    short = copy.copy(good["state"])
    name, entries = short.popitem()
    errors = []
    for bad in (short, short | {name: {key: x[:3] for key, x in entries.items()}}):
        with pytest.raises((ValueError, InvalidInputError)) as caught:
            model.fused_optimizer.load_state_dict({"state": bad} if rank else good)
        errors.append(str(caught.value))
    model.fused_optimizer.load_state_dict(good)
    return errors


def test_all_ranks_get_the_error_of_a_rank_that_cannot_load_an_optimizer() -> None:
    first, second = run_world(2, _optimizer_state, env={"OPER_DEADLINE_S": "20"})
    for mine, theirs in zip(first, second, strict=True):
        assert "cannot load the state" in mine and "rank 1: cannot load" in mine
        assert mine.replace("rank 1: ", "")[:200] == theirs[:200]


def _shard_other(rank: int, world_size: int) -> None:
    other = {"objective": "inference", "plan": striped("bag", world_size), "topology": "this-host",
             "dynamic": {"bag": oper.DynamicTable(seed=1)}}
    for name, value in other.items():
        with pytest.raises(InvalidInputError, match=r"since ranks \[1\] pass other") as caught:
            shard(Net(), **{name: value} if rank else {})
        assert f"{name} on this rank" in str(caught.value)


def test_arguments_that_only_some_ranks_pass_are_refused_on_all_ranks() -> None:
    run_world(2, _shard_other)


class Two(nn.Module):
    """A collection and a bag, whose lookups can go wrong before the kernels see them."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.bag = collection(), bag()

    def forward(self, keys: tuple[str, str], bags: Any) -> torch.Tensor:
        ids = kjt(torch.tensor([1, 2]), keys)
        return self.users(ids).values().sum() + self.bag(bags).sum()


def _cannot_look_up(rank: int, world_size: int) -> None:
    """Rank 1's input of the second step is invalid, which the second model skips."""
    for spoils, in_parts in itertools.product(("keys", "bags"), (False, True)):
        kinds, rows = _skipped(rank, spoils, in_parts)
        assert kinds == ["InvalidInputError" if rank else "PeerLostError"], (spoils, in_parts)
        assert all(torch.equal(got, want) for got, want in rows), (spoils, in_parts)


def _skipped(rank: int, spoils: str, in_parts: bool) -> tuple[list[str], list[Any]]:
    models = [shard(Two()) for _ in range(2)]
    good: dict[str, Any] = {"keys": ("f_a", "f_b"), "bags": torch.tensor([[1, 2 + rank]])}
    bad = {"keys": ("f_a", "f_c"), "bags": [[1, 2]]}
    kinds = []
    for model in models:
        for step in range(3):
            if model is models[1] and step == 1:
                continue
            try:
                with oper.micro_batches(model) if in_parts else contextlib.nullcontext():
                    model(**good | ({spoils: bad[spoils]} if rank and step == 1 else {})).backward()
            except oper.OperError as error:
                kinds.append(type(error).__name__)
    return kinds, [(p.detach().clone(), q.detach().clone()) for p, q in zip(
        *(m.parameters() for m in models), strict=True)]


def test_a_rank_whose_input_is_invalid_releases_the_others() -> None:
    """The batch is skipped in all collections, and the next ones are paired with each other."""
    run_world(2, _cannot_look_up, env={"OPER_DEADLINE_S": "20"})


def test_collections_of_a_model_form_a_family() -> None:
    model = shard(Two())
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert set(one.users.tables.family) == {one.users.tables, one.bag.tables}
        assert one.bag.tables.family is one.users.tables.family


# ---- Python calls per batch ----------------------------------------------------------------------

MOST_FRAMES, MOST_FILES = 5, 3
FIGURE = Path(__file__).resolve().parents[2] / "docs/assets/calls.svg"


@pytest.mark.parametrize("module, inputs", [
    (collection("abc"), kjt(torch.arange(24) % 10, ("f_a", "f_b", "f_c"))),
    (bag(), torch.arange(8).view(4, 2))], ids=["collection", "bag"])
def test_number_of_python_calls_per_step(module: nn.Module, inputs: Any) -> None:
    model = shard(nn.Sequential(module), optimizer=oper.RowWiseAdagrad(lr=0.1))

    def values(out: Any) -> torch.Tensor:
        return out if isinstance(out, torch.Tensor) else out.values()

    for _ in range(2):  # the contents after the first batches
        out = values(model(inputs))
        out.backward(torch.ones_like(out))
    with torch.no_grad():
        _, read = frames_of(lambda: model(inputs))
    out, forward = frames_of(lambda: values(model(inputs)))
    gradient = torch.ones_like(out)
    before = model[0].tables.num_steps
    _, backward = frames_of(lambda: out.backward(gradient))
    assert model[0].tables.num_steps == before + 1
    for name, seen in (("read", read), ("forward", forward), ("backward", backward)):
        assert 0 < len(seen) <= MOST_FRAMES, (name, seen)
        assert len({file for file, _ in seen}) <= MOST_FILES, (name, seen)
    if isinstance(module, torchrec.EmbeddingBagCollection):
        calls = [*forward, *backward]
        for (file, function), (shown_file, shown) in zip(calls, figure(), strict=True):
            assert Path(file).name == shown_file and function.endswith(shown), (function, shown)


def figure() -> list[tuple[str, str]]:
    """(file, function) of each call that the figure of a training step shows, in order."""
    texts = re.findall(r'<text x="(\d+)" y="(\d+)"[^>]*>([^<]+)</text>', FIGURE.read_text())
    files = {(int(x) > 350, y): text for x, y, text in texts if text.endswith(".py")}
    names = {(int(x) > 350, y): text for x, y, text in texts if not text.endswith(".py")}
    return [(file, names[at]) for at, file in files.items()]
