"""Estimators of a policy's value from another policy's log with propensities.

Row n of a log has a context x_n, an action a_n, its probability p_n under the logging policy, and a
reward r_n. With the target policy pi(a | x), w_n = pi(a_n | x_n) / p_n and a reward model q(x, a):

    IPS         1/N sum w_n r_n                                        (Horvitz & Thompson 1952)
    SNIPS       sum w_n r_n / sum w_n                      (Swaminathan & Joachims, NeurIPS 2015)
    DM          1/N sum_n sum_a pi(a | x_n) q(x_n, a)
    DR          DM + 1/N sum w_n (r_n - q(x_n, a_n))                 (Dudik et al., ICML 2011)
    Switch-DR   DR with 0 for weights above a threshold              (Wang et al., ICML 2017)
    DRos        DR with l w / (w^2 + l) instead of w                   (Su et al., ICML 2020)
    MIPS        1/N sum v_n r_n, v_n = pi(g_n | x_n) / p(g_n | x_n), with the group g_n of a_n
                                                           (Saito & Joachims, ICML 2022)

IPS, SNIPS and the DR family require p > 0 wherever pi > 0. DR is consistent if the propensities or
q are correct, MIPS if the reward depends on the action only through its group. Threshold and l
minimise the estimated mean squared error: variance plus squared difference from DR's mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.errors import InvalidInputError
from oper.rl_rec.intervals import SAMPLES, Interval, interval, resampled_sums
from oper.rl_rec.off_policy.log import LoggedBandit

PRIOR = 0.5  # pseudo-rows with the overall mean in each mean of `reward_model`
FOLDS = 10   # parts of a log for the cross-fitting of `reward_model`
_QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.99)  # quantiles of w that are candidate thresholds
_SHRINKAGES = tuple(10.0 ** k for k in range(-4, 3))  # candidates for l / (largest w)^2


@dataclass(frozen=True, slots=True)
class OffPolicyEstimates:
    """Estimates of a policy's value, the expected reward per row.

    Attributes:
        intervals: estimate and interval by estimator: ``"ips"``, ``"snips"``, ``"dm"``, ``"dr"``,
            ``"switch-dr"``, ``"dros"`` and, if groups of actions are given, ``"mips"``.
        threshold: chosen threshold of Switch-DR; infinite = DR.
        shrinkage: chosen parameter l of DRos; infinite = DR.
        effective_rows: ``(sum w)^2 / sum w^2``, the effective sample size of the log.
        largest_weight: the largest w.
    """

    intervals: dict[str, Interval]
    threshold: float
    shrinkage: float
    effective_rows: float
    largest_weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of actions, for MIPS.

    Attributes:
        of_action: group of each action, int64 [num_actions], >= 0.
        behaviour: the logging policy's probability of each action, float64 [N, num_actions].
    """

    of_action: np.ndarray
    behaviour: np.ndarray

    def weights(self, log: LoggedBandit, target: np.ndarray) -> np.ndarray:
        """Compute MIPS's weights v, float64 [N], see the module docstring.

        Args:
            log: the log.
            target: the target policy pi(a | x_n), float64 [N, num_actions].

        Raises:
            InvalidInputError: a policy or `of_action` does not fit the log, or the behaviour
                policy never shows a logged group.
        """
        for name, probabilities in (("behaviour", self.behaviour), ("target", target)):
            _check_policy(probabilities, (log.actions.size, log.num_actions), name)
        if self.of_action.shape != (log.num_actions,) or (self.of_action < 0).any():
            raise InvalidInputError(
                "cannot estimate a policy", "shape, minimum of groups.of_action",
                (self.of_action.shape, int(self.of_action.min(initial=0))),
                f"int64 [{log.num_actions}], >= 0", "pass the group of every action")
        same = self.of_action == self.of_action[log.actions][:, None]  # [N, num_actions]
        mine = (self.behaviour * same).sum(1)
        if not (mine > 0).all():
            raise InvalidInputError("cannot estimate a policy",
                                    "behaviour policy's probability of the logged action's group, "
                                    f"row {int(np.argmin(mine))}", 0.0,
                                    "> 0", "pass the policy that logged the rows")
        return (target * same).sum(1) / mine


