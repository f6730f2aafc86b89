"""Preprocessing against a direct computation of its output."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.analysis import skew
from oper.data import Folder, PreprocessOptions, analyze_folder, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing.staging import Stage
from oper.data.recipe import recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError, OperError
from tests.data.loader_support import (
    encoded,
    interrupted,
    invent,
    made,
    parquet_bytes,
    text_of,
    train_log,
)
from tests.support import counts_by, run_here

KAGGLE = load_recipe("criteo-kaggle")


def expected_ids(rows: list[list[str]], num_train: int, column: int,
                 min_count: int) -> tuple[list[int], list[str]]:
    """Return the ids of all rows, and the values with ids 1, 2, ..."""
    counts = Counter(r[column] for r in rows[:num_train])
    kept = sorted((v for v in counts if counts[v] >= min_count),
                  key=lambda v: (-counts[v], v != "", int(v or "0", 16)))
    id_of = {value: k + 1 for k, value in enumerate(kept)}
    return [id_of.get(r[column], 0) for r in rows], kept


def check_folder(folder: Path, rows: list[list[str]], min_count: int, num_valid: int) -> None:
    num_train = len(rows) - num_valid
    train, valid = (pq.read_table(folder / split).to_pydict() for split in ("train", "valid"))
    both = {name: train[name] + valid[name] for name in train}
    assert len(train["label"]) == num_train and len(valid["label"]) == num_valid
    assert both["label"] == [int(r[0]) for r in rows]
    assert both["day"] == [k * 7 // len(rows) for k in range(len(rows))]
    for k in range(13):
        dense = [np.log1p(max(0, int(r[k + 1] or 0))) for r in rows]
        np.testing.assert_allclose(both[f"I{k + 1}"], dense, rtol=1e-6)
    manifest = json.loads((folder / "manifest.json").read_text())
    for c in range(26):
        ids, values = expected_ids(rows, num_train, c + 14, min_count)
        assert both[f"C{c + 1}"] == ids
        assert manifest["tables"][f"C{c + 1}"]["num_rows"] == len(values) + 1
        vocabulary = pq.read_table(folder / "vocabulary" / f"C{c + 1}.parquet").to_pydict()
        counts = Counter(r[c + 14] for r in rows[:num_train])
        assert vocabulary["value"] == [None] * ("" in values) + sorted(
            int(v, 16) for v in values if v)
        by_id = sorted(zip(vocabulary["id"], vocabulary["value"], vocabulary["count"], strict=True))
        assert by_id == [(k + 1, int(v, 16) if v else None, counts[v])
                         for k, v in enumerate(values)]


@pytest.mark.parametrize("min_count", [1, 2, 5])
def test_output_equals_a_direct_computation(tmp_path: Path, min_count: int) -> None:
    rows = invent(500)
    options = PreprocessOptions(min_count=min_count, row_group_rows=64, part_rows=200)
    manifest = preprocess(KAGGLE, [train_log(tmp_path, rows)], tmp_path / "out", options)
    check_folder(tmp_path / "out", rows, min_count, 500 // 7)
    assert manifest["rows"] == {"train": 429, "valid": 71, "test": 0}
    assert manifest["ids_in_hotness_order"] is True and manifest["synthetic"] is False
    parts = sorted((tmp_path / "out" / "train").iterdir())
    sizes = [[pq.ParquetFile(p).metadata.row_group(g).num_rows
              for g in range(pq.ParquetFile(p).num_row_groups)] for p in parts]
    assert sizes == [[64, 64, 64, 64], [64, 64, 45]]
    schema = pq.read_schema(parts[0])
    assert [str(schema.field(n).type) for n in ("label", "day", "I1", "C1")] == [
        "int8", "int8", "float", "int32"]


def test_compressed_output_holds_the_same(tmp_path: Path) -> None:
    path = train_log(tmp_path, 2000)
    for name in ("none", "zstd"):
        preprocess(KAGGLE, [path], tmp_path / name, PreprocessOptions(compression=name))
    tables = [pq.read_table(tmp_path / name / "train") for name in ("none", "zstd")]
    assert tables[0].equals(tables[1])
    sizes = {}
    for name in ("none", "zstd"):
        (part,) = (tmp_path / name / "train").iterdir()
        about = pq.ParquetFile(part).metadata.row_group(0)
        columns = [about.column(k) for k in range(about.num_columns)]
        packed = {c.path_in_schema for c in columns if c.compression == "ZSTD"}
        sizes[name] = part.stat().st_size
        if name == "zstd":
            split = {c.path_in_schema for c in columns if "BYTE_STREAM_SPLIT" in c.encodings}
            assert split == {f"C{k}" for k in range(1, 27)}
            assert packed == split | {"label", "day"}
        else:
            assert not packed
    assert sizes["zstd"] < 0.7 * sizes["none"]
    with pytest.raises(InvalidInputError, match="compression"):
        PreprocessOptions(compression="gzip")


def test_several_and_packed_files_are_one_log(tmp_path: Path) -> None:
    rows = invent(300)
    files = [tmp_path / f"day_{k}" for k in range(3)]
    for k, path in enumerate(files):
        text = text_of(rows[k * 100:(k + 1) * 100]).encode()
        path.write_bytes(gzip.compress(text) if k == 1 else text)
    whole = preprocess(KAGGLE, train_log(tmp_path, rows), tmp_path / "whole")
    parts = preprocess(KAGGLE, [str(tmp_path / "day_*")], tmp_path / "parts")
    check_folder(tmp_path / "parts", rows, 2, 300 // 7)
    assert [i["rows"] for i in parts["inputs"]] == [100] * 3
    assert parts["inputs"][1]["bytes"] == files[1].stat().st_size
    assert whole["tables"] == parts["tables"]


def test_split_share_rows_limit_and_no_validation(tmp_path: Path) -> None:
    path = train_log(tmp_path, 100)
    a = preprocess(KAGGLE, [path], tmp_path / "a", PreprocessOptions(valid="0.25"))
    assert a["rows"] == {"train": 75, "valid": 25, "test": 0} and a["split"]["valid"] == "1/4"
    b = preprocess(KAGGLE, [path], tmp_path / "b", PreprocessOptions(valid="0", max_rows=10))
    assert b["rows"] == {"train": 100, "valid": 0, "test": 0}
    assert max(t["num_rows"] for t in b["tables"].values()) == 10
    train = pq.read_table(tmp_path / "b" / "train")
    assert max(max(train[f"C{c}"].to_pylist()) for c in range(1, 27)) == 9
    assert Folder.open(tmp_path / "b").parts("valid") == []
    with pytest.raises(InvalidInputError, match="valid"):
        preprocess(KAGGLE, [path], tmp_path / "c", PreprocessOptions(valid="1"))


def test_malformed_rows_are_counted_reported_and_limited(tmp_path: Path) -> None:
    bad = invent(200)
    bad[10][3], bad[150][20], bad[199] = "x", "XYZ", ["1", "2"]
    path = train_log(tmp_path, bad)
    for max_bad, line in ((0, "row 11, column I3: 'x'"), (2, "row 151, column C7: 'XYZ'")):
        with pytest.raises(FileFormatError) as error:
            preprocess(KAGGLE, [path], tmp_path / "out", PreprocessOptions(max_bad=max_bad))
        assert line in str(error.value) and f"max_bad={max_bad}" in str(error.value)
        assert path in str(error.value)
        assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]
    manifest = preprocess(KAGGLE, [path], tmp_path / "out", PreprocessOptions(max_bad=3))
    assert manifest["bad_rows"]["count"] == 3 and len(manifest["bad_rows"]["first"]) == 3
    assert "row 200" in manifest["bad_rows"]["first"][2]
    # Split and buckets are shares of the 197 well-formed rows; the last 197 // 7 are valid.
    assert manifest["rows"] == {"train": 197 - 28, "valid": 28, "test": 0}
    assert manifest["inputs"][0]["rows"] == 200
    days = pq.read_table(tmp_path / "out" / "train")["day"].to_pylist()
    assert days == [k * 7 // 197 for k in range(169)]


@pytest.mark.parametrize("unit_bytes", [900, 1 << 28])
def test_shares_count_records_not_lines(tmp_path: Path, unit_bytes: int) -> None:
    recipe = generic_recipe("csv", Choice(["id"], "y"))
    (tmp_path / "log.csv").write_text("y,id\n" + "".join(
        f'{k % 2},"text{chr(10) * (k < 1000)}{k % 7}"\n' for k in range(2000)))
    plain = recipe_from_dict({"name": "plain", "separator": ",", "header": True, "column": [
        {"name": "y", "kind": "label"}, {"name": "id", "kind": "sparse", "parse": "int"}]})
    (tmp_path / "plain.csv").write_text("y,id\n" + "".join(
        f"{k % 2},{k if k >= 1000 or k % 2 else 'x'}\n" for k in range(2000)))
    for name, kept, job in (("log.csv", 2000, recipe), ("plain.csv", 1500, plain)):
        manifest = preprocess(job, [str(tmp_path / name)], tmp_path / f"{name}.out",
                              PreprocessOptions(valid="0.25", test="0.1", max_bad=500,
                                                unit_bytes=unit_bytes))
        assert manifest["rows"] == {"train": kept - kept // 4 - kept // 10, "valid": kept // 4,
                                    "test": kept // 10}
        assert manifest["inputs"][0]["rows"] == 2000


def test_output_is_complete_or_absent_and_other_folders_are_kept(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = train_log(tmp_path, 60), tmp_path / "out"
    out.mkdir()
    preprocess(KAGGLE, [path], out)  # an empty folder is fine
    before = sorted(p.name for p in out.iterdir())
    with pytest.raises(InvalidInputError, match="--force"):
        preprocess(KAGGLE, [path], out, PreprocessOptions(min_count=3))
    with monkeypatch.context() as patch:  # the very same job is not done again
        patch.setattr("oper.data.preprocessing.run.Job.opened", None)
        assert preprocess(KAGGLE, [path], out) == json.loads((out / "manifest.json").read_text())
    os.utime(path, (1, 1))
    with pytest.raises(InvalidInputError, match="--force"):
        preprocess(KAGGLE, [path], out)
    with interrupted("manifest"):
        preprocess(KAGGLE, [path], out, PreprocessOptions(force=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.work", "out", "train.txt"]
    assert sorted(p.name for p in out.iterdir()) == before
    manifest = preprocess(KAGGLE, [path], out, PreprocessOptions(force=True, min_count=3))
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "train.txt"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInputError, match="something else"):
        preprocess(KAGGLE, [path], other, PreprocessOptions(force=True))
    assert (other / "thesis.txt").exists()


def test_outputs_that_cannot_or_must_not_be_written_are_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must be raised before work begins, since the output folder is replaced last."""
    path = train_log(tmp_path, 60)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here", str(tmp_path / "here"), "/proc"):
        with pytest.raises(InvalidInputError, match="neither a mount point nor the current folder"):
            preprocess(KAGGLE, [path], out)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    for _ in range(2):  # first a new output, then an existing one
        preprocess(KAGGLE, [path], tmp_path / "link", PreprocessOptions(force=True))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "out" / "manifest.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "here", "link", "train.txt"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_log_inside_the_output_is_refused(tmp_path: Path, scheme: str) -> None:
    """Otherwise outputs would be read as a log, and removed when the output is replaced."""
    pq.write_table(pa.table({"y": [0, 1] * 9, "id": list(range(7, 25))}), tmp_path / "log.parquet")
    recipe = generic_recipe("parquet", Choice(["id"]))
    options = PreprocessOptions(raw_ids=True, force=True)
    log, out = f"{scheme}{tmp_path}", f"{scheme}{tmp_path}/out"
    preprocess(recipe, [log], out, options)
    before = parquet_bytes(tmp_path / "out")
    with pytest.raises(InvalidInputError, match=r"inputs=\['.*/out/train/part-.*outside of the"):
        preprocess(recipe, [log], out, options)
    assert parquet_bytes(tmp_path / "out") == before


