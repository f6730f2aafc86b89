"""Runs that start from another run whose data have another numbering of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oper.data import (
    PreprocessOptions,
    SyntheticLog,
    analyze_folder,
    load_recipe,
    preprocess,
    write_synthetic_log,
)
from oper.data.vocabulary.finished import extend
from oper.errors import InvalidInputError
from oper.rows.remap import load_remap
from oper.train.loop import train
from oper.train.model import load_state
from tests.support import run_here
from tests.train.conftest import Prepared
from tests.train.test_train import config, lines, words

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
    train(config(on(days, "day0"), days / "first", **FLAGS), show_progress=False)
    return days / "first"


def test_one_command_goes_on_with_renumbered_rows(days: Path, first: Path, tmp_path: Path) -> None:
    """Results equal those of a run whose rows were never renumbered."""
    flags: dict[str, Any] = FLAGS | {"start": str(first)}
    train(config(on(days, "old1"), tmp_path / "plain", **flags), show_progress=False)
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
        train(config(on(days, data), tmp_path / "run", **flags), show_progress=False)
