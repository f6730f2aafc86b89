"""Sequences of users: rows of bags in order of time, which the loader can read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from oper.data import Folder, Loader, LoaderOptions, PreprocessOptions, preprocess, write_sequences
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing import sequences
from oper.data.vocabulary.finished import FinishedVocabulary
from oper.errors import InvalidInputError
from tests import forked
from tests.data.test_verbs import run

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
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    choice = Choice(["user", "item", "kind", "tags:|"], "y", ["n"],
                    **({"time": "t"} if request.param else {}))
    preprocess(generic_recipe("csv", choice), [str(folder / "log.csv")], folder / "out",
               PreprocessOptions(valid="1/5", row_group_rows=64, part_rows=200))
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


def test_events_of_rare_users_are_not_held_together(
    events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare users share an id, so all their events would be in one temporary file."""
    monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", 100)
    made = sequences._Sequences(Folder.open(events), "user", ("item",), None, 1)
    tables = list(sequences._by_user(made, "train", tmp_path))
    assert len(tables) > 1
    assert {u for t in tables for u in t["user"].to_pylist()} == set(expected(events, "train"))


def test_users_that_share_hashed_rows_are_refused(tmp_path: Path) -> None:
    """Their events would form one sequence; hashed users without collisions are accepted."""
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"u{k % 30},i{k % 7}\n" for k in range(300)))
    recipe = generic_recipe("csv", Choice(["user", "item"]))
    for num_rows in (10, 1 << 20):
        folder = tmp_path / f"{num_rows}"
        manifest = preprocess(recipe, [str(log)], folder, PreprocessOptions(hash_rows=num_rows))
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
def test_what_makes_no_sense(events: Path, tmp_path: Path, options: dict[str, Any], match: str
                             ) -> None:
    with pytest.raises(InvalidInputError, match=match):
        write_sequences(events, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_verb(events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert run("sequences", str(events), "--by", "user", "--columns", "item,kind", "-o", out) == 0
    text = capsys.readouterr().out
    rows = Folder.open(out).rows
    assert f"train: {rows['train']} sequences with" in text and f"written: {out}" in text
    assert run("analyze", out, "-o", str(tmp_path / "s.npz")) == 0
    none = str(tmp_path / "none")
    run("sequences", str(events), "--by", "user", "--columns", "item", "-o", none,
        "--min-length", "1000")
    assert "warning: no user has a sequence in the train part" in capsys.readouterr().err
    assert len(Folder.open(none).manifest["problems"]) == 2
    with pytest.raises(InvalidInputError, match="use a URL"):
        run("sequences", "s3://bucket/events", "--by", "user", "-o", none)
    with pytest.raises(InvalidInputError, match="a folder that does not exist"):
        run("sequences", str(events), "--by", "user", "--columns", "item", "-o", out)
