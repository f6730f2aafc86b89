"""Graded rewards, such as ratings and amounts, from the log's file to CDT4Rec's reward head."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from oper.data import Folder, PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import InvalidInputError
from oper.rl_rec.data.interactions import DataOptions, Interactions, load_interactions
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.models.base import Histories
from oper.rl_rec.models.cdt4rec import CDT4RecConfig
from oper.train.config import TrainConfig
from oper.train.tasks import ClickTask
from tests.support import run_here

WHOLE = PreprocessOptions(min_count=1, valid="0", test="0")
RATED = DataOptions(k_core=1, reward_offset=7.0, reward_scale=3.0)
CONFIG = CDT4RecConfig(dim=16, steps=10, window=5, layers=1, negatives=0, reward_loss="mse")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, int]]:
    """Write a file in which 60 users rate 15 of 30 items; return its path and the rating (1 to 10)
    of each item, which is the same for all users."""
    path = tmp_path_factory.mktemp("graded") / "log.csv"
    rng = np.random.default_rng(0)
    rating = {item: 1 + item % 10 for item in range(30)}
    rows = [(u, int(i), rating[int(i)], 1000 * t + u) for u in range(60)
            for t, i in enumerate(rng.permutation(30)[:15])]
    path.write_text("user,item,rating,time\n" + "".join(
        f"{u},{i},{r},{t}\n" for u, i, r, t in rows))
    return path, rating


def load(log: Path, out: Path, options: DataOptions, **choice: object) -> Interactions:
    recipe = generic_recipe("csv", Choice(["user", "item"], time="time", **choice))  # type: ignore[arg-type]
    preprocess(recipe, [str(log)], out, WHOLE)
    return load_interactions(out, options)


def raw_items(folder: Path, data: Interactions) -> np.ndarray:
    """The item names in the log of `data.items`, as numbers."""
    table = pq.read_table(folder / "vocabulary" / "item.parquet").to_pydict()
    name = dict(zip(table["id"], map(int, table["value"]), strict=True))
    return np.array([name[i] for i in data.item_ids[data.items]])


def test_ratings_become_rewards_and_targets(log: tuple[Path, dict[int, int]], tmp_path: Path
                                            ) -> None:
    path, rating = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    grades = np.array([rating[i] for i in raw_items(tmp_path / "graded", data)])
    np.testing.assert_array_equal(data.rewards, ((grades - 7) / 3).astype(np.float32))
    # The targets are those of a threshold: of reward > 0, or rated 8 or higher.
    binary = load(path, tmp_path / "binary", DataOptions(k_core=1), label="rating", threshold=8.0)
    for one, other in ((data.valid, binary.valid), (data.test, binary.test)):
        assert all(np.array_equal(getattr(one, f.name), getattr(other, f.name))
                   for f in dataclasses.fields(one))
    assert data.test.users.size > 50


def test_the_command_line_and_log1p(log: tuple[Path, dict[int, int]], tmp_path: Path) -> None:
    path, rating = log
    done = run_here("preprocess", "csv", str(path), "-o", str(tmp_path / "out"), "--label",
                    "rating:log1p", "--sparse", "user,item", "--time", "time", "--valid", "0",
                    "--min-count", "1")
    assert done.returncode == 0, done.stderr
    assert Folder.open(tmp_path / "out").has_graded_labels
    data = load_interactions(tmp_path / "out", DataOptions(k_core=1))
    grades = np.array([rating[i] for i in raw_items(tmp_path / "out", data)])
    np.testing.assert_allclose(data.rewards, np.log1p(grades), rtol=1e-6)


def test_the_reward_head_learns_the_grades(log: tuple[Path, dict[int, int]], tmp_path: Path
                                           ) -> None:
    path, rating = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    model = fit("cdt4rec", CONFIG, data, 1, FitOptions(epochs=30, lr=1e-2, batch_size=32,
                                                       eval_every=30)).model
    users = np.arange(1, 11)
    rows, lengths = data.rows_between(data.offsets[users], data.train_stop[users])
    histories = Histories(*(torch.from_numpy(x) for x in (
        users, data.items[rows], data.rewards[rows], lengths)))
    with torch.no_grad():
        found = model.rewards(model.encode(histories), torch.arange(1, data.num_items))
    name = dict(zip(data.items, raw_items(tmp_path / "graded", data), strict=True))
    wanted = np.array([(rating[name[i]] - 7) / 3 for i in range(1, data.num_items)])
    error = np.abs(found.numpy() - wanted).mean()
    assert error < 0.25 * np.abs(wanted - wanted.mean()).mean()


def test_unsuitable_uses_of_grades_are_refused(log: tuple[Path, dict[int, int]], tmp_path: Path
                                               ) -> None:
    path, _ = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    with pytest.raises(InvalidInputError, match="mse"):
        fit("cdt4rec", dataclasses.replace(CONFIG, reward_loss="bce"), data, 1, FitOptions())
    with pytest.raises(InvalidInputError, match=r"model of clicks.*numbers.*0 and 1"):
        ClickTask(TrainConfig(data=str(tmp_path / "graded")))
    with pytest.raises(InvalidInputError, match="no threshold"):
        generic_recipe("csv", Choice(["item"], "rating:number", threshold=4.0))
    with pytest.raises(InvalidInputError, match="reward_scale"):
        DataOptions(reward_scale=0.0)
    for beyond in (DataOptions(reward_scale=1e-45), DataOptions(reward_offset=1e300)):
        with pytest.raises(InvalidInputError, match="expected finite rewards"):
            load_interactions(tmp_path / "graded", beyond)


def test_a_bad_number_is_a_bad_row(tmp_path: Path) -> None:
    """Blocks without any good row do not change the type of the labels."""
    path = tmp_path / "log.csv"
    path.write_text("user,item,rating,time\n1,1,bad,1\n" + "".join(
        f"{u},{i},{i / 4},{i}\n" for u in range(4) for i in range(4)))
    for name in ("first", "second"):
        (tmp_path / f"{name}.csv").write_text("user,item,rating,time\n1,1,bad,1\n")
    recipe = generic_recipe("csv", Choice(["user", "item"], "rating:number", time="time"))
    found = preprocess(recipe, [str(tmp_path / "first.csv"), str(path),
                                str(tmp_path / "second.csv")], tmp_path / "out",
                       dataclasses.replace(WHOLE, max_bad=3))
    assert found["bad_rows"]["count"] == 3 and found["rows"]["train"] == 16
    assert load_interactions(tmp_path / "out", DataOptions(k_core=1)).rewards.max() == 0.75
