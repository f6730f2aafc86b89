"""Recommend the most popular items to every user: the baseline that other models should beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.rl_rec.models.base import Histories, Recommender


@dataclass(frozen=True, slots=True)
class PopularityConfig:
    """Configuration without options."""


class Popularity(Recommender):
    """Scores an item by a count, such as its number of positive training interactions.

    Args:
        counts: count of each item, [num_items], row 0 (padding) included.
    """

    counts: torch.Tensor

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("counts", counts.float())

    def encode(self, histories: Histories) -> int:
        return histories.num_users

    def scores(self, encoded: int, items: torch.Tensor) -> torch.Tensor:
        """Return scores, float32 [B, n], equal for all users."""
        return self.counts[items].expand(encoded, -1)
