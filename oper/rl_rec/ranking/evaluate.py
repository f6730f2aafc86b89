"""Evaluate recommenders by full ranking: every item is scored, in blocks of items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from oper.data.arrays import places_of
from oper.rl_rec.data.batches import histories_until
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.ranking.metrics import Jagged, MetricOptions, RankingMetrics, top_k


@dataclass(frozen=True, slots=True)
class RankingResult:
    """Per-user metrics of one model on one split.

    Attributes:
        users: ids of the users, int64 [U].
        per_user: by metric, such as ``"ndcg@10"``, the value of each user, float64 [U].
    """

    users: np.ndarray
    per_user: dict[str, np.ndarray] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Return the mean of each metric (NaN without users), and ``"users"``, their number."""
        means = {name: float(v.mean()) if v.size else float("nan")
                 for name, v in self.per_user.items()}
        return {**means, "users": int(self.users.size)}


@torch.no_grad()
def evaluate_ranking(model: Recommender, data: Interactions, split: str, *,
                     metrics: MetricOptions | None = None, batch_size: int = 256,
                     block: int = 65536, users: np.ndarray | None = None) -> RankingResult:
    """Rank all items for the users of a split, excluding each user's history.

    Args:
        model: the model, which is put into evaluation mode during the call.
        data: the interactions.
        split: ``"valid"`` or ``"test"``; raises InvalidInputError for others.
        metrics: options of the metrics; None = the defaults.
        batch_size: users per batch.
        block: number of items scored at once; does not affect the result.
        users: indices into ``held_out(split).users``, int64, such as a rank's share; None = all.
    """
    held = data.held_out(split)
    chosen = np.arange(held.users.size) if users is None else np.asarray(users, np.int64)
    begins = np.cumsum(held.target_lengths) - held.target_lengths
    options = metrics or MetricOptions()
    found = RankingMetrics(options)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, chosen.size, batch_size):
            part = chosen[first:first + batch_size]
            histories = histories_until(data, held.users[part], held.stop[part])
            encoded = model.encode(histories)
            seen = Jagged(histories.items, histories.lengths)
            top = top_k(_blocks(model, encoded, data.num_items, block), max(options.ks), seen)
            lengths = held.target_lengths[part]
            found.update(top, Jagged(*map(torch.from_numpy, (
                held.targets[places_of(begins[part], lengths)], lengths))))
    finally:
        model.train(was_training)
    return RankingResult(held.users[chosen], found.per_user())


def _blocks(model: Recommender, encoded: object, num_items: int, block: int
            ) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(1, num_items, block):
        yield first, model.scores(encoded, torch.arange(first, min(first + block, num_items)))
