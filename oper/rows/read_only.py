"""Plans for tables that are only read: one copy per memory domain, precision by hotness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oper.errors import PlanError
from oper.plan import Plan, TablePlan, Tier


def one_copy_per_domain(plan: Plan, domains: Sequence[int]) -> Plan:
    """Adapt a plan to tables that are only read: replicas per memory domain, not per rank.

    A replicated tier keeps one of its ranks in every domain, so that a domain holds one replica; if
    all its ranks share a single domain, it becomes striped over them. Tiers that together form one
    stripe over all ranks of a single domain are merged into one, which needs no directory.

    Args:
        plan: the plan.
        domains: memory domain of each rank, by rank.
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
    """A table's placement with an element type for each range of the hotness order.

    Args:
        entry: the placement. Column splits are kept only if there is a single type.
        dtypes: (last position + 1, type) of each range, hottest first; the last one ends with the
            table. Where there are several, the last type is int8 or int4.
        hottest: int64 [H], ids at the first positions, as far as they are known; empty where ids
            are positions.

    Returns:
        The placement; the table's dtype is that of the last range. Tiers are cut where the
        type changes, and state their type where it differs from the table's.

    Raises:
        PlanError: the ids are in another order than the placement's, or too few.
    """
    spec = replace(entry.table, dtype=dtypes[-1][1])
    boundary = dtypes[-2][0] if len(dtypes) > 1 else 0  # the order counts up to here
    head = entry.head_ids
    what = f"cannot give ranges of rows of table {spec.name!r} types of their own"
    common = min(head.size, hottest.size)
    if not np.array_equal(head[:common], hottest[:common]):
        raise PlanError(what, "head_ids", head[:4].tolist(), f"{hottest[:4].tolist()}...",
                        "plan from the same statistics")
    if head.size < boundary and hottest.size:
        if hottest.size < boundary:
            raise PlanError(what, "rows with a known place in the hotness order", hottest.size,
                            f">= {boundary}", "count accesses exactly")
        head = hottest[:boundary]
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
