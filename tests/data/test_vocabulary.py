"""Finished vocabularies, applied to another day and extended by it; logs without one."""

import errno
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.analysis import CountOptions, forecast, merge_stats, renumber_stats
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
from oper.data.vocabulary.finished import FinishedVocabulary, extend
from oper.errors import FileFormatError, InvalidInputError, UsageError
from oper.report.drift_page import drifts
from oper.rl_rec.data.interactions import load_interactions
from oper.rows.remap import load_remap
from oper.stats import AccessStats
from tests.data.loader_support import encoded, ids_of, made, parquet_bytes
from tests.references import hash_of
from tests.support import counts_by, run_command

RECIPE = generic_recipe("csv", Choice(["user", "item", "tags:|"], "clicked", time="ts"))
ALL = {"valid": "1/10"}
Days = dict[str, list[tuple[str, str, str]]]


def write_day(path: Path, day: int) -> list[tuple[str, str, str]]:
    """Write users, items (some missing) and tags of one day; later days also have new values."""
    rng = np.random.default_rng(day)
    rows = []
    for _ in range(900):
        user = f"ü{min(int(rng.pareto(1.0)), 60) + 25 * day}"
        item = "" if rng.random() < 0.1 else f"i{min(int(rng.pareto(0.8)), 300) + 40 * day}"
        tags = "|".join(f"t{int(rng.pareto(1.0)) % 40 + 3 * day}"
                        for _ in range(rng.integers(0, 4)))
        rows.append((user, item, tags))
    with path.open("w") as file:
        file.write("clicked,user,item,tags,ts\n")
        for k, row in enumerate(rows):
            file.write(f"{k % 2},{','.join(row)},{day * 86_400 + 60 * k}\n")
    return rows


@pytest.fixture
def days(tmp_path: Path) -> Days:
    return {f"day{d}": write_day(tmp_path / f"day{d}.csv", d) for d in range(3)}


def make(tmp_path: Path, day: str, out: str, **options: Any) -> dict[str, Any]:
    return preprocess(RECIPE, [str(tmp_path / f"{day}.csv")], tmp_path / out,
                      PreprocessOptions(row_group_rows=128, **ALL, **options))


def values_of(rows: list[tuple[str, str, str]]) -> dict[str, list[str | None]]:
    """Return the values of the rows by column."""
    return {"user": [r[0] for r in rows], "item": [r[1] or None for r in rows],
            "tags": [t for r in rows for t in r[2].split("|") if t]}


def test_a_finished_vocabulary_is_applied(days: Days, tmp_path: Path) -> None:
    make(tmp_path, "day0", "d0")
    manifest = make(tmp_path, "day1", "d1", vocabulary=tmp_path / "d0")
    users, items = (ids_of(tmp_path / "d0", n) for n in ("user", "item"))
    assert encoded(tmp_path / "d1", "user") == [users.get(r[0], 0) for r in days["day1"]]
    assert encoded(tmp_path / "d1", "item") == [items.get(r[1] or None, 0) for r in days["day1"]]
    assert 0 in encoded(tmp_path / "d1", "user") and items[None] in encoded(tmp_path / "d1", "item")
    tags = ids_of(tmp_path / "d0", "tags")
    assert encoded(tmp_path / "d1", "tags") == [
        [tags.get(t, 0) for t in r[2].split("|") if t] for r in days["day1"]]
    train = days["day1"][:manifest["rows"]["train"]]
    for name, values in values_of(train).items():
        known = ids_of(tmp_path / "d0", name)
        unseen = Counter(v for v in values if v not in known)
        listed = pq.read_table(tmp_path / "d1" / "unseen" / f"{name}.parquet").to_pydict()
        assert dict(zip(listed["value"], listed["count"], strict=True)) == unseen
        assert manifest["unseen"][name] == {
            "values": len(unseen), "accesses": sum(unseen.values()),
            "share": sum(unseen.values()) / len(values)}
    assert not Folder.open(tmp_path / "d1").ids_in_hotness_order
    again = make(tmp_path, "day1", "d1w", vocabulary=tmp_path / "d0", num_workers=2)
    assert again["unseen"] == manifest["unseen"]
    assert parquet_bytes(tmp_path / "d1") == parquet_bytes(tmp_path / "d1w")


