"""Recommenders under full ranking: every item of the catalogue is scored, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from oper.rl_rec.interactions import HeldOut, Interactions
from oper.rl_rec.jagged import Jagged
from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.ranking import RankingMetrics, top_k


@dataclass(frozen=True, slots=True)
class RankingResult:
    """Metrics of one model on one split.

    Attributes:
        users: int64 [U], those with targets, in the order of the values.
        per_user: float64 [U] by metric, e.g. ``"ndcg@10"``.
        skipped: users without targets.
    """

    users: np.ndarray
    per_user: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: int = 0

    def summary(self) -> dict[str, float]:
        """Means over users, and ``"users"``; means are NaN without users."""
        means = {name: float(v.mean()) if v.size else float("nan")
                 for name, v in self.per_user.items()}
        return {**means, "users": int(self.users.size)}


@torch.no_grad()
def evaluate_ranking(model: Recommender, data: Interactions, split: str, *,
                     ks: Sequence[int] = (5, 10, 20), batch_size: int = 256, block: int = 65536,
                     users: np.ndarray | None = None) -> RankingResult:
    """Rank all items for the users of a split; what is in a user's history is never recommended.

    Args:
        model: put into evaluation mode and back.
        data: whose `held_out(split)` is asked for.
        split: ``"valid"`` or ``"test"``.
        ks: cut-offs.
        batch_size: users per batch.
        block: items that are scored at once; the result does not depend on it.
        users: int64, which places of ``held_out(split).users`` to take, e.g. a rank's share; all
            by default.
    """
    held = data.held_out(split)
    chosen = np.arange(held.users.size) if users is None else np.asarray(users, np.int64)
    offsets = np.concatenate([[0], np.cumsum(held.target_lengths)])
    targets = Jagged(torch.from_numpy(held.targets), torch.from_numpy(offsets))[
        torch.from_numpy(chosen)]
    metrics = RankingMetrics(ks)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, chosen.size, batch_size):
            part = chosen[first:first + batch_size]
            histories = histories_of(data, held, part)
            encoded = model.encode(histories)
            seen = Jagged.from_lengths(histories.items, histories.lengths)
            top = top_k(_blocks(model, encoded, data.num_items, block), max(ks), seen)
            metrics.update(top, targets[slice(first, first + part.size)])
    finally:
        model.train(was_training)
    return RankingResult(held.users[chosen[held.target_lengths[chosen] > 0]], metrics.per_user(),
                         metrics.skipped)


def histories_of(data: Interactions, held: HeldOut, places: np.ndarray) -> Histories:
    """Histories of the users at int64 [B] places of a split."""
    users = held.users[places]
    rows, lengths = data.rows_between(data.offsets[users], held.stop[places])
    return Histories(torch.from_numpy(users), torch.from_numpy(data.items[rows]),
                     torch.from_numpy(data.rewards[rows]), torch.from_numpy(lengths))


def training_histories(data: Interactions, users: np.ndarray) -> Histories:
    """Training interactions of int64 [B] users."""
    rows, lengths = data.rows_between(data.offsets[users], data.train_stop[users])
    return Histories(torch.from_numpy(np.asarray(users, np.int64)),
                     torch.from_numpy(data.items[rows]), torch.from_numpy(data.rewards[rows]),
                     torch.from_numpy(lengths))


def _blocks(model: Recommender, encoded: object, num_items: int, block: int
            ) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(1, num_items, block):
        yield first, model.scores(encoded, torch.arange(first, min(first + block, num_items)))
