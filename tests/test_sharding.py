"""`oper.shard`: what it replaces, what it refuses by name, and the plan that it makes."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.errors import FileFormatError, InvalidInputError, PlanError
from oper.integration import targets
from oper.plan import Plan, uniform_plan
from oper.tables import TableSpec
from tests.support import ROOT

SGD = oper.SGD(lr=0.1)


def bag(rows: int = 20, dim: int = 4, **fields: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(rows, dim, **{"mode": "sum"} | fields)


def plan(*tables: tuple[str, int, int], world_size: int = 1) -> Plan:
    return uniform_plan([TableSpec(n, r, d) for n, r, d in tables], world_size)


class Model(nn.Module):
    """Two towers with one table each, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = bag(30)
        self.items = nn.Sequential(bag(20))
        self.dense = nn.Linear(4, 1)


MODEL_PLAN = (("users", 30, 4), ("items.0", 20, 4))


# ---- what is replaced ----------------------------------------------------------------------------


def test_all_tables_of_a_model_in_place() -> None:
    model = Model()
    dense, names = model.dense, list(model.state_dict())
    assert oper.shard(model, plan=plan(*MODEL_PLAN), optimizer=SGD) is model
    assert type(model.users).__name__ == type(model.items[0]).__name__ == "ShardedEmbeddingBag"
    assert model.dense is dense and list(model.state_dict()) == names
    assert [n for n, _ in model.named_parameters()] == names


def test_only_the_named_modules() -> None:
    model = Model()
    users = model.users
    oper.shard(model, plan=plan(MODEL_PLAN[1]), modules=["items.0"], optimizer=SGD)
    assert model.users is users and type(model.items[0]).__name__ == "ShardedEmbeddingBag"


def test_tables_of_one_name_in_two_collections() -> None:
    torchrec = pytest.importorskip("torchrec")

    def collection(rows: int) -> Any:
        return torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
            name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])])

    model = nn.ModuleDict({"a": collection(10), "b": collection(20)})
    want = {k: v.clone() for k, v in model.state_dict().items()}
    batch = {"f": (torch.tensor([1, 9, 9]), torch.tensor([1, 2]))}
    stats = oper.collect([batch], model)
    assert list(stats.tables) == ["a.t", "b.t"]
    # Modules sharded one after the other from statistics keep the names of the whole model.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oper.shard(model, stats, modules=["b"], optimizer=SGD)
    assert type(model["a"]).__name__ == "EmbeddingBagCollection"
    model = nn.ModuleDict({"a": model["a"], "b": collection(20)})
    model["b"].load_state_dict({k[2:]: v for k, v in want.items() if k.startswith("b.")})
    oper.shard(model, plan=plan(("a.t", 10, 4), ("b.t", 20, 4)), optimizer=SGD)
    got = model.state_dict()
    assert list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want)