def test_the_day_of_the_vocabulary_has_the_same_output(days: Days, tmp_path: Path) -> None:
    make(tmp_path, "day0", "d0")
    make(tmp_path, "day0", "same", vocabulary=tmp_path / "d0")
    assert parquet_bytes(tmp_path / "d0").items() <= parquet_bytes(tmp_path / "same").items()


def test_new_rows_follow_the_old_ones(days: Days, tmp_path: Path) -> None:
    make(tmp_path, "day0", "d0")
    for day in ("day1", "day2"):
        make(tmp_path, day, day, vocabulary=tmp_path / "d0")
    manifest = extend(tmp_path / "d0", [tmp_path / "day1", tmp_path / "day2"], tmp_path / "v1",
                      min_count=3)
    for name, values in (("user", 0), ("item", 1)):
        old, new = (ids_of(tmp_path / f, name) for f in ("d0", "v1"))
        assert {k: v for k, v in new.items() if k in old} == old
        unseen: Counter[str] = Counter()
        for day in ("day1", "day2"):
            train = days[day][:Folder.open(tmp_path / day).rows["train"]]
            unseen += Counter(r[values] for r in train if (r[values] or None) not in old)
        behind = sorted((-c, v) for v, c in unseen.items() if c >= 3)
        num_old = Folder.open(tmp_path / "d0").manifest["tables"][name]["num_rows"]
        assert {k: v for k, v in new.items() if k not in old} == {
            v: num_old + k for k, (_, v) in enumerate(behind)}
        assert manifest["new_rows"][name] == len(behind) > 0
    # An extended vocabulary can be used and extended again.
    make(tmp_path, "day2", "d2", vocabulary=tmp_path / "v1")
    assert Folder.open(tmp_path / "d2").num_rows == tuple(
        t["num_rows"] for t in manifest["tables"].values())
    users = ids_of(tmp_path / "v1", "user")
    assert encoded(tmp_path / "d2", "user") == [users.get(r[0], 0) for r in days["day2"]]
    more = extend(tmp_path / "v1", [tmp_path / "d2"], tmp_path / "v2", min_count=1)
    assert all(x > 0 for n, x in more["new_rows"].items() if n != "tags")
    limit = max(t["num_rows"] for t in more["tables"].values()) - 2
    capped = extend(tmp_path / "v1", [tmp_path / "d2"], tmp_path / "v3", 1, limit)
    assert max(t["num_rows"] for t in capped["tables"].values()) == limit
    with pytest.raises(InvalidInputError, match="max_rows=5, expected >= "):
        extend(tmp_path / "v1", [tmp_path / "d2"], tmp_path / "v4", max_rows=5)


def test_a_missing_field_that_comes_later(tmp_path: Path) -> None:
    first, second = "n\n" + "x\ny\n" * 9, "n\n" + 'x\n""\n' * 9
    made(tmp_path, first, Choice(["n"]), "A", valid="0")
    made(tmp_path, second, Choice(["n"]), "B", valid="0", vocabulary=tmp_path / "A")
    assert set(encoded(tmp_path / "B", "n")) == {0, 1}
    extend(tmp_path / "A", [tmp_path / "B"], tmp_path / "V")
    assert ids_of(tmp_path / "V", "n") == {"x": 1, "y": 2, None: 3}
    made(tmp_path, second, Choice(["n"]), "C", valid="0", vocabulary=tmp_path / "V")
    assert encoded(tmp_path / "C", "n") == [1, 3] * 9


def test_strings_that_are_not_utf8_keep_their_rows(tmp_path: Path) -> None:
    for name, options in (("A", {}), ("B", {"vocabulary": tmp_path / "A"})):
        made(tmp_path, b"n\n" + b"\xff\n\\xff\nab\n" * 5, Choice(["n"]), name, valid="0", **options)
    assert encoded(tmp_path / "A", "n") == encoded(tmp_path / "B", "n")
    assert len(set(encoded(tmp_path / "A", "n"))) == 3


