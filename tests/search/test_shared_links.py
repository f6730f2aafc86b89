"""Links that ranks share: loads of hosts' links and racks' uplinks, and valid bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_cases import gpus, host, problem, racked, random_plan, shared
from test_branching import SHARED, TOPOLOGIES, stated
from test_owner_rows import COSTS, loads, owned

from oper.search import evaluate
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, hosts_are_alike
from oper.search.planner import plan_problem
from oper.search.pricing.node import Node
from oper.search.problem.machine import (
    GROUPS,
    Term,
    first_neighbourhood,
    neighbourhoods,
    rank_classes,
)
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import NUM_FEATURES, make_problem
from oper.search.relaxation.inequalities import APART, SPREAD
from oper.search.relaxation.pieces import LoadLimits
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.rows import Option
from oper.topology import Topology
from tests.search.search_cases import KINDS, tables_and_stats

TWO_EACH = replace(gpus(8, per_host=2), domains=tuple(
    replace(host(2).domains[0], host=h, ranks=(2 * h, 2 * h + 1), cross_gbps=1.0)
    for h in range(4)))


@pytest.mark.parametrize("name", SHARED)
def test_a_rank_waits_for_all_bytes_of_its_links(name: str) -> None:
    """Bytes are each rank's own; seconds are those of the entire link."""
    many = stated(1, name, costs={"wire_ns": 0.5})
    topology, machine = many.topology, many.machine
    rng, loaded = np.random.default_rng(2), 0
    for _ in range(4):
        for phase in evaluate(random_plan(many, rng, KINDS, 2), many).phases:
            for terms, of_rank, gbps in (
                    ((Term.CROSS_IN, Term.CROSS_OUT), machine.host, _host_gbps(topology)),
                    ((Term.RACK_IN, Term.RACK_OUT), machine.rack,
                     [r.uplink_gbps for r in topology.racks])):
                if of_rank is machine.host and not topology.hosts_share_links:
                    continue
                for term in terms:
                    carried = np.bincount(of_rank, phase.units[term])
                    for link, x in enumerate(gbps):
                        loaded += carried[link] > 0
                        assert phase.seconds[term, of_rank == link] == pytest.approx(
                            carried[link] / (x * 1e9), rel=1e-9, abs=1e-18)
                    group = phase.groups[term - 1]
                    local = phase.seconds[:2].sum(axis=0) * phase.has_local[term - 1]
                    assert group == pytest.approx(local + phase.seconds[term], rel=1e-9)
    assert loaded > 8


def _host_gbps(topology: Topology) -> list[float]:
    return [sum(d.cross_gbps * len(d.ranks) for d in topology.domains if d.host == h)
            for h in sorted({d.host for d in topology.domains})]


def test_a_rank_that_alone_sends_has_its_host_s_whole_link() -> None:
    """If all ranks send, each has its share of the link."""
    apart, together = (problem(8, 3, t, allow=EVERYTHING) for t in (TWO_EACH, shared(TWO_EACH)))
    everyone = tuple(range(8))
    for owners, factor in (((0,), 2.0), ((0, 2, 4, 6), 2.0), ((0, 1), 1.0), (everyone, 1.0)):
        plan = owned(apart, [], owners)  # stripes, pulled
        own, one = (evaluate(plan, p).phases[-3].seconds[Term.CROSS_OUT] for p in (apart, together))
        assert own.max() > 0 and own.max() / one.max() == pytest.approx(factor, rel=0.05)
        assert one[0] == one[1]


@pytest.mark.parametrize("topology", [gpus(4, per_host=1), gpus(4), host(3)])
def test_nothing_changes_where_no_link_is_shared(topology: Topology) -> None:
    """One rank per host, or a single host; one rack, or one rack per host."""
    before = problem(5, 2, topology, allow=EVERYTHING)
    plan = random_plan(before, np.random.default_rng(3), KINDS)
    step = evaluate(plan, before).step_us
    for same in (shared(topology), racked(topology, 1e-3)):
        assert evaluate(plan, problem(5, 2, same, allow=EVERYTHING)).step_us == step


def test_racks_of_one_host_each_are_links_of_hosts() -> None:
    uplinks = [d.cross_gbps for d in gpus(4, per_host=1).domains]
    alike = problem(6, 4, racked(gpus(4, per_host=1), *uplinks), allow=EVERYTHING)
    rng = np.random.default_rng(4)
    for _ in range(6):
        for phase in evaluate(random_plan(alike, rng, KINDS, 2), alike).phases:
            assert phase.units[Term.RACK_IN] == pytest.approx(phase.units[Term.CROSS_IN])
            assert phase.units[Term.RACK_OUT] == pytest.approx(phase.units[Term.CROSS_OUT])
            assert phase.groups[GROUPS.index("rack_in")] == pytest.approx(
                phase.groups[GROUPS.index("cross_in")])


