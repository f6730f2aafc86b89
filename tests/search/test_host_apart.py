"""Bounds with a distinguished host: several classes of ranks; below plans, above plain bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from search_cases import gpus, problem, recomputed
from test_branching import stated

from oper.bench.plan import workloads as plan_workloads
from oper.search.branching import subspaces as subspaces_module
from oper.search.branching.proof import part_to_json
from oper.search.branching.subspaces import _host_loads, subspaces
from oper.search.branching.tree import SearchTree
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, hosts_are_alike
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
from oper.search.problem.machine import GROUPS
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import NUM_FEATURES, Problem, make_problem
from oper.search.relaxation.relaxation import Relaxation

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


def test_once_the_first_tree_has_stalled_the_most_promising_is_continued(monkeypatch):
    work = plan_workloads.few_tables(0)
    few = make_problem(work.tables, work.stats, plan_workloads.machine(16),
                       batch_size=work.batch_size, allow=EVERYTHING)
    part = subspaces(few, None)[0]
    (first,) = part.trees
    far = 1e12
    monkeypatch.setattr(subspaces_module, "_ENOUGH", 20)
    while first.solved < 20:  # as long as it has few nodes, the first tree is continued
        part.branch(far, far, None)
        assert part.trees == [first]
    while not all(x.work for x in part.trees) or len(part.trees) == 1:
        part.branch(far, far, None)
    phases = [x.bound.relaxation.distinguished for x in part.trees]
    assert phases == [None, (0, REQUESTS[1]), (1, REQUESTS[1]), (3, REQUESTS[1])]
    monkeypatch.setattr(subspaces_module, "_LEAST_SHARE", 0.0)
    for tree in part.trees:
        for x in part.trees:  # bounds before any work; that of one tree has risen most
            x._history = [(0, x.bound.lower_bound_us - 1e9 * (x is tree))]
        solved = [x.solved for x in part.trees]
        part.branch(far, far, None)
        assert [x for x, n in zip(part.trees, solved, strict=True) if x.solved > n] == [tree]
    tree, again = part.trees[1], subspaces(few, None)[0]  # the proof serves for equal problems
    value = part_to_json(tree, part.plans, tree.bound.lower_bound_us)
    again.grow_as({"parts": [value]}, far, 1.0)
    assert again.trees[1].bound.lower_bound_us == pytest.approx(tree.bound.lower_bound_us, rel=1e-5)


def test_a_host_is_distinguished_if_hosts_are_alike():
    many = stated(2, "mixed")
    relaxation = Relaxation(CostModel(many))
    assert len(relaxation.classes.ranks) == 2
    loads = _host_loads(relaxation)
    assert relaxation.model.request_phase in {phase for phase, _ in loads}
    assert {group for _, group in loads} == {GROUPS.index("cross_in")}
    plan = plan_problem(many, target_gap=0.0)
    better = tighten_bound(plan, many, max_work=2100)
    assert plan.lower_bound_us <= better.lower_bound_us <= plan.step_us * (1 + 1e-9)


def test_no_host_is_distinguished_if_hosts_differ():
    """A pinned table makes hosts differ; the bound is still valid."""
    held = {"tables": {"t0": {"ranks": [0, 1]}}}
    uneven = stated(1, "hosts", constraints=held)
    assert hosts_are_alike(CostModel(stated(1, "hosts"))) and not hosts_are_alike(CostModel(uneven))
    plan = plan_problem(uneven, target_gap=0.0)
    better = tighten_bound(plan, uneven, max_work=1400)
    assert plan.lower_bound_us <= better.lower_bound_us <= plan.step_us