def test_hashed_columns_and_integers(tmp_path: Path) -> None:
    for kind in ({"hash_rows": 50}, {}):
        made(tmp_path, {"n": [5, 7, 7, -3] * 4}, Choice(["n"]), f"A{len(kind)}", valid="0", **kind)
        manifest = made(tmp_path, {"n": pa.array([7, 9, 9] * 4, pa.int32())}, Choice(["n"]),
                        f"B{len(kind)}", valid="0", vocabulary=tmp_path / f"A{len(kind)}")
        assert manifest["unseen"]["n"] == {"values": 1, "accesses": 8, "share": 8 / 12}
    assert len(set(encoded(tmp_path / "B1", "n"))) == 2
    with pytest.raises(InvalidInputError, match="hash has a row"):
        extend(tmp_path / "A1", [tmp_path / "B1"], tmp_path / "V")
    with pytest.raises(InvalidInputError, match="both signed, both unsigned or both strings"):
        made(tmp_path, {"n": pa.array([1, 2], pa.uint64())}, Choice(["n"]), "C", valid="0",
             vocabulary=tmp_path / "A0")


def test_unsuitable_vocabularies_and_folders_are_refused(days: Days, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "day0", "d0")
    with pytest.raises(InvalidInputError, match="finished vocabulary determines"):
        PreprocessOptions(vocabulary="d0", min_count=3)
    other = generic_recipe("csv", Choice(["user", "item"]))
    with pytest.raises(InvalidInputError, match="sparse columns"):
        preprocess(other, [str(tmp_path / "day1.csv")], tmp_path / "x",
                   PreprocessOptions(vocabulary=tmp_path / "d0"))
    with pytest.raises(FileFormatError, match="manifest"):
        FinishedVocabulary.open(tmp_path)
    with pytest.raises(InvalidInputError, match="another vocabulary"):
        extend(tmp_path / "d0", [tmp_path / "d0"], tmp_path / "v")
    make(tmp_path, "day1", "d1", vocabulary=tmp_path / "d0")
    with pytest.raises(InvalidInputError, match="a folder that does not exist"):
        extend(tmp_path / "d0", [tmp_path / "d1"], tmp_path / "d1")
    with pytest.raises(InvalidInputError, match="each of them once"):
        extend(tmp_path / "d0", [tmp_path / "d1", tmp_path / "." / "x" / ".." / "d1"],
               tmp_path / "v")
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("oper.data.vocabulary.finished.write_parts", full)
        with pytest.raises(InvalidInputError, match="enough space"):
            extend(tmp_path / "d0", [tmp_path / "d1"], tmp_path / "v")
    path = tmp_path / "d0" / "vocabulary" / "user.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "id", pa.array([1] * len(table), pa.int32())), path)
    with pytest.raises(FileFormatError, match="one for each value"):
        make(tmp_path, "day2", "d2", vocabulary=tmp_path / "d0")
    path.unlink()
    with pytest.raises(FileFormatError, match="missing files"):
        FinishedVocabulary.open(tmp_path / "d0")


def test_verbs_and_statistics_over_days(days: Days, tmp_path: Path, printed: Callable[..., str]
                                        ) -> None:
    own = ["--label", "clicked", "--sparse", "user,item,tags:|", "--time", "ts"]
    d0, d1, v1, d2 = (tmp_path / n for n in ("d0", "d1", "v1", "d2"))
    printed("preprocess", "csv", tmp_path / "day0.csv", "-o", d0, *own)
    assert "unseen in user: " in printed("preprocess", "csv", tmp_path / "day1.csv", "-o", d1, *own,
                                         "--vocabulary", d0)
    assert "new rows" in printed("vocabulary", "extend", d0, d1, "-o", v1)
    printed("preprocess", "csv", tmp_path / "day2.csv", "-o", d2, *own, "--vocabulary", v1)
    extended = printed("vocabulary", "extend", v1, d2, "-o", tmp_path / "v2", "--json")
    assert json.loads(extended)["kind"] == "oper-vocabulary"
    parts = [analyze_folder(d) for d in (d0, d1, d2)]
    for k, part in enumerate(parts):
        part.save(tmp_path / f"{k}.stats")
    with pytest.raises(InvalidInputError, match="grown"):
        merge_stats(parts)
    files = [tmp_path / f"{k}.stats" for k in range(3)]
    printed("analyze", "--merge", "--grown", *files, "-o", tmp_path / "all.stats")
    merged = merge_stats(parts, grown=True)
    assert merged.num_samples == sum(p.num_samples for p in parts)
    for name, table in merged.tables.items():
        counts: Counter[int] = Counter()
        for folder in (d0, d1, d2):
            opened = Folder.open(folder)
            for part in opened.parts("train"):
                found = opened.read_part(part, (name,)).column(name).combine_chunks()
                counts.update((found.flatten() if pa.types.is_list(found.type)
                               else found).to_pylist())
        assert counts_by(table.head_ids, table.head_counts) == counts
        assert table.num_rows == parts[2].tables[name].num_rows
        assert int(table.tail_num_rows.sum()) + table.head_ids.size == table.num_rows


