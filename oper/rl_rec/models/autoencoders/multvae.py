"""MultVAE: variational autoencoder with a multinomial likelihood.

Liang, Krishnan, Hoffman & Jebara, "Variational Autoencoders for Collaborative Filtering", WWW 2018.

    y = |S_u|^(-1/2) sum_{i in drop(S_u)} W_in[i]                   [B, H]   a weighted bag
    (mu, log sigma^2) = W_2 tanh(y + b) + b_2                       [B, d] each
    z = mu + sigma * xi  (evaluation: mu)                           [B, d]
    g = tanh(W_3 z + b_3), or z itself without a hidden layer       [B, G]
    score(i) = <g, W_out[i]>                                        [B, n]
    loss = mean_u( -sum_{i in S_u} log softmax(score)_i + beta * KL(q(z | x_u) || N(0, I)) )

With ``item_bias``, as in the paper, the last column of W_out is a bias per item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oper.ranges import Amount, Count, Positive, Share, ShareBelowOne
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


@dataclass(frozen=True, slots=True)
class MultVAEConfig(ModelConfig):
    """Configuration of MultVAE; the defaults are the paper's.

    Attributes:
        hidden: H, columns of the encoder's table.
        dim: d, latent columns.
        decoder_hidden: G, width of the decoder's hidden layer; 0 = no hidden layer.
        item_bias: add a learned bias to each item's score.
        dropout: probability that an item is dropped from the input.
        beta: weight of the KL term after annealing.
        anneal: share of the training steps over which this weight rises linearly from 0.
        sampled: number of sampled candidates per step; 0 = the full softmax.
    """

    hidden: Positive = 600
    dim: Positive = 200
    decoder_hidden: Count = 600
    item_bias: bool = True
    dropout: ShareBelowOne = 0.5
    beta: Amount = 0.2
    anneal: Share = 0.5
    sampled: Count = 0


class MultVAE(Recommender):
    """The MultVAE model; see the module docstring.

    Args:
        num_items: rows of the item tables, row 0 (padding) included.
        config: configuration; None = the defaults.
        device: device of the tables, ``"cpu"`` or ``"meta"``.
    """

    def __init__(self, num_items: int, config: MultVAEConfig | None = None,
                 device: str = "cpu") -> None:
        super().__init__()
        c = self.config = config or MultVAEConfig()
        self.num_items, self.beta = num_items, c.beta
        width = c.decoder_hidden or c.dim
        self.item_in = ItemBags(num_items, c.hidden, 1, device)
        self.bias = nn.Parameter(torch.zeros(c.hidden))
        self.posterior = nn.Linear(c.hidden, 2 * c.dim)
        self.decoder = (nn.Sequential(nn.Linear(c.dim, width), nn.Tanh()) if c.decoder_hidden
                        else nn.Identity())
        self.item_out = ItemRows(num_items, width + int(c.item_bias), device)

    def infer(self, items: torch.Tensor, lengths: torch.Tensor
              ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute mean and log variance of z, [B, d] each, given items [L] and lengths [B]."""
        weights = bag_weights(lengths, self.config.dropout, self.training)
        y = self.item_in(items, lengths, weights.unsqueeze(0))[:, 0]
        mean, log_var = self.posterior((y + self.bias).tanh()).chunk(2, dim=1)
        return mean, log_var

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Map z [B, d] to factors [B, G], or [B, G + 1] with a last 1 for the items' bias."""
        g = self.decoder(z)
        return nn.functional.pad(g, (0, 1), value=1.0) if self.config.item_bias else g

    def forward(self, batch: Histories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms ``nll`` and ``kl``."""
        items, lengths = positives(batch)
        candidates = Candidates(self.num_items, self.config.sampled, items.device)
        mean, log_var = self.infer(items, lengths)
        g = self.decode(sample(mean, log_var, self.training))
        mine, rows = candidates.rows(self.item_out, items, lengths.numel())
        others = g @ rows.T
        own = others if candidates.all else (g[torch.repeat_interleave(lengths)] * mine).sum(1)
        nll = multinomial_nll(own, others, items, lengths, candidates)
        kl = gaussian_kl(mean, log_var).sum(1).mean()
        return nll + self.beta * kl, {"nll": nll.detach(), "kl": kl.detach()}

    def lookups(self, batch: Histories) -> list[Any]:
        items, lengths = positives(batch)
        candidates = Candidates(self.num_items, self.config.sampled, items.device)
        weights = bag_weights(lengths, 0.0, False).unsqueeze(0)
        return [self.item_in.lookups(items, lengths, weights),
                self.item_out.lookups(candidates.ids(items), max(lengths.numel(), 1))]

    def encode(self, histories: Histories) -> torch.Tensor:
        """Compute users' factors, the result of `decode` for the mean of z."""
        return self.decode(self.infer(*positives(histories))[0])

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return encoded @ self.item_out(items).T

    def schedule(self, step: int, num_steps: int) -> None:
        """Set beta, the weight of the KL term, for step `step` of `num_steps`."""
        self.beta = self.config.beta * annealed(step, num_steps, self.config.anneal)
