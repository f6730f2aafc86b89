"""The compiled parser against pyarrow and field-by-field checks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from oper.data.reading import plain, readers
from oper.data.reading.lines import Unit
from oper.data.reading.readers import read_unit, where
from oper.data.reading.rows import Rows, concat
from oper.data.reading.text import TextLayout, text_layout
from oper.data.recipe import Recipe, load_recipe, recipe_from_dict

KAGGLE = load_recipe("criteo-kaggle")
KINDS = [("label", "binary"), ("label", "threshold"), ("label", "number"), ("dense", "int"),
         ("dense", "float"), ("sparse", "hex32"), ("sparse", "uint32"), ("sparse", "uint64"),
         ("sparse", "int"), ("sparse", "integral"), ("time", "unix"), ("time", "unix_ms"),
         ("time", "yymmddhh"), ("skip", "")]


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


def read(path: Path, rules: Recipe, plainly: bool) -> Rows:
    with pytest.MonkeyPatch.context() as patch:
        if not plainly:
            patch.setattr(readers, "is_plain", lambda _: False)
        used = []
        whole = readers.read_plain
        patch.setattr(readers, "read_plain", lambda *a: (used.append(1), whole(*a))[1])
        found = concat(list(read_unit(Unit(str(path), rules.layouts[0].name), rules)))
        assert bool(used) == plainly
    return found


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
          "1:2", "true", "NULL"]


@given(kinds=st.lists(st.sampled_from(KINDS[3:]), min_size=1, max_size=5), label=st.sampled_from(
           [[], [KINDS[0]], [KINDS[1]], [KINDS[2]]]), time=st.booleans(), missing=st.booleans(),
       log1p=st.booleans(), separator=st.sampled_from("\t,;|"), data=st.data())
@settings(max_examples=250, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_same_rows_and_the_same_errors(
        tmp_path: Path, kinds: Any, label: Any, time: bool, missing: bool, log1p: bool,
        separator: str, data: st.DataObject) -> None:
    seen_time = [k for k in kinds if k[0] == "time"][:1]
    kinds = label + [k for k in kinds if k[0] != "time"] + seen_time
    rules = recipe(kinds, separator, missing, log1p)
    good = {"hex32": "00ff17aa", "binary": "1", "yymmddhh": "14102100", "": "anything"}
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
    assert_same(read(path, rules, True), read(path, rules, False))


@given(data=st.binary(max_size=600), seed=st.integers(0, 9))
@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes(tmp_path: Path, data: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    good = b"1\t" + b"\t".join([b"5"] * 13 + [b"00ff17aa"] * 26) + b"\n"
    noise = bytearray(good * 20)
    for at in rng.integers(0, len(noise), seed):
        noise[at] = rng.integers(256)
    path = tmp_path / "log.txt"
    path.write_bytes(bytes(noise[:2000]) + data + bytes(noise[2000:]))
    assert_same(read(path, KAGGLE, True), read(path, KAGGLE, False))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_an_odd_field_within_a_block_of_lines(tmp_path: Path, ending: str) -> None:
    """One field of a block is too long, signed, truncated or empty."""
    good = ["1", *(["-3", "", "12345678", "0"] * 4)[:13], *(["00ff17aa", ""] * 13)]
    lines, odd = [], {1: ["123456789", "-12345678", "-123456789", "-", "", "-0", "1x"],
                      14: ["-12345678", "-1234567", "0000000g", "ABCDEF01", "1234567", ""],
                      39: ["-12345678", "deadbeef", "deadbeef0", "\r", "dead\rbee"],
                      0: ["2", "", "-1", "01"]}
    for column, fields in odd.items():
        for field in fields:
            lines += ["\t".join(good)] * 70
            lines.append("\t".join([*good[:column], field, *good[column + 1:]]))
    lines += ["\t".join(good)] * 70 + ["\t".join(good[:-1]), "\t".join([*good, ""]), ""]
    path = tmp_path / "log.txt"
    path.write_bytes((ending.join([*lines, *lines[:200]]) + ending).encode())
    found = read(path, KAGGLE, True)
    assert_same(found, read(path, KAGGLE, False))
    assert 10 < found.num_bad < 20 and found.num_lines == len(lines) + 200


@pytest.mark.parametrize("share", [0.001, 0.3])
def test_pieces_blocks_and_malformed_rows_far_into_a_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, invent: Any) -> None:
    monkeypatch.setattr("oper.data.reading.rows.PIECE_ROWS", 700)
    rng = np.random.default_rng(4)
    rows = invent(300)
    lines = ["\t".join(rows[k]) for k in rng.integers(0, 300, 12_000)]
    bad = np.flatnonzero(rng.random(12_000) < share)
    for k in bad:
        lines[k] = lines[k].replace("\t", "\tx", 1) if k % 2 else lines[k] + "\t"
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 1))
    one = read(path, KAGGLE, True)
    assert one.num_bad == bad.size
    assert one.rows.tolist() == sorted(set(range(12_000)) - set(bad.tolist()))
    assert_same(one, read(path, KAGGLE, False))
    assert f"row {bad[0] + 1}, column {'-' if bad[0] % 2 == 0 else 'I1'}" in where(
        Unit(str(path), "tsv"), KAGGLE, one.bad[0])


def test_which_layouts_are_plain() -> None:
    def is_plain(name: str, layout: str) -> bool:
        rules = load_recipe(name)
        found = rules.layout(layout)
        return plain.is_plain(text_layout(rules, found, found.separator.join(
            c.sources[0] for c in found.columns), "f") if found.header else TextLayout(
            found, found.columns, rules.names("dense"), rules.names("sparse")))

    assert is_plain("criteo-kaggle", "tsv")
    assert is_plain("criteo-kaggle", "csv")
    assert is_plain("criteo-1tb", "tsv")
    assert is_plain("avazu", "default")
    assert not is_plain("book-crossing", load_recipe("book-crossing").layouts[0].name)

