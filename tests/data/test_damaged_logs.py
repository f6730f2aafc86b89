"""Malformed rows of text; damaged files; errors found in the first records."""

import gzip
import json
import random
import time
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing import run as preprocessing
from oper.data.reading import readers
from oper.data.reading.lines import Unit, read_blocks
from oper.data.reading.readers import read_unit, where
from oper.data.reading.rows import Rows, concat
from oper.data.recipe import Recipe, recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError, OperError
from tests.data.loader_support import decoded, interrupted, invent, made, train_log
from tests.fuzz.targets import change
from tests.support import run_here

KAGGLE = load_recipe("criteo-kaggle")
KINDS = [("label", "binary"), ("label", "threshold"), ("label", "number"), ("dense", "int"),
         ("dense", "float"), ("sparse", "hex32"), ("sparse", "uint32"), ("sparse", "uint64"),
         ("sparse", "int"), ("sparse", "integral"), ("time", "unix"), ("time", "unix_ms"),
         ("time", "yymmddhh"), ("skip", ""), ("sparse", "string"), ("time", "iso")]


def recipe(kinds: list[tuple[str, str]], separator: str, missing: bool, log1p: bool) -> Recipe:
    columns = [{"name": "last", "kind": "sparse", "parse": "int"}]
    for k, (kind, parse) in enumerate(kinds):
        column: dict[str, Any] = {"name": f"c{k}", "kind": kind}
        if kind != "skip":
            column["parse"] = parse
        if kind == "dense" and log1p:
            column["transform"] = "log1p"
        if kind == "sparse" and missing and parse != "hex32":
            column["missing"] = ["-1"]
        columns.append(column)
    return recipe_from_dict({"name": "any", "separator": separator, "column": columns[::-1]})


def read(path: Path, rules: Recipe, block_bytes: int = 1 << 21) -> Rows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "read_blocks", partial(read_blocks, block_bytes=block_bytes))
        return concat(list(read_unit(Unit(str(path), rules.layouts[0].name), rules)))


def assert_same(one: Rows, other: Rows) -> None:
    assert (one.num_lines, one.num_bad, one.bad) == (other.num_lines, other.num_bad, other.bad)
    assert one.rows.tolist() == other.rows.tolist()
    assert one.labels.tolist() == other.labels.tolist()
    assert one.dense.tobytes() == other.dense.tobytes()
    assert (one.time is None) == (other.time is None)
    assert one.time is None or one.time.tolist() == other.time.tolist()  # type: ignore[union-attr]
    for a, b in zip(one.sparse, other.sparse, strict=True):
        assert a.type == b.type
        assert a.to_pylist() == b.to_pylist()


FIELDS = ["", "0", "1", "-1", "7", "-7", "007", "+3", " 4", "5 ", "3.0", "2.50", "-0.0", "1e3",
          ".5", "6.", "nan", "inf", "0x1f", "1a2b3c4d", "1A2B3C4D", "g0000000", "4294967295",
          "4294967296", "99999999999999999999", "18446744073709551615", "9223372036854775807",
          "-9223372036854775808", "123456789012345678", "1234567890123456789", "14102100",
          "14109900", "14102124", "\r", "\0", "1\r", "x" * 30, "ä", "9007199254740993",
          "9007199254740993.0", "1382659200", "1e400", "0.1234567890123456789", "--1", "-", ".",
          "1:2", "true", "NULL", "-0", "0" * 25, "-" + "0" * 25 + "7", "1e0005", "3.4028235e38",
          "3.5e38", "4102105", "0014102100", "\ufeff1", "0000-02-29", "2014-10-21 05:06"]


@given(kinds=st.lists(st.sampled_from(KINDS[3:]), min_size=1, max_size=5), label=st.sampled_from(
           [[], [KINDS[0]], [KINDS[1]], [KINDS[2]]]), time=st.booleans(), missing=st.booleans(),
       log1p=st.booleans(), separator=st.sampled_from("\t,;|"), data=st.data())
