"""HSTU: hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv 2402.17152).

A user's tokens are a start vector and one per item, x float [B, T, D]. A layer of H heads:

    u, q, k, v = SiLU(W_1 norm(x) + b_1)                          [B, T, D] each
    a_ij = SiLU(<q_i, k_j> + p[i - j] + t[bucket(i, j)]) / N      j <= i, otherwise 0
    x <- x + W_2 (norm(sum_j a_ij v_j) * u_i) + b_2

with q, k and v cut into heads, `norm` layer normalisation without weights, N the tokens of the
longest history, and two learned biases of each layer: p by distance, t by the time between the two
interactions in buckets of sqrt(2), ``bucket = floor(2 log2(1 + seconds))``. The start vector has no
time: its time difference counts as 0. There are no absolute positions, no softmax and no
feed-forward layer.

Ranking (``rank_weight > 0``): whether a given item would be rewarded. The tokens of a history carry
their rewards, ``x_i = E[item_i] + w r_i + b``; a candidate's has none, ``x = E[candidate]``. It is
placed after the history, at the time of the last item, and sees the history and itself but no other
candidate; the network's output at its position gives the logit of its reward. So the history runs
through the network once, and its keys and values serve any number of candidates (the idea of the
paper's M-FALCON). In training, the item of every step is a candidate that sees the interactions
before that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from oper.errors import InvalidInputError
from oper.ranges import Amount, Count
from oper.rl_rec.models.base import (
    Histories,
    Sequences,
    look_up,
    padded,
    unpadded,
)
from oper.rl_rec.models.next_item import AttentionConfig, NextItem
from oper.rl_rec.models.transformer import by_head


@dataclass(frozen=True, slots=True)
class HSTUConfig(AttentionConfig):
    """Sizes of HSTU.

    Attributes:
        time_buckets: buckets of the time between two interactions, the last of which is open; 0 =
            times are ignored.
        rank_weight: weight of the ranking loss, the binary cross-entropy of each step's reward
            (0..1); 0 = no candidates can be ranked, and histories are seen without their rewards.
    """

    time_buckets: Count = 64
    rank_weight: Amount = 0.0


class Memory(NamedTuple):
    """Keys and values of tokens in a layer, float [B, H, T, D / H] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Relation(NamedTuple):
    """Relation of n tokens to the T that they may attend to; each part broadcasts to [B, n, T]."""

    distance: torch.Tensor       # int64, how many tokens before; at least 0
    bucket: torch.Tensor | None  # int64 [B, n or 1, T], of the time between
    hidden: torch.Tensor         # bool, what is not seen


def _normalized(x: torch.Tensor) -> torch.Tensor:
    # A smaller epsilon than torch's: sums over short histories, divided by N, are small.
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Layer(nn.Module):
    """One layer; see the module docstring.

    The attention weights of a token do not sum to 1, so `scaled_dot_product_attention`, which ends
    in a softmax, cannot compute them, and torch has no fused kernel that does: batched matrix
    products over padded tokens, of which batches of like length have few.

    Args:
        config: sizes.
        reach: N, tokens of the longest sequence; distances are 0..N - 1.
    """

    def __init__(self, config: HSTUConfig, reach: int) -> None:
        super().__init__()
        self.heads, self.reach = config.heads, reach
        self.project = nn.Linear(config.dim, 4 * config.dim)
        self.position = nn.Parameter(0.02 * torch.randn(reach))
        self.time = (nn.Parameter(0.02 * torch.randn(config.time_buckets))
                     if config.time_buckets else None)
        self.out = nn.Sequential(nn.Dropout(config.dropout), nn.Linear(config.dim, config.dim))

    def forward(self, x: torch.Tensor, relation: Relation, past: Memory | None = None
                ) -> tuple[torch.Tensor, Memory]:
        """The next layer's tokens, and these tokens' keys and values.

        Args:
            x: float [B, n, D].
            relation: relation to the visible tokens: x itself, or those of `past`.
            past: keys and values of T other tokens; each token of x then sees these and itself, but
                no other token of x.
        """
        gate, query, key, value = F.silu(self.project(_normalized(x))).chunk(4, dim=-1)
        query = by_head(query, self.heads)
        own = Memory(by_head(key, self.heads), by_head(value, self.heads))
        seen = own if past is None else past
        weights = F.silu(query @ seen.keys.transpose(-1, -2) + self._bias(relation))
        found = weights.masked_fill(relation.hidden.unsqueeze(1), 0.0) @ seen.values
        if past is not None:
            alike = (query * own.keys).sum(dim=-1, keepdim=True) + self.position[0]
            if self.time is not None:
                alike = alike + self.time[0]
            found = found + F.silu(alike) * own.values
        pooled = _normalized(found.transpose(1, 2).flatten(2) / self.reach)
        return x + self.out(pooled * gate), own

    def _bias(self, relation: Relation) -> torch.Tensor:
        """p + t, the same for all heads; broadcasts to [B, 1, n, T]."""
        bias = self.position[relation.distance]
        if self.time is not None and relation.bucket is not None:
            # Unlike an index [B, n, T], whose gradient takes twice the time.
            by_time = self.time.index_select(0, relation.bucket.flatten())
            bias = bias + by_time.view_as(relation.bucket)
        return bias.unsqueeze(1)


class Past(NamedTuple):
    """Histories that have run through the network."""

    states: torch.Tensor         # float [B, T, D], after the last layer
    memory: list[Memory]         # of each layer
    bucket: torch.Tensor | None  # int64 [B, T, T], of the time from each token back to each other


