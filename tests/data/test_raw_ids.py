"""Logs with raw ids: no vocabulary, and equal values have equal keys in every log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.analysis import CountOptions, forecast
from oper.data import (
    Folder,
    Loader,
    LoaderOptions,
    PreprocessOptions,
    analyze_folder,
    preprocess,
    raw_keys,
)
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing.sequences import write_sequences
from oper.errors import FileFormatError, InvalidInputError, UsageError
from oper.rl_rec.data.interactions import load_interactions
from oper.stats import AccessStats
from tests.data.folder_support import encoded, parquet_bytes
from tests.data.test_verbs import run
from tests.support import counts_by

MASK = (1 << 64) - 1
MISSING = 0x9E3779B97F4A7C15 - (1 << 64)
SPARSE = ["user", "item:int", "tags:|", "site:uint64"]
RECIPE = generic_recipe("csv", Choice(SPARSE, "clicked", time="ts"))
COLUMNS = ("user", "item", "tags", "site")
RAW = {"raw_ids": True, "valid": "1/5", "row_group_rows": 100}
Row = tuple[str, str, str, str]


def key_of_text(text: str) -> int:
    """Reference implementation: SplitMix64's finalizer, folded over eight bytes at a time."""
    state = 0x9E3779B97F4A7C15
    data = text.encode()
    for at in range(0, len(data), 8):
        x = state ^ int.from_bytes(data[at:at + 8], "little")
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        state = x ^ x >> 31
    return state - (1 << 64) if state >> 63 else state


def keys_of(row: Row) -> tuple[int, int, list[int], int]:
    user, item, tags, site = row
    at = int(site)
    return (key_of_text(user) if user else MISSING, int(item) if item else MISSING,
            [key_of_text(t) for t in tags.split("|") if t], at - (1 << 64) if at >> 63 else at)


def write_log(path: Path, day: int = 0, num_rows: int = 500) -> list[Row]:
    """Write users as strings (some missing), signed items, tags, and sites of 64 bits."""
    rng = np.random.default_rng(day)
    rows = []
    for _ in range(num_rows):
        user = "" if rng.random() < 0.1 else f"ü{'-' * int(rng.integers(0, 12))}{day}"
        low = -(1 << 63) if rng.random() < 0.02 else -30
        item = "" if rng.random() < 0.1 else str(low + int(rng.integers(0, 60)))
        tags = "|".join(f"t{t}" for t in rng.integers(0, 20, rng.integers(0, 4)))
        rows.append((user, item, tags, str((1 << 64) - 1 - int(rng.integers(0, 9)))))
    with path.open("w") as file:
        file.write("clicked,user,item,tags,site,ts\n")
        for k, row in enumerate(rows):
            file.write(f"{k % 2},{','.join(row)},{day * 86_400 + 60 * k}\n")
    return rows


def make(tmp_path: Path, out: str, day: int = 0, **options: Any) -> tuple[list[Row], Any]:
    rows = write_log(tmp_path / f"day{day}.csv", day)
    manifest = preprocess(RECIPE, [str(tmp_path / f"day{day}.csv")], tmp_path / out,
                          PreprocessOptions(**RAW | options))
    return rows, manifest



@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_keys_are_those_of_the_values(tmp_path: Path, compression: str) -> None:
    rows, manifest = make(tmp_path, "out", compression=compression)
    expected = [keys_of(row) for row in rows]
    for k, name in enumerate(COLUMNS):
        assert encoded(tmp_path / "out", name) == [keys[k] for keys in expected], name
    assert not (tmp_path / "out" / "vocabulary").exists()
    assert manifest["numbering"] == "raw ids; hashes of texts: user, tags"
    assert {n: t["hashed_texts"] for n, t in manifest["tables"].items()} == {
        "user": True, "item": False, "tags": True, "site": False}
    assert manifest["problems"] == []
    make(tmp_path, "two", compression=compression, num_workers=2)
    assert parquet_bytes(tmp_path / "two") == parquet_bytes(tmp_path / "out")


