"""Base class of next-item models (SASRec, GRU4Rec, HSTU).

A causal network encodes the sequence [start, i_1, ..., i_n]; its output h_t after item i_t is the
query for item i_{t+1}: ``score(i) = <h_t, E[i]>``, with the item table E of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from oper.ranges import Positive, one_of
from oper.rl_rec.models.base import (
    Histories,
    NegativeSampler,
    Recommender,
    SequenceConfig,
    Sequences,
    item_table,
    last,
    look_up,
    make_kjt,
    one_bag,
    padded,
    unpadded,
)


@dataclass(frozen=True, slots=True)
class NextItemConfig(SequenceConfig):
    """Configuration of a next-item model.

    Attributes:
        targets: interactions to predict, ``"positive"`` (reward > 0) or ``"all"``.
    """

    targets: Annotated[str, one_of("positive", "all")] = "positive"

    def __post_init__(self) -> None:
        self.check(("window", self.steps + self.window >= 2, ">= 1 if steps=1"))


@dataclass(frozen=True, slots=True)
class AttentionConfig(NextItemConfig):
    """Configuration of a next-item model with attention.

    Attributes:
        heads: number of attention heads, a divisor of `dim`.
    """

    heads: Positive = 2

    def __post_init__(self) -> None:
        NextItemConfig.__post_init__(self)
        self.check(("heads", self.dim % max(self.heads, 1) == 0, f"a divisor of dim={self.dim}"))


class NextItem(Recommender):
    """Base class of next-item models; subclasses implement `outputs`.

    Args:
        config: configuration.
        num_items: rows of the item table, row 0 (padding) included.
        device: device of the tables, ``"cpu"`` or ``"meta"``.
        content: rows of additional tables of items' features; feature k is looked up as ``seen_k``
            and ``drawn_k``.
    """

    def __init__(self, config: NextItemConfig, num_items: int, device: str = "cpu",
                 content: Sequence[int] = ()) -> None:
        super().__init__()
        self.config = config
        self.negatives = NegativeSampler(num_items, config.negatives, config.loss == "gbce")
        # The last item of a subsequence is only predicted, so the longest history in training is
        # one item shorter than the subsequence.
        self.context = config.steps + config.window - 1
        self.start = nn.Parameter(0.02 * torch.randn(config.dim))
        self.dropout = nn.Dropout(config.dropout)
        tables = {"item": ["seen", "drawn"]} | {
            f"content_{k}": [f"seen_{k}", f"drawn_{k}"] for k in range(len(content))}
        self.features = [feature for features in tables.values() for feature in features]
        self.items = item_table(tables, num_items, config.dim, device, others={
            f"content_{k}": rows for k, rows in enumerate(content)})

    def outputs(self, items: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        """Compute queries, float32 [B, P + 1, D], after the first 0, 1, ..., P items of sequences.

        A query must not depend on later items.

        Args:
            items: result of `tokens`, padded, float32 [B, P, D], P <= `context`.
            times: times of these interactions in seconds, int64 [B, P]; None if unknown.
        """
        raise NotImplementedError

    def tokens(self, rows: torch.Tensor, histories: Histories) -> torch.Tensor:
        """Make the network's input [L, D] from the rows [L, D] of items; by default, the rows."""
        return rows

    def rows(self, found: dict[str, JaggedTensor], feature: str) -> torch.Tensor:
        """Return the rows of items that were looked up as `feature`, ``seen`` or ``drawn``,
        float32 [L, D]; `found`: result of the collection of tables."""
        looked_up: torch.Tensor = found[feature].values()
        return looked_up

    def rows_of(self, items: torch.Tensor) -> torch.Tensor:
        """Look up the rows of any items int64 [n], float32 [n, D]."""
        return self.rows(look_up(self.items, self.features, {"drawn": items}), "drawn")

    def with_start(self, items: torch.Tensor) -> torch.Tensor:
        """Prepend the start vector to sequences [B, P, D]; float32 [B, P + 1, D]."""
        return torch.cat([self.start.expand(items.shape[0], 1, -1), items], dim=1)

    def lookups(self, batch: Histories) -> list[KeyedJaggedTensor]:
        return [self._kjt(batch, self.negatives.draw(batch.items.device))]

    def _kjt(self, batch: Histories, drawn: torch.Tensor) -> KeyedJaggedTensor:
        return make_kjt(("seen", batch.items, batch.lengths),
                        one_bag("drawn", drawn, batch.num_users))

    def inputs(self, rows: torch.Tensor, histories: Histories, stop: int | None = None
               ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make the arguments of `outputs`: padded on the right, then cut to ``[:, :stop]``.

        A causal network needs no mask: the output of a real item does not depend on padding.
        """
        items, times = self.tokens(rows, histories), histories.times
        return (padded(items, histories.lengths)[:, :stop],
                None if times is None else padded(times, histories.lengths)[:, :stop])

    def forward(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms, which include ``action``."""
        kjt = self.lookups(batch)[0]
        found = self.items(kjt)
        return self.losses(batch, self.rows(found, "seen"),
                           (kjt["drawn"].values(), self.rows(found, "drawn")))

    def losses(self, batch: Sequences, rows: torch.Tensor,
               drawn: tuple[torch.Tensor, torch.Tensor]
               ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the result of `forward` from looked-up rows.

        Args:
            batch: subsequences.
            rows: rows of their items, float32 [L, D].
            drawn: ids int64 [n] and rows float32 [n, D] of the negatives.
        """
        # The query for the k-th item is the output after the k - 1 items before it.
        loss = self.action_loss(self.outputs(*self.inputs(rows, batch, -1)), batch, rows, drawn)
        return loss, {"action": loss.detach()}

    def action_loss(self, queries: torch.Tensor, batch: Sequences, rows: torch.Tensor,
                    drawn: tuple[torch.Tensor, torch.Tensor],
                    weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean next-item loss [] over the steps with a target, given queries [B, P, D]
        (outputs before each item); losses are multiplied by `weights` [L], if given."""
        wanted = batch.is_step
        if self.config.targets == "positive":
            wanted = wanted & (batch.rewards > 0)
        losses = self.negatives.loss(self.config, unpadded(queries, batch.lengths)[wanted],
                                     batch.items[wanted], rows[wanted], *drawn)
        if weights is not None:
            losses = losses * weights[wanted]
        return losses.sum() / wanted.sum().clamp(min=1)

    def recent(self, histories: Histories
               ) -> tuple[Histories, torch.Tensor, torch.Tensor | None]:
        """Return users' last `context` interactions, and the arguments of `outputs` for them."""
        recent = last(histories, self.context)
        rows = self.rows(self.items(self._kjt(recent, recent.items.new_zeros(0))), "seen")
        return recent, *self.inputs(rows, recent)

    def encode(self, histories: Histories) -> torch.Tensor:
        """Compute the query for each user's next item from the last `context` items; [B, D]."""
        recent, items, times = self.recent(histories)
        out = self.outputs(items, times)
        return out[torch.arange(recent.num_users, device=out.device), recent.lengths]

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Compute ``<h, E[i]>``, float32 [B, n]."""
        return encoded @ self.rows_of(items).T