@dataclass(frozen=True, slots=True, eq=False)
class HistoryCache:
    """Users' histories, ready for any number of candidates.

    Attributes:
        memory: keys and values of each layer, of T tokens.
        place: int64 [B, 1], position of a candidate: after the last item.
        bucket: int64 [B, 1, T], bucket of the time from each token to the last item; None if times
            are ignored.
    """

    memory: list[Memory]
    place: torch.Tensor
    bucket: torch.Tensor | None


class HSTU(NextItem):
    """The model; see the module docstring. Takes the arguments of `NextItem`.

    Histories need their `times`, unless ``time_buckets = 0``.
    """

    config: HSTUConfig

    def __init__(self, config: HSTUConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__(config, num_items, device)
        # The start, the items, and behind them a candidate.
        reach = self.context + (2 if config.rank_weight else 1)
        self.layers = nn.ModuleList(Layer(config, reach) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        if config.rank_weight:
            self.reward_token = nn.Linear(1, config.dim)
            self.rank_head = nn.Linear(config.dim, 1)

    def tokens(self, rows: torch.Tensor, histories: Histories) -> torch.Tensor:
        """See `NextItem.tokens`."""
        if not self.config.rank_weight:
            return rows
        return rows + self.reward_token(histories.rewards.unsqueeze(-1))

    def outputs(self, items: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        """See `NextItem.outputs`."""
        out: torch.Tensor = self.norm(self._past(items, times).states)
        return out

    def _past(self, items: torch.Tensor, times: torch.Tensor | None) -> Past:
        """Histories from the arguments of `outputs`; T = P + 1 tokens."""
        x = self.dropout(self.with_start(items))
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[:, None] - place).unsqueeze(0)
        bucket = self._buckets(times)
        relation = Relation(distance.clamp(min=0), bucket, distance < 0)
        memory: list[Memory] = []
        for layer in self.layers:
            x, own = layer(x, relation)
            memory.append(own)
        return Past(x, memory, bucket)

    def _buckets(self, times: torch.Tensor | None) -> torch.Tensor | None:
        """Buckets of the time from each token back to each other one, int64 [B, P + 1, P + 1], for
        times int64 [B, P]; 0 for tokens in the future."""
        if not self.config.time_buckets:
            return None
        if times is None:
            raise InvalidInputError(
                "cannot compute biases by time", "Histories.times", None,
                f"seconds int64 [L] with time_buckets={self.config.time_buckets}",
                "give the histories their times, or set time_buckets=0")
        elapsed = (times[:, :, None] - times[:, None, :]).clamp(min=0)
        bucket = (2 * torch.log2(1 + elapsed)).long().clamp(max=self.config.time_buckets - 1)
        return F.pad(bucket, (1, 0, 1, 0))  # the start's

    # ---- ranking ----

    def losses(self, batch: Sequences, rows: torch.Tensor,
               drawn: tuple[torch.Tensor, torch.Tensor]
               ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `NextItem.losses`; with the part ``reward`` if there is a ranking loss."""
        if not self.config.rank_weight:
            return super().losses(batch, rows, drawn)
        past = self._past(*self.inputs(rows, batch, -1))
        action = self.action_loss(self.norm(past.states), batch, rows, drawn)
        # The k-th item as a candidate: behind the start and the k - 1 items before it, at the time
        # of the last of these.
        candidates = padded(rows, batch.lengths)
        count = candidates.shape[1]
        place = torch.arange(1, count + 1, device=rows.device).unsqueeze(0)
        bucket = None if past.bucket is None else past.bucket[:, :count]
        logits = unpadded(self._logits(candidates, HistoryCache(past.memory, place, bucket)),
                          batch.lengths)
        steps = batch.is_step
        reward = F.binary_cross_entropy_with_logits(logits[steps], batch.rewards[steps],
                                                    reduction="sum") / steps.sum().clamp(min=1)
        return (action + self.config.rank_weight * reward,
                {"action": action.detach(), "reward": reward.detach()})

    def _logits(self, candidates: torch.Tensor, cache: HistoryCache) -> torch.Tensor:
        """Logits float [B, n] of candidates' rows [B, n, D]; `place` and `bucket` of the cache may
        be one per user, or one per candidate."""
        tokens = torch.arange(cache.memory[0].keys.shape[2], device=candidates.device)
        distance = cache.place.unsqueeze(-1) - tokens
        relation = Relation(distance.clamp(min=0), cache.bucket, distance <= 0)
        x = self.dropout(candidates)
        for layer, past in zip(self.layers, cache.memory, strict=True):
            x, _ = layer(x, relation, past)
        logits: torch.Tensor = self.rank_head(self.norm(x))
        return logits.squeeze(-1)

    def cache(self, histories: Histories) -> HistoryCache:
        """Users' histories in the form that `rewards` takes; uses the last `context` items.

        Raises:
            InvalidInputError: the model has no ranking head.
        """
        if not self.config.rank_weight:
            raise InvalidInputError(
                "cannot rank candidates", "rank_weight", self.config.rank_weight,
                "> 0 in a model that was trained to rank", "set model.rank_weight and train")
        recent, items, times = self.recent(histories)
        past = self._past(items, times)
        users = torch.arange(recent.num_users, device=items.device)
        bucket = None if past.bucket is None else past.bucket[users, recent.lengths].unsqueeze(1)
        return HistoryCache(past.memory, recent.lengths.unsqueeze(-1) + 1, bucket)

    def rewards(self, cache: HistoryCache, items: torch.Tensor) -> torch.Tensor:
        """Estimated rewards 0..1, float [B, n], of each user's candidate items int64 [B, n].

        Candidates do not affect each other, so many can be scored in several calls with one cache.
        """
        rows = look_up(self.items, self.features, "drawn", items.flatten())
        return torch.sigmoid(self._logits(rows.view(*items.shape, self.config.dim), cache))