def test_keys_of_values_from_elsewhere(tmp_path: Path) -> None:
    rows, _ = make(tmp_path, "out")
    for k, name in enumerate(("user", "item")):
        values: list[Any] = [row[k] or None for row in rows]
        if name == "item":
            values = [None if v is None else int(v) for v in values]
        assert raw_keys(values).tolist() == encoded(tmp_path / "out", name)
    assert raw_keys([int(row[3]) for row in rows]).tolist() == encoded(tmp_path / "out", "site")
    assert raw_keys(["", b"", None, "ü", "ü".encode()]).tolist() == [MISSING] * 3 + (
        [key_of_text("ü")] * 2)
    assert raw_keys([-1, np.int8(5)]).tolist() == [-1, 5] and raw_keys([]).shape == (0,)
    bad: list[list[Any]] = [["7", 7], [1 << 64], [-(1 << 63) - 1], [1.5], ["a\0"], [MISSING]]
    for values in bad:
        with pytest.raises(InvalidInputError):
            raw_keys(values)


def test_another_day_has_the_same_keys(tmp_path: Path) -> None:
    (rows, first), (_, second) = make(tmp_path, "d0"), make(tmp_path, "d1", day=1)
    assert first["numbering"] == second["numbering"]
    assert set(encoded(tmp_path / "d0", "item")) & set(encoded(tmp_path / "d1", "item"))
    assert set(encoded(tmp_path / "d0", "user")) & set(encoded(tmp_path / "d1", "user")) == {
        MISSING}
    assert len(rows) == sum(first["rows"].values())


def test_batches_hold_the_keys(tmp_path: Path) -> None:
    rows, manifest = make(tmp_path, "out")
    train = rows[:manifest["rows"]["train"]]
    for window in (0, 128):
        loader = Loader(tmp_path / "out", "train", LoaderOptions(64, window=window))
        found: Counter[int] = Counter()
        for batch in loader:
            for name in COLUMNS:
                found.update(batch.sparse_features[name].values().tolist())
        expected = [keys_of(row) for row in train]
        assert found == Counter(k for keys in expected
                                for k in (keys[0], keys[1], *keys[2], keys[3]))


def test_statistics_of_keys(tmp_path: Path) -> None:
    """Compare the histogram, bag lengths and new keys by time bucket with direct counts."""
    rows, manifest = make(tmp_path, "out")
    train = [keys_of(row) for row in rows[:manifest["rows"]["train"]]]
    stats = analyze_folder(tmp_path / "out", options=CountOptions(presence_samples=(50,)))
    stats.save(tmp_path / "stats")
    read = AccessStats.load(tmp_path / "stats")
    assert not read.ids_in_hotness_order and read.num_samples == len(train)
    parts = Folder.open(tmp_path / "out", allow_raw=True).parts("train")
    buckets = [b for part in parts for b in pq.read_table(part)["bucket"].to_pylist()]
    for k, name in enumerate(COLUMNS):
        bags = [keys[k] if isinstance(keys[k], list) else [keys[k]] for keys in train]
        counts = Counter(key for bag in bags for key in bag)  # type: ignore[union-attr]
        table = read.tables[name]
        assert table.head_ids.size == 0
        assert counts_by(table.tail_values, table.tail_num_rows) == Counter(counts.values())
        assert counts_by(table.length_values, table.length_counts) == Counter(
            map(len, bags))  # type: ignore[arg-type]
        first = {key: bucket for bag, bucket in reversed(list(zip(bags, buckets, strict=True)))
                 for key in bag}  # type: ignore[union-attr]
        per_bucket = Counter(first.values())
        assert table.new_ids.tolist() == [per_bucket[b] for b in sorted(set(buckets))]
        assert table.unseen_mass == sum(c == 1 for c in counts.values()) / counts.total()


def test_presence_is_that_of_the_keys(tmp_path: Path) -> None:
    """Keys that differ only in their upper bits count as different rows."""
    keys = np.array([k << 56 for k in range(64)] * 4, np.int64)
    pq.write_table(pa.table({"id": keys, "y": np.arange(256) % 2}), tmp_path / "log.parquet")
    recipe = generic_recipe("parquet", Choice(["id"], "y"))
    preprocess(recipe, [str(tmp_path / "log.parquet")], tmp_path / "out",
               PreprocessOptions(raw_ids=True, valid="0"))
    table = analyze_folder(tmp_path / "out", options=CountOptions(
        presence_samples=(32, 128))).tables["id"]
    assert table.presence_samples.tolist() == [32, 128]
    assert table.presence_rows.tolist() == [32.0, 64.0]


