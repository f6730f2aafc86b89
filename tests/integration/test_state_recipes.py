"""What programs do with a model's state, in code that is common outside of OPER: the unsharded
model's results, or an error that changes nothing."""

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import parametrize, prune
from torchrec.fx import Tracer
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import oper
from oper.errors import InvalidInputError, OperError
from tests.integration.module_support import LR, bag, collection, kjt, rows, shard
from tests.world_support import run_world

IDS = torch.tensor([1, 2, 3, 4])


def on_ranks(world_size: int, program: Callable[[int, int], None]) -> None:
    """Run a program in this process, or in one process per rank."""
    if world_size == 1:
        program(0, 1)
    else:
        run_world(world_size, program, env={"OPER_DEADLINE_S": "20"})


# ---- weights -------------------------------------------------------------------------------------


def swapped(weight: Any, average: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the weight with its own values, with those of an average, and with its own again."""
    kept, row = weight.data, weight.detach()[1]
    yield weight.detach().clone()
    weight.data = average
    yield weight.detach().clone()
    row.mul_(2)  # of the values that were kept
    weight.data = kept
    yield weight.detach().clone()
    yield row.clone()


def test_data_is_exchanged_for_an_average_and_back() -> None:
    """The recipe for evaluating with averaged weights, which keeps ``weight.data`` itself."""
    plain, sharded = bag(), shard(bag())
    average = torch.randn(10, 4)
    for ours, theirs in zip(swapped(sharded.weight, average.clone()),
                            swapped(plain.weight, average.clone()), strict=True):
        assert torch.equal(ours, theirs)
    sharded(IDS[None]).sum().backward()
    assert torch.equal(rows(sharded)[1], rows(plain)[1] - LR)


def _swap(rank: int, world_size: int) -> None:
    before = rows(bag())
    sharded = shard(bag())
    kept = sharded.weight.data if rank else None  # as if rank 0 had dropped its copy
    sharded.weight.data = torch.zeros(10, 4)
    assert not sharded.weight.any()
    assert kept is None or torch.equal(kept, before)
    first = sharded.weight.data[0, 0]
    assert f"{first:.2f} {first}".startswith("0.00 ")


@pytest.mark.parametrize("labels", ["", "ab"])
def test_kept_data_of_one_rank(labels: str) -> None:
    run_world(2, _swap, env={"OPER_DEADLINE_S": "20"}, labels=labels)


def test_assignments_to_data_that_change_nothing() -> None:
    plain, sharded = bag(4, 4), shard(bag(4, 4))
    for weight in (plain.weight, sharded.weight):
        weight.data += 1
        weight.data = weight.data
        weight.data = weight.data.t()
    assert torch.equal(sharded.weight, plain.weight)
    for write in (lambda w: w.data.t_(), lambda w: w.data.transpose_(0, 1),
                  lambda w: setattr(w.data[0], "data", torch.zeros(4))):
        with pytest.raises(InvalidInputError, match=r"cannot change the shape|data of a view"):
            write(sharded.weight)
    assert torch.equal(sharded.weight, plain.weight)


def test_a_teacher_whose_parameters_are_detached_does_not_train() -> None:
    """The recipe of mean teachers: a copy that follows the student."""
    student = shard(bag())
    teacher, start = copy.deepcopy(student), rows(student)
    for p in teacher.parameters():
        p.detach_()
    (student(IDS[None]).sum() + teacher(IDS[None]).sum()).backward()
    assert torch.equal(teacher.weight, start) and not teacher.weight.requires_grad
    for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        ours.data.mul_(0.75).add_(theirs.data, alpha=0.25)
    torch.testing.assert_close(rows(teacher), 0.75 * start + 0.25 * rows(student))


def _written_state(rank: int, world_size: int) -> None:
    """The recipe for averages that writes to the values of ``state_dict()``, and legitimate ones.
    """
    model = shard(bag())
    average, before = copy.deepcopy(model), rows(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ours, theirs in zip(average.state_dict().values(), model.state_dict().values(),
                                strict=True):
            ours.copy_(0.75 * ours + 0.25 * theirs)
        del ours, theirs
    (found,) = [str(w.message) for w in caught]
    assert "a value of state_dict() was changed in place: 'weight'" in found
    assert torch.equal(average.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = average.state_dict()
        with torch.no_grad():
            state["weight"].mul_(2)
        average.load_state_dict(state)
        del state
    assert torch.equal(average.weight, 2 * before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_a_state_dict_that_are_written(world_size: int) -> None:
    on_ranks(world_size, _written_state)


def _averaged(rank: int, world_size: int) -> None:
    """The recipe for averaging parameters over processes, which all hold the same tables."""
    import torch.distributed as dist

    model = shard(nn.Sequential(bag(), nn.Linear(4, 1)))
    torch.nn.init.constant_(model[1].weight, float(rank))
    before = rows(model[0])
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= world_size
        dist.broadcast(p.data, 0)
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[1].weight, torch.full((1, 4), 0.5))
    gathered = [torch.empty(10, 4) for _ in range(world_size)]
    dist.all_gather(gathered, model[0].weight.data)
    assert torch.equal(gathered[1 - rank], before)
    with pytest.raises(InvalidInputError, match=r"cannot receive into table '0'.*reduce_"):
        dist.reduce(model[0].weight.data, 0)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("labels", ["", "ab"])
def test_parameters_are_averaged_over_processes(labels: str) -> None:
    run_world(2, _averaged, env={"OPER_DEADLINE_S": "20"}, labels=labels)


def test_a_parameter_is_made_of_a_copy() -> None:
    sharded = shard(bag())
    for make in (nn.Parameter, nn.Embedding.from_pretrained):
        with pytest.raises(InvalidInputError, match=r"cannot make a parameter.*clone\(\)"):
            make(sharded.weight)
    copied = nn.Embedding.from_pretrained(sharded.weight.detach().clone())
    assert torch.equal(copied.weight, sharded.weight)


def test_parameters_of_a_collections_tables() -> None:
    plain, sharded = collection().embedding_bags, shard(collection()).embedding_bags
    for tables in (plain, sharded):
        assert [n for n, _ in tables.named_parameters()] == ["a.weight", "b.weight"]
        for p in tables.parameters():
            nn.init.constant_(p, 2.0)
            p.requires_grad = False
    for name, value in plain.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], value)
    assert not any(p.requires_grad for p in sharded.parameters())


def test_gradients_are_not_left_to_another_optimizer() -> None:
    stepped = bag()
    stepped.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(InvalidInputError, match="hooks on its gradient=1"):
        shard(stepped)
    for tag in (apply_optimizer_in_backward, _apply_optimizer_in_backward):
        model = shard(collection())
        with pytest.raises(InvalidInputError, match=r"a call before oper\.shard"):
            tag(torch.optim.Adam, model.parameters(), {"lr": 0.1})
        before = rows(model.embedding_bags["a"])
        model(kjt(IDS)).values().sum().backward()
        assert torch.equal(rows(model.embedding_bags["a"])[1], before[1] - LR)


def sequences(names: str) -> Any:
    torch.manual_seed(5)
    return torchrec.EmbeddingCollection(tables=[
        torchrec.EmbeddingConfig(name=n, num_embeddings=10, embedding_dim=4,
                                 feature_names=[f"f_{n}"]) for n in names])


@pytest.mark.parametrize("names", ["a", "ab"])
def test_outputs_of_sequences_can_be_changed_in_place(names: str) -> None:
    plain, sharded = sequences(names), shard(sequences(names))
    features = kjt(IDS, tuple(f"f_{n}" for n in names))
    for model in (plain, sharded):
        outputs = model(features)
        outputs["f_a"].values().mul_(2).add_(1)
        sum(x.values().square().sum() for x in outputs.values()).backward()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs - LR * theirs.grad)


# ---- tables that are not those of the configuration ----------------------------------------------


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Doubling(nn.EmbeddingBag):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


OPTIONS = {"mode": "mean", "padding_idx": 1, "max_norm": 0.1, "scale_grad_by_freq": True,
           "include_last_offset": False}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_table_that_its_configuration_lacks(option: str) -> None:
    model, sharded = collection(), shard(collection())
    setattr(model.embedding_bags["a"], option, OPTIONS[option])
    with pytest.raises(InvalidInputError, match=f"cannot shard table 'a': {option}="):
        shard(model)
    before = getattr(sharded.embedding_bags["a"], option)
    assert before == getattr(collection().embedding_bags["a"], option)
    with pytest.raises(InvalidInputError, match=f"cannot change table 'a'.*{option}="):
        setattr(sharded.embedding_bags["a"], option, OPTIONS[option])
    assert getattr(sharded.embedding_bags["a"], option) == before


def test_a_table_of_another_size_than_its_configuration() -> None:
    model = collection()
    model.embedding_bags["a"] = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True)
    with pytest.raises(InvalidInputError, match=r"shape of weight=\(20, 4\)"):
        shard(model)


def _parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.embedding_bags["a"], "weight", Double())


def _overriding(model: Any) -> None:
    model.embedding_bags["a"] = Doubling(10, 4, mode="sum", include_last_offset=True)


def _without(model: Any) -> None:
    del model.embedding_bags["b"]
    model.embedding_bags["c"] = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)


def _instance(model: Any) -> None:
    table = model.embedding_bags["a"]
    table.forward = functools.partial(nn.EmbeddingBag.forward, table)


@pytest.mark.parametrize("change, reason", [(_parametrized, "computes weight"),
                                            (_instance, "overrides forward"),
                                            (_overriding, "overrides forward"),
                                            (_without, r"its tables are \['a', 'c'\]")])
def test_collections_with_tables_that_do_more_stay_unsharded(
        change: Callable[[Any], None], reason: str) -> None:
    model = nn.ModuleDict({"changed": collection(), "other": collection()})
    change(model["changed"])
    before = {n: x.clone() for n, x in model["changed"].state_dict().items()}
    with pytest.warns(UserWarning, match=f"stay unsharded.*{reason}"):
        oper.shard(model, optimizer=oper.SGD(lr=LR))
    assert all(torch.equal(x, before[n]) for n, x in model["changed"].state_dict().items())
    assert type(model["changed"]) is type(collection())
    with pytest.raises(InvalidInputError, match=f"nothing to shard.*{reason}"), pytest.warns():
        oper.shard(nn.Sequential(model["changed"]), optimizer=oper.SGD(lr=LR))


def test_a_module_whose_instance_has_a_forward_stays_unsharded() -> None:
    model = nn.Sequential(bag())
    model[0].forward = lambda ids: 2 * nn.EmbeddingBag.forward(model[0], ids)
    before = model(IDS[None])
    with pytest.raises(InvalidInputError, match="has a forward of its own"), pytest.warns():
        oper.shard(model, optimizer=oper.SGD(lr=LR))
    assert torch.equal(model(IDS[None]), before)


@pytest.mark.parametrize("make", [bag, collection])
def test_marks_of_parameters_and_hooks_of_load_state_dict_are_kept(make: Any) -> None:
    module, seen = make(), []
    for p in module.parameters():
        p.no_weight_decay = p._mark = True
    module.register_load_state_dict_pre_hook(lambda m, *_: seen.append(m))
    module.register_load_state_dict_post_hook(lambda m, _: seen.append(m))
    sharded = shard(module)
    del module
    gc.collect()
    sharded.load_state_dict(sharded.state_dict())
    assert seen == [sharded, sharded]
    assert all(p.no_weight_decay and p._mark for p in sharded.parameters())
    renamed = {f"old.{n}": x + 1 for n, x in sharded.state_dict().items()}
    sharded.register_load_state_dict_pre_hook(lambda m, state, *_: [
        state.update({n.removeprefix("old."): state.pop(n)}) for n in [*state]])
    sharded.load_state_dict(renamed)
    assert all(torch.equal(x, renamed[f"old.{n}"]) for n, x in sharded.state_dict().items())
    assert len([*copy.deepcopy(sharded).parameters()]) == len(renamed)


def test_tied_tables_of_a_collection_are_named() -> None:
    model = collection()
    model.embedding_bags["b"].weight = model.embedding_bags["a"].weight
    with pytest.raises(InvalidInputError, match=r"shared between modules.*a\.weight.*b\.weight"):
        shard(model)


def test_the_same_embeddings_can_be_sharded_in_two_models() -> None:
    plain = bag()
    first, second = (shard(nn.ModuleList([plain])) for _ in range(2))
    assert torch.equal(first[0](IDS[None]), plain(IDS[None]))
    assert torch.equal(second[0](IDS[None]), plain(IDS[None]))


class Mirror(nn.Module):
    """Has a buffer that shares the table's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = bag()
        self.register_buffer("mirror", self.bag.weight.data[2:])


def test_memory_shared_with_a_buffer_or_in_part() -> None:
    with pytest.raises(InvalidInputError, match=r"shared between modules.*bag\.weight.*mirror"):
        shard(Mirror())
    both, values = nn.ModuleList([bag(), bag()]), torch.randn(20, 4)
    for module, begin in zip(both, (0, 5), strict=True):
        module.weight = nn.Parameter(values[begin:begin + 10])
    with pytest.raises(InvalidInputError, match=r"shared between modules.*0\.weight.*1\.weight"):
        shard(both)
    both[1].weight = nn.Parameter(values[10:])
    assert torch.equal(rows(shard(both)[1]), values[10:])


@pytest.mark.parametrize("after", [False, True])
def test_a_negative_padding_index(after: bool) -> None:
    """Torch counts it from the end at each lookup."""
    module = nn.Embedding(10, 4)
    if not after:
        module.padding_idx = -1
    sharded = shard(module)
    sharded.padding_idx = -1
    with pytest.raises(InvalidInputError, match="padding_idx=10"):
        sharded.padding_idx = 10
    before = rows(sharded)
    sharded(torch.tensor([9, 3])).sum().backward()
    assert torch.equal(rows(sharded)[9], before[9])
    assert torch.equal(rows(sharded)[3], before[3] - LR)


@pytest.mark.parametrize("change", [
    lambda m: prune.l1_unstructured(m, "weight", 0.5), nn.utils.spectral_norm,
    nn.utils.weight_norm, nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.spectral_norm,
    lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1)))])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_reparametrizations_are_refused_before_they_change_anything(
        change: Callable[[nn.Module], Any]) -> None:
    model, other = shard(bag()), shard(bag())
    attributes = {*vars(model)}
    with pytest.raises(InvalidInputError, match=r"cannot (replace|access|make)"):
        change(model)
    assert {*vars(model)} == attributes
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == ["weight"]
    for module in (model, other):
        module(IDS[None]).sum().backward()
    assert torch.equal(rows(model), rows(other))


