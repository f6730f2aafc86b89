"""Top-k rankings of the entire catalogue, merged from shards of items, and their metrics.

All items are ranked, since metrics on sampled candidates are not comparable (Krichene & Rendle, KDD
2020). Conventions are those of RecBole and of Liang et al. (WWW 2018): binary relevance, ideal DCG
over ``min(k, positives)``; users without positives are left out. Equal scores are ranked by
ascending id, so that results do not depend on the division into shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from oper.errors import InvalidInputError, require_fields
from oper.ranges import one_of, rules_of

METRICS = ("precision", "recall", "ndcg", "hit_rate", "mrr")
NOTHING = -1  # fills rankings with fewer than k items


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """N concatenated rows of item ids.

    Attributes:
        values: int64 [L].
        lengths: length of each row, int64 [N], >= 0; they sum to L.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """Row index of each value, int64 [L]."""
        return torch.repeat_interleave(self.lengths)


def top_k(shards: Iterable[tuple[int, torch.Tensor]], k: int, exclude: Jagged | None = None
          ) -> torch.Tensor:
    """Rank the k best items of each of B users, merging shards of the catalogue.

    Args:
        shards: pairs (first, scores float [B, R]) with scores of the ids ``first .. first + R -
            1``, at least one, in any order; each id occurs once. Items with score ``-inf`` are not
            ranked.
        k: number of items per user, at least 1.
        exclude: ids to exclude by user, such as the history; B rows.

    Returns:
        Item ids int64 [B, k], best first, padded with `NOTHING`.

    Raises:
        InvalidInputError: a score is NaN.
    """
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for first, scores in shards:
        if bool(scores.isnan().any()):
            raise InvalidInputError("cannot rank", f"scores from id {first} on", "NaN", "numbers",
                                    "find the step at which the loss became NaN")
        if exclude is not None:
            scores = _without(scores, first, exclude)
        ids = torch.arange(first, first + scores.shape[1], device=scores.device)
        found = _best(scores, ids.expand(scores.shape), k)
        if best is not None:
            both, ids = torch.cat([best[0], found[0]], 1), torch.cat([best[1], found[1]], 1)
            order = ids.argsort(dim=1)
            found = _best(both.gather(1, order), ids.gather(1, order), k)
        best = found
    assert best is not None
    ids = best[1].masked_fill(best[0] == float("-inf"), NOTHING)
    ids = ids.gather(1, best[0].argsort(dim=1, descending=True, stable=True))
    return torch.nn.functional.pad(ids, (0, k - ids.shape[1]), value=NOTHING)


def _without(scores: torch.Tensor, first: int, exclude: Jagged) -> torch.Tensor:
    column = exclude.values - first
    here = (column >= 0) & (column < scores.shape[1])
    return scores.index_put((exclude.rows[here], column[here]),
                            scores.new_tensor(float("-inf")))


def _best(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select scores and ids [B, min(k, R)] of the best items; ids ascend in arguments and result.
    """
    k = min(k, scores.shape[1])
    if k == 0:
        return scores, ids
    last = scores.topk(k, dim=1, sorted=True).values[:, -1:]
    keep = scores >= last
    if int(keep.sum()) > k * len(keep):  # of items tied for the last places, keep the smallest ids
        tied = scores == last
        num_left = k - (keep & ~tied).sum(1, keepdim=True)
        keep &= ~tied | (tied.cumsum(1, dtype=torch.int32) <= num_left)
    column = keep.nonzero()[:, 1].reshape(-1, k)
    return scores.gather(1, column), ids.gather(1, column)


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """Options of the ranking metrics.

    Attributes:
        ks: cut-offs k, each >= 1.
        recall: denominator of recall: ``"all"``: the number of positives; ``"min"``: ``min(k,
            positives)`` (Liang et al. 2018, MacridVAE).
    """

    ks: tuple[int, ...] = (5, 10, 20)
    recall: Annotated[str, one_of("all", "min")] = "all"

    def __post_init__(self) -> None:
        require_fields(
            self, "cannot measure rankings", "change the metrics' options", *rules_of(self),
            ("ks", min(self.ks, default=0) >= 1, "cut-offs >= 1"))

    def names(self) -> list[str]:
        """Return the names of all metrics, such as ``"ndcg@10"``."""
        return [f"{m}@{k}" for m in METRICS for k in self.ks]


class RankingMetrics:
    """Accumulates per-user metrics at several cut-offs, over batches of users.

    With the positives P of a user, and h_r = 1 if the item at rank r is in P, else 0:

        precision@k = sum h_r / k           recall@k = sum h_r / |P|  (or / min(k, |P|))
        hit_rate@k = max h_r                mrr@k = 1 / (first rank with h_r = 1), else 0
        ndcg@k = sum h_r / log2(r + 1) / sum_{r <= min(k, |P|)} 1 / log2(r + 1)
    """

    def __init__(self, options: MetricOptions) -> None:
        self.ks, self.recall = options.ks, options.recall
        self._parts: dict[str, list[torch.Tensor]] = {name: [] for name in options.names()}

    def update(self, top: torch.Tensor, positives: Jagged) -> None:
        """Add B users.

        Args:
            top: result of `top_k`, int64 [B, K], K >= the largest cut-off.
            positives: distinct relevant items of each user, B rows.
        """
        users = positives.lengths > 0
        hits = _hits(top, positives)[users].double()
        count = positives.lengths[users].double()
        gain = 1 / torch.arange(2, top.shape[1] + 2, dtype=torch.float64).log2()
        for k in self.ks:
            h = hits[:, :k]
            found, ideal = h.sum(1), count.clamp(max=k)
            first = h.argmax(1).double() + 1
            for name, value in (
                    ("precision", found / k),
                    ("recall", found / (ideal if self.recall == "min" else count)),
                    ("ndcg", (h * gain[:k]).sum(1) / gain.cumsum(0)[ideal.long() - 1]),
                    ("hit_rate", (found > 0).double()),
                    ("mrr", torch.where(found > 0, 1 / first, 0.0))):
                self._parts[f"{name}@{k}"].append(value)

    def per_user(self) -> dict[str, np.ndarray]:
        """Return, by metric, the values of users with positives in the order added, float64 [U]."""
        return {name: (torch.cat(p) if p else torch.zeros(0, dtype=torch.float64)).numpy()
                for name, p in self._parts.items()}


def _hits(top: torch.Tensor, positives: Jagged) -> torch.Tensor:
    """Whether each ranked item is among its row's positives, bool [B, K]."""
    # Binary search among (row, id) pairs, each encoded as one integer; ids are below 2^40.
    base = 1 << 40
    wanted = (positives.rows * base + positives.values).sort().values
    asked = torch.arange(top.shape[0]).unsqueeze(1) * base + top
    if not wanted.numel():
        return torch.zeros_like(top, dtype=torch.bool)
    place = torch.searchsorted(wanted, asked).clamp(max=wanted.numel() - 1)
    return (wanted[place] == asked) & (top != NOTHING)
