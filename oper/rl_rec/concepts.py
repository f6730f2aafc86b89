"""Derive concepts of items, and the causal graph among concepts, from interactions."""

from __future__ import annotations

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.rl_rec.data.batches import training_histories
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.autoencoders.cadvae import CaDVAEConfig, Concepts, log_counts, tags, without
from oper.rl_rec.models.autoencoders.causal_graph import fit_graph, least_squares
from oper.rl_rec.models.autoencoders.item_tables import positives

FACTORS = 32  # number of singular vectors that represent an item
ROUNDS = 50   # maximum number of k-means iterations


def concepts_from(data: Interactions, config: CaDVAEConfig, shares: torch.Tensor | None = None,
                  edges: torch.Tensor | None = None) -> Concepts:
    """Compute the `Concepts` that `CaDVAE` needs before training.

    These are item concepts (`config.concepts`), activity weights, means and standard deviations of
    the labels over the training users, and the graph fitted to the labels (`config.graph`). The
    fit uses standardised labels, which do not determine the directions of edges.

    Args:
        data: the interactions.
        config: the model's configuration.
        shares: known concepts of the items, such as genres, instead of `config.concepts`: float
            [num_items, K], rows that sum to 1.
        edges: known acyclic graph over known concepts, instead of `config.graph`: bool [K, K],
            row = cause. Its weights are fitted to the labels by least squares.

    Raises:
        InvalidInputError: `edges` without `shares`: only known concepts have a known graph.
    """
    k = config.num_concepts
    if shares is None and edges is not None:
        raise InvalidInputError("cannot use the graph `edges` over concepts", "shares", None,
                                "the items' shares of the known concepts, which the edges connect",
                                "pass shares too, or leave out edges")
    if shares is None and config.concepts == "learned":
        return Concepts(graph=torch.zeros(k, k) if config.graph == "none" else None)
    if shares is None:
        shares = item_clusters(data, k, sharpness=config.sharpness, axes=config.concepts == "axes")
    shares = shares.float()
    items, lengths = positives(training_histories(data, np.arange(1, data.num_users)))
    counts = log_counts(tags(shares), items, lengths)[lengths > 0]
    activity = activity_weights(counts)
    mean, std, labels = standardised(without(activity, counts))
    graph: torch.Tensor | None = torch.zeros(k, k)
    if edges is not None:
        graph = least_squares(torch.cov(labels.double().T), edges).float()
    elif config.graph == "free":
        graph = None
    elif config.graph == "fit":
        graph = fit_graph(labels, threshold=config.threshold).float()
    return Concepts(shares, graph, mean, std, activity)


