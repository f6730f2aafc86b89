"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018).

Causal transformer blocks over items with learned positions. The loss is cross-entropy (the paper's
binary loss with one negative ranks worse: Klenitskiy and Vasilev, RecSys 2023) or gBCE (gSASRec:
Petrov and Macdonald, RecSys 2023), with negatives drawn once per batch instead of once per item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from oper.rl_rec.models.next_item import AttentionConfig, NextItem
from oper.rl_rec.models.transformer import Block


@dataclass(frozen=True, slots=True)
class SASRecConfig(AttentionConfig):
    """Configuration of SASRec."""


class SASRec(NextItem):
    """The SASRec model; see the module docstring. For arguments see `NextItem`."""

    def __init__(self, config: SASRecConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__(config, num_items, device)
        self.position = nn.Parameter(0.02 * torch.randn(self.context, config.dim))
        self.blocks = nn.ModuleList(
            Block(config.dim, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def outputs(self, items: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        """See `NextItem.outputs`; times are ignored."""
        x = self.with_start(items)
        positions = torch.cat([torch.zeros_like(self.start)[None], self.position])
        x = self.dropout(x + positions[:x.shape[1]])
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.norm(x)
        return out
