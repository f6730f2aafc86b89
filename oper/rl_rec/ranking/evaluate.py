"""Recommenders under full ranking: every item of the catalogue is scored, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from oper.rl_rec.data.batches import histories_until
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.ranking.jagged import Jagged
from oper.rl_rec.ranking.metrics import MetricOptions, RankingMetrics, top_k


@dataclass(frozen=True, slots=True)
class RankingResult:
    """Metrics of one model on one split.

    Attributes:
        users: int64 [U], in the order of the values.
        per_user: float64 [U] by metric, e.g. ``"ndcg@10"``.
    """

    users: np.ndarray
    per_user: dict[str, np.ndarray] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Means over users, and ``"users"``; means are NaN without users."""
        means = {name: float(v.mean()) if v.size else float("nan")
                 for name, v in self.per_user.items()}
        return {**means, "users": int(self.users.size)}


@torch.no_grad()
def evaluate_ranking(model: Recommender, data: Interactions, split: str, *,
                     metrics: MetricOptions | None = None, batch_size: int = 256,
                     block: int = 65536, users: np.ndarray | None = None) -> RankingResult:
    """Rank all items for the users of a split; items in a user's history are never recommended.

    Args:
        model: the model, in evaluation mode during the call.
        data: the interactions.
        split: ``"valid"`` or ``"test"``.
        metrics: what is measured; the default options by default.
        batch_size: users per batch.
        block: items that are scored at once; the result does not depend on it.
        users: int64, indices into ``held_out(split).users`` of the users to take, e.g. a rank's
            share; all by default.
    """
    held = data.held_out(split)
    chosen = np.arange(held.users.size) if users is None else np.asarray(users, np.int64)
    offsets = np.concatenate([[0], np.cumsum(held.target_lengths)])
    targets = Jagged(torch.from_numpy(held.targets), torch.from_numpy(offsets))[
        torch.from_numpy(chosen)]
    options = metrics or MetricOptions()
    found = RankingMetrics(options)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, chosen.size, batch_size):
            part = chosen[first:first + batch_size]
            histories = histories_until(data, held.users[part], held.stop[part])
            encoded = model.encode(histories)
            seen = Jagged.from_lengths(histories.items, histories.lengths)
            top = top_k(_blocks(model, encoded, data.num_items, block), max(options.ks), seen)
            found.update(top, targets[slice(first, first + part.size)])
    finally:
        model.train(was_training)
    return RankingResult(held.users[chosen], found.per_user())


def _blocks(model: Recommender, encoded: object, num_items: int, block: int
            ) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(1, num_items, block):
        yield first, model.scores(encoded, torch.arange(first, min(first + block, num_items)))
