"""Subcommands run from the command line; dry runs; derived columns."""

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess, verbs
from oper.data.generic import Choice, generic_recipe
from oper.errors import FileFormatError, InvalidInputError, OperError
from oper.stats import AccessStats
from tests.data.loader_support import decoded, invent, made, train_log
from tests.support import ROOT, run_command, run_here


def test_preprocess_and_analyze(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = invent(140)
    rows[3][1] = "?"
    out, stats = str(tmp_path / "out"), str(tmp_path / "log.stats")
    assert run_command("preprocess", "criteo-kaggle", train_log(tmp_path, rows), "-o", out,
                       "--max-bad", 1) == 0
    text = capsys.readouterr()
    assert "120 train, 19 valid, 1 malformed" in text.out and out in text.out
    assert "row 4, column I1: '?'" in text.err
    assert run_command("analyze", out, "-o", stats) == 0
    text = capsys.readouterr()
    assert "120 samples" in text.out and "C26" in text.out and stats in text.out
    assert text.err == ""
    assert AccessStats.load(stats).num_samples == 120


@pytest.mark.parametrize("words", [["--sparse", "a"], ["--threshold", "0"], ["--separator", ";"],
                                   ["--join-on", "a"], ["--cross", "a*b=3"]])
def test_a_recipe_names_its_columns_itself(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(InvalidInputError, match=rf"options=\['{words[0]}'\].*leave them out"):
        run_command("preprocess", "criteo-kaggle", "log", "-o", tmp_path / "out", *words)


def test_json_is_one_object_on_stdout(printed: Callable[..., str], tmp_path: Path) -> None:
    out, stats = tmp_path / "out", tmp_path / "log.stats"
    manifest = json.loads(printed(
        "preprocess", "criteo-kaggle", train_log(tmp_path, 70), "-o", out, "--json", "--min-count",
        1, "--valid", "0.1", "--max-rows", 20))
    assert manifest["rows"] == {"train": 63, "valid": 7, "test": 0} and manifest["min_count"] == 1
    summary = json.loads(printed("analyze", out, "-o", stats, "--json", "--memory", "1KiB"))
    assert summary["output"] == str(stats) and summary["ids_in_hotness_order"] is True
    assert summary["tables"]["C1"]["num_rows"] == 20
    assert summary["num_accesses"] == 63 * 26


def test_statistics_of_counts_and_of_parts(tmp_path: Path) -> None:
    counts = tmp_path / "counts.csv"
    counts.write_text("field,value,count\nsite,a,70\nsite,b,20\n")
    stats = str(tmp_path / "c.stats")
    assert run_command("analyze", counts, "-o", stats, "--counts", "--samples", 100, "--cut", 10,
                       "--rows", "site=5") == 0
    assert AccessStats.load(stats).tables["site"].num_touched_rows == 5
    path = train_log(tmp_path, 140)
    for k in range(2):
        run_command("preprocess", "criteo-kaggle", path, "-o", tmp_path / f"out{k}")
        run_command("analyze", tmp_path / f"out{k}", "-o", tmp_path / f"{k}.stats")
    assert run_command("analyze", "--merge", tmp_path / "0.stats", tmp_path / "1.stats", "-o",
                       stats) == 0
    assert AccessStats.load(stats).num_samples == 240
    for words, name in ((["x", "y", "-o", stats], "--merge"),
                        (["--merge", "x", "y", "x", "-o", stats], r"files=\['x'\]"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site"], "--rows"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site=\u00b2"], "--rows"),
                        ([str(counts), "-o", stats, "--counts", "--rows", "site=5,site=6"],
                         "each field once")):
        with pytest.raises(InvalidInputError, match=name):
            run_command("analyze", *words)


def test_generate(printed: Callable[..., str], tmp_path: Path) -> None:
    spec = tmp_path / "w.toml"
    spec.write_text('name = "two"\ndays = 2\n[[table]]\nname = "t"\nrows = 50\nlength = 3\n')
    stats = str(tmp_path / "w.stats")
    assert "synthetic, two" in printed("generate", spec, "-o", stats, "--samples", 100, "--lookups",
                                       tmp_path / "out")
    found = AccessStats.load(stats)
    assert found.tables["t"].num_accesses == 300 and len(found.tables["t"].buckets) == 2
    table = pq.read_table(tmp_path / "out" / "lookups.parquet")
    assert table.num_rows == 100 and table.schema.metadata[b"synthetic"] == b"true"
    with pytest.raises(InvalidInputError, match="lookups"):
        run_command("generate", spec, "-o", stats, "--lookups", tmp_path / "out")
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
            run_command("analyze", "data", "-o", out)
    with pytest.raises(TypeError):  # accepted: the counting, which is None here, is called
        run_command("analyze", "data", "-o", os.devnull)


def test_capacity_of_row_numbers_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                              ) -> None:
    """Rare values share row 0, which is not a single key; without them there is no warning."""
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"u{k},i{k % 3}\n" for k in range(30)))
    words = ["preprocess", "csv", log, "--sparse", "user,item", "--valid", 0, "-o",
             tmp_path / "out"]
    analyze = ["analyze", tmp_path / "out", "-o", tmp_path / "stats", "--capacity", 9]
    run_command(*words)
    assert run_command(*analyze) == 0
    assert [x for x in capsys.readouterr().err.splitlines() if "--capacity" in x] == [
        "warning: --capacity counts row 0 of 'user', which rare and unseen values share, as one "
        "key: preprocess with --raw-ids to count them"]
    run_command(*words, "--force", "--raw-ids")
    assert run_command(*analyze) == 0
    assert "--capacity" not in capsys.readouterr().err


