"""Popularity of the rows of a synthetic table: levels of equally popular rows, and fits to data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.errors import InvalidInputError, require
from oper.stats import TableStats
from oper.support.numeric import falling_root

_EXPLICIT = 512      # hottest ranks of a power law, each a level of its own
_RATIO = 1.01        # further levels span ranks of this ratio
_RARE_RATE, _HEAD_EXPONENT = 0.5, 1.05  # of a fit in two parts
_EDGES = (0, *(1 << k for k in range(16)))  # counts between the bins of published locality


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Rows by rank, hottest first, in levels of equal probability.

    Attributes:
        rows: int64 [K], rows of each level, all >= 1.
        mass: float64 [K], share of the accesses that a level takes; they sum to 1.
    """

    rows: np.ndarray
    mass: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, weight: np.ndarray) -> Popularity:
        """Levels of `rows` [K] with `weight` [K] per row, in any order and scale."""
        rows, weight = np.asarray(rows, np.int64), np.asarray(weight, np.float64)
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
        """Rows of the table."""
        return int(self.rows.sum())

    def draw(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Ranks int64 [size], 0 = hottest."""
        ends = np.cumsum(self.mass)
        level = np.minimum(np.searchsorted(ends, rng.random(size) * ends[-1], side="right"),
                           self.rows.size - 1)
        starts = np.concatenate([[0], np.cumsum(self.rows)[:-1]])
        return starts[level] + (rng.random(size) * self.rows[level]).astype(np.int64)

    def expected(self, num_accesses: int, at_least: int = 1) -> float:
        """Rows that `num_accesses` independent accesses touch at least `at_least` times (Poisson).
        """
        return float(self.rows @ _reached(at_least, num_accesses * self.mass / self.rows))


def power_law(num_rows: int, exponent: float, shift: float = 0.0, heavy: Sequence[float] = ()
              ) -> Popularity:
    """Popularity (k + shift)^-exponent of ranks k = 1, 2, ... below `heavy` rows of given shares.

    Heavy hitters over a shifted power law are how FBGEMM's table benchmark describes an index
    stream. Ranks beyond the 512th are grouped into levels within which ranks differ by 1 %.
    """
    num_tail = num_rows - len(heavy)
    require(
        "invalid popularity", "choose a value in this range",
        ("num_rows", num_rows, 1 <= num_rows <= 1 << 53 and num_tail >= 0,
         "at least the number of heavy rows, at most 2^53"),
        ("exponent", exponent, 0 <= exponent <= 10, "0..10"),
        ("shift", shift, 0 <= shift < 1e12, ">= 0"),
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
    if abs(exponent - 1) < 1e-9:
        return np.log(high / low)
    power = 1.0 - exponent
    return (high**power - low**power) / power


def from_stats(table: TableStats) -> Popularity:
    """The measured popularity of a table's rows.

    Untouched rows share the Good-Turing estimate of the unseen mass.
    """
    values, rows = table.count_histogram()
    weight = values.astype(np.float64)
    if values.size and values[-1] == 0 and 0 < table.unseen_mass < 1:
        unseen = table.unseen_mass
        weight[:-1] *= (1 - unseen) / max(1.0, float(weight @ rows))
        weight[-1] = min(unseen / rows[-1], weight[-2])
    return Popularity.of(rows, weight if weight.any() else np.ones(rows.size))


def fit_cardinality(num_accesses: int, num_distinct: int, num_frequent: int, at_least: int
                    ) -> Popularity:
    """The power law under which a log of this size has the published numbers of distinct values.

    There may be no power law with both numbers, for example for a column of few values that are
    nearly all frequent, with some seen once or twice. Then the frequent values follow a power law,
    and equally rare values make up the difference.

    Args:
        num_accesses: rows of the log.
        num_distinct: distinct values seen.
        num_frequent: of these the ones seen at least `at_least` times.
        at_least: see above.
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
    """Frequent rows by a power law, and rare rows that are accessed 0.5 times each on average."""
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
    """A popularity whose accesses repeat rows as in a published histogram.

    A trace is described by how often its touched rows occur: shares of these rows and of the
    accesses with counts in (0, 1], (1, 2], (2, 4], ..., (2^14, 2^15], above. Rates of a Poisson
    mixture on a grid are fitted to all shares by non-negative least squares (the multiplicative
    updates of Lee and Seung, 2001).

    Args:
        row_shares, access_shares: float64 [17].
        reuse: accesses per touched row.
        num_touched: rows that the trace touches.
    """
    rates = np.exp(np.linspace(np.log(0.02), np.log(400_000.0), 160))
    row_part, access_part = _poisson_bins(rates)
    # Shares of rows that were rounded to nothing are known better from the accesses.
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
    """Levels with whole numbers of rows, hottest first: the remaining fraction of a row in a level
    is moved to the next level, with its accesses."""
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
    """Probability of a count in each bin, and expected accesses from it, float64 [17, K] each."""
    edges = np.array(_EDGES, np.float64)[:, None]
    # A Poisson number n, weighted by n, is one more than a Poisson number, times the mean.
    above, from_edge = _reached(edges + 1, rates), rates * _reached(edges, rates)
    return -np.diff(above, axis=0, append=0), -np.diff(from_edge, axis=0, append=0)


def _reached(count: float | np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Probability that a Poisson number with the mean `rate` is `count` or more."""
    import torch

    found: np.ndarray = torch.special.gammainc(
        torch.as_tensor(count, dtype=torch.float64), torch.as_tensor(rate)).numpy()
    return found
