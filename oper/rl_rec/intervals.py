"""Percentile bootstrap intervals (Efron 1979) of means, differences and ratios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.errors import InvalidInputError

SAMPLES = 2000  # default number of bootstrap samples
LEVEL = 0.95    # confidence level
BLOCK = 16      # bootstrap samples computed at once


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % bootstrap interval (2.5 % and 97.5 % quantiles)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> dict[str, float]:
        return {"mean": round(self.mean, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


def bootstrap(values: np.ndarray, samples: int = SAMPLES) -> Interval:
    """Compute the mean of `values` and its bootstrap interval.

    Args:
        values: one value per user, float [N], or per training seed and user, float [S, N]. Seeds
            and users are both resampled, so that the interval covers both sources of randomness.
        samples: number of bootstrap samples.

    Raises:
        InvalidInputError: no values, non-finite values, or `samples` < 1.
    """
    table = np.atleast_2d(np.asarray(values, np.float64))
    _check(table, samples)
    num_seeds, num_users = table.shape
    means = _resampled_rows(resampled_sums(table, samples)) / (num_seeds * num_users)
    return interval(float(table.mean()), means)


def difference(a: np.ndarray, b: np.ndarray) -> Interval:
    """Bootstrap mean(a) - mean(b), with both resampled by the same users.

    Both have values of N users, float [N], or of S seeds, float [S, N]. If both have the same
    number of seeds, these are paired as well; otherwise each is averaged over its seeds.
    """
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    if a.shape[1:] != b.shape[1:]:
        raise InvalidInputError("cannot compare", "numbers of users", (a.shape[1], b.shape[1]),
                                "the same users on both sides", "evaluate the same split")
    if len(a) != len(b):
        a, b = a.mean(0, keepdims=True), b.mean(0, keepdims=True)
    return bootstrap(a - b)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """Bootstrap sum(numerator) / sum(denominator), resampled in pairs.

    Both have values of N users, float [N], or of S seeds, float [S, N], see `bootstrap`.
    """
    pairs = [np.atleast_2d(np.asarray(x, np.float64)) for x in (numerator, denominator)]
    _check(np.concatenate(pairs), SAMPLES)
    above, below = pairs
    if not below.sum() > 0 or (below < 0).any():
        raise InvalidInputError("cannot compute a ratio", "sum and minimum of the denominators",
                                (float(below.sum()), float(below.min())),
                                "a sum > 0, and none negative", "pass counts as denominators")
    tops, bottoms = (_resampled_rows(resampled_sums(x)) for x in pairs)
    some = bottoms > 0
    return interval(float(above.sum() / below.sum()), tops[some] / bottoms[some])


def resampled_sums(table: np.ndarray, samples: int = SAMPLES) -> np.ndarray:
    """Sum N columns, drawn with replacement, of a table [M, N]; [samples, M] for `samples` draws,
    which are the same in every call."""
    rng = np.random.default_rng(0)
    num = table.shape[1]
    sums = np.empty((samples, table.shape[0]))
    for first in range(0, samples, BLOCK):
        block = sums[first:first + BLOCK]
        # Multiply columns by how often they are drawn, instead of copying drawn columns.
        times = np.stack([np.bincount(rng.integers(0, num, num), minlength=num) for _ in block])
        block[:] = times.astype(np.float64) @ table.T
    return sums


def _resampled_rows(sums: np.ndarray) -> np.ndarray:
    """Sum M of the columns of bootstrap samples [samples, M], drawn with replacement; [samples].
    The draws are the same in every call."""
    drawn = np.random.default_rng([0, 1]).integers(0, sums.shape[1], sums.shape)
    total: np.ndarray = np.take_along_axis(sums, drawn, 1).sum(1)
    return total


def interval(mean: float, samples: np.ndarray) -> Interval:
    """Make the percentile interval of an estimate from its bootstrap samples [n]."""
    low, high = np.percentile(samples, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(mean, float(low), float(high))


def _check(table: np.ndarray, samples: int) -> None:
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise InvalidInputError("cannot compute an interval", "shape, non-finite values",
                                (table.shape, int((~np.isfinite(table)).sum())),
                                "at least one value, all finite", "pass measured values")
    if samples < 1:
        raise InvalidInputError("cannot compute an interval", "samples", samples, ">= 1",
                                "draw at least one bootstrap sample")
