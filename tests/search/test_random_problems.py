"""Bounds of problems of every kind: below every plan and every optimum, and accepted by the checker
of certificates; plans satisfy their problems."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.errors import PlanInfeasibleError
from oper.plan import Piece, Plan, Tier
from oper.search import evaluate, verify_plan
from oper.search.branching.subspaces import subspaces, tighten
from oper.search.certificate.check import Proof
from oper.search.cost.model import CostModel
from oper.search.planner import _proof, _proved_us, plan_problem, tighten_bound
from oper.search.problem.constraints import violations
from oper.search.problem.space import EVERYTHING, EXECUTABLE, used_by, used_features
from oper.search.problem.statement import Problem, make_problem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, evaluated, table_plan
from oper.topology import Topology
from tests.search.oracle import best_of_candidates, some_placements
from tests.search.search_cases import (
    QUICK,
    gpus,
    host,
    placed_steps,
    problems,
    racked,
    shared,
    space_bound,
    steps_in_space,
    tables_and_stats,
    with_host_memory,
)


@QUICK
@given(problems(), st.integers(0, 10**6))
def test_plans_satisfy_their_problem_and_none_is_below_the_bound(problem: Problem, seed: int
                                                                 ) -> None:
    """Neither random plans, nor peers' plans, nor the planner's."""
    bound = space_bound(problem, max_work=420)
    steps = placed_steps(problem, seed)
    try:
        plan = plan_problem(problem, time_budget_s=0.3, seed=seed % 7)
    except PlanInfeasibleError as error:
        assert ("smallest sufficient change" in str(error)
                or "keeps its groups of tables" in str(error))
        assert min(steps, default=np.inf) >= bound * (1 - 1e-9)
        return
    check_plan(plan, problem)
    steps += steps_in_space([plan], problem)
    assert min(steps, default=np.inf) >= bound * (1 - 1e-9)
    assert bound > 0 or not steps  # 0: no plan fits
    found = verify_plan(plan, problem)
    assert found.certified == ("not_certified" not in plan.notes["certificate"]), found.why
    assert found.certified or problem.constraints.tables
    if found.certified:
        found = verify_plan(tighten_bound(plan, problem, max_work=840), problem)
        assert found.certified, found.why
        assert min(steps, default=np.inf) >= found.lower_bound_us * (1 - 1e-9) > 0


def check_plan(plan: Plan, problem: Problem) -> None:
    """Every row is placed once, memory suffices, and the bound before branching is below it."""
    found = evaluate(plan, problem)
    assert found.fits and not violations(plan, problem.constraints)
    assert (found.domain_bytes <= found.capacity_bytes * (1 + 1e-9)).all()
    assert (found.host_bytes <= found.host_capacity_bytes * (1 + 1e-9)).all()
    assert used_features(plan) <= problem.allow or problem.constraints.tables
    assert found.step_us == pytest.approx(plan.step_us)
    assert plan.lower_bound_us <= plan.step_us * (1 + 1e-9)
    assert plan.notes["relaxation_us"] <= plan.step_us * (1 + 1e-9)  # not capped by the step
    for t, entry in zip(problem.tables, plan.tables, strict=True):
        assert entry.table == t.spec
        held = np.zeros((t.spec.num_rows, t.spec.dim), np.int64)
        for piece in entry.pieces:
            for tier in piece.tiers:
                held[tier.start:tier.stop, piece.start:piece.stop] += 1
                assert len(set(tier.ranks)) == len(tier.ranks)
        assert (held == 1).all()


@QUICK
@given(problems(is_free=True), st.sampled_from([1.05, 1.2, 1.5]))
def test_checker_and_search_prove_the_same_bound(problem: Problem, factor: float) -> None:
    """Over plans faster than `factor` times the bound before branching."""
    search_us, checker_us = proved(problem, factor, 1500)
    assert checker_us >= search_us * (1 - 1e-6)


def proved(problem: Problem, factor: float, max_work: int) -> tuple[float, float]:
    """Bounds of search and checker over plans faster than `factor` times the bound before
    branching, microseconds."""
    parts = subspaces(problem, None)
    step_us = factor * min(x.lower_bound_us for x in parts)
    tighten(parts, max_work, step_us, step_us, None)
    proof = _proof(parts)
    checked = Proof(problem, proof)
    bounds = [x for part in proof["parts"] for x in checked.part(part)]
    return _proved_us(proof), min(*bounds, checked.cutoff_us)


# ---- tiny problems with a known optimum ----------------------------------------------------------


@dataclass(frozen=True)
class Tiny:
    """Three tables that are solved exactly over dozens of placements of each.

    Attributes:
        topology: the machine.
        near: the search's step over the optimum, at most.
        allow: the space.
        memory: share of the rows that all ranks' memory holds; 0: all.
    """

    topology: Topology
    near: float = 1.05
    allow: frozenset[str] = EVERYTHING
    memory: float = 0.0


def unequal(topology: Topology, cross: tuple[float, ...], read: tuple[float, ...]) -> Topology:
    """The topology with links between hosts, and memories, of other speeds."""
    return replace(topology, domains=tuple(
        replace(d, cross_gbps=d.cross_gbps * x, read_gbps=d.read_gbps * y)
        for d, x, y in zip(topology.domains, cross, read, strict=True)))


TINY = {
    "owned": Tiny(gpus(3), 1.03, frozenset({"owned", "pull"})),
    "owned or replicated": Tiny(gpus(3), 1.03, frozenset({"owned", "replicated", "pull"})),
    "host": Tiny(host(2)),
    "hosts": Tiny(gpus(4, per_host=2)),
    "slow of two": Tiny(gpus(2, slow=1)),
    "slow of three": Tiny(gpus(3, slow=1)),
    "slow host": Tiny(gpus(4, per_host=2, slow=2)),
    "uneven hosts": Tiny(gpus(3, per_host=2)),
    "host memory": Tiny(gpus(3), 1.02, EXECUTABLE | {"host"}, 0.45),
    "host memory, slow": Tiny(gpus(3, slow=1), 1.1, EXECUTABLE | {"host"}, 0.45),
    "shared": Tiny(shared(gpus(4, per_host=2))),
    "shared, uneven": Tiny(shared(gpus(3, per_host=2))),
    "shared, racks": Tiny(shared(racked(gpus(4, per_host=2), 20.0, 20.0))),
    "shared, unequal": Tiny(shared(unequal(
        gpus(4, per_host=2), (1.0, 1.0, 0.25, 0.25), (1.0,) * 4))),
    "racks": Tiny(racked(gpus(4, per_host=1), 15.0, 15.0)),
    "unequal racks": Tiny(racked(gpus(3, per_host=1), 15.0, 6.0)),
    "unequal": Tiny(unequal(gpus(3, per_host=1), (1.0, 0.5, 0.2), (1.0, 0.4, 1.5))),
    "unequal, first slow": Tiny(unequal(gpus(3, per_host=1), (0.2, 1.0, 0.5), (1.5, 1.0, 0.4))),
}


def tiny_problem(tiny: Tiny, seed: int) -> Problem:
    specs, stats = tables_and_stats(3, seed, lengths=(4, 20, 50) if tiny.near == 1.05 else (1, 4))
    topology, objective = tiny.topology, "training"
    if tiny.memory:
        need = sum(s.num_rows * s.row_bytes for s in specs)
        objective, topology = "inference", with_host_memory(replace(topology, domains=tuple(
            replace(d, memory_bytes=int(d.memory_bytes / 80e9 * tiny.memory * need / 3))
            for d in topology.domains)), 2 * need)
    return make_problem(specs, stats, topology, objective=objective, allow=tiny.allow,
                        batch_size=4096 if tiny.near == 1.05 else 256)


def placements(problem: Problem, tiny: Tiny, seed: int) -> list[list[Placement]]:
    """Placements of each table, in the space."""
    world, found = problem.machine.world_size, []
    everyone = tuple(range(world))
    for t in problem.tables:
        rows, some = t.spec.num_rows, []
        if tiny.allow == EVERYTHING:
            some = [x for x in some_placements(t, world, seed)
                    if all(used_by(tier, world) <= tiny.allow for y in x for tier in y.tiers)]
        elif tiny.memory:
            for cut in [0, *t.edges[1:-1:4].tolist()]:
                for hot, memory in product(("replicated", "striped"), ("device", "host")):
                    tiers = [Tier(cut, rows, "striped", everyone, memory=memory)]
                    tiers[:0] = [Tier(0, cut, hot, everyone)] * (cut > 0)
                    some.append((Piece(0, t.spec.dim, tuple(tiers)),))
        else:
            tiers = [Tier(0, rows, "owned", (r,)) for r in everyone]
            tiers += [Tier(0, rows, "replicated", everyone)] * ("replicated" in tiny.allow)
            some = [(Piece(0, t.spec.dim, (tier,)),) for tier in tiers]
        found.append(some)
    return found


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("seed", range(6))
def test_bound_optimum_and_search_are_in_order(seed: int, name: str) -> None:
    """The found plan's placements are among those that the optimum chooses from."""
    tiny = TINY[name]
    problem = tiny_problem(tiny, 40 + seed)
    plan = plan_problem(problem, target_gap=0.0)
    relaxation = Relaxation(CostModel(problem))
    choices = [[entry.pieces, *some] for entry, some in zip(
        plan.tables, placements(problem, tiny, seed), strict=True)]
    optimum, picks = best_of_candidates(relaxation, choices)
    chosen = [c[n] for c, n in zip(choices, picks, strict=True)]
    assert evaluated(relaxation, chosen).step_us == pytest.approx(optimum, rel=1e-6)
    for bound in (space_bound(problem, max_work=1400), plan.lower_bound_us,
                  plan.notes["relaxation_us"]):
        assert 0 < bound <= optimum * (1 + 1e-9)
    assert optimum <= plan.step_us * (1 + 1e-6)
    assert plan.step_us <= optimum * tiny.near


def test_the_optimum_is_the_best_of_all_choices() -> None:
    tiny = TINY["shared, racks"]
    problem = tiny_problem(tiny, 80)
    choices = [some[:9] for some in placements(problem, tiny, 0)]
    best = min(evaluate(Plan(4, tuple(table_plan(t, x) for t, x in zip(
        problem.tables, chosen, strict=True)), problem.objective, problem.batch_size),
        problem).step_us for chosen in product(*choices))
    optimum, _ = best_of_candidates(Relaxation(CostModel(problem)), choices)
    assert optimum == pytest.approx(best, rel=1e-6)