def problems_of(tmp_path: Path, text: str, choice: Choice, **options: Any) -> list[str]:
    manifest = made(tmp_path, text, choice, force=True, **options)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    return list(manifest["problems"])


def test_useless_results_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = "y,a,b,t\n" + "".join(f"{k % 2},{k % 3},{k % 4},{k * 600}\n" for k in range(60))
    assert problems_of(tmp_path, good, Choice(["a", "b"], "y")) == []
    assert all(r.levelname != "WARNING" for r in caplog.records)
    few = "y,a,b,t\n" + "".join(f"{k % 2},1,{k},99\n" for k in range(9))
    for text, choice, options, words in (
            (few, Choice(["a"], "y"), {"valid": "1/10"}, ["valid part is empty"]),
            (few, Choice(["a"], "y", time="t"), {"valid": "1/3", "test": "1/3"},
             ["valid part is empty", "test part is empty"]),
            (few, Choice(["a", "b"], "y"), {"valid": "1/3"}, ["values of column 'b' share row 0"]),
            (few, Choice(["a"]), {"valid": "1/3"}, ["no label"]),
            (good, Choice(["a", "y"], "y"), {}, ["'y' is read from the label's column"]),
            (good, Choice(["a"], "y", time="t", time_format="unix_ms"), {"valid": "0"},
             ["seconds read as milliseconds"])):
        caplog.clear()
        found = problems_of(tmp_path, text, choice, **options)
        assert len(found) == len(words), found
        assert all(w in f for w, f in zip(words, found, strict=True))
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert warned == [f"warning: {f}" for f in found]
    done = run_here("preprocess", "csv", str(tmp_path / "log.csv"), "--sparse", "a", "-o",
                    str(tmp_path / "new"))
    assert done.returncode == 0 and "warning: the log has no label" in done.stderr
    assert "problems: 1" in done.stdout


