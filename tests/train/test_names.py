"""Columns of any name, from the log to the trained and served model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torch import nn

from oper.data import Folder, PreprocessOptions, analyze_folder, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.serve.model import load_model
from oper.train.config import load_config
from oper.train.loop import train
from oper.train.model import load_state
from oper.train.names import table_name
from tests.support import run_here

NAMES = ("type", "items", "keys", "values", "update", "to", "train", "user.id", "type_",
         "user%2Eid", "__init__", "forward", "plain", "T_destination", "ä b")


def test_every_column_name_trains_in_every_way(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "log.csv").open("w") as log:
        log.write(",".join(["y", "dense.one", *NAMES]) + "\n")
        for row in rng.integers(0, 9, (400, len(NAMES))).tolist():
            log.write(",".join(map(str, [row[0] % 2, row[1], *row])) + "\n")
    recipe = generic_recipe("csv", Choice(NAMES, "y", ["dense.one"]))
    preprocess(recipe, [str(tmp_path / "log.csv")], tmp_path / "data", PreprocessOptions())
    analyze_folder(tmp_path / "data").save(tmp_path / "stats")
    plan = str(tmp_path / "plan.json")
    made = run_here("plan", str(tmp_path / "stats"), "--topology", "this-host", "--world-size", "1",
                    "--dim", "8", "--batch-size", "64", "-o", plan)
    assert made.returncode == 0, made.stderr
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


@given(st.lists(st.sampled_from(["type", "_", ".", "%", "%2E", "%25", "a", "to", "__init__"]),
                min_size=1, max_size=4).map("".join),
       st.lists(st.sampled_from(["type", "_", ".", "%", "%2E", "%25", "a", "to", "__init__"]),
                min_size=1, max_size=4).map("".join))
def test_names_stay_different_and_usable(a: str, b: str) -> None:
    assert (table_name(a) == table_name(b)) == (a == b)
    nn.ModuleDict({table_name(a): nn.Identity()})


def test_every_name_that_torch_takes_itself_is_changed() -> None:
    for name in dir(nn.ModuleDict()):
        nn.ModuleDict({table_name(name): nn.Identity()})
    assert table_name("C1") == "C1" and table_name("item_id") == "item_id"
