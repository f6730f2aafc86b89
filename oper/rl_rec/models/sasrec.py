"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018).

The sequence [start, i_1, ..., i_n] goes through causal transformer blocks; the output after item
i_t is the query of item i_{t+1}: ``score(i) = <h_t, E[i]>`` with the item table of the input. Loss:
cross-entropy with drawn candidates (the paper's is binary with one negative, which is known to rank
worse: Klenitskiy and Vasilev, RecSys 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.rl_rec.models.base import (
    Candidates,
    Histories,
    Recommender,
    Sequences,
    item_table,
    last,
    look_up,
    make_kjt,
    one_bag,
    padded,
)
from oper.rl_rec.models.transformer import Block

TARGETS = ("positive", "all")


@dataclass(frozen=True, slots=True)
class SASRecConfig:
    """Sizes.

    Attributes:
        dim: width D.
        layers, heads: of the transformer.
        steps: items of a subsequence that are predicted.
        window: items before these that are seen.
        dropout: on the input and on the outputs of attention and feed-forward layers.
        negatives: items drawn per batch to estimate the softmax; 0 = all items, exactly.
        targets: predict ``"positive"`` interactions only, or ``"all"``.
        gamma: of the batches' returns-to-go, which SASRec does not look at.
    """

    dim: int = 64
    layers: int = 2
    heads: int = 2
    steps: int = 30
    window: int = 20
    dropout: float = 0.1
    negatives: int = 1024
    targets: str = "positive"
    gamma: float = 0.3

    def __post_init__(self) -> None:
        for name, ok, expected in (
                ("dim", self.dim >= 1, ">= 1"), ("layers", self.layers >= 1, ">= 1"),
                ("heads", self.heads >= 1 and self.dim % max(1, self.heads) == 0,
                 f">= 1 and a divisor of dim={self.dim}"),
                ("steps", self.steps >= 1, ">= 1"), ("window", self.window >= 0, ">= 0"),
                ("dropout", 0 <= self.dropout < 1, "0 <= dropout < 1"),
                ("negatives", self.negatives >= 0, ">= 0"),
                ("targets", self.targets in TARGETS, f"one of {TARGETS}"),
                ("gamma", 0 < self.gamma <= 1, "0 < gamma <= 1")):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected {expected}")


class SASRec(Recommender):
    """The model; see the module's text.

    Args:
        config: sizes.
        num_items: rows of the item table, row 0 (padding) included.
        device: of the table, ``"cpu"`` or ``"meta"``.
    """

    def __init__(self, config: SASRecConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.candidates = Candidates(num_items, config.negatives)
        # The last item of a subsequence is only predicted: the longest history that training asks
        # about is one item shorter than the subsequence.
        dim, self.context = config.dim, config.steps + config.window - 1
        self.start = nn.Parameter(0.02 * torch.randn(dim))
        self.position = nn.Parameter(0.02 * torch.randn(self.context, dim))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(dim, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(dim)
        self.features = ["seen", "drawn"]
        self.items = item_table({"item": self.features}, num_items, dim, device)

    def lookups(self, batch: Histories) -> list[KeyedJaggedTensor]:
        """Items of the batch with freshly drawn candidates."""
        return [self._kjt(batch, self.candidates.draw())]

    def _kjt(self, batch: Histories, drawn: torch.Tensor) -> KeyedJaggedTensor:
        return make_kjt(("seen", batch.items, batch.lengths),
                        one_bag("drawn", drawn, batch.num_users))

    def forward(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss [] and its part ``action``."""
        kjt = self.lookups(batch)[0]
        found = self.items(kjt)
        rows = found["seen"].values()
        # The query of the k-th item is the output after the k - 1 before it.
        queries = self._outputs(padded(rows, batch.lengths)[:, :-1])
        inside = torch.arange(queries.shape[1])
        kept = inside < batch.lengths[:, None]
        wanted = (inside >= batch.skip[:, None])[kept]
        if self.config.targets == "positive":
            wanted &= batch.rewards > 0
        losses = self.candidates.loss(queries[kept][wanted], batch.items[wanted], rows[wanted],
                                      kjt["drawn"].values(), found["drawn"].values())
        loss = losses.sum() / wanted.sum().clamp(min=1)
        return loss, {"action": loss.detach()}

    def _outputs(self, items: torch.Tensor) -> torch.Tensor:
        """Outputs float32 [B, P + 1, D] after the first 0, 1, ..., P <= `context` items of each
        sequence [B, P, D]."""
        start = self.start.expand(items.shape[0], 1, -1)
        x = torch.cat([start, items], dim=1)
        positions = torch.cat([torch.zeros_like(self.start)[None], self.position])
        x = self.dropout(x + positions[:x.shape[1]])
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.norm(x)
        return out

    def encode(self, histories: Histories) -> torch.Tensor:
        """Queries float32 [B, D] for the next item of each user; uses the last `context` items."""
        recent = last(histories, self.context)
        rows = self.items(self._kjt(recent, torch.zeros(0, dtype=torch.int64)))["seen"].values()
        out = self._outputs(padded(rows, recent.lengths))
        return out[torch.arange(recent.num_users), recent.lengths]

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """``<h, E[i]>``, float32 [B, n]."""
        return encoded @ look_up(self.items, self.features, "drawn", items).T
