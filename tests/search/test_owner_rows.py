"""Each row about the owner of the largest piece is valid, and almost tight for some plan."""

from __future__ import annotations

import numpy as np
import pytest
from test_branching import stated

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, verify_plan
from oper.search.certificate import tables as proof
from oper.search.certificate.leaf import Checker
from oper.search.cost.model import CostModel
from oper.search.cost.space import hosts_are_alike
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.node import Node
from oper.search.problem.machine import GROUPS, first_neighbourhood, neighbourhoods
from oper.search.problem.statement import Problem, with_overlap
from oper.search.relaxation.inequalities import APART, READER, SPREAD
from oper.search.relaxation.pieces import LoadLimits
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.units import LOCAL

COSTS = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "update_ns": 10.0,
         "run_ns": 3.0, "wire_ns": 0.3, "warm_share": 0.4}


def owned(problem: Problem, owners: list[int], others: tuple[int, ...]) -> Plan:
    """Uncut pushed tables with one owner each; other tables are pulled from the ranks `others`."""
    world, entries = problem.machine.world_size, []
    for n, t in enumerate(problem.tables):
        tier = (Tier(0, t.spec.num_rows, "owned", (owners[n],), mode="push") if n < len(owners)
                else Tier(0, t.spec.num_rows, "striped", others))
        entries.append(TablePlan(t.spec, (Piece(0, t.spec.dim, (tier,)),)))
    return Plan(world, tuple(entries), problem.objective, problem.batch_size)


def loads(model: CostModel, plan: Plan) -> np.ndarray:
    """Load of each pushed table on its owner; of own time, the excess over any rank; [N, P, 5]."""
    out = []
    for t, entry in zip(model.problem.tables, plan.tables, strict=True):
        if entry.tiers[0].mode == "pull":
            continue
        us = model.group_us(model.units(model.tally(t, entry.pieces, t.ids_are_positions)))[:, :5]
        least = us[:, LOCAL].min(axis=-1)[:, None] * model.has_local[:, :5]
        out.append(us[..., entry.tiers[0].ranks[0]] - least)
    return np.array(out)


@pytest.mark.parametrize(("name", "objective"), [
    ("gpus", "training"), ("hosts", "training"), ("pairs", "training"), ("unequal", "training"),
    ("hosts", "inference"), ("pairs", "inference"), ("shared", "training"),
    ("shared", "inference"), ("shared-pairs", "training"), ("racks", "training"),
    ("shared-racks", "training"), ("shared-uneven", "training")])
def test_each_row_is_below_what_it_bounds_and_close_to_it_in_some_plan(name, objective):
    close: dict[str, float] = {}
    rng = np.random.default_rng(1)
    for num_tables, pushed in ((1, 1), (3, 3), (3, 2), *[(2, 1)] * 6):
        held = {f"t{k}": {"replicate": False, "modes": ["push" if k < pushed else "pull"]}
                for k in range(num_tables)}
        problem = with_overlap(stated(int(rng.integers(99)), name, num_tables, COSTS,
                                      objective=objective, constraints={"tables": held}),
                               {"forward": 2.0 * (num_tables == 3)})
        model, world = CostModel(problem), problem.machine.world_size
        of_rank, link = neighbourhoods(problem.machine)
        apart = model.request_phase, GROUPS.index(link)
        relaxation = Relaxation(model, apart if hosts_are_alike(model) else None)
        checker = Checker(model, relaxation.distinguished)
        for n in range(6):
            owners = [0, *rng.integers(world, size=pushed - 1).tolist()]
            far = np.flatnonzero(of_rank != of_rank[owners[0]]).tolist()
            others = (owners[0],), tuple(far), tuple(range(world))
            plan = owned(problem, owners, others[n % 3])
            each, phases = loads(model, plan), evaluate(plan, problem).phases
            largest = int(each[:, apart[0], apart[1]].argmax())
            is_first = plan.tables[largest].tiers[0].ranks[0] in first_neighbourhood(
                problem.machine)
            least, most = each.max(axis=0), np.full(each.shape[1:], np.inf)
            node = Node(relaxation, LoadLimits(least, most))
            for x in relaxation.inequalities:
                if x.kind == APART and not is_first:
                    continue
                prices = np.zeros(relaxation.num_rows)
                prices[x.row] = 1.0 / relaxation.phase_weight[x.row, x.at[0]]
                mine = node.bound_at(prices, node.price(prices).value) - relaxation.fixed_us
                leaf = proof.Node(least, most, np.inf, np.zeros(num_tables, np.uint8),
                                  np.zeros_like(checker.visible), 0.0,
                                  ((x.kind, *x.at, float(prices[x.row])),))
                found = checker.bound(leaf, 0.0)
                # The load is the larger direction of the row's links.
                link = [g.split("_")[0] == GROUPS[x.at[1]].split("_")[0] for g in GROUPS]
                busy = 1e6 * float(phases[x.at[0]].groups[link].max())
                assert max(mine, found) <= busy * (1 + 1e-9), x
                close[x.kind] = max(close.get(x.kind, 0.0), min(mine, found) / busy)
    assert READER in close and SPREAD in close
    assert (APART in close) == (name not in ("unequal", "shared-uneven"))
    assert min(close.values()) > 0.7 and close[READER] > 0.99, close


def test_owners_that_pool_in_inference_are_bounded_as_well(monkeypatch):
    problem = stated(2, "hosts", objective="inference")
    assert Relaxation(CostModel(problem)).inequalities
    plan = tighten_bound(plan_problem(problem, target_gap=0.0), problem, max_work=2000)
    assert verify_plan(plan, problem).certified
    monkeypatch.setattr("oper.search.relaxation.inequalities.OwnerRows._rows", lambda *_: iter(()))
    without = tighten_bound(plan_problem(problem, target_gap=0.0), problem, max_work=2000)
    assert plan.lower_bound_us >= without.lower_bound_us * (1 - 1e-9)