@pytest.mark.parametrize("by", ["time", "rows"])
def test_time_buckets_of_several_days_stay_apart(days: Days, tmp_path: Path, by: str) -> None:
    choice = Choice(["user", "item", "tags:|"], "clicked", time="ts" if by == "time" else None)
    recipe = replace(generic_recipe("csv", choice), buckets=3)
    for k, more in enumerate(({}, {"vocabulary": tmp_path / "0"})):
        preprocess(recipe, [str(tmp_path / f"day{k}.csv")], tmp_path / str(k),
                   PreprocessOptions(valid="0", **more))
    parts = [analyze_folder(tmp_path / str(k)) for k in range(2)]
    merged = merge_stats(parts)
    for name, table in merged.tables.items():
        counted = [b for part in parts for b in part.tables[name].buckets]
        assert len(counted) == 6 and [b.label for b in table.buckets] == [b.label for b in counted]
        assert [b.ids.tolist() for b in table.buckets] == [b.ids.tolist() for b in counted]
    if by == "time":  # 900 rows a minute apart, from midnight; the second bucket begins at 5 h
        assert [b.label for b in table.buckets][::2] == [
            f"bucket 1970-01-0{d}T{h:02}:00:00" for d, h in ((1, 0), (1, 10), (2, 5))]


def test_statistics_of_other_vocabularies_are_not_merged_or_compared(days: Days, tmp_path: Path
                                                                     ) -> None:
    """Also if all tables have as many rows."""
    for day in ("day0", "day1"):
        make(tmp_path, day, f"own-{day}", max_rows=8)
    make(tmp_path, "day1", "same", vocabulary=tmp_path / "own-day0")
    one, other, same = (analyze_folder(tmp_path / n) for n in ("own-day0", "own-day1", "same"))
    assert {n: t.num_rows for n, t in one.tables.items()} == {
        n: t.num_rows for n, t in other.tables.items()}
    for parts in ([one, other], [same, other], [one, same, other]):
        with pytest.raises(InvalidInputError, match="numbering"):
            merge_stats(parts)
    with pytest.raises(InvalidInputError, match="numbering"):
        drifts(one, [("day1", other)])
    merge_stats([one, same]).save(tmp_path / "stats")
    merged = AccessStats.load(tmp_path / "stats")
    assert merged.numbering == one.numbering == same.numbering != other.numbering
    assert drifts(one, [("day1", same)])[0].mean > 0
    unknown = replace(other, numbering="")
    assert merge_stats([one, unknown]).numbering == ""