# ---- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("weight_decay", 0.1), ("eps", 1.0), ("momentum", 0.5),
                                         ("betas", (0.5, 0.5)), ("maximize", True)])
def test_settings_other_than_lr_cannot_be_changed(name: str, value: Any) -> None:
    model = shard(bag(), optimizer=oper.Adam(lr=LR))
    group, before = model.param_groups[0], rows(model)
    group[name] = value
    with pytest.raises(InvalidInputError, match=f"{name} of table 'weight'=.*only lr"):
        model(IDS[None]).sum().backward()
    assert torch.equal(rows(model), before)
    group.update(weight_decay=0.0, eps=1e-8, betas=[0.9, 0.999], momentum=0, maximize=False,
                 initial_lr=1.0)
    model(IDS[None]).sum().backward()
    assert not torch.equal(rows(model), before)


def test_parameter_groups_can_be_replaced() -> None:
    model = shard(collection())
    before = rows(model.embedding_bags["a"])
    optimizer = model.fused_optimizer
    optimizer.param_groups = [g | {"lr": 2 * LR} for g in optimizer.param_groups]
    model(kjt(IDS)).values().sum().backward()
    assert torch.equal(rows(model.embedding_bags["a"])[1], before[1] - 2 * LR)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_changes_of_a_tag_before_sharding(kind: Any) -> None:
    """A schedule has changed the learning rate, and the first updates have made a state."""
    model = collection()
    apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.1})
    if kind is torch.optim.Adam:
        model(kjt(IDS)).values().sum().backward()
    for p in model.parameters():
        p._in_backward_optimizers[0].param_groups[0]["lr"] = 0.01
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = oper.shard(model)
    assert sharded.fused_optimizer.param_groups[0]["lr"] == 0.01
    found = [w for w in caught if "begin with new optimizer states" in str(w.message)]
    assert len(found) == 2 * (kind is torch.optim.Adam)
    assert all(w.filename == __file__ for w in found)


