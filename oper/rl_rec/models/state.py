"""Summaries of the items before a step, used as states by models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from oper.rl_rec.models.transformer import Block

STATES = ("mean", "last", "gru", "transformer")


class ItemState(nn.Module):
    """Summarises the rows of the items before a step in a vector of the same width.

    ``"mean"``: mean row of the last `window` items; ``"last"``: row of the last item; both are 0
    without items. ``"gru"``, ``"transformer"``: output of one such layer over all earlier items of
    the subsequence.

    Args:
        kind: one of `STATES`.
        dim: D, columns of a row.
        window: maximum number of items in the mean.
        most: number of items of the longest subsequence.
        heads, dropout: heads and dropout of the transformer.
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
        """Compute summaries, float32 [B, T, D].

        Args:
            rows: rows of each subsequence's items, padded on the right, float32 [B, P, D].
            place: number of these items before each step, 0..P, int64 [B, T].
        """
        trajectory = torch.arange(rows.shape[0], device=rows.device)[:, None]
        before = F.pad(rows, (0, 0, 1, 0))  # index k is the k-th item, counted from 1
        if self.kind == "mean":
            # Differences of prefix sums, since each row is in many windows.
            sums, begin = before.cumsum(dim=1), (place - self.window).clamp(min=0)
            total = sums[trajectory, place] - sums[trajectory, begin]
            return total / (place - begin).clamp(min=1).unsqueeze(-1)
        if self.kind == "gru":
            before, _ = self.network(before)
        elif self.kind == "transformer":
            before = self.network(before + self.position[:before.shape[1]])
        return before[trajectory, place]
