"""The lookup, update, training and dynamic benchmarks, end to end."""

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oper
from oper.bench.core.launch import Progress, measured
from oper.bench.core.report import report
from oper.bench.core.workload import Workload
from oper.bench.dynamic import drift
from oper.bench.dynamic.case import DynamicCase
from oper.bench.serve import suite as serve
from oper.bench.tables import lookup, train
from oper.bench.tables.ceiling import UpdateCeiling
from oper.bench.tables.lookup import LookupCase, ScaleCase, UpdateCase
from oper.bench.tables.sides import PLAN_KINDS, Dense
from oper.bench.tables.train import TrainCase
from oper.bench.tables.unsharded import PEERS
from oper.errors import InvalidInputError, UsageError
from oper.plan import uniform_plan
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from oper.train.config import DLRMConfig
from tests.bench.helpers import BrokenDynamicCase, BrokenTrainCase, verified

WORK = Workload(num_rows=(40, 12_000), dim=16, batch_size=64, pooling=3)
SMALL = {"num_batches": 4, "num_stats_batches": 4, "rounds": 2, "per_round": 2}
SCALE = {"num_batches": 2, "rounds": 2, "per_round": 2}
IN_TWO_PROCESSES = (
    LookupCase("lookup-w2", WORK, 2, **SMALL), UpdateCase("update-w2", WORK, 2, **SMALL),
    LookupCase("forward", WORK, 2, torchrec=True, **SMALL),
    ScaleCase("scale-dim-4", replace(WORK, dim=4), 2, axis="dim", **SCALE),
    ScaleCase("scale-dim-64", replace(WORK, dim=64), 2, axis="dim", **SCALE),
    ScaleCase("scale-rows-small", replace(WORK, dim=64), 2, axis="rows", **SCALE))
Entry = dict[str, Any]


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    found = verified(*IN_TWO_PROCESSES, figures=(*lookup.FIGURES, *serve.FIGURES))
    return {entry["name"]: entry for entry in found}


@pytest.mark.parametrize("world_size", [1, 2])
def test_lookups_are_measured_and_verified(world_size: int, entries: dict[str, Entry]) -> None:
    entry = entries["lookup-w2"] if world_size == 2 else verified(
        LookupCase("lookup-w1", WORK, 1, **SMALL), figures=lookup.FIGURES)[0]
    assert set(entry["verification"]) == {"oper", "ceiling", "nn_embedding_bag", "fbgemm"}
    assert set(entry["timings"]) == {"oper", "ceiling", *PEERS}
    assert entry["threads_per_rank"] * world_size == entry["threads_of_peers"] == 2
    assert entry["bytes_moved"]["forward"] == 64 * 2 * (3 + 1) * 64
    fastest = min(entry[f"{n}_forward_ms"] for n in PEERS)
    assert entry["ratio_forward"] == pytest.approx(fastest / entry["oper_forward_ms"], rel=1e-2)
    for key in ("python_overhead_us", "python_overhead_small_batch_us"):
        assert 0 < entry[key] < 1e5


def test_forwards_are_compared_with_torchrecs_plans(entries: dict[str, Entry]) -> None:
    entry = entries["forward"]
    assert set(entry["verification"]) == {"oper", *PLAN_KINDS, "nn_embedding_bag", "fbgemm"}
    best = min(entry[f"{kind}_forward_ms"] for kind in PLAN_KINDS)
    assert entry["ratio_forward"] == pytest.approx(best / entry["oper_forward_ms"], rel=1e-2)


def test_updates_are_measured_and_verified(entries: dict[str, Entry]) -> None:
    entry = entries["update-w2"]
    assert set(entry["verification"]["oper"]["max_relative_diff"]) == {"tables"}
    assert set(entry["timings"]) == {"oper", "fbgemm"}
    assert entry["ratio_update"] == pytest.approx(
        entry["fbgemm_update_ms"] / entry["oper_update_ms"], rel=1e-2)


def test_growth_is_measured_and_verified(entries: dict[str, Entry]) -> None:
    scales = [entries["scale-dim-4"], entries["scale-dim-64"]]
    # A row of 16 bytes takes a line, one of 256 bytes four.
    ids, bags = 64 * 2 * 3, 64 * 2
    narrow, full = (e["bytes_moved"]["lines"] for e in scales)
    distinct = (narrow - ids * (2 * 64 + 8) - bags * 64) / (4 * 64 + 2 * 64)
    assert 40 < distinct <= ids
    assert full == pytest.approx(
        ids * (2 * 256 + 8) + bags * 256 + distinct * (4 * 256 + 2 * 64), abs=2)