def test_a_bare_bag_needs_no_torchrec() -> None:
    code = (
        "import sys; sys.modules['torchrec'] = None; sys.modules['fbgemm_gpu'] = None\n"
        "import torch, oper\n"
        "from oper.plan import uniform_plan\nfrom oper.tables import TableSpec\n"
        "bag = torch.nn.EmbeddingBag(9, 4, mode='sum')\n"
        "made = oper.shard(bag, plan=uniform_plan([TableSpec('weight', 9, 4)], 1),"
        " optimizer=oper.SGD(lr=0.1))\n"
        "made(torch.tensor([[1, 2]])).sum().backward()\nprint(made.state_dict()['weight'].shape)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([9, 4])" in done.stdout


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("option, value", [
    ("max_norm", 1.0), ("scale_grad_by_freq", True), ("mode", "max"), ("dtype", torch.float64)])
def test_options_that_are_refused_by_name(option: str, value: Any) -> None:
    for make in (bag, nn.Embedding) if option != "mode" else (bag,):
        model = nn.ModuleDict({"mine": make(20, 4, **{option: value})})
        with pytest.raises(InvalidInputError, match=f"'mine'.*{option}=.*{str(value)[-7:]}"):
            oper.shard(model, plan=plan(("mine", 20, 4)), optimizer=SGD)
        assert type(model["mine"]) in (nn.EmbeddingBag, nn.Embedding)


def test_memory_shared_with_a_trained_parameter_is_refused() -> None:
    """In torch, training one of them changes the other one."""
    weight = nn.Parameter(torch.zeros(20, 4), requires_grad=False)
    copies = [nn.Embedding.from_pretrained(weight) for _ in range(2)]
    frozen = oper.shard(nn.ModuleList(copies), optimizer=SGD)
    assert all(type(m).__name__ == "ShardedEmbedding" for m in frozen)
    for freeze in (True, False):
        model = nn.ModuleDict({"a": nn.Embedding(20, 4)})
        model["b"] = nn.Embedding.from_pretrained(model["a"].weight, freeze=freeze)
        with pytest.raises(InvalidInputError, match=r"shared.*'a\.weight', 'b\.weight'"):
            oper.shard(model, optimizer=SGD)


def test_shared_parameters_are_refused_by_both_names() -> None:
    model = nn.ModuleDict({"first": bag(), "second": bag()})
    model["second"].weight = model["first"].weight
    with pytest.raises(InvalidInputError, match=r"first\.weight.*second\.weight"):
        oper.shard(model, plan=plan(("first", 20, 4), ("second", 20, 4)), optimizer=SGD)
    # A weight tied to a dense layer is refused, too, and the error names both.
    model = nn.ModuleDict({"first": bag(), "head": nn.Linear(4, 20, bias=False)})
    model["head"].weight = model["first"].weight
    with pytest.raises(InvalidInputError, match=r"first\.weight.*head\.weight"):
        oper.shard(model, plan=plan(("first", 20, 4)), optimizer=SGD)
    # So is the same module in two places.
    shared = bag()
    with pytest.raises(InvalidInputError, match=r"a\.weight.*b\.weight"):
        oper.shard(nn.ModuleDict({"a": shared, "b": shared}), optimizer=SGD)


def test_shared_parameters_other_than_tables_are_allowed() -> None:
    model = nn.ModuleDict({"table": bag(), "x": nn.Linear(3, 3), "y": nn.Linear(3, 3)})
    model["y"].weight = model["x"].weight
    oper.shard(model, plan=plan(("table", 20, 4)), optimizer=SGD)


def test_training_needs_an_optimizer_and_the_error_names_both_ways() -> None:
    with pytest.raises(InvalidInputError) as error:
        oper.shard(Model(), plan=plan(*MODEL_PLAN))
    text = str(error.value)
    assert "optimizer=" in text and "apply_optimizer_in_backward" in text and "'users'" in text


@pytest.mark.parametrize("make, word", [
    (lambda: nn.Linear(3, 3), "Linear"), (lambda: nn.ModuleDict({"x": nn.Linear(2, 2)}), "Module")])
def test_nothing_to_shard(make: Any, word: str) -> None:
    with pytest.raises(InvalidInputError, match=f"nothing to shard.*{word}"):
        oper.shard(make(), optimizer=SGD)


def test_a_path_that_does_not_exist_or_holds_no_table() -> None:
    for path in ("nowhere", "dense"):
        with pytest.raises(InvalidInputError,
                           match=rf"modules=\['{path}'\], .*\['users', 'items\.0'\]"):
            oper.shard(Model(), modules=["users", path], optimizer=SGD)
    with pytest.raises(InvalidInputError, match=r"nothing to shard.*Linear"):
        oper.shard(nn.Linear(3, 3), modules=["users"], optimizer=SGD)


def test_inference_needs_no_optimizer_and_gives_no_gradients() -> None:
    model = oper.shard(Model(), plan=plan(*MODEL_PLAN), objective="inference")
    assert not model.users(torch.tensor([[1, 2]])).requires_grad


@pytest.mark.parametrize("made, word", [
    (plan(*MODEL_PLAN, world_size=2), "world"),
    (plan(MODEL_PLAN[0]), r"items\.0"),
    (plan(*MODEL_PLAN, ("third", 5, 4)), "third"),
    (plan(("users", 31, 4), MODEL_PLAN[1]), "users.*num_rows=31"),
    (plan(("users", 30, 8), MODEL_PLAN[1]), "users.*dim=8")])
def test_plans_for_something_else(made: Plan, word: str) -> None:
    model = Model()
    with pytest.raises(PlanError, match=word):
        oper.shard(model, plan=made, optimizer=SGD)
    assert type(model.users) is nn.EmbeddingBag, "a refused model stays as it was"


def test_plan_files(tmp_path: Path) -> None:
    good = tmp_path / "plan.json"
    plan(*MODEL_PLAN).save(good)
    model = oper.shard(Model(), plan=good, optimizer=SGD)
    assert type(model.users).__name__ == "ShardedEmbeddingBag"
    half = tmp_path / "half.json"
    half.write_text(good.read_text()[:-30])
    for path in (half, str(half)):
        with pytest.raises(FileFormatError, match=r"half\.json"):
            oper.shard(Model(), plan=path, optimizer=SGD)


# ---- plans that it makes -------------------------------------------------------------------------


def test_without_statistics_one_warning_and_a_plan_by_size() -> None:
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        oper.shard(model, optimizer=SGD)
    about = [str(w.message) for w in caught if "stat" in str(w.message)]
    assert len(about) == 1, about
    assert caught[0].filename == __file__  # the line that calls `shard` without statistics
    model.users(torch.tensor([[1, 2]])).sum().backward()


def test_with_collected_statistics() -> None:
    rng = np.random.default_rng(0)
    batches = [{"": (torch.from_numpy(rng.zipf(1.5, 64) % 500), torch.full((32,), 2))}
               for _ in range(8)]
    module = bag(500, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = oper.collect(batches, module)
        sharded = oper.shard(module, stats, optimizer=SGD, batch_size=32)
    ids = torch.arange(500).view(50, 10)
    assert torch.allclose(sharded(ids), module(ids), atol=1e-5)


def test_statistics_for_other_tables() -> None:
    module = bag(500, 8)
    stats = oper.collect([{"": (torch.tensor([1, 2]), torch.tensor([2]))}], module)
    with pytest.raises(oper.OperError, match="rows"):
        oper.shard(bag(400, 8), stats, optimizer=SGD)


def test_a_model_is_sharded_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    build, built = targets.build, []

    def fails_at_the_second(*args: Any) -> nn.Module:
        if built:
            raise oper.OperError("no memory")
        built.append(build(*args))
        return built[0]

    with monkeypatch.context() as patched:
        patched.setattr(targets, "build", fails_at_the_second)
        with pytest.raises(oper.OperError, match="no memory"):
            oper.shard(model, plan=plan(*MODEL_PLAN), optimizer=SGD)
    assert type(model.users) is type(model.items[0]) is nn.EmbeddingBag
    assert built[0].tables.page_kind == "closed"
    oper.shard(model, plan=plan(*MODEL_PLAN), optimizer=SGD)


def test_sharding_again_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4, mode="sum"))
    oper.shard(model, optimizer=oper.SGD(lr=0.1))
    with pytest.raises(oper.InvalidInputError, match="not sharded yet"):
        oper.shard(model, optimizer=oper.SGD(lr=0.1))