@pytest.mark.parametrize("change", [
    lambda o: setattr(o, "state", {}), lambda o: o.state.clear(), lambda o: o.state.popitem(),
    lambda o: o.state.update({key: {} for key in o.state})])
def test_optimizer_states_cannot_be_removed(change: Callable[[Any], Any]) -> None:
    optimizer = shard(collection(), optimizer=oper.Adam(lr=LR)).fused_optimizer
    with pytest.raises(InvalidInputError, match="cannot replace the optimizer state"):
        change(optimizer)
    assert len(optimizer.state) == 2


def _other(state: Any, key: str, value: Any) -> Any:
    entries = copy.deepcopy(state["state"]["weight"]) | {key: value}
    return {"state": {"weight": {k: x for k, x in entries.items() if x is not None}}}


def _load_states(rank: int, world_size: int) -> None:
    model, other = (shard(bag(), optimizer=oper.Adam(lr=LR)) for _ in range(2))
    for _ in range(2):
        model(IDS[None]).pow(2).sum().backward()
    good = model.optimizer_state_dict()
    for bad in ({}, {"state": {}}, {"state": {0: {"step": 1}}}, _other(good, "weight.step", None),
                _other(good, "weight.exp_avg_sq", None), _other(good, "weight.more", 1),
                _other(good, "weight.step", torch.tensor(-1.0)),
                _other(good, "weight.momentum1", torch.zeros(3, 4))):
        with pytest.raises(InvalidInputError, match="cannot load the states of the tables"):
            other.load_optimizer_state_dict(bad if rank == world_size - 1 else good)
        assert other.tables.table_steps(other._name) == 0
    other.load_optimizer_state_dict(good)
    other.load_state_dict(model.state_dict())
    for module in (model, other):
        module(IDS[None]).pow(2).sum().backward()
    assert torch.equal(rows(model), rows(other))


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizer_states_of_another_table(world_size: int) -> None:
    on_ranks(world_size, _load_states)


