"""Configuration of runs: flags, file, defaults; runs that start from another; names of columns."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import oper
from oper.data import (
    Folder,
    PreprocessOptions,
    SyntheticLog,
    analyze_folder,
    load_recipe,
    preprocess,
    write_synthetic_log,
)
from oper.data.generic import Choice
from oper.data.vocabulary.finished import extend
from oper.errors import FileFormatError, InvalidInputError, UsageError
from oper.rows.remap import load_remap
from oper.serve.model import load_model
from oper.shmem.counters.phases import PHASES
from oper.train.config import TrainConfig, load_config, parse_settings
from oper.train.engines import table_optimizer
from oper.train.loop import train
from oper.train.metrics import BinaryMetrics, auc, log_loss
from oper.train.model import load_state
from oper.train.names import table_name
from tests.data.loader_support import made
from tests.support import ROOT, read_trace, run_command, run_here
from tests.train.conftest import Prepared
from tests.train.test_train import lines, run_ranks, train_on, words

FILE = """
data = "clicks"
batch_size = 64
[model]
dim = 8
dense_layers = [16]
[optimizer]
dense = "sgd"
dense_lr = 1
"""


def test_file_over_defaults_and_flags_over_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    config = load_config(path, {"batch_size": "32", "out": "here"} | parse_settings(
        ["model.over_layers=[24, 12]", "optimizer.tables_lr = 0.5", "shuffle=false"]))
    assert config.data == str(tmp_path / "clicks")  # relative to the file
    assert config.out == "here"
    assert (config.batch_size, config.epochs, config.shuffle) == (32, 1, False)
    assert (config.model.dim, config.model.dense_layers, config.model.over_layers) == (
        8, (16,), (24, 12))
    assert config.optimizer.dense_lr == 1.0 and isinstance(config.optimizer.dense_lr, float)
    assert config.optimizer.tables_lr == 0.5
    assert config.to_json()["model"]["dim"] == 8


@pytest.mark.parametrize(("flags", "message"), [
    ({"batch_sise": 3}, "batch_sise"),
    ({"model.dims": 3}, r"model\.dims"),
    ({"batch_size": "many"}, "an integer"),
    ({"batch_size": 0}, ">= 1"),
    ({"batch_size": True}, "an integer"),
    ({"batch_size": 2.5}, "an integer"),
    ({"seed": 2**63}, "2\\^63"),
    ({"shuffle": "maybe"}, "true or false"),
    ({"model": 3}, "a section"),
    ({"data.x": 3}, "a key inside a section"),
    ({"model.dense_layers": 3}, "a list of integers"),
    ({"model.dense_layers": [0]}, ">= 1"),
    ({"optimizer.tables": "adamax"}, "rowwise_adagrad"),
    ({"optimizer.tables": "adam", "optimizer.tables_momentum": 0.5}, "no such option"),
    ({"optimizer.tables_weight_decay": -0.5}, ">= 0"),
    ({"optimizer.tables": "lamb", "sharding": "none"}, "'sgd'"),
    ({"optimizer.tables": "sgd", "optimizer.tables_momentum": 0.5, "sharding": "torchrec"},
     "sharding='oper'"),
    ({"optimizer.dense_lr": float("nan")}, "finite"),
    ({"optimizer.tables_lr": -1.0}, ">= 0"),
    ({"sharding": "both"}, "'oper', 'none', 'torchrec'"),
    ({"sharding": "none", "stats": "s"}, "'' with sharding"),
    ({"sharding": "none", "tables_on": "meta"}, "cpu"),
    ({"guard": "on"}, "'off', 'stop', 'skip'"),
    ({"guard": "stop", "sharding": "torchrec"}, "'off' with sharding"),
    ({"trace": "t.json", "sharding": "none"}, "'' with sharding"),
    ({"trace_steps": "3-5"}, "'' without trace"),
    ({"trace": "t.json", "trace_steps": "5"}, "A-B"),
    ({"trace": "t.json", "trace_steps": "0-5"}, "A-B"),
    ({"trace": "t.json", "trace_steps": "5-3"}, "A <= B"),
    ({"data": ""}, "oper preprocess"),
    ({"out": ""}, "a folder"),
])
def test_one_clear_error(flags: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_config(None, {"data": "d"} | flags)


@pytest.mark.parametrize(("flags", "message"), [
    ({"model.dense_layers": "8,x"}, r"model\.dense_layers\[1\]='x', expected an integer"),
    ({"no.such.key": "3"}, r"unknown keys=\['no'\]"),
    ({"zz": "1", "model.x": "2", "aa": "3"}, r"unknown keys=\['model\.x'\]"),
    ({"zz": "1", "mm": "2", "aa": "3", "kk": "4"}, r"unknown keys=\['aa', 'kk', 'mm', 'zz'\]"),
    ({"model_name": "sasrec"}, r"unknown keys=\['model_name'\], expected model\.name"),
])
def test_errors_in_flags_are_usage_errors(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(None, {"data": "d"} | flags)


def test_errors_in_files_are_not_usage_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = "d"\n[model]\ndense_layers = [8, "x"]\n')
    with pytest.raises(InvalidInputError, match=r"dense_layers\[1\]='x'") as found:
        load_config(path, {"model.dim": "8"})
    assert not isinstance(found.value, UsageError)


def test_errors_of_sections_are_of_the_file_or_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = "d"\n[dynamic]\nrows = 9\neviction = "old"\n')
    with pytest.raises(InvalidInputError, match="eviction='old'") as found:
        load_config(path, {"batch_size": "8"})
    assert not isinstance(found.value, UsageError)
    with pytest.raises(UsageError, match="eviction='new'"):
        load_config(path, {"dynamic.eviction": "new"})


def test_a_number_that_python_does_not_print(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'data = "d"\nseed = 0x{"f" * 6000}\n')
    with pytest.raises(InvalidInputError, match=r"seed=a number of more than 4300 dig.*< 2\^64"):
        load_config(path)


@pytest.mark.parametrize("flags, want", [
    ({"tables_eps": 0.5, "tables_initial_accumulator_value": 0.25},
     oper.RowWiseAdagrad(lr=0.1, eps=0.5, initial_accumulator_value=0.25)),
    ({"tables": "sgd", "tables_momentum": 0.5, "tables_weight_decay": 0.25},
     oper.SGD(lr=0.1, momentum=0.5, weight_decay=0.25)),
    ({"tables": "adagrad"}, oper.Adagrad(lr=0.1)), ({"tables": "adam"}, oper.Adam(lr=0.1)),
    ({"tables": "lars_sgd", "tables_momentum": 0.5}, oper.LarsSGD(lr=0.1, momentum=0.5)),
    ({"tables": "lamb", "tables_weight_decay": 0.25}, oper.LAMB(lr=0.1, weight_decay=0.25)),
    ({"tables": "partial_rowwise_lamb"}, oper.PartialRowWiseLAMB(lr=0.1)),
    ({"tables": "partial_rowwise_adam"}, oper.PartialRowWiseAdam(lr=0.1)),
], ids=lambda x: x.get("tables", "rowwise_adagrad") if isinstance(x, dict) else "")
def test_optimizers_of_tables(flags: dict[str, object], want: object) -> None:
    config = load_config(None, {"data": "d", "optimizer.tables_lr": 0.1} | {
        f"optimizer.{k}": v for k, v in flags.items()})
    assert table_optimizer(config.optimizer) == want


def test_missing_files_and_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("= 3")
    with pytest.raises(FileFormatError, match=r"run\.toml"):
        load_config(path)
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "none.toml")
    for settings in (["model.dim"], ["model.dim=4", "model.dim = 8"]):
        with pytest.raises(InvalidInputError, match="KEY=VALUE, each key once"):
            parse_settings(settings)
    with pytest.raises(InvalidInputError, match="data"):
        TrainConfig()


def test_a_key_has_one_option() -> None:
    with pytest.raises(UsageError, match=r"--set=\['batch_size'\], expected keys that no other"):
        run_command("train", "--batch-size", "5", "--set", "batch_size=6")


def test_the_example_shows_the_defaults() -> None:
    shown = load_config(ROOT / "examples" / "train.toml", {"data": "d", "out": "x"})
    assert shown == TrainConfig(data="d", out="x")


@pytest.mark.parametrize(("name", "value"), [
    ("batch_size", 2.5), ("batch_size", True), ("epochs", float("inf")), ("seed", float("nan")),
    ("log_every", np.ones(2))])
def test_a_number_of_another_kind_is_refused_where_it_is_given(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}=.*, expected an integer >= "):
        TrainConfig(data="clicks", **{name: value})  # type: ignore[arg-type]
    assert TrainConfig(data="clicks", batch_size=np.int64(3)).batch_size == 3


# ---- runs that start from another run ------------------------------------------------------------

KAGGLE = load_recipe("criteo-kaggle")
FLAGS = {"max_steps": 6, "batch_size": 64, "checkpoint_every": 6, "log_every": 1}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with statistics: `day0`, `new` (day 0 with its rows in another order), and day 1 with
    the vocabulary of each (`old1`, `new1`)."""
    root: Path = tmp_path_factory.mktemp("days")
    cardinalities = tuple(9 + 23 * k for k in range(26))
    log = write_synthetic_log(root / "log.txt", SyntheticLog(6000, 5, cardinalities)).read_text()
    rows = log.splitlines(keepends=True)
    for day in (0, 1):
        (root / f"{day}.txt").write_text("".join(rows[3000 * day:][:3000]))
    preprocess(KAGGLE, [str(root / "0.txt")], root / "day0", PreprocessOptions(min_count=2))
    old = PreprocessOptions(vocabulary=root / "day0")
    preprocess(KAGGLE, [str(root / "1.txt")], root / "old1", old)
    extend(root / "day0", [root / "old1"], root / "new", min_count=10**9, reorder=True)
    preprocess(KAGGLE, [str(root / "1.txt")], root / "new1",
               PreprocessOptions(vocabulary=root / "new"))
    for name in ("day0", "old1", "new1"):
        analyze_folder(root / name).save(root / f"{name}.stats")
    return root


