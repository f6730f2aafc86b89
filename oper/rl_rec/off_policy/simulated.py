"""Simulated logs with known expected rewards, for testing estimators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.rl_rec.off_policy.estimators import Groups
from oper.rl_rec.off_policy.log import LoggedBandit
from oper.rl_rec.off_policy.policies import softmax_policy

CONTEXTS, ACTIONS, GROUPS = 3, 8, 4


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedLog:
    """A log and its ground truth.

    Attributes:
        log: the log, of N rows; the position in a row is the number of its context.
        target: probabilities of the actions under the policy to evaluate, float64 [N, ACTIONS].
        value: expected reward per row under `target`.
        rewards: expected reward of every action, float64 [N, ACTIONS].
        groups: the group of each action, and the logging policy's probabilities. Expected rewards
            depend only on the context and the action's group.
        visitors: visitor of each row, int64 [N].
    """

    log: LoggedBandit
    target: np.ndarray
    value: float
    rewards: np.ndarray
    groups: Groups
    visitors: np.ndarray


def simulate_log(rows: int, seed: int, per_visitor: int = 1) -> SimulatedLog:
    """Simulate a log of visitors of three kinds (the contexts).

    Expected rewards and both policies are fixed; `seed` changes only the draws. All rows of a
    visitor have the same context, and each visitor clicks 0.5 or 1.5 times as often as its kind on
    average, so a visitor's rows are not independent.

    Args:
        rows: N.
        seed: seed of visitors, actions and rewards.
        per_visitor: number of rows per visitor.
    """
    world = np.random.default_rng(0)
    of_action = np.arange(ACTIONS) % GROUPS
    rewards = world.uniform(0.05, 0.6, (CONTEXTS, GROUPS))[:, of_action]
    behaviour = 0.7 * world.dirichlet(np.full(ACTIONS, 2.0), CONTEXTS) + 0.3 / ACTIONS
    target = softmax_policy(rewards + world.normal(0, 0.05, rewards.shape), 0.15, 0.1)
    rng = np.random.default_rng((seed, 1))
    visitors = np.arange(rows) // per_visitor
    kinds = rng.integers(0, CONTEXTS, visitors[-1] + 1)
    prone = rng.choice([0.5, 1.5], visitors[-1] + 1)
    context = kinds[visitors]
    action = (behaviour[context].cumsum(1) > rng.random((rows, 1))).argmax(1)
    clicked = rng.random(rows) < rewards[context, action] * prone[visitors]
    log = LoggedBandit(context[:, None], action, context, clicked.astype(np.float32),
                       behaviour[context, action], ACTIONS, CONTEXTS, (CONTEXTS,))
    return SimulatedLog(log, target[context], float((target * rewards).sum(1).mean()),
                        rewards[context], Groups(of_action, behaviour[context]), visitors)
