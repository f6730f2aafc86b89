"""Graphs among concepts: users' tastes, acyclicity, recovered edges; scores of codes."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oper.errors import InvalidInputError
from oper.rl_rec import concepts
from oper.rl_rec.concepts import activity_weights, concepts_from
from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.disentanglement import disentanglement, scores_of
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig
from oper.rl_rec.models.autoencoders.causal_graph import (
    acyclic_support,
    acyclicity,
    descendants,
    fit_graph,
    is_acyclic,
    least_squares,
    topological_order,
)
from oper.rl_rec.models.base import Histories

USERS, PER_CONCEPT = 3000, 150
Edges = Mapping[tuple[int, int], float]


def expected_counts(edges: Edges, k: int, activity: float, seed: int) -> np.ndarray:
    """Compute each user's expected count of items by concept, float64 [USERS, k].

    Log tastes follow `edges`; `activity` is the standard deviation of the log of a user's activity,
    a factor of all counts.
    """
    rng = np.random.default_rng(seed)
    a = np.zeros((k, k))
    for (cause, effect), weight in edges.items():
        a[cause, effect] = weight
    taste = np.linalg.solve(np.eye(k) - a.T, rng.normal(0, 0.8, (k, USERS))).T if edges else 0.0
    return np.exp(2.0 + taste + activity * rng.normal(size=(USERS, 1)) + np.zeros((USERS, k)))


def drawn(expected: np.ndarray, seed: int) -> Interactions:
    """Draw Poisson numbers of items of each concept; item i belongs to concept i % k."""
    rng = np.random.default_rng([seed, 1])
    k = expected.shape[1]
    counts = np.minimum(rng.poisson(expected), PER_CONCEPT)
    users = np.repeat(np.arange(1, len(counts) + 1), counts.sum(1))
    items = np.concatenate([k * (1 + rng.permutation(PER_CONCEPT)[:count]) + concept
                            for mine in counts for concept, count in enumerate(mine)])
    return from_log(Log(users, items, np.ones(users.size, np.float32),
                        rng.permutation(users.size)), DataOptions(k_core=1))


def known_clusters(k: int, data: Interactions) -> torch.Tensor:
    shares = torch.nn.functional.one_hot(torch.from_numpy(data.item_ids % k), k).float()
    shares[0] = 1 / k
    return shares


def graph_of(data: Interactions, shares: torch.Tensor) -> np.ndarray:
    """Fit the graph, given the true concepts of items."""
    graph = concepts_from(data, CaDVAEConfig(num_concepts=shares.shape[1]), shares).graph
    assert graph is not None
    return graph.numpy()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k, activity", [(4, 0.0), (6, 0.0), (2, 0.8), (4, 0.8)])
def test_independent_counts_have_no_edges(k: int, activity: float, seed: int) -> None:
    """No edges are found even if users differ in activity."""
    data = drawn(expected_counts({}, k, activity, seed), seed)
    assert not graph_of(data, known_clusters(k, data)).any()


@pytest.mark.parametrize("activity", [0.0, 0.8])
def test_items_of_several_concepts_make_no_edges(activity: float) -> None:
    """Concepts 0 and 3 share items, as do 1 and 2; users' tastes are independent."""
    mixed = torch.tensor([[0.4, 0.15, 0.1, 0.35], [0.1, 0.4, 0.35, 0.15], [0.15, 0.35, 0.4, 0.1],
                          [0.35, 0.1, 0.15, 0.4]])
    data = drawn(expected_counts({}, 4, activity, 0), 0)
    assert not graph_of(data, known_clusters(4, data) @ mixed).any()


@pytest.mark.parametrize("activity", [0.0, 0.8])
@pytest.mark.parametrize("edges", [
    {(0, 1): 0.8}, {(0, 1): 0.8, (1, 3): -0.8}, {(0, 1): 0.8, (0, 2): 0.8},
    {(0, 1): 0.8, (2, 3): 0.8}, {(0, 3): 0.8, (3, 2): 0.8}])
def test_real_edges_are_found(edges: Edges, activity: float) -> None:
    """Including those of the last concept; directions are not identifiable."""
    data = drawn(expected_counts(edges, 4, activity, 0), 0)
    graph = graph_of(data, known_clusters(4, data))
    found = {(int(min(j, k)), int(max(j, k))): graph[j, k] for j, k in np.argwhere(graph)}
    assert found.keys() == {(min(e), max(e)) for e in edges}
    for (cause, effect), weight in edges.items():
        assert found[min(cause, effect), max(cause, effect)] * weight > 0


