"""Graphs over concepts: acyclicity, order, descendants, and edges recovered from labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from oper.errors import InvalidInputError
from oper.rl_rec.models.autoencoders.causal_graph import (
    acyclic_support,
    acyclicity,
    descendants,
    fit_graph,
    is_acyclic,
    topological_order,
)

# A chain with a fork: 2 -> 0 -> 3, 0 -> 1, 4 alone.
TRUTH = torch.zeros(5, 5, dtype=torch.float64)
TRUTH[2, 0], TRUTH[0, 3], TRUTH[0, 1] = 0.9, -1.2, 0.8


def draw_labels(users: int, seed: int) -> torch.Tensor:
    """Draw labels from u = A' u + noise with noise of variance 1."""
    noise = torch.randn(users, 5, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(seed))
    return torch.linalg.solve(torch.eye(5, dtype=torch.float64) - TRUTH.T, noise.T).T


@st.composite
def supports(draw: Any, acyclic: bool) -> torch.Tensor:
    n = draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    support = torch.rand(n, n, generator=g) < draw(st.sampled_from([0.1, 0.4, 0.9]))
    if not acyclic:
        return support.fill_diagonal_(False)
    order = torch.randperm(n, generator=g)
    return support.triu(1)[order][:, order]


@given(supports(acyclic=True))
def test_acyclic_graphs(support: torch.Tensor) -> None:
    a = support.double() * 2.0
    assert float(acyclicity(a)) == pytest.approx(0, abs=1e-9)
    place = {k: at for at, k in enumerate(topological_order(support))}
    assert all(place[j] < place[k] for j, k in support.nonzero().tolist())
    n = len(support)
    paths = torch.linalg.matrix_power(torch.eye(n) + support.float(), n) - torch.eye(n)
    assert torch.equal(descendants(support), paths > 0)
    assert torch.equal(acyclic_support(a, 0.1), support)


@given(supports(acyclic=False))
def test_h_is_zero_for_acyclic_graphs_alone(support: torch.Tensor) -> None:
    assert (float(acyclicity(support.double())) < 1e-9) == is_acyclic(support)
    weights = support.double() * torch.rand(support.shape, dtype=torch.float64,
                                            generator=torch.Generator().manual_seed(1))
    kept = acyclic_support(weights, 0.2)
    assert is_acyclic(kept) and bool((kept <= (weights >= 0.2)).all())
    if is_acyclic(weights >= 0.2):
        assert torch.equal(kept, (weights >= 0.2).fill_diagonal_(False))


def test_a_cycle_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"cycle among concepts \[0, 1\]"):
        topological_order(torch.tensor([[False, True, False], [True, False, True],
                                        [False, False, False]]))


@pytest.mark.parametrize("seed", range(4))
def test_the_true_edges_are_recovered(seed: int) -> None:
    labels = draw_labels(2_000, seed)
    for order in (None, [2, 0, 4, 1, 3]):
        found = fit_graph(labels, order=order)
        assert torch.equal(found != 0, TRUTH != 0)
        assert torch.allclose(found, TRUTH, atol=0.1)


def test_independent_labels_have_no_edges() -> None:
    assert not fit_graph(torch.randn(2_000, 4, generator=torch.Generator().manual_seed(0))).any()
    assert not fit_graph(torch.zeros(10, 3)).any()
    assert fit_graph(torch.ones(5, 1)).tolist() == [[0.0]]


def test_labels_that_sum_to_one_still_give_an_acyclic_graph() -> None:
    """Collinear labels, which models do not produce, give a finite acyclic graph."""
    shares = torch.rand(500, 4, generator=torch.Generator().manual_seed(3))
    assert is_acyclic(fit_graph(shares / shares.sum(1, keepdim=True)) != 0)


def test_bad_labels_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="labels"):
        fit_graph(torch.full((3, 2), float("nan")))
    with pytest.raises(InvalidInputError, match="labels"):
        fit_graph(torch.zeros(0, 2))
    with pytest.raises(InvalidInputError, match="order"):
        fit_graph(torch.zeros(3, 2), order=[0, 0])
