"""Peers' plans are valid, fit the memory, follow their method, and are never faster than OPER's."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from oper.bench.plan import workloads as plan_workloads
from oper.search import evaluate, make_problem
from oper.search.certificate.check import verify_plan
from oper.search.explain.summary import replica_share
from oper.search.peers import markov
from oper.search.peers.baselines import peers, score_peers
from oper.search.peers.markov import markov_chain
from oper.search.peers.programs import coverage_milp, extraction_lp
from oper.search.planner import plan_problem
from oper.search.problem.constraints import violations
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.problem.statement import IDS
from oper.stats import AccessStats
from oper.tables import TableSpec
from tests.search.search_cases import (
    counted,
    gpus,
    loaded,
    problem,
    space_bound,
    tables_and_stats,
)


@functools.cache
def stated_and_bound(objective):
    """A problem for all peers, and its bound (us)."""
    stated = problem(12, 3, gpus(4), objective, allow=EVERYTHING)
    return stated, space_bound(stated)


@pytest.mark.parametrize("name", sorted(peers()))
@pytest.mark.parametrize("objective", ["training", "inference"])
def test_every_peer_gives_a_valid_plan_above_the_bound(name, objective):
    stated, bound = stated_and_bound(objective)
    plan = peers()[name](stated, 0)
    assert plan is not None
    plan.check_for([t.spec for t in stated.tables], 4)
    found = evaluate(plan, stated)
    assert found.fits
    if objective == "training":  # inference plans may not push, but the peers' plans do
        assert found.step_us >= bound * (1 - 1e-9)


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


def test_peers_need_no_memory_for_optimizer_states_of_tables_that_are_only_read():
    specs, stats = tables_and_stats(6, 1)
    specs = [replace(s, optimizer="adam") for s in specs]
    need = sum(s.num_rows * s.row_bytes for s in specs)  # a third of the bytes in training
    stated = make_problem(specs, stats, gpus(2, memory_bytes=1.3 * need), batch_size=64,
                          objective="inference", allow=EVERYTHING)
    found = score_peers(stated)
    assert {"largest-first-size", "hybrid-small-tables-replicated", "recshard-coverage-milp",
            "neuroshard-beam"} <= found.keys()


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
    stated = loaded(made, gpus(4))
    plan = plan_problem(stated)
    # A few of the hottest rows, or a cold tail, touched once each, may go either way.
    for t in stated.tables:
        tiers = [x for p in plan.table(t.spec.name).pieces for x in p.tiers]
        most = max(tiers, key=lambda x: t.features(x.start, x.stop, True)[IDS])
        assert most.mode == ("push" if pushes else "pull")


def test_lookups_between_hosts_are_pushed_if_that_sends_less():
    """Inference pushes between hosts, too, as all ranks take part anyway, but not in a host,
    where ranks would have to wait."""
    made = plan_workloads._workload([2_000_000] * 8, [64] * 8, [40.0] * 8, [0.4] * 8, 4096)
    for per_host, pushes in ((1, True), (4, False)):
        topology = gpus(4, per_host=per_host, memory_bytes=2.5e9)  # of 4.1e9 for all tables
        stated = loaded(made, topology, objective="inference", allow=None)
        plan = plan_problem(stated)
        modes = {x.mode for t in plan.tables for p in t.pieces for x in p.tiers
                 if x.placement != "replicated"}
        assert ("push" in modes) == pushes
        verdict = verify_plan(plan, stated)
        assert verdict.certified, verdict.why
        assert 0 < plan.lower_bound_us <= plan.step_us
        pulled = plan_problem(loaded(made, topology, objective="inference", allow=EXECUTABLE))
        assert plan.step_us < (0.9 if pushes else 1.0001) * pulled.step_us


def test_power_law_statistics_add_up():
    stats = plan_workloads.power_law(3_000_000, 1.05, 2.5)
    assert stats.num_rows == 3_000_000 and stats.head_ids.size == 64
    assert stats.pooling_factor == pytest.approx(2.5, rel=0.01)
    assert stats.coverage(1_000_000) > 0.8


# ---- peers that solve a program or run a Markov chain --------------------------------------------


def lookups_by_rank(plan, stated):
    load = np.zeros(plan.world_size)
    for t in stated.tables:
        for tier in plan.table(t.spec.name).tiers:
            if tier.placement == "owned":
                part = t.features(tier.start, tier.stop, True)[IDS] * t.spec.row_bytes
                load[tier.ranks[0]] += part
    return load


def test_recshard_balances_lookups_exactly_where_everything_fits():
    """Graham's worst case for three ranks: largest-first gives 11 where 9 is optimal."""
    rng = np.random.default_rng(0)
    specs = [TableSpec(f"t{k}", 500, 8 * size, (f"f{k}",))
             for k, size in enumerate((5, 5, 4, 4, 3, 3, 3))]
    stats = AccessStats(200_000, {s.name: counted(500, 1.0, rng) for s in specs}, "made", True)
    stated = make_problem(specs, stats, gpus(3), batch_size=256, allow=EVERYTHING)
    plan = coverage_milp(stated, 0)
    assert all(len(t.tiers) == 1 and t.tiers[0].placement == "owned" for t in plan.tables)
    greedy = peers()["largest-first-lookups"](stated, 0)
    ours, theirs = (lookups_by_rank(p, stated).max() for p in (plan, greedy))
    assert theirs / ours == pytest.approx(11 / 9)