def test_transfers_within_a_rack_use_no_uplink() -> None:
    """Rows of the first rack's ranks are sent to each rank of the second rack once."""
    many = problem(3, 5, racked(gpus(4, per_host=1), 5.0, 5.0), allow=EVERYTHING)
    phase = evaluate(owned(many, [], (0,)), many).phases[-3]
    sent, received = phase.units[Term.CROSS_OUT], phase.units[Term.CROSS_IN]
    assert phase.units[Term.RACK_OUT] == pytest.approx([sent[0] * 2 / 3, 0, 0, 0])
    assert phase.units[Term.RACK_IN] == pytest.approx([0, 0, *received[2:]])
    assert phase.seconds[Term.RACK_OUT] == pytest.approx(
        np.array([1, 1, 0, 0]) * sent[0] * 2 / 3 / 5e9)


def test_hosts_of_unequal_racks_are_distinguished() -> None:
    def sizes(topology: Topology) -> list[int]:
        return [r.size for r in rank_classes(problem(1, 0, topology).machine).ranks]

    assert sizes(racked(gpus(4, per_host=1), 5.0, 5.0)) == [4]
    assert sizes(racked(gpus(4, per_host=1), 5.0, 6.0)) == [2, 2]
    assert sizes(racked(gpus(5, per_host=1), 5.0, 5.0)) == [3, 2]


@pytest.mark.parametrize("name", ["shared", "racks", "shared-racks"])
def test_plans_for_shared_links_are_no_slower_there_than_plans_for_shares(name: str) -> None:
    both = stated(4, name, 3)
    topology = replace(TOPOLOGIES[name], hosts_share_links=False, racks=())
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20, 50))
    apart = make_problem(specs, stats, topology, batch_size=4096, allow=EVERYTHING)
    plan = plan_problem(both, target_gap=0.0)
    assert plan.step_us <= evaluate(plan_problem(apart, target_gap=0.0), both).step_us * 1.01
    assert CostModel(both).machine.shared_terms != ((), ())


@pytest.mark.parametrize("name", ["hosts", "pairs", *SHARED])
def test_every_row_of_the_relaxation_holds_for_plans(name: str) -> None:
    """Uncut pushed tables, placed as in the plan. The bytes of a shared link count once, also in
    rows about the host of the largest piece."""
    rng, close = np.random.default_rng(6), 0.0
    for seed in range(3):
        many = stated(seed, name, 3, COSTS if seed == 0 else None)  # else bytes are most of a step
        model, machine = CostModel(many), many.machine
        load = model.request_phase, GROUPS.index(neighbourhoods(machine)[1])
        relaxation = Relaxation(model, load if hosts_are_alike(model) else None)
        shape = len(many.tables), len(relaxation.options)
        for _ in range(6):
            owners = [0, *rng.integers(machine.world_size, size=2).tolist()]
            plan = owned(many, owners, ())
            each = loads(model, plan)
            is_first = owners[int(each[:, load[0], load[1]].argmax())] in first_neighbourhood(
                machine)
            node = Node(relaxation, LoadLimits(each.max(axis=0), np.full(each.shape[1:], np.inf)))
            amount = np.zeros((*shape, NUM_FEATURES))
            for n, owner in enumerate(owners):
                rank_class = int(relaxation.classes.of_rank[owner])
                amount[n, relaxation.options.index(Option(PUSH, rank_class))] = many.tables[n].total
            asked = node.base + Node(relaxation).resources_at(
                amount, np.arange(shape[0]), np.zeros(shape[0], np.int64)).sum(axis=0)
            phases = evaluate(plan, many).phases
            about = [((phase, GROUPS.index(group)), row, False)
                     for row, (phase, group, _) in enumerate(relaxation.rows.names)]
            about += [(x.at, x.row, x.kind == SPREAD) for x in relaxation.inequalities
                      if x.kind != APART or is_first]
            for (phase, group), row, has_both in about:
                # Of the row's group; for links, of both directions.
                kind = GROUPS[group].split("_")[0]
                groups = [n for n, x in enumerate(GROUPS) if x.startswith(kind)]
                busy = 1e6 * phases[phase].groups[groups if has_both else [group]].max()
                most = relaxation.phase_weight[row, phase] * busy
                assert asked[row] <= most * (1 + 1e-9) + 1e-9, (phase, group, row)
                close = max(close, asked[row] / most if row >= len(relaxation.rows.names) else 0.0)
    assert close > 0.9
