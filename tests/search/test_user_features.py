"""Features that a request names once for all of its candidates: problem, bound and plans."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from search_cases import counted, gpus, host, tables_and_stats

from oper import cli
from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.search.certificate.check import verify_plan
from oper.search.cost.model import CostModel, evaluate
from oper.search.planner import make_plan
from oper.search.pricing.master import solve_node
from oper.search.pricing.node import Node
from oper.search.problem.digest import problem_digest
from oper.search.problem.statement import (
    IDS,
    TOUCHED,
    TOUCHED_ALL,
    Problem,
    make_problem,
    make_table,
)
from oper.search.relaxation.relaxation import Relaxation
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Topology
from tests.search.oracle import relaxed_by_cvxpy

BATCH, CANDIDATES, LENGTH, ROWS = 256, 32, 3, 4000


def one_table(samples_per_bag: float, features: tuple[str, ...] = ("user",), presence: bool = False
              ) -> tuple[TableSpec, AccessStats]:
    found = counted(ROWS, 1.1, np.random.default_rng(3), length=LENGTH)
    if presence:
        found = replace(found, presence_samples=np.array([BATCH]), presence_rows=np.array([9.0]),
                        presence_windows=np.array([5]))
    stats = AccessStats(200_000 // len(features), {"t": found}, "", True,
                        {"user": samples_per_bag} if samples_per_bag > 1 else {})
    return TableSpec("t", ROWS, 16, features), stats


@pytest.mark.parametrize("presence", [False, True])
def test_a_user_s_bags_count_once_per_request(presence: bool) -> None:
    spec, stats = one_table(CANDIDATES, presence=presence)
    shared = make_table(spec, stats, BATCH, 4)
    # As many bags as in a batch of one sample per request.
    fewer = make_table(*one_table(1), BATCH // CANDIDATES, 4)
    assert np.array_equal(shared.cumulative, fewer.cumulative)
    assert shared.traffic.num_bags == fewer.traffic.num_bags == BATCH / CANDIDATES
    assert (shared.num_outputs, fewer.num_outputs) == (BATCH, BATCH / CANDIDATES)


@pytest.mark.parametrize("candidates", [BATCH, BATCH + 1, 1e300])
def test_a_batch_smaller_than_a_request_has_one_bag(candidates: float) -> None:
    table = make_table(*one_table(candidates), BATCH, 4)
    assert (table.traffic.num_bags, table.num_outputs) == (1.0, BATCH)
    assert table.total[IDS] == pytest.approx(LENGTH)
    assert np.array_equal(table.cumulative, make_table(*one_table(1), 1, 4).cumulative)


def test_simulated_requests_touch_what_the_problem_expects() -> None:
    spec, stats = one_table(CANDIDATES)
    table, found = make_table(spec, stats, BATCH, 4), stats.tables["t"]
    p = found.head_counts / found.num_accesses
    rng = np.random.default_rng(0)
    for feature, ranks in ((TOUCHED, 1), (TOUCHED_ALL, 4)):
        drawn = [np.unique(rng.choice(found.head_ids, ranks * BATCH // CANDIDATES * LENGTH, p=p)
                           ).size for _ in range(300)]
        assert np.mean(drawn) == pytest.approx(table.total[feature], rel=0.02)


def test_a_table_of_a_user_s_and_a_candidate_s_feature_lies_between() -> None:
    spec, stats = one_table(CANDIDATES, ("user", "item"))  # two bags per sample
    table = make_table(spec, stats, BATCH, 4)
    assert table.traffic.num_bags == pytest.approx(BATCH + BATCH / CANDIDATES)
    assert table.total[IDS] == pytest.approx(LENGTH * table.traffic.num_bags)
    assert table.num_outputs == pytest.approx(2 * BATCH)


def stated(topology: Topology, users: Iterable[str], objective: str, candidates: float = CANDIDATES
           ) -> Problem:
    specs, stats = tables_and_stats(5, 4)
    return make_problem(specs, replace(stats, samples_per_bag=dict.fromkeys(users, candidates)),
                        topology, objective=objective, batch_size=BATCH)


@pytest.mark.parametrize("objective", ["training", "inference"])
def test_every_term_but_outputs_is_that_of_fewer_bags(objective: str) -> None:
    """Loads of a plan are linear in ids, rows and bags: no term sees the samples of a bag."""
    specs, stats = tables_and_stats(3, 4)
    every = make_problem(specs, replace(stats, samples_per_bag={
        f: CANDIDATES for s in specs for f in s.features}), gpus(4), objective=objective,
        batch_size=BATCH)
    fewer = make_problem(specs, stats, gpus(4), objective=objective,
                         batch_size=BATCH // CANDIDATES)
    for placement in ("owned", "striped", "replicated"):
        plan = uniform_plan(specs, 4, placement, objective=objective)
        for a, b in zip(every.tables, fewer.tables, strict=True):
            pieces = plan.table(a.spec.name).pieces
            found = [CostModel(p).tally(t, pieces, True).rows for p, t in ((every, a), (fewer, b))]
            np.testing.assert_allclose(*found, rtol=1e-12)


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize("topology", [host(4), gpus(4)], ids=["host", "gpus"])
def test_the_bound_knows_user_features(topology: Topology, objective: str) -> None:
    """It equals the formulation in cvxpy, is certified, and lies below every plan."""
    problem = stated(topology, ["f0", "f2", "f4"], objective)
    relaxation = Relaxation(CostModel(replace(problem, allow=problem.allow - {"push", "columns"})))
    assert solve_node(Node(relaxation), tolerance=1e-7).lower_bound_us == pytest.approx(
        relaxed_by_cvxpy(relaxation), rel=1e-6)
    specs = [t.spec for t in problem.tables]
    stats = replace(tables_and_stats(5, 4)[1], samples_per_bag={
        f: CANDIDATES for f in ("f0", "f2", "f4")})
    plan = make_plan(specs, stats, topology, objective=objective, batch_size=BATCH)
    checked = verify_plan(plan, problem)
    assert checked.certified and 0 < checked.lower_bound_us <= plan.step_us
    for placement in ("owned", "striped", "replicated"):
        other = evaluate(uniform_plan(specs, 4, placement, objective=objective), problem)
        assert plan.step_us <= other.step_us and checked.lower_bound_us <= other.step_us
    # Without shared features, the plan takes longer and its certificate is not valid.
    alone = stated(topology, [], objective)
    assert evaluate(plan, alone).step_us > plan.step_us
    assert not verify_plan(plan, alone).certified
    assert len({problem_digest(p) for p in (
        problem, alone, stated(topology, ["f0", "f2", "f4"], objective, 16))}) == 3


@pytest.mark.parametrize("features", [{"nobody": 2.0}, {"sequence": 2.0}])
def test_features_that_cannot_be_shared_are_named(features: dict[str, float]) -> None:
    tables = {n: TableStats(9, tail_values=np.zeros(1, np.int64), tail_num_rows=np.array([9]))
              for n in ("a", "b")}
    specs = [TableSpec("a", 9, 8, ("user",)), TableSpec("b", 9, 8, ("sequence",), pooling="none")]
    with pytest.raises(InvalidInputError, match=rf"\['{next(iter(features))}'\], expected .*user"):
        make_problem(specs, AccessStats(1, tables, samples_per_bag=features), host(2),
                     batch_size=8)


def test_statistics_keep_them(tmp_path: Path) -> None:
    _, stats = one_table(CANDIDATES)
    stats.save(tmp_path / "s.npz")
    assert AccessStats.load(tmp_path / "s.npz").samples_per_bag == {"user": CANDIDATES}
    assert (stats + stats).samples_per_bag == {"user": CANDIDATES}
    with pytest.raises(InvalidInputError, match="the same in both parts"):
        _ = stats + replace(stats, samples_per_bag={})
    with pytest.raises(InvalidInputError, match=r"samples_per_bag=.*>= 1"):
        replace(stats, samples_per_bag={"user": 0.5})


def test_the_command_plans_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats, plan = tmp_path / "s.npz", tmp_path / "p.json"
    one_table(1)[1].save(stats)
    tables = tmp_path / "tables.json"
    tables.write_text(json.dumps([one_table(1)[0].to_json()]))
    words = ["plan", str(stats), "-o", str(plan), "--topology", "h100-8", "--tables", str(tables),
             "--objective", "inference", "--json"]

    def told(*more: str) -> dict[str, float]:
        capsys.readouterr()
        assert cli.main([*words, *more]) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    alone = told()["step_us"]
    shared = told("--user-features", "user", "--candidates", "64")["step_us"]
    assert shared < alone
    assert json.loads(plan.read_text())["notes"]["samples_per_bag"] == {"user": 64.0}
    # Other commands take them from the plan.
    assert cli.main(["verify", str(plan), "--stats", str(stats)]) == 0
    assert "verified" in capsys.readouterr().out
    assert cli.main(["explain", str(plan), "--stats", str(stats), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_us"] == pytest.approx(shared)
    goal = ["--request-rate", "1000", "--latency-bound", "10"]
    told("--user-features", "user", "--candidates", "64", *goal)
    assert json.loads(plan.read_text())["notes"]["samples_per_bag"] == {"user": 64.0}
    assert cli.main([*words, "--candidates", "64"]) == 2
    assert "both or neither" in capsys.readouterr().err