def test_growing_tables_are_compared_with_bare_loops(entries: dict[str, Entry]) -> None:
    entry = entries["scale-rows-small"]
    assert set(entry["timings"]) == {"oper", "gather ceiling", "update ceiling"}
    bare_ms = entry["gather_ceiling_ms"] + entry["update_ceiling_ms"]
    assert entry["ceiling_ns_per_line_byte"] == pytest.approx(
        2e6 * bare_ms / entry["bytes_moved"]["lines"], rel=1e-2)
    assert "ceiling" in report([entry], lookup.FIGURES)


def test_bare_rewrites_touch_the_updated_rows_and_change_none() -> None:
    specs = [TableSpec(f"t{k}", n, 64, (f"f{k}",)) for k, n in enumerate((40, 5000))]
    tables = ShardedTables(uniform_plan(specs, 1), [(f"f{k}", f"t{k}") for k in range(2)],
                           SingleGroup(), RowWiseAdagrad(lr=0.1))
    generator = np.random.default_rng(0)
    rows = [torch.randn(n.num_rows, 64) for n in specs]
    for spec, values in zip(specs, rows, strict=True):
        tables.write(spec.name, values)
    ids = np.stack([generator.integers(0, n.num_rows, 300) for n in specs])
    bare = UpdateCeiling(tables, [[ids, ids[:, :7]]])
    sizes = [sum(np.unique(x).size for x in batch) for batch in (ids, ids[:, :7])]
    assert [[p.numel() - UpdateCeiling.PREFETCH for p in b] for b in bare.batches] == [
        [n, n] for n in sizes]
    bare.run(0)
    bare.run(1)
    for spec, values in zip(specs, rows, strict=True):
        found = torch.empty_like(values)
        tables.gather(spec.name, np.arange(spec.num_rows), "rows", slice(0, 64), found)
        assert torch.equal(found, values)
    tables.close()


# ---- dynamic tables ------------------------------------------------------------------------------


def _case(name: str, load: float, pooling: int = 1,
          kind: type[DynamicCase] = DynamicCase) -> DynamicCase:
    work = Workload(num_rows=(3000, 3000), dim=16, batch_size=64, pooling=pooling)
    return kind(name, work, load=load, **SMALL)


def test_cases_are_measured_and_verified() -> None:
    half, full = verified(_case("pool3", 0.5, 3), _case("full", 10.0), figures=train.FIGURES)
    for entry in (half, full):
        assert set(entry["verification"]["max_relative_diff"]) == {"pooled", "rows", "tables"}
        assert entry["ratio_static"] == pytest.approx(
            entry["dynamic_step_ms"] / entry["static_step_ms"], rel=1e-2)
        assert entry["ratio_planned"] == pytest.approx(
            entry["dynamic_step_ms"] / entry["planned_step_ms"], rel=1e-2)
        assert entry["timings"]["mch"]["n"] == 4 and entry["ratio_mch"] > 0
        assert 17 <= entry["bytes_per_slot"] < 24
    assert half["ratio_half"] == 1 and "half" not in half["timings"]
    assert full["ratio_half"] == pytest.approx(
        full["dynamic_step_ms"] / full["timings"]["half"]["median_ms"], rel=1e-2)
    assert half["occupied"] == 6000 and half["missed"] == half["evicted_per_step"] == 0
    assert full["occupied"] == 600 and full["missed"] > 0 and full["evicted_per_step"] > 0


def test_other_rows_are_found() -> None:
    (entry,) = measured([_case("spoiled", 10.0, kind=BrokenDynamicCase)])
    assert entry["verified"] is False
    assert "spoiled is NOT verified; verification: " in report([entry], train.FIGURES)


def test_quality_on_a_log_that_drifts() -> None:
    """Contenders have equal bytes, the first day does not count, and repetition scores equally."""
    (case,) = train.cases(True, tables="drift")
    entry, = verified(replace(case, num_rows=1500, num_seeds=2, dim=4), figures=train.FIGURES)
    assert entry["days"] == 6 and entry["samples"] == 1500
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
def test_the_bytes_of_a_directory_are_those_it_takes(rule: str) -> None:
    """`directory_bytes` equals the memory of a table's directory."""
    bag = oper.shard(torch.nn.EmbeddingBag(1001, 4, mode="sum"), optimizer=oper.SGD(lr=0.1),
                     dynamic=drift.RULES[rule])
    of = drift._num_bytes(drift.DriftCase("synthetic", dim=4), rule)
    plain = drift._num_bytes(drift.DriftCase("synthetic", dim=4), drift.HASHED)
    assert of(1001) - plain(1001) == bag.tables.keys.num_bytes > 1000 * 17 - 1


