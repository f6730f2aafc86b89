"""``oper bench off-policy``: coverage on simulated logs, and Open Bandit if its files exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.helpers import bench
from tests.support import real_data


def test_simulated_logs(tmp_path: Path) -> None:
    entries, printed = bench(tmp_path, "off-policy", "--quick", "--samples", "200",
                             OPER_DATA=str(tmp_path))
    assert [e["name"] for e in entries] == ["simulated/rows", "simulated/visitors",
                                            "simulated/recommender"]
    for e in entries:
        assert set(e["coverage"]) == {"ips", "snips", "dm", "dr", "switch-dr", "dros", "mips"}
        assert abs(e["bias"]["ips"]) < e["rmse"]["ips"] and e["rmse"]["dr"] < e["rmse"]["ips"]
    assert "coverage at 95 %" in printed and "on policy" not in printed


def test_open_bandit(tmp_path: Path) -> None:
    log = real_data("open_bandit/random/women/women.csv.gz")
    found, _ = bench(tmp_path, "off-policy", "--only", "open-bandit/*", "--samples", "200",
                     OPER_DATA=str(log.parents[3]))
    entries = {e["name"]: e for e in found}
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
