"""Policies to evaluate, as probabilities of actions for the rows of a log."""

from __future__ import annotations

import numpy as np
import torch

from oper.errors import InvalidInputError, require
from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.off_policy.log import LoggedBandit


def softmax_policy(scores: np.ndarray, temperature: float = 1.0, uniform: float = 0.0
                   ) -> np.ndarray:
    """Compute ``(1 - uniform) softmax(scores / temperature) + uniform / num_actions``.

    Args:
        scores: float [N, num_actions]; an action with -inf is chosen only through `uniform`.
        temperature: >= 0; 0 = choose the highest score, uniformly among ties.
        uniform: share of uniformly random choices, in [0, 1].

    Returns:
        float64 [N, num_actions], rows that sum to 1.

    Raises:
        InvalidInputError: `scores` is empty or has another shape, a row has NaN, +inf or only -inf,
            or a parameter is out of range.
    """
    scores = np.asarray(scores, np.float64)
    is_matrix = scores.ndim == 2 and scores.size > 0
    best = scores.max(1, keepdims=True) if is_matrix else scores
    num_bad = int((~np.isfinite(best)).sum())
    require("cannot make a policy", "change this argument of softmax_policy",
            ("shape of scores", scores.shape, is_matrix, "[N, num_actions], not empty"),
            ("scores", f"NaN, inf or only -inf in {num_bad} rows", num_bad == 0,
             "a finite maximum in every row"),
            ("temperature", temperature, 0 <= temperature < np.inf, "finite, >= 0"),
            ("uniform", uniform, 0 <= uniform <= 1, "0..1"))
    below_best = scores - best
    chosen = (np.exp(below_best / temperature) if temperature
              else (below_best == 0).astype(np.float64))
    chosen /= chosen.sum(1, keepdims=True)
    return (1 - uniform) * chosen + uniform / scores.shape[1]


@torch.no_grad()
def recommender_policy(model: Recommender, histories: Histories, items: torch.Tensor,
                       temperature: float = 1.0, uniform: float = 0.0) -> np.ndarray:
    """Make the policy that shows one of `items` by the `softmax_policy` of a recommender's scores.

    Args:
        model: the recommender, which is put into evaluation mode during the call.
        histories: histories of the users of the N rows.
        items: item id of each action, int64 [num_actions].
        temperature, uniform: see `softmax_policy`.

    Returns:
        float64 [N, num_actions].
    """
    was_training = model.training
    model.eval()
    try:
        scores = model.scores(model.encode(histories), items)
    finally:
        model.train(was_training)
    return softmax_policy(scores.cpu().numpy(), temperature, uniform)


def action_shares(log: LoggedBandit, of: LoggedBandit) -> np.ndarray:
    """Approximate the policy that logged `of` by its action frequencies at each position.

    Each action counts once more at each position, so that none has probability 0.

    Args:
        log: log of N rows for which probabilities are returned.
        of: log whose policy is approximated, with the same actions and positions.

    Returns:
        float64 [N, num_actions].

    Raises:
        InvalidInputError: the logs have different numbers of actions or positions.
    """
    if (log.num_actions, log.num_positions) != (of.num_actions, of.num_positions):
        raise InvalidInputError(
            "cannot compare two logs", "actions, positions",
            ((log.num_actions, log.num_positions), (of.num_actions, of.num_positions)),
            "the same in both", "preprocess both logs into one folder")
    counts = np.ones((of.num_positions, of.num_actions))
    np.add.at(counts, (of.positions, of.actions), 1)
    return (counts / counts.sum(1, keepdims=True))[log.positions]
