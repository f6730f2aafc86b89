"""Constraints on some rows of a table, laid over any placement of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from oper.plan import Piece, Tier
from oper.search.problem.constraints import TableConstraint


def impose(held: TableConstraint | None, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The column pieces with what the constraint says of some rows in place of what was there.

    Pinned tiers take their rows, in all columns; rows that must have no copies are striped over the
    ranks that had them.
    """
    if held is None or not (held.pinned or held.unreplicated):
        return pieces
    return tuple(replace(p, tiers=tuple(_imposed(held, p.tiers))) for p in pieces)


def _imposed(held: TableConstraint, tiers: Iterable[Tier]) -> list[Tier]:
    out = list(held.pinned)
    pinned = [(x.start, x.stop) for x in held.pinned]
    striped = held.placements is None or "striped" in held.placements
    for tier in tiers:
        for start, stop, _ in _parts(tier, pinned, inside=False):
            part = replace(tier, start=start, stop=stop)
            if tier.placement != "replicated":
                out.append(part)
                continue
            for a, b, has_none in _parts(part, held.unreplicated):
                new = replace(part, start=a, stop=b)
                if has_none:
                    new = replace(new, placement="striped") if striped else replace(
                        new, placement="owned", ranks=tier.ranks[:1])
                out.append(new)
    return sorted(out, key=lambda x: x.start)


def _parts(tier: Tier, ranges: Iterable[tuple[int, int]], inside: bool = True
           ) -> list[tuple[int, int, bool]]:
    """The rows of a tier cut at ranges: start, stop, and whether the part is in one; parts in a
    range only if `inside`."""
    cuts = {tier.start, tier.stop, *(e for r in ranges for e in r if tier.start < e < tier.stop)}
    edges = sorted(cuts)
    out = []
    for a, b in pairwise(edges):
        covered = any(low <= a and b <= high for low, high in ranges)
        if inside or not covered:
            out.append((a, b, covered))
    return out
