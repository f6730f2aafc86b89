"""TorchRec plans: export, import, OPER as TorchRec's planner, and plans of TorchRec's planner."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan, ShardingPlanner
from torchrec.modules import embedding_configs as configs
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from oper.errors import InvalidInputError, PlanError
from oper.integration import torchrec_plans
from oper.integration.torchrec_plans import (
    ExportOptions,
    OperPlanner,
    from_torchrec,
    lost_in_torchrec,
    to_torchrec,
)
from oper.integration.torchrec_proposals import planner_topology, torchrec_proposals
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.search import evaluate, make_plan, make_problem
from oper.search.planner import plan_problem
from oper.search.problem.space import EVERYTHING
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Topology
from tests.checkpoint_support import random_kjt
from tests.support import map_tiers
from tests.world_support import run_world

ROWS = (40, 1000, 5000, 8, 301)
DIM = 16


class Model(nn.Module):
    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection([configs.EmbeddingBagConfig(
            name=f"t{k}", num_embeddings=n, embedding_dim=DIM, feature_names=[f"f{k}"])
            for k, n in enumerate(ROWS)], device=torch.device(device))

    def forward(self, kjt: Any) -> torch.Tensor:
        found = self.bags(kjt).to_dict()
        return torch.cat([found[f"f{k}"] for k in range(len(ROWS))], 1)


def specs() -> list[TableSpec]:
    return [TableSpec(f"t{k}", n, DIM, (f"f{k}",)) for k, n in enumerate(ROWS)]


def plan_of(tiers: dict[int, Any], world_size: int = 4, **fields: Any) -> Plan:
    """Return a plan with all tables on rank 0, except those given by tiers or pieces."""
    entries = []
    for k, spec in enumerate(specs()):
        mine = tiers.get(k, (Tier(0, spec.num_rows, "owned", (0,)),))
        pieces = mine if isinstance(mine[0], Piece) else (Piece(0, DIM, tuple(mine)),)
        entries.append(TablePlan(spec, pieces, fields.get("heads", {}).get(
            k, np.zeros(0, np.int64))))
    return Plan(world_size, tuple(entries))


def shards_of(exported: Any, table: str) -> list[tuple[int, list[int], list[int]]]:
    s = exported.plan["bags"][table]
    return [(r, list(x.shard_offsets), list(x.shard_sizes))
            for r, x in zip(s.ranks, s.sharding_spec.shards, strict=True)]


def kind_of(exported: Any, table: str) -> str:
    return exported.plan["bags"][table].sharding_type


def zipf_stats() -> AccessStats:
    tables = {}
    for k, n in enumerate(ROWS):
        counts = np.rint(1e5 / np.arange(1, n + 1)).astype(np.int64)
        tables[f"t{k}"] = TableStats.from_counts(
            n, np.random.default_rng(k).permutation(n), counts,
            (np.array([3]), np.array([int(counts.sum()) // 3])))
    return AccessStats(100_000, tables, "generated", False)


def gpus(num_ranks: int, per_host: int = 8, memory_bytes: int = 80_000_000_000) -> Topology:
    domains = tuple(Domain((r,), r // per_host, memory_bytes, 2000.0, 5000.0, 40 << 20, 250.0,
                           25.0) for r in range(num_ranks))
    return Topology("gpus", domains, Costs(phase_us=2.0))


# ---- export --------------------------------------------------------------------------------------


def test_whole_tables_columns_and_replicas_are_exported_without_loss() -> None:
    plan = plan_of({
        0: (Tier(0, 40, "replicated", (0, 1, 2, 3)),),
        1: (Tier(0, 1000, "owned", (2,), mode="push"),),
        2: (Piece(0, 4, (Tier(0, 5000, "owned", (3,), mode="push"),)),
            Piece(4, 8, (Tier(0, 5000, "owned", (3,), mode="push"),)),
            Piece(8, 16, (Tier(0, 5000, "owned", (1,), mode="push"),)))})
    out = to_torchrec(plan, Model())
    assert kind_of(out, "t0") == "data_parallel"
    assert out.plan["bags"]["t0"].compute_kernel == "dense"
    assert (kind_of(out, "t1"), shards_of(out, "t1")) == ("table_wise", [(2, [0, 0], [1000, 16])])
    assert kind_of(out, "t2") == "column_wise"
    assert shards_of(out, "t2") == [(3, [0, 0], [5000, 8]), (1, [0, 8], [5000, 8])]
    assert not [x for x in lost_in_torchrec(plan) if x.startswith(("t0", "t1", "t2"))]
    assert "t3: pulled rows are pooled by their owner and pushed" in lost_in_torchrec(plan)


def test_tiers_become_row_ranges_in_proportion_to_the_ranks_rows() -> None:
    plan = plan_of({1: (Tier(0, 100, "replicated", (0, 1, 2, 3)),
                        Tier(100, 700, "striped", (2, 0), weights=(1, 2)),
                        Tier(700, 1000, "owned", (1,)))},
                   heads={1: np.arange(99, -1, -1)})
    exact = ExportOptions(row_ranges="proportional")
    out = to_torchrec(plan, Model(), exact)
    rows = {r: n[0] for r, _, n in shards_of(out, "t1")}
    held = {0: 400, 1: 300, 2: 200, 3: 0}
    assert sum(rows.values()) == 1000
    assert all(abs(rows[r] - 1000 * held[r] / 900) <= 1 for r in held)
    even = shards_of(to_torchrec(plan, Model()), "t1")
    assert [n[0] for _, _, n in even] == [250] * 4
    lost = "; ".join(x for x in lost_in_torchrec(plan, exact) if x.startswith("t1"))
    for text in ("3 tiers", "replicas of 100 rows", "rows striped in hotness order", "pulled rows"):
        assert text in lost
    assert "uneven shares" not in lost
    assert "uneven shares" in "; ".join(lost_in_torchrec(plan))


def test_partial_replicas_and_hosts_are_recognised() -> None:
    plan = plan_of({1: (Tier(0, 10, "replicated", (0, 1)), Tier(10, 1000, "striped", (0, 1, 2, 3))),
                    2: (Tier(0, 5000, "striped", (3, 2)),)})
    hosts = ExportOptions(local_size=2)
    out = to_torchrec(plan, Model(), hosts)
    assert kind_of(out, "t1") == "row_wise" and kind_of(out, "t2") == "table_row_wise"
    assert [r for r, _, _ in shards_of(out, "t2")] == [2, 3]
    assert "t1: partial replicas of 10 rows" in lost_in_torchrec(plan, hosts)
    placement = to_torchrec(plan, Model(), replace(hosts, device_type="cuda")).plan["bags"]["t2"]
    assert str(placement.sharding_spec.shards[1].placement) == "rank:3/cuda:1"


def test_a_smaller_last_host_gets_no_shards_for_missing_ranks() -> None:
    plan = plan_of({2: (Tier(0, 5000, "striped", (3, 4)),)}, world_size=5)
    out = to_torchrec(plan, Model(), ExportOptions(local_size=3))
    assert kind_of(out, "t2") == "row_wise"
    assert [r for r, _, _ in shards_of(out, "t2")] == [0, 1, 2, 3, 4]


def test_invalid_exports_are_refused() -> None:
    with pytest.raises(PlanError, match="another model"):
        to_torchrec(uniform_plan(specs()[:3], 2), Model())
    with pytest.raises(InvalidInputError, match="row_ranges"):
        ExportOptions(row_ranges="odd")
    with pytest.raises(InvalidInputError, match="table_wise"):
        ExportOptions(kinds=frozenset({"row_wise"}))


# ---- import --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [
    {}, {0: (Tier(0, 40, "replicated", (0, 1, 2, 3)),)},
    {2: (Piece(0, 8, (Tier(0, 5000, "owned", (3,)),)), Piece(8, 16, (Tier(0, 5000, "owned",
                                                                         (1,)),)))}])
def test_lossless_exports_are_imported_unchanged(tiers: dict[int, Any]) -> None:
    pushed = map_tiers(plan_of(tiers), lambda x: x if x.placement == "replicated" else replace(
        x, mode="push"))
    again = from_torchrec(to_torchrec(pushed, Model()), specs(), 4)
    assert again.to_text() == pushed.to_text()
    assert lost_in_torchrec(pushed) == []


def test_every_sharding_type_of_torchrec_is_imported() -> None:
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        grid_shard,
        row_wise,
        table_row_wise,
        table_wise,
    )
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection([configs.EmbeddingBagConfig(
                name=f"t{k}", num_embeddings=1003, embedding_dim=256, feature_names=[f"f{k}"])
                for k in range(6)], device=torch.device("meta"))

    model = Wide()
    kinds = [table_wise(rank=3), row_wise(), column_wise(ranks=[1, 2]), data_parallel(),
             table_row_wise(host_index=1), grid_shard(host_indexes=[0, 1])]
    plan = ShardingPlan({"bags": construct_module_sharding_plan(
        model.bags, {f"t{k}": x for k, x in enumerate(kinds)},
        sharder=EmbeddingBagCollectionSharder(), local_size=2, world_size=4, device_type="cuda")})
    tables = [TableSpec(f"t{k}", 1003, 256, (f"f{k}",)) for k in range(6)]
    made = from_torchrec(plan, tables, 4)
    every = (0, 1, 2, 3)
    assert made.table("t0").tiers == (Tier(0, 1003, "owned", (3,), mode="push"),)
    assert [(x.start, x.stop, x.ranks) for x in made.table("t1").tiers] == [
        (0, 251, (0,)), (251, 502, (1,)), (502, 753, (2,)), (753, 1003, (3,))]
    assert [(p.start, p.stop, p.tiers[0].ranks) for p in made.table("t2").pieces] == [
        (0, 128, (1,)), (128, 256, (2,))]
    assert made.table("t3").tiers == (Tier(0, 1003, "replicated", every),)
    assert [x.ranks for x in made.table("t4").tiers] == [(2,), (3,)]
    assert [[x.ranks for x in p.tiers] for p in made.table("t5").pieces] == [
        [(0,), (1,)], [(2,), (3,)]]
    spread = from_torchrec(plan, tables, 4, scattered=True)
    assert spread.table("t1").tiers == (Tier(0, 1003, "striped", every, mode="push"),)
    stated = make_problem(tables, None, gpus(4, 2), batch_size=64, allow=EVERYTHING)
    assert evaluate(made, stated).step_us > 0 and evaluate(spread, stated).step_us > 0


def test_uneven_ranges_become_weighted_stripes() -> None:
    plan = plan_of({2: (Tier(0, 5000, "striped", (0, 1), weights=(1, 3)),)}, 2)
    out = to_torchrec(plan, Model(), ExportOptions(row_ranges="proportional"))
    tier, = from_torchrec(out, specs(), 2, scattered=True).table("t2").tiers
    assert tier.ranks == (0, 1)
    assert tier.weights[1] / tier.weights[0] == pytest.approx(3, rel=0.01)


def test_import_names_a_missing_table() -> None:
    out = to_torchrec(plan_of({}), Model())
    with pytest.raises(PlanError, match="'other'"):
        from_torchrec(out, [TableSpec("other", 5, 4, ("f",))], 4)


# ---- OPER as TorchRec's planner, TorchRec's planner as a peer ------------------------------------


def _train(rank: int, world_size: int) -> tuple[dict[str, str], float, list[str], str]:
    """Plan collectively, shard by DistributedModelParallel, compare with the unsharded model."""
    from torchrec.distributed.model_parallel import DistributedModelParallel

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [*super().sharding_types(compute_device_type), "row_wise"]

    sharders: list[Any] = [Sharder()]
    plain, model = Model("cpu"), Model("cpu")
    # Less than the largest table takes: its rows must be spread.
    topology = gpus(world_size, memory_bytes=4 * DIM * 4800)
    planner = OperPlanner(zipf_stats() if rank == 0 else None, topology, batch_size=8)
    chosen = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=chosen,
                                       sharders=sharders)
    sharded.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()})
    kjt = random_kjt({f"f{k}": n for k, n in enumerate(ROWS)}, 8, rank)
    worst = float((sharded(kjt) - plain(kjt)).abs().max())
    assert planner.oper_plan is not None
    return ({n: s.sharding_type for n, s in chosen.plan["bags"].items()}, worst, planner.lost,
            planner.oper_plan.to_text())


def test_planner_in_distributed_model_parallel() -> None:
    found = run_world(2, _train)
    assert found[0][0] == found[1][0] and found[0][3] == found[1][3]
    assert max(x[1] for x in found) < 1e-5
    assert found[0][0]["t2"] in ("row_wise", "column_wise")
    assert set(found[0][0]) == {f"t{k}" for k in range(len(ROWS))}


def _fail(rank: int, world_size: int) -> str:
    planner = OperPlanner(None, gpus(world_size, memory_bytes=1000), batch_size=8)
    try:
        planner.collective_plan(Model("cpu"))
    except Exception as error:
        return type(error).__name__
    return "none"


def test_a_planning_error_reaches_all_ranks() -> None:
    assert run_world(2, _fail) == ["PlanInfeasibleError"] * 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in every space are made quickly: these tests are about their exports."""
    monkeypatch.setattr(torchrec_plans, "plan_problem", partial(plan_problem, target_gap=0.5))


