"""Copies on one rank of every host: their cost, the bound with them, and when plans use them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from search_cases import examples, gpus, problem, space_bound, tables_and_stats

from oper.plan import Piece, Tier
from oper.search import EVERYTHING, EXECUTABLE, evaluate, make_problem
from oper.search.cost.model import CostModel
from oper.search.cost.space import COPIES
from oper.search.planner import plan_problem
from oper.search.problem.machine import copy_sets
from oper.search.problem.space import ACROSS_HOSTS, executed_space, used_features
from oper.search.problem.statement import TOUCHED
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.copies import spread_copies
from oper.topology import Topology
from tests.search.random_problems import copied_plan

PER_HOST = EXECUTABLE | {"per_host"}
TOPOLOGIES = {"gpus": gpus(6, per_host=3), "unequal": gpus(6, per_host=2, slow=3),
              "uneven": gpus(5, per_host=3), "processes": Topology.of_domains([0, 0, 1, 1])}


def test_copy_sets_have_one_rank_of_every_host():
    machines = {n: CostModel(problem(1, 0, t)).machine for n, t in TOPOLOGIES.items()}
    assert copy_sets(machines["gpus"]) == [(0, 3), (1, 4), (2, 5)]
    assert copy_sets(machines["uneven"]) == [(0, 3), (1, 4), (2, 3)]
    assert copy_sets(CostModel(problem(1, 0, gpus(4))).machine) == []
    assert copy_sets(CostModel(problem(1, 0, gpus(3, per_host=1))).machine) == []


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize("name", ["gpus", "processes"])
def test_relaxed_copies_consume_as_in_the_cost_model(name, objective):
    """Class means on hosts of equal ranks, which do not depend on the set that has the copies."""
    stated = problem(2, 4, TOPOLOGIES[name], objective, allow=PER_HOST)
    model = CostModel(stated)
    relaxation = Relaxation(model)
    option = [o.kind for o in relaxation.options].index(COPIES)
    for k, t in enumerate(relaxation.tables):
        rows = t.spec.num_rows
        for ranks in copy_sets(model.machine):
            tier = Tier(0, rows, "replicated", ranks)
            tally = model.tally(t, (Piece(0, t.spec.dim, (tier,)),), True)
            asked = relaxation.rows.of_tally(tally)
            expected = t.total @ relaxation.coefficients[k, option]
            assert expected == pytest.approx(asked, rel=1e-9, abs=1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["gpus", "processes"]),
       st.sampled_from(["training", "inference"]))
def test_no_plan_with_copies_is_below_the_bound(seed, name, objective):
    stated = problem(3, seed, TOPOLOGIES[name], objective, allow=PER_HOST)
    bound, rng = space_bound(stated), np.random.default_rng(seed)
    for _ in range(5):
        assert bound <= evaluate(copied_plan(stated, rng), stated).step_us * (1 + 1e-9)


def processes_on_slow_links() -> Topology:
    """Links so slow that exchange between hosts dominates the step; own time adds to it."""
    found = Topology.of_domains([0, 0, 1, 1])
    return replace(found, domains=tuple(replace(d, cross_gbps=0.5) for d in found.domains))


@pytest.mark.parametrize("topology", [gpus(8, per_host=4), processes_on_slow_links()],
                         ids=["gpus", "processes"])
def test_copies_reduce_bytes_between_hosts(topology):
    specs, stats = tables_and_stats(10, 5, max_rows=50_000, lengths=(1, 4))
    plans = {}
    for allow in (EXECUTABLE, PER_HOST):
        stated = make_problem(specs, stats, topology, batch_size=1024, allow=allow)
        plans[allow] = plan_problem(stated, target_gap=0.0)
    saved = plans[PER_HOST]
    assert saved.step_us < 0.98 * plans[EXECUTABLE].step_us
    assert "per_host" in used_features(saved) and 0 <= saved.gap <= 0.08
    hosts = stated.machine.host
    copies = [x.ranks for t in saved.tables for x in t.tiers
              if x.placement == "replicated" and len(x.ranks) < saved.world_size]
    assert all(sorted(hosts[list(r)].tolist()) == [0, 1] for r in copies)
    assert {r for ranks in copies for r in ranks} == set(range(saved.world_size))  # dealt


def test_copies_are_distributed_evenly():
    stated = problem(6, 2, gpus(8, per_host=4), allow=PER_HOST)
    relaxation = Relaxation(CostModel(stated))
    model, first = relaxation.model, copy_sets(relaxation.model.machine)[0]
    placements = [(Piece(0, t.spec.dim, (Tier(0, t.spec.num_rows, "replicated", first),)),)
                  for t in stated.tables]
    load = {s: 0.0 for s in copy_sets(model.machine)}
    for t, (piece,) in zip(stated.tables, spread_copies(relaxation, placements), strict=True):
        edges = [x.start for x in piece.tiers] + [piece.tiers[-1].stop]
        assert edges == sorted(set(edges)) and edges[0] == 0 and edges[-1] == t.spec.num_rows
        assert [x.stop for x in piece.tiers[:-1]] == edges[1:-1]
        for x in piece.tiers:
            load[x.ranks] += t.features(x.start, x.stop, True)[TOUCHED] * t.spec.row_bytes
    assert max(load.values()) <= 1.35 * np.mean(list(load.values()))


def test_default_space_by_topology():
    assert executed_space(Topology.this_host(4)) == EXECUTABLE
    assert executed_space(gpus(8)) == EXECUTABLE | {"push"}
    assert executed_space(gpus(16)) == ACROSS_HOSTS
    assert ACROSS_HOSTS - {"per_host"} <= EVERYTHING
    stated = problem(4, 1, gpus(6, per_host=3), allow=ACROSS_HOSTS)
    plan = plan_problem(stated)
    used = used_features(plan)
    assert not {"push", "per_host"} <= used  # one or the other
    assert plan.step_us <= 1.05 * min(
        plan_problem(problem(4, 1, gpus(6, per_host=3), allow=a)).step_us
        for a in (EXECUTABLE, PER_HOST, ACROSS_HOSTS - {"per_host"}))
