"""Shared parts of the autoencoders: item tables, candidate sampling, losses and annealing.

Row 0 of every table is padding: it is in no bag and never a candidate.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.rl_rec.models.base import Histories, NegativeSampler, item_table


class ItemBags(nn.Module):
    """K weighted sums over the same items of one table, ``item_in``: ``y_k = sum_i w_{k,i} W[i]``.

    The module is an ``EmbeddingBagCollection`` with K features on one table and per-sample weights.
    It is the first layer of an autoencoder, the product of W and K weighted multi-hot vectors.

    Args:
        num_items: rows, row 0 included.
        dim: columns H.
        num_sets: K.
        device: ``"cpu"``, or ``"meta"`` for a table that `oper.shard` initialises shard by shard.
    """

    def __init__(self, num_items: int, dim: int, num_sets: int, device: str) -> None:
        super().__init__()
        self.features = [f"item_in{k}" for k in range(num_sets)]
        # Glorot and Bengio 2010, as in MultVAE: a layer with num_items inputs and dim outputs.
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="item_in", num_embeddings=num_items, embedding_dim=dim,
                                feature_names=self.features,
                                init_fn=partial(nn.init.normal_,
                                                std=math.sqrt(2 / (num_items + dim))))],
            is_weighted=True, device=torch.device(device))

    def lookups(self, items: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
                ) -> KeyedJaggedTensor:
        """Make a `KeyedJaggedTensor` with the same bags for each of the K features.

        Args:
            items: item ids of all bags, int64 [L].
            lengths: items of each user, int64 [B].
            weights: weight of each item in each feature, float32 [K, L].
        """
        k = len(self.features)
        return KeyedJaggedTensor(self.features, items.repeat(k), weights.reshape(-1),
                                 lengths=lengths.repeat(k), stride=lengths.numel())

    def forward(self, items: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
                ) -> torch.Tensor:
        """Compute y, float32 [B, K, H], from the arguments of `lookups`."""
        pooled = self.bags(self.lookups(items, lengths, weights)).values()
        return pooled.view(lengths.numel(), len(self.features), -1)


class ItemRows(nn.Module):
    """Looks up rows of items in an ``EmbeddingCollection`` with the table ``item_out``.

    Args:
        num_items: rows, row 0 included.
        dim: columns d.
        device: see `ItemBags`.
    """

    def __init__(self, num_items: int, dim: int, device: str) -> None:
        super().__init__()
        self.rows = item_table({"item_out": ["item_out"]}, num_items, dim, device,
                               math.sqrt(2 / (num_items + dim)))

    def lookups(self, items: torch.Tensor, samples: int = 1) -> KeyedJaggedTensor:
        """Make the KJT of ids int64 [n], divided evenly among `samples` bags.

        The division does not affect results; it makes access statistics count n lookups for a batch
        of `samples` samples.
        """
        at = torch.arange(samples, device=items.device)
        lengths = items.numel() // samples + (at < items.numel() % samples).long()
        return KeyedJaggedTensor(["item_out"], items, stride=samples, lengths=lengths)

    def forward(self, items: torch.Tensor, samples: int = 1) -> torch.Tensor:
        """Look up items int64 [n], as one batch of `samples` samples; returns rows float32 [n, d].
        """
        return self.rows(self.lookups(items, samples))["item_out"].values()


def positives(histories: Histories) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the items that each user had with a positive reward, int64 [L], and count them by
    user, int64 [B]. A repeated item is selected once, at its first such interaction."""
    liked = histories.rewards > 0
    users, items = torch.repeat_interleave(histories.lengths)[liked], histories.items[liked]
    order = items.argsort(stable=True)
    order = order[users[order].argsort(stable=True)]  # by user, item, place in the history
    pairs = torch.stack([users, items])[:, order]
    first = torch.ones_like(items, dtype=torch.bool)
    first[order[1:]] = (pairs[:, 1:] != pairs[:, :-1]).any(dim=0)
    return items[first], torch.bincount(users[first], minlength=histories.lengths.numel())


def bag_weights(lengths: torch.Tensor, dropout: float, training: bool) -> torch.Tensor:
    """Compute the entries of users' multi-hot vectors of length 1, float32 [L].

    An item of a user with n items has the weight ``n^(-1/2)``, or 0 if it is dropped (inverted
    dropout). `lengths`: number of items of each user, int64 [B], which sum to L.
    """
    weights = lengths.float().clamp(min=1).rsqrt().repeat_interleave(lengths)
    return nn.functional.dropout(weights, dropout, training)