def standardised(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean [K], standard deviation [K] (1 for constant columns) and z-scores of [N, K]."""
    mean, std = labels.mean(0), labels.std(0, correction=0)
    std = torch.where(std > 1e-6, std, 1.0)
    return mean, std, (labels - mean) / std


def activity_weights(counts: torch.Tensor) -> torch.Tensor:
    """Fit weights w, float32 [K], such that ``x - (x @ w)`` has the users' activity removed.

    Active users have more items of every concept, so activity correlates unrelated concepts. In the
    one-factor model ``x_k = a + r_k`` with independent r_k of variance d_k, each pair of concepts
    has the covariance v = Var(a). v is estimated by the lower median over all pairs, clipped at 0;
    other relations do not affect it if they concern fewer than half of the pairs. The estimate of a
    is the mean with weights ``t / d_k``, ``t = 1 / sum 1 / d_k``; subtracting ``1 - sqrt(t / (v +
    t))`` times this estimate makes the covariances between concepts 0. For independent counts v = 0
    and w = 0. With K = 2, any positive covariance is attributed to activity.

    Args:
        counts: log counts of N users, float [N, K].
    """
    k = counts.shape[1]
    centred = counts.double() - counts.double().mean(0)
    covariance = centred.T @ centred / max(1, len(counts))
    variance = covariance.diagonal()
    if k < 2 or not float(variance.max()) > 0:
        return torch.zeros(k)
    pairs = covariance[torch.ones(k, k).triu(1) > 0]
    shared = pairs.median().clamp(min=0)
    own = (variance - shared).clamp(min=1e-3 * float(variance.max()))
    noise = 1 / (1 / own).sum()
    removed = 1 - (noise / (shared + noise)).sqrt()  # share of the estimate that is subtracted
    return (removed * noise / own).float()


def item_clusters(data: Interactions, num_clusters: int, *, sharpness: float = 0.0,
                  axes: bool = False) -> torch.Tensor:
    """Cluster items by the users that like them.

    Items are represented by the leading singular vectors of the users-by-items matrix of positive
    training interactions, with users and items scaled to length 1, and grouped by spherical k-means
    (Dhillon & Modha 2001). torch's global generator is unaffected.

    Args:
        data: the interactions.
        num_clusters: K.
        sharpness: 0 = each item in one cluster; else shares are the softmax of sharpness * cosine
            to the centres.
        axes: cluster by the absolute cosine (diametrical clustering, Dhillon, Marcotte and Roshan
            2003), so that both ends of a taste dimension, whose items rarely have the same users,
            form one cluster instead of two.

    Returns:
        Share of each item in each cluster, float32 [num_items, K], rows that sum to 1; uniform for
        items without a positive training interaction.

    Raises:
        InvalidInputError: no training interaction is positive.
    """
    items, lengths = positives(training_histories(data, np.arange(1, data.num_users)))
    if not items.numel():
        raise InvalidInputError("cannot cluster items", "positive training interactions", 0, ">= 1",
                                "check the log's label, which is the reward")
    user = torch.repeat_interleave(lengths)
    count = torch.bincount(items, minlength=data.num_items).float()
    scale = (lengths[user].float() * count[items]).rsqrt()
    matrix = torch.sparse_coo_tensor(torch.stack([items, user]), scale,
                                     (data.num_items, lengths.numel()),
                                     check_invariants=True).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for the randomised SVD and the initial centres
        rank = min(FACTORS, *matrix.shape)
        u, s, _ = torch.svd_lowrank(matrix, q=rank, niter=4)
        # The first pair of singular vectors reflects popularity, not taste.
        points = torch.nn.functional.normalize((u * s)[:, 1:] if rank > 1 else u, dim=1)
        seen = count > 0
        centres = _spherical_kmeans(points[seen], num_clusters, axes)
    cosine = _similarity(points, centres, axes)
    if sharpness:
        shares = (sharpness * cosine).softmax(1)
    else:
        shares = torch.nn.functional.one_hot(cosine.argmax(1), num_clusters).float()
    shares[~seen] = 1 / num_clusters
    return shares


def _similarity(points: torch.Tensor, centres: torch.Tensor, axes: bool) -> torch.Tensor:
    """Compute cosines [n, k] of unit points [n, F], centres [k, F]; absolute values if `axes`."""
    cosine = points @ centres.T
    return cosine.abs() if axes else cosine


def _spherical_kmeans(points: torch.Tensor, k: int, axes: bool) -> torch.Tensor:
    """Fit k unit centres, float32 [k, F], to unit points [n, F]; k-means++-like initialisation."""
    centres = points[torch.randint(len(points), (1,))]
    for _ in range(k - 1):
        far = (1 - _similarity(points, centres, axes).amax(1)).clamp(min=0) + 1e-12
        centres = torch.cat([centres, points[torch.multinomial(far, 1)]])
    for _ in range(ROUNDS):
        nearest = _similarity(points, centres, axes).argmax(1)
        # With `axes`, opposite points support the same centre.
        along = points * (points * centres[nearest]).sum(1, keepdim=True).sign() if axes else points
        sums = torch.zeros_like(centres).index_add(0, nearest, along)
        moved = torch.nn.functional.normalize(sums, dim=1)
        moved = torch.where(sums.norm(dim=1, keepdim=True) > 0, moved, centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres
