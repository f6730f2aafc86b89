"""Row popularity of synthetic tables, as levels of equally popular rows, and fits to data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.errors import InvalidInputError, require
from oper.stats import TableStats
from oper.support.numeric import falling_root

_EXPLICIT = 512      # the hottest ranks of a power law, each of which is its own level
_RATIO = 1.01        # ratio of the first ranks of consecutive levels after these
_RARE_RATE, _HEAD_EXPONENT = 0.5, 1.05  # in _with_rare_rows: accesses per rare row, power law
_EDGES = (0, *(1 << k for k in range(16)))  # bin edges of the published locality histogram


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Access probabilities of a table's rows, as K levels of equally popular rows, hottest first
    (of measured statistics, the rows of the head first).

    Attributes:
        rows: int64 [K], number of rows in each level, all >= 1.
        mass: float64 [K], share of all accesses that go to each level; sums to 1.
    """

    rows: np.ndarray
    mass: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, weight: np.ndarray, sort: bool = True) -> Popularity:
        """Make levels from numbers of rows [K] and weights per row [K], in any order and scale.

        Without `sort`, levels keep their order.

        Raises InvalidInputError unless weights are finite, >= 0 and some row has one above 0.
        """
        rows, weight = np.asarray(rows, np.int64), np.asarray(weight, np.float64)
        if sort:
            order = np.argsort(-weight, kind="stable")
            rows, weight = rows[order], weight[order]
        keep = rows > 0
        total = float(rows @ weight)
        if not keep.any() or not np.isfinite(total) or total <= 0 or weight.min() < 0:
            raise InvalidInputError("invalid popularity", "weights", weight[:5].tolist(),
                                    "finite, >= 0, at least one above 0",
                                    "correct the specification")
        return Popularity(rows[keep], (rows * weight)[keep] / total)

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def draw(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw ranks, int64 [size]; rank 0 is the hottest row."""
        ends = np.cumsum(self.mass)
        level = np.minimum(np.searchsorted(ends, rng.random(size) * ends[-1], side="right"),
                           self.rows.size - 1)
        starts = np.concatenate([[0], np.cumsum(self.rows)[:-1]])
        return starts[level] + (rng.random(size) * self.rows[level]).astype(np.int64)

    def expected(self, num_accesses: int, at_least: int = 1) -> float:
        """Return the expected number of rows with at least `at_least` accesses (Poisson)."""
        return float(self.rows @ _reached(at_least, num_accesses * self.mass / self.rows))


def power_law(num_rows: int, exponent: float, shift: float = 0.0, heavy: Sequence[float] = ()
              ) -> Popularity:
    """Combine heavy hitters with a shifted power law, as FBGEMM's table benchmark does.

    Args:
        num_rows: rows of the table, heavy hitters included.
        exponent, shift: the k-th other row has a weight of (k + shift)^-exponent, k = 1, 2, ...;
            from the 513th on, rows whose k differ by at most 1 % share one level.
        heavy: share of the accesses of each heavy hitter; the other rows get the remainder.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    num_tail = num_rows - len(heavy)
    require(
        "invalid popularity", "choose a value in this range",
        ("num_rows", num_rows, 1 <= num_rows <= 1 << 53 and num_tail >= 0,
         "at least the number of heavy rows, at most 2^53"),
        ("exponent", exponent, 0 <= exponent <= 10, "0..10"),
        ("shift", shift, 0 <= shift < 1e12, "in [0, 1e12)"),
        ("heavy", list(heavy), all(h > 0 for h in heavy) and sum(heavy) <= 1 + 1e-9,
         "shares that sum to at most 1"))
    rows = [np.ones(len(heavy), np.int64)]
    weight = [np.asarray(heavy, np.float64)]
    if num_tail:
        edges = np.unique(np.concatenate([
            np.arange(1, min(_EXPLICIT, num_tail) + 1),
            np.floor(_EXPLICIT * _RATIO ** np.arange(
                max(0, int(np.log(max(1.0, num_tail / _EXPLICIT)) / np.log(_RATIO)) + 1))),
            [num_tail + 1]]).astype(np.int64))
        edges = edges[edges <= num_tail + 1]
        rows.append(np.diff(edges))
        single = rows[1] == 1
        tail = np.where(single, (edges[:-1] + shift) ** -exponent, _integral(
            edges[1:] - 0.5 + shift, edges[:-1] - 0.5 + shift, exponent))
        weight.append(tail / tail.sum() * (1.0 - sum(heavy)) / rows[1])
    return Popularity.of(np.concatenate(rows), np.concatenate(weight))


def _integral(high: np.ndarray, low: np.ndarray, exponent: float) -> np.ndarray:
    """Integrate ``x^-exponent`` from `low` to `high`."""
    if abs(exponent - 1) < 1e-9:
        return np.log(high / low)
    power = 1.0 - exponent
    return (high**power - low**power) / power


def from_stats(table: TableStats) -> Popularity:
    """Return the measured popularity; untouched rows share the Good-Turing unseen mass."""
    values, rows = table.count_levels()
    weight = values.astype(np.float64)
    if values.size and values[-1] == 0 and 0 < table.unseen_mass < 1:
        unseen = table.unseen_mass
        weight[:-1] *= (1 - unseen) / max(1.0, float(weight @ rows))
        weight[-1] = min(unseen / rows[-1], weight[:-1].min())
    return Popularity.of(rows, weight if weight.any() else np.ones(rows.size), sort=False)


def fit_cardinality(num_accesses: int, num_distinct: int, num_frequent: int, at_least: int
                    ) -> Popularity:
    """Fit a power law to the numbers of distinct and of frequent values of a log's column.

    If no power law matches both numbers (for example, if nearly all values are frequent and a few
    are seen once or twice), frequent values follow a power law and equally rare values make up the
    difference.

    Args:
        num_accesses: rows of the log.
        num_distinct: distinct values seen.
        num_frequent: distinct values seen at least `at_least` times.
        at_least: least count of a frequent value.
    """
    def rows_for(exponent: float) -> Popularity:
        if power_law(num_distinct, exponent).expected(num_accesses) >= num_distinct - 0.5:
            return power_law(num_distinct, exponent)
        low, high = num_distinct, num_distinct * 4096
        while high - low > max(1, low // 10_000):
            middle = (low + high) // 2
            few = power_law(middle, exponent).expected(num_accesses) < num_distinct
            low, high = (middle, high) if few else (low, middle)
        return power_law(high, exponent)

    def frequent(exponent: float) -> float:
        found = rows_for(exponent)
        return found.expected(num_accesses, at_least) / found.expected(num_accesses)

    exponent = falling_root(lambda e: frequent(e) - num_frequent / num_distinct, 0.3, 2.0, 30)
    law = rows_for(exponent)
    if abs(law.expected(num_accesses, at_least) - num_frequent) <= max(0.5, 0.001 * num_frequent):
        return law
    return _with_rare_rows(num_accesses, num_distinct, num_frequent, at_least) or law


def _with_rare_rows(num_accesses: int, num_distinct: int, num_frequent: int, at_least: int
                    ) -> Popularity | None:
    """Fit a power law plus rare rows with 0.5 expected accesses each; None if there is no fit."""
    rate = np.array([_RARE_RATE])
    rare = Popularity(np.array([1]), rate / num_accesses)
    seen, often = (rare.expected(num_accesses, k) for k in (1, at_least))
    num_rare = round((num_distinct - num_frequent) / (seen - often))
    num_head = num_frequent - round(num_rare * often)
    if num_head < 1 or num_rare < 1:
        return None
    head = power_law(num_head, _HEAD_EXPONENT)
    share = 1.0 - num_rare * _RARE_RATE / num_accesses
    return Popularity.of(np.append(head.rows, num_rare),
                         np.append(share * head.mass / head.rows, _RARE_RATE / num_accesses))


def fit_locality(row_shares: np.ndarray, access_shares: np.ndarray, reuse: float, num_touched: int
                 ) -> Popularity:
    """Fit a popularity to a histogram of accesses per touched row of a trace.

    The weights of a Poisson mixture with rates on a grid are fitted to all shares by non-negative
    least squares (the multiplicative updates of Lee and Seung, 2001).

    Args:
        row_shares, access_shares: share of the touched rows, and of the accesses, that belong to
            rows accessed (0, 1], (1, 2], (2, 4], ..., (2^14, 2^15], > 2^15 times; float64 [17].
        reuse: mean accesses per touched row.
        num_touched: rows of the result.
    """
    rates = np.exp(np.linspace(np.log(0.02), np.log(400_000.0), 160))
    row_part, access_part = _poisson_bins(rates)
    # Published row shares of hot bins are rounded to 0, so access shares get a larger weight.
    weights = np.concatenate([np.full(17, 1.0), np.full(17, 3.0)])[:, None]
    matrix = np.concatenate([row_part, access_part / reuse]) * weights
    wanted = np.concatenate([row_shares / row_shares.sum(),
                             access_shares / access_shares.sum()])[:, None] * weights
    mixture = np.full((rates.size, 1), 1.0 / rates.size)
    square, linear = matrix.T @ matrix, matrix.T @ wanted
    for _ in range(20_000):
        mixture *= linear / np.maximum(square @ mixture, 1e-300)
    return Popularity.of(*_whole_levels(mixture[::-1, 0] * num_touched, rates[::-1]))


def _whole_levels(rows: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make each level's number of rows an integer by moving its fraction to the next level."""
    whole, found = [], []
    left_rows = left_mass = 0.0
    for count, rate in zip(rows.tolist(), rates.tolist(), strict=True):
        left_rows += count
        left_mass += count * rate
        if left_rows >= 1:
            mean = left_mass / left_rows
            whole.append(int(left_rows))
            found.append(mean)
            left_rows -= whole[-1]
            left_mass -= whole[-1] * mean
    return np.array(whole, np.int64), np.array(found)


def _poisson_bins(rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P(n in bin) and E[n; n in bin] for Poisson counts n of mean `rates`; float64 [17, K].
    """
    edges = np.array(_EDGES, np.float64)[:, None]
    # E[n; n > a] = rate * P(n >= a) for a Poisson number n.
    above, from_edge = _reached(edges + 1, rates), rates * _reached(edges, rates)
    return -np.diff(above, axis=0, append=0), -np.diff(from_edge, axis=0, append=0)


def _reached(count: float | np.ndarray, rate: np.ndarray) -> np.ndarray:
    """P(n >= count) for a Poisson number n with mean `rate`."""
    import torch

    found: np.ndarray = torch.special.gammainc(
        torch.as_tensor(count, dtype=torch.float64), torch.as_tensor(rate)).numpy()
    return found
