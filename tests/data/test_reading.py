"""Recipes, blocks of lines, and the vectorised parser against Python's parsing."""

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from oper.data.reading import columns
from oper.data.reading.columns import is_valid
from oper.data.reading.lines import (
    Block,
    Unit,
    expand_inputs,
    first_line,
    line_of,
    natural_key,
    read_blocks,
    units_of_text,
)
from oper.data.reading.rows import Rows
from oper.data.reading.text import parse_block, text_layout
from oper.data.recipe import Column, Layout, Recipe, load_recipe, recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError
from tests.data.loader_support import invent, text_of

KAGGLE = load_recipe("criteo-kaggle")
LINES = Layout("lines", ())
WITH_HEADER = Layout("lines", (), header=True)


def parse_text(text: bytes, recipe: Recipe = KAGGLE) -> Rows:
    """Parse lines that begin at row 100 of their unit."""
    line = text.split(b"\n")[0].decode("latin-1")
    return parse_block(Block("log.txt", text, 100),
                       text_layout(recipe, recipe.layouts[0], line, "log.txt"))


def check_rows(found: Rows, rows: list[list[str]]) -> None:
    """Compare with the same fields parsed one by one."""
    assert found.labels.tolist() == [int(r[0]) for r in rows]
    dense = [[np.log1p(np.float32(max(0, int(f or 0)))) for f in r[1:14]] for r in rows]
    np.testing.assert_allclose(found.dense.T, np.array(dense).reshape(-1, 13), rtol=1e-6)
    ids = zip(*(x.to_pylist() for x in found.sparse), strict=True)
    assert [list(i) for i in ids] == [[int(f, 16) if f else None for f in r[14:]] for r in rows]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_parser_equals_field_by_field(ending: str) -> None:
    rows = invent(300)
    rows[5][27:] = [""] * 13       # trailing empties
    rows[6] = ["1"] + [""] * 39
    rows[7][1:14] = ["0", "-1", "-3", "7", "2147483648", "999999999999999999", *["10"] * 7]
    rows[8][14:] = ["00000000", "ffffffff", "80000000", *["0123abcd"] * 23]
    found = parse_text("".join("\t".join(r) + ending for r in rows).encode())
    assert found.num_bad == 0 and found.rows.tolist() == list(range(100, 400))
    check_rows(found, rows)


@pytest.mark.parametrize(("column", "value"), [
    ("label", "2"), ("label", ""), ("label", "01"), ("label", "-"), ("I1", "1.5"), ("I1", "-"),
    ("I2", "+4"), ("I2", "1e3"), ("I13", "12345678901234567890"), ("I5", "--1"), ("I5", "1 1"),
    ("I6", "0x10"), ("I7", "1\r2"),
    ("C1", "68fd1e6"), ("C1", "68fd1e641"), ("C1", "68FD1E64"), ("C9", "68fd1eg4"),
    ("C9", "68fd1 64"), ("C26", "oooooooo"), ("C26", "-8fd1e64"), ("C26", "\xff\xfe"),
])
def test_malformed_fields_are_found_and_named(column: str, value: str) -> None:
    rows = invent(50)
    at = [c.name for c in KAGGLE.columns].index(column)
    bad = [list(r) for r in rows]
    bad[20][at] = value
    found = parse_text(text_of(bad).encode("latin-1"))
    assert found.num_bad == 1
    report = found.bad[0]
    assert (report.row, report.column) == (120, column)
    check_rows(found, rows[:20] + rows[21:])
    assert found.rows.tolist() == [*range(100, 120), *range(121, 150)]


def test_every_byte_in_a_hexadecimal_field_is_judged_rightly() -> None:
    row = invent(1)[0]
    lines = []
    for byte in range(256):
        if byte not in b"\t\n":
            fields = [f.encode() for f in row]
            fields[14] = b"0a1" + bytes([byte]) + b"9fb0"
            lines.append((byte, b"\t".join(fields) + b"\n"))
    found = parse_text(b"".join(line for _, line in lines))
    good = [byte for byte, _ in lines if byte in b"0123456789abcdef"]
    assert found.num_bad == len(lines) - len(good)
    assert found.sparse[0].to_pylist() == [int(f"0a1{chr(b)}9fb0", 16) for b in good]


@pytest.mark.parametrize("line", ["", "1", "1\t2", "Id,Label,I1"])
def test_wrong_number_of_columns(line: str) -> None:
    lines = ["\t".join(r) for r in invent(10)]
    lines.insert(4, line)
    lines.append(lines[0] + "\t")
    found = parse_text("".join(f"{x}\n" for x in lines).encode())
    assert found.num_bad == 2 and found.labels.size == 10
    assert [(b.row, b.column) for b in found.bad] == [(104, ""), (111, "")]
    assert found.bad[0].expected == f"40 columns instead of {line.count(chr(9)) + 1}"
    assert found.bad[1].expected == "40 columns instead of 41"


