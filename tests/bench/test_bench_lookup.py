"""The lookup benchmark end to end, in one and in two processes, on two small tables."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.bench.core.launch import measured as measure
from oper.bench.core.report import report
from oper.bench.core.workload import Workload
from oper.bench.tables import lookup
from oper.bench.tables.ceiling import UpdateCeiling
from oper.bench.tables.lookup import LookupCase, ScaleCase, UpdateCase
from oper.bench.tables.unsharded import PEERS
from oper.plan import uniform_plan
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec

WORK = Workload(num_rows=(40, 12_000), dim=16, batch_size=64, pooling=3)
SMALL = {"num_batches": 4, "num_stats_batches": 4, "rounds": 2, "per_round": 2}
SCALE = {"num_batches": 2, "rounds": 2, "per_round": 2}
IN_TWO_PROCESSES = (
    LookupCase("lookup-w2", WORK, 2, **SMALL), UpdateCase("update-w2", WORK, 2, **SMALL),
    ScaleCase("scale-dim-4", replace(WORK, dim=4), 2, axis="dim", **SCALE),
    ScaleCase("scale-dim-64", replace(WORK, dim=64), 2, axis="dim", **SCALE),
    ScaleCase("scale-rows-small", replace(WORK, dim=64), 2, axis="rows", **SCALE))
Entry = dict[str, Any]


@pytest.fixture(scope="module")
def measured() -> dict[str, Entry]:
    return {entry["name"]: entry for entry in measure(IN_TWO_PROCESSES)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_lookups_are_measured_and_verified(world_size: int, measured: dict[str, Entry]) -> None:
    if world_size == 2:
        entry = measured["lookup-w2"]
    else:
        entry, = measure([LookupCase("lookup-w1", WORK, 1, **SMALL)])
    assert entry["verified"] is True, entry["verification"]
    assert set(entry["verification"]) == {"oper", "ceiling", "nn_embedding_bag", "fbgemm"}
    assert set(entry["timings"]) == {"oper", "ceiling", *PEERS}
    assert entry["threads_per_rank"] * world_size == entry["threads_of_peers"] == 2
    assert entry["bytes_moved"]["forward"] == 64 * 2 * (3 + 1) * 64
    fastest = min(entry[f"{n}_forward_ms"] for n in PEERS)
    assert entry["ratio_forward"] == pytest.approx(fastest / entry["oper_forward_ms"], rel=1e-2)
    for key in ("python_overhead_us", "python_overhead_small_batch_us"):
        assert 0 < entry[key] < 1e5
    assert entry["name"] in report([entry], lookup.FIGURES)


def test_updates_are_measured_and_verified(measured: dict[str, Entry]) -> None:
    entry = measured["update-w2"]
    assert entry["verified"] is True, entry["verification"]
    assert set(entry["verification"]["oper"]["max_relative_diff"]) == {"tables"}
    assert set(entry["timings"]) == {"oper", "fbgemm"}
    assert entry["ratio_update"] == pytest.approx(
        entry["fbgemm_update_ms"] / entry["oper_update_ms"], rel=1e-2)


def test_growth_is_measured_and_verified(measured: dict[str, Entry]) -> None:
    entries = [measured["scale-dim-4"], measured["scale-dim-64"]]
    assert all(e["verified"] for e in entries), entries
    # A row of 16 bytes takes a line, one of 256 bytes four.
    ids, bags = 64 * 2 * 3, 64 * 2
    narrow, full = (e["bytes_moved"]["lines"] for e in entries)
    distinct = (narrow - ids * (2 * 64 + 8) - bags * 64) / (4 * 64 + 2 * 64)
    assert 40 < distinct <= ids
    assert full == pytest.approx(
        ids * (2 * 256 + 8) + bags * 256 + distinct * (4 * 256 + 2 * 64), abs=2)


def test_growing_tables_are_set_beside_the_bare_machine(measured: dict[str, Entry]) -> None:
    entry = measured["scale-rows-small"]
    assert entry["verified"] is True, entry
    assert set(entry["timings"]) == {"oper", "gather ceiling", "update ceiling"}
    bare_ms = entry["gather_ceiling_ms"] + entry["update_ceiling_ms"]
    assert entry["ceiling_ns_per_line_byte"] == pytest.approx(
        2e6 * bare_ms / entry["bytes_moved"]["lines"], rel=1e-2)
    assert "ceiling" in report([entry], lookup.FIGURES)


def test_bare_rewrites_touch_what_a_step_updates_and_change_nothing() -> None:
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


def test_cases_by_world_size() -> None:
    names = [c.name for c in lookup.cases(quick=False)]
    assert len(names) == len(set(names)) == 26 + 17
    assert [c.name for c in lookup.cases(quick=True)] == [
        *(f"lookup-d64-pool{p}-w{w}" for w in (1, 2) for p in (1, 20)),
        "update-d64-pool1-w2", "update-d64-pool20-w2"]