def test_the_vocabulary_is_that_of_the_first_day() -> None:
    known = drift._hottest(np.array([5, -3, 5, 9]), 2)
    assert known.tolist() == [-3, 5]
    assert drift._number(known, np.array([5, 9, -3, -4])).tolist() == [2, 0, 1, 0]


# ---- training ------------------------------------------------------------------------------------

UNEVEN = replace(WORK, lengths=(1, 3))
CROSS = Dense(DLRMConfig(dense_layers=(16,), over_layers=(16,), cross_layers=2, cross_rank=4))
KEYS = {"name", "ratio_step", "ratio_forward", "oper_step_ms", "oper_forward_ms",
        "gather_ceiling_gbps", "forward_fraction_of_ceiling", "verified", "bytes_moved",
        "page_kind", "plans"}


def _train_case(name: str, dense: Dense | None = None, work: Workload = WORK,
                kind: type[TrainCase] = TrainCase) -> TrainCase:
    return kind(name, work, dense=dense, **SMALL)


def test_ranks_that_share_no_memory() -> None:
    case = replace(_train_case("ebc", work=UNEVEN), exchange="collective")
    entry, = verified(case, figures=train.FIGURES)
    assert "ceiling" not in entry["plans"] and entry["exchange"] == "collective"
    sent = sum(entry["oper_sent_bytes_per_step"].values())
    # TCP's headers come on top; nothing else uses the interface as much.
    assert 0 < sent <= entry["loopback_bytes_per_step"]["oper"]
    assert entry["simulated_equals_sent"] is True
    assert abs(entry["simulated_bytes_per_step"] - sent) <= len(entry["oper_sent_bytes_per_step"])


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """Several cases, one of them with a wrong weight; processes take long to start."""
    return list(measured([_train_case("ebc"), _train_case("dlrm", Dense()),
                          _train_case("broken", kind=BrokenTrainCase)]))


def test_two_processes_measure_and_verify(trained: list[dict[str, Any]]) -> None:
    both = trained[:2]
    assert [e["name"] for e in both] == ["ebc", "dlrm"]
    for entry in both:
        assert set(entry) >= KEYS
        assert entry["verified"] is True, entry["plans"]
        shipped = set(train.SHIPPED.values()) if entry["name"] == "dlrm" else set()
        assert set(entry["plans"]) == {"oper", "table_wise", "mixed", "ceiling"} | shipped
        assert ("ratio_shipped" in entry) == bool(shipped)
        for phase, best in (("step", "torchrec_best"), ("forward", "torchrec_best_forward")):
            theirs = {k: entry["plans"][k][phase]["median_ms"] for k in ("table_wise", "mixed")}
            assert entry[f"torchrec_{phase}_ms"] == theirs[entry[best]] == min(theirs.values())
        assert entry["ratio_step"] == pytest.approx(
            entry["torchrec_step_ms"] / entry["oper_step_ms"], rel=1e-2)
        assert entry["plans"]["oper"]["step"]["n"] == 4
        assert len(entry["oper_phases_ms"]) == 6
        # 64 bags of 3 rows and one output, 2 tables, 64 bytes each.
        assert entry["bytes_moved"]["forward"] == 64 * 2 * (3 + 1) * 64
        assert "data_parallel" in entry["plans"]["mixed"]["plan"]["tables"]["t0"]
        assert "table_wise" in entry["plans"]["mixed"]["plan"]["tables"]["t1"]
    compared = both[1]["plans"]["oper"]["verification"]["max_relative_diff"]
    assert set(compared) == {"pooled", "logits", "rows", "dense", "tables"}
    assert "NOT verified" not in report(both, train.FIGURES)


