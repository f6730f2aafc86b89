"""Convert logs to and from the ``BanditFeedback`` dictionaries of Open Bandit Pipeline (obp).

obp's data sets return such dictionaries (``obtain_batch_bandit_feedback``), and its estimators and
learners take them. obp itself is not needed. Files of the Open Bandit data set are read with ``oper
preprocess open-bandit`` and `load_bandit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oper.errors import InvalidInputError
from oper.rl_rec.off_policy.log import LoggedBandit, without_gap

_NEEDED = ("n_actions", "action", "reward", "pscore")
_ROWS = ("context", "action", "reward", "pscore", "position")


def to_feedback(log: LoggedBandit) -> dict[str, Any]:
    """Convert a log to a feedback dictionary.

    For obp's ``action_dist``, repeat a policy float [N, num_actions] of
    `oper.rl_rec.off_policy.policies` for every position: ``policy[:, :,
    None].repeat(log.num_positions, axis=2)``.

    Returns:
        ``n_rounds``, ``n_actions``; ``action``, ``position`` int64 [N]; ``reward``, ``pscore``
        float64 [N]; ``context`` uint8 [N, sum of context_rows], one-hot per context column; and
        ``action_context`` uint8, one-hot groups of actions [num_actions, groups], or one-hot
        actions [num_actions, num_actions] if groups are not known.
    """
    columns = [np.eye(rows, dtype=np.uint8)[log.context[:, n]]
               for n, rows in enumerate(log.context_rows)]
    groups = np.arange(log.num_actions) if log.action_groups is None else log.action_groups
    return {"n_rounds": int(log.actions.size), "n_actions": log.num_actions,
            "context": np.concatenate([np.zeros((log.actions.size, 0), np.uint8), *columns], 1),
            "action_context": np.eye(int(groups.max()) + 1, dtype=np.uint8)[groups],
            "action": log.actions, "position": log.positions,
            "reward": log.rewards.astype(np.float64), "pscore": log.propensities}


def from_feedback(feedback: Mapping[str, Any]) -> LoggedBandit:
    """Convert a feedback dictionary to a log, without groups of actions.

    Every distinct value of a column of ``context`` becomes an id, so discretise real numbers first.
    ``context`` and ``position`` are optional; without ``position`` there is a single position.

    Raises:
        InvalidInputError: a key is missing, arrays have different lengths, or values are out of
            range.
    """
    what = "cannot read a feedback dictionary"
    missing = [key for key in _NEEDED if feedback.get(key) is None]
    if missing:
        raise InvalidInputError(what, "key", missing[0], f"{list(_NEEDED)}, none of them None",
                                "log the propensities too" if missing == ["pscore"] else
                                "pass obp's BanditFeedback of one policy")
    action = np.asarray(feedback["action"], np.int64)
    arrays = {key: np.asarray(feedback[key]) for key in _ROWS if feedback.get(key) is not None}
    for key, array in arrays.items():
        dims = 2 if key == "context" else 1
        if array.ndim != dims or len(array) != action.size or not action.size:
            raise InvalidInputError(what, f"shape of {key}", array.shape,
                                    f"{dims} dimension(s), {max(1, action.size)} rows like action",
                                    "pass one row per impression; slates are not supported")
    num_actions = int(feedback["n_actions"])
    position = arrays.get("position", np.zeros_like(action)).astype(np.int64)
    for key, numbers, most in (("action", action, num_actions), ("position", position, np.inf)):
        if not 0 <= numbers.min() <= numbers.max() < most:
            raise InvalidInputError(what, key, (int(numbers.min()), int(numbers.max())),
                                    ">= 0" if key == "position" else f">= 0 and < {most}",
                                    f"number the {key}s from 0")
    pscore = arrays["pscore"].astype(np.float64)
    if not ((pscore > 0) & (pscore <= 1)).all():
        raise InvalidInputError(what, "pscore", (float(pscore.min()), float(pscore.max())),
                                "in (0, 1]", "log each action's probability under its policy")
    columns = [without_gap(column) for column in arrays.get("context", np.zeros((1, 0))).T]
    context = (np.stack([ids for ids, _ in columns], 1) if columns
               else np.zeros((action.size, 0), np.int64))
    return LoggedBandit(context, action, position, arrays["reward"].astype(np.float32), pscore,
                        num_actions, int(position.max()) + 1, tuple(rows for _, rows in columns))
