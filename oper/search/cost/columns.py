"""Sums of squares that the owners of a row's column pieces send each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import MAX_PATTERN, Piece, Tier
from oper.search.cost.tally import owned_features
from oper.search.problem.statement import TOUCHED_ALL, TableProblem

SQUARE_BYTES = 4  # of the sum of a row's squared gradients over the columns of a piece, or over all


def expected_squares(t: TableProblem, pieces: tuple[Piece, ...], world_size: int, ordered: bool,
                     one_host: bool) -> np.ndarray:
    """Expected bytes of sums of squares that ranks of different memory domains exchange in a step.

    On several hosts, the owner of each of the P pieces of an updated row sends its sum to the owner
    of the row's summing piece, which is any of them with equal probability, and gets the total
    back. On one host, all owners read all sums. If A_i(r) pieces of row i are owned by rank r,

        S(r, q) = c * sum over updated rows i of A_i(r) * A_i(q)

    with c = 2 * SQUARE_BYTES / P or SQUARE_BYTES. Owners repeat with the rows' positions: rows are
    grouped by the tiers of their pieces and by their place in the tiers' common period. Where that
    is longer than `MAX_PATTERN`, owners of different tiers are taken as independent, each rank
    owning its mean share.

    Args:
        pieces: column pieces of one table.
        ordered: whether positions are hotness ranks; else they are ids.
        one_host: whether all ranks are on one host.

    Returns:
        float64 [W, W], by source r and destination q; bytes within a domain are not sent.
    """
    out = np.zeros((world_size, world_size))
    edges = sorted({x for p in pieces for tier in p.tiers for x in (tier.start, tier.stop)})
    for start, stop in pairwise(edges):
        tiers = Counter(_rows_of(next(x for x in p.tiers if x.start <= start < x.stop))
                        for p in pieces)
        if len(tiers) > 1:
            out += _of_segment(t, tiers, start, stop, world_size, ordered)
    return out * (SQUARE_BYTES if one_host else 2 * SQUARE_BYTES / len(pieces))


def _of_segment(t: TableProblem, tiers: Counter[Tier], start: int, stop: int, world_size: int,
                ordered: bool) -> np.ndarray:
    """The sum of A_i(r) * A_i(q) over the updated rows of positions start..stop-1, float64 [W, W];
    `tiers`: those that they belong to, with numbers of pieces."""
    patterns = {x: x.pattern() for x in tiers}
    period = math.lcm(*map(len, patterns.values()))
    if period <= MAX_PATTERN:
        owned = np.zeros((period, world_size))
        place = np.arange(period)
        for tier, pattern in patterns.items():
            owned[place, np.take(pattern, place + start - tier.start, mode="wrap")] += tiers[tier]
        updated = t.shares(start, stop, period, ordered)[TOUCHED_ALL]
        return np.asarray(owned.T @ (owned * updated[:, None]))
    rows = np.array([owned_features(t, replace(x, start=start, stop=stop), world_size,
                                    ordered)[TOUCHED_ALL] for x in tiers])
    shares = rows * np.array(list(tiers.values()))[:, None]
    every = shares.sum(axis=0)
    return np.asarray(np.outer(every, every) - shares.T @ shares) / max(rows[0].sum(), 1e-300)


def _rows_of(tier: Tier) -> Tier:
    """The tier with the default exchange mode and memory, which do not change its rows' owners."""
    return replace(tier, mode="pull", memory="device")