class Candidates:
    """The n items that one training step scores: all items or a sample.

    With a sample, the normaliser of a user's softmax is estimated as the exact sum over the user's
    own items plus the sum over the other sampled items, each divided by its expected number of
    draws (importance sampling, Bengio & Senecal 2008; the logQ correction). The estimate is
    unbiased.

    Args:
        num_items: rows of the table, row 0 included.
        num_sampled: number of draws, see `NegativeSampler`; 0 = all items.
        device: device of the model.

    Attributes:
        all: whether all items are scored.
        items: ids of the scored items, int64 [n].
        log_expected: log of each one's expected number of draws, float32 [n].
    """

    def __init__(self, num_items: int, num_sampled: int, device: torch.device) -> None:
        sampler = NegativeSampler(num_items, num_sampled)
        self.all = num_sampled == 0
        self.items = sampler.draw(device)
        self.log_expected = sampler.log_expected(self.items)

    def ids(self, own: torch.Tensor) -> torch.Tensor:
        """Return the ids to look up: all items, or own items int64 [L] + sampled ones."""
        return self.items if self.all else torch.cat([own, self.items])

    def rows(self, table: ItemRows, own: torch.Tensor, users: int
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the rows of `own`, int64 [L], the items of a batch of `users` users, and of the n
        candidates; returns float32 [L, d] and [n, d]."""
        found = table(self.ids(own), max(users, 1))
        if self.all:
            return found[own - 1], found
        return found[:own.numel()], found[own.numel():]


def multinomial_nll(own: torch.Tensor, others: torch.Tensor, items: torch.Tensor,
                    lengths: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Compute ``-sum_{i in S_u} log p(i | z_u)`` over the items S_u of user u, averaged over users;
    float32 [].

    Args:
        own: score of each user's own items, float32 [L]; unused if all items are scored.
        others: scores of the candidates, float32 [B, n].
        items: the users' items, one user after another, int64 [L].
        lengths: number of items of each user, int64 [B].
        candidates: the items scored in `others`.
    """
    row, users = torch.repeat_interleave(lengths), max(lengths.numel(), 1)
    if candidates.all:
        return -others.log_softmax(1)[row, items - 1].sum() / users
    corrected = others - candidates.log_expected
    corrected = corrected.masked_fill(_has(items, row, candidates.items, lengths.numel()),
                                      float("-inf"))
    # Log-sum-exp over a user's own items and the sampled others, shifted by the maximum.
    top = corrected.detach().amax(1).scatter_reduce(0, row, own.detach(), "amax")
    total = (corrected - top.unsqueeze(1)).exp().sum(1).index_add(0, row, (own - top[row]).exp())
    return -(own - (top + total.log())[row]).sum() / users


def _has(items: torch.Tensor, row: torch.Tensor, sampled: torch.Tensor, users: int
         ) -> torch.Tensor:
    """Whether user b has the sampled item j, bool [B, n]; `row` int64 [L] is the user of items."""
    found = torch.zeros(users, sampled.numel(), dtype=torch.bool, device=items.device)
    order = sampled.argsort()
    ids = sampled[order].contiguous()
    low, high = torch.searchsorted(ids, items), torch.searchsorted(ids, items, right=True)
    times = high - low
    start = (low - (times.cumsum(0) - times)).repeat_interleave(times)
    found[row.repeat_interleave(times), order[start + torch.arange(
        start.numel(), device=items.device)]] = True
    return found


def gaussian_kl(mean: torch.Tensor, log_var: torch.Tensor, prior_mean: torch.Tensor | float = 0.0,
                prior_std: float = 1.0) -> torch.Tensor:
    """Compute ``KL(N(mean, exp(log_var)) || N(prior_mean, prior_std^2))``, elementwise."""
    variance = prior_std * prior_std
    return 0.5 * (math.log(variance) - log_var - 1
                  + (log_var.exp() + (mean - prior_mean).square()) / variance)


def sample(mean: torch.Tensor, log_var: torch.Tensor, training: bool) -> torch.Tensor:
    """Return ``mean + sigma * xi`` with standard normal xi in training, otherwise the mean."""
    return mean + (0.5 * log_var).exp() * torch.randn_like(mean) if training else mean


def annealed(step: int, num_steps: int, share: float) -> float:
    """Return a weight that rises linearly from 0 to 1 over the first `share` of the steps (Bowman
    et al. 2016)."""
    return min(1.0, step / max(1.0, share * num_steps))
