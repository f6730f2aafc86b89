"""Evaluation protocols of published results: held-out data and metrics.

    leave-one-out     the last interaction of each user is for test, the one before for validation.
                      All ratings count as positive; every item outside the history is ranked;
                      sequence models see at most 200 items. Used for MovieLens-1M by SASRec (ICDM
                      2018), gSASRec (RecSys 2023) and HSTU (ICML 2024): nDCG@10, hit rate = recall
                      at 10, 50, 200
    held-out-users    validation and test users are excluded from training; 80 % of a user's films
                      are the input, the rest are the targets. Films rated 4 or higher, users with
                      five or more. Used for MovieLens-20M by MultVAE (WWW 2018), RecVAE and EASE:
                      recall@20, recall@50 (denominator at most k) and nDCG@100; 10,000 users each

Held-out users and their histories are drawn with NumPy's generator from `DataOptions.seed`, so they
differ from the published draw. Interactions of a user with equal times, common in MovieLens, keep
the order of the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from oper.data.recipe import Recipe
from oper.rl_rec.data.interactions import DataOptions
from oper.rl_rec.ranking.metrics import MetricOptions


@dataclass(frozen=True, slots=True)
class Protocol:
    """An evaluation protocol.

    Attributes:
        data: how the log becomes interactions, and which of them are held out.
        metrics: options of the metrics.
        reported: names of the metrics in a table; validation selects weights by the first one.
        threshold: lowest rating with label 1; None = the recipe's.
        graded: if not empty, labels are the log's numbers with this transform (see
            `oper.data.recipe.Column`) instead of 0 and 1; `data` turns them into rewards.
        context: maximum number of history items for sequence models; 0 = as configured.
        epochs: maximum number of epochs of models that are trained, with early stopping; 0 = as
            configured.
    """

    data: DataOptions = field(default_factory=DataOptions)
    metrics: MetricOptions = field(default_factory=MetricOptions)
    reported: tuple[str, ...] = ("ndcg@10", "recall@10", "ndcg@20", "mrr@20")
    threshold: float | None = None
    graded: str = ""
    context: int = 0
    epochs: int = 0


LEAVE_ONE_OUT = Protocol(
    metrics=MetricOptions((1, 10, 50, 200)), threshold=0.0, context=200,
    reported=("ndcg@10", "recall@1", "recall@10", "recall@50", "recall@200", "ndcg@200"))
HELD_OUT_USERS = Protocol(
    DataOptions(protocol="held_out_users", only="positive", item_core=1),
    MetricOptions((20, 50, 100), recall="min"), ("ndcg@100", "recall@20", "recall@50"))
# 200 epochs, as in the papers of SASRec and MultVAE.
PUBLISHED: dict[str, Protocol] = {
    # 6,040 users, 3,416 films of five ratings or more: SASRec's and gSASRec's file.
    "ml-1m": dataclasses.replace(LEAVE_ONE_OUT, epochs=200),
    # All 3,706 films.
    "ml-1m-all-items": dataclasses.replace(LEAVE_ONE_OUT, data=DataOptions(item_core=1),
                                           epochs=200),
    "ml-20m": dataclasses.replace(HELD_OUT_USERS, data=dataclasses.replace(
        HELD_OUT_USERS.data, valid=10_000, test=10_000), epochs=200),
}


def with_labels(recipe: Recipe, protocol: Protocol) -> Recipe:
    """Return the recipe with the protocol's labels instead of those of its own threshold, in all
    layouts; unchanged if the protocol has neither `threshold` nor `graded`."""
    changes: dict[str, Any] = {}
    if protocol.graded:
        changes = {"parse": "number", "transform": protocol.graded}
    elif protocol.threshold is not None:
        changes = {"threshold": protocol.threshold}
    return dataclasses.replace(recipe, layouts=tuple(dataclasses.replace(
        layout, columns=tuple(
            dataclasses.replace(column, **changes)
            if column.kind == "label" and column.parse == "threshold" else column
            for column in layout.columns)) for layout in recipe.layouts))