def test_urls_are_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            run_command(verb, *words)
        assert sorted(p.name for p in tmp_path.iterdir()) == before


# ---- dry runs ------------------------------------------------------------------------------------

CSV = "user,item,price,stars,when\n" + "".join(
    f"u{k % 7},{k % 50},{'' if k % 4 == 0 else k / 8},{k % 5 + 1},{1_600_000_000 + 600 * k}\n"
    for k in range(20_000))


@pytest.fixture
def dry_run(printed: Callable[..., str]) -> Callable[..., Any]:
    """Return a function that returns what a dry run prints."""
    return lambda *words: json.loads(printed("preprocess", *words, "--dry-run", "--json"))


def test_a_dry_run_describes_the_columns(dry_run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    before = sorted(tmp_path.iterdir())
    columns = dry_run("csv", path)["columns"]
    assert [(c["name"], c["type"]) for c in columns] == [
        ("user", "string"), ("item", "int64"), ("price", "double"), ("stars", "int64"),
        ("when", "int64")]
    assert columns[0]["distinct"] == 7 and columns[2]["missing"] == pytest.approx(0.25, abs=0.01)
    found = dry_run("csv", path, "--sparse", "user,item", "--label", "stars", "--threshold", 4,
                    "--dense", "price:log1p", "--time", "when")
    assert {c["name"]: (c["kind"], c["parse"]) for c in found["columns"]} == {
        "label": ("label", "threshold"), "time": ("time", "unix"), "price": ("dense", "float"),
        "user": ("sparse", "string"), "item": ("sparse", "string")}
    assert found["tables"]["user"]["num_rows"] == 8 and found["split"]["by"] == "time"
    assert 10_000 <= sum(found["rows"].values()) < 16_000 and found["rows"]["valid"]
    assert found["plan"]["rows"] == pytest.approx(20_000, rel=0.05)
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_reads_only_the_first_rows_of_parquet(
        dry_run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"id": range(20_000)}), path, row_group_size=10_000,
                   use_dictionary=False)
    data = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[at:at + 100] = b"x" * 100
    path.write_bytes(data)
    assert dry_run("parquet", path)["columns"][0]["distinct"] == 10_000


def test_problems_and_mistakes_are_reported(dry_run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CSV)
    found = dry_run("csv", path, "--sparse", "user")
    assert "no label" in found["problems"][0]
    done = run_here("preprocess", "csv", str(path), "--sparse", "user", "--label", "stars",
                    "--dry-run")
    assert done.returncode == 1 and "--threshold" in done.stderr
    assert run_here("preprocess", "csv", str(path), "--sparse", "user").returncode == 2
    assert run_here("preprocess", "csv", str(path), "--sparse", "user", "-o", str(tmp_path / "o"),
                    "--dry-run").returncode == 2


