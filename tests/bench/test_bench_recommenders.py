"""`oper bench recommenders` on a small log in MovieTweetings' format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import run_oper

pytest.importorskip("torchrec")


def write_log(folder: Path) -> None:
    """Two tastes, 80 users, 40 films."""
    rng = np.random.default_rng(0)
    lines = [f"{u}::{1 + 2 * i + u % 2:07d}::{rng.integers(6, 11)}::{1_380_000_000 + 100 * u + t}"
             for u in range(1, 81) for t, i in enumerate(rng.permutation(20)[:10])]
    (folder / "movietweetings").mkdir(parents=True)
    (folder / "movietweetings" / "ratings.dat").write_text("\n".join(lines) + "\n")


def test_a_record_holds_intervals_and_paired_differences(tmp_path: Path) -> None:
    write_log(tmp_path)
    out = tmp_path / "record.json"
    done = run_oper("bench", "recommenders", "--quick", "--only", "movietweetings/[pm]*[ye]",
                    "--runs", str(tmp_path / "runs"), "--json", str(out),
                    env={"OPER_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    entries = json.loads(out.read_text())["cases"]
    assert [e["model"] for e in entries] == ["popularity", "multvae", "macridvae"]
    for entry in entries:
        assert entry["verified"] and [r["seed"] for r in entry["runs"]] == [1]
        found = entry["metrics"]["ndcg@10"]
        assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1
        assert entry["data"]["test_users"] == 80
    assert set(entries[2]["against"]) == {"popularity", "multvae"}
    less = entries[1]["against"]["popularity"]["ndcg@10"]
    assert less["mean"] == pytest.approx(
        entries[1]["metrics"]["ndcg@10"]["mean"] - entries[0]["metrics"]["ndcg@10"]["mean"],
        abs=2e-6)
    assert "movietweetings/macridvae less multvae: nDCG@10" in done.stdout
    again = run_oper("bench", "recommenders", "--quick", "--only", "movietweetings/[pm]*[ye]",
                     "--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "again.json"),
                     env={"OPER_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert again.stdout.replace("again.json", "record.json") == done.stdout  # nothing trained anew
    kept = json.loads((tmp_path / "again.json").read_text())["cases"]
    assert [e["runs"] for e in kept] == [e["runs"] for e in entries]


def test_without_logs_there_is_nothing_to_run(tmp_path: Path) -> None:
    done = run_oper("bench", "recommenders", env={"OPER_DATA": str(tmp_path)})
    assert done.returncode == 1 and "OPER_DATA" in done.stderr