@settings(max_examples=250, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_rows_and_errors_do_not_depend_on_the_other_lines_of_a_block(
        tmp_path: Path, kinds: Any, label: Any, time: bool, missing: bool, log1p: bool,
        separator: str, data: st.DataObject) -> None:
    seen_time = [k for k in kinds if k[0] == "time"][:1]
    kinds = label + [k for k in kinds if k[0] != "time"] + seen_time
    rules = recipe(kinds, separator, missing, log1p)
    good = {"hex32": "00ff17aa", "binary": "1", "yymmddhh": "14102100", "": "anything",
            "iso": "2014-10-21"}
    usual = [good.get(c.parse, "12") for c in rules.layouts[0].columns]
    lines = []
    for odd in data.draw(st.lists(st.booleans(), max_size=40)):
        fields = [data.draw(st.sampled_from([*FIELDS, u, u, u])) if odd else u for u in usual]
        if odd and data.draw(st.integers(0, 9)) == 0:
            fields = fields[:-1] if data.draw(st.booleans()) else [*fields, "1"]
        lines.append(separator.join(fields))
    ending = data.draw(st.sampled_from(["\n", "\r\n"]))
    text = ending.join(lines) + (ending if data.draw(st.booleans()) else "")
    path = tmp_path / "log.txt"
    path.write_bytes(text.encode())
    if not path.stat().st_size:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oper.data.reading.text._FEW_LINES", 4)
        whole = read(path, rules)
    assert_same(whole, read(path, rules, block_bytes=1))  # every line is a block of its own


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_empty_lines_are_no_rows_of_missing_fields(tmp_path: Path, ending: str, quote: str) -> None:
    """Only in a log of one column is an empty line a row."""
    path = tmp_path / "log.txt"
    columns = [{"name": name, "kind": "sparse", "parse": "int"} for name in "ab"]
    for lines in (["", "1,2"], ["1,2", "", "3,4"], ["1,2", "", ""], [",", "1,2"]):
        path.write_bytes("".join(line + ending for line in lines).encode())
        rules = recipe_from_dict({"name": "any", "separator": ",", "quote": quote,
                                  "column": columns})
        found = read(path, rules)
        assert found.rows.tolist() == [k for k, line in enumerate(lines) if line]
        assert found.num_bad == lines.count("")
    path.write_bytes(f"1{ending}{ending}2{ending}".encode())
    rules = recipe_from_dict({"name": "any", "separator": ",", "column": columns[:1]})
    assert read(path, rules).sparse[0].to_pylist() == [1, None, 2]


@pytest.mark.parametrize("share", [0.001, 0.3])
def test_malformed_rows_far_into_a_file(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(4)
    rows = invent(300)
    lines = ["\t".join(rows[k]) for k in rng.integers(0, 300, 4_000)]
    bad = np.flatnonzero(rng.random(4_000) < share)
    for k in bad:
        lines[k] = lines[k].replace("\t", "\tx", 1) if k % 2 else lines[k] + "\t"
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 1))
    one = read(path, KAGGLE)
    assert one.num_bad == bad.size
    assert one.rows.tolist() == sorted(set(range(4_000)) - set(bad.tolist()))
    assert_same(one, read(path, KAGGLE, block_bytes=5000))
    assert f"row {bad[0] + 1}, column {'-' if bad[0] % 2 == 0 else 'I1'}" in where(
        Unit(str(path), "tsv"), KAGGLE, one.bad[0])


# ---- damaged files of every format ---------------------------------------------------------------

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


def test_interrupted_work_with_a_damaged_note_is_an_error(tmp_path: Path) -> None:
    log = train_log(tmp_path, 60)
    with interrupted("manifest"):
        preprocess(KAGGLE, [log], tmp_path / "out")
    (tmp_path / ".out.work" / "stage" / "000000.json").write_text("{")
    with pytest.raises(OperError, match="starts from scratch"):
        preprocess(KAGGLE, [log], tmp_path / "out")
    assert preprocess(KAGGLE, [log], tmp_path / "out")["rows"]["train"]


