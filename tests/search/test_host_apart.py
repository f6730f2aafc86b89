"""Bounds with a distinguished host: several classes of ranks; below plans, above plain bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from search_cases import gpus, problem, recomputed
from test_branching import TOPOLOGIES, branched, pushing_plan, stated

from oper.bench.plan import workloads as plan_workloads
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.branching.subspaces import _distinguished_load
from oper.search.branching.tree import SearchTree
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.space import PUSH
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.master import Bound, solve_node
from oper.search.pricing.node import (
    ALL_PUSHED,
    ONE_TIER,
    TIERS,
    TIERS_PUSHED,
    Node,
    PieceChoice,
)
from oper.search.problem.machine import GROUPS, neighbourhoods
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import NUM_FEATURES, Problem, make_problem
from oper.search.relaxation.relaxation import Relaxation
from tests.search.oracle import best_of_candidates, some_placements

REQUESTS = 0, GROUPS.index("cross_in")


def apart(problem: Problem, load: tuple[int, int] = REQUESTS, max_nodes: int = 24) -> Bound:
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem), load))))
    return tree.run(max_nodes)


@pytest.mark.parametrize("topology", [gpus(4, slow=2), gpus(4, per_host=2)])
@pytest.mark.parametrize("seed", range(3))
def test_prices_of_several_classes_are_below_every_set_and_close_to_the_best(seed, topology):
    """In tables of few blocks, every set of pushed blocks and classes of owners is tried."""
    small = problem(12, seed, topology, allow=frozenset({"striped", "pull", "push", "columns"}))
    relaxation = Relaxation(CostModel(small), REQUESTS if topology.domains[-1].host else None)
    assert relaxation.pushes.sum() == 2
    node = Node(relaxation)
    rng, tried = np.random.default_rng(seed), 0
    for _ in range(4):
        prices = relaxation.project_prices(rng.uniform(0, 1, relaxation.num_rows) ** 3)
        columns = node.price(prices)
        assert (columns.resources @ prices >= columns.value * (1 - 1e-9)).all()
        for k, t in enumerate(relaxation.tables):
            if t.blocks.shape[0] > 6:
                continue
            tried += 1
            best = _cheapest(node, k, prices)
            assert columns.value[k] <= best * (1 + 1e-9)
            assert columns.value[k] >= best * (1 - 0.05)
    assert tried


def _cheapest(node: Node, k: int, prices: np.ndarray) -> float:
    relaxation = node.relaxation
    blocks = relaxation.tables[k].blocks
    found = []
    for choice in product(range(len(relaxation.options)), repeat=len(blocks)):
        amount = np.zeros((len(relaxation.options), NUM_FEATURES))
        for b, o in enumerate(choice):
            amount[o] += blocks[b]
        kinds = {relaxation.options[o].kind for o in choice}
        pushed = PUSH in kinds
        mode = (ALL_PUSHED if len(kinds) == 1 else TIERS_PUSHED) if pushed else (
            ONE_TIER if len(kinds) == 1 else TIERS)
        number = (len(relaxation.pieces.widths[k]) if pushed and not node.fit.whole[k].all()
                  else 1)
        found += [(PieceChoice(1.0, 1.0, j, mode, np.array(choice), amount),)
                  for j in range(number)]
    return float((node.resources(np.full(len(found), k), found) @ prices).min())


def loads(problem: Problem) -> list[tuple[int, int]]:
    """Loads of the slowest links of a problem's machine."""
    phases, towards = CostModel(problem).phases, neighbourhoods(problem.machine)[1]
    inward, outward = (GROUPS.index(towards.removesuffix("in") + x) for x in ("in", "out"))
    # Links into the owner: ids (on a single host, also answers); then gradients.
    return [(0, inward), (phases.index("forward"), outward), (len(phases) - 1, inward)]


APART = ("gpus", "hosts", "many", "mixed", "pairs", "shared", "shared-pairs", "shared-mixed",
         "racks", "shared-racks")


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_below_the_bound_whatever_its_hosts_own(seed, name):
    many = stated(seed, name)
    bounds = [branched(many).bound.lower_bound_us]
    bounds += [apart(many, load).lower_bound_us for load in loads(many) if name in APART]
    rng = np.random.default_rng(seed)
    steps = [evaluate(pushing_plan(many, rng), many).step_us for _ in range(20)]
    steps += [evaluate(_lopsided(many, rng), many).step_us for _ in range(30)]
    # The planner's plan tests the bound more sharply than random plans.
    steps.append(plan_problem(many, target_gap=0.0).step_us)
    assert max(bounds) <= min(steps) * (1 + 1e-9)