def test_axes_join_both_ends_of_a_taste() -> None:
    """Each user takes six items from one end of each of two taste dimensions, none from the other
    end; clusters of items that the same users like do not find these dimensions."""
    rng = np.random.default_rng(3)
    ends = rng.integers(0, 2, (USERS, 2))
    items = 1 + np.stack([15 * (2 * taste + ends[user, taste]) + rng.permutation(15)[:6]
                          for user in range(USERS) for taste in range(2)])
    users = np.repeat(np.arange(1, USERS + 1), 12)
    data = from_log(Log(users, items.reshape(-1), np.ones(users.size, np.float32),
                        rng.permutation(users.size)), DataOptions(k_core=1))
    truth = torch.from_numpy((data.item_ids[1:] - 1) // 30)
    found = {axes: concepts.item_clusters(data, 2, axes=axes).argmax(1)[1:]
             for axes in (True, False)}
    agree = {axes: float((x == truth).float().mean()) for axes, x in found.items()}
    assert max(agree[True], 1 - agree[True]) == 1
    assert max(agree[False], 1 - agree[False]) < 0.8
    known = concepts_from(data, CaDVAEConfig(num_concepts=2, concepts="axes", sharpness=4.0))
    assert known.shares is not None and torch.equal(known.shares.argmax(1)[1:], found[True])


def test_activity_is_removed_from_the_labels() -> None:
    """Weights sum to less than 1, and labels are uncorrelated after activity is removed."""
    g = torch.Generator().manual_seed(0)
    own = torch.randn(20_000, 4, generator=g) * torch.tensor([0.5, 1.0, 1.5, 2.0])
    common = torch.randn(20_000, 1, generator=g)
    weights = activity_weights(own + 1.5 * common)
    assert bool((weights > 0).all()) and float(weights.sum()) < 1
    left = own + 1.5 * common - ((own + 1.5 * common) @ weights)[:, None]
    off = torch.corrcoef(left.T) - torch.eye(4)
    assert float(off.abs().max()) < 0.05
    assert float(activity_weights(own).abs().sum()) < 0.05
    assert activity_weights(own[:, :1]).tolist() == [0.0]
    assert activity_weights(torch.zeros(5, 3)).tolist() == [0.0] * 3


def test_the_model_computes_the_labels_that_the_graph_was_fitted_on() -> None:
    data = drawn(expected_counts({(0, 1): 0.8}, 3, 0.5, 0)[:200], 0)
    config = CaDVAEConfig(num_concepts=3, hidden=4, dim=4)
    model = CaDVAE(data.num_items, config, concepts_from(data, config))
    rows = data.training_rows()
    lengths = torch.from_numpy(np.bincount(data.users[rows], minlength=data.num_users)[1:])
    histories = Histories(torch.arange(1, data.num_users), torch.from_numpy(data.items[rows]),
                          torch.ones(rows.size), lengths)
    labels = model.labels(histories.items, histories.lengths)
    assert labels is not None
    torch.testing.assert_close(labels.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(labels.std(0, correction=0), torch.ones(3), atol=1e-3, rtol=0)
    assert torch.equal(fit_graph(labels) != 0, model.adjacency != 0)


# ---- graphs: order, descendants, recovered edges -------------------------------------------------

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
def test_h_is_zero_only_for_acyclic_graphs(support: torch.Tensor) -> None:
    assert (float(acyclicity(support.double())) < 1e-9) == is_acyclic(support)
    weights = support.double() * torch.rand(support.shape, dtype=torch.float64,
                                            generator=torch.Generator().manual_seed(1))
    kept = acyclic_support(weights, 0.2)
    assert is_acyclic(kept) and bool((kept <= (weights >= 0.2)).all())
    if is_acyclic(weights >= 0.2):
        assert torch.equal(kept, (weights >= 0.2).fill_diagonal_(False))


def test_a_cycle_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"cycle: concepts=\[0, 1\]"):
        topological_order(torch.tensor([[False, True, False], [True, False, True],
                                        [False, False, False]]))


@pytest.mark.parametrize("seed", range(4))
def test_the_true_edges_are_recovered(seed: int) -> None:
    labels = draw_labels(2_000, seed)
    found = fit_graph(labels)
    assert torch.equal(found != 0, TRUTH != 0)
    assert torch.allclose(found, TRUTH, atol=0.1)
    order = torch.tensor([2, 0, 4, 1, 3]).argsort()  # a concept may depend on all before it
    fitted = least_squares(torch.cov(labels.double().T), order[:, None] < order)
    assert torch.equal(acyclic_support(fitted, 0.3), TRUTH != 0)


def test_collinear_constant_and_single_labels_give_an_acyclic_graph() -> None:
    shares = torch.rand(500, 4, generator=torch.Generator().manual_seed(3))
    assert is_acyclic(fit_graph(shares / shares.sum(1, keepdim=True)) != 0)
    assert not fit_graph(torch.zeros(10, 3)).any()
    assert fit_graph(torch.ones(5, 1)).tolist() == [[0.0]]


def test_bad_labels_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="labels"):
        fit_graph(torch.full((3, 2), float("nan")))
    with pytest.raises(InvalidInputError, match="labels"):
        fit_graph(torch.zeros(0, 2))