def estimate(log: LoggedBandit, target: np.ndarray, *, model: np.ndarray | None = None,
             groups: Groups | None = None, clusters: np.ndarray | None = None,
             samples: int = SAMPLES) -> OffPolicyEstimates:
    """Compute all estimates, with bootstrap intervals over clusters of rows.

    With correct propensities, IPS and DR are unbiased and SNIPS is consistent for every q. DM
    relies on q; so do Switch-DR and DRos to the extent that they reduce weights. Intervals include
    the (linearised) sampling error of the default q, but not the bias of a misspecified q; a given
    q, the threshold and l are treated as fixed.

    Args:
        log: N rows.
        target: pi(a | x_n), float [N, num_actions], rows that sum to 1.
        model: q(x_n, a), float [N, num_actions]; None = `reward_model`.
        groups: groups of actions, for MIPS; None = no MIPS.
        clusters: cluster of each row, such as its visitor, int64 [N]; clusters are resampled as a
            unit. None = every row is its own cluster.
        samples: number of bootstrap samples.

    Raises:
        InvalidInputError: invalid shapes, probabilities or propensities, or no row has an action
            that the target policy can take.
    """
    shape = (log.actions.size, log.num_actions)
    target = np.asarray(target, np.float64)
    _check_policy(target, shape, "target")
    q = np.asarray(reward_model(log) if model is None else model, np.float64)
    if q.shape != shape or not np.isfinite(q).all():
        raise InvalidInputError(
            "cannot estimate a policy", "shape, non-finite values of model",
            (q.shape, int((~np.isfinite(q)).sum())), f"finite rewards {shape}",
            "pass the reward model's estimate of every action for every row, without NaN")
    if not ((log.propensities > 0) & (log.propensities <= 1)).all():
        raise InvalidInputError(
            "cannot estimate a policy", "range of propensities",
            (float(log.propensities.min()), float(log.propensities.max())), "in (0, 1]",
            "log the probability with which each action was chosen")
    at = np.arange(shape[0])
    cluster = at if clusters is None else np.unique(clusters, return_inverse=True)[1]
    if cluster.shape != at.shape:
        raise InvalidInputError("cannot estimate a policy", "clusters", cluster.shape,
                                f"int64 [{shape[0]}]", "pass the cluster of every row")
    w = target[at, log.actions] / log.propensities
    if not w.any():
        raise InvalidInputError("cannot estimate a policy", "largest importance weight", 0.0,
                                "> 0: a row of the log whose action the target policy can take",
                                "use a log with actions that the target policy takes")
    rewards = log.rewards.astype(np.float64)
    direct, error = (target * q).sum(1), rewards - q[at, log.actions]
    largest = float(w.max())
    thresholds = {float(t): np.where(w <= t, w, 0.0)
                  for t in (*np.quantile(w, _QUANTILES), np.inf)}
    shrunk = {x * largest ** 2: w * (x * largest ** 2) / (w * w + x * largest ** 2)
              for x in _SHRINKAGES} | {np.inf: w}
    fitted = _FittedModel(log, target, error) if model is None else None
    threshold, shrinkage = (_least_error(options, direct, error, cluster, fitted)
                            for options in (thresholds, shrunk))
    weights = {"dm": np.zeros(shape[0]), "dr": w, "switch-dr": thresholds[threshold],
               "dros": shrunk[shrinkage]}
    values = {name: direct + v * error for name, v in weights.items()} | {"ips": w * rewards}
    if groups is not None:
        values["mips"] = groups.weights(log, target) * rewards
    terms = values | {"w": w, "ones": np.ones(shape[0])}
    if fitted:
        terms |= {name: terms[name] + fitted.sensitivity(v) for name, v in weights.items()}
    sums = np.stack([np.bincount(cluster, term) for term in terms.values()])
    drawn = dict(zip(terms, resampled_sums(sums, samples).T, strict=True))
    found = {name: interval(float(x.mean()), drawn[name] / drawn["ones"]
                            - (terms[name].mean() - x.mean())) for name, x in values.items()}
    some = drawn["w"] > 0
    found["snips"] = interval(float(values["ips"].sum() / w.sum()),
                              drawn["ips"][some] / drawn["w"][some])
    return OffPolicyEstimates(found, threshold, shrinkage,
                              float(w.sum() ** 2 / np.square(w).sum()), largest)