@pytest.mark.parametrize("options", [
    {"min_count": 0}, {"max_bad": -1}, {"max_rows": 1}, {"row_group_rows": 0}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        PreprocessOptions(**options)  # type: ignore[arg-type]


def test_logs_without_usable_rows(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidInputError, match="at least one row"):
        preprocess(KAGGLE, [str(tmp_path / "empty")], tmp_path / "out")
    (tmp_path / "test.txt").write_text("\t".join(["1"] * 39) + "\n")
    with pytest.raises(FileFormatError, match=r"tsv \(40 columns\)"):
        preprocess(KAGGLE, [str(tmp_path / "test.txt")], tmp_path / "out")
    with pytest.raises(InvalidInputError, match="well-formed rows"):
        preprocess(KAGGLE, [str(tmp_path / "test.txt")], tmp_path / "out",
                   PreprocessOptions(max_bad=5, layout="tsv"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "test.txt"]


def test_analysis_of_a_folder_is_exact_and_in_hotness_order(tmp_path: Path) -> None:
    rows = invent(700)
    manifest = preprocess(KAGGLE, [train_log(tmp_path, rows)], tmp_path / "out",
                          PreprocessOptions(row_group_rows=100, part_rows=250))
    stats = analyze_folder(tmp_path / "out")
    assert stats.num_samples == 600 and stats.ids_in_hotness_order
    for c in range(26):
        ids, values = expected_ids(rows, 600, c + 14, 2)
        table = stats.tables[f"C{c + 1}"]
        assert table.num_rows == len(values) + 1
        counts = counts_by(table.head_ids, table.head_counts)
        assert counts == Counter(ids[:600])
        after_row_0 = [i for i in table.head_ids.tolist() if i]
        assert after_row_0 == sorted(after_row_0), "ids beyond row 0 ascend as counts descend"
        assert [b.label for b in table.buckets] == [
            f"day {d} of log {manifest['job'][:8]}" for d in range(6)]
        for day, bucket in enumerate(table.buckets):
            assert counts_by(bucket.ids, bucket.counts) == Counter(
                ids[day * 100:(day + 1) * 100])
        assert (table.length_values.tolist(), table.length_counts.tolist()) == ([1], [600])


def test_damaged_folders_are_one_clear_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    preprocess(KAGGLE, [train_log(tmp_path, 70)], out)
    part = out / "train" / "part-00000-000.parquet"
    manifest = json.loads((out / "manifest.json").read_text())
    table = pq.read_table(part)

    def expect(words: str) -> None:
        with pytest.raises(OperError, match=words):
            analyze_folder(out)

    pq.write_table(table.drop_columns(["C3"]), part)
    expect("C3")
    pq.write_table(table.set_column(2 + 13, "C1", [[99999] * 60]), part)
    expect("99999")
    pq.write_table(table.set_column(1, "day", [[7] * 60]), part)
    expect("day")
    pq.write_table(table.set_column(2 + 13, "C1", [[None] + [1] * 59]), part)
    expect("none null")
    pq.write_table(table.slice(5), part)
    expect("train rows=55")
    part.write_bytes(part.read_bytes()[:1000])
    expect("complete Parquet file")
    part.unlink()
    expect("Parquet parts")
    for change, words in (({"version": 9}, "version"), ({"kind": "x"}, "kind"),
                          ({"tables": {}}, "manifest")):
        (out / "manifest.json").write_text(json.dumps({**manifest, **change}))
        expect(words)
    (out / "manifest.json").write_text("{")
    expect("JSON")
    (out / "manifest.json").unlink()
    expect("oper preprocess")


CARDINALITIES = [175, 386, 5520, 4032, 56, 7, 3184, 93, 3, 2986, 2084, 5283, 1725, 24, 2035, 4723,
                 9, 1149, 546, 3, 5036, 7, 12, 2524, 39, 1938]


def test_known_numbers_of_the_real_log(real_log: Path, tmp_path: Path) -> None:
    options = PreprocessOptions(min_count=1, valid="0")
    manifest = preprocess(KAGGLE, [str(real_log)], tmp_path / "out", options)
    labels = pq.read_table(tmp_path / "out" / "train", columns=["label"])["label"].to_numpy()
    assert labels.size == 10_000 and labels.mean() == 0.2182
    stats = analyze_folder(tmp_path / "out")
    for c, expected in enumerate(CARDINALITIES):
        table = manifest["tables"][f"C{c + 1}"]
        # The published numbers do not count the missing value; `num_distinct` does.
        assert table["num_distinct"] - (table["missing_id"] > 0) == expected
        assert table["num_rows"] == table["num_distinct"] + 1
        assert stats.tables[f"C{c + 1}"].num_touched_rows == table["num_distinct"]
        assert stats.tables[f"C{c + 1}"].num_accesses == 10_000
    assert skew(stats.tables["C1"]).hottest > 0.3


def test_the_real_log_with_the_recipe_as_it_is(real_log: Path, tmp_path: Path) -> None:
    manifest = preprocess(KAGGLE, [str(real_log)], tmp_path / "out")
    rows = [line.split("\t") for line in real_log.read_text().split("\n")[:-1]]
    check_folder(tmp_path / "out", rows, 2, 10_000 // 7)
    assert manifest["bad_rows"]["count"] == 0


def test_more_than_a_thousand_files_stay_in_order(tmp_path: Path) -> None:
    made(tmp_path, "u\n" + "".join(f"{k}\n" for k in range(1100)), Choice(["u:int"]), min_count=1,
         valid="0", part_rows=1, row_group_rows=1)
    assert len(list((tmp_path / "out" / "train").iterdir())) == 1100
    assert encoded(tmp_path / "out", "u") == list(range(1, 1101))


def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are appended too late must not seem to be part of the output, now or later."""
    log, choice, write = tmp_path / "log.csv", Choice(sparse=["u"], label="l"), Stage.write

    def read_then_append(stage: Stage, *args: Any) -> None:
        write(stage, *args)
        with log.open("a") as file:
            file.write("1,8\n" * 20)

    monkeypatch.setattr(Stage, "write", read_then_append)
    with pytest.raises(InvalidInputError, match=r"changed while they were read.*log\.csv"):
        made(tmp_path, "l,u\n" + "0,7\n" * 20, choice)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["log.csv"]
    manifest = preprocess(generic_recipe("csv", choice), log, tmp_path / "out")
    assert sum(manifest["rows"].values()) == 40


def test_other_labels_of_an_array_are_another_log(tmp_path: Path) -> None:
    recipe = recipe_from_dict({"name": "arrays", "format": "npy", "column": [
        {"name": "label", "kind": "label"}, {"name": "x", "kind": "dense", "parse": "float"},
        {"name": "u", "kind": "sparse", "parse": "int"}]})
    for name, values in (("sparse", np.ones((4, 1), np.int64)), ("dense", np.ones((4, 1))),
                         ("labels", np.zeros((4, 1)))):
        np.save(tmp_path / f"day_{name}.npy", values)
    preprocess(recipe, tmp_path / "day_sparse.npy", tmp_path / "out")
    np.save(tmp_path / "day_labels.npy", np.ones((4, 1)))
    with pytest.raises(InvalidInputError, match="earlier output"):
        preprocess(recipe, tmp_path / "day_sparse.npy", tmp_path / "out")