def on(days: Path, name: str) -> Prepared:
    return Prepared(str(days / name), str(days / f"{name}.stats"))


@pytest.fixture(scope="module")
def first(days: Path) -> Path:
    """Train on day 0; returns the run's folder."""
    train_on(on(days, "day0"), days / "first", **FLAGS)
    return days / "first"


def test_one_command_continues_with_renumbered_rows(days: Path, first: Path, tmp_path: Path
                                                    ) -> None:
    """Results equal those of a run whose rows were never renumbered."""
    flags: dict[str, Any] = FLAGS | {"start": str(first)}
    train_on(on(days, "old1"), tmp_path / "plain", **flags)
    done = run_here(*words(on(days, "new1"), tmp_path / "moved", stats=days / "new1.stats",
                           remap=days / "new", **flags))
    assert done.returncode == 0, done.stderr
    plain, moved = (load_state(tmp_path / n / "state.pt") for n in ("plain", "moved"))
    assert plain.keys() == moved.keys()
    remap, renumbered = load_remap(days / "new"), set()
    for name, value in plain.items():
        column = next((c for c in remap if f".{c}." in name or f"t_{c}." in name), None)
        if column is not None:
            rows = torch.from_numpy(remap[column]).long()
            renumbered.add(column)
            assert torch.equal(value, moved[name][rows]), name
        else:
            assert torch.equal(value, moved[name]), name
    assert renumbered == set(remap)
    assert sum((rows[1:] < rows[:-1]).any() for rows in remap.values()) > 10
    losses = [[x["loss"] for x in lines(tmp_path / n) if "loss" in x] for n in ("plain", "moved")]
    assert losses[0] == losses[1] and len(losses[0]) >= 6


