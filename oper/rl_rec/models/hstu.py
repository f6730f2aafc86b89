"""HSTU: hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv 2402.17152).

A user's tokens are a start vector and one per item, x float [B, T, D]. A layer of H heads:

    u, q, k, v = SiLU(W_1 norm(x) + b_1)                          [B, T, D] each
    a_ij = SiLU(<q_i, k_j> + p[i - j] + t[bucket(i, j)]) / N      j <= i, otherwise 0
    x <- x + W_2 (norm(sum_j a_ij v_j) * u_i) + b_2

where q, k and v are split into heads, `norm` is layer normalisation without weights, and N is the
number of tokens of the longest history. Each layer has two learned biases: p by distance, and t by
the time between two interactions, ``bucket = floor(2 log2(1 + seconds))``, so that bucket bounds
grow by factors of sqrt(2). Time differences to the start vector count as 0. There are no absolute
positions, no softmax and no feed-forward layer.

An item's vector is E[item], or E[item] + sum_f C_f[content_f(item)] with a table per feature of
the items, such as their category; queries score items by the same vectors. The token of an
interaction is the vector of its item, plus A[action] if interactions have kinds, such as view or
purchase.

Ranking (``rank_weight > 0``) predicts whether a given candidate item would be rewarded. Tokens of a
history then include rewards, with the additional terms ``w r_i + b``; a candidate's token is its
item's vector. It is placed after the history, at the time of the last item, and attends to the
history and itself but not to other candidates; the output at its position gives the logit of its
reward. So a history is encoded once, and its cached keys and values serve any number of candidates
(the idea of the paper's M-FALCON). In training, the item of every step is a candidate that attends
to the interactions before that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from oper.errors import InvalidInputError
from oper.ranges import Amount, Count
from oper.rl_rec.models.base import (
    Histories,
    Sequences,
    item_table,
    look_up,
    make_kjt,
    one_bag,
    padded,
    unpadded,
)
from oper.rl_rec.models.next_item import AttentionConfig, NextItem
from oper.rl_rec.models.transformer import by_head


@dataclass(frozen=True, slots=True)
class HSTUConfig(AttentionConfig):
    """Configuration of HSTU.

    Attributes:
        time_buckets: number of time buckets; the last has no upper bound; 0 = times are ignored.
        rank_weight: weight of the ranking loss, the binary cross-entropy of each step's reward
            (0..1); 0 = no ranking, and rewards are not part of the input.
    """

    time_buckets: Count = 64
    rank_weight: Amount = 0.0


class Memory(NamedTuple):
    """Keys and values of tokens in a layer, float [B, H, T, D / H] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Relation(NamedTuple):
    """Relation of n query tokens to T key tokens; each field broadcasts to [B, n, T]."""

    distance: torch.Tensor       # int64, query position minus key position, at least 0
    bucket: torch.Tensor | None  # int64 [B, n or 1, T], bucket of the time difference
    hidden: torch.Tensor         # bool, true = masked out


