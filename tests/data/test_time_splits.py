"""Logs in order of time: splits by time, and sequences of users."""

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from oper.data import (
    Folder,
    Loader,
    LoaderOptions,
    PreprocessOptions,
    load_recipe,
    preprocess,
    write_sequences,
)
from oper.data.folder import SPLITS
from oper.data.generic import Choice
from oper.data.preprocessing import sequences, staging, writing
from oper.data.recipe import recipe_from_dict
from oper.data.vocabulary import merging
from oper.data.vocabulary.finished import FinishedVocabulary
from oper.errors import InvalidInputError
from tests import forked
from tests.data.loader_support import decoded, digest, interrupted, made
from tests.support import run_command

TWEETS = load_recipe("movietweetings")
START = 1_400_000_000


def write(path: Path, times: np.ndarray) -> str:
    """Write a log with one row per time; the item is the index of the row."""
    path.write_text("".join(f"{k % 7}::{k}::9::{t}\n" for k, t in enumerate(times.tolist())))
    return str(path)


@pytest.mark.parametrize("memory", [merging.MEMORY_BYTES, 5000])
def test_a_split_sees_every_minute_of_the_log(tmp_path: Path, memory: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_rows_are_in_order_of_time_throughout_each_part(tmp_path: Path, case: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """For any sizes of chunks, spans and units; rows with equal times keep the order of the log."""
    recipe, times = recipe_from_dict(COLUMNS), CASES[case]
    text = "y,t,x,row,few,bag\n" + "".join(
        f"{k % 2},{t},{k / 2},{k or ''},{'abc'[k % 3] * (k % 4 > 0)},{'|'.join('123'[:k % 4])}\n"
        for k, t in enumerate(times.tolist()))
    options = {"valid": "0.2", "test": "0.1", "row_group_rows": 64}
    made(tmp_path, text, recipe, "whole", **options)
    monkeypatch.setattr(staging, "piece_rows", lambda *_: 150)
    monkeypatch.setattr(writing, "piece_rows", lambda *_: 150)
    made(tmp_path, text, recipe, "pieces", unit_bytes=20_000, part_rows=400, **options)
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


def test_a_log_split_by_time_does_not_depend_on_workers_or_interruptions(tmp_path: Path) -> None:
    log = write(tmp_path / "ratings.dat", CASES["shuffled"])
    options = PreprocessOptions(unit_bytes=9_000, part_rows=300, row_group_rows=64)
    preprocess(TWEETS, [log], tmp_path / "one", options)
    preprocess(TWEETS, [log], tmp_path / "three", replace(options, num_workers=3))
    assert digest(tmp_path / "one") == digest(tmp_path / "three")
    for more in (2, 3):
        with interrupted("_write", more - 1, finishes=True):
            preprocess(TWEETS, [log], tmp_path / "again", options)
    preprocess(TWEETS, [log], tmp_path / "again", options)
    assert digest(tmp_path / "again") == digest(tmp_path / "one")


@pytest.mark.parametrize("by", ["time", "rows"])
@pytest.mark.parametrize("options", [{}, {"hash_rows": 4}])
def test_a_column_whose_bags_are_empty_throughout_the_training_part(
    tmp_path: Path, by: str, options: dict[str, Any]
) -> None:
    """A finished vocabulary, none of whose values the training part uses, is accepted, too."""
    recipe = recipe_from_dict(COLUMNS | {"split": {"by": by}})
    text = "y,t,x,row,few,bag\n" + "".join(
        f"{k % 2},{START + 60 * k},{k},{k % 5},a,{'7|7' if k >= 95 else ''}\n" for k in range(100))
    manifest = made(tmp_path, text, recipe, valid="0.1", **options)
    assert manifest["rows"] == {"train": 90, "valid": 10, "test": 0}
    assert [len(x) for s in SPLITS[:2] for x in decoded(tmp_path / "out", s)["bag"]] == (
        [0] * 95 + [2] * 5)
    if options:
        return
    assert manifest["tables"]["bag"]["num_rows"] == 1
    assert any("'bag'" in x and "training part has none" in x for x in manifest["problems"])
    again = made(tmp_path, text, recipe, "again", valid="0.1", vocabulary=tmp_path / "out")
    assert again["unseen"]["bag"] == {"values": 0, "accesses": 0, "share": 0.0}


# ---- sequences of users --------------------------------------------------------------------------

ROWS = 900


@pytest.fixture(scope="module", params=[True, False], ids=["times", "rows"])
def events(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Events of 30 users, of missing users and of users seen once; column `n` numbers the events.
    """
    draw = random.Random(1)
    folder = tmp_path_factory.mktemp("events")
    lines = ["y,n,user,item,kind,tags,t"]
    for k in range(ROWS):
        user = "" if k % 50 == 7 else f"once{k}" if k % 50 == 9 else f"u{draw.randrange(30)}"
        lines.append(f"{k % 2},{k},{user},i{draw.randrange(40)},k{k % 3},a|b,{k // 4 * 60}")
    if request.param:  # preprocessing sorts a log that is split by time
        lines[1:] = draw.sample(lines[1:], ROWS)
    made(folder, "\n".join(lines) + "\n", Choice(
        ["user", "item", "kind", "tags:|"], "y", ["n"], **({"time": "t"} if request.param else {})),
        valid="1/5", row_group_rows=64, part_rows=200)
    return folder / "out"


def expected(folder: Path, split: str) -> dict[int, list[dict[str, Any]]]:
    """Return the events of each user, computed row by row from the files."""
    found: dict[int, list[dict[str, Any]]] = {}
    unknown = {0, Folder.open(folder).missing_ids["user"]}
    assert len(unknown) == 2
    for row in pq.read_table(folder / split).to_pylist():
        if row["user"] not in unknown:
            found.setdefault(row["user"], []).append(row)
    return found


@pytest.mark.parametrize("at_once", [1 << 20, 100])
@pytest.mark.parametrize("limits", [{}, {"max_length": 7}, {"min_length": 5, "max_length": 6}])
def test_every_user_in_order_of_time(events: Path, tmp_path: Path, limits: dict[str, int],
                                     at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", at_once)
    manifest = write_sequences(events, tmp_path / "out", "user", columns=["item", "kind"], **limits)
    assert manifest["split"]["order"] == "by user"
    assert manifest["columns"]["sparse"] == ["user", "item", "kind"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    for split in ("train", "valid"):
        users = {u: rows for u, rows in expected(events, split).items()
                 if len(rows) >= limits.get("min_length", 1)}
        kept = 0
        loader = Loader(tmp_path / "out", split, LoaderOptions(8, rank=0, world_size=1))
        seen: set[int] = set()
        for batch in loader:
            kjt = batch.sparse_features
            bags = {k: [x.tolist() for x in kjt[k].to_dense()]
                    for k in ("user", "item", "kind")}
            for b, (user,) in enumerate(bags["user"]):
                rows = users[user][-limits.get("max_length", ROWS):]
                assert user not in seen
                seen.add(user)
                kept += len(rows)
                when = [r[loader.folder.time or "n"] for r in rows]
                assert when == sorted(when)
                for name in ("item", "kind"):
                    assert bags[name][b] == [r[name] for r in rows]
                assert batch.labels[b] == rows[-1][loader.folder.label]
                assert batch.dense_features[b].tolist() == [rows[-1]["n"]]
        assert seen == set(users) and manifest["rows"][split] == len(users) > 5
        assert manifest["sequences"]["events"][split] == [kept, Folder.open(events).rows[split]]


def test_a_part_without_known_users(events: Path) -> None:
    folder = Folder.open(events)
    made = sequences._Sequences(folder, "user", ("item",), None, 1)
    table = folder.read_part(folder.parts("train")[0], made.read)
    unknown = table.filter(pc.less_equal(table["user"], 0))
    assert unknown.num_rows and made.make("train", unknown).num_rows == 0
    assert made.make("train", unknown).schema == made.make("train", table).schema


def test_the_tables_are_those_of_the_events(events: Path, tmp_path: Path) -> None:
    write_sequences(events, tmp_path / "out", "user", columns=["item"], compression="zstd")
    old, new = Folder.open(events), Folder.open(tmp_path / "out")
    assert new.num_rows == old.num_rows[:2] and new.multi_hot == ("item",)
    assert new.manifest["numbering"] == old.manifest["numbering"]
    assert not new.ids_in_hotness_order
    assert FinishedVocabulary.open(tmp_path / "out").columns == ("user", "item")
    if old.time:
        last = {u: rows[-1][old.time] for u, rows in expected(events, "train").items()}
        assert dict(zip(*(pq.read_table(tmp_path / "out" / "train")[n].to_pylist()
                          for n in ("user", old.time)), strict=True)) == last


def test_events_of_rare_users_are_not_in_memory_together(events: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare users share an id, so all their events would be in one temporary file."""
    monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", 100)
    made = sequences._Sequences(Folder.open(events), "user", ("item",), None, 1)
    tables = list(sequences._by_user(made, "train", tmp_path))
    assert len(tables) > 1
    assert {u for t in tables for u in t["user"].to_pylist()} == set(expected(events, "train"))


def test_users_that_share_hashed_rows_are_refused(tmp_path: Path) -> None:
    """Their events would form one sequence; hashed users without collisions are accepted."""
    text = "user,item\n" + "".join(f"u{k % 30},i{k % 7}\n" for k in range(300))
    for num_rows in (10, 1 << 20):
        folder = tmp_path / f"{num_rows}"
        manifest = made(tmp_path, text, Choice(["user", "item"]), folder.name, hash_rows=num_rows)
        shared = manifest["tables"]["user"]["num_collisions"]
        assert bool(shared) == (num_rows == 10)
        if shared:
            with pytest.raises(InvalidInputError, match=f"a row={shared}, expected none"):
                write_sequences(folder, tmp_path / "out", "user")
        else:
            assert write_sequences(folder, tmp_path / "out", "user")["rows"]["train"] == 30


def test_a_full_disk_is_named(events: Path, tmp_path: Path) -> None:
    """The file size is limited; no files are left behind."""
    program = ("import resource, signal, sys; from oper.data import write_sequences; "
               "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
               "write_sequences(sys.argv[1], sys.argv[2], 'user', columns=['item'])")
    done = forked.run("-c", program, str(events), str(tmp_path / "out"))
    message = done.stderr.splitlines()[-1]
    assert message.startswith("oper.errors.InvalidInputError: cannot write sequences: output=")
    assert str(tmp_path / "out") in message and "File too large" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options, match", [
    ({"by": "tags"}, "tags"), ({"by": "nobody"}, "nobody"), ({"by": "user"}, "tags"),
    ({"by": "user", "columns": ["n"]}, "'n'"),
    ({"by": "user", "columns": ["item"], "max_length": 0}, "max_length"),
    ({"by": "user", "columns": ["item"], "min_length": 0}, "min_length")])
def test_invalid_arguments_are_refused(events: Path, tmp_path: Path, options: dict[str, Any],
                                       match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        write_sequences(events, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_command(events: Path, tmp_path: Path, printed: Callable[..., str],
                     capsys: pytest.CaptureFixture[str]) -> None:
    out, none = tmp_path / "out", tmp_path / "none"
    words = ("sequences", events, "--by", "user", "--columns")
    text = printed(*words, "item,kind", "-o", out)
    rows = Folder.open(out).rows
    assert f"train: {rows['train']} sequences with" in text and f"written: {out}" in text
    printed("analyze", out, "-o", tmp_path / "s.npz")
    run_command(*words, "item", "-o", none, "--min-length", 1000)
    assert "warning: no user has a sequence in the train part" in capsys.readouterr().err
    assert len(Folder.open(none).manifest["problems"]) == 2
    with pytest.raises(InvalidInputError, match="use a URL"):
        run_command("sequences", "s3://bucket/events", "--by", "user", "-o", none)
    with pytest.raises(InvalidInputError, match="a folder that does not exist"):
        run_command(*words, "item", "-o", out)