@pytest.mark.filterwarnings("ignore:no access statistics")
@pytest.mark.parametrize("arguments, word", [
    ({"stats": {"weight": 1}}, "stats="), ({"plan": 3}, "plan="), ({"topology": 8}, "topology="),
    ({"topology": "nowhere-8"}, "nowhere-8.*h100-8"), ({"optimizer": "sgd"}, "RowWiseAdagrad"),
    ({"optimizer": torch.optim.SGD}, "optimizer="), ({"objective": "train"}, "'inference'"),
    ({"modules": ""}, r"pass \[''\]"), ({"modules": 5}, "modules=5"),
    ({"modules": (path for path in [""])}, "a list of paths"),
    ({"modules": [1, None]}, "modules="), ({"batch_size": 0}, "batch_size=0"),
    ({"objective": "inference", "row_dtype": 3}, "row_dtype=3"),
    ({"batch_size": 1.5}, "batch_size=1.5"), ({"module": [1]}, "torch.nn.Module"),
    ({"message_bits": 12}, "message_bits=12"), ({"message_bits": (8,)}, "message_bits="),
    ({"message_bits": {"weight": 5}}, r"message_bits\['weight'\]=5"),
    ({"message_variance": -1}, "message_variance=-1"),
    ({"message_variance": 1e-3, "message_bits": 32}, "message_variance=0.001, expected None"),
    ({"topology": "h100-8"}, "ranks of the topology=8"),
    ({"plan": plan(("weight", 20, 4)), "objective": "test"}, "objective='test'")])
def test_arguments_of_other_kinds_are_named(arguments: dict[str, Any], word: str) -> None:
    module = arguments.pop("module", None) or bag()
    with pytest.raises((InvalidInputError, PlanError), match=word):
        oper.shard(module, **{"optimizer": SGD, **arguments})


def test_another_default_device_is_refused() -> None:
    torch.set_default_device("meta")
    try:
        with pytest.raises(InvalidInputError, match=r"default device='meta', expected cpu"):
            oper.shard(bag(), optimizer=SGD)
    finally:
        torch.set_default_device(None)


def test_a_forked_child_reads_and_changes_nothing() -> None:
    """A child has its parent's arenas, so it would write to the parent's rows."""
    sharded = oper.shard(bag(), plan=plan(("weight", 20, 4)), optimizer=SGD)
    before = sharded.state_dict()["weight"].clone()
    passed = sharded(torch.tensor([[1]]))
    child = os.fork()
    if not child:
        num_errors = 0
        for change in (lambda: sharded(torch.tensor([[1]])), passed.sum().backward,
                       lambda: sharded.load_state_dict({"weight": torch.zeros(20, 4)})):
            try:
                change()
            except oper.OperError as error:
                num_errors += "forked" in str(error)
        with torch.no_grad():
            same = torch.equal(sharded(torch.tensor([[1]]))[0], before[1])
        os._exit(0 if num_errors == 3 and same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(sharded.state_dict()["weight"], before)
    passed.sum().backward()


def test_names_instead_of_tables_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"table='users'.*an oper.TableSpec"):
        oper.make_plan(["users"], None, oper.Topology.of_domains([0]), batch_size=8)
