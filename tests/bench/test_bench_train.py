"""The training benchmark end to end, in two processes on two small tables."""

from dataclasses import replace
from typing import Any

import pytest

from oper.bench.core.launch import measured as measure
from oper.bench.core.report import report
from oper.bench.core.workload import Workload
from oper.bench.tables import train
from oper.bench.tables.sides import Dense
from oper.bench.tables.train import TrainCase
from oper.errors import UsageError
from oper.train.config import DLRMConfig
from tests.bench import broken

TINY = Workload(num_rows=(40, 12_000), dim=16, batch_size=64, pooling=3)
UNEVEN = replace(TINY, lengths=(1, 3))
CROSS = Dense(DLRMConfig(dense_layers=(16,), over_layers=(16,), cross_layers=2, cross_rank=4))
KEYS = {"name", "ratio_step", "ratio_forward", "oper_step_ms", "oper_forward_ms",
        "gather_ceiling_gbps", "forward_fraction_of_ceiling", "verified", "bytes_moved",
        "page_kind", "plans"}


def _case(name: str, dense: Dense | None = None, work: Workload = TINY,
          kind: type[TrainCase] = TrainCase) -> TrainCase:
    return kind(name, work, dense=dense, num_batches=4, num_stats_batches=4, rounds=2,
                per_round=2)


def test_ranks_that_share_no_memory() -> None:
    case = replace(_case("ebc", work=UNEVEN), exchange="collective")
    (entry,) = measure([case])
    assert entry["verified"] is True, entry["plans"]
    assert "ceiling" not in entry["plans"] and entry["exchange"] == "collective"
    sent = sum(entry["oper_sent_bytes_per_step"].values())
    # TCP's headers come on top; nothing else uses the interface as much.
    assert 0 < sent <= entry["loopback_bytes_per_step"]["oper"]
    assert entry["simulated_equals_sent"] is True
    assert abs(entry["simulated_bytes_per_step"] - sent) <= len(entry["oper_sent_bytes_per_step"])
    assert "collective" in report([entry], train.FIGURES)


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    """Several cases, one of them with a wrong weight; processes take long to start."""
    cases = [_case("ebc"), _case("dlrm", Dense()), _case("broken", kind=broken.BrokenTrainCase),
             _case("dcn", CROSS, UNEVEN),
             _case("dcn-bfloat16", replace(CROSS, dtype="bfloat16"), UNEVEN)]
    return list(measure(cases))


def test_two_processes_measure_and_verify(measured: list[dict[str, Any]]) -> None:
    entries = measured[:2]
    assert [e["name"] for e in entries] == ["ebc", "dlrm"]
    for entry in entries:
        assert set(entry) >= KEYS
        assert entry["verified"] is True, entry["plans"]
        shipped = {train.SHIPPED} if entry["name"] == "dlrm" else set()
        assert set(entry["plans"]) == {"oper", "table_wise", "mixed", "ceiling"} | shipped
        assert ("ratio_shipped" in entry) == bool(shipped)
        best = entry["plans"][entry["torchrec_best"]]
        assert best["step"]["median_ms"] == entry["torchrec_step_ms"]
        assert best["step"]["median_ms"] == min(
            entry["plans"][k]["step"]["median_ms"] for k in ("table_wise", "mixed"))
        assert entry["ratio_step"] == pytest.approx(
            entry["torchrec_step_ms"] / entry["oper_step_ms"], rel=1e-2)
        assert entry["plans"]["oper"]["step"]["n"] == 4
        assert len(entry["oper_phases_ms"]) == 6
        # 64 bags of 3 rows and one output, 2 tables, 64 bytes each.
        assert entry["bytes_moved"]["forward"] == 64 * 2 * (3 + 1) * 64
        assert "data_parallel" in entry["plans"]["mixed"]["plan"]["tables"]["t0"]
        assert "table_wise" in entry["plans"]["mixed"]["plan"]["tables"]["t1"]
    compared = entries[1]["plans"]["oper"]["verification"]["max_relative_diff"]
    assert set(compared) == {"pooled", "logits", "rows", "dense", "tables"}
    assert "NOT verified" not in report(entries, train.FIGURES)


def test_a_wrong_weight_is_found(measured: list[dict[str, Any]]) -> None:
    entry = measured[2]
    assert entry["verified"] is False
    assert not entry["plans"]["oper"]["verification"]["passed"]
    assert entry["plans"]["table_wise"]["verification"]["passed"]
    text = report([entry], train.FIGURES)
    assert " NO\n" in text and "broken is NOT verified; plans.oper.verification: " in text
    assert "table_wise.verification" not in text


def test_cross_networks_in_both_precisions(measured: list[dict[str, Any]]) -> None:
    for entry, dtype, kinds in zip(measured[3:], ("float32", "bfloat16"), (
            {"logits", "dense"}, {"logits of bfloat16", "dense of bfloat16"}), strict=True):
        assert entry["verified"] is True, entry["plans"]
        assert entry["dense"]["dtype"] == dtype and entry["dense"]["cross_layers"] == 2
        for name in ("oper", "table_wise", "mixed"):
            checked = entry["plans"][name]["verification"]["max_relative_diff"]
            assert kinds < set(checked)
        # 64 bags of one row and 64 of three, each with an output, 64 bytes each.
        assert entry["bytes_moved"]["forward"] == 64 * (4 + 2) * 64
        assert entry["samples_per_core_s"]["oper"] == pytest.approx(
            64 / 2 / (entry["oper_step_ms"] / 1e3), rel=1e-2)
    rounded, exact = (max(e["plans"]["table_wise"]["verification"]["max_relative_diff"].values())
                      for e in (measured[4], measured[3]))
    assert rounded != exact
    text = report(measured[3:], train.FIGURES)
    assert "bfloat16" in text and "samples" in text


@pytest.mark.parametrize("flags", [
    {"exchange": "collective", "tables": "drift"}, {"exchange": "collective", "model": "hstu"},
    {"device": "cuda", "model": "dlrm"}, {"model": "dlrm", "tables": "dynamic"}])
def test_flags_that_choose_other_cases_are_not_combined(flags: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot choose cases"):
        train.cases(True, **flags)


def test_mlperf_shapes() -> None:
    assert {c.exchange for c in train.cases(True, model="dlrm", exchange="collective")} == {
        "collective"}
    (exact, rounded) = train.cases(False, model="dlrm-dcnv2")
    assert (exact.dense.dtype, rounded.dense.dtype) == ("float32", "bfloat16")
    assert sum(exact.work.bag_lengths) == 214 and max(exact.work.num_rows) == 400_000
    assert exact.dense.over(exact.work).dim == 128 and exact.dense.layers.cross_layers == 3
    assert not train.cases(True, model="dlrm")[0].dense.layers.cross_layers