def test_reordered_by_all_counts(days: Days, tmp_path: Path) -> None:
    make(tmp_path, "day0", "d0")
    for day in ("day1", "day2"):
        make(tmp_path, day, day, vocabulary=tmp_path / "d0")
    later = [tmp_path / "day1", tmp_path / "day2"]
    stable = extend(tmp_path / "d0", later, tmp_path / "v1", min_count=3)
    manifest = extend(tmp_path / "d0", later, tmp_path / "v2", min_count=3, reorder=True)
    rows = {d: json.loads((tmp_path / d / "manifest.json").read_text())["rows"]["train"]
            for d in ("d0", "day1", "day2")}
    seen = [r for d, f in (("day0", "d0"), ("day1", "day1"), ("day2", "day2"))
            for r in days[d][:rows[f]]]
    remap = load_remap(tmp_path / "v2")
    day0 = values_of(days["day0"][:rows["d0"]])
    for name, values in values_of(seen).items():
        before, after = (ids_of(tmp_path / v, name) for v in ("v1", "v2"))
        assert after == {v: remap[name][k] for v, k in before.items()}
        # Rows are in order of their counts over all days; ties in order of values, the missing
        # value first. For values too rare for a row on the first day, that day is not counted.
        old, every, first = ids_of(tmp_path / "d0", name), Counter(values), Counter(day0[name])
        count = {v: every[v] - (0 if v in old else first[v]) for v in after}
        assert sorted(after, key=lambda v: after[v]) == sorted(
            after, key=lambda v: (-count[v], v is not None, (v or "").encode()))
        assert manifest["tables"][name]["missing_id"] == after.get(None, 0)
    assert stable["numbering"] == json.loads(
        (tmp_path / "d0" / "manifest.json").read_text())["numbering"] != manifest["numbering"]
    assert make(tmp_path, "day2", "again", vocabulary=tmp_path / "v2")["numbering"] == manifest[
        "numbering"]
    # Renumbered statistics of all days have the same counts under the new row numbers.
    files = []
    for day in ("d0", "day1", "day2"):
        files.append(str(tmp_path / f"{day}.stats"))
        analyze_folder(tmp_path / day).save(files[-1])
    assert run_command("analyze", "--merge", "--remap", tmp_path / "v2", *files, "-o",
                       tmp_path / "all.stats") == 0
    found, plain = AccessStats.load(tmp_path / "all.stats"), merge_stats(
        map(AccessStats.load, files), grown=True)
    for name, table in found.tables.items():
        assert table.num_rows == manifest["tables"][name]["num_rows"]
        expected = plain.tables[name]
        assert counts_by(table.head_ids, table.head_counts) == counts_by(
            remap[name][expected.head_ids], expected.head_counts)
        for one, other in zip(table.buckets, expected.buckets, strict=True):
            order = np.argsort(remap[name][other.ids])
            assert one.ids.tolist() == remap[name][other.ids[order]].tolist()
            assert one.counts.tolist() == other.counts[order].tolist()
        assert table.presence_rows.tolist() == expected.presence_rows.tolist()
        assert table.length_counts.tolist() == expected.length_counts.tolist()
    with pytest.raises(InvalidInputError, match="cannot renumber statistics"):
        renumber_stats(plain, {"user": remap["user"]})
    with pytest.raises(InvalidInputError, match="rows"):
        plain.tables["user"].renumbered(np.arange(2))
    with pytest.raises(FileFormatError, match="re-map"):
        load_remap(tmp_path / "v1")
    damaged = tmp_path / "v2" / "remap" / "user.npy"
    np.save(damaged, np.zeros(5, np.int32))
    with pytest.raises(FileFormatError, match="beginning with 0"):
        load_remap(tmp_path / "v2")


# ---- raw ids: equal values have equal keys in every log ------------------------------------------

MISSING = 0x9E3779B97F4A7C15 - (1 << 64)
SPARSE = ["user", "item:int", "tags:|", "site:uint64"]
RAW_RECIPE = generic_recipe("csv", Choice(SPARSE, "clicked", time="ts"))
COLUMNS = ("user", "item", "tags", "site")
RAW = {"raw_ids": True, "valid": "1/5", "row_group_rows": 100}
Row = tuple[str, str, str, str]


def key_of_text(text: str) -> int:
    """Reference implementation: SplitMix64's finalizer, folded over eight bytes at a time."""
    state = 0x9E3779B97F4A7C15
    data = text.encode()
    for at in range(0, len(data), 8):
        state = hash_of(int.from_bytes(data[at:at + 8], "little"), state)
    return state - (1 << 64) if state >> 63 else state


def keys_of(row: Row) -> tuple[int, int, list[int], int]:
    user, item, tags, site = row
    at = int(site)
    return (key_of_text(user) if user else MISSING, int(item) if item else MISSING,
            [key_of_text(t) for t in tags.split("|") if t], at - (1 << 64) if at >> 63 else at)


def write_log(path: Path, day: int = 0) -> list[Row]:
    """Write users as strings (some missing), signed items, tags, and sites of 64 bits."""
    rng = np.random.default_rng(day)
    rows = []
    for _ in range(500):
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