@pytest.mark.parametrize("data, remap, word", [
    ("new1", "", "set remap"), ("old1", "new", "leave remap out")])
def test_another_numbering_is_refused(days: Path, first: Path, tmp_path: Path, data: str,
                                      remap: str, word: str) -> None:
    flags = FLAGS | {"start": str(first)} | ({"remap": str(days / remap)} if remap else {})
    with pytest.raises(InvalidInputError, match=f"numbering of the rows.*{word}"):
        train_on(on(days, data), tmp_path / "run", **flags)


# ---- columns of any name -------------------------------------------------------------------------

NAMES = ("type", "items", "keys", "values", "update", "to", "train", "user.id", "type_",
         "user%2Eid", "__init__", "forward", "plain", "T_destination", "ä b")


def test_every_column_name_trains_in_every_way(tmp_path: Path, printed: Callable[..., str]
                                               ) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (400, len(NAMES))).tolist()
    made(tmp_path, "".join(",".join(map(str, row)) + "\n" for row in [
        ["y", "dense.one", *NAMES], *([row[0] % 2, row[1], *row] for row in rows)]),
        Choice(NAMES, "y", ["dense.one"]), "data")
    analyze_folder(tmp_path / "data").save(tmp_path / "stats")
    plan = str(tmp_path / "plan.json")
    printed("plan", tmp_path / "stats", "--topology", "this-host", "--world-size", "1",
            "--dim", "8", "--batch-size", "64", "-o", plan)
    flags = {"batch_size": 64, "model.dim": 8, "model.dense_layers": [8], "model.over_layers": [8],
             "data": str(tmp_path / "data")}
    found = {}
    for name, more in {"none": {"sharding": "none"}, "oper": {"stats": str(tmp_path / "stats")},
                       "plan": {"plan": plan}}.items():
        found[name] = train(load_config(None, flags | more | {"out": str(tmp_path / name)}),
                            show_progress=False)
    for name in ("oper", "plan"):
        assert found[name]["auc"] == pytest.approx(found["none"]["auc"], abs=1e-3)
    assert set(load_state(tmp_path / "oper" / "state.pt")) == set(
        load_state(tmp_path / "none" / "state.pt"))
    written = json.loads((tmp_path / "oper" / "config.json").read_text())["model"]["tables"]
    assert [t["name"] for t in written] == list(Folder.open(tmp_path / "data").sparse)
    load_model(tmp_path / "oper").close()


