"""Ids drawn from bounded power laws, for benchmarks and synthetic logs."""

from __future__ import annotations

import numpy as np

from oper.errors import require
from oper.support.numeric import mix64


def uniform64(values: np.ndarray) -> np.ndarray:
    """Hash integers [n] to pseudo-random numbers in [0, 1), float64 [n]."""
    shifted = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mix64(shifted) >> np.uint64(11)) * 2.0**-53


_HOT_RANKS = 10_000  # number of the hottest ranks that drift


def drifted(ranks: np.ndarray, days: np.ndarray | int, num_rows: int, key: int, drift: float
            ) -> np.ndarray:
    """Map ranks, int64 [n], to the rows that have them on `days`, int [n] or a single day.

    On day 0, rank k is row k. From one day to the next, each of the 10,000 hottest ranks moves to a
    random row with probability `drift`. `key` seeds the draws and must differ between tables.
    """
    hot = np.arange(min(num_rows, _HOT_RANKS), dtype=np.uint64)
    rows = hot.astype(np.int64)
    found = [rows]
    for day in range(1, int(np.max(days, initial=0)) + 1):
        day_key = np.uint64(key) ^ np.uint64(day << 40)
        moves = uniform64(hot ^ day_key) < drift
        drawn = (uniform64(hot ^ day_key ^ np.uint64(1 << 50)) * num_rows).astype(np.int64)
        rows = np.where(moves, drawn, rows)
        found.append(rows)
    return np.where(ranks < hot.size, np.stack(found)[days, np.minimum(ranks, hot.size - 1)], ranks)


def scatter_ids(ids: np.ndarray, num_rows: int) -> np.ndarray:
    """Apply a fixed pseudo-random permutation of `0..num_rows-1`.

    Three rounds of multiply and shift permute 0..2^b - 1, with 2^b the next power of two; a result
    >= num_rows is permuted again (cycle walking, fewer than two applications on average).

    Args:
        ids: int64 [N], in 0..num_rows-1.
        num_rows: size of the permuted range.

    Returns:
        int64 [N].
    """
    bits = max(1, (num_rows - 1).bit_length())
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64((bits + 1) // 2)

    def permute(x: np.ndarray) -> np.ndarray:
        # Odd multipliers and right shifts are invertible modulo a power of two.
        for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            x = (x * np.uint64(factor) + np.uint64(0x632BE59BD9B4E019)) & mask
            x ^= x >> shift
        return x

    result = permute(ids.astype(np.uint64))
    outside = np.flatnonzero(result >= num_rows)
    while outside.size:
        result[outside] = permute(result[outside])
        outside = outside[result[outside] >= num_rows]
    return result.astype(np.int64)


def power_law_ids(
    num_rows: int,
    size: int,
    exponent: float,
    rng: np.random.Generator,
    scatter: bool = True,
) -> np.ndarray:
    """Draw ids with probabilities about proportional to k^-exponent at rank k = 1..num_rows.

    Ranks are drawn by inverting the continuous power law on [1, num_rows + 1) and rounding down.

    Args:
        num_rows: rows of the table.
        size: number of ids to draw.
        exponent: exponent of the power law; 0 = uniform, larger = more skewed.
        rng: source of randomness.
        scatter: map ranks to rows by a fixed permutation (`scatter_ids`), which depends on
            `num_rows` only; otherwise rank k is row k - 1.

    Returns:
        int64 [size], in 0..num_rows-1.

    Raises:
        InvalidInputError: `num_rows` < 1, `size` < 0 or `exponent` < 0.
    """
    require("cannot draw ids", "choose a value in this range",
            ("num_rows", num_rows, num_rows >= 1, ">= 1"), ("size", size, size >= 0, ">= 0"),
            ("exponent", exponent, exponent >= 0, ">= 0"))
    uniform = rng.random(size)
    if exponent == 1:
        ranks = np.exp(uniform * np.log(num_rows + 1.0))
    else:
        power = 1.0 - exponent
        ranks = (1.0 + uniform * ((num_rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    ids = np.clip(ranks.astype(np.int64) - 1, 0, num_rows - 1)
    return scatter_ids(ids, num_rows) if scatter else ids
