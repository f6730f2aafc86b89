"""Applies constraints on some rows of a table to a placement of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from oper.plan import Piece, Tier
from oper.search.problem.constraints import TableConstraint


def impose(held: TableConstraint, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Replace the tiers of pinned rows by the constraint's pinned tiers, and remove replicas of
    rows that must not be replicated.

    Pinned tiers hold their rows in all column pieces. Rows that must not be replicated are striped
    over the ranks that had copies, or owned by the first of them if striping is not allowed.
    """
    if not (held.pinned or held.unreplicated):
        return pieces
    return tuple(replace(p, tiers=tuple(_imposed(held, p.tiers))) for p in pieces)


def _imposed(held: TableConstraint, tiers: Iterable[Tier]) -> list[Tier]:
    out = list(held.pinned)
    pinned = [(x.start, x.stop) for x in held.pinned]
    striped = held.placements is None or "striped" in held.placements
    mode = "pull" if held.modes is None or "pull" in held.modes else "push"
    for tier in tiers:
        for part, is_pinned in _parts(tier, pinned):
            if is_pinned:
                continue
            if tier.placement != "replicated":
                out.append(part)
                continue
            for new, has_none in _parts(part, held.unreplicated):
                if has_none:
                    new = replace(new, mode=mode, placement="striped" if striped else "owned",
                                  ranks=new.ranks if striped else new.ranks[:1])
                out.append(new)
    return sorted(out, key=lambda x: x.start)


def _parts(tier: Tier, ranges: Iterable[tuple[int, int]]) -> list[tuple[Tier, bool]]:
    """The parts of a tier cut at the ends of row ranges, and whether each part is inside a
    range."""
    cuts = {tier.start, tier.stop, *(e for r in ranges for e in r if tier.start < e < tier.stop)}
    return [(replace(tier, start=a, stop=b), any(low <= a and b <= high for low, high in ranges))
            for a, b in pairwise(sorted(cuts))]