@pytest.mark.usefixtures("quick")
def test_the_planner_uses_only_sharding_types_of_the_sharders() -> None:
    planner = OperPlanner(zipf_stats(), gpus(4), batch_size=64)
    assert isinstance(planner, ShardingPlanner)
    out = planner.plan(Model(), [EmbeddingBagCollectionSharder()])
    assert {kind_of(out, f"t{k}") for k in range(len(ROWS))} <= {
        "table_wise", "column_wise", "data_parallel"}
    assert planner.oper_plan is not None
    exact = make_plan(specs(), zipf_stats(), gpus(4), batch_size=64, allow=EVERYTHING)
    assert planner.oper_plan.step_us >= exact.lower_bound_us
    with pytest.raises(InvalidInputError, match="nothing to plan"):
        planner.plan(nn.Linear(2, 2), [])
    with pytest.raises(InvalidInputError, match="EmbeddingBagCollection"):
        planner.plan(Model(), [])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("constraints", [
    {"t2": {"ranks": [0, 1]}}, {"t2": {"ranks": [0, 1], "modes": ["push"]}},
    {"t2": {"tiers": [{"rows": [0, 5000], "place": "owned", "ranks": [2]}]}},
], ids=["ranks", "modes", "tiers"])
def test_exports_of_the_planner_keep_constraints(constraints: Any) -> None:
    planner = OperPlanner(zipf_stats(), gpus(4), batch_size=64, constraints={"tables": constraints})
    out = planner.plan(Model())
    allowed = [0, 1] if "ranks" in constraints["t2"] else [2]
    assert set(out.plan["bags"]["t2"].ranks) <= {*allowed}