def make_raw(tmp_path: Path, out: str, day: int = 0, **options: Any) -> tuple[list[Row], Any]:
    rows = write_log(tmp_path / f"day{day}.csv", day)
    manifest = preprocess(RAW_RECIPE, [str(tmp_path / f"day{day}.csv")], tmp_path / out,
                          PreprocessOptions(**RAW | options))
    return rows, manifest


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_keys_are_those_of_the_values(tmp_path: Path, compression: str) -> None:
    rows, manifest = make_raw(tmp_path, "out", compression=compression)
    expected = [keys_of(row) for row in rows]
    for k, name in enumerate(COLUMNS):
        assert encoded(tmp_path / "out", name) == [keys[k] for keys in expected], name
    assert not (tmp_path / "out" / "vocabulary").exists()
    assert manifest["numbering"] == "raw ids; hashes of texts: user, tags"
    assert {n: t["hashed_texts"] for n, t in manifest["tables"].items()} == {
        "user": True, "item": False, "tags": True, "site": False}
    assert manifest["problems"] == []
    make_raw(tmp_path, "two", compression=compression, num_workers=2)
    assert parquet_bytes(tmp_path / "two") == parquet_bytes(tmp_path / "out")


def test_keys_of_values_from_elsewhere(tmp_path: Path) -> None:
    rows, _ = make_raw(tmp_path, "out")
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


def test_batches_hold_the_keys(tmp_path: Path) -> None:
    rows, manifest = make_raw(tmp_path, "out")
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
    rows, manifest = make_raw(tmp_path, "out")
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
    made(tmp_path, {"id": keys, "y": np.arange(256) % 2}, Choice(["id"], "y"), raw_ids=True,
         valid="0")
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



def test_the_number_that_stands_for_a_missing_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"'id' raw: id={MISSING}"):
        made(tmp_path, {"id": [1, 2, MISSING, None], "y": [0, 1] * 2}, Choice(["id"], "y"),
             raw_ids=True)


def test_a_column_without_a_value(tmp_path: Path) -> None:
    made(tmp_path, {"id": pa.array([None] * 4, pa.string()), "y": [0, 1] * 2}, Choice(["id"], "y"),
         raw_ids=True, valid="0")
    assert encoded(tmp_path / "out", "id") == [MISSING] * 4


def test_commands_that_need_row_numbers_refuse_raw_ids(tmp_path: Path) -> None:
    make_raw(tmp_path, "out")
    folder = tmp_path / "out"
    for use in (lambda: Folder.open(folder), lambda: load_interactions(folder),
                lambda: write_sequences(folder, tmp_path / "new", "user")):
        with pytest.raises(InvalidInputError, match="ids='raw', expected row numbers"):
            use()
    with pytest.raises(FileFormatError, match="ids='raw', expected row numbers"):
        make_raw(tmp_path, "d1", day=1, raw_ids=False, vocabulary=folder)


def test_command_line(tmp_path: Path, printed: Callable[..., str]) -> None:
    write_log(tmp_path / "log.csv")
    words = ["preprocess", "csv", tmp_path / "log.csv", "--sparse", ",".join(SPARSE), "--label",
             "clicked", "--time", "ts", "--raw-ids"]
    assert "raw" in printed(*words, "--dry-run")
    out, stats = tmp_path / "out", tmp_path / "stats"
    assert "raw ids: 4 columns, 2 of them hashes of strings" in printed(*words, "-o", out)
    printed(*words, "-o", out)  # the output exists already
    analyze = ["analyze", out, "-o", stats, "--capacity", 9]
    assert "as dynamic tables" in printed(*analyze)
    found = json.loads(printed(*analyze, "--json"))["tables"]["item"]
    known = AccessStats.load(stats).tables["item"]
    assert found["forecast"]["keys"] == known.num_touched_rows == sum(found["new_ids"])
    assert found["forecast"]["default_share"] == forecast(known, 9).default_share
    words = ["analyze", out, "-o", stats, "--json", "--time-to-live", "3", "--eviction", "lfu"]
    for more, message in (([], "--capacity"), (["--capacity", "9"], "--update-samples")):
        with pytest.raises(UsageError, match=message):
            printed(*words, *more)
    with pytest.raises(UsageError, match="--update-samples=2, expected no value without"):
        printed(*analyze, "--update-samples", 2)
    found = json.loads(printed(*words, "--capacity", 9, "--update-samples", 2)
                       )["tables"]["item"]["forecast"]
    samples = AccessStats.load(stats).num_samples
    assert found["occupied"] == forecast(
        known, 9, 1, "lfu", None, 6 * known.num_accesses / samples).occupied < 8