def test_each_phase_is_compared_with_its_fastest_plan() -> None:
    run: Any = object.__new__(train._TrainRun)
    run.case, run.is_shared = _train_case("ebc"), False
    run.rank, run.world_size = 0, 1
    run.sides = [train.Side(n, torch.nn.Module(), torch.nn.Module(), [], None, [])
                 for n in ("oper", "table_wise", "mixed", *train.SHIPPED.values())]
    ms = {"step": (1.0, 4.0, 5.0, 9.0, 8.0), "forward": (1.0, 3.0, 2.0, 3.0, 4.0)}
    timings = {phase: {side.name: np.full(3, x / 1e3) for side, x in zip(
        run.sides, of, strict=True)} for phase, of in ms.items()}
    found = run._figures(timings, {"oper": {"passed": True}},
                         [np.zeros((len(WORK.num_rows), WORK.batch_size * WORK.pooling), int)])
    assert found["torchrec_best"] == "table_wise" and found["torchrec_best_forward"] == "mixed"
    assert found["ratio_step"] == pytest.approx(4)
    assert found["ratio_forward"] == pytest.approx(2)
    assert found["ratio_shipped"] == pytest.approx(8)
    assert found["torchrec_forward_ms"] == pytest.approx(2)


def test_a_record_of_the_other_exchange_is_not_resumed() -> None:
    shared, apart = (train.cases(True, exchange=x) for x in ("shared", "collective"))
    known = {"ebc-pool1": {"exchange": "shared"}, "dlrm-pool1": {}, "other": {"exchange": "x"}}
    train.check_resumed(known, shared)
    train.check_resumed(known, train.cases(True, tables="dynamic"))
    with pytest.raises(InvalidInputError, match="exchange of ebc-pool1='shared'"):
        train.check_resumed(known, apart)


def test_a_wrong_weight_is_found(trained: list[dict[str, Any]]) -> None:
    entry = trained[2]
    assert entry["verified"] is False
    assert not entry["plans"]["oper"]["verification"]["passed"]
    assert entry["plans"]["table_wise"]["verification"]["passed"]
    text = report([entry], train.FIGURES)
    assert " NO\n" in text and "broken is NOT verified; plans.oper.verification: " in text
    assert "table_wise.verification" not in text


def test_cross_networks_in_both_precisions() -> None:
    crossed = verified(
        _train_case("dcn", CROSS, UNEVEN),
        _train_case("dcn-bfloat16", replace(CROSS, dtype="bfloat16"), UNEVEN),
        figures=train.FIGURES)
    for entry, dtype, kinds in zip(crossed, ("float32", "bfloat16"), (
            {"logits", "dense"}, {"logits of bfloat16", "dense of bfloat16"}), strict=True):
        assert entry["dense"]["dtype"] == dtype and entry["dense"]["cross_layers"] == 2
        for name in ("oper", "table_wise", "mixed"):
            checked = entry["plans"][name]["verification"]["max_relative_diff"]
            assert kinds < set(checked)
        # 64 bags of one row and 64 of three, each with an output, 64 bytes each.
        assert entry["bytes_moved"]["forward"] == 64 * (4 + 2) * 64
        assert entry["samples_per_core_s"]["oper"] == pytest.approx(
            64 / 2 / (entry["oper_step_ms"] / 1e3), rel=1e-2)
    rounded, exact = (max(e["plans"]["table_wise"]["verification"]["max_relative_diff"].values())
                      for e in reversed(crossed))
    assert rounded != exact


@pytest.mark.parametrize("flags", [
    {"exchange": "collective", "tables": "drift"}, {"exchange": "collective", "model": "hstu"},
    {"device": "cuda", "model": "dlrm"}, {"model": "dlrm", "tables": "dynamic"}])
def test_flags_that_choose_other_cases_are_not_combined(flags: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot choose cases"):
        train.cases(True, **flags)


# ---- a case that fails on one rank ---------------------------------------------------------------


@dataclass(frozen=True)
class FailingCase:
    """A case in which rank 1 fails before rank 0 has its result, after that, or not at all."""

    name: str
    world_size: ClassVar[int] = 2
    threads_per_rank: ClassVar[int] = 1

    def measure(self, progress: Progress) -> dict[str, Any]:
        dist.barrier()
        if dist.get_rank() == 1 and self.name != "neither":
            time.sleep(1.0 if self.name == "after" else 0.0)
            raise ValueError("as rank 1 knows")
        if self.name != "after":
            dist.barrier()
        return {"verified": True}


def test_a_case_that_fails_on_one_rank_is_the_one_reported() -> None:
    """With the rank's log, also if rank 0 already has its figures; the remaining cases are still
    measured."""
    before, after, neither = measured([FailingCase(n) for n in ("before", "after", "neither")])
    for found in (before, after):
        assert not found["verified"] and "a benchmark process has failed" in found["failed"]
        assert "ValueError: as rank 1 knows" in found["failed"], found
    assert neither == {"name": "neither", "verified": True}