@pytest.mark.usefixtures("quick")
def test_exports_that_break_constraints_are_refused() -> None:
    """Two ranks must share the largest table, but TorchRec's row-wise sharding uses all four."""
    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "row_wise"]

    spread = {"t2": {"ranks": [0, 1]}}
    planner = OperPlanner(zipf_stats(), gpus(4, memory_bytes=4 * DIM * 4800), batch_size=8,
                          constraints={"tables": spread})
    with pytest.raises(PlanError, match=r"no exported plan keeps.*'t2' uses ranks"):
        planner.plan(Model(), [Sharder()])
    planner.constraints = None
    assert planner.plan(Model(), [Sharder()]).plan["bags"]["t2"].ranks == [0, 1, 2, 3]


def test_plans_of_torchrecs_planner_can_be_evaluated() -> None:
    stated = make_problem(specs(), zipf_stats(), gpus(4), batch_size=64, allow=EVERYTHING)
    found = dict(torchrec_proposals(stated, 20.0))
    assert {"table-wise only", "greedy by cost", "greedy"} <= set(found)
    assert all(x.placement == "owned" for t in found["table-wise only"].tables for x in t.tiers)
    exact = make_plan(specs(), zipf_stats(), gpus(4), batch_size=64, allow=EVERYTHING)
    for plan in found.values():
        assert evaluate(plan, stated).step_us >= exact.lower_bound_us
    with pytest.raises(InvalidInputError, match="time_limit_s"):
        next(torchrec_proposals(stated, 0.0))


def test_torchrecs_topology_has_memory_by_rank_and_hosts() -> None:
    unequal = gpus(4, 2)
    slow = replace(unequal.domains[3], memory_bytes=10**9)
    seen = planner_topology(replace(unequal, domains=(*unequal.domains[:3], slow)))
    assert [d.storage.hbm for d in seen.devices] == [80 * 10**9] * 3 + [10**9]
    assert seen.local_world_size == 2 and seen.compute_device == "cuda"
    assert seen.hbm_mem_bw == pytest.approx(2e9)
    assert planner_topology(Topology.this_host(2)).compute_device == "cpu"
