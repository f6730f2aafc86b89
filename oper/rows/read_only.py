"""Plans for read-only tables: one copy per memory domain, element types by hotness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oper.errors import PlanError
from oper.plan import Plan, TablePlan, Tier


def one_copy_per_domain(plan: Plan, domains: Sequence[int]) -> Plan:
    """Return the plan with replicas per memory domain instead of per rank, for read-only tables.

    A replicated tier keeps only its first rank in each domain. If all its ranks are in one domain,
    it becomes striped over them. Consecutive tiers that then have the same placement are merged.

    Args:
        plan: the plan.
        domains: int [W], memory domain of each rank.
    """
    def shared(tier: Tier) -> Tier:
        if tier.placement != "replicated":
            return tier
        first: dict[int, int] = {}
        for rank in tier.ranks:
            first.setdefault(domains[rank], rank)
        if len(first) == 1:
            return replace(tier, placement="striped")
        return replace(tier, ranks=tuple(first.values()))

    def joined(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        found: list[Tier] = []
        for tier in map(shared, tiers):
            last = found[-1] if found else None
            if last is not None and replace(last, start=0, stop=1) == replace(
                    tier, start=0, stop=1):
                found[-1] = replace(last, stop=tier.stop)
            else:
                found.append(tier)
        return tuple(found)

    tables = tuple(replace(t, pieces=tuple(replace(p, tiers=joined(p.tiers)) for p in t.pieces))
                   for t in plan.tables)
    return replace(plan, tables=tables)


def with_row_dtypes(entry: TablePlan, dtypes: Sequence[tuple[int, str]], hottest: np.ndarray
                    ) -> TablePlan:
    """Return a table's placement with one element type for each range of the hotness order.

    Args:
        entry: the placement; without column splits if there are several types.
        dtypes: (stop position, type) of each range, hottest first; the last range ends at the last
            row. If there are several types, the last one must be int8 or int4.
        hottest: int64 [H], the known ids at positions 0..H-1, followed by all others in ascending
            order; empty if every id equals its position.

    Returns:
        The placement; the table's dtype is that of the last range. Tiers are cut where the
        type changes, and have their own `dtype` if it differs from the table's.

    Raises:
        PlanError: `hottest` contradicts the placement's order.
    """
    spec = replace(entry.table, dtype=dtypes[-1][1])
    # From here on all rows have the last type, so that their order does not matter.
    boundary = dtypes[-2][0] if len(dtypes) > 1 else 0
    head = entry.head_ids
    what = f"cannot give ranges of rows of table {spec.name!r} types of their own"
    num_placed = min(head.size, boundary)
    if hottest.size < num_placed:  # the known ids are followed by all others, ascending
        others = np.setdiff1d(np.arange(num_placed), hottest)
        hottest = np.append(hottest, others[:num_placed - hottest.size])
    common = min(head.size, hottest.size)
    other = np.flatnonzero(head[:common] != hottest[:common])
    if other.size:
        at = int(other[0])
        raise PlanError(what, f"head_ids from position {at}", head[at:at + 4].tolist(),
                        f"{hottest[at:at + 4].tolist()}...", "plan from the same statistics")
    if head.size < boundary:
        head = hottest[:boundary]  # may be shorter: all other ids follow in ascending order
    pieces = tuple(replace(p, tiers=_cut(p.tiers, dtypes)) for p in entry.pieces)
    return TablePlan(spec, pieces, head)


def _cut(tiers: Sequence[Tier], dtypes: Sequence[tuple[int, str]]) -> tuple[Tier, ...]:
    found = []
    for tier in tiers:
        start = tier.start
        for stop, dtype in dtypes:
            last = min(stop, tier.stop)
            if last > start:
                found.append(replace(tier, start=start, stop=last,
                                     dtype="" if dtype == dtypes[-1][1] else dtype))
                start = last
    return tuple(found)