def test_a_saved_step_below_zero() -> None:
    model = shard(collection(), optimizer=oper.Adam(lr=LR))
    state = model.fused_optimizer.state_dict()
    for entries in state["state"].values():
        for key in entries:
            if key.endswith(".step"):
                entries[key].fill_(-1)
    with pytest.raises(InvalidInputError, match=r"step=.*an integer >= 0"):
        model.fused_optimizer.load_state_dict(state)


def test_keys_without_rows() -> None:
    model = shard(bag(), dynamic=oper.DynamicTable())
    model(torch.tensor([[777]])).sum().backward()
    state = model.state_dict()
    values = state.pop("weight")
    before = model(torch.tensor([[777]])).detach()
    for part in (state, {"weight": values}):
        with pytest.raises(RuntimeError, match="missing entries"):
            model.load_state_dict(part, strict=False)
    assert torch.equal(model(torch.tensor([[777]])), before)


def test_keys_whose_rows_are_refused() -> None:
    """They are not loaded either, since they would get the rows of the present keys."""
    model, other = (shard(bag(), dynamic=oper.DynamicTable()) for _ in range(2))
    for module, key in ((model, 777), (other, 5)):
        module(torch.tensor([[key]])).sum().backward()
    before = other.state_dict()["keys"]
    with pytest.raises(RuntimeError, match="shape"):
        other.load_state_dict(dict(model.state_dict()) | {"weight": torch.zeros(10, 3)})
    assert torch.equal(other.state_dict()["keys"], before)


