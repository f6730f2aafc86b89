"""Damaged files of every format give rows or a clear error."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.reading.lines import Unit
from oper.data.reading.readers import read_unit
from oper.data.recipe import Recipe
from oper.errors import OperError
from tests.fuzz.targets import change

ROUNDS = 60


def criteo(path: Path) -> tuple[Path, Recipe, str]:
    line = "1\t" + "\t".join(["5"] * 13 + ["00ff17aa"] * 26) + "\n"
    path.write_text(line * 40)
    return path, load_recipe("criteo-kaggle"), "tsv"


def packed(path: Path) -> tuple[Path, Recipe, str]:
    plain, recipe, layout = criteo(path)
    path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    return path, recipe, layout


def quoted(path: Path) -> tuple[Path, Recipe, str]:
    recipe = load_recipe("book-crossing")
    path.write_bytes(b'"User-ID";"ISBN";"Book-Rating"\r\n' + b'"276725";"03 x;4";"5"\r\n' * 40)
    return path, recipe, recipe.layouts[0].name


def objects(path: Path) -> tuple[Path, Recipe, str]:
    recipe = load_recipe("amazon")
    line = json.dumps({"reviewerID": "A1", "asin": "B0", "overall": 5.0, "unixReviewTime": 1})
    path.write_text((line + "\n") * 40)
    return path, recipe, "5-core"


def bags(path: Path) -> tuple[Path, Recipe, str]:
    recipe = load_recipe("citeulike")
    layout = next(x for x in recipe.layouts if x.format == "bags")
    path.write_text("3 1 2 3\n" * 40)
    return path, recipe, layout.name


def parquet(path: Path) -> tuple[Path, Recipe, str]:
    table = pa.table({"label": [0, 1] * 20, "x": list(range(40)), "tags": [[1, 2], []] * 20})
    pq.write_table(table, path, row_group_size=8, write_page_checksum=True)
    recipe = generic_recipe("parquet", Choice(("x", "tags"), label="label"))
    return path, recipe, recipe.layouts[0].name


def arrays(path: Path) -> tuple[Path, Recipe, str]:
    base = path.parent / "day_0"
    np.save(f"{base}_dense.npy", np.ones((40, 13), np.float32))
    np.save(f"{base}_labels.npy", np.ones((40, 1), np.int32))
    members = {str(k): np.full((40, 2), k, np.int32) for k in range(26)}
    np.savez(f"{base}_sparse_multi_hot.npz", **members)
    return Path(f"{base}_sparse_multi_hot.npz"), load_recipe("criteo-1tb"), "npy"


@pytest.mark.parametrize("make", [criteo, packed, quoted, objects, bags, parquet, arrays])
def test_damaged_files(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path, recipe, layout = make(tmp_path / "file")
    good, rng, counts = path.read_bytes(), random.Random(0), [0, 0]

    def read() -> int:
        pieces = list(read_unit(Unit(str(path), layout), recipe))
        for rows in pieces:  # every line is a row or counted as malformed
            spent = rows.rows.size + rows.num_bad
            # A record in quotes may take several lines.
            assert spent <= rows.num_lines if make is quoted else spent == rows.num_lines
            assert len(rows.bad) == min(rows.num_bad, 20)
            assert rows.labels.size == rows.rows.size == rows.dense.shape[1]
            assert (np.diff(rows.rows) > 0).all()
        return sum(r.rows.size for r in pieces)

    assert read() == 40
    for _ in range(ROUNDS):
        path.write_bytes(change(good, rng))
        try:
            counts[0] += read() <= 80
        except OperError as error:
            counts[1] += str(path.name) in str(error) or "day_0" in str(error)
    assert sum(counts) == ROUNDS, "an error names its file"


def test_work_that_was_begun_with_a_damaged_note_is_an_error(
        tmp_path: Path, invent: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = str(write(tmp_path / "train.txt", invent(60)))
    with monkeypatch.context() as patch:
        patch.setattr("oper.data.preprocessing.run.Job.manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            preprocess(load_recipe("criteo-kaggle"), [log], tmp_path / "out")
    (tmp_path / ".out.work" / "stage" / "000000.json").write_text("{")
    with pytest.raises(OperError, match="starts from scratch"):
        preprocess(load_recipe("criteo-kaggle"), [log], tmp_path / "out")
    assert preprocess(load_recipe("criteo-kaggle"), [log], tmp_path / "out")["rows"]["train"]