def _check_policy(policy: np.ndarray, shape: tuple[int, int], name: str) -> None:
    if policy.shape != shape or (policy < 0).any() or not np.allclose(policy.sum(1), 1, atol=1e-6):
        raise InvalidInputError("cannot estimate a policy",
                                f"shape, minimum, sums of rows of {name}",
                                (policy.shape, float(policy.min(initial=0)),
                                 policy.sum(-1)[:4].tolist()),
                                f"{shape}, probabilities >= 0 whose rows sum to 1",
                                "pass the policy's probability of every action for every "
                                "row of the log")


class _FittedModel:
    """Linearised effect of rewards on estimates of the form ``1/N sum_n (direct_n + v_n error_n)``
    through the q of `reward_model`, to include the sampling error of q in intervals.

    q of a cell (action, position) is ``(R + prior m) / (n + prior)`` with the sum R of its n
    rewards and the overall mean m. A row's reward changes the q of its cell by ``error /
    (n + prior)``. A change of q changes the sum by the target policy's total probability of the
    cell minus the total weight v of its rows.
    """

    def __init__(self, log: LoggedBandit, target: np.ndarray, error: np.ndarray) -> None:
        self.cell, self.error = log.positions * log.num_actions + log.actions, error
        wanted = np.zeros((log.num_positions, log.num_actions))
        np.add.at(wanted, log.positions, target)
        self.wanted = wanted.reshape(-1)
        self.count = np.bincount(self.cell, minlength=self.wanted.size) + PRIOR

    def sensitivity(self, weights: np.ndarray) -> np.ndarray:
        """Compute the effect of each row's reward on the sum over rows, float64 [N], given v [N].
        """
        corrected = np.bincount(self.cell, weights, minlength=self.wanted.size)
        return ((self.wanted - corrected) / self.count)[self.cell] * self.error


def _least_error(options: dict[float, np.ndarray], direct: np.ndarray, error: np.ndarray,
                 cluster: np.ndarray, fitted: _FittedModel | None) -> float:
    """Return the key in `options` of the weights, float64 [N], for which the mean has the least
    estimated squared error; the key inf has the unmodified weights."""
    def squared_error(key: float) -> float:
        term = direct + options[key] * error
        if fitted:
            term = term + fitted.sensitivity(options[key])
        spread = np.bincount(cluster, term - term.mean())
        bias = float(((options[key] - options[np.inf]) * error).mean())
        return float(np.square(spread).sum()) / term.size ** 2 + bias * bias

    return min(options, key=squared_error)


def reward_model(log: LoggedBandit) -> np.ndarray:
    """Estimate q(x_n, a), float64 [N, num_actions], by the mean reward of a at row n's position.

    The means are cross-fitted: those for a row exclude the rows of its fold (of min(`FOLDS`, N)).
    They are shrunk towards the overall mean as if there were `PRIOR` additional rows with it.
    Raises InvalidInputError for fewer than 2 rows.
    """
    rows, folds = log.actions.size, min(FOLDS, log.actions.size)
    if rows < 2:
        raise InvalidInputError("cannot model rewards", "rows", rows, ">= 2", "use a longer log")
    fold = np.random.default_rng(0).permutation(rows) % folds
    cell = log.positions * log.num_actions + log.actions
    cells = log.num_positions * log.num_actions
    found = np.empty((rows, log.num_actions))
    for k in range(folds):
        other = fold != k
        count = np.bincount(cell[other], minlength=cells)
        total = np.bincount(cell[other], log.rewards[other], minlength=cells)
        mean = (total + PRIOR * log.rewards[other].mean()) / (count + PRIOR)
        found[~other] = mean.reshape(log.num_positions, -1)[log.positions[~other]]
    return found
