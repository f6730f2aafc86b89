"""Graphs among concepts reflect users' tastes, not artefacts of counting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from oper.rl_rec import concepts
from oper.rl_rec.concepts import activity_weights, concepts_from
from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig
from oper.rl_rec.models.autoencoders.causal_graph import fit_graph
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


def graph_of(data: Interactions, k: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Fit the graph, given the true concepts of items."""
    monkeypatch.setattr(concepts, "item_clusters", lambda *a, **b: known_clusters(k, data))
    graph = concepts_from(data, CaDVAEConfig(num_concepts=k)).graph
    assert graph is not None
    return graph.numpy()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k, activity", [(4, 0.0), (6, 0.0), (2, 0.8), (4, 0.8)])
def test_independent_counts_have_no_edges(k: int, activity: float, seed: int,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if users differ in activity."""
    data = drawn(expected_counts({}, k, activity, seed), seed)
    assert not graph_of(data, k, monkeypatch).any()


@pytest.mark.parametrize("activity", [0.0, 0.8])
def test_items_of_several_concepts_make_no_edges(activity: float, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    """Concepts 0 and 3 share items, as do 1 and 2; users' tastes are independent."""
    mixed = torch.tensor([[0.4, 0.15, 0.1, 0.35], [0.1, 0.4, 0.35, 0.15], [0.15, 0.35, 0.4, 0.1],
                          [0.35, 0.1, 0.15, 0.4]])
    data = drawn(expected_counts({}, 4, activity, 0), 0)
    monkeypatch.setattr(concepts, "item_clusters",
                        lambda *a, **b: known_clusters(4, data) @ mixed)
    graph = concepts_from(data, CaDVAEConfig(num_concepts=4)).graph
    assert graph is not None and not graph.any()


@pytest.mark.parametrize("activity", [0.0, 0.8])
@pytest.mark.parametrize("edges", [
    {(0, 1): 0.8}, {(0, 1): 0.8, (1, 3): -0.8}, {(0, 1): 0.8, (0, 2): 0.8},
    {(0, 1): 0.8, (2, 3): 0.8}, {(0, 3): 0.8, (3, 2): 0.8}])
def test_real_edges_are_found(edges: Edges, activity: float, monkeypatch: pytest.MonkeyPatch
                              ) -> None:
    """Including those of the last concept; directions are not identifiable."""
    graph = graph_of(drawn(expected_counts(edges, 4, activity, 0), 0), 4, monkeypatch)
    found = {(int(min(j, k)), int(max(j, k))): graph[j, k] for j, k in np.argwhere(graph)}
    assert found.keys() == {(min(e), max(e)) for e in edges}
    for (cause, effect), weight in edges.items():
        assert found[min(cause, effect), max(cause, effect)] * weight > 0


def test_axes_are_tastes_with_both_of_their_ends() -> None:
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


def test_ratios_of_independent_counts_would_have_edges() -> None:
    """Labels are not ratios of counts, since a shared denominator (one count, or their mean) would
    correlate them."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(np.log(rng.poisson(5.0, (USERS, 4)) + 0.5))
    for labels in (x - x[:, -1:], x - x.mean(1, keepdim=True)):
        scale = labels.std(0)
        assert fit_graph((labels - labels.mean(0)) / torch.where(scale > 0, scale, 1.0)).any()
    assert not fit_graph((x - x.mean(0)) / x.std(0)).any()


def test_activity_leaves_the_labels() -> None:
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
