"""CaD-VAE: user representations split into concepts that may cause one another.

A re-implementation from the abstract of Wang et al., "Causal Disentangled Variational Auto-Encoder
for Preference Understanding in Recommendation" (SIGIR 2023), and from public related work:
CausalVAE (Yang et al., CVPR 2021) for the structural layer, MacridVAE (Ma et al., NeurIPS 2019) for
concepts of items and the decoder. It is not a reproduction and claims none of the paper's numbers.

B users, K concepts, d columns per concept, H columns of the encoder, n candidate items; S_u are the
items that user u liked. c [n, K] are the shares of concepts in items; its rows sum to 1.

    labels      u_k = x_k - sum_j w_j x_j, standardised                                       [B, K]
                x_k = log(1/2 + number of items in S_u whose largest c is c_k); w removes the
                user's activity
    encoder     y_k = |S_u|^(-1/2) sum_{i in drop(S_u)} c_{i,k} W_in[i]                    [B, K, H]
                (mu_k, log sigma_k^2) = W_2 tanh(y_k + b) + b_2          shared over k     [B, K, d]
                ``unit_mean``: mu_k to length 1, sigma_k times prior_std, as MacridVAE
                eps_k = mu_k + sigma_k * xi                              (evaluation: mu)  [B, K, d]
    structure   linear      z = A' z + eps, that is z = (I - A')^(-1) eps                  [B, K, d]
                non-linear  z_k = f_k((A' z)_k) + eps_k in topological order;
                            f_k(x) = x + MLP_k(x), MLP_k d -> 32 -> d with ELU, 0 at the start
                A [K, K], A_{jk} != 0 where concept j causes concept k
    decoder     p(i | z) ~ sum_k c_{i,k} exp(cos(z_k, W_out[i]) / tau)                        [B, n]
    loss        -sum_{i in S_u} log p(i | z)
                + beta_eps sum_k KL(q(eps_k | x) || N(0, prior_std^2 I))
                + beta_z   sum_k KL(q(z_k | x)   || N(u_k 1, label_std^2 I))   z of the linear
                  layer (``unit_mean``: u_k divided by sqrt(d), so that lengths agree)
                + label_weight |u - A' u|^2                              means over users
                + mask_weight sum_k |f_k((A' z)_k) - (A' z)_k|^2         z of the linear layer
                + multiplier h(A) + penalty / 2 h(A)^2 + l1 |A|_1        free graphs only
    do(z_k = v) replaces row k and recomputes its descendants from their causes and their own eps
                (abduction, action, prediction; Pearl 2009), then decodes.

Choices that keep A meaningful: with a given ``graph``, A is fitted to the labels first, edges below
a threshold are removed, and only the remaining edges are trained (h(A) = 0 throughout). The prior
mean of z_k is u_k itself, without a learned factor, which could grow while A shrinks. Labels are
separate counts per concept, and an item counts for one concept only: a shared denominator, or items
that count for several concepts, would correlate the labels of independent tastes. CausalVAE applies
its non-linear layer once; here it defines the structural equations, so that interventions are exact
in both layers.

With K = 1, A = 0, ``similarity="dot"``, tau = 1 and no labels, the model is MultVAE without a
hidden decoder layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.ranges import Amount, Count, Positive, PositiveAmount, Share, ShareBelowOne, one_of
from oper.rl_rec.models.autoencoders.causal_graph import (
    acyclic_support,
    acyclicity,
    descendants,
    topological_order,
)
from oper.rl_rec.models.autoencoders.item_tables import (
    Candidates,
    ItemBags,
    ItemRows,
    annealed,
    bag_weights,
    gaussian_kl,
    multinomial_nll,
    positives,
    sample,
)
from oper.rl_rec.models.base import Histories, ModelConfig, Recommender

ConceptSource = Annotated[str, one_of("clusters", "axes", "learned")]
GraphSource = Annotated[str, one_of("fit", "free", "none")]
MAX_PENALTY = 1e6
MASK_HIDDEN = 32


@dataclass(frozen=True, slots=True)
class CaDVAEConfig(ModelConfig):
    """Configuration of CaD-VAE; symbols are those of the module docstring.

    Attributes:
        num_concepts: K, number of concepts.
        hidden: H, columns of the encoder's table.
        dim: d, columns per concept.
        layer: ``"linear"`` or ``"nonlinear"`` structural layer.
        similarity: similarity of a concept's z and an item's row, ``"cosine"`` or ``"dot"``.
        temperature: tau, by which similarities are divided before a softmax.
        concepts: source of c. ``"clusters"``: clusters of items that the same users like;
            ``"axes"``: clusters that join both ends of a taste dimension; ``"learned"``: softmax
            over k of cos(W_out[i], m_k) / tau with prototypes m [K, d] (MacridVAE).
        sharpness: shares of clusters are the softmax of sharpness * cosine to their centres; 0 =
            each item is in one cluster only.
        graph: ``"fit"``: edges fitted to the labels before training; ``"free"``: all edges, kept
            acyclic by an augmented Lagrangian; ``"none"``: A = 0. With learned concepts, which have
            no labels, ``"fit"`` is the same as ``"free"``, and the terms of the labels are 0.
        threshold: least absolute weight of an edge.
        dropout: probability that an item is dropped from the input.
        unit_mean: scale means to length 1. The KL term of eps then depends on its variance only,
            and `prior_std` is the noise of z relative to a signal of length 1.
        prior_std: standard deviation of the prior of eps.
        label_std: standard deviation of the prior of z, whose mean is given by the user's labels.
        beta_eps, beta_z: weights of the KL terms of eps and z after annealing.
        anneal: share of the training steps over which these weights rise linearly from 0.
        label_weight: weight of the squared error of the labels predicted from their causes.
        mask_weight: weight of the squared difference of the non-linear and linear structural layer.
        l1: weight of the sum of absolute edge weights; free graphs only.
        sampled: number of sampled candidates per step; 0 = the full softmax.
    """

    num_concepts: Positive = 4
    hidden: Positive = 300
    dim: Positive = 100
    layer: Annotated[str, one_of("linear", "nonlinear")] = "linear"
    similarity: Annotated[str, one_of("cosine", "dot")] = "cosine"
    temperature: PositiveAmount = 0.1
    concepts: ConceptSource = "clusters"
    sharpness: Amount = 4.0
    graph: GraphSource = "fit"
    threshold: Amount = 0.3
    dropout: ShareBelowOne = 0.5
    unit_mean: bool = True
    prior_std: PositiveAmount = 0.075
    label_std: PositiveAmount = 1.0
    beta_eps: Amount = 0.2
    beta_z: Amount = 0.02
    anneal: Share = 0.5
    label_weight: Amount = 1.0
    mask_weight: Amount = 0.1
    l1: Amount = 0.01
    sampled: Count = 0

    def __post_init__(self) -> None:
        self.check(("graph", self.layer == "linear" or self.graph != "free",
                    "'fit' or 'none' with layer='nonlinear', which needs a topological order"))


@dataclass(frozen=True, slots=True)
class MacridVAEConfig(CaDVAEConfig):
    """MacridVAE (Ma, Zhou, Cui, Yang and Zhu, NeurIPS 2019) with the authors'
    numbers of concepts and of columns per concept.

    Concepts are learned and soft (the authors' Gumbel-softmax option is not implemented); there is
    no graph and there are no labels. Unlike the authors', the weights of a user's items in the
    input of a concept, ``|S_u|^(-1/2) c_{i,k}``, are not scaled to length 1."""

    num_concepts: Positive = 7
    concepts: ConceptSource = "learned"
    graph: GraphSource = "none"
    beta_z: Amount = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Concepts:
    """Inputs of `CaDVAE` that are computed before training; see `concepts_from`.

    Attributes:
        shares: c, float32 [num_items, K], rows that sum to 1; None = learned.
        graph: initial A, float [K, K], whose non-zero entries are the edges; None = a free graph,
            with all edges.
        label_mean, label_std: mean and standard deviation over the training users of the labels
            before standardisation, float32 [K]; None = no labels.
        activity: w, weights of a user's activity, float32 [K]; None = 0.
    """

    shares: torch.Tensor | None = None
    graph: torch.Tensor | None = None
    label_mean: torch.Tensor | None = None
    label_std: torch.Tensor | None = None
    activity: torch.Tensor | None = None


class CaDVAE(Recommender):
    """The CaD-VAE model; see the module docstring.

    Args:
        num_items: rows of the item tables, row 0 (padding) included.
        config: configuration; None = the defaults.
        concepts: inputs computed before training; None = learned concepts, a free graph, and no
            labels.
        device: device of the tables, ``"cpu"`` or ``"meta"``.
    """

    shares: torch.Tensor | None
    label_mean: torch.Tensor | None
    label_std: torch.Tensor | None
    activity: torch.Tensor
    edges: torch.Tensor
    lagrange: torch.Tensor

    def __init__(self, num_items: int, config: CaDVAEConfig | None = None,
                 concepts: Concepts | None = None, device: str = "cpu") -> None:
        super().__init__()
        c = self.config = config or CaDVAEConfig()
        known = concepts or Concepts()
        k, self.num_items, self.anneal = c.num_concepts, num_items, 1.0
        _check(known, num_items, k)
        self.item_in = ItemBags(num_items, c.hidden, k, device)
        self.bias = nn.Parameter(torch.zeros(c.hidden))
        self.posterior = nn.Linear(c.hidden, 2 * c.dim)
        self.item_out = ItemRows(num_items, c.dim, device)
        self.register_buffer("shares", None if known.shares is None else known.shares.float())
        self.prototypes = nn.Parameter(torch.randn(k, c.dim)) if known.shares is None else None
        self.register_buffer("label_mean", known.label_mean)
        self.register_buffer("label_std", known.label_std)
        self.register_buffer("activity", torch.zeros(k) if known.activity is None
                             else known.activity.float())
        off_diagonal = 1 - torch.eye(k)
        self.free = known.graph is None
        start = (0.1 * torch.randn(k, k) if known.graph is None else known.graph.float())
        self.register_buffer("edges", off_diagonal if self.free else (start != 0).float())
        self.weights = nn.Parameter(start * self.edges)
        # Multiplier, penalty and h(A) of the augmented Lagrangian, and the step of their update.
        self.register_buffer("lagrange", torch.tensor([0.0, 1.0, float("inf"), 0.0]))
        self.order = [] if self.free else topological_order(self.edges.bool())
        self.masks = nn.ModuleList(_Residual(c.dim) for _ in range(k)) if (
            c.layer == "nonlinear") else None
        if self.masks is not None and self.free:
            raise InvalidInputError("cannot build the causal layer", "layer", c.layer,
                                    "'linear' with a free graph",
                                    "pass a graph, or set layer='linear'")

    @property
    def adjacency(self) -> torch.Tensor:
        """A, float32 [K, K]."""
        return self.weights * self.edges

    def support(self) -> torch.Tensor:
        """Acyclic edges used by interventions, bool [K, K], row = cause; see `acyclic_support`."""
        if not self.free:
            return self.edges.bool()
        return acyclic_support(self.adjacency.detach(), self.config.threshold)

    def labels(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Compute the labels u, float32 [B, K], from the users' items, int64 [L], and numbers of
        items, int64 [B]; None if the model has no labels."""
        if self.shares is None or self.label_mean is None or self.label_std is None:
            return None
        counts = log_counts(tags(self.shares), items, lengths)
        return (without(self.activity, counts) - self.label_mean) / self.label_std

    def item_concepts(self, items: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the shares c of concepts in items, int64 [n], as float32 [n, K]. Learned shares
        are computed from `rows` [n, d], the items' embeddings; given ones do not need them."""
        if self.shares is not None:
            return self.shares[items]
        assert self.prototypes is not None and rows is not None
        cosine = _unit(rows) @ _unit(self.prototypes).T
        return (cosine / self.config.temperature).softmax(1)

    def infer(self, lengths: torch.Tensor, items: torch.Tensor, concepts: torch.Tensor
              ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute mean and log variance of eps, float32 [B, K, d] each.

        Args:
            lengths: int64 [B], number of items of each user.
            items: int64 [L], the users' items one after the other.
            concepts: float32 [L, K], c of these items.
        """
        weights = bag_weights(lengths, self.config.dropout, self.training)
        y = self.item_in(items, lengths, concepts.T * weights)
        mean, log_var = self.posterior((y + self.bias).tanh()).chunk(2, dim=2)
        log_var = log_var.clamp(-8, 4)
        if self.config.unit_mean:
            return _unit(mean), log_var + 2 * math.log(self.config.prior_std)
        return mean, log_var

    def structure(self, eps: torch.Tensor) -> torch.Tensor:
        """Apply the structural layer to eps [B, K, d]; returns z, float32 [B, K, d]."""
        a = self.adjacency
        if self.masks is None:
            return solve(a, eps)
        z = list(eps.unbind(1))
        for k in self.order:
            if self.edges[:, k].any():
                z[k] = z[k] + self._effect(k, a, torch.stack(z, 1))
        return torch.stack(z, 1)

    def intervene(self, z: torch.Tensor, concept: int, value: torch.Tensor) -> torch.Tensor:
        """Apply do(z_k = v); returns z, float32 [B, K, d].

        Every concept keeps its own eps; only `concept` and its descendants change.

        Args:
            z: float32 [B, K, d], as returned by `encode`.
            concept: k.
            value: v, float32 [d] or [B, d].
        """
        if not 0 <= concept < z.shape[1]:
            raise InvalidInputError("cannot intervene", "concept", concept,
                                    f"0 <= concept < {z.shape[1]}", "pass one of the concepts")
        support = self.support()
        a = self.adjacency * support
        after = list(z.unbind(1))
        after[concept] = value.expand_as(after[concept])
        changed = descendants(support)[concept]
        for k in topological_order(support):
            if changed[k]:
                own = z[:, k] - self._effect(k, a, z)
                after[k] = self._effect(k, a, torch.stack(after, 1)) + own
        return torch.stack(after, 1)

    def _effect(self, k: int, a: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Compute the effect of its causes on concept k, [B, d], given A [K, K], z [B, K, d]."""
        inflow = torch.einsum("j,bjd->bd", a[:, k], z)
        return inflow if self.masks is None else self.masks[k](inflow)

    def decode(self, z: torch.Tensor, rows: torch.Tensor, concepts: torch.Tensor) -> torch.Tensor:
        """Compute log sum_k c_{i,k} exp(similarity / tau), float32 [B, n], from rows [n, d]."""
        return (self._similarity(z, rows) + concepts.T.log()).logsumexp(1)

    def _similarity(self, z: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.config.similarity == "cosine":
            z, rows = _unit(z), _unit(rows)
        return torch.einsum("bkd,nd->bkn", z, rows) / self.config.temperature

    def forward(self, batch: Histories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its detached terms by name."""
        items, lengths = positives(batch)
        candidates = Candidates(self.num_items, self.config.sampled, items.device)
        mine, others = candidates.rows(self.item_out, items, lengths.numel())
        concepts = self.item_concepts(items, mine)
        mean, log_var = self.infer(lengths, items, concepts)
        z = self.structure(sample(mean, log_var, self.training))
        scores = self.decode(z, others, self.item_concepts(candidates.items, others))
        own = scores if candidates.all else self._own_scores(z, lengths, mine, concepts)
        parts = {"nll": multinomial_nll(own, scores, items, lengths, candidates)}
        labels = self.labels(items, lengths)
        loss = parts["nll"] + self._divergences(mean, log_var, labels, parts)
        loss = loss + self._causal_terms(mean, labels, parts)
        return loss, {name: value.detach() for name, value in parts.items()}

    def _own_scores(self, z: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor,
                    concepts: torch.Tensor) -> torch.Tensor:
        """Compute the scores of the users' own items, float32 [L]."""
        if self.config.similarity == "cosine":
            z, rows = _unit(z), _unit(rows)
        z = z.repeat_interleave(lengths, dim=0)
        found = torch.einsum("lkd,ld->lk", z, rows) / self.config.temperature
        return (found + concepts.log()).logsumexp(1)

    def _divergences(self, mean: torch.Tensor, log_var: torch.Tensor,
                     labels: torch.Tensor | None, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum the weighted KL terms of eps and of the linear layer's z; adds them to `parts`."""
        c = self.config
        # With unit means, the mean contributes only a constant, which is omitted.
        centre = torch.zeros_like(mean) if c.unit_mean else mean
        parts["kl_eps"] = gaussian_kl(centre, log_var, 0.0, c.prior_std).sum((1, 2)).mean()
        loss = self.anneal * c.beta_eps * parts["kl_eps"]
        if labels is not None:
            # z is a linear map M of eps; its marginals are Gaussian with variances M^2 sigma^2.
            inverse = torch.linalg.solve(_unmixing(self.adjacency), torch.eye(
                mean.shape[1], dtype=mean.dtype, device=mean.device))
            z_mean = torch.einsum("kj,bjd->bkd", inverse, mean)
            z_var = torch.einsum("kj,bjd->bkd", inverse.square(), log_var.exp())
            if c.unit_mean:
                labels = labels / math.sqrt(mean.shape[2])
            parts["kl_z"] = gaussian_kl(z_mean, z_var.log(), labels.unsqueeze(2),
                                        c.label_std).sum((1, 2)).mean()
            loss = loss + self.anneal * c.beta_z * parts["kl_z"]
        return loss

    def _causal_terms(self, mean: torch.Tensor, labels: torch.Tensor | None,
                      parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum the weighted loss terms of labels, non-linear layer and acyclicity; see `parts`."""
        c, a = self.config, self.adjacency
        loss = 0.0 * a.sum()  # gives A a gradient even if no term below is used
        if labels is not None:
            parts["label"] = (labels - labels @ a).square().sum(1).mean()
            loss = loss + c.label_weight * parts["label"]
        if self.masks is not None:
            inflow = torch.einsum("jk,bjd->bkd", a, solve(a, mean))
            parts["mask"] = torch.stack([
                (mask(inflow[:, k]) - inflow[:, k]).square().sum(1).mean()
                for k, mask in enumerate(self.masks)]).sum()
            loss = loss + c.mask_weight * parts["mask"]
        if self.free:
            parts["acyclicity"] = h = acyclicity(a)
            loss = (loss + self.lagrange[0] * h + 0.5 * self.lagrange[1] * h * h
                    + c.l1 * a.abs().sum())
        return loss

    def lookups(self, batch: Histories) -> list[Any]:
        items, lengths = positives(batch)
        weights = torch.ones(self.config.num_concepts, items.numel(), device=items.device)
        candidates = Candidates(self.num_items, self.config.sampled, items.device)
        return [self.item_in.lookups(items, lengths, weights),
                self.item_out.lookups(candidates.ids(items), max(lengths.numel(), 1))]

    def encode(self, histories: Histories) -> torch.Tensor:
        """Infer the latent vectors z of the concepts, float32 [B, K, d].

        The noise eps, of which the graph makes z, is set to its posterior mean.
        """
        items, lengths = positives(histories)
        rows = self.item_out(items) if self.shares is None else None
        return self.structure(self.infer(lengths, items, self.item_concepts(items, rows))[0])

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Score items [n], float32 [B, n], given z [B, K, d] from `encode` or `intervene`."""
        rows = self.item_out(items)
        return self.decode(encoded, rows, self.item_concepts(items, rows))

    @torch.no_grad()
    def schedule(self, step: int, num_steps: int) -> None:
        """Anneal the KL terms; for a free graph, update the Lagrangian about 20 times per training.

        Repeating a step's call, as a resumed run may do, has no further effect.
        """
        self.anneal = annealed(step, num_steps, self.config.anneal)
        if not step:
            self.lagrange[3] = 0.0
        if self.free and step > self.lagrange[3] and step % max(1, num_steps // 20) == 0:
            h, (multiplier, penalty, before, _) = acyclicity(self.adjacency), self.lagrange
            self.lagrange[0] = multiplier + penalty * h
            self.lagrange[1] = (penalty * (10 if h > before / 4 else 1)).clamp(max=MAX_PENALTY)
            self.lagrange[2] = h
            self.lagrange[3] = float(step)


class _Residual(nn.Module):
    """``f(x) = x + MLP(x)``, the identity until it is trained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        last = nn.Linear(MASK_HIDDEN, dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(dim, MASK_HIDDEN), nn.ELU(), last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def solve(a: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Solve ``(I - A') z = eps`` for z [B, K, d]; A [K, K]."""
    return torch.linalg.solve(_unmixing(a), eps)


def tags(shares: torch.Tensor) -> torch.Tensor:
    """Return the one-hot concept of each item's largest share, [num_items, K]; ties are split."""
    top = (shares == shares.amax(1, keepdim=True)).float()
    return top / top.sum(1, keepdim=True)


def log_counts(tags: torch.Tensor, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Count the items of each concept that users have and apply `log_of`, float32 [B, K].

    Args:
        tags: result of `tags`, float32 [num_items, K].
        items: the users' items, one user after another, int64 [L].
        lengths: number of items of each user, int64 [B].
    """
    count = tags.new_zeros(lengths.numel(), tags.shape[1]).index_add(
        0, torch.repeat_interleave(lengths), tags[items])
    return log_of(count)


def log_of(counts: torch.Tensor) -> torch.Tensor:
    """Compute ``log(n_k + 1/2)`` of counts [B, K], float32.

    Each column depends only on its own concept, so independent counts stay independent. 1/2 is
    Haldane's correction for concepts without items.
    """
    return (counts + 0.5).log()


def without(activity: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Subtract each user's activity, ``counts @ activity`` with weights [K], from log counts."""
    return counts - (counts @ activity)[:, None]


def _unmixing(a: torch.Tensor) -> torch.Tensor:
    """Return I - A'."""
    return torch.eye(len(a), dtype=a.dtype, device=a.device) - a.T


def _unit(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(x, dim=-1)


def _check(known: Concepts, num_items: int, k: int) -> None:
    if known.shares is not None:
        sums = known.shares.sum(1)
        if known.shares.shape != (num_items, k) or bool((known.shares < 0).any()) or (
                not torch.allclose(sums, torch.ones_like(sums), atol=1e-4)):
            raise InvalidInputError(
                "cannot use these concepts of items", "shape", tuple(known.shares.shape),
                f"({num_items}, {k}), values >= 0, rows that sum to 1", "correct `shares`")
    for name, value, shape in (("graph", known.graph, (k, k)), ("label_mean", known.label_mean,
                               (k,)), ("label_std", known.label_std, (k,)),
                              ("activity", known.activity, (k,))):
        if value is not None and tuple(value.shape) != shape:
            raise InvalidInputError("cannot use these concepts of items", f"shape of {name}",
                                    tuple(value.shape), str(shape), f"correct `{name}`")
