"""Sums of squares that the owners of a row's column pieces send each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost.tally import owned_features
from oper.search.problem.statement import TOUCHED_ALL, TableProblem

SQUARE_BYTES = 4  # of the sum of a row's squared gradients over the columns of a piece, or over all


def expected_squares(t: TableProblem, pieces: tuple[Piece, ...], world_size: int, ordered: bool
                     ) -> np.ndarray:
    """Expected bytes of sums of squares that ranks of different memory domains send in a step.

    The owner of each piece of an updated row sends its sum to the owner of the row's summing piece,
    which is any of the P pieces with equal probability, and gets the row's total back. Rows are
    grouped by the tiers that their pieces belong to. Equal tiers have the same owner for each row;
    owners of different tiers are taken as independent, each rank owning its mean share. If c_k
    pieces have tier k, in which rank r owns a share a_k(r) of the U updated rows, rank r sends q

        2 * SQUARE_BYTES * U / P * sum over k != l of c_k * a_k(r) * c_l * a_l(q)

    Args:
        pieces: column pieces of one table.
        ordered: whether positions are hotness ranks; else they are ids.

    Returns:
        float64 [W, W], by sender r and receiver q; bytes within a domain are not sent.
    """
    out = np.zeros((world_size, world_size))
    edges = sorted({x for p in pieces for tier in p.tiers for x in (tier.start, tier.stop)})
    for start, stop in pairwise(edges):
        tiers = Counter(_without_exchange(next(x for x in p.tiers if x.start <= start < x.stop))
                        for p in pieces)
        rows = np.array([owned_features(t, replace(x, start=start, stop=stop), world_size,
                                        ordered)[TOUCHED_ALL] for x in tiers])
        updated = rows[0].sum()
        if len(tiers) == 1 or updated <= 0.0:
            continue
        shares = rows / updated * np.array(list(tiers.values()))[:, None]
        every = shares.sum(axis=0)
        out += 2 * SQUARE_BYTES * updated / len(pieces) * (
            np.outer(every, every) - shares.T @ shares)
    return out


def _without_exchange(tier: Tier) -> Tier:
    """The tier with the default exchange mode and memory, which do not change its rows' owners."""
    return replace(tier, mode="pull", memory="device")
