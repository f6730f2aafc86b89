"""Peers' plans are valid, fit the memory, follow their method, and are never faster than OPER's."""

from __future__ import annotations

import numpy as np
import pytest
from search_cases import gpus, problem, space_bound, tables_and_stats

from oper.bench.core.launch import measured
from oper.bench.core.report import report
from oper.bench.plan import suite as bench_plan, workloads as plan_workloads
from oper.search.certificate.check import verify_plan
from oper.search.cost.model import evaluate
from oper.search.peers.baselines import peers, score_peers
from oper.search.planner import plan_problem
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.problem.statement import make_problem


@pytest.mark.parametrize("name", sorted(peers()))
@pytest.mark.parametrize("objective", ["training", "inference"])
def test_every_peer_gives_a_valid_plan_above_the_bound(name, objective):
    stated = problem(12, 3, gpus(4), objective, allow=EVERYTHING)
    plan = peers()[name](stated, 0)
    assert plan is not None
    plan.check_for([t.spec for t in stated.tables], 4)
    found = evaluate(plan, stated)
    assert found.fits
    if objective == "training":  # inference plans may not push, but the peers' plans do
        assert found.step_us >= space_bound(stated) * (1 - 1e-9)


def test_largest_first_is_graham_on_sizes():
    stated = problem(9, 5, gpus(3), allow=EVERYTHING)
    plan = peers()["largest-first-size"](stated, 0)
    load = np.zeros(3)
    for t in sorted(stated.tables, key=lambda t: -t.spec.num_bytes):
        owner = plan.table(t.spec.name).tiers[0].ranks[0]
        assert load[owner] == load.min()
        load[owner] += t.spec.num_bytes


def test_replicate_or_partition_fills_memory_with_the_hottest_rows():
    roomy = problem(8, 6, gpus(4), "inference")
    need = sum(t.spec.num_rows * t.spec.row_bytes for t in roomy.tables)
    tight = problem(8, 6, gpus(4, memory_bytes=0.5 * need), "inference")
    plan = peers()["ugache-replicate-or-partition"](tight, 0)
    found = evaluate(plan, tight)
    assert found.fits and found.domain_bytes.max() >= 0.8 * 0.5 * need
    full = peers()["ugache-replicate-or-partition"](roomy, 0)
    assert {x.placement for t in full.tables for x in t.tiers} == {"replicated"}


def test_peers_return_none_if_nothing_fits():
    stated = problem(3, 1, gpus(2), allow=EVERYTHING)
    largest = max(t.spec.num_bytes for t in stated.tables)
    tight = problem(3, 1, gpus(2, memory_bytes=0.9 * largest), allow=EVERYTHING)
    assert peers()["largest-first-size"](tight, 0) is None
    assert "largest-first-size" not in score_peers(tight)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["training", "inference"])
def test_no_peer_beats_the_plan(seed, objective):
    specs, stats = tables_and_stats(10, seed)
    stated = make_problem(specs, stats, gpus(4), objective=objective, batch_size=2048,
                          allow=EVERYTHING)
    plan = plan_problem(stated)
    assert plan.lower_bound_us <= plan.step_us
    scored = score_peers(stated)
    if objective == "inference":  # peers that push would need barriers
        scored = {n: s for n, s in scored.items() if n.startswith(("ugache", "flexshard"))}
    assert scored
    assert plan.step_us <= min(scored.values()) * 1.0001


@pytest.mark.parametrize(("length", "exponent", "pushes"), [(40.0, 0.4, True), (1.0, 1.2, False)])
def test_long_bags_are_pushed_and_hot_single_ids_are_not(length, exponent, pushes):
    """One partial sum is cheaper than forty rows; a few unique rows than a partial sum per bag."""
    made = plan_workloads._workload([2_000_000] * 8, [64] * 8, [length] * 8, [exponent] * 8, 4096)
    stated = make_problem(made.tables, made.stats, gpus(4), batch_size=4096, allow=EVERYTHING)
    plan = plan_problem(stated)
    # The hottest rows decide; a cold tail, touched once each, may go either way.
    assert {p.tiers[0].mode for t in plan.tables for p in t.pieces} == {
        "push" if pushes else "pull"}


def test_lookups_between_hosts_are_pushed_if_that_sends_less():
    """Also in inference, since all ranks take part anyway; in a host, ranks would wait."""
    made = plan_workloads._workload([2_000_000] * 8, [64] * 8, [40.0] * 8, [0.4] * 8, 4096)
    for per_host, pushes in ((1, True), (4, False)):
        topology = gpus(4, per_host=per_host, memory_bytes=2.5e9)  # of 4.1e9 for all tables
        stated = make_problem(made.tables, made.stats, topology, objective="inference",
                              batch_size=4096)
        plan = plan_problem(stated)
        modes = {x.mode for t in plan.tables for p in t.pieces for x in p.tiers
                 if x.placement != "replicated"}
        assert ("push" in modes) == pushes
        verdict = verify_plan(plan, stated)
        assert verdict.certified, verdict.why
        assert 0 < plan.lower_bound_us <= plan.step_us
        pulled = plan_problem(make_problem(made.tables, made.stats, topology, batch_size=4096,
                                           objective="inference", allow=EXECUTABLE))
        assert plan.step_us < (0.9 if pushes else 1.0001) * pulled.step_us


def test_bench_skips_by_name_without_the_data(monkeypatch):
    monkeypatch.delenv("OPER_DATA", raising=False)
    case = next(c for c in bench_plan.cases(False) if c.workload == "avazu")
    entry, = measured([case])
    assert "OPER_DATA" in entry["skipped"]
    assert case.name in report([entry], bench_plan.FIGURES)


def test_power_law_statistics_add_up():
    stats = plan_workloads.power_law(3_000_000, 1.05, 2.5)
    assert stats.num_rows == 3_000_000 and stats.head_ids.size == 64
    assert stats.pooling_factor == pytest.approx(2.5, rel=0.01)
    assert stats.coverage(1_000_000) > 0.8