def test_recshard_keeps_hot_rows_fast_and_stripes_cold_ones_where_memory_is_short():
    roomy = problem(5, 3, gpus(2), "inference", allow=EVERYTHING)
    need = sum(t.spec.bytes_for(False) for t in roomy.tables)
    tight = problem(5, 3, gpus(2, memory_bytes=0.6 * need), "inference", allow=EVERYTHING)
    plan = coverage_milp(tight, 0)
    assert evaluate(plan, tight).fits
    cut = [t for t in plan.tables if len(t.tiers) == 2]
    assert cut
    for entry in cut:
        hot, cold = entry.tiers
        assert hot.placement == "owned" and cold.placement == "striped"
        table = tight.table(entry.table.name)
        assert table.features(hot.start, hot.stop, True)[IDS] > 0.5 * table.total[IDS] * 0.99


def test_recshard_reports_a_program_that_is_too_large():
    assert coverage_milp(problem(100, 3, gpus(128), allow=EVERYTHING), 0) is None


def test_ugache_gives_less_to_ranks_with_less_memory():
    equal = problem(8, 6, gpus(4), "inference")
    need = sum(t.spec.num_rows * t.spec.row_bytes for t in equal.tables)
    stated = problem(8, 6, gpus(4, memory_bytes=0.5 * need, slow=2), "inference")
    plan = extraction_lp(stated, 0)
    assert evaluate(plan, stated).fits
    tails = [t.tiers[-1] for t in plan.tables if t.tiers[-1].placement == "striped"]
    assert tails
    rows = np.zeros(4)
    for tier in tails:
        rows[list(tier.ranks)] += tier.weights or (1,) * len(tier.ranks)
    assert rows[:2].sum() > 1.1 * rows[2:].sum()
    # The symmetric closed form deals evenly, which the smaller ranks cannot hold.
    assert peers()["ugache-replicate-or-partition"](stated, 0) is None


def test_ugache_on_equal_ranks_is_the_closed_form():
    stated = problem(8, 6, gpus(4), "inference")
    # Links read concurrently with memory, so that some rows are partitioned even if all fit.
    assert replica_share(extraction_lp(stated, 0), stated)[1] > 0.85
    need = sum(t.spec.num_rows * t.spec.row_bytes for t in stated.tables)
    tight = problem(8, 6, gpus(4, memory_bytes=0.5 * need), "inference")
    linear, closed = (evaluate(f(tight, 0), tight).step_us for f in (
        extraction_lp, peers()["ugache-replicate-or-partition"]))
    assert linear == pytest.approx(closed, rel=0.1)
    for entry in extraction_lp(tight, 0).tables:  # hot rows first, the tail over all ranks
        assert [t.placement for t in entry.tiers] in (
            ["replicated"], ["striped"], ["replicated", "striped"])


def test_flexshard_replicates_the_rows_that_take_half_of_the_lookups():
    stated = problem(6, 2, gpus(4), "inference")
    for entry in peers()["flexshard-top-mass"](stated, 0).tables:
        table, hot = stated.table(entry.table.name), entry.tiers[0]
        assert hot.placement == "replicated"
        assert table.features(0, hot.stop, True)[IDS] >= 0.5 * table.total[IDS] * (1 - 1e-6)
        before = table.edges[np.searchsorted(table.edges, hot.stop) - 1]
        assert table.prefix(before)[IDS] < 0.5 * table.total[IDS]


# -- the Markov chain ------------------------------------------------------------------------------


def test_a_longer_chain_is_never_worse_and_equal_seeds_are_equal():
    stated = problem(8, 3, gpus(4), allow={"owned", "pull"})
    steps = [markov_chain(stated, 5, n).step_us for n in (0, 50, 300)]
    assert steps == sorted(steps, reverse=True) and steps[-1] < 0.8 * steps[0]
    assert markov_chain(stated, 5, 200).to_text() == markov_chain(stated, 5, 200).to_text()
    assert markov_chain(stated, 6, 200).to_text() != markov_chain(stated, 5, 200).to_text()


def test_the_chain_comes_close_and_takes_worse_configurations_on_its_way(monkeypatch):
    stated = problem(6, 1, gpus(3), allow={"owned", "pull"})
    plan = markov_chain(stated, 0, 500)
    assert plan.step_us <= plan_problem(stated).step_us * 1.02
    monkeypatch.setattr(markov, "_BETA", np.inf)  # accepts no increase
    assert markov_chain(stated, 0, 500).to_text() != plan.to_text()


def test_the_markov_chain_keeps_constraints_and_may_find_nothing():
    specs, stats = tables_and_stats(6, 4)
    held = {"tables": {"t1": {"ranks": [1, 2]}, "t2": {"placements": ["owned"]},
                       "t3": {"tiers": [{"rows": [0, specs[3].num_rows], "place": "owned",
                                         "ranks": [0]}]}}}
    stated = make_problem(specs, stats, gpus(4), batch_size=128, constraints=held,
                          allow=EVERYTHING)
    plan = markov_chain(stated, 0, 500)
    assert violations(plan, stated.constraints) == []
    assert evaluate(plan, stated).step_us == pytest.approx(plan.step_us)
    assert plan_problem(stated).step_us <= plan.step_us * 1.01
    assert markov_chain(problem(3, 1, gpus(2, memory_bytes=1000)), 0, 100) is None