# ---- DCI and SAP ---------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
FACTORS = RNG.normal(size=(3000, 4)) * [1, 5, 0.1, 2] + 3
NOISE = RNG.normal(size=(3000, 4, 1))


def test_scores_of_importances_by_hand() -> None:
    disentanglement, whole = scores_of(np.array([[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]]))
    first = 1 + (0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert disentanglement == pytest.approx((4 * first + 2 * 1.0) / 6)
    second = 1 + (math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3) / math.log(3)
    assert whole == pytest.approx((1.0 + second) / 2)
    assert scores_of(np.zeros((2, 3))) == (0.0, 0.0)


def test_a_code_for_each_factor() -> None:
    """For any order, scale and rotation of codes, and with additional noise columns."""
    codes = np.concatenate([FACTORS[:, [2, 0, 3, 1], None] * 7, NOISE, NOISE[::-1]], 2)
    rotation = np.linalg.qr(RNG.normal(size=(3, 3)))[0]
    found = disentanglement(codes, FACTORS)
    for name, value in found.items():
        assert value == pytest.approx(1, abs=0.05), name
    turned = disentanglement((codes - codes.mean(0)) / codes.std(0) @ rotation, FACTORS)
    assert turned == pytest.approx(found, abs=0.02)


def test_mixed_codes_are_informative_and_not_disentangled() -> None:
    """Each code is a mean of all factors with the signs of a Hadamard matrix."""
    pairs = np.array([[1, 1], [1, -1]])
    mixed = ((FACTORS - FACTORS.mean(0)) / FACTORS.std(0)) @ np.kron(pairs, pairs) / 2
    found = disentanglement(mixed[..., None], FACTORS)
    assert found["informativeness"] > 0.99
    assert found["disentanglement"] < 0.02 and found["completeness"] < 0.02
    assert found["sap"] < 0.05  # each code explains a quarter of each factor


def test_copies_are_disentangled_and_not_complete() -> None:
    twice = np.concatenate([FACTORS, FACTORS], 1)[..., None]
    found = disentanglement(twice, FACTORS)
    assert found["disentanglement"] == pytest.approx(1, abs=0.01)
    assert found["completeness"] == pytest.approx(1 - math.log(2) / math.log(8), abs=0.01)
    assert found["sap"] == pytest.approx(0, abs=1e-6)


def test_noise_is_not_informative() -> None:
    found = disentanglement(NOISE, FACTORS)
    assert found["informativeness"] < 0.01 and found["sap"] < 0.01
    wide = disentanglement(RNG.normal(size=(400, 4, 90)), FACTORS[:400])  # more numbers than rows
    assert wide["informativeness"] < 0.1
    assert np.isfinite(list(disentanglement(np.zeros((50, 3, 2)), FACTORS[:50]).values())).all()


@pytest.mark.parametrize(("codes", "factors"), [
    (NOISE[:, :1], FACTORS), (NOISE[..., 0], FACTORS), (NOISE, FACTORS[:, :1]),
    (NOISE[:10], FACTORS[:10]), (NOISE[:99], FACTORS), (NOISE * np.nan, FACTORS),
    (NOISE, FACTORS * 0)])
def test_invalid_codes_and_factors_are_refused(codes: np.ndarray, factors: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match="cannot score codes"):
        disentanglement(codes, factors)
