"""Recipes, whole lines of files, and the vectorised parser against Python's own parsing."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oper.data.delimited import Rows, parse_block
from oper.data.lines import Block, count_rows, expand_inputs, natural_key, read_blocks
from oper.data.recipe import load_recipe, recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError

KAGGLE = load_recipe("criteo-kaggle")


def nothing(_: int) -> None:
    pass


def parse_text(text: bytes, recipe: Any = KAGGLE) -> Rows:
    data = np.frombuffer(text + bytes(32), np.uint8)
    return parse_block(Block("log.txt", data, len(text), 100, 1), recipe)


def check_rows(found: Rows, rows: list[list[str]]) -> None:
    """Compare with the same fields parsed one by one."""
    assert found.labels.tolist() == [int(r[0]) for r in rows]
    dense = [[np.log1p(np.float32(max(0, int(f or 0)))) for f in r[1:14]] for r in rows]
    np.testing.assert_allclose(found.dense.T, np.array(dense).reshape(-1, 13), rtol=1e-6)
    assert found.sparse.T.tolist() == [[int(f or "0", 16) for f in r[14:]] for r in rows]
    assert found.missing.T.tolist() == [[f == "" for f in r[14:]] for r in rows]


def test_recipe_of_the_kaggle_log() -> None:
    assert KAGGLE.names("label") == ("label",)
    assert KAGGLE.names("dense") == tuple(f"I{k}" for k in range(1, 14))
    assert KAGGLE.names("sparse") == tuple(f"C{k}" for k in range(1, 27))
    assert (KAGGLE.valid.numerator, KAGGLE.valid.denominator, KAGGLE.buckets) == (1, 7, 7)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_parser_equals_field_by_field(invent: Any, ending: str) -> None:
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
    ("I2", "+4"), ("I2", "1e3"), ("I13", "1234567890123456789"), ("I5", "--1"), ("I5", " 1"),
    ("C1", "68fd1e6"), ("C1", "68fd1e641"), ("C1", "68FD1E64"), ("C9", "68fd1eg4"),
    ("C9", "68fd1 64"), ("C26", "oooooooo"), ("C26", "-8fd1e64"), ("C26", "\xff\xfe"),
])
def test_malformed_fields_are_found_and_named(invent: Any, column: str, value: str) -> None:
    rows = invent(50)
    at = [c.name for c in KAGGLE.columns].index(column)
    bad = [list(r) for r in rows]
    bad[20][at] = value
    found = parse_text("".join("\t".join(r) + "\n" for r in bad).encode("latin-1"))
    assert found.num_bad == 1
    report = found.bad[0]
    assert (report.path, report.line, report.column) == ("log.txt", 21, column)
    assert column in str(report) and "row 21" in str(report)
    check_rows(found, rows[:20] + rows[21:])
    assert found.rows.tolist() == [*range(100, 120), *range(121, 150)]


def test_every_byte_in_a_hexadecimal_field_is_judged_rightly(invent: Any) -> None:
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
    assert found.sparse[0].tolist() == [int(f"0a1{chr(b)}9fb0", 16) for b in good]


@pytest.mark.parametrize("line", ["", "1", "1\t2", "Id,Label,I1"])
def test_wrong_number_of_columns(invent: Any, line: str) -> None:
    lines = ["\t".join(r) for r in invent(10)]
    lines.insert(4, line)
    lines.append(lines[0] + "\t")
    found = parse_text("".join(f"{x}\n" for x in lines).encode())
    assert found.num_bad == 2 and found.labels.size == 10
    assert [(b.line, b.column) for b in found.bad] == [(5, ""), (12, "")]
    assert f"40 columns instead of {line.count(chr(9)) + 1}" in str(found.bad[0])
    assert "40 columns instead of 41" in str(found.bad[1])


def test_examples_are_the_first_of_many_bad_rows(invent: Any) -> None:
    rows = invent(100)
    for k, row in enumerate(rows):
        row[39 if k % 2 else 0] = "x"
    rows[3] = ["1"]
    found = parse_text("".join("\t".join(r) + "\n" for r in rows).encode())
    assert found.num_bad == 100 and found.labels.size == 0 and found.dense.shape == (13, 0)
    assert [b.line for b in found.bad] == list(range(1, 21))
    assert [b.column for b in found.bad[:5]] == ["label", "C26", "label", "", "label"]


@given(st.integers(20, 2000), st.booleans(), st.booleans(), st.lists(
    st.lists(st.text("ab\r ", max_size=6), max_size=8), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_blocks_are_all_lines_in_order(
    tmp_path_factory: Any, block_bytes: int, last_feed: bool, packed: bool, files: Any
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    paths, expected = [], []
    for k, lines in enumerate(files):
        text = "".join(f"{line}\n" for line in lines).encode()
        if not last_feed and text.endswith(b"\n") and lines[-1]:
            text = text[:-1]
        path = folder / f"f{k}"
        path.write_bytes(gzip.compress(text) if packed else text)
        paths.append(str(path))
        expected += [(str(path), n + 1, line.encode()) for n, line in enumerate(lines)]
    sizes: list[int] = []
    blocks = list(read_blocks(paths, None, sizes.append, max(1, block_bytes // 100)))
    found = []
    for block in blocks:
        assert block.first_row == len(found)
        lines = block.data[:block.size].tobytes().split(b"\n")[:-1]
        found += [(block.path, block.first_line + n, line) for n, line in enumerate(lines)]
    assert found == expected
    assert sum(count_rows(paths, False, nothing)) == len(expected)
    assert sum(sizes) == sum(Path(p).stat().st_size for p in paths)


def test_header_is_checked_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\r\n1,2\n3,4")
    blocks = list(read_blocks([str(path)], "x,y", nothing))
    assert b"".join(b.data[:b.size].tobytes() for b in blocks) == b"1,2\n3,4\n"
    assert [(b.first_line, b.first_row) for b in blocks] == [(2, 0), (3, 1)]
    assert count_rows([str(path)], True, nothing) == [2]
    with pytest.raises(FileFormatError, match="'x,y'"):
        list(read_blocks([str(path)], "x,z", nothing))


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    packed = gzip.compress(b"1\t2\n" * 5000)
    damaged = packed[:40] + b"xx" + packed[42:]
    cases = {"cut.gz": (packed[:-20], "gzip"), "bad.gz": (damaged, "gzip"),
             "a.zip": (b"PK\x03\x04....", "zip"), "a.zst": (b"\x28\xb5\x2f\xfd....", "zstd"),
             "long": (b"x" * (3 << 20), "line_bytes")}
    for name, (data, word) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FileFormatError, match=word) as error:
            list(read_blocks([str(tmp_path / name)], None, nothing))
        assert name in str(error.value)


def test_inputs_are_expanded_in_order_of_numbers(tmp_path: Path) -> None:
    for k in (0, 1, 2, 10):
        (tmp_path / f"day_{k}").touch()
    names = [Path(p).name for p in expand_inputs([str(tmp_path / "day_*")])]
    assert names == ["day_0", "day_1", "day_2", "day_10"]
    given = [str(tmp_path / f"day_{k}") for k in (2, 0)]
    assert expand_inputs(given) == given
    for inputs in ([], [str(tmp_path)], [str(tmp_path / "no*")], [str(tmp_path / "none")],
                   [given[0], f"{tmp_path}/./day_2"]):
        with pytest.raises(InvalidInputError):
            expand_inputs(inputs)
    assert sorted(["b2", "b10", "a", "b", "1", "02"], key=natural_key) == [
        "1", "02", "a", "b", "b2", "b10"]


COLUMNS = [{"name": "y", "kind": "label"}, {"name": "id{}", "kind": "sparse", "first": 1, "last": 2,
                                            "parse": "uint32"}, {"name": "note", "kind": "skip"},
           {"name": "x", "kind": "dense"}]


def test_another_recipe() -> None:
    recipe = recipe_from_dict({"name": "own", "separator": ",", "column": COLUMNS})
    found = parse_text(b"1,7,4294967295,hello,-5\n0,,0,,8\n1,4294967296,1,,1\n0,-1,1,,1\n", recipe)
    assert found.labels.tolist() == [1, 0]
    assert found.sparse.tolist() == [[7, 0], [4294967295, 0]]
    assert found.missing.tolist() == [[False, True], [False, False]]
    assert found.dense.tolist() == [[-5, 8]]
    assert [(b.line, b.column) for b in found.bad] == [(3, "id1"), (4, "id1")]


@pytest.mark.parametrize(("change", "word"), [
    ({"separator": "ab"}, "separator"), ({"separator": "\n"}, "separator"),
    ({"extra": 1}, "extra"), ({"split": {"valid": "7/7"}}, "valid"),
    ({"split": {"valid": "x"}}, "valid"), ({"split": {"buckets": 0}}, "buckets"),
    ({"vocabulary": {"min_count": 0}}, "min_count"), ({"column": []}, "label"),
    ({"column": COLUMNS[:1]}, "sparse"), ({"column": [*COLUMNS, COLUMNS[0]]}, "columns"),
    ({"column": [{"name": "a", "kind": "text"}]}, "kind"),
    ({"column": [{"name": "a", "kind": "dense", "parse": "hex32"}]}, "parse"),
    ({"column": [{"name": "a", "kind": "sparse", "transform": "log1p"}]}, "transform"),
    ({"column": [{"name": "a", "kind": "dense", "first": 1, "last": 2}]}, "first"),
    ({"column": [{"kind": "dense"}]}, "keys"),
])
def test_bad_recipes(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        recipe_from_dict({"name": "own", "column": COLUMNS, **change})


def test_recipes_by_name_and_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\n[[column]]\nname = "y"\nkind = "label"\n'
                    '[[column]]\nname = "id"\nkind = "sparse"\n')
    assert load_recipe(str(path)).names("sparse") == ("id",)
    with pytest.raises(InvalidInputError, match="criteo-kaggle"):
        load_recipe("criteo")
    path.write_text("name = ")
    with pytest.raises(InvalidInputError, match="TOML"):
        load_recipe(str(path))
