"""Configuration: flags override the file, which overrides defaults; one error per mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import oper
from oper.errors import FileFormatError, InvalidInputError, UsageError
from oper.train.config import TrainConfig, load_config, parse_settings
from oper.train.engines import table_optimizer
from tests.support import ROOT, run_command

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
def test_errors_in_flags_are_of_the_command_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(None, {"data": "d"} | flags)


def test_errors_in_files_are_not_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = "d"\n[model]\ndense_layers = [8, "x"]\n')
    with pytest.raises(InvalidInputError, match=r"dense_layers\[1\]='x'") as found:
        load_config(path, {"model.dim": "8"})
    assert not isinstance(found.value, UsageError)


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


def test_foreign_and_missing_files(tmp_path: Path) -> None:
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
