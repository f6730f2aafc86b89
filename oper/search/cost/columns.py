"""Sums of squares that the owners of a row's column pieces send each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, Tier
from oper.search.cost.tally import owned_features
from oper.search.problem.statement import TOUCHED_ALL, TableProblem

#: Bytes of one row in such a message: the row's slot at its owner, and the sum in float32.
SQUARE_MESSAGE_BYTES = 8


def expected_squares(t: TableProblem, pieces: tuple[Piece, ...], world_size: int, ordered: bool
                     ) -> np.ndarray:
    """Expected bytes of the sums of squares that ranks send each other in a step.

    Each owner of a piece sends the sum of every updated row to the owners of the row's other
    pieces, once to each rank. Rows are grouped by the tiers that their pieces belong to. Equal
    tiers have the same owner for each row; owners of different tiers are taken as independent, each
    rank owning its mean share.

    Args:
        pieces: column pieces of one table.
        ordered: whether positions are hotness ranks; else they are ids.

    Returns:
        float64 [W, W], by sender and receiver; the diagonal is not sent.
    """
    out = np.zeros((world_size, world_size))
    edges = sorted({x for p in pieces for tier in p.tiers for x in (tier.start, tier.stop)})
    for start, stop in pairwise(edges):
        tiers = [_without_exchange(next(x for x in p.tiers if x.start <= start < x.stop))
                 for p in pieces]
        owned = {x: owned_features(t, replace(x, start=start, stop=stop), world_size,
                                   ordered)[TOUCHED_ALL] for x in dict.fromkeys(tiers)}
        for tier, rows in owned.items():
            absent = np.ones(world_size)
            for other, share in owned.items():
                if other != tier:
                    absent *= 1.0 - share / max(share.sum(), 1e-300)
            out += tiers.count(tier) * SQUARE_MESSAGE_BYTES * np.outer(rows, 1.0 - absent)
    return out


def _without_exchange(tier: Tier) -> Tier:
    """The tier with the default exchange mode and memory, which do not change its rows' owners."""
    return replace(tier, mode="pull", memory="device")
