"""The lower bound: below every plan, equal to the cvxpy formulation, certified by its prices."""

from __future__ import annotations

import numpy as np
import pytest
from search_cases import gpus, host, problem, recomputed, with_host_memory

from oper.plan import Piece, Tier
from oper.search.cost.model import CostModel
from oper.search.planner import plan_problem
from oper.search.pricing.master import lower_bound, solve_node
from oper.search.pricing.node import Node
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import evaluated
from tests.search.oracle import best_of_candidates, relaxed_by_cvxpy, some_placements

TOPOLOGIES = {"host": host(3), "gpus": gpus(4), "hosts": gpus(6, per_host=3),
              "unequal": gpus(4, slow=2), "one": host(1)}


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize(("objective", "in_host"), [
    ("training", False), ("inference", False), ("inference", True)])
def test_bound_equals_the_cvxpy_formulation(name, objective, in_host):
    topology = with_host_memory(TOPOLOGIES[name]) if in_host else TOPOLOGIES[name]
    stated = problem(4, 7, topology, objective, allow=EXECUTABLE | ({"host"} if in_host else set()))
    relaxation = Relaxation(CostModel(stated))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.lower_bound_us == pytest.approx(relaxed_by_cvxpy(relaxation), rel=1e-6)
    assert found.relaxed_us == pytest.approx(found.lower_bound_us, rel=1e-6)


@pytest.mark.parametrize("name", ["gpus", "unequal"])
def test_with_push_the_bound_is_at_least_the_chord_relaxation(name):
    stated = problem(4, 8, TOPOLOGIES[name], allow=EVERYTHING)
    relaxation = Relaxation(CostModel(stated))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.relaxed_us >= relaxed_by_cvxpy(relaxation) * (1 - 1e-6)
    assert found.relaxed_us >= found.lower_bound_us * (1 - 1e-9)


def test_scarce_memory_binds_the_bound():
    roomy = problem(5, 11, gpus(4), "inference")
    need = sum(t.spec.num_rows * t.spec.row_bytes for t in roomy.tables)
    tight = problem(5, 11, gpus(4, memory_bytes=need * 0.3), "inference")
    relaxation = Relaxation(CostModel(tight))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.overflow == pytest.approx(0, abs=1e-9)
    assert found.lower_bound_us > lower_bound(roomy).lower_bound_us * 1.001
    assert found.lower_bound_us == pytest.approx(relaxed_by_cvxpy(relaxation), rel=1e-6)


def test_prices_alone_give_the_bound_and_errors_only_weaken_it():
    stated = problem(5, 3, gpus(4), "inference")
    found = lower_bound(stated)
    assert recomputed(found) == pytest.approx(found.lower_bound_us, rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(20):
        prices = found.relaxation.project_prices(
            found.prices * rng.uniform(0, 3, found.prices.size))
        value = found.node.price(prices).value
        # Any prices give a lower bound of the relaxation.
        assert found.node.bound_at(prices, value) <= found.relaxed_us * (1 + 1e-9)


def test_value_is_the_priced_consumption_of_the_configuration():
    """A table's value at given prices is the priced sum of its column, for every mode."""
    stated = problem(4, 5, gpus(4), allow=EVERYTHING)
    relaxation = Relaxation(CostModel(stated))
    node, rng = Node(relaxation), np.random.default_rng(2)
    for _ in range(10):
        prices = relaxation.project_prices(rng.uniform(0, 1, relaxation.num_rows))
        columns = node.price(prices)
        assert columns.resources @ prices == pytest.approx(columns.value, rel=1e-9)


@pytest.mark.parametrize("topology", [gpus(4), gpus(4, slow=2)])
def test_pricing_returns_only_cheaper_configurations(topology):
    """The least cost is the same whether the configuration is known or generated."""
    relaxation = Relaxation(CostModel(problem(12, 5, topology, allow=EVERYTHING)))
    node, rng = Node(relaxation), np.random.default_rng(3)
    for _ in range(10):
        prices = relaxation.project_prices(rng.uniform(0, 1, relaxation.num_rows))
        columns = node.price(prices)
        least = columns.resources @ prices
        assert None not in columns.configurations
        known = node.price(prices, least * (1 - 1e-6))
        assert not any(known.configurations) and not known.resources.any()
        assert (known.value <= least * (1 + 1e-9)).all()
        assert known.value == pytest.approx(columns.value, rel=1e-3)
        dear = node.price(prices, least * 1.01)
        assert None not in dear.configurations
        assert dear.resources @ prices == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("placements", [("owned",), ("owned", "replicated")])
def test_bound_optimum_and_search_are_in_order_on_tiny_cases(seed, placements):
    """Uncut tables on three ranks: bound <= MILP optimum <= plan of the search."""
    stated = problem(6, seed, gpus(3), "training", allow=frozenset({*placements, "pull"}))
    bound = lower_bound(stated)
    candidates = []
    for t in bound.relaxation.tables:
        rows = t.spec.num_rows
        tiers = [Tier(0, rows, "owned", (r,)) for r in range(3)]
        if "replicated" in placements:
            tiers.append(Tier(0, rows, "replicated", (0, 1, 2)))
        candidates.append([(Piece(0, t.spec.dim, (tier,)),) for tier in tiers])
    optimum, picks = best_of_candidates(bound.relaxation, candidates)
    assert len(picks) == 6
    assert bound.lower_bound_us <= optimum * (1 + 1e-9)
    plan = plan_problem(stated, target_gap=0.01)
    if placements == ("owned",) and all(len(e.tiers) == 1 for e in plan.tables):
        # Uncut tables only: the search cannot beat the optimum, but comes close to it.
        assert optimum <= plan.step_us * (1 + 1e-6)
    assert plan.step_us <= optimum * 1.03
    assert bound.lower_bound_us <= plan.step_us * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("topology", [gpus(2, slow=1), gpus(3, per_host=2), gpus(3, slow=1),
                                      host(2), gpus(4, per_host=2, slow=2)])
def test_bound_optimum_and_search_are_in_order_with_push_columns_and_unequal_ranks(seed, topology):
    """The optimum is over dozens of placements per table, including the found plan's."""
    stated = problem(3, 40 + seed, topology, allow=EVERYTHING)
    plan = plan_problem(stated, target_gap=0.03)
    relaxation = Relaxation(CostModel(stated))
    candidates = [[entry.pieces, *some_placements(t, stated.machine.world_size, seed)]
                  for t, entry in zip(relaxation.tables, plan.tables, strict=True)]
    optimum, picks = best_of_candidates(relaxation, candidates)
    chosen = [c[n] for c, n in zip(candidates, picks, strict=True)]
    evaluation = evaluated(relaxation, chosen)
    assert evaluation.step_us == pytest.approx(optimum, rel=1e-6)
    assert optimum <= plan.step_us * (1 + 1e-6)
    assert plan.notes["relaxation_us"] <= optimum * (1 + 1e-9)
    assert plan.lower_bound_us <= optimum * (1 + 1e-9)
    assert plan.step_us <= optimum * 1.05