def _load_different(rank: int, world_size: int) -> None:
    """Every rank loads the state of an unsharded model that it has initialised on its own, and a
    state with keys of its own."""
    model = shard(bag(), optimizer=oper.Adam(lr=LR))
    torch.manual_seed(rank)
    values, moments = torch.randn(10, 4), torch.randn(10, 4).abs()
    model.load_state_dict({"weight": values})
    model.load_optimizer_state_dict({"state": {"weight": {
        "weight.momentum1": moments, "weight.exp_avg_sq": moments,
        "weight.step": torch.tensor(rank + 3.0)}}})
    torch.manual_seed(0)
    assert torch.equal(model.weight, torch.randn(10, 4))
    state = model.optimizer_state_dict()["state"]["weight"]
    assert torch.equal(state["weight.momentum1"].full_tensor(), torch.randn(10, 4).abs())
    assert state["weight.step"] == 3
    model(IDS[None]).sum().backward()
    model, states = shard(bag(), dynamic=oper.DynamicTable()), []
    for keys in ([5, 6, 7], [8, 9]):
        model(torch.tensor([keys])).sum().backward()
        states.append({n: getattr(x, "full_tensor", x.clone)()
                       for n, x in model.state_dict().items()})
    model.load_state_dict(states[rank])
    for name, value in model.state_dict().items():
        assert torch.equal(getattr(value, "full_tensor", value.clone)(), states[0][name])