ANY_NAME = st.lists(
    st.sampled_from(["type", "_", ".", "%", "%2E", "%25", "a", "to", "__init__"]),
    min_size=1, max_size=4).map("".join)


@given(ANY_NAME, ANY_NAME)
def test_names_stay_different_and_usable(a: str, b: str) -> None:
    assert (table_name(a) == table_name(b)) == (a == b)
    nn.ModuleDict({table_name(a): nn.Identity()})


def test_every_name_that_torch_reserves_is_changed() -> None:
    for name in dir(nn.ModuleDict()):
        nn.ModuleDict({table_name(name): nn.Identity()})
    assert table_name("C1") == "C1" and table_name("item_id") == "item_id"


# ---- traces, and phases in metrics ---------------------------------------------------------------


def steps_in(path: Path) -> dict[int, int]:
    """Return the number of phase bars by step."""
    return Counter(event["args"]["step"] for event in read_trace(path)["traceEvents"]
                   if event.get("cat") == "phase")


def test_two_processes_in_one_file(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (out, _), _ = run_ranks([
        *words(prepared, tmp_path / "run", stats=prepared.stats, batch_size=128, max_steps=7),
        "--trace", str(path), "--trace-steps", "3-5", "--json"])
    assert json.loads(out)["trace"] == str(path)
    assert steps_in(path) == dict.fromkeys((3, 4, 5), 2 * len(PHASES))
    trained = [line for line in lines(tmp_path / "run") if line["event"] == "train"]
    assert [line["step"] for line in trained] == [5, 7]
    for line, steps in zip(trained, (5, 2), strict=True):
        assert list(line["phases"]) == list(PHASES)
        for phase in line["phases"].values():
            assert phase["count"] == sum(phase["below_us"].values()) == 2 * steps
            most = sum(float(us) * n for us, n in phase["below_us"].items()) * 1e-6
            assert 0 < phase["sum_s"] < most


def test_steps_are_those_of_the_run(prepared: Prepared, tmp_path: Path) -> None:
    """They are also after resuming; steps before the resumption are not traced."""
    run = {"max_steps": 4, "checkpoint_every": 2}
    train_on(prepared, tmp_path / "run", **run)
    path = tmp_path / "trace.json"
    more = {"checkpoint_every": 2, "trace": str(path)}
    with pytest.warns(UserWarning, match="steps after 4, at which this run resumes"):
        result = train_on(prepared, tmp_path / "run", resume=True, **more, max_steps=6,
                          trace_steps="2-4")
    assert "trace" not in result and not path.exists()
    train_on(prepared, tmp_path / "run", resume=True, **more, max_steps=8, trace_steps="3-7")
    assert steps_in(path) == {7: len(PHASES)}


def test_steps_that_the_run_will_not_reach(prepared: Prepared, tmp_path: Path) -> None:
    """They are refused before training begins; a run that ends within them writes a partial trace.
    """
    out, path = tmp_path / "run", tmp_path / "trace.json"
    with pytest.raises(InvalidInputError, match="'11-20', expected steps of the run, 1-5"):
        train_on(prepared, out, max_steps=5, trace=str(path))
    assert not out.exists()
    with pytest.warns(UserWarning, match="steps 4 to 5 only"):
        result = train_on(prepared, out, max_steps=5, trace=str(path), trace_steps="4-9")
    assert result["trace"] == str(path) and set(steps_in(path)) == {4, 5}


def test_an_unsharded_run_has_no_phases(prepared: Prepared, tmp_path: Path) -> None:
    train_on(prepared, tmp_path, sharding="none", max_steps=5)
    assert all("phases" not in line for line in lines(tmp_path))


def test_a_trace_that_cannot_be_written_does_not_fail_the_run(prepared: Prepared, tmp_path: Path
                                                              ) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="the trace is not written"):
        result = train_on(prepared, tmp_path / "run", max_steps=5, trace_steps="1-2",
                          trace=str(tmp_path / "file" / "t.json"))
    assert result["steps"] == 5 and "trace" not in result
    assert (tmp_path / "run" / "state.pt").exists()


