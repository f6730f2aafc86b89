"""Logs that are split by time, against a direct computation."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.data import Folder, PreprocessOptions, load_recipe, preprocess
from oper.data.folder import SPLITS
from oper.data.preprocessing import run as preprocessing, staging, writing
from oper.data.recipe import recipe_from_dict
from oper.data.vocabulary import merging
from oper.errors import InvalidInputError
from tests.data.folder_support import decoded, digest

TWEETS = load_recipe("movietweetings")
START = 1_400_000_000


def write(path: Path, times: np.ndarray) -> str:
    """Write a log with one row per time; the item is the index of the row."""
    path.write_text("".join(f"{k % 7}::{k}::9::{t}\n" for k, t in enumerate(times.tolist())))
    return str(path)


@pytest.mark.parametrize("memory", [merging._MEMORY_BYTES, 5000])
def test_a_split_sees_every_minute_of_the_log(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of minutes, including those of runs spilled to disk, give the same parts."""
    rng = np.random.default_rng(1)
    times = START + 60 * rng.permutation(3000) + rng.integers(0, 60, 3000)
    log = write(tmp_path / "ratings.dat", times)
    monkeypatch.setattr(merging, "_SLICE", 400)
    monkeypatch.setattr(merging.RunMerger.__init__, "__defaults__", (memory,))
    manifest = preprocess(TWEETS, [log], tmp_path / "out", PreprocessOptions(
        valid="0.2", test="0.1", unit_bytes=9_000))
    assert manifest["rows"] == {"train": 2100, "valid": 600, "test": 300}
    ordered = np.sort(times)
    assert manifest["split"]["first_valid_second"] == ordered[2100] // 60 * 60
    assert manifest["split"]["valid"] == str(Fraction(1, 5))


def test_more_buckets_than_their_column_can_number_are_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "ratings.dat", START + np.array([0, 86_400, 86_400 * 12_000]))
    recipe = replace(TWEETS, buckets=1, bucket_seconds=3600)
    with pytest.raises(InvalidInputError, match=r"at most 32768.*bucket_seconds"):
        preprocess(recipe, [log], tmp_path / "out", PreprocessOptions(valid="0", test="0"))
    assert not (tmp_path / "out").exists()


COLUMNS = {"name": "x", "separator": ",", "header": True, "column": [
    {"name": "y", "kind": "label"}, {"name": "t", "kind": "time", "parse": "unix"},
    {"name": "x", "kind": "dense", "parse": "float"},
    {"name": "row", "kind": "sparse", "parse": "int"},
    {"name": "few", "kind": "sparse", "parse": "string"},
    {"name": "bag", "kind": "sparse", "parse": "int", "multi": "|"}],
    "split": {"by": "time"}, "vocabulary": {"min_count": 1}}
CASES = {  # seconds of 3,000 rows in the order of the log
    "shuffled": START + np.random.default_rng(0).permutation(3000) * 7,
    "by user": START + np.tile(np.arange(100) * 211, 30),
    "in order": START + np.arange(3000) // 3,
    "one minute": START // 60 * 60 + np.random.default_rng(1).integers(0, 60, 3000),
    "one second": np.full(3000, START),
    "sparse": START + np.random.default_rng(2).integers(0, 10**9, 3000),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_in_order_of_time_throughout_each_part(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any sizes of chunks, spans and units; rows with equal times keep the order of the log."""
    recipe, times = recipe_from_dict(COLUMNS), CASES[case]
    log = tmp_path / "log.csv"
    log.write_text("y,t,x,row,few,bag\n" + "".join(
        f"{k % 2},{t},{k / 2},{k or ''},{'abc'[k % 3] * (k % 4 > 0)},{'|'.join('123'[:k % 4])}\n"
        for k, t in enumerate(times.tolist())))
    options = PreprocessOptions(valid="0.2", test="0.1", row_group_rows=64)
    preprocess(recipe, [str(log)], tmp_path / "whole", options)
    monkeypatch.setattr(staging, "piece_rows", lambda *_: 150)
    monkeypatch.setattr(writing, "piece_rows", lambda *_: 150, raising=False)
    preprocess(recipe, [str(log)], tmp_path / "pieces", replace(
        options, unit_bytes=20_000, part_rows=400))
    order = np.argsort(times, kind="stable")
    for name in ("whole", "pieces"):
        rows = Folder.open(tmp_path / name).rows
        parts = [decoded(tmp_path / name, s) for s in SPLITS if rows[s]]
        table = {column: [x for part in parts for x in part[column]] for column in parts[0]}
        assert table["t"] == times[order].tolist()
        assert table["x"] == (order / 2).tolist()
        assert table["y"] == (order % 2).tolist()
        train = rows["train"]
        assert [v or 0 for v in table["row"][:train]] == order[:train].tolist()
        assert table["few"] == ["abc"[k % 3] if k % 4 else None for k in order.tolist()]
        assert table["bag"] == [[1, 2, 3][:k % 4] for k in order.tolist()]
    assert digest(tmp_path / "whole" / "vocabulary") == digest(tmp_path / "pieces" / "vocabulary")


def test_a_log_split_by_time_does_not_depend_on_workers_or_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "ratings.dat", CASES["shuffled"])
    options = PreprocessOptions(unit_bytes=9_000, part_rows=300, row_group_rows=64)
    preprocess(TWEETS, [log], tmp_path / "one", options)
    preprocess(TWEETS, [log], tmp_path / "three", replace(options, num_workers=3))
    assert digest(tmp_path / "one") == digest(tmp_path / "three")
    original, written = preprocessing.Job._write, []

    def write_some(job: Any, k: int, task: Any) -> None:
        original(job, k, task)
        written.append(k)
        if len(written) in (2, 5):
            raise KeyboardInterrupt

    monkeypatch.setattr(preprocessing.Job, "_write", write_some)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            preprocess(TWEETS, [log], tmp_path / "again", options)
    preprocess(TWEETS, [log], tmp_path / "again", options)
    assert digest(tmp_path / "again") == digest(tmp_path / "one")


@pytest.mark.parametrize("by", ["time", "rows"])
@pytest.mark.parametrize("options", [{}, {"hash_rows": 4}])
def test_a_column_whose_bags_are_empty_throughout_the_training_part(
    tmp_path: Path, by: str, options: dict[str, Any]
) -> None:
    """Also with a finished vocabulary, none of whose values the training part then uses."""
    recipe = recipe_from_dict(COLUMNS | {"split": {"by": by}})
    log = tmp_path / "log.csv"
    log.write_text("y,t,x,row,few,bag\n" + "".join(
        f"{k % 2},{START + 60 * k},{k},{k % 5},a,{'7|7' if k >= 95 else ''}\n" for k in range(100)))
    manifest = preprocess(recipe, [str(log)], tmp_path / "out",
                          PreprocessOptions(valid="0.1", **options))
    assert manifest["rows"] == {"train": 90, "valid": 10, "test": 0}
    assert [len(x) for s in SPLITS[:2] for x in decoded(tmp_path / "out", s)["bag"]] == (
        [0] * 95 + [2] * 5)
    if options:
        return
    assert manifest["tables"]["bag"]["num_rows"] == 1
    assert any("'bag'" in x and "training part has none" in x for x in manifest["problems"])
    again = preprocess(recipe, [str(log)], tmp_path / "again", PreprocessOptions(
        valid="0.1", vocabulary=tmp_path / "out"))
    assert again["unseen"]["bag"] == {"values": 0, "accesses": 0, "share": 0.0}
