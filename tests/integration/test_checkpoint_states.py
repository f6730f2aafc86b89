"""States of optimizers in checkpoints and deltas: of optimizers that have none yet, that contain
others, or that are others than those of the run that saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._pytree import tree_flatten_with_path
from torchrec.optim.keyed import KeyedOptimizerWrapper

import oper
from oper.errors import InvalidInputError
from oper.integration.checkpoint import table_state
from oper.integration.checkpoint.saving import _bare_modules, state_of
from tests.integration.module_support import collection, kjt
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

_MOMENTUM = oper.SGD(lr=0.1, momentum=0.9)


def _bag() -> nn.Module:
    return nn.EmbeddingBag(20, 4, mode="sum")


def _saved_and_loaded(make: Any, optimizers: tuple[Any, Any], folder: Path, are_saved: bool,
                      are_loaded: bool) -> tuple[Any, Any]:
    """Save a trained module and load it into another one; the states of a collection are a part of
    its ``fused_optimizer`` only."""
    saved, loaded = (oper.shard(make(), optimizer=o) for o in optimizers)
    out = saved(torch.tensor([[3, 5]])) if make is _bag else saved(
        kjt(torch.tensor([3, 5]))).values()
    out.sum().backward()
    oper.save_checkpoint(folder, saved, saved.fused_optimizer if are_saved else None)
    kept = {name: value.clone() for name, value in loaded.state_dict().items()}
    try:
        oper.load_checkpoint(folder, loaded, loaded.fused_optimizer if are_loaded else None)
    except InvalidInputError:
        assert_bitwise(dict(loaded.state_dict()), kept, "rows")
        raise
    return saved, loaded


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


@pytest.mark.parametrize("make, before, after", [
    *((_bag, *pair) for pair in (
        (oper.Adam(), oper.Adagrad()), (_MOMENTUM, oper.Adagrad()), (oper.Adagrad(), _MOMENTUM),
        (_MOMENTUM, oper.LarsSGD(lr=0.1)), (oper.Adagrad(), oper.Adam()))),
    (collection, _MOMENTUM, oper.Adagrad())], ids=_name)
def test_states_are_not_loaded_with_another_meaning(make: Any, before: Any, after: Any,
                                                    tmp_path: Path) -> None:
    is_collection = make is collection
    with pytest.raises(InvalidInputError, match="of the run that saved" if is_collection else
                       rf"optimizer={before.name!r}.*{after.name!r}.*of the run that saved"):
        _saved_and_loaded(make, (before, after), tmp_path / "saved", is_collection, is_collection)


@pytest.mark.parametrize("make, before, after, are_saved, are_loaded", [
    # States with the same meaning, and tables whose optimizer has no state.
    (_bag, oper.Adam(), oper.AdamW(), False, False),
    (_bag, _MOMENTUM, oper.SGD(lr=0.1), False, False),
    (collection, _MOMENTUM, oper.SGD(lr=0.1), True, True),
    # Rows without the states of another optimizer.
    (collection, _MOMENTUM, oper.Adagrad(), False, False),
    (collection, _MOMENTUM, oper.Adagrad(), True, False)], ids=_name)
def test_rows_are_loaded(make: Any, before: Any, after: Any, are_saved: bool, are_loaded: bool,
                         tmp_path: Path) -> None:
    saved, loaded = _saved_and_loaded(make, (before, after), tmp_path / "saved", are_saved,
                                      are_loaded)
    assert_bitwise(dict(loaded.state_dict()), dict(saved.state_dict()), "rows")


def test_deltas_load_the_states_that_a_full_checkpoint_loads(tmp_path: Path) -> None:
    """Those of a collection only with its optimizer, and of no other optimizer."""
    model = oper.shard(collection(), optimizer=oper.Adagrad(lr=0.1))
    with oper.DeltaCheckpoints(tmp_path / "c", model, model.fused_optimizer) as saver:
        saver.save_full(0)
        model(kjt(torch.tensor([1, 2]))).values().sum().backward()
        saver.save(1)
    alone, plain = (oper.shard(collection(), optimizer=o) for o in (
        oper.Adagrad(lr=0.1), oper.SGD(lr=0.1)))
    oper.load_checkpoint(tmp_path / "c", alone)
    oper.load_checkpoint(tmp_path / "c", plain, plain.fused_optimizer)
    for other in (alone, plain):
        assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "rows")
    state = alone.fused_optimizer.state_dict()["state"]["embedding_bags.a.weight"]
    assert not state["a.momentum1"].any()


def test_deltas_are_loaded_without_an_optimizer(tmp_path: Path) -> None:
    """As a full checkpoint, also for inference."""
    def make(**options: Any) -> Any:
        return oper.shard(nn.ModuleDict({"bag": nn.EmbeddingBag(20, 4), "dense": nn.Linear(4, 1)}),
                          **options)

    model, other = make(optimizer=oper.Adam(lr=0.1)), make(objective="inference")
    dense = torch.optim.Adam(model["dense"].parameters())
    with oper.DeltaCheckpoints(tmp_path / "c", model, dense) as saver:
        saver.save_full(0)
        model["dense"](model["bag"](torch.tensor([[1, 2]]))).sum().backward()
        dense.step()
        saver.save(1)
    oper.load_checkpoint(tmp_path / "c", other)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "loaded")


def test_moments_of_other_programs_are_not_loaded_as_sums_of_squares(tmp_path: Path) -> None:
    saved, loaded = (oper.shard(torch.nn.EmbeddingBag(20, 4, mode="sum"), optimizer=o(lr=0.1))
                     for o in (oper.Adam, oper.Adagrad))
    state = {"model": saved.state_dict(), "tables": {"_plain": saved.optimizer_state_dict()}}
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    before = loaded.weight.detach().clone()
    with pytest.raises(InvalidInputError, match=r"momentum1'.*exp_avg_sq.*optimizer of the run"):
        oper.load_checkpoint(tmp_path / "saved", loaded)
    assert torch.equal(loaded.weight, before)


@pytest.mark.parametrize("make", [_bag, collection])
def test_momenta_under_their_earlier_name(make: Any, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It was Adagrad's, so that they are loaded only if the checkpoint states the optimizer."""
    is_collection = make is collection
    with monkeypatch.context() as patch:
        patch.setattr(table_state, "MOMENTUM", "momentum1")
        saved, _ = _saved_and_loaded(make, (_MOMENTUM, _MOMENTUM), tmp_path / "saved",
                                     is_collection, is_collection)
        dcp.save(state_of(saved, saved.fused_optimizer if is_collection else None),
                 checkpoint_id=tmp_path / "of torch")
    loaded = oper.shard(make(), optimizer=_MOMENTUM)
    optimizer = loaded.fused_optimizer if is_collection else None
    with pytest.raises(InvalidInputError, match=r"momentum1.*states the optimizer of the table"):
        oper.load_checkpoint(tmp_path / "of torch", loaded, optimizer)
    oper.load_checkpoint(tmp_path / "saved", loaded, optimizer)
    found, expected = (x.fused_optimizer.state_dict() if is_collection else
                       x.optimizer_state_dict() for x in (loaded, saved))
    for name, entries in expected["state"].items():
        assert_bitwise(found["state"][name], entries, name)
        assert any(x.any() for x in entries.values())


