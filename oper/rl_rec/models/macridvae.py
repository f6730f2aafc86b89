"""MacridVAE: user representations split into learned concepts that are kept independent.

Ma, Zhou, Cui, Yang & Zhu, "Learning Disentangled Representations for Recommendation", NeurIPS 2019.

    concepts    c_{i,k} = softmax_k(cos(h_i, m_k) / tau), prototypes m [K, d]                 [n, K]
    encoder     y_k = |S_u|^(-1/2) sum_{i in drop(S_u)} c_{i,k} W_in[i]                    [B, K, H]
                (mu_k, log sigma_k^2) = W_2 tanh(y_k + b) + b_2, mu_k to length 1          [B, K, d]
                z_k = mu_k + prior_std exp(log sigma_k^2 / 2) xi        (evaluation: mu)
    decoder     p(i | z) ~ sum_k c_{i,k} exp(cos(z_k, h_i) / tau)                             [B, n]
    loss        -sum_{i in S_u} log p(i | z) + beta sum KL(N(0, sigma_k^2) || N(0, I))
                means have length 1, so that they drop out of the divergence

Concepts are soft; Gumbel-softmax samples of them (an option of the authors) are not offered. It
normalises the input over all items before the split, as the authors do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.models.item_tables import (
    Drawn,
    ItemBags,
    ItemRows,
    annealed,
    bag_weights,
    check_config,
    gaussian_kl,
    multinomial_nll,
    positives,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class MacridVAEConfig:
    """Sizes and weights; the defaults are the authors', H = 3 d.

    Attributes:
        num_concepts: K.
        dim: d, columns per concept.
        temperature: tau.
        prior_std: standard deviation of z around its mean at sigma = 1.
        dropout: chance that an item is dropped from the input.
        beta: weight of the KL term at the end of annealing.
        anneal: share of the steps over which it rises from 0.
        sampled: candidates per step; 0 = the full softmax.
    """

    num_concepts: int = 7
    dim: int = 100
    temperature: float = 0.1
    prior_std: float = 0.075
    dropout: float = 0.5
    beta: float = 0.2
    anneal: float = 0.5
    sampled: int = 0

    def __post_init__(self) -> None:
        check_config(self, "num_concepts", "dim", "temperature", "prior_std")


class MacridVAE(Recommender):
    """See the top of this file.

    Args:
        num_items: rows of the item tables, row 0 (padding) included.
        config: sizes and weights.
        device: of the tables, ``"cpu"`` or ``"meta"``.
    """

    def __init__(self, num_items: int, config: MacridVAEConfig | None = None,
                 device: str = "cpu") -> None:
        super().__init__()
        c = self.config = config or MacridVAEConfig()
        self.num_items, self.beta = num_items, c.beta
        self.item_in = ItemBags("item_in", num_items, 3 * c.dim, c.num_concepts, device)
        self.bias = nn.Parameter(torch.zeros(3 * c.dim))
        self.posterior = nn.Linear(3 * c.dim, 2 * c.dim)
        self.item_out = ItemRows("item_out", num_items, c.dim, device)
        self.prototypes = nn.Parameter(torch.randn(c.num_concepts, c.dim))

    def concepts(self, rows: torch.Tensor) -> torch.Tensor:
        """log c, float32 [n, K], of unit item rows [n, d]."""
        m = nn.functional.normalize(self.prototypes, dim=1)
        return (rows @ m.T / self.config.temperature).log_softmax(1)

    def infer(self, items: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
              ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit means and log variances, float32 [B, K, d] each; unit rows of the items [L, d]."""
        weights = bag_weights(lengths, self.config.dropout, self.training)
        y = self.item_in(items, lengths, self.concepts(rows).exp().T * weights)
        mean, log_var = self.posterior((y + self.bias).tanh()).chunk(2, dim=2)
        return nn.functional.normalize(mean, dim=2), log_var

    def decode(self, z: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """float32 [B, n] of z [B, K, d] and unit rows [n, d]."""
        z = nn.functional.normalize(z, dim=2)
        cosine = torch.einsum("bkd,nd->bkn", z, rows) / self.config.temperature
        return (cosine + self.concepts(rows).T).logsumexp(1)

    def forward(self, batch: Histories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss float32 [] and its parts ``nll`` and ``kl``."""
        c = self.config
        items, lengths = positives(batch)
        candidates = Drawn(self.num_items, c.sampled, items.device)
        mine, others = (nn.functional.normalize(rows, dim=1)
                        for rows in candidates.rows(self.item_out, items, lengths.numel()))
        mean, log_var = self.infer(items, lengths, mine)
        z = mean
        if self.training:
            z = mean + c.prior_std * (0.5 * log_var).exp() * torch.randn_like(mean)
        scores = own = self.decode(z, others)
        if not candidates.all:
            unit = nn.functional.normalize(z, dim=2)[rows_of(lengths)]
            cosine = torch.einsum("lkd,ld->lk", unit, mine) / c.temperature
            own = (cosine + self.concepts(mine)).logsumexp(1)
        nll = multinomial_nll(own, scores, items, lengths, candidates)
        kl = gaussian_kl(torch.zeros_like(log_var), log_var).sum((1, 2)).mean()
        return nll + self.beta * kl, {"nll": nll.detach(), "kl": kl.detach()}

    def _unit_rows(self, items: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.item_out(items), dim=1)

    def lookups(self, batch: Histories) -> list[Any]:
        """Lookups of the encoder's bags (K features on one table) and of the decoder's rows."""
        items, lengths = positives(batch)
        candidates = Drawn(self.num_items, self.config.sampled, items.device)
        weights = torch.ones(self.config.num_concepts, items.numel(), device=items.device)
        return [self.item_in.lookups(items, lengths, weights),
                self.item_out.lookups(candidates.ids(items), max(lengths.numel(), 1))]

    def encode(self, histories: Histories) -> torch.Tensor:
        """z float32 [B, K, d]."""
        items, lengths = positives(histories)
        return self.infer(items, lengths, self._unit_rows(items))[0]

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores of `items` for each user, float32 [B, n]."""
        return self.decode(encoded, self._unit_rows(items))

    def schedule(self, step: int, num_steps: int) -> None:
        """Anneals beta."""
        self.beta = self.config.beta * annealed(step, num_steps, self.config.anneal)
