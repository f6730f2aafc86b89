"""GRU4Rec: a recurrent network over the items of a history.

Hidasi, Karatzoglou, Baltrunas and Tikk, ICLR 2016. Differences: the losses of `SequenceConfig`
(later versions improve mainly by better losses too: Hidasi and Karatzoglou, CIKM 2018), and batches
of subsequences instead of session-parallel batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from oper.ranges import Positive
from oper.rl_rec.models.next_item import NextItem, NextItemConfig


@dataclass(frozen=True, slots=True)
class GRU4RecConfig(NextItemConfig):
    """Configuration of GRU4Rec; `dropout` is applied to the input and between layers."""

    layers: Positive = 1


class GRU4Rec(NextItem):
    """The GRU4Rec model; see the module docstring. For arguments see `NextItem`."""

    def __init__(self, config: GRU4RecConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__(config, num_items, device)
        self.network = nn.GRU(config.dim, config.dim, config.layers, batch_first=True,
                              dropout=config.dropout if config.layers > 1 else 0.0)
        self.project = nn.Linear(config.dim, config.dim)

    def outputs(self, items: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        """See `NextItem.outputs`; times are ignored."""
        states, _ = self.network(self.dropout(self.with_start(items)))
        out: torch.Tensor = self.project(states)
        return out
