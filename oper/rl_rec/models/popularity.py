"""The most popular items for every user: the baseline that every other model should beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.rl_rec.models.base import Histories, Recommender


@dataclass(frozen=True, slots=True)
class PopularityConfig:
    """No options."""


class Popularity(Recommender):
    """Scores an item by its training count.

    Args:
        counts: [num_items], row 0 (padding) included.
    """

    counts: torch.Tensor

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("counts", counts.float())

    def encode(self, histories: Histories) -> int:
        """The number of users."""
        return histories.num_users

    def scores(self, encoded: int, items: torch.Tensor) -> torch.Tensor:
        """float32 [B, n], equal rows."""
        return self.counts[items].expand(encoded, -1)
