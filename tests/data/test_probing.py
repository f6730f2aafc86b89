"""Errors that affect all records are reported from the first records, with a remedy."""

from __future__ import annotations

import time
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing import run as preprocessing
from oper.data.recipe import Recipe, recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError, OperError
from tests.support import run_here

MS = 1_600_000_000_000


def own(columns: list[dict[str, Any]], **more: Any) -> Recipe:
    return recipe_from_dict({"name": "own", "separator": ",", "column": columns} | more)


CASES: dict[str, tuple[str, Recipe, str]] = {  # first field of many rows, recipe, what to do
    "milliseconds": (f"{MS}", generic_recipe("csv", Choice(["a"], "y", time="x")),
                     "--time-format unix_ms"),
    "iso for unix": ("2020-01-01 10:00:00", generic_recipe("csv", Choice(["a"], "y", time="x")),
                     "--time-format iso,"),
    "zone for iso": ("2020-01-01T10:00:00+01:00", generic_recipe("csv", Choice(
        ["a"], "y", time="x", time_format="iso")), "--time-format iso_zone"),
    "text label": ("click", generic_recipe("csv", Choice(["a"], "x")), "--among"),
    "graded label": ("5", generic_recipe("csv", Choice(["a"], "x")), "--label x:number"),
    "floats as ids": ("17850.0", own([{"name": "x", "kind": "sparse", "parse": "uint64"},
                                      {"name": "a", "kind": "skip"},
                                      {"name": "y", "kind": "label"}], header=True),
                      'parse = "integral"'),
    "texts as ids": ("A17", own([{"name": "x", "kind": "sparse", "parse": "int"},
                                 {"name": "a", "kind": "skip"},
                                 {"name": "y", "kind": "label"}], header=True),
                     'parse = "string"'),
    "floats as integers": ("1.5", own([{"name": "x", "kind": "dense"},
                                       {"name": "a", "kind": "sparse", "parse": "int"},
                                       {"name": "y", "kind": "label"}], header=True),
                           'parse = "float"'),
    "other separator": ("1", own([{"name": "x", "kind": "dense"},
                                  {"name": "a", "kind": "sparse", "parse": "int"},
                                  {"name": "y", "kind": "label"}], separator=";"),
                        "separated by ','"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_records_tell(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, recipe, todo = CASES[case]
    header = "x,a,y\n" if recipe.layouts[0].header else ""
    (tmp_path / "log.csv").write_text(header + f"{value},7,1\n" * 200_000)
    monkeypatch.setattr(preprocessing.Job, "opened", None)  # fails if work begins
    began = time.process_time()
    with pytest.raises(OperError) as error:
        preprocess(recipe, [str(tmp_path / "log.csv")], tmp_path / "out", PreprocessOptions())
    assert todo in str(error.value) and str(tmp_path / "log.csv") in str(error.value)
    assert time.process_time() - began < 2
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_malformed_rows_that_are_allowed_for_are_no_reason(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("y,a\n" + "x,1\n" * 300 + "1,1\n" * 50_000)
    recipe = generic_recipe("csv", Choice(["a"], "y"))
    manifest = preprocess(recipe, [str(tmp_path / "log.csv")], tmp_path / "out",
                          PreprocessOptions(max_bad=300))
    assert manifest["bad_rows"]["count"] == 300 and sum(manifest["rows"].values()) == 50_000


@pytest.mark.parametrize(("words", "todo"), [
    (["--separator", ","], r"--separator '\t'"), (["--separator", "tabulator"], r"'\t'")])
def test_a_wrong_separator(tmp_path: Path, words: list[str], todo: str) -> None:
    (tmp_path / "log.tsv").write_text("user\titem\n1\t2\n3\t4\n")
    command = ["preprocess", "csv", str(tmp_path / "log.tsv"), "--sparse", "user,item", "-o",
               str(tmp_path / "out")]
    done = run_here(*command, *words)
    assert done.returncode == 1 and todo in done.stderr and done.stderr.count("\n") == 1
    if words[1] == ",":
        for right in (r"\t", "tab"):
            assert run_here(*command, "--separator", right, "--force").returncode == 0


def test_parquet_columns_of_odd_types(tmp_path: Path) -> None:
    path, out = tmp_path / "log.parquet", tmp_path / "out"
    rows = 100_000

    def write(ids: pa.Array, **more: Any) -> None:
        pq.write_table(pa.table({"id": ids, **more}), path)

    for ids in (pa.array([1.0, None] * (rows // 2)), pa.array([[1.0, 2.0]] * rows),
                pa.array([Decimal("17850.0")] * rows)):
        write(ids)
        with pytest.raises(InvalidInputError, match='parse = "integral"'):
            preprocess(generic_recipe("parquet", Choice(["id"])), [str(path)], tmp_path / "none")
        integral = recipe_from_dict({"name": "own", "format": "parquet", "column": {
            "name": "id", "kind": "sparse", "parse": "integral"}})
        if not pa.types.is_list(ids.type):
            preprocess(integral, [str(path)], out, PreprocessOptions(force=True))
            value = pq.read_table(out / "vocabulary" / "id.parquet")["value"].to_pylist()
            assert value in ([None, 1], [17850])
    # Days are midnights; a label may be text, as in CSV files.
    for kind in (pa.date32(), pa.date64()):
        write(pa.array(range(rows)), y=pa.array(["0", "1"] * (rows // 2)),
              t=pa.array([date(2020, 1, 1 + k % 9) for k in range(rows)], kind))
        preprocess(generic_recipe("parquet", Choice(["id"], "y", time="t")), [str(path)], out,
                   PreprocessOptions(force=True))
        table = pq.read_table(out / "train")
        assert table["time"][0].as_py() == 1_577_836_800
        assert set(table["label"].to_pylist()) == {0, 1}


def test_an_empty_text_is_missing_in_parquet_files_too(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"id": ["", "x", None, "", None, "y"] * 3}), path)
    manifest = preprocess(generic_recipe("parquet", Choice(["id"])), [str(path)], tmp_path / "out",
                          PreprocessOptions(valid="0"))
    assert manifest["tables"]["id"]["missing_id"] == 1
    words = pq.read_table(tmp_path / "out" / "vocabulary" / "id.parquet").to_pydict()
    assert words == {"value": [None, "x", "y"], "id": [1, 2, 3], "count": [12, 3, 3]}
    assert pq.read_table(tmp_path / "out" / "train")["id"].to_pylist() == [1, 2, 1, 1, 1, 3] * 3


def test_a_column_that_no_file_can_be_named_after(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a/b"):
        generic_recipe("parquet", Choice(["a/b"]))


@pytest.mark.parametrize(("parse", "value", "advice"), [
    ("int", "9223372036854775808", "id:uint64"), ("int", "18446744073709551616", "id:string"),
    ("int", "+7", "id:integral"), ("int", "1_000", "id:string"), ("uint64", "-1", "id:int"),
    ("hex32", "7", "id:int"), ("int", "7.0", "id:integral")])
def test_advice_would_help(tmp_path: Path, parse: str, value: str, advice: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"id\n{value}\n{value}\n")
    with pytest.raises(FileFormatError, match=f"pass --sparse {advice}, or"):
        preprocess(generic_recipe("csv", Choice([f"id:{parse}"])), [str(path)], tmp_path / "out")
    preprocess(generic_recipe("csv", Choice([advice])), [str(path)], tmp_path / "out")


@pytest.mark.parametrize(("data", "words"), [
    ("y,id\n1,2\n".encode("utf-16"), "look like UTF-16"), (b"y,id\r1,2\r0,3\r", "line feeds")])
def test_other_encodings_and_line_ends(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "log.csv").write_bytes(data)
    with pytest.raises(FileFormatError, match=words):
        preprocess(generic_recipe("csv", Choice(["id"])), [str(tmp_path / "log.csv")],
                   tmp_path / "out")
