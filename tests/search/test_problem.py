"""The planning problem: curves over hotness, large tables, features named once per request."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.errors import InvalidInputError, UsageError
from oper.plan import uniform_plan
from oper.search.certificate.carried import problem_digest
from oper.search.certificate.check import verify_plan
from oper.search.cost.model import CostModel, evaluate
from oper.search.planner import make_plan
from oper.search.pricing.master import solve_node
from oper.search.pricing.node import Node
from oper.search.problem.presets import topology_preset
from oper.search.problem.statement import (
    IDS,
    ROWS,
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
from tests.search.search_cases import counted, gpus, host, problem, tables_and_stats


def one_table(num_rows: int = 5000, exponent: float = 1.05, length: int = 2, world: int = 4,
              in_order: bool = True, batch: int = 128):
    rng = np.random.default_rng(3)
    stats = AccessStats(200_000, {"t": counted(num_rows, exponent, rng, length=length,
                                               in_order=in_order)}, "", in_order)
    return make_table(TableSpec("t", num_rows, 16, ("f",)), stats, batch, world), stats


def test_features_equal_sums_of_presence_over_rows():
    table, stats = one_table()
    found = stats.tables["t"]
    num_ids = 128 * 2
    p = np.zeros(5000)
    p[found.head_ids] = found.head_counts / found.num_accesses
    # Every row was seen, so that unseen rows have no mass.
    assert (p > 0).all()
    assert table.total[ROWS] == 5000
    assert table.total[IDS] == pytest.approx(num_ids)
    assert table.total[TOUCHED] == pytest.approx((1 - (1 - p) ** num_ids).sum(), rel=1e-9)
    assert table.total[TOUCHED_ALL] == pytest.approx((1 - (1 - p) ** (4 * num_ids)).sum(), rel=1e-9)


def test_blocks_are_few_and_cover_the_table():
    table, _ = one_table(num_rows=200_000)
    assert 10 <= table.blocks.shape[0] <= 100
    assert table.edges[0] == 0 and table.edges[-1] == 200_000
    assert (np.diff(table.edges) > 0).all()
    heat = table.blocks[:, IDS] / table.blocks[:, ROWS]
    assert (np.diff(heat) <= 1e-12).all()


def test_a_billion_rows_need_no_dense_array():
    values = np.array([0, 1, 2, 50])
    rows = np.array([10**9 - 1_100_100, 10**6, 10**5, 0])
    stats = TableStats(10**9, np.arange(100), np.full(100, 1000), values, rows,
                       np.array([1]), np.array([2_300_000]))
    table = make_table(TableSpec("t", 10**9, 64, ("f",)),
                       AccessStats(1_300_000, {"t": stats}, "", True), 4096, 8)
    assert table.cumulative.size < 1000
    assert table.total[ROWS] == pytest.approx(1e9)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("period", [1, 3, 8])
def test_stripes_add_up_to_their_tier(in_order, period):
    table, _ = one_table(num_rows=300, in_order=in_order)
    for ordered in ({True, in_order} if in_order else {True, False}):
        shares = table.shares(5, 211, period, ordered)
        assert shares.shape == (4, period)
        assert shares.sum(axis=1) == pytest.approx(table.features(5, 211, ordered))
        expected = [len(range(5 + k, 211, period)) for k in range(period)]
        assert shares[ROWS] == pytest.approx(expected)


def test_ids_without_order_are_followed_by_id():
    table, stats = one_table(num_rows=300, in_order=False)
    found = stats.tables["t"]
    hottest = found.head_counts / found.num_accesses
    p = np.zeros(300)  # each row is as hot as the mean of its block in the order of hotness
    for first, stop in itertools.pairwise(table.edges):
        p[found.head_ids[first:stop]] = hottest[first:stop].sum() / (stop - first)
    shares = table.shares(10, 200, 7, False)
    for k in range(7):
        assert shares[IDS, k] == pytest.approx(256 * p[10 + k:200:7].sum())


def test_a_head_that_is_colder_than_other_rows_keeps_its_share():
    """As the default row of a dynamic table, which once got the lookups of the hottest key."""
    found = TableStats(2000, np.array([0]), np.array([1001]), np.array([0, 9, 9999]),
                       np.array([998, 1000, 1]), np.ones(1, np.int64), np.array([20_000]))
    spec, stats = TableSpec("t", 2000, 16, ("f",)), AccessStats(20_000, {"t": found})
    problem = make_problem([spec], stats, topology_preset("h100-8"), batch_size=64).tables[0]
    assert problem.edges.tolist() == [0, 1, 2000]
    assert problem.cumulative[IDS] / problem.total[IDS] == pytest.approx([0, 0.05, 1], abs=1e-3)


def test_measured_presence_replaces_independence():
    rng = np.random.default_rng(1)
    base = counted(2000, 1.0, rng)
    independent = make_table(TableSpec("t", 2000, 8, ("f",)),
                             AccessStats(200_000, {"t": base}, "", True), 128, 1)
    half = independent.total[TOUCHED] / 2
    found = TableStats.from_counts(2000, base.head_ids, base.head_counts,
                                   (base.length_values, base.length_counts),
                                   (np.array([128]), np.array([half]), np.array([9])))
    measured = make_table(TableSpec("t", 2000, 8, ("f",)),
                          AccessStats(200_000, {"t": found}, "", True), 128, 1)
    assert measured.total[TOUCHED] == pytest.approx(half, rel=1e-3)
    assert measured.total[IDS] == independent.total[IDS]
    assert measured.blocks[0, TOUCHED] <= 1.0


def test_without_statistics_one_warning_and_equal_rows():
    specs, _ = tables_and_stats(3, 0)
    with pytest.warns(UserWarning, match="no access statistics") as seen:
        stated = make_problem(specs, None, host(2), batch_size=64)
    assert len(seen) == 1
    table = stated.tables[0]
    heat = table.blocks[:, IDS] / table.blocks[:, ROWS]
    assert heat == pytest.approx(np.full(heat.size, 64 / table.spec.num_rows))


@pytest.mark.parametrize(("change", "word"), [
    ({"objective": "fun"}, "objective"), ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 2**62}, "batch_size"),
    ({"allow": {"striped"}}, "allow"), ({"allow": {"sideways", "pull"}}, "allow"),
    ({"stats": "stats.npz"}, "AccessStats.load"), ({"topology": "h100-8"}, "topology_preset"),
])
def test_bad_arguments_are_named(change, word):
    specs, stats = tables_and_stats(2, 0)
    arguments = {"stats": stats, "topology": gpus(2), "objective": "training", "batch_size": 8,
                 **change}
    with pytest.raises(InvalidInputError, match=word):
        make_problem(specs, **arguments)


def test_statistics_of_another_model_are_refused():
    specs, stats = tables_and_stats(2, 0)
    wrong = TableSpec("t0", specs[0].num_rows + 1, 8)
    with pytest.raises(InvalidInputError, match="num_rows"):
        make_problem([wrong], stats, gpus(2), batch_size=8)


def test_a_row_zero_for_rare_ids_comes_first_whatever_its_count():
    stats = TableStats.from_counts(4, np.arange(4), np.array([5, 100, 50, 10]),
                                   (np.array([1]), np.array([165])))
    table = make_table(TableSpec("t", 4, 8, ("f",)), AccessStats(165, {"t": stats}, "", True),
                       165, 1)
    assert table.blocks[:, IDS] == pytest.approx([5, 100, 50, 10])


def test_problem_names_its_tables():
    stated = problem(2, 0, host(2))
    assert stated.table("t1").spec.name == "t1"
    with pytest.raises(InvalidInputError, match="nope"):
        stated.table("nope")


# ---- very large tables, from a histogram and a head ----------------------------------------------

CODE = """
import re
from pathlib import Path
import numpy as np
from tests.search.search_cases import gpus
from oper.search import make_plan
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
specs, stats = [], {}
for k in range(8):
    num_rows = 10**9 if k < 4 else 10**6
    head = 2_000_000_000 // np.arange(100, 300_100)  # Zipf-like, hottest first
    cold = num_rows - head.size
    rows = np.array([cold - cold // 2 - cold // 4, cold // 2, cold // 4])
    num_ids = int(head.sum() + rows @ [0, 1, 3])
    specs.append(TableSpec(f"t{k}", num_rows, 16, (f"f{k}",)))
    stats[f"t{k}"] = TableStats(num_rows, np.arange(head.size) * 3, head, np.array([0, 1, 3]), rows,
                                np.array([1]), np.array([num_ids]))
plan = make_plan(specs, AccessStats(num_ids, stats, "", False), gpus(8), batch_size=4096)
assert 0 <= plan.gap <= 0.05, plan.gap
assert [t.table.num_rows for t in plan.tables] == [s.num_rows for s in specs]
# Not getrusage, which includes the peak of the parent process before exec.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


def test_billions_of_rows_are_planned_in_little_memory() -> None:
    """4e9 rows (dense counts would take 32 GB) within 4 GiB, in a separate process."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False,
                         env={**os.environ, "PYTHONPATH": path})
    assert out.returncode == 0, out.stderr
    print(f"peak {out.stdout.strip()} MiB")
    assert int(out.stdout) < 4096


# ---- features that a request names once for all of its candidates --------------------------------

BATCH, CANDIDATES, LENGTH, USER_ROWS = 256, 32, 3, 4000


def user_table(samples_per_bag: float, features: tuple[str, ...] = ("user",), presence: bool = False
               ) -> tuple[TableSpec, AccessStats]:
    found = counted(USER_ROWS, 1.1, np.random.default_rng(3), length=LENGTH)
    if presence:
        found = replace(found, presence_samples=np.array([BATCH]), presence_rows=np.array([9.0]),
                        presence_windows=np.array([5]))
    stats = AccessStats(200_000 // len(features), {"t": found}, "", True,
                        {"user": samples_per_bag} if samples_per_bag > 1 else {})
    return TableSpec("t", USER_ROWS, 16, features), stats


@pytest.mark.parametrize("presence", [False, True])
def test_a_user_s_bags_count_once_per_request(presence: bool) -> None:
    spec, stats = user_table(CANDIDATES, presence=presence)
    shared = make_table(spec, stats, BATCH, 4)
    # As many bags as in a batch of one sample per request.
    fewer = make_table(*user_table(1), BATCH // CANDIDATES, 4)
    assert np.array_equal(shared.cumulative, fewer.cumulative)
    assert shared.traffic.num_bags == fewer.traffic.num_bags == BATCH / CANDIDATES
    assert (shared.num_outputs, fewer.num_outputs) == (BATCH, BATCH / CANDIDATES)


@pytest.mark.parametrize("candidates", [BATCH, BATCH + 1, 1e300])
def test_a_batch_smaller_than_a_request_has_one_bag(candidates: float) -> None:
    table = make_table(*user_table(candidates), BATCH, 4)
    assert (table.traffic.num_bags, table.num_outputs) == (1.0, BATCH)
    assert table.total[IDS] == pytest.approx(LENGTH)
    assert np.array_equal(table.cumulative, make_table(*user_table(1), 1, 4).cumulative)


def test_a_table_of_a_user_s_and_a_candidate_s_feature_costs_a_value_between() -> None:
    spec, stats = user_table(CANDIDATES, ("user", "item"))  # two bags per sample
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
            found = [CostModel(p).load_vector(t, pieces, True).rows
                     for p, t in ((every, a), (fewer, b))]
            np.testing.assert_allclose(*found, rtol=1e-12)


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize("topology", [host(4), gpus(4)], ids=["host", "gpus"])
def test_the_bound_covers_user_features(topology: Topology, objective: str) -> None:
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


def test_many_bag_lengths_are_grouped() -> None:
    """Each would cost memory and time at all shares of a table that the planner tries."""
    lengths, rng = np.arange(5000), np.random.default_rng(0)
    number = rng.integers(1, 9, lengths.size)
    stats = TableStats.from_counts(9, np.arange(9), np.full(9, int(lengths @ number) // 9),
                                   (lengths, number))
    found = make_table(TableSpec("a", 9, 8), AccessStats(int(number.sum()), {"a": stats}), 64, 2)
    assert found.traffic.lengths.size < 256 and found.traffic.num_ids == pytest.approx(
        64 * (lengths @ number) / number.sum())
    for mass in (1e-6, 1e-4, 1e-3, 0.01, 0.3, 1.0):
        exact = 64 * (1 - ((1 - mass) ** lengths) @ number / number.sum())
        assert found.traffic.bags_touching(mass) == pytest.approx(exact, rel=1e-3)


def test_statistics_store_user_features(tmp_path: Path) -> None:
    _, stats = user_table(CANDIDATES)
    stats.save(tmp_path / "s.npz")
    assert AccessStats.load(tmp_path / "s.npz").samples_per_bag == {"user": CANDIDATES}
    assert (stats + stats).samples_per_bag == {"user": CANDIDATES}
    with pytest.raises(InvalidInputError, match="the same in both parts"):
        _ = stats + replace(stats, samples_per_bag={})
    with pytest.raises(InvalidInputError, match=r"samples_per_bag=.*>= 1"):
        replace(stats, samples_per_bag={"user": 0.5})


@pytest.mark.usefixtures("short_queues")
def test_the_command_plans_with_user_features(printed: Callable[..., str], tmp_path: Path) -> None:
    stats, plan, tables = (tmp_path / n for n in ("s.npz", "p.json", "tables.json"))
    user_table(1)[1].save(stats)
    tables.write_text(json.dumps([user_table(1)[0].to_json()]))
    words = ["plan", stats, "-o", plan, "--topology", "h100-8", "--tables", tables, "--objective",
             "inference", "--json"]
    users = ("--user-features", "user", "--candidates", 64)
    alone, shared = (json.loads(printed(*words, *more))["step_us"] for more in ((), users))
    assert shared < alone
    assert json.loads(plan.read_text())["notes"]["samples_per_bag"] == {"user": 64.0}
    # Other commands take them from the plan.
    assert "verified" in printed("verify", plan, "--stats", stats)
    found = json.loads(printed("explain", plan, "--stats", stats, "--json"))
    assert found["step_us"] == pytest.approx(shared)
    printed(*words, *users, "--request-rate", 1000, "--latency-bound", 10)
    assert json.loads(plan.read_text())["notes"]["samples_per_bag"] == {"user": 64.0}
    with pytest.raises(UsageError, match="both or neither"):
        printed(*words, *users[2:])