def _lopsided(many: Problem, rng: np.random.Generator) -> Plan:
    """One host owns the pushed rows, and more or fewer of the pulled rows than other hosts."""
    machine, entries = many.machine, []
    world = machine.world_size
    of_rank, _ = neighbourhoods(machine)
    full = np.flatnonzero(of_rank == rng.integers(of_rank.max() + 1))
    weights = np.where(np.isin(np.arange(world), full), rng.integers(1, 6), rng.integers(1, 6))
    for t in many.tables:
        rows = t.spec.num_rows
        edge, colder = sorted(rng.integers(1, rows, 2).tolist()) if rows > 2 else (0, 0)
        hot = [Tier(0, edge, "replicated", tuple(range(world)))] if edge else []
        if colder > edge:
            hot.append(Tier(edge, colder, "striped", tuple(range(world)),
                            tuple(int(w) for w in weights), "pull"))
        start, pieces = max(edge, colder), []
        step = t.spec.dim if t.spec.dim < 16 else int(rng.choice([8, 16, t.spec.dim]))
        for a in range(0, t.spec.dim, step):
            pieces.append(Piece(a, a + step, (*hot, Tier(
                start, rows, "owned", (int(rng.choice(full)),), mode="push"))))
        entries.append(TablePlan(t.spec, tuple(pieces)))
    return Plan(world, tuple(entries), many.objective, many.batch_size)


@pytest.mark.parametrize("per_host", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_below_the_optimum_of_tiny_cases(seed, per_host):
    """Three tables on four ranks; the found plan's placements are among the choices."""
    tiny = problem(3, 60 + seed, gpus(4, per_host=per_host), allow=EVERYTHING)
    plan = plan_problem(tiny, target_gap=0.03)
    relaxation = Relaxation(CostModel(tiny))
    candidates = [[entry.pieces, *some_placements(t, 4, seed)]
                  for t, entry in zip(relaxation.tables, plan.tables, strict=True)]
    optimum, _ = best_of_candidates(relaxation, candidates)
    assert max(apart(tiny, load).lower_bound_us for load in loads(tiny)) <= optimum * (1 + 1e-9)
    assert plan.lower_bound_us <= optimum * (1 + 1e-9)


def test_the_bound_is_above_the_plain_one_where_pieces_are_large_and_certifies_itself():
    work = plan_workloads.few_tables(0)
    few, many = (make_problem(work.tables, work.stats, plan_workloads.machine(n),
                              batch_size=work.batch_size, allow=EVERYTHING) for n in (16, 64))
    # Few nodes: later, the order of equally good branchings decides which tree is ahead.
    plain = SearchTree(solve_node(Node(Relaxation(CostModel(many))))).run(20)
    found = apart(many, max_nodes=20)
    assert found.lower_bound_us > plain.lower_bound_us * 1.01
    assert recomputed(found) >= found.lower_bound_us * (1 - 1e-9)
    plan = plan_problem(few)
    assert plan.gap < 0.05
    assert tighten_bound(plan, few, max_work=1400).lower_bound_us >= plan.lower_bound_us


def test_a_host_is_distinguished_if_hosts_are_alike():
    many = stated(2, "mixed")
    relaxation = Relaxation(CostModel(many))
    assert len(relaxation.classes.ranks) == 2
    expected = relaxation.model.request_phase, GROUPS.index("cross_in")
    assert _distinguished_load(relaxation) == expected
    plan = plan_problem(many, target_gap=0.0)
    better = tighten_bound(plan, many, max_work=2100)
    assert plan.lower_bound_us <= better.lower_bound_us <= plan.step_us * (1 + 1e-9)


def test_no_host_is_distinguished_if_hosts_differ():
    """A pinned table makes hosts differ; the bound is still valid."""
    held = {"tables": {"t0": {"ranks": [0, 1]}}}
    uneven = stated(1, "hosts", constraints=held)
    plan = plan_problem(uneven, target_gap=0.0)
    better = tighten_bound(plan, uneven, max_work=1400)
    assert plan.lower_bound_us <= better.lower_bound_us <= plan.step_us