def test_of_states_that_differ_between_ranks_that_of_rank_0_is_loaded() -> None:
    run_world(2, _load_different, env={"OPER_DEADLINE_S": "20"})


def _load_of_rank_0(rank: int, world_size: int, path: str, dynamic: bool) -> None:
    """Rank 0 saves by ``torch.save``, as programs under DDP do, and all ranks load its file."""
    model = shard(collection(), optimizer=oper.Adam(lr=LR),
                  dynamic=oper.DynamicTable() if dynamic else None)
    model(kjt(IDS)).values().sum().backward()
    saved = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    for name in (path, f"{path}.{rank}"):
        if name != path or rank == 0:
            torch.save(saved, name)
    torch.distributed.barrier()
    before = {n: x.full_tensor() for n, x in model.state_dict().items() if hasattr(x, "placements")}
    theirs, own = torch.load(path), torch.load(f"{path}.{rank}")
    with pytest.raises(RuntimeError, match=r"rank whose rows the state_dict contains=0"):
        model.load_state_dict(theirs["model"])
    with pytest.raises(InvalidInputError, match=r"rank whose rows the state_dict contains=0"):
        model.fused_optimizer.load_state_dict(theirs["optimizer"])
    model(kjt(IDS)).values().sum().backward()
    model.load_state_dict(own["model"])
    model.fused_optimizer.load_state_dict(own["optimizer"])
    after = model.state_dict()
    assert all(torch.equal(x, after[n].full_tensor()) for n, x in before.items())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("labels", ["", "ab"])
def test_a_state_that_only_rank_0_has_saved(dynamic: bool, labels: str, tmp_path: Path) -> None:
    run_world(2, _load_of_rank_0, str(tmp_path / "state.pt"), dynamic, labels=labels,
              env={"OPER_DEADLINE_S": "20"})


# ---- tracing, interrupts -------------------------------------------------------------------------


@pytest.mark.parametrize("make, inputs", [(bag, IDS[None]), (collection, kjt(IDS))])
def test_symbolic_traces_take_sharded_modules_as_leaves(make: Any, inputs: Any) -> None:
    model = nn.Sequential(shard(make()))
    with pytest.raises(OperError, match=r"cannot be traced.*leaf_modules"):
        torch.fx.symbolic_trace(model)
    graph = Tracer(leaf_modules=[type(model[0]).__name__]).trace(model)
    ours, theirs = (m(inputs) for m in (torch.fx.GraphModule(model, graph), model))
    for x, y in [(ours, theirs)] if make is bag else [(ours.values(), theirs.values())]:
        assert torch.equal(x, y)


def test_an_interrupt_on_entering_no_sync_holds_nothing_back(
        monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        """A lock, after whose release a signal arrives."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

    model = shard(bag())
    monkeypatch.setattr(model.tables.held, "_lock", Interrupting())
    with pytest.raises(KeyboardInterrupt), oper.no_sync(model):
        pass
    before = rows(model)
    model(IDS[None]).sum().backward()
    assert torch.equal(rows(model)[1], before[1] - LR)


class _PreemptedError(Exception):
    """What a program's own handler of a signal may raise."""


@pytest.mark.parametrize("kind, moves", [(KeyboardInterrupt, False), (KeyboardInterrupt, True),
                                         (_PreemptedError, False), (_PreemptedError, True)])
def test_an_update_that_is_interrupted_is_counted(
        monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], moves: bool) -> None:
    """Python handles a signal when the operator that updates the rows has returned."""
    model, other = (shard(bag(), optimizer=oper.Adam(lr=LR)) for _ in range(2))
    if moves:
        model.tables.start_migration(model.tables.plan, 64)
    operator = model.tables._backward_op

    def interrupted(*args: Any) -> None:
        operator(*args)
        monkeypatch.undo()
        raise kind

    for k in range(12):
        if k == 2:
            monkeypatch.setattr(model.tables, "_backward_op", interrupted)
        for module in (model, other):
            try:
                module(IDS[None] + k % 3).pow(2).sum().backward()
            except kind:
                assert k == 2 and module is model
    assert model.tables.migration is None and model.tables.num_steps == 12
    assert torch.equal(rows(model), rows(other))
