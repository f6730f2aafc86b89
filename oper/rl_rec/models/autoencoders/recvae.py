"""RecVAE: MultVAE with a composite prior, and alternating training of encoder and decoder.

Shenbin, Alekseev, Tutubalina, Malykh and Nikolenko, WSDM 2020.

    h_1 = LN(swish(y + b)), with y as MultVAE's weighted bag of the user's items          [B, H]
    h_k = LN(swish(W_k h_{k-1} + b_k + h_1 + ... + h_{k-1})), k = 2..5                    [B, H]
    (mu, log sigma^2) = W h_5 + b                                                    [B, d] each
    score(i) = <z, W_out[i]> + bias_i
    loss = mean_u( -sum_{i in S_u} log softmax(score)_i
                   + gamma |S_u| (log q(z | x_u) - log p(z | x_u)) ),  z drawn from q
    p(z | x) = 3/20 N(0, I) + 3/4 q_old(z | x) + 1/10 N(0, e^10 I)

q_old is an earlier copy of the encoder. In each round of steps, the first 3/4 train the encoder,
with dropout on its input; then q_old becomes a copy of it, and the last 1/4 train the decoder
without dropout.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from oper.ranges import Amount, Positive, ShareBelowOne
from oper.rl_rec.models.autoencoders.item_tables import (
    ItemBags,
    ItemRows,
    bag_weights,
    positives,
    sample,
)
from oper.rl_rec.models.base import Histories, ModelConfig, Recommender

_PRIOR = (3 / 20, 3 / 4, 1 / 10)
_WIDE = 10.0  # log variance of the third component of the prior


@dataclass(frozen=True, slots=True)
class RecVAEConfig(ModelConfig):
    """Configuration of RecVAE; the defaults are the paper's.

    Attributes:
        hidden: H, columns of the encoder's layers.
        dim: d, latent columns.
        dropout: probability that an item is dropped from the input while the encoder trains.
        gamma: weight of the KL term per item of a user.
        rounds: number of alternations between encoder and decoder in a training; approximate,
            since the steps of a round are rounded down to a multiple of four, and at least four.
    """

    hidden: Positive = 600
    dim: Positive = 200
    dropout: ShareBelowOne = 0.5
    gamma: Amount = 0.005
    rounds: Positive = 50


class Encoder(nn.Module):
    """Computes mean and log variance of q(z | x), float32 [B, d] each."""

    def __init__(self, num_items: int, config: RecVAEConfig) -> None:
        super().__init__()
        width = config.hidden
        self.bags = ItemBags(num_items, width, 1, "cpu")
        self.bias = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=0.1) for _ in range(5))
        self.posterior = nn.Linear(width, 2 * config.dim)

    def forward(self, items: torch.Tensor, lengths: torch.Tensor, dropout: float
                ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = bag_weights(lengths, dropout, dropout > 0)
        h = self.norms[0](nn.functional.silu(
            self.bags(items, lengths, weights[None])[:, 0] + self.bias))
        before = h
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            h = norm(nn.functional.silu(layer(h) + before))
            before = before + h
        mean, log_var = self.posterior(h).chunk(2, dim=1)
        return mean, log_var


class RecVAE(Recommender):
    """The RecVAE model; see the module docstring.

    Args:
        num_items: rows of the item tables, row 0 (padding) included.
        config: configuration.
    """

    def __init__(self, num_items: int, config: RecVAEConfig) -> None:
        super().__init__()
        self.config, self.num_items, self.trains_decoder = config, num_items, False
        self.encoder = Encoder(num_items, config)
        self.old = copy.deepcopy(self.encoder).requires_grad_(False)
        self.item_out = ItemRows(num_items, config.dim + 1, "cpu")

    def forward(self, batch: Histories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms ``nll`` and ``kl``."""
        items, lengths = positives(batch)
        dropout = self.config.dropout if self.training and not self.trains_decoder else 0.0
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.trains_decoder):
            mean, log_var = self.encoder(items, lengths, dropout)
        z = sample(mean, log_var, self.training)
        rows = self.item_out(torch.arange(1, self.num_items, device=z.device))
        scores = _with_one(z) @ (rows if self.trains_decoder else rows.detach()).T
        own = scores.log_softmax(1)[torch.repeat_interleave(lengths), items - 1]
        nll = -own.sum() / max(lengths.numel(), 1)
        with torch.no_grad():
            old = self.old(items, lengths, 0.0)
        divergence = (log_normal(z, mean, log_var) - log_prior(z, *old)).sum(1)
        kl = self.config.gamma * (lengths * divergence).mean()
        return nll + kl, {"nll": nll.detach(), "kl": kl.detach()}

    def encode(self, histories: Histories) -> torch.Tensor:
        """Compute the means of z, with a last 1 for the items' bias, float32 [B, d + 1]."""
        return _with_one(self.encoder(*positives(histories), 0.0)[0])

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return encoded @ self.item_out(items).T

    def schedule(self, step: int, num_steps: int) -> None:
        """Choose whether this step trains the encoder or the decoder; refresh q_old in between."""
        turn = max(1, num_steps // (4 * self.config.rounds))
        place = step % (4 * turn)
        self.trains_decoder = place >= 3 * turn
        if place == 3 * turn:
            self.old.load_state_dict(self.encoder.state_dict())


def _with_one(z: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(z, (0, 1), value=1.0)


def log_prior(z: torch.Tensor, old_mean: torch.Tensor, old_log_var: torch.Tensor
              ) -> torch.Tensor:
    """Compute the log density of the composite prior at `z` [B, d], separately for every element.

    The result is [B, d]: as in the authors' code, every column has its own mixture.
    """
    zero = torch.zeros_like(z)
    parts = [math.log(weight) + log_normal(z, mean, log_var) for weight, mean, log_var in
             zip(_PRIOR, (zero, old_mean, zero), (zero, old_log_var, zero + _WIDE), strict=True)]
    return torch.stack(parts).logsumexp(0)


def log_normal(z: torch.Tensor, mean: torch.Tensor, log_var: torch.Tensor) -> torch.Tensor:
    """Compute the log density [B, d] of a normal distribution at each element of `z` [B, d]."""
    return -0.5 * (log_var + (z - mean).square() / log_var.exp() + math.log(2 * math.pi))
