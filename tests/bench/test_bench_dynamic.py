"""The benchmark of dynamic tables end to end, in two processes on two small tables."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import oper
from oper.bench.core.launch import measured
from oper.bench.core.report import report
from oper.bench.core.workload import Workload
from oper.bench.dynamic import case as dynamic, drift
from oper.bench.dynamic.case import DynamicCase
from oper.bench.tables import train
from tests.bench import broken


def _case(name: str, load: float, pooling: int = 1,
          kind: type[DynamicCase] = DynamicCase) -> DynamicCase:
    work = Workload(num_rows=(3000, 3000), dim=16, batch_size=64, pooling=pooling)
    return kind(name, work, num_batches=4, num_stats_batches=4, rounds=2, per_round=2,
                load=load)


def test_cases_are_measured_and_verified() -> None:
    half, full = measured([_case("pool3", 0.5, 3), _case("full", 10.0)])
    for entry in (half, full):
        assert entry["verified"] is True, entry["verification"]
        assert set(entry["verification"]["max_relative_diff"]) == {"pooled", "rows", "tables"}
        assert entry["ratio_static"] == pytest.approx(
            entry["dynamic_step_ms"] / entry["static_step_ms"], rel=1e-2)
        assert entry["ratio_planned"] == pytest.approx(
            entry["dynamic_step_ms"] / entry["planned_step_ms"], rel=1e-2)
        assert entry["timings"]["mch"]["n"] == 4 and entry["ratio_mch"] > 0
        assert 17 <= entry["bytes_per_slot"] < 24
    assert half["occupied"] == 6000 and half["missed"] == half["evicted_per_step"] == 0
    assert full["occupied"] == 600 and full["missed"] > 0 and full["evicted_per_step"] > 0
    text = report([half, full], train.FIGURES)
    assert "pool3" in text and " NO\n" not in text


def test_other_rows_are_found() -> None:
    (entry,) = measured([_case("spoiled", 10.0, kind=broken.BrokenDynamicCase)])
    assert entry["verified"] is False
    assert "spoiled is NOT verified; verification: " in report([entry], train.FIGURES)


def test_the_cases() -> None:
    names = [c.name for c in train.cases(False, tables="dynamic")]
    assert names == ["pool1", "pool20", "pool1-load95", "pool1-full"] == list(dynamic.LOADS)
    assert [c.num_slots for c in dynamic.cases(True)] == [100_000, 100_000, 52_632, 45_455]


def test_quality_on_a_log_that_drifts() -> None:
    """Contenders have equal bytes, the first day does not count, and repetition scores equally."""
    (case,) = train.cases(True, tables="drift")
    (entry,) = measured([replace(case, num_rows=1500, num_seeds=2, dim=4)])
    assert entry["verified"] is True and entry["days"] == 6 and entry["samples"] == 1500
    dynamic = entry["bytes"]["lru"]
    assert dynamic == entry["bytes"]["lfu"] and 0.98 < entry["bytes"]["hashed"] / dynamic <= 1
    assert entry["bytes"]["first day"] < dynamic
    assert all(0.3 < x["low"] <= x["mean"] <= x["high"] < 1 for x in entry["auc"].values())
    for name in drift.RULES:
        over = entry["auc_over"][name]["hashed"]["mean"]
        assert over == pytest.approx(entry["auc"][name]["mean"] - entry["auc"]["hashed"]["mean"],
                                     abs=2e-6)
        assert all(0 < x < 1 for x in entry["default_share"][name])
    assert "auc over lfu hashed" in " ".join(report([entry], train.FIGURES).split())


@pytest.mark.parametrize("rule", drift.RULES)
def test_a_directory_costs_what_it_takes(rule: str) -> None:
    """`directory_bytes` equals the memory of a table's directory."""
    bag = oper.shard(torch.nn.EmbeddingBag(1001, 4, mode="sum"), optimizer=oper.SGD(lr=0.1),
                     dynamic=drift.RULES[rule])
    of = drift._num_bytes(drift.DriftCase("synthetic", dim=4), rule)
    plain = drift._num_bytes(drift.DriftCase("synthetic", dim=4), drift.HASHED)
    assert of(1001) - plain(1001) == bag.tables.keys.num_bytes > 1000 * 17 - 1


def test_the_first_day_alone_is_known() -> None:
    known = drift._hottest(np.array([5, -3, 5, 9]), 2)
    assert known.tolist() == [-3, 5]
    assert drift._number(known, np.array([5, 9, -3, -4])).tolist() == [2, 0, 1, 0]