def test_examples_are_the_first_of_many_bad_rows() -> None:
    rows = invent(100)
    for k, row in enumerate(rows):
        row[39 if k % 2 else 0] = "x"
    rows[3] = ["1"]
    found = parse_text(text_of(rows).encode())
    assert found.num_bad == 100 and found.labels.size == 0 and found.dense.shape == (13, 0)
    assert [b.row for b in found.bad] == list(range(100, 120))
    assert [b.column for b in found.bad[:5]] == ["label", "C26", "label", "", "label"]


@given(st.integers(1, 20), st.integers(1, 40), st.booleans(), st.lists(
    st.text("ab\r ", max_size=6), max_size=12))
@settings(max_examples=100, deadline=None)
def test_units_hold_every_line_once(tmp_path_factory: Any, block_bytes: int, unit_bytes: int,
                                    last_feed: bool, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    if not last_feed and lines and lines[-1]:
        text = text[:-1]
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(text)
    sizes: list[int] = []
    found, numbers = [], []
    for unit in units_of_text(str(path), LINES, unit_bytes):
        row = 0
        for block in read_blocks(unit, LINES, sizes.append, block_bytes):
            assert block.first_row == row
            found += block.data.split(b"\n")[:-1]
            numbers += [line_of(unit, LINES, row + k) for k in range(block.num_lines)]
            row += block.num_lines
    assert found == [line.encode() for line in lines]
    assert numbers == list(range(1, len(lines) + 1))


@given(st.integers(1, 60), st.sampled_from(["", "\\"]), st.lists(
    st.lists(st.text('a",\n;\\', max_size=5), min_size=2, max_size=2), max_size=8))
@settings(max_examples=150, deadline=None)
def test_blocks_keep_quoted_records_whole(tmp_path_factory: Any, block_bytes: int, escape: str,
                                          records: list[list[str]]) -> None:
    dialect: dict[str, Any] = {"doublequote": not escape, "escapechar": escape or None}
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL, **dialect).writerows(records)
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_text(out.getvalue())
    found = []
    layout = Layout("quoted", (), quote='"', escape=escape)
    for block in read_blocks(Unit(str(path)), layout, block_bytes=block_bytes):
        lines = io.StringIO(block.data.decode(), newline="")
        found += list(csv.reader(lines, **dialect))
    assert found == records


def test_header_and_byte_order_mark_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfx,y\r\n1,2\n3,4")
    assert first_line(str(path)) == "x,y"
    blocks = list(read_blocks(Unit(str(path)), WITH_HEADER))
    assert b"".join(b.data for b in blocks) == b"1,2\n3,4\n"
    assert line_of(Unit(str(path)), WITH_HEADER, 0) == 2
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert b"".join(b.data for b in read_blocks(Unit(str(packed)), WITH_HEADER)) == (
        b"1,2\n3,4\n")


def test_damaged_files_and_files_of_another_kind(tmp_path: Path) -> None:
    packed = gzip.compress(b"1\t2\n" * 5000)
    damaged = packed[:40] + b"xx" + packed[42:]
    cases = {"cut.gz": (packed[:-20], "gzip"), "bad.gz": (damaged, "gzip"),
             "a.zip": (b"PK\x03\x04....", "zip"), "a.zst": (b"\x28\xb5\x2f\xfd....", "zstd"),
             "long": (b"x" * (3 << 20), "line_bytes")}
    for name, (data, word) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FileFormatError, match=word) as error:
            list(read_blocks(Unit(str(tmp_path / name)), LINES))
        assert name in str(error.value)


def test_inputs_are_expanded_in_order_of_numbers(tmp_path: Path) -> None:
    for k in (0, 1, 2, 10):
        (tmp_path / f"day_{k}").touch()
    names = [Path(p).name for p in expand_inputs([str(tmp_path / "day_*")])]
    assert names == ["day_0", "day_1", "day_2", "day_10"]
    given = [str(tmp_path / f"day_{k}") for k in (2, 0)]
    assert expand_inputs(given) == given
    (tmp_path / "_SUCCESS").touch()
    assert expand_inputs([str(tmp_path)]) == expand_inputs([str(tmp_path / "day_*")])
    # As in a shell: no hidden files, such as indices of gzip files, and patterns of folders.
    (tmp_path / ".day_0.gz.5-1.gzidx").touch()
    assert expand_inputs([str(tmp_path / "*[0-9a-z]")]) == expand_inputs([str(tmp_path / "day_*")])
    (tmp_path / "dt=[1]").mkdir()
    (tmp_path / "dt=[1]" / "log").touch()
    for pattern in ("dt=*/log", "dt=[[]1]/lo?", "dt=[1]/l*"):
        assert expand_inputs([str(tmp_path / pattern)]) == [str(tmp_path / "dt=[1]" / "log")]
    (tmp_path / "empty").mkdir()
    for inputs in ([], [str(tmp_path / "empty")], [str(tmp_path / "no*")], [str(tmp_path / "none")],
                   [given[0], f"{tmp_path}/./day_2"]):
        with pytest.raises(InvalidInputError):
            expand_inputs(inputs)
    assert sorted(["b2", "b10", "a", "b", "1", "02"], key=natural_key) == [
        "1", "02", "a", "b", "b2", "b10"]


