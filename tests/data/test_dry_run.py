"""``oper preprocess --dry-run`` describes a log and writes nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_verbs import run
from tests.support import run_here

CSV = "user,item,price,stars,when\n" + "".join(
    f"u{k % 7},{k % 50},{'' if k % 4 == 0 else k / 8},{k % 5 + 1},{1_600_000_000 + 600 * k}\n"
    for k in range(20_000))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run("preprocess", *words, "--dry-run", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_columns_of_files_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    before = sorted(tmp_path.iterdir())
    columns = told(capsys, "csv", str(path))["columns"]
    assert [(c["name"], c["type"]) for c in columns] == [
        ("user", "string"), ("item", "int64"), ("price", "double"), ("stars", "int64"),
        ("when", "int64")]
    assert columns[0]["distinct"] == 7 and columns[2]["missing"] == pytest.approx(0.25, abs=0.01)
    found = told(capsys, "csv", str(path), "--sparse", "user,item", "--label", "stars",
                 "--threshold", "4", "--dense", "price:log1p", "--time", "when")
    assert {c["name"]: (c["kind"], c["parse"]) for c in found["columns"]} == {
        "label": ("label", "threshold"), "time": ("time", "unix"), "price": ("dense", "float"),
        "user": ("sparse", "string"), "item": ("sparse", "string")}
    assert found["tables"]["user"]["num_rows"] == 8 and found["split"]["by"] == "time"
    assert 10_000 <= sum(found["rows"].values()) < 16_000 and found["rows"]["valid"]
    assert found["plan"]["rows"] == pytest.approx(20_000, rel=0.05)
    assert sorted(tmp_path.iterdir()) == before


def test_problems_and_mistakes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CSV)
    found = told(capsys, "csv", str(path), "--sparse", "user")
    assert "no label" in found["problems"][0]
    done = run_here("preprocess", "csv", str(path), "--sparse", "user", "--label", "stars",
                    "--dry-run")
    assert done.returncode == 1 and "--threshold" in done.stderr
    assert run_here("preprocess", "csv", str(path), "--sparse", "user").returncode == 2
    assert run_here("preprocess", "csv", str(path), "--sparse", "user", "-o", str(tmp_path / "o"),
                    "--dry-run").returncode == 2


def test_partitioned_parquet_and_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], invent: Any, write: Any
) -> None:
    folder = tmp_path / "clicks" / "country=de"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"user": list(range(300)), "tags": [[1, 2]] * 300}),
                   folder / "part.parquet")
    found = told(capsys, "parquet", str(tmp_path / "clicks"), "--sparse", "user,tags,country")
    assert found["tables"]["country"]["num_rows"] == 2 and found["tables"]["tags"]["num_rows"] == 3
    log = str(write(tmp_path / "train.txt", invent(140)))
    assert run("preprocess", "criteo-kaggle", log, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "C26" in text and "hex32" in text and "of the first rows 120 train" in text
