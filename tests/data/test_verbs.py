"""Subcommands run from the command line."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from oper.data import verbs
from oper.errors import InvalidInputError
from oper.stats import AccessStats
from tests.support import run_here


def run(verb: str, *words: str) -> int:
    parser = argparse.ArgumentParser(prog=f"oper {verb}")
    getattr(verbs, f"configure_{verb}")(parser)
    return int(getattr(verbs, f"run_{verb}")(parser.parse_args(words)))


def test_preprocess_and_analyze(
    tmp_path: Path, invent: Any, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = invent(140)
    rows[3][1] = "?"
    path = str(write(tmp_path / "train.txt", rows))
    out, stats = str(tmp_path / "out"), str(tmp_path / "log.stats")
    assert run("preprocess", "criteo-kaggle", path, "-o", out, "--max-bad", "1") == 0
    text = capsys.readouterr()
    assert "120 train, 19 valid, 1 malformed" in text.out and out in text.out
    assert "row 4, column I1: '?'" in text.err
    assert run("analyze", out, "-o", stats) == 0
    text = capsys.readouterr()
    assert "120 samples" in text.out and "C26" in text.out and stats in text.out
    assert text.err == ""
    assert AccessStats.load(stats).num_samples == 120


@pytest.mark.parametrize("words", [["--sparse", "a"], ["--threshold", "0"], ["--separator", ";"],
                                   ["--join-on", "a"], ["--cross", "a*b=3"]])
def test_a_recipe_names_its_columns_itself(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(InvalidInputError, match=rf"options=\['{words[0]}'\].*leave them out"):
        run("preprocess", "criteo-kaggle", "log", "-o", str(tmp_path / "out"), *words)


def test_json_is_one_object_on_stdout(
    tmp_path: Path, invent: Any, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "train.txt", invent(70)))
    out, stats = str(tmp_path / "out"), str(tmp_path / "log.stats")
    run("preprocess", "criteo-kaggle", path, "-o", out, "--json", "--min-count", "1",
        "--valid", "0.1", "--max-rows", "20")
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["rows"] == {"train": 63, "valid": 7, "test": 0} and manifest["min_count"] == 1
    run("analyze", out, "-o", stats, "--json", "--memory", "1KiB")
    summary = json.loads(capsys.readouterr().out)
    assert summary["output"] == stats and summary["ids_in_hotness_order"] is True
    assert summary["tables"]["C1"]["num_rows"] == 20
    assert summary["num_accesses"] == 63 * 26


def test_statistics_of_counts_and_of_parts(
    tmp_path: Path, invent: Any, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = tmp_path / "counts.csv"
    counts.write_text("field,value,count\nsite,a,70\nsite,b,20\n")
    stats = str(tmp_path / "c.stats")
    assert run("analyze", str(counts), "-o", stats, "--counts", "--samples", "100", "--cut", "10",
               "--rows", "site=5") == 0
    assert AccessStats.load(stats).tables["site"].num_touched_rows == 5
    path = str(write(tmp_path / "train.txt", invent(140)))
    for k in range(2):
        run("preprocess", "criteo-kaggle", path, "-o", str(tmp_path / f"out{k}"))
        run("analyze", str(tmp_path / f"out{k}"), "-o", str(tmp_path / f"{k}.stats"))
    assert run("analyze", "--merge", str(tmp_path / "0.stats"), str(tmp_path / "1.stats"), "-o",
               stats) == 0
    assert AccessStats.load(stats).num_samples == 240
    for words, name in ((["x", "y", "-o", stats], "--merge"),
                        (["--merge", "x", "y", "x", "-o", stats], r"files=\['x'\]"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site"], "--rows"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site=\u00b2"], "--rows"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site=5,site=6"],
                         "each field once")):
        with pytest.raises(InvalidInputError, match=name):
            run("analyze", *words)


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    spec = tmp_path / "w.toml"
    spec.write_text('name = "two"\ndays = 2\n[[table]]\nname = "t"\nrows = 50\nlength = 3\n')
    stats = str(tmp_path / "w.stats")
    assert run("generate", str(spec), "-o", stats, "--samples", "100", "--lookups",
               str(tmp_path / "out")) == 0
    assert "synthetic, two" in capsys.readouterr().out
    found = AccessStats.load(stats)
    assert found.tables["t"].num_accesses == 300 and len(found.tables["t"].buckets) == 2
    table = pq.read_table(tmp_path / "out" / "lookups.parquet")
    assert table.num_rows == 100 and table.schema.metadata[b"synthetic"] == b"true"
    with pytest.raises(InvalidInputError, match="lookups"):
        run("generate", str(spec), "-o", stats, "--lookups", str(tmp_path / "out"))
    # Commands that need labels refuse the folder and say that `oper generate` wrote it.
    for words in (["analyze", str(tmp_path / "out"), "-o", stats],
                  ["train", "--data", str(tmp_path / "out"), "--out", str(tmp_path / "run")]):
        done = run_here(*words)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "oper generate" in done.stderr and "labels" in done.stderr


def test_an_output_that_cannot_be_written_is_reported_before_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "_stats", None)
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "stats"):
        with pytest.raises(InvalidInputError, match="a file, not a folder"):
            run("analyze", "data", "-o", str(out))
    with pytest.raises(TypeError):  # accepted: the counting, which is None here, is called
        run("analyze", "data", "-o", os.devnull)


def test_capacity_of_row_numbers_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rare values share row 0, which is not a single key; without them there is no warning."""
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"u{k},i{k % 3}\n" for k in range(30)))
    words = ["csv", str(log), "--sparse", "user,item", "--valid", "0", "-o", str(tmp_path / "out")]
    run("preprocess", *words)
    stats = str(tmp_path / "stats")
    assert run("analyze", str(tmp_path / "out"), "-o", stats, "--capacity", "9") == 0
    assert [x for x in capsys.readouterr().err.splitlines() if "--capacity" in x] == [
        "warning: --capacity takes row 0 of 'user', which rare and unseen values share, for one "
        "key: count a folder of --raw-ids"]
    run("preprocess", *words, "--force", "--raw-ids")
    assert run("analyze", str(tmp_path / "out"), "-o", stats, "--capacity", "9") == 0
    assert "--capacity" not in capsys.readouterr().err


def test_urls_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("id\n1\n2\n")
    spec = tmp_path / "w.toml"
    spec.write_text('name = "two"\n[[table]]\nname = "t"\nrows = 50\nlength = 3\n')
    before = sorted(p.name for p in tmp_path.iterdir())
    csv = ["csv", "log.csv", "--sparse", "id"]
    for verb, words in (("preprocess", [*csv, "-o", "nowhere://bucket/out"]),
                        ("preprocess", ["csv", "nowhere://b/log", "--sparse", "id", "-o", "out"]),
                        ("analyze", ["nothing", "-o", "s3://bucket/stats"]),
                        ("generate", ["w.toml", "-o", "hdfs://bucket/stats"]),
                        ("generate", ["w.toml", "-o", "stats", "--lookups", "s3://bucket/l"])):
        with pytest.raises(InvalidInputError, match=r"URL.*://"):
            run(verb, *words)
        assert sorted(p.name for p in tmp_path.iterdir()) == before