# ---- AUC and log loss ----------------------------------------------------------------------------


def auc_by_pairs(scores: list[float], labels: list[int]) -> float:
    wins = [(p > n) + 0.5 * (p == n)
            for p, y in zip(scores, labels, strict=True) if y
            for n, z in zip(scores, labels, strict=True) if not z]
    return sum(wins) / len(wins) if wins else float("nan")


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), max_size=40))
def test_auc_counts_pairs(samples: list[tuple[int, int]]) -> None:
    scores, labels = [s / 2 for s, _ in samples], [y for _, y in samples]
    got, want = auc(np.array(scores), np.array(labels)), auc_by_pairs(scores, labels)
    assert got == pytest.approx(want, abs=1e-15) or (math.isnan(got) and math.isnan(want))


def test_log_loss_by_its_definition_and_at_extremes() -> None:
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=1000), rng.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-logits))
    want = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    assert log_loss(logits, labels) == pytest.approx(want, rel=1e-12)
    assert log_loss(np.array([1000.0, -1000.0]), np.array([1, 1])) == 500.0
    assert math.isnan(log_loss(np.zeros(0), np.zeros(0)))


def test_collected_batches_equal_the_whole_and_may_be_empty() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(300), torch.randint(0, 2, (300,)).float()
    metrics = BinaryMetrics()
    for part in torch.split(torch.arange(300), 64):
        metrics.update(logits[part], labels[part])
    metrics.update(logits[:0], labels[:0])
    assert metrics.compute() == {
        "auc": auc(logits.numpy(), labels.numpy()),
        "log_loss": log_loss(logits.numpy(), labels.numpy()), "samples": 300}
    assert BinaryMetrics().compute()["samples"] == 0


@pytest.mark.parametrize("scores", [[np.nan] * 4, [0.1, np.nan, 0.3, 0.2]])
def test_the_auc_of_a_diverged_model_is_undefined(scores: list[float]) -> None:
    assert np.isnan(auc(np.array(scores), np.array([0, 1, 1, 0])))
