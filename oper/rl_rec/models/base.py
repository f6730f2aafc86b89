"""What every recommender offers to a training loop and to an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """What users did, oldest first; users one after another.

    Attributes:
        users: int64 [B].
        items: int64 [L], ids >= 1.
        rewards: float32 [L].
        lengths: int64 [B], interactions of each user; they sum to L and may be 0.
    """

    users: torch.Tensor
    items: torch.Tensor
    rewards: torch.Tensor
    lengths: torch.Tensor

    @property
    def num_users(self) -> int:
        """Users `B`."""
        return self.users.numel()


class Recommender(nn.Module):
    """Base class of the models.

    Item, user and concept rows live in ``EmbeddingCollection`` or ``EmbeddingBagCollection``
    attributes and are looked up, never taken whole, so that they may be sharded.
    """

    def forward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss float32 [], a mean over the batch, and its named parts for the log."""
        raise NotImplementedError

    def lookups(self, batch: Any) -> list[Any]:
        """The KJTs that `forward` looks up for a training batch, one per collection.

        Access statistics are counted from them.
        """
        raise NotImplementedError

    def encode(self, histories: Histories) -> Any:
        """What `scores` needs of a batch of users, e.g. float32 [B, D]."""
        raise NotImplementedError

    def scores(self, encoded: Any, items: torch.Tensor) -> torch.Tensor:
        """Scores float32 [B, n] of candidate items int64 [n], higher = better."""
        raise NotImplementedError

    def schedule(self, step: int, num_steps: int) -> None:
        """Called before training step `step` (from 0) of `num_steps`; for annealed weights."""
