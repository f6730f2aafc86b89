"""Bounds of nodes with limits on pushed pieces: below every plan, and close to the best plans."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from oper.bench.plan import workloads as plan_workloads
from oper.plan import Plan
from oper.search.branching.tree import SearchTree, _largest, _load_branchings
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.tally import owned_features
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.master import solve_node
from oper.search.pricing.node import PUSHES, STILL, Node
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import IDS, NUM_FEATURES, Problem, make_problem
from oper.search.relaxation.pieces import LoadLimits
from oper.search.relaxation.relaxation import Relaxation
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Domain, Topology
from tests.search.search_cases import (
    gpus,
    host,
    pushing_plan,
    racked,
    recomputed,
    shared,
    tables_and_stats,
)


def alternating(num_ranks: int, per_host: int) -> Topology:
    """Equal hosts of unequal ranks: every other rank is slower and has less memory."""
    fast, slow = gpus(num_ranks, per_host=per_host), gpus(num_ranks, per_host=per_host,
                                                          slow=num_ranks)
    domains = zip(fast.domains, slow.domains, strict=True)
    return replace(fast, domains=tuple(pair[n % 2] for n, pair in enumerate(domains)))


def linked(topology: Topology, is_slow: Callable[[Domain], int]) -> Topology:
    """The topology with links of half the speed in some domains."""
    return replace(topology, domains=tuple(
        replace(d, link_gbps=d.link_gbps / 2, cross_gbps=d.cross_gbps / 2) if is_slow(d) else d
        for d in topology.domains))


TOPOLOGIES = {"host": host(3), "gpus": gpus(4), "hosts": gpus(6, per_host=3),
             "many": gpus(12, per_host=4), "mixed": alternating(8, 4),
             "unequal": gpus(4, slow=2),
             "links": linked(gpus(8, per_host=2), lambda d: d.host % 2),
             "uneven": linked(gpus(5, per_host=3), lambda d: d.host % 2),
             "domains": linked(gpus(4), lambda d: d.ranks[0] % 2),
             "pairs": linked(gpus(6, per_host=2), lambda d: d.ranks[0] % 2)}
# Links shared by the ranks of a host (ranks or links equal or not), and by racks.
TOPOLOGIES |= {"shared": shared(gpus(6, per_host=3)), "shared-pairs": shared(TOPOLOGIES["pairs"]),
               "shared-uneven": shared(TOPOLOGIES["uneven"]),
               "shared-mixed": shared(TOPOLOGIES["mixed"]),
               "racks": racked(gpus(4, per_host=1), 20.0, 20.0),
               "shared-racks": shared(racked(gpus(8, per_host=2), 60.0, 60.0)),
               "uneven-racks": racked(gpus(5, per_host=1), 30.0, 15.0)}
SHARED = [name for name in TOPOLOGIES if "shared" in name or "racks" in name]


def stated(seed: int, name: str, num_tables: int = 4, costs: dict[str, float] | None = None,
           **more: object) -> Problem:
    """Long bags and large batches, so that pushing pays and uncut tables are too large; `costs`
    replace the topology's costs."""
    specs, stats = tables_and_stats(num_tables, seed, lengths=(4, 20, 50))
    topology = TOPOLOGIES[name]
    topology = replace(topology, costs=replace(topology.costs, **(costs or {})))
    return make_problem(specs, stats, topology, batch_size=4096, allow=EVERYTHING,
                        **more)  # type: ignore[arg-type]


def largest_loads(relaxation: Relaxation, plan: Plan) -> np.ndarray:
    """Largest load of any pushed piece of a plan on its owner; float64 [num_phases, 5]."""
    pieces, world = relaxation.pieces, relaxation.model.machine.world_size
    out = np.zeros(pieces.floor.shape[1:])
    for k, t in enumerate(relaxation.tables):
        for piece in plan.table(t.spec.name).pieces:
            owned = np.zeros((NUM_FEATURES, world))
            for tier in piece.tiers:
                if tier.mode == "push":
                    owned += owned_features(t, tier, world, True)
            for rank in np.flatnonzero(owned[IDS]).tolist():
                number = int(relaxation.classes.of_rank[rank])
                out = np.maximum(out, pieces.load(k, number, piece.stop - piece.start,
                                                  owned[:, rank]))
    return out


@pytest.mark.parametrize("name", ["gpus", "hosts", "host", "unequal", "mixed", "links", "uneven",
                                  "domains", "pairs", *SHARED])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costly", [False, True])
