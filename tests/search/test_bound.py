"""The lower bound: below every plan, equal to the cvxpy formulation, certified by its prices."""

from __future__ import annotations

import numpy as np
import pytest
from search_cases import gpus, host, problem, recomputed, with_host_memory

from oper.search.cost.model import CostModel
from oper.search.pricing.master import lower_bound, solve_node
from oper.search.pricing.node import Node
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.relaxation.relaxation import Relaxation
from tests.search.oracle import relaxed_by_cvxpy

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