def _normalized(x: torch.Tensor) -> torch.Tensor:
    # Smaller epsilon than torch's default, since sums over short histories are divided by N.
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Layer(nn.Module):
    """One layer; see the module docstring.

    Attention weights do not sum to 1, so `scaled_dot_product_attention` (a softmax) cannot be used,
    and torch has no other fused kernel for them; batched matrix products over padded tokens are
    used instead.

    Args:
        config: configuration.
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
        """Return the layer's output [B, n, D], and the keys and values of `x`.

        Args:
            x: tokens, float [B, n, D].
            relation: relation of x to the keys: x itself, or those of `past`.
            past: keys and values of T other tokens, to which each token of x then attends, and to
                itself, but to no other token of x. None = x attends to x.
        """
        gate, query, key, value = F.silu(self.project(_normalized(x))).chunk(4, dim=-1)
        query = by_head(query, self.heads)
        own = Memory(by_head(key, self.heads), by_head(value, self.heads))
        seen = own if past is None else past
        weights = F.silu(query @ seen.keys.transpose(-1, -2) + self._bias(relation))
        found = weights.masked_fill(relation.hidden.unsqueeze(1), 0.0) @ seen.values
        if past is not None:
            itself = (query * own.keys).sum(dim=-1, keepdim=True) + self.position[0]
            if self.time is not None:
                itself = itself + self.time[0]
            found = found + F.silu(itself) * own.values
        pooled = _normalized(found.transpose(1, 2).flatten(2) / self.reach)
        return x + self.out(pooled * gate), own

    def _bias(self, relation: Relation) -> torch.Tensor:
        """Return the bias p + t, equal for all heads; broadcasts to [B, 1, n, T]."""
        bias = self.position[relation.distance]
        if self.time is not None and relation.bucket is not None:
            # index_select: the gradient of indexing by [B, n, T] takes twice the time.
            by_time = self.time.index_select(0, relation.bucket.flatten())
            bias = bias + by_time.view_as(relation.bucket)
        return bias.unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class HistoryCache:
    """Encoded histories of B users, for ranking any number of candidates.

    Attributes:
        memory: keys and values of T tokens in each layer.
        place: position of a candidate, after the last item, int64 [B, 1].
        bucket: bucket of the time from each token to the last item, int64 [B, 1, T]; None if times
            are ignored.
    """

    memory: list[Memory]
    place: torch.Tensor
    bucket: torch.Tensor | None


class HSTU(NextItem):
    """The HSTU model; see the module docstring. For arguments see `NextItem`.

    `Histories.times` must be given unless ``time_buckets = 0``.

    Args:
        content: ids of items' features, int64 [F, num_items]; None = no features.
        num_actions: rows of the table of actions, which `Histories.actions` selects; 0 = no table.
    """

    config: HSTUConfig
    content: torch.Tensor

    def __init__(self, config: HSTUConfig, num_items: int, device: str = "cpu",
                 content: torch.Tensor | None = None, num_actions: int = 0) -> None:
        if content is None:
            content = torch.zeros(0, num_items, dtype=torch.int64)
        super().__init__(config, num_items, device, [int(ids.max()) + 1 for ids in content])
        self.register_buffer("content", content, persistent=False)
        self.actions = item_table({"action": ["action"]}, num_actions, config.dim,
                                  device) if num_actions else None
        # Tokens: the start, the items and, for ranking, a candidate.
        reach = self.context + (2 if config.rank_weight else 1)
        self.layers = nn.ModuleList(Layer(config, reach) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        if config.rank_weight:
            self.reward_token = nn.Linear(1, config.dim)
            self.rank_head = nn.Linear(config.dim, 1)

    def tokens(self, rows: torch.Tensor, histories: Histories) -> torch.Tensor:
        if self.actions is not None:
            rows = rows + self.actions(self._action_kjt(histories))["action"].values()
        if not self.config.rank_weight:
            return rows
        return rows + self.reward_token(histories.rewards.unsqueeze(-1))

    # ---- tables of features ----

    def lookups(self, batch: Histories) -> list[KeyedJaggedTensor]:
        found = super().lookups(batch)
        return found if self.actions is None else [*found, self._action_kjt(batch)]

    def _action_kjt(self, histories: Histories) -> KeyedJaggedTensor:
        if histories.actions is None:
            raise InvalidInputError(
                "cannot look up actions", "Histories.actions", None,
                "ids int64 [L], since the model was built with a table of actions",
                "pass them, or build the model without actions")
        return make_kjt(("action", histories.actions, histories.lengths))

    def _kjt(self, batch: Histories, drawn: torch.Tensor) -> KeyedJaggedTensor:
        features = [("seen", batch.items, batch.lengths), one_bag("drawn", drawn, batch.num_users)]
        for k, ids in enumerate(self.content):
            features += [(f"seen_{k}", ids[batch.items], batch.lengths),
                         one_bag(f"drawn_{k}", ids[drawn], batch.num_users)]
        return make_kjt(*features)

    def rows(self, found: dict[str, JaggedTensor], feature: str) -> torch.Tensor:
        """See `NextItem.rows`: the vectors of items."""
        total = super().rows(found, feature)
        for k in range(len(self.content)):
            total = total + found[f"{feature}_{k}"].values()
        return total

    def rows_of(self, items: torch.Tensor) -> torch.Tensor:
        given = {"drawn": items} | {f"drawn_{k}": ids[items] for k, ids in enumerate(self.content)}
        return self.rows(look_up(self.items, self.features, given), "drawn")

    # ---- the network ----

    def outputs(self, items: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.norm(self._past(items, times)[0])
        return out

    def _past(self, items: torch.Tensor, times: torch.Tensor | None
              ) -> tuple[torch.Tensor, list[Memory], torch.Tensor | None]:
        """Encode histories, given the arguments of `outputs`; T = P + 1 tokens.

        Returns the output of the last layer, float [B, T, D], keys and values of each layer, and
        the result of `_buckets`.
        """
        x = self.dropout(self.with_start(items))
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[:, None] - place).unsqueeze(0)
        bucket = self._buckets(times)
        relation = Relation(distance.clamp(min=0), bucket, distance < 0)
        memory: list[Memory] = []
        for layer in self.layers:
            x, own = layer(x, relation)
            memory.append(own)
        return x, memory, bucket

    def _buckets(self, times: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bucket of ``max(0, t_i - t_j)``, [B, P + 1, P + 1], given times [B, P]."""
        if not self.config.time_buckets:
            return None
        if times is None:
            raise InvalidInputError(
                "cannot compute biases by time", "Histories.times", None,
                f"seconds int64 [L] with time_buckets={self.config.time_buckets}",
                "pass the times of histories, or set time_buckets=0")
        elapsed = (times[:, :, None] - times[:, None, :]).clamp(min=0)
        bucket = (2 * torch.log2(1 + elapsed)).long().clamp(max=self.config.time_buckets - 1)
        return F.pad(bucket, (1, 0, 1, 0))  # bucket 0 for the start

    # ---- ranking ----

    def losses(self, batch: Sequences, rows: torch.Tensor,
               drawn: tuple[torch.Tensor, torch.Tensor]
               ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `NextItem.losses`; with the additional term ``reward`` if `rank_weight` > 0."""
        if not self.config.rank_weight:
            return super().losses(batch, rows, drawn)
        states, memory, buckets = self._past(*self.inputs(rows, batch, -1))
        action = self.action_loss(self.norm(states), batch, rows, drawn)
        # The k-th item as a candidate: after the start and the k - 1 items before it, at the time
        # of the last of these items.
        candidates = padded(rows, batch.lengths)
        count = candidates.shape[1]
        place = torch.arange(1, count + 1, device=rows.device).unsqueeze(0)
        bucket = None if buckets is None else buckets[:, :count]
        logits = unpadded(self._logits(candidates, HistoryCache(memory, place, bucket)),
                          batch.lengths)
        steps = batch.is_step
        reward = F.binary_cross_entropy_with_logits(logits[steps], batch.rewards[steps],
                                                    reduction="sum") / steps.sum().clamp(min=1)
        return (action + self.config.rank_weight * reward,
                {"action": action.detach(), "reward": reward.detach()})

    def _logits(self, candidates: torch.Tensor, cache: HistoryCache) -> torch.Tensor:
        """Compute logits, float [B, n], of candidates' rows [B, n, D]; the cache's `place` and
        `bucket` are per user, or per candidate ([B, n], [B, n, T])."""
        tokens = torch.arange(cache.memory[0].keys.shape[2], device=candidates.device)
        distance = cache.place.unsqueeze(-1) - tokens
        relation = Relation(distance.clamp(min=0), cache.bucket, distance <= 0)
        x = self.dropout(candidates)
        for layer, past in zip(self.layers, cache.memory, strict=True):
            x, _ = layer(x, relation, past)
        logits: torch.Tensor = self.rank_head(self.norm(x))
        return logits.squeeze(-1)

    def cache(self, histories: Histories) -> HistoryCache:
        """Encode the last `context` items of each history for `rewards`.

        Raises:
            InvalidInputError: the model has no ranking head, or times are needed but missing.
        """
        if not self.config.rank_weight:
            raise InvalidInputError(
                "cannot rank candidates", "rank_weight", self.config.rank_weight,
                "> 0 in a model that was trained to rank", "set model.rank_weight and train")
        recent, items, times = self.recent(histories)
        _, memory, buckets = self._past(items, times)
        users = torch.arange(recent.num_users, device=items.device)
        bucket = None if buckets is None else buckets[users, recent.lengths].unsqueeze(1)
        return HistoryCache(memory, recent.lengths.unsqueeze(-1) + 1, bucket)

    def rewards(self, cache: HistoryCache, items: torch.Tensor) -> torch.Tensor:
        """Estimate the rewards, float [B, n] in 0..1, of each user's candidates int64 [B, n].

        Candidates do not affect each other, so they can be scored in several calls with one cache.
        """
        rows = self.rows_of(items.flatten())
        return torch.sigmoid(self._logits(rows.view(*items.shape, self.config.dim), cache))