COLUMNS = [{"name": "y", "kind": "label"}, {"name": "id{}", "kind": "sparse", "first": 1, "last": 2,
                                            "parse": "uint32"}, {"name": "note", "kind": "skip"},
           {"name": "x", "kind": "dense"}]


def test_a_recipe_with_renamed_typed_and_skipped_columns() -> None:
    recipe = recipe_from_dict({"name": "own", "separator": ",", "column": COLUMNS})
    found = parse_text(b"1,7,4294967295,hello,-5\n0,,0,,8\n1,4294967296,1,,1\n0,-1,1,,1\n", recipe)
    assert found.labels.tolist() == [1, 0]
    assert [x.to_pylist() for x in found.sparse] == [[7, None], [4294967295, 0]]
    assert found.dense.tolist() == [[-5, 8]]
    assert [(b.row, b.column) for b in found.bad] == [(102, "id1"), (103, "id1")]


@pytest.mark.parametrize(("change", "word"), [
    ({"separator": "ab"}, "separator"), ({"quote": "ab"}, "quote"), ({"encoding": "x"}, "encoding"),
    ({"format": "xml"}, "format"), ({"split": {"by": "time"}}, "time"),
    ({"split": {"by": "luck"}}, "by"), ({"split": {"valid": "1/2", "test": "1/2"}}, "below 1"),
    ({"split": {"bucket_seconds": 60}}, "bucket_seconds"),
    ({"column": [*COLUMNS, {**COLUMNS[0], "name": "z"}]}, "labels"),
    ({"separator": "\n"}, "separator"),
    ({"extra": 1}, "extra"), ({"split": {"valid": "7/7"}}, "valid"),
    ({"split": {"valid": "x"}}, "valid"), ({"split": {"buckets": 0}}, "buckets"),
    ({"vocabulary": {"min_count": 0}}, "min_count"), ({"column": []}, "sparse"),
    ({"column": COLUMNS[:1]}, "sparse"), ({"column": [*COLUMNS, COLUMNS[0]]}, "columns"),
    ({"column": [{"name": "a", "kind": "text"}]}, "kind"),
    ({"column": [{"name": "a", "kind": "dense", "parse": "hex32"}]}, "parse"),
    ({"column": [{"name": "a", "kind": "sparse", "transform": "log1p"}]}, "transform"),
    ({"column": [{"name": "a", "kind": "dense", "first": 1, "last": 2}]}, "first"),
    ({"column": [{"kind": "dense"}]}, "keys"),
    ({"column": [*COLUMNS[1:], {**COLUMNS[0], "parse": "number", "threshold": 4}]}, "threshold"),
    ({"column": [*COLUMNS[1:], {**COLUMNS[0], "parse": "number", "positive": ["a"]}]}, "positive"),
    ({"layout": []}, r"together with \[\[layout\]\]"),
    ({"layout": [{"name": "a", "column": COLUMNS}], "column": []}, r"together with \[\[layout\]\]"),
    ({"join": [{"name": "a", "file": "f", "key": "id1", "column": COLUMNS[2:]}]}, "unknown keys"),
    ({"format": "bags", "column": [{"name": "place", "kind": "sparse"}]}, "'user' and 'item'"),
    ({"column": [*COLUMNS, {"name": "ü" * 101, "kind": "sparse"}]}, "at most 200 bytes"),
])
def test_bad_recipes(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        recipe_from_dict({"name": "own", "column": COLUMNS, **change})


def test_options_are_refused_together_with_layouts() -> None:
    layouts = {"name": "own", "layout": [{"name": "a", "column": COLUMNS}]}
    assert recipe_from_dict(layouts).layouts[0].name == "a"
    with pytest.raises(InvalidInputError, match=r"\['header'\], expected none together with"):
        recipe_from_dict({**layouts, "header": False})
    join = {"file": "items.csv", "key": "id1", "column": COLUMNS[2:]}
    for more in ({}, {"join": [join]}):
        with pytest.raises(InvalidInputError, match="layouts"):
            recipe_from_dict({"name": "own", "layout": [], **more})


def test_recipes_by_name_and_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\n[[column]]\nname = "y"\nkind = "label"\n'
                    '[[column]]\nname = "id"\nkind = "sparse"\n')
    assert load_recipe(str(path)).names("sparse") == ("id",)
    with pytest.raises(InvalidInputError, match="criteo-kaggle"):
        load_recipe("criteo")
    path.write_text("name = ")
    with pytest.raises(FileFormatError, match="TOML"):
        load_recipe(str(path))


