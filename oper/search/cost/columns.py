"""Sums of squares that the owners of a row's column pieces send each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np

from oper.plan import MAX_PATTERN, Piece, Tier
from oper.search.cost.load_vector import owned_features
from oper.search.problem.statement import TOUCHED_ALL, TableProblem

#: Bytes of the sum of a row's squared gradients, over the columns of a piece or over all columns.
SQUARE_BYTES = 4


def expected_squares(t: TableProblem, pieces: tuple[Piece, ...], world_size: int, ordered: bool,
                     one_host: bool) -> np.ndarray:
    """Expected bytes of sums of squares that ranks of different memory domains exchange in a step.

    Let rank r own A_i(r) of the P pieces of row i. The bytes from rank r to rank q are

        S(r, q) = c * sum over updated rows i of A_i(r) * A_i(q).

    On several hosts c = 2 * SQUARE_BYTES / P: each owner sends its sum to one of the P owners, all
    with equal probability (`oper.rows.directory.summing_piece`), and gets the total from it. On one
    host c = SQUARE_BYTES: all ranks address each other's memory, and every owner reads the sums of
    all others.

    A row's owners depend on the tiers of its pieces, and on its position modulo the period of each
    tier's pattern of owners. Rows with the same owners are evaluated together. Where the least
    common multiple of the periods exceeds `MAX_PATTERN`, owners in different tiers are taken as
    independent.

    Args:
        pieces: column pieces of one table.
        ordered: whether positions are hotness ranks; else they are ids.
        one_host: whether all ranks are on one host.

    Returns:
        float64 [W, W], by source and destination, including pairs of ranks of one domain, which
        send nothing.
    """
    out = np.zeros((world_size, world_size))
    edges = sorted({x for p in pieces for tier in p.tiers for x in (tier.start, tier.stop)})
    for start, stop in pairwise(edges):
        found = (next(x for x in p.tiers if x.start <= start < x.stop) for p in pieces)
        tiers = Counter(map(_with_default_exchange, found))
        if len(tiers) > 1:  # otherwise one rank owns all pieces of a row
            out += _pairs_of_owners(t, tiers, start, stop, world_size, ordered)
    return out * (SQUARE_BYTES if one_host else 2 * SQUARE_BYTES / len(pieces))


def _pairs_of_owners(t: TableProblem, tiers: Counter[Tier], start: int, stop: int, world_size: int,
                     ordered: bool) -> np.ndarray:
    """The sum of A_i(r) * A_i(q), see `expected_squares`, over the updated rows at positions
    start..stop-1; float64 [W, W]. `tiers`: for each tier of these rows, its number of pieces."""
    patterns = {x: x.pattern() for x in tiers}
    period = math.lcm(*map(len, patterns.values()))
    if period <= MAX_PATTERN:
        offset = np.arange(period)
        owners = [(tiers[x], np.take(pattern, offset + start - x.start, mode="wrap"))
                  for x, pattern in patterns.items()]
        updated = t.shares(start, stop, period, ordered)[TOUCHED_ALL]
        out = np.zeros((world_size, world_size))
        for (a, source), (b, destination) in combinations_with_replacement(owners, 2):
            pairs = a * b * np.bincount(source * world_size + destination, updated, out.size)
            found = pairs.reshape(out.shape)
            out += found if source is destination else found + found.T
        return out
    rows = np.array([owned_features(t, replace(x, start=start, stop=stop), world_size,
                                    ordered)[TOUCHED_ALL] for x in tiers])
    owned = rows * np.array(list(tiers.values()))[:, None]
    total = owned.sum(axis=0)
    # Pieces of the same tier have the same owner, so only pairs of different tiers count.
    return np.asarray(np.outer(total, total) - owned.T @ owned) / max(rows[0].sum(), 1e-300)


def _with_default_exchange(tier: Tier) -> Tier:
    """The tier with the default exchange mode and memory, so that tiers with the same owners are
    equal."""
    return replace(tier, mode="pull", memory="device")
