"""Causal transformer blocks, shared by the sequence models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape [B, T, D] to [B, heads, T, D / heads]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head attention: query step t attends to key steps 0..t.

    Dropout is applied to the output, since torch's fused CPU kernels do not support dropout of
    attention weights.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attend from `x` to `seen`, both float32 [B, T, D]; returns [B, T, D]."""
        key, value = self.key_value(seen).chunk(2, dim=-1)
        query, key, value = (by_head(y, self.heads) for y in (self.query(x), key, value))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return attended


def feed_forward(dim: int, dropout: float) -> nn.Sequential:
    """Make two linear layers D -> 4 D -> D with GELU in between, and dropout."""
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim),
                         nn.Dropout(dropout))


class Block(nn.Module):
    """A pre-LN transformer block, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.feed_forward = feed_forward(dim, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        x = x + self.attention(y, y)
        x = x + self.feed_forward(self.norm_2(x))
        return x
