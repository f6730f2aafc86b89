"""Summaries of the items before a step, used as the state of a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from oper.rl_rec.models.transformer import Block

STATES = ("mean", "last", "gru", "transformer")


class ItemState(nn.Module):
    """A summary of the items before a step, of the width of their rows.

    ``"mean"``: the mean row of the last `window` items; ``"last"``: the row of the last one; both
    are 0 if there is none. ``"gru"``, ``"transformer"``: the output of one such layer over all
    items of the subsequence that come before.

    Args:
        kind: one of `STATES`.
        dim: columns D of a row.
        window: items of the mean.
        most: items of the longest subsequence.
        heads, dropout: of the transformer.
    """

    def __init__(self, kind: str, dim: int, window: int, most: int, heads: int = 1,
                 dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.window = kind, window
        if kind == "gru":
            self.network: nn.Module = nn.GRU(dim, dim, batch_first=True)
        elif kind == "transformer":
            self.network = Block(dim, heads, dropout)
            self.position = nn.Parameter(0.02 * torch.randn(most + 1, dim))

    def forward(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Summaries float32 [B, T, D].

        Args:
            rows: float32 [B, P, D], rows of the items of every subsequence, padded on the right.
            place: int64 [B, T], number of these items before each step, 0..P.
        """
        trajectory = torch.arange(rows.shape[0], device=rows.device)[:, None]
        before = F.pad(rows, (0, 0, 1, 0))  # at k: the k-th item, counted from 1
        if self.kind == "mean":
            # Differences of prefix sums: every row is looked up once, though it is in many windows.
            sums, begin = before.cumsum(dim=1), (place - self.window).clamp(min=0)
            total = sums[trajectory, place] - sums[trajectory, begin]
            return total / (place - begin).clamp(min=1).unsqueeze(-1)
        if self.kind == "gru":
            before, _ = self.network(before)
        elif self.kind == "transformer":
            before = self.network(before + self.position[:before.shape[1]])
        return before[trajectory, place]
