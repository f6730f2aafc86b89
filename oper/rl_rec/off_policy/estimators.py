"""What another policy would have earned, from a log with propensities.

A log holds for row n a context x_n, the action a_n, its probability p_n under the policy that
logged it, and the reward r_n. With the target policy's pi(a | x), w_n = pi(a_n | x_n) / p_n and a
model q(x, a) of the reward:

    IPS     1/N sum w_n r_n                                            (Horvitz & Thompson 1952)
    SNIPS   sum w_n r_n / sum w_n                          (Swaminathan & Joachims, NeurIPS 2015)
    DM      1/N sum_n sum_a pi(a | x_n) q(x_n, a)
    DR      DM + 1/N sum w_n (r_n - q(x_n, a_n))                     (Dudik et al., ICML 2011)

IPS and SNIPS need p > 0 wherever pi > 0. DR is right when either the propensities or q is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.errors import InvalidInputError, fail
from oper.rl_rec.intervals import Interval, interval, resampled_sums
from oper.rl_rec.off_policy.log import LoggedBandit


@dataclass(frozen=True, slots=True)
class OffPolicyEstimates:
    """Value of a policy: expected reward per row.

    Attributes:
        ips, snips, direct, doubly_robust: see the top of this file.
        effective_rows: ``(sum w)^2 / sum w^2``, rows that the weights leave of the log.
        largest_weight: of all w.
    """

    ips: Interval
    snips: Interval
    direct: Interval
    doubly_robust: Interval
    effective_rows: float
    largest_weight: float


def estimate(log: LoggedBandit, target: np.ndarray, model: np.ndarray | None = None
             ) -> OffPolicyEstimates:
    """All estimates, with bootstrap intervals over rows.

    Args:
        log: N rows.
        target: pi(a | x_n), float [N, num_actions], rows that sum to 1.
        model: q(x_n, a), float [N, num_actions]; `reward_model` by default.

    Raises:
        InvalidInputError: shapes, probabilities or propensities that cannot be.
    """
    shape = (log.actions.size, log.num_actions)
    target = np.asarray(target, np.float64)
    if target.shape != shape or (target < 0).any() or not np.allclose(target.sum(1), 1, atol=1e-6):
        raise InvalidInputError(fail("cannot estimate a policy", "target", target.shape,
                                     f"probabilities {shape}, rows that sum to 1",
                                     "give the target policy's probability of every action for "
                                     "every row of the log"))
    q = np.asarray(reward_model(log) if model is None else model, np.float64)
    if q.shape != shape or not np.isfinite(q).all():
        raise InvalidInputError(fail("cannot estimate a policy", "model", q.shape,
                                     f"finite rewards {shape}",
                                     "give the reward model's estimate of every action for "
                                     "every row, without NaN"))
    if not ((log.propensities > 0) & (log.propensities <= 1)).all():
        raise InvalidInputError(fail("cannot estimate a policy", "propensities",
                                     float(log.propensities.min()), "in (0, 1]",
                                     "log the probability of what was shown"))
    at = np.arange(shape[0])
    weights = target[at, log.actions] / log.propensities
    if not weights.any():
        raise InvalidInputError(fail("cannot estimate a policy", "weights", 0.0,
                                     "rows whose action the policy may take", "log more"))
    rewards = log.rewards.astype(np.float64)
    direct = (target * q).sum(1)
    robust = direct + weights * (rewards - q[at, log.actions])
    terms = np.stack([weights * rewards, weights, direct, robust])
    sums = resampled_sums(terms)
    mean, means = terms.mean(1), sums / shape[0]
    some = sums[:, 1] > 0
    return OffPolicyEstimates(
        interval(float(mean[0]), means[:, 0]),
        interval(float(mean[0] / mean[1]), sums[some, 0] / sums[some, 1]),
        interval(float(mean[2]), means[:, 2]), interval(float(mean[3]), means[:, 3]),
        float(weights.sum() ** 2 / np.square(weights).sum()), float(weights.max()))


def reward_model(log: LoggedBandit, folds: int = 2, prior: float = 10.0, seed: int = 0
                 ) -> np.ndarray:
    """Mean reward of an action at a position, from the other folds' rows: float64 [N, num_actions].

    Cross-fitted, so that no row's own reward is in its q. A mean is drawn towards the overall mean
    as if `prior` more rows had that.
    """
    rows = log.actions.size
    if not 2 <= folds <= rows:
        raise InvalidInputError(fail("cannot model rewards", "folds", folds, f"2 .. {rows}",
                                     "choose another number"))
    fold = np.random.default_rng(seed).permutation(rows) % folds
    cell = log.positions * log.num_actions + log.actions
    cells = log.num_positions * log.num_actions
    found = np.empty((rows, log.num_actions))
    for k in range(folds):
        other = fold != k
        count = np.bincount(cell[other], minlength=cells)
        total = np.bincount(cell[other], log.rewards[other], minlength=cells)
        mean = (total + prior * log.rewards[other].mean()) / (count + prior)
        found[~other] = mean.reshape(log.num_positions, -1)[log.positions[~other]]
    return found


def action_shares(log: LoggedBandit, of: LoggedBandit, prior: float = 1.0) -> np.ndarray:
    """The policy that logged `of`, taken as free of context: its shares of actions by position.

    Args:
        log: where it is to be evaluated; the same actions and positions.
        of: what it has logged.
        prior: rows added to each action, so that none has probability 0.

    Returns:
        float64 [rows of `log`, num_actions].
    """
    if (log.num_actions, log.num_positions) != (of.num_actions, of.num_positions):
        raise InvalidInputError(fail(
            "cannot compare two logs", "actions, positions",
            ((log.num_actions, log.num_positions), (of.num_actions, of.num_positions)),
            "the same in both", "preprocess both logs into one folder"))
    counts = np.full((of.num_positions, of.num_actions), prior)
    np.add.at(counts, (of.positions, of.actions), 1)
    return (counts / counts.sum(1, keepdims=True))[log.positions]
