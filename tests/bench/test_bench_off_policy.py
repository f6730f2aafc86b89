"""`oper bench off-policy`: coverage on simulated logs, and Open Bandit's where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import real_data, run_oper


def test_simulated_logs(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    done = run_oper("bench", "off-policy", "--quick", "--samples", "200", "--json", str(out),
                    env={"OPER_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    entries = json.loads(out.read_text())["cases"]
    assert [e["name"] for e in entries] == ["simulated/rows", "simulated/visitors",
                                            "simulated/recommender"]
    for e in entries:
        assert set(e["coverage"]) == {"ips", "snips", "dm", "dr", "switch-dr", "dros", "mips"}
        assert abs(e["bias"]["ips"]) < e["rmse"]["ips"] and e["rmse"]["dr"] < e["rmse"]["ips"]
    assert "coverage at 95 %" in done.stdout and "on policy" not in done.stdout


def test_open_bandit(tmp_path: Path) -> None:
    log = real_data("open_bandit/random/women/women.csv.gz")
    out = tmp_path / "record.json"
    done = run_oper("bench", "off-policy", "--only", "open-bandit/*", "--samples", "200", "--json",
                    str(out), env={"OPER_DATA": str(log.parents[3]), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    entries = {e["name"]: e for e in json.loads(out.read_text())["cases"]}
    assert len(entries) == 4
    same = entries["open-bandit/random-log/random"]  # every estimate is near what was logged
    rate = same["on_policy"]["mean"]
    assert rate == pytest.approx(same["clicks"] / same["rows"], abs=1e-6)
    assert same["estimates"]["ips"]["mean"] == pytest.approx(rate, rel=1e-4)
    assert same["largest_weight"] == pytest.approx(1.0, rel=1e-4)
    hard = entries["open-bandit/thompson-log/random"]
    assert hard["effective_rows"] < 50  # the weights leave next to nothing
    for e in entries.values():
        for interval in (e["on_policy"], *e["estimates"].values()):
            assert interval["low"] <= interval["mean"] <= interval["high"]