@pytest.mark.parametrize("kind", ["text", "gzip", "parquet"])
def test_errors_of_dry_runs_name_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not the copy of its first rows; the line is that of the file."""
    monkeypatch.chdir(tmp_path)
    Path("it's mine").mkdir()
    path = Path("it's mine", f"log.{kind}")
    bad = "user,stars\n" + "a,1\n" * 5 + "b,maybe\n" + "c,0\n" * 5
    if kind == "parquet":
        pq.write_table(pa.table({"user": ["a"] * 6, "stars": ["1"] * 5 + ["maybe"]}), path)
    else:
        path.write_bytes(gzip.compress(bad.encode()) if kind == "gzip" else bad.encode())
    words = ["parquet" if kind == "parquet" else "csv", str(path), "--sparse", "user", "--label",
             "stars"]
    messages = []
    for where in (["--dry-run"], ["-o", "out"]):
        with pytest.raises((FileFormatError, InvalidInputError), match=r"maybe|stars") as error:
            run_command("preprocess", *words, *where)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and str(path) in messages[0]


def test_partitioned_parquet_and_a_recipe(printed: Callable[..., str], dry_run: Callable[..., Any],
                                          tmp_path: Path) -> None:
    folder = tmp_path / "clicks" / "country=de"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"user": list(range(300)), "tags": [[1, 2]] * 300}),
                   folder / "part.parquet")
    found = dry_run("parquet", tmp_path / "clicks", "--sparse", "user,tags,country")
    assert found["tables"]["country"]["num_rows"] == 2 and found["tables"]["tags"]["num_rows"] == 3
    text = printed("preprocess", "criteo-kaggle", train_log(tmp_path, 140), "--dry-run")
    assert "C26" in text and "hex32" in text and "of the first rows 120 train" in text


# ---- derived columns: side tables, crosses, bins -------------------------------------------------

ALL = PreprocessOptions(valid="0", test="0", min_count=1)
ITEMS = {"i1": ("toys", "1.5", "a|b"), "i2": ("books", "", ""), "i3": ("", "8", "c")}


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, list[list[str]]]:
    rng = random.Random(3)
    rows = [[rng.choice(["u1", "u2", ""]), rng.choice([*ITEMS, "i9", ""]),
             str(rng.randint(1, 5)), rng.choice(["17", "18", "29.5", "30", ""])]
            for _ in range(300)]
    (tmp_path / "log.csv").write_text("user,item,stars,age\n" + "".join(
        ",".join(r) + "\n" for r in rows))
    (tmp_path / "items.csv").write_text("id,genre,price,tags\n" + "".join(
        f'{k},{g},{p},"{t}"\n' for k, (g, p, t) in ITEMS.items()))
    return tmp_path, rows


def test_the_command_line_joins_and_crosses(log: tuple[Path, list[list[str]]]) -> None:
    folder, rows = log
    done = run_here(
        "preprocess", "csv", str(folder / "log.csv"), "-o", str(folder / "out"), "--label", "stars",
        "--threshold", "4", "--sparse", "user,item,age:bins=18/30", "--join",
        str(folder / "items.csv"), "--join-on", "item=id", "--join-sparse", "genre,tags:|",
        "--join-dense", "price:log1p", "--cross", "user*genre=1000003", "--valid", "0",
        "--min-count", "1", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    lacking = sum(r[1] not in ITEMS for r in rows)
    assert manifest["joins"] == [{"file": str(folder / "items.csv"), "key": "item",
                                  "unmatched_rows": lacking}]
    assert manifest["columns"]["sparse"] == ["user", "item", "age", "genre", "tags", "user_x_genre"]
    assert manifest["dense_transforms"] == {"price": "log1p"}
    found = decoded(folder / "out")
    side = [ITEMS.get(r[1], ("", "", "")) for r in rows]
    assert found["label"] == [int(r[2]) >= 4 for r in rows]
    assert found["age"] == [None if not r[3] else (float(r[3]) >= 18) + (float(r[3]) >= 30)
                            for r in rows]
    assert found["genre"] == [s[0] or None for s in side]
    assert found["tags"] == [s[2].split("|") if s[2] else [] for s in side]
    np.testing.assert_allclose(found["price"], np.log1p([float(s[1] or 0) for s in side]), 1e-6)
    # Equal pairs have equal hashes; different pairs have different ones (of a million).
    pairs = list(zip([r[0] for r in rows], [s[0] for s in side], strict=True))
    assert len(set(pairs)) == len(set(found["user_x_genre"])) == len(
        set(zip(pairs, found["user_x_genre"], strict=True)))
    assert all(0 <= x < 1_000_003 for x in found["user_x_genre"])


def test_a_side_table_as_parquet_gives_the_same(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    pq.write_table(pa.table({n: [(k, *v)[j] for k, v in ITEMS.items()]
                             for j, n in enumerate(("id", "genre", "price", "tags"))}),
                   folder / "items.parquet")
    found = []
    for kind in ("csv", "parquet"):
        choice = Choice(["user", "item", "age:bins=18/30"], "stars", threshold=4.0,
                        join=str(folder / f"items.{kind}"), join_on="item=id",
                        join_sparse=["genre"], cross=["user*genre=1000003"])
        preprocess(generic_recipe("csv", choice), [str(folder / "log.csv")], folder / kind, ALL)
        found.append(decoded(folder / kind))
    assert found[0] == found[1]


def test_keys_of_a_side_table_of_another_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [17, 4, None], "genre": ["a", "b", "c"]}),
                   tmp_path / "items.parquet")
    (tmp_path / "items.csv").write_text("id,genre\n17,a\n4,b\n")
    (tmp_path / "names.csv").write_text("id,genre\n17,a\nfour,b\n")
    item = [4, 17, 5, None]
    text = "item,y\n" + "".join(f"{'' if k is None else k},1\n" for k in item)

    def joined(log: str | dict[str, Any], side: str, out: str) -> Any:
        choice = Choice(["item"], join=str(tmp_path / side), join_on="item=id",
                        join_sparse=["genre"])
        made(tmp_path, log, choice, out, valid="0", min_count=1)
        return decoded(tmp_path / out)["genre"]

    assert joined(text, "items.parquet", "a") == ["b", "a", None, None]
    assert joined({"item": item}, "items.csv", "b") == ["b", "a", None, None]
    with pytest.raises(InvalidInputError, match=r"keys 'item'=.*four"):
        joined({"item": item}, "names.csv", "c")


def test_what_cannot_be_joined_or_crossed(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    (folder / "twice.csv").write_text("id,genre\ni1,a\ni1,b\n")
    cases: list[tuple[dict[str, Any], type[OperError], str]] = [
        ({"join": str(folder / "twice.csv"), "join_on": "item=id", "join_sparse": ["genre"]},
         FileFormatError, "distinct keys 'item'=1"),
        ({"join": str(folder / "items.csv"), "join_on": "nobody", "join_sparse": ["genre"]},
         InvalidInputError, "key of a join='nobody'"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["nothing"]},
         FileFormatError, "nothing"),
        ({"join": str(folder / "items.csv")}, InvalidInputError, "its key and columns"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["user"]},
         InvalidInputError, r"columns named twice=\['user'\]"),
        # The label of a log without one, time buckets and times also have column names.
        ({"sparse": ["user", "label"], "label": None, "threshold": None}, InvalidInputError,
         r"columns named twice=\['label'\]"),
        ({"dense": ["label"], "label": None, "threshold": None}, InvalidInputError,
         r"columns named twice=\['label'\]"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["bucket"]},
         InvalidInputError, r"'bucket' has the time buckets"),
        ({"join": str(folder / "items.csv"), "join_on": "item=id", "join_sparse": ["time"],
          "time": "when"}, InvalidInputError, r"'time' has the times"),
        ({"cross": ["user*nothing=10"]}, InvalidInputError, "with one id per row"),
        ({"cross": ["user*item"]}, InvalidInputError, "A\\*B=N"),
        ({"sparse": ["user", "age:bins=30/18"]}, InvalidInputError, "ascending numbers"),
        ({"sparse": ["user", "age:bins=x"]}, InvalidInputError, "expected a number"),
        ({"threshold": 4.0, "label": None}, InvalidInputError, "with a label"),
    ]
    for k, (words, error, text) in enumerate(cases):
        with pytest.raises(error, match=text):
            preprocess(generic_recipe("csv", Choice(**{
                "sparse": ["user", "item"], "label": "stars", "threshold": 4.0, **words})),
                [str(folder / "log.csv")], folder / f"out{k}", ALL)
        assert not (folder / f"out{k}").exists()


def test_a_side_table_that_matches_little_is_a_problem(log: tuple[Path, list[list[str]]]) -> None:
    folder, _ = log
    (folder / "few.csv").write_text("id,genre\ni1,a\n")
    manifest = preprocess(generic_recipe("csv", Choice(
        ["item"], join=str(folder / "few.csv"), join_on="item=id", join_sparse=["genre"])),
        [str(folder / "log.csv")], folder / "out", ALL)
    assert any("few.csv" in p for p in manifest["problems"])


def test_the_documented_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    (tmp_path / "ratings.toml").write_text(
        page.split('```toml title="ratings.toml"\n')[1].split("```")[0])
    (tmp_path / "items.csv").write_text('id,price,tags\nA,3,"x|y"\nB,,\n')
    manifest = made(tmp_path, "user,item,rating,age,when\n" + "".join(
        f"u{k % 9},{'AB'[k % 2]},{k % 6},{10 + k % 60},{60 * k}\n" for k in range(600)),
        load_recipe(str(tmp_path / "ratings.toml")))
    assert manifest["problems"] == [] and sum(manifest["rows"].values()) == 500
    assert manifest["tables"]["tags"]["num_rows"] == 3
    assert manifest["tables"]["age"]["num_rows"] == 5
    assert manifest["columns"]["sparse"][-1] == "user_x_age"
