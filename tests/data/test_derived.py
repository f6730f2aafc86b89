"""Derived columns (side tables, crosses, bins) from recipes and from the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import FileFormatError, InvalidInputError, OperError
from tests.data.folder_support import decoded
from tests.support import ROOT, run_here

ALL = PreprocessOptions(valid="0", test="0", min_count=1)
ITEMS = {"i1": ("toys", "1.5", "a|b"), "i2": ("books", "", ""), "i3": ("", "8", "c")}


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, list[list[str]]]:
    rng = random.Random(3)
    rows = [[rng.choice(["u1", "u2", ""]), rng.choice([*ITEMS, "i9", ""]),
             str(rng.randint(1, 5)), rng.choice(["17", "18", "29.5", "30", ""])]
            for _ in range(300)]
    (tmp_path / "log.csv").write_text("user,item,stars,age\n" + "".join(
        ",".join(r) + "\n" for r in rows))
    (tmp_path / "items.csv").write_text("id,genre,price,tags\n" + "".join(
        f'{k},{g},{p},"{t}"\n' for k, (g, p, t) in ITEMS.items()))
    return tmp_path, rows


def test_the_command_line_joins_and_crosses(log: tuple[Path, list[list[str]]]) -> None:
    folder, rows = log
    done = run_here(
        "preprocess", "csv", str(folder / "log.csv"), "-o", str(folder / "out"), "--label", "stars",
        "--threshold", "4", "--sparse", "user,item,age:bins=18/30", "--join",
        str(folder / "items.csv"), "--join-on", "item=id", "--join-sparse", "genre,tags:|",
        "--join-dense", "price:log1p", "--cross", "user*genre=1000003", "--valid", "0",
        "--min-count", "1", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    lacking = sum(r[1] not in ITEMS for r in rows)
    assert manifest["joins"] == [{"file": str(folder / "items.csv"), "key": "item",
                                  "unmatched_rows": lacking}]
    assert manifest["columns"]["sparse"] == ["user", "item", "age", "genre", "tags", "user_x_genre"]
    assert manifest["dense_transforms"] == {"price": "log1p"}
    found = decoded(folder / "out")
    side = [ITEMS.get(r[1], ("", "", "")) for r in rows]
    assert found["label"] == [int(r[2]) >= 4 for r in rows]
    assert found["age"] == [None if not r[3] else (float(r[3]) >= 18) + (float(r[3]) >= 30)
                            for r in rows]
    assert found["genre"] == [s[0] or None for s in side]
    assert found["tags"] == [s[2].split("|") if s[2] else [] for s in side]
    np.testing.assert_allclose(found["price"], np.log1p([float(s[1] or 0) for s in side]), 1e-6)
    # Equal pairs have equal hashes; different pairs have different ones (of a million).
    pairs = list(zip([r[0] for r in rows], [s[0] for s in side], strict=True))
    assert len(set(pairs)) == len(set(found["user_x_genre"])) == len(
        set(zip(pairs, found["user_x_genre"], strict=True)))
    assert all(0 <= x < 1_000_003 for x in found["user_x_genre"])


def test_a_side_table_as_parquet_gives_the_same(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    pq.write_table(pa.table({n: [(k, *v)[j] for k, v in ITEMS.items()]
                             for j, n in enumerate(("id", "genre", "price", "tags"))}),
                   folder / "items.parquet")
    found = []
    for kind in ("csv", "parquet"):
        choice = Choice(["user", "item", "age:bins=18/30"], "stars", threshold=4.0,
                        join=str(folder / f"items.{kind}"), join_on="item=id",
                        join_sparse=["genre"], cross=["user*genre=1000003"])
        preprocess(generic_recipe("csv", choice), [str(folder / "log.csv")], folder / kind, ALL)
        found.append(decoded(folder / kind))
    assert found[0] == found[1]


def test_what_cannot_be_joined_or_crossed(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    (folder / "twice.csv").write_text("id,genre\ni1,a\ni1,b\n")
    cases: list[tuple[dict[str, Any], type[OperError], str]] = [
        ({"join": str(folder / "twice.csv"), "join_on": "item=id", "join_sparse": ["genre"]},
         FileFormatError, "distinct keys 'item'=1"),
        ({"join": str(folder / "items.csv"), "join_on": "nobody", "join_sparse": ["genre"]},
         InvalidInputError, "key of a join='nobody'"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["nothing"]},
         FileFormatError, "nothing"),
        ({"join": str(folder / "items.csv")}, InvalidInputError, "its key and columns"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["user"]},
         InvalidInputError, r"columns named twice=\['user'\]"),
        # The label of a log without one, time buckets and times also have column names.
        ({"sparse": ["user", "label"], "label": None, "threshold": None}, InvalidInputError,
         r"columns named twice=\['label'\]"),
        ({"dense": ["label"], "label": None, "threshold": None}, InvalidInputError,
         r"columns named twice=\['label'\]"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["bucket"]},
         InvalidInputError, r"'bucket' has the time buckets"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["time"],
          "time": "when"}, InvalidInputError, r"'time' has the times"),
        ({"cross": ["user*nothing=10"]}, InvalidInputError, "with one id per row"),
        ({"cross": ["user*item"]}, InvalidInputError, "A\\*B=N"),
        ({"sparse": ["user", "age:bins=30/18"]}, InvalidInputError, "ascending numbers"),
        ({"sparse": ["user", "age:bins=x"]}, InvalidInputError, "expected a number"),
        ({"threshold": 4.0, "label": None}, InvalidInputError, "with a label"),
    ]
    for k, (words, error, text) in enumerate(cases):
        with pytest.raises(error, match=text):
            preprocess(generic_recipe("csv", Choice(**{
                "sparse": ["user", "item"], "label": "stars", "threshold": 4.0, **words})),
                [str(folder / "log.csv")], folder / f"out{k}", ALL)
        assert not (folder / f"out{k}").exists()


def test_a_side_table_that_matches_little_is_a_problem(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    (folder / "few.csv").write_text("id,genre\ni1,a\n")
    manifest = preprocess(generic_recipe("csv", Choice(
        ["item"], join=str(folder / "few.csv"), join_on="item=id", join_sparse=["genre"])),
        [str(folder / "log.csv")], folder / "out", ALL)
    assert any("few.csv" in p for p in manifest["problems"])


def test_the_documented_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    (tmp_path / "ratings.toml").write_text(
        page.split('```toml title="ratings.toml"\n')[1].split("```")[0])
    (tmp_path / "items.csv").write_text('id,price,tags\nA,3,"x|y"\nB,,\n')
    (tmp_path / "log.csv").write_text("user,item,rating,age,when\n" + "".join(
        f"u{k % 9},{'AB'[k % 2]},{k % 6},{10 + k % 60},{60 * k}\n" for k in range(600)))
    manifest = preprocess(load_recipe(str(tmp_path / "ratings.toml")), [str(tmp_path / "log.csv")],
                          tmp_path / "out")
    assert manifest["problems"] == [] and sum(manifest["rows"].values()) == 500
    assert manifest["tables"]["tags"]["num_rows"] == 3
    assert manifest["tables"]["age"]["num_rows"] == 5
    assert manifest["columns"]["sparse"][-1] == "user_x_age"
