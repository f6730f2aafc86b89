"""What models of the next item share: the sequence goes in, a query per item comes out.

The sequence [start, i_1, ..., i_n] goes through a causal network; the output after item i_t is the
query of item i_{t+1}: ``score(i) = <h_t, E[i]>`` with the item table of the input. SASRec's network
is a transformer, GRU4Rec's a recurrent one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.rl_rec.models.base import (
    Histories,
    NegativeSampler,
    Recommender,
    Sequences,
    check_fields,
    item_table,
    last,
    look_up,
    make_kjt,
    one_bag,
    padded,
)

TARGETS = ("positive", "all")
LOSSES = ("softmax", "gbce")


@dataclass(frozen=True, slots=True)
class NextItemConfig:
    """Sizes.

    Attributes:
        dim: width D.
        layers: of the network.
        steps: items of a subsequence that are predicted.
        window: items before these that are seen; ``steps + window - 1`` items are the longest
            history.
        dropout: on the input and inside the network.
        negatives: items drawn per batch, the same for all of its steps; 0 = all items.
        loss: ``"softmax"``: cross-entropy over all items, exact with all of them and estimated
            from log-uniform draws otherwise. ``"gbce"``: generalised binary cross-entropy, with
            uniform draws.
        calibration: t of gBCE, 0..1; 0 is plain binary cross-entropy.
        targets: predict ``"positive"`` interactions only, or ``"all"``.
    """

    dim: int = 64
    layers: int = 2
    steps: int = 30
    window: int = 20
    dropout: float = 0.1
    negatives: int = 1024
    loss: str = "softmax"
    calibration: float = 0.75
    targets: str = "positive"

    def __post_init__(self) -> None:
        check_fields(
            self, ("dim", self.dim >= 1, ">= 1"), ("layers", self.layers >= 1, ">= 1"),
            ("steps", self.steps >= 1, ">= 1"), ("window", self.window >= 0, ">= 0"),
            ("window", self.steps + self.window >= 2, ">= 1 where steps is 1"),
            ("dropout", 0 <= self.dropout < 1, "0 <= dropout < 1"),
            ("negatives", self.negatives >= 0, ">= 0"),
            ("loss", self.loss in LOSSES, f"one of {LOSSES}"),
            ("calibration", 0 <= self.calibration <= 1, "0..1"),
            ("targets", self.targets in TARGETS, f"one of {TARGETS}"))


class NextItem(Recommender):
    """Base class; a model gives `outputs`.

    Args:
        config: sizes.
        num_items: rows of the item table, row 0 (padding) included.
        device: of the table, ``"cpu"`` or ``"meta"``.
    """

    def __init__(self, config: NextItemConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.negatives = NegativeSampler(num_items, config.negatives, config.loss == "gbce")
        # The last item of a subsequence is only predicted: the longest history that training asks
        # about is one item shorter than the subsequence.
        self.context = config.steps + config.window - 1
        self.start = nn.Parameter(0.02 * torch.randn(config.dim))
        self.dropout = nn.Dropout(config.dropout)
        self.features = ["seen", "drawn"]
        self.items = item_table({"item": self.features}, num_items, config.dim, device)

    def outputs(self, items: torch.Tensor) -> torch.Tensor:
        """Queries float32 [B, P + 1, D] after the first 0, 1, ..., P <= `context` items of each
        sequence [B, P, D]; none depends on a later item."""
        raise NotImplementedError

    def with_start(self, items: torch.Tensor) -> torch.Tensor:
        """The sequences with the start vector before them, float32 [B, P + 1, D]."""
        return torch.cat([self.start.expand(items.shape[0], 1, -1), items], dim=1)

    def lookups(self, batch: Histories) -> list[KeyedJaggedTensor]:
        """Items of the batch with freshly drawn negatives."""
        return [self._kjt(batch, self.negatives.draw(batch.items.device))]

    def _kjt(self, batch: Histories, drawn: torch.Tensor) -> KeyedJaggedTensor:
        return make_kjt(("seen", batch.items, batch.lengths),
                        one_bag("drawn", drawn, batch.num_users))

    def forward(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss [] and its part ``action``."""
        kjt = self.lookups(batch)[0]
        found = self.items(kjt)
        rows = found["seen"].values()
        # The query of the k-th item is the output after the k - 1 before it.
        queries = self.outputs(padded(rows, batch.lengths)[:, :-1])
        inside = torch.arange(queries.shape[1], device=queries.device)
        kept = inside < batch.lengths[:, None]
        wanted = (inside >= batch.skip[:, None])[kept]
        if self.config.targets == "positive":
            wanted &= batch.rewards > 0
        parts = (queries[kept][wanted], batch.items[wanted], rows[wanted], kjt["drawn"].values(),
                 found["drawn"].values())
        losses = (self.negatives.softmax_loss(*parts) if self.config.loss == "softmax" else
                  self.negatives.gbce_loss(*parts, self.config.calibration))
        loss = losses.sum() / wanted.sum().clamp(min=1)
        return loss, {"action": loss.detach()}

    def encode(self, histories: Histories) -> torch.Tensor:
        """Queries float32 [B, D] for the next item of each user; uses the last `context` items."""
        recent = last(histories, self.context)
        rows = self.items(self._kjt(recent, recent.items.new_zeros(0)))["seen"].values()
        out = self.outputs(padded(rows, recent.lengths))
        return out[torch.arange(recent.num_users, device=out.device), recent.lengths]

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """``<h, E[i]>``, float32 [B, n]."""
        return encoded @ look_up(self.items, self.features, "drawn", items).T