def test_no_plan_is_below_the_bound_of_its_own_node(seed, name, costly):
    """Of all nodes that contain a plan, the smallest has the largest bound."""
    # Costly: in some phases, readers of pushed rows have more work than owners.
    costs = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "tier_ns": 3.0,
             "push_tier_ns": 4.0, "push_bag_ns": 30.0, "table_us": 5.0} if costly else {}
    many = stated(seed, name, costs=costs)
    relaxation = Relaxation(CostModel(many))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        plan = pushing_plan(many, rng)
        largest = largest_loads(relaxation, plan)
        pushes = np.array([PUSHES if any(x.mode == "push" for p in t.pieces for x in p.tiers)
                           else STILL for t in plan.tables], np.uint8)
        step_us = evaluate(plan, many).step_us
        for least, states in product((0.0, 1.0 - 1e-9), (None, pushes)):
            limits = LoadLimits(largest * least, largest * (1 + 1e-9))
            found = solve_node(Node(relaxation, limits, states))
            assert found.lower_bound_us <= step_us * (1 + 1e-9)


def test_branching_raises_the_bound_and_certifies_itself():
    work = plan_workloads.few_tables(0)
    problem = make_problem(work.tables, work.stats, plan_workloads.machine(16),
                           batch_size=work.batch_size, allow=EVERYTHING)
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem)))))
    first = tree.bound.lower_bound_us
    tree.run(24)
    assert tree.solved > 0
    assert tree.bound.lower_bound_us > first * 1.05
    assert recomputed(tree.bound) >= tree.bound.lower_bound_us * (1 - 1e-9)
    lowest = [b.lower_bound_us for b in tree.lowest(3)]
    assert lowest == sorted(lowest) and lowest[0] == tree.bound.lower_bound_us


def test_every_branching_gives_two_smaller_nodes():
    """Otherwise branching might not end, for example with tight limits on forward's ids."""
    work = plan_workloads.few_tables(0)
    problem = make_problem(work.tables, work.stats, plan_workloads.machine(64), batch_size=4096,
                           allow=EVERYTHING)
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem)))))
    tree.run(150)
    nodes = tree.lowest(200)
    assert len(nodes) > 20
    for bound, mixed in product(nodes, (False, True)):
        limits, largest = bound.node.limits, _largest(bound, mixed)
        assert (largest <= limits.most * (1 + 1e-9)).all()
        for cut in _load_branchings(bound, np.inf, mixed):
            low, high = (x.limits for x in cut.children)
            assert low.most[cut.at] == high.least[cut.at]
            assert limits.least[cut.at] < low.most[cut.at] < min(limits.most[cut.at],
                                                              largest[cut.at])
    assert any((_largest(x, True) > _largest(x, False) * 1.01).any() for x in nodes)


def test_tighten_bound_raises_the_bound_of_a_plan():
    work = plan_workloads.few_tables(0)
    problem = make_problem(work.tables, work.stats, plan_workloads.machine(16),
                           batch_size=work.batch_size, allow=EVERYTHING)
    plan = plan_problem(problem, time_budget_s=0.5)
    plan = replace(plan, lower_bound_us=plan.notes["relaxation_us"])
    first = tighten_bound(plan, problem, max_work=280)
    better = tighten_bound(plan, problem, max_work=14000)
    assert plan.lower_bound_us <= first.lower_bound_us <= better.lower_bound_us <= plan.step_us
    assert better.lower_bound_us > first.lower_bound_us
    assert better.tables == plan.tables and better.notes["bound_method"] == "branching"
    near = tighten_bound(plan, problem, goal_gap=plan.gap + 0.5)
    # The gap is already small enough: nothing is solved.
    assert near.lower_bound_us == pytest.approx(plan.lower_bound_us, rel=1e-12)
    assert tighten_bound(plan, problem, max_work=14000).lower_bound_us == better.lower_bound_us


def test_a_heavy_row_is_pushed_in_narrower_pieces():
    """Where the bisection of the largest mass ends at 1, as all rows of a table nearly fit."""
    most = 10_000_000
    stats = TableStats.from_counts(2, np.arange(2), np.array([most, 1]),
                                   (np.array([1]), np.array([most + 1])))
    two = make_problem([TableSpec("t", 2, 64, ("f",))],
                       AccessStats(most + 1, {"t": stats}, "", True), gpus(4, per_host=2),
                       batch_size=4096, allow={"owned", "push", "columns"})
    relaxation = Relaxation(CostModel(two))
    of_all = relaxation.pieces.load(0, 0, 64, two.tables[0].total)
    limits, at = np.full(of_all.shape, np.inf), (1, 4)
    for share in np.geomspace(1e-8, 1e-5, 40):
        limits[at] = of_all[at] * (1 - share)
        bound = solve_node(Node(relaxation, LoadLimits(0 * of_all, limits)))
        assert bound.lower_bound_us < 1e6  # a plan with two pieces of 32 columns keeps the limit