_FIELDS = {
    "int": ["0", "-7", "12", "007", "123456789012345678"],
    "uint64": ["0", "18446744073709551615", "12"], "uint32": ["0", "4294967295"],
    "hex32": ["0123abcd", "ffffffff"], "integral": ["17850.0", "12", "-3", "1e3"],
    "float": ["1.5", "-2", ".5", "1e-3"], "string": ["a b", "x", "0x10", "é", "NA"],
    "threshold": ["3.5", "0"], "number": ["3.5", "-2", "1e3"],
    "among": ["buy", "view"], "binary": ["0", "1"],
    "unix": ["1381945744", "1593898936.56"], "unix_ms": ["1433221332117"],
    "iso": ["2010-12-01 08:26:00", "2016-05-09"], "iso_zone": ["2014-04-07T10:51:09.277Z"],
    "yymmddhh": ["14102100", "14103023"],
}
_KIND_OF = {**dict.fromkeys(("threshold", "number", "among", "binary"), "label"), "float": "dense",
            **dict.fromkeys(("unix", "unix_ms", "iso", "iso_zone", "yymmddhh"), "time")}


@given(st.data(), st.sampled_from(sorted(_FIELDS)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_text_crashes_or_is_misread(data: Any, parse: str, quoted: bool) -> None:
    """Fuzz test: a field is reported as malformed if and only if it is not valid in its column."""
    kind = _KIND_OF.get(parse, "sparse")
    columns = [{"name": "x", "kind": kind, "parse": parse, "missing": ["NA"] if kind == "sparse"
                else [], **({"positive": ["buy"]} if parse == "among" else {})}]
    if kind != "sparse":
        columns.append({"name": "id", "kind": "sparse", "parse": "string"})
    recipe = recipe_from_dict({"name": "own", "separator": ",", "column": columns,
                               **({"quote": '"'} if quoted else {})})
    genuine = st.sampled_from(_FIELDS[parse] + ["", "NA"])
    broken = st.text('0123456789abcdefx-+.:eTZ \0"é,\r', max_size=12)
    rows = data.draw(st.lists(st.one_of(genuine, genuine, broken), min_size=1, max_size=12))
    if quoted:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerows([r, "i"][:len(columns)] for r in rows)
        text = out.getvalue().replace("\r", " ").encode()
        lines = [[r.replace("\r", " ")] for r in rows]
    else:
        tail = ",i" if len(columns) == 2 else ""
        text = "".join(f"{r}{tail}\n" for r in rows).encode()
        lines = [line.removesuffix("\r").removesuffix(tail).split(",")
                 for line in text.decode().split("\n")[:-1]]
    found = parse_text(text, recipe)
    assert found.num_lines == len(rows) and found.labels.size + found.num_bad == len(rows)
    column = recipe.columns[0]
    judged = [len(f) == 1 and is_valid(column, f[0].encode()) for f in lines]
    kept = set((found.rows - 100).tolist())
    for k, ok in enumerate(judged):
        # Every value that is read satisfies `is_valid`; pyarrow may refuse a few more.
        assert (ok and ("\r" not in lines[k][0] or quoted)) or k not in kept, rows[k]
        may_differ = parse in ("iso", "iso_zone") and rows[k] not in _FIELDS[parse]
        assert k in kept or not ok or "\r" in lines[k][0] or may_differ, rows[k]


@pytest.mark.parametrize(("unit", "second"), [("s", 1), ("ms", 10**3), ("us", 10**6),
                                              ("ns", 10**9)])
def test_times_of_any_unit_are_rounded_down_to_seconds(unit: str, second: int) -> None:
    array = pa.array([0, second - 1, second, -1], pa.timestamp(unit, "UTC"))
    assert columns.times(Column("t", "time", "unix"), array).tolist() == [0, 0, 1, -1]


def test_values_of_fixed_size_are_ids_like_others() -> None:
    for size in (2, 8):
        texts = [b"a" * size, None, b"Z" * size]
        found = columns.ids(Column("c", "sparse", "string"), pa.array(texts, pa.binary(size)))
        assert found.to_pylist() == texts