# ---- errors that affect all records --------------------------------------------------------------

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
def test_errors_in_the_first_records_are_reported_before_work(tmp_path: Path, case: str,
                                                              monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    value, recipe, todo = CASES[case]
    header = "x,a,y\n" if recipe.layouts[0].header else ""
    monkeypatch.setattr(preprocessing.Job, "opened", None)  # fails if work begins
    began = time.process_time()
    with pytest.raises(OperError) as error:
        made(tmp_path, header + f"{value},7,1\n" * 200_000, recipe)
    assert todo in str(error.value) and str(tmp_path / "log.csv") in str(error.value)
    assert time.process_time() - began < 2
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_allowed_malformed_rows_are_no_error(tmp_path: Path) -> None:
    manifest = made(tmp_path, "y,a\n" + "x,1\n" * 300 + "1,1\n" * 50_000, Choice(["a"], "y"),
                    max_bad=300)
    assert manifest["bad_rows"]["count"] == 300 and sum(manifest["rows"].values()) == 50_000


def test_a_wrong_separator(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("user\titem\n1\t2\n3\t4\n")
    command = ["preprocess", "csv", str(tmp_path / "log.tsv"), "--sparse", "user,item", "-o",
               str(tmp_path / "out")]
    done = run_here(*command, "--separator", ",")
    assert done.returncode == 1 and r"--separator '\t'" in done.stderr
    assert done.stderr.count("\n") == 1
    done = run_here(*command, "--separator", "tabulator")
    assert done.returncode == 2 and r"'\t'" in done.stderr
    for right in (r"\t", "tab"):
        assert run_here(*command, "--separator", right, "--force").returncode == 0


def test_parquet_columns_of_odd_types(tmp_path: Path) -> None:
    out, rows = tmp_path / "out", 100_000
    integral = recipe_from_dict({"name": "own", "format": "parquet", "column": {
        "name": "id", "kind": "sparse", "parse": "integral"}})
    for ids in (pa.array([1.0, None] * (rows // 2)), pa.array([[1.0, 2.0]] * rows),
                pa.array([Decimal("17850.0")] * rows)):
        with pytest.raises(InvalidInputError, match='parse = "integral"'):
            made(tmp_path, {"id": ids}, Choice(["id"]), "none")
        if not pa.types.is_list(ids.type):
            made(tmp_path, {"id": ids}, integral, force=True)
            value = pq.read_table(out / "vocabulary" / "id.parquet")["value"].to_pylist()
            assert value in ([None, 1], [17850])
    # Days are midnights; a label may be text, as in CSV files.
    for kind in (pa.date32(), pa.date64()):
        made(tmp_path, {"id": range(rows), "y": ["0", "1"] * (rows // 2),
                        "t": pa.array([date(2020, 1, 1 + k % 9) for k in range(rows)], kind)},
             Choice(["id"], "y", time="t"), force=True)
        table = pq.read_table(out / "train")
        assert table["time"][0].as_py() == 1_577_836_800
        assert set(table["label"].to_pylist()) == {0, 1}


@pytest.mark.parametrize(("choice", "values", "found"), [
    (Choice(["x:uint32"]), [["x"], ["-8"]], "malformed rows=2"),
    (Choice(["x:uint32"]), [[None], []], None),
    (Choice(["id"], "x"), [0, 2**60], "'1152921504606846976', expected 0 or 1"),
    (Choice(["id"], dense=["x"]), [0, 2**60 + 1], [0.0, 2.0**60]),
    (Choice(["id"], time="x", time_format="yymmddhh"), [date(2020, 1, 1)] * 2, None),
    (Choice(["id"], time="x", time_format="iso"), [1_577_836_800] * 2, "expected a date and time"),
])
def test_parquet_values_that_their_columns_do_not_expect(
        tmp_path: Path, choice: Choice, values: list[Any], found: Any) -> None:
    table = {"id": [1, 2], "x": values}
    if isinstance(found, str):
        with pytest.raises(FileFormatError, match=found):
            made(tmp_path, table, choice)
    else:
        made(tmp_path, table, choice, valid="0")
        assert found is None or pq.read_table(tmp_path / "out/train")["x"].to_pylist() == found


def test_a_long_field_that_is_skipped(tmp_path: Path) -> None:
    text = f"id,y,text\n1,0,{'x' * 200_000}\n2,z,b\n3,1,c\n"
    manifest = made(tmp_path, text, Choice(["id"], "y"), valid="0", max_bad=1)
    assert manifest["rows"]["train"] == 2
    assert "column label: 'z'" in manifest["bad_rows"]["first"][0]


def test_a_row_group_of_lists_without_valid_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tags": [[1, 2], [3], [1]], "y": [0, 7, 1]}), tmp_path / "log",
                   row_group_size=1)
    preprocess(generic_recipe("parquet", Choice(["tags"], "y")), [str(tmp_path / "log")],
               tmp_path / "out", PreprocessOptions(valid="0", min_count=1, max_bad=1))
    assert decoded(tmp_path / "out")["tags"] == [[1, 2], [1]]


def test_bad_rows_of_later_row_groups_are_found(tmp_path: Path) -> None:
    recipe = generic_recipe("parquet", Choice(["id"], "y"))
    pq.write_table(pa.table({"id": [1] * 5, "y": [0, 0, 0, 1, 9]}), tmp_path / "log",
                   row_group_size=2)
    unit = Unit(str(tmp_path / "log"), recipe.layouts[0].name, 1, 3)
    bad = [b for rows in read_unit(unit, recipe) for b in rows.bad]
    assert ["row 5, column label: '9'" in where(unit, recipe, b) for b in bad] == [True]


def test_an_empty_text_is_missing_in_parquet_files_too(tmp_path: Path) -> None:
    manifest = made(tmp_path, {"id": ["", "x", None, "", None, "y"] * 3}, Choice(["id"]), valid="0")
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
def test_the_remedy_named_by_the_error_helps(tmp_path: Path, parse: str, value: str, advice: str
                                             ) -> None:
    text = f"id\n{value}\n{value}\n"
    with pytest.raises(FileFormatError, match=f"pass --sparse {advice}, or"):
        made(tmp_path, text, Choice([f"id:{parse}"]))
    made(tmp_path, text, Choice([advice]))


@pytest.mark.parametrize(("data", "words"), [
    ("y,id\n1,2\n".encode("utf-16"), "look like UTF-16"), (b"y,id\r1,2\r0,3\r", "line feeds")])
def test_other_encodings_and_line_ends(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        made(tmp_path, data, Choice(["id"]))