REFUSED = [({"min_count": 3}, "min_count"), ({"max_rows": 9}, "max_rows"),
           ({"hash_rows": 9}, "hash_rows"), ({"vocabulary": "d"}, "vocabulary")]


@pytest.mark.parametrize(("options", "name"), REFUSED)
def test_raw_ids_have_no_vocabulary(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"options with raw_ids.*{name}"):
        PreprocessOptions(raw_ids=True, **options)


def parquet_log(path: Path, ids: pa.Array) -> str:
    pq.write_table(pa.table({"id": ids, "y": [k % 2 for k in range(len(ids))]}), path)
    return str(path)


def test_the_number_that_stands_for_a_missing_field_is_refused(tmp_path: Path) -> None:
    log = parquet_log(tmp_path / "a.parquet", pa.array([1, 2, MISSING, None]))
    with pytest.raises(InvalidInputError, match=f"'id' raw: id={MISSING}"):
        preprocess(generic_recipe("parquet", Choice(["id"], "y")), [log], tmp_path / "out",
                   PreprocessOptions(raw_ids=True))


def test_a_column_without_a_value(tmp_path: Path) -> None:
    log = parquet_log(tmp_path / "a.parquet", pa.array([None] * 4, pa.string()))
    preprocess(generic_recipe("parquet", Choice(["id"], "y")), [log], tmp_path / "out",
               PreprocessOptions(raw_ids=True, valid="0"))
    assert encoded(tmp_path / "out", "id") == [MISSING] * 4


def test_who_needs_row_numbers_says_so(tmp_path: Path) -> None:
    make(tmp_path, "out")
    folder = tmp_path / "out"
    for use in (lambda: Folder.open(folder), lambda: load_interactions(folder),
                lambda: write_sequences(folder, tmp_path / "new", "user")):
        with pytest.raises(InvalidInputError, match="ids='raw', expected row numbers"):
            use()
    with pytest.raises(FileFormatError, match="ids='raw', expected row numbers"):
        make(tmp_path, "d1", day=1, raw_ids=False, vocabulary=folder)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.csv")
    words = ["csv", str(tmp_path / "log.csv"), "--sparse", ",".join(SPARSE), "--label", "clicked",
             "--time", "ts", "--raw-ids"]
    assert run("preprocess", *words, "--dry-run") == 0
    assert "raw" in capsys.readouterr().out
    out, stats = str(tmp_path / "out"), str(tmp_path / "stats")
    assert run("preprocess", *words, "-o", out) == 0
    assert "raw ids: 4 columns, 2 of them hashes of texts" in capsys.readouterr().out
    assert run("preprocess", *words, "-o", out) == 0  # the output exists already
    capsys.readouterr()
    assert run("analyze", out, "-o", stats, "--capacity", "9") == 0
    assert "as dynamic tables" in capsys.readouterr().out
    assert run("analyze", out, "-o", stats, "--capacity", "9", "--json") == 0
    found = json.loads(capsys.readouterr().out)["tables"]["item"]
    known = AccessStats.load(stats).tables["item"]
    assert found["forecast"]["keys"] == known.num_touched_rows == sum(found["new_ids"])
    assert found["forecast"]["default_share"] == forecast(known, 9).default_share
    words = ["analyze", out, "-o", stats, "--json", "--time-to-live", "3", "--eviction", "lfu"]
    for more, message in (([], "--capacity"), (["--capacity", "9"], "--update-samples")):
        with pytest.raises(UsageError, match=message):
            run(*words, *more)
    with pytest.raises(UsageError, match="--update-samples=2, expected no value without"):
        run("analyze", out, "-o", stats, "--capacity", "9", "--update-samples", "2")
    assert run(*words, "--capacity", "9", "--update-samples", "2") == 0
    found = json.loads(capsys.readouterr().out)["tables"]["item"]["forecast"]
    samples = AccessStats.load(stats).num_samples
    assert found["occupied"] == forecast(
        known, 9, 1, "lfu", None, 6 * known.num_accesses / samples).occupied < 8