def _divided(rank: int, world_size: int, folder: str) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(rank)
        model = oper.shard(nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 3)),
                           optimizer=oper.SGD(lr=0.1))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        return model, torch.optim.Adam(model[1].parameters(), lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.tensor([[rank, 2]])).square().sum().backward()
        optimizer.step()

    (model, optimizer), others = make(), make()
    train(model, optimizer)
    oper.save_checkpoint(folder, model, optimizer)
    oper.load_checkpoint(folder, *others)
    train(model, optimizer)
    train(*others)
    for mine, theirs in zip(model[1].parameters(), others[0][1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    flat = FullyShardedDataParallel(
        oper.shard(nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 3)),
                   optimizer=oper.SGD(lr=0.1)), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(InvalidInputError, match="divide them by fully_shard"):
        oper.save_checkpoint(folder, flat, torch.optim.Adam(flat.parameters()))


def test_states_of_parameters_that_are_divided_among_ranks(tmp_path: Path) -> None:
    """A new optimizer gets states that are divided like its parameters."""
    run_world(2, _divided, str(tmp_path / "saved"))


@pytest.mark.parametrize("in_delta", [False, True])
def test_states_of_nested_optimizers_and_their_additional_values(in_delta: bool, tmp_path: Path
                                                                 ) -> None:
    """New optimizers get them, although some have no parameter's number as key."""
    class Optimizers:
        def __init__(self) -> None:
            self.dense = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=0.1)

        def state_dict(self) -> dict[str, Any]:
            return {"all": {"dense": self.dense.state_dict()}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.dense.load_state_dict(state["all"]["dense"])

    model = oper.shard(torch.nn.EmbeddingBag(20, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    saved, loaded = Optimizers(), Optimizers()
    (parameter,) = saved.dense.param_groups[0]["params"]
    parameter.sum().backward()
    with oper.DeltaCheckpoints(tmp_path / "saved", model, saved) as saver:
        if in_delta:
            saver.save_full(0)
        saved.dense.step()
        saved.dense.state["calls"] = 3
        (saver.save if in_delta else saver.save_full)(1)
    oper.load_checkpoint(tmp_path / "saved", model, loaded)
    found, expected = (x.dense.state_dict()["state"] for x in (loaded, saved))
    assert found.keys() == expected.keys() and found["calls"] == 3
    assert_bitwise(found[0], expected[0], "state of the parameter")


class _Noted(nn.Linear):
    """Has a list in its state that grows and shrinks."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.notes: list[int] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"notes": list(self.notes)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state["notes"]


@pytest.mark.parametrize("before, after", [([], [1, 2]), ([1, 2, 3], [4]), ([1], [])])
def test_deltas_have_lists_of_a_module(before: list[int], after: list[int], tmp_path: Path
                                       ) -> None:
    model, other = (oper.shard(nn.ModuleDict({"bag": _bag(), "noted": _Noted()}),
                               optimizer=oper.SGD(lr=0.1)) for _ in range(2))
    with oper.DeltaCheckpoints(tmp_path / "saved", model) as saver:
        model["noted"].notes = before
        saver.save_full(0)
        model["noted"].notes = after
        saver.save(1)
    oper.load_checkpoint(tmp_path / "saved", other)
    assert other["noted"].notes == after


def test_paths_below_module_are_those_of_earlier_checkpoints() -> None:
    """Paths lack DistributedDataParallel's prefix, unless two modules differ only in the prefix."""
    alone = oper.shard(nn.ModuleDict({"module": nn.ModuleDict({"bag": nn.EmbeddingBag(20, 4)})}),
                       optimizer=oper.SGD(lr=0.1))
    assert set(_bare_modules(alone)) == {"bag"}
    assert set(_bare_modules(_modules())) == {"bag", "module.bag"}


def _modules() -> Any:
    """Two tables whose paths differ in a prefix that DistributedDataParallel would add."""
    torch.manual_seed(3)
    return oper.shard(nn.ModuleDict({
        "bag": nn.EmbeddingBag(20, 4, mode="sum"), "dense": nn.Linear(8, 1),
        "module": nn.ModuleDict({"bag": nn.EmbeddingBag(20, 4, mode="sum")})}),
        optimizer=oper.Adam(lr=0.1))


def _train_modules(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    pooled = [of["bag"](torch.tensor([[1, 2], [2, 3]])) for of in (model, model["module"])]
    model["dense"](torch.cat(pooled, 1)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("first", [0, 1])  # steps before the full checkpoint
@pytest.mark.parametrize("steps", [1, 2])  # in all; those after the full checkpoint are a delta
@pytest.mark.parametrize("kind", ["torch", "torchrec"])
def test_new_optimizers_get_the_saved_state(kind: str, steps: int, first: int, tmp_path: Path
                                            ) -> None:
    def make() -> tuple[Any, Any]:
        model = _modules()
        dense = dict(model["dense"].named_parameters())
        if kind == "torch":
            return model, torch.optim.Adam(dense.values(), lr=0.1)
        return model, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.1))

    model, optimizer = make()
    with oper.DeltaCheckpoints(tmp_path / "saved", model, optimizer) as saver:
        for step in range(steps):
            if step == first:
                saver.save_full(step)
            _train_modules(model, optimizer)
        (saver.save if first < steps else saver.save_full)(steps)
    other, loaded = make()
    if kind == "torch":  # reading creates an empty state
        assert loaded.state[loaded.param_groups[0]["params"][0]] == {}
    if kind == "torchrec":
        with pytest.raises(InvalidInputError, match=r"'bias', 'weight'.*call init_state\(\)"):
            oper.load_checkpoint(tmp_path / "saved", other, loaded)
        loaded.init_state()
    oper.load_checkpoint(tmp_path / "saved", other, loaded)
    for made in ((model, optimizer), (other, loaded)):
        _train_modules(*made)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "next step")


def _assert_same_optimizers(found: Any, expected: Any) -> None:
    """Compare states, which may have lists of different lengths, as trees."""
    flat, theirs = (tree_flatten_with_path(x.state_dict())[0] for x in (found, expected))
    assert [path for path, _ in flat] == [path for path, _ in theirs]
    for (path, value), (_, other) in zip(flat, theirs, strict=True):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else (
            value == other), path


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_that_are_added_after_a_full_checkpoint_are_in_deltas(kind: Any, tmp_path: Path
                                                                         ) -> None:
    def make() -> tuple[Any, Any]:
        model = _modules()
        return model, kind([model["dense"].weight], lr=0.1)

    def add(model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [model["dense"].bias], "lr": 0.01})

    model, optimizer = make()
    with oper.DeltaCheckpoints(tmp_path / "saved", model, optimizer) as saver:
        _train_modules(model, optimizer)
        saver.save_full(1)
        add(model, optimizer)
        _train_modules(model, optimizer)
        saver.save(2)
    other, loaded = make()
    add(other, loaded)
    oper.load_checkpoint(tmp_path / "saved", other, loaded)
    _assert_same_optimizers(loaded, optimizer)


@pytest.mark.parametrize("first", [0, 4])  # steps before the full checkpoint
@pytest.mark.parametrize("restarts", [False, True])  # before the delta, whose lists are shorter
def test_deltas_have_lists_of_an_optimizer(first: int, restarts: bool, tmp_path: Path) -> None:
    """LBFGS has lists of earlier steps, which grow."""
    def make() -> tuple[Any, Any]:
        model = _modules()
        return model, torch.optim.LBFGS(model["dense"].parameters(), lr=0.1, max_iter=2)

    def train(model: Any, optimizer: Any, count: int) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            pooled = [of["bag"](torch.tensor([[1, 2]])) for of in (model, model["module"])]
            found: torch.Tensor = (model["dense"](torch.cat(pooled, 1)) - 3).square().sum()
            found.backward()
            return found

        for _ in range(count):
            optimizer.step(loss)

    model, optimizer = made = make()
    with oper.DeltaCheckpoints(tmp_path / "saved", model, optimizer) as saver:
        train(*made, first)
        saver.save_full(first)
        if restarts:
            optimizer.state.clear()
        train(*made, 2)
        saver.save(first + 2)
    other, loaded = make()
    oper.load_checkpoint(tmp_path / "saved", other, loaded)
    _assert_same_optimizers(loaded, optimizer)
