"""A check that all ranks of a group construct the same tables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from oper.errors import InvalidInputError
from oper.plan import Plan
from oper.shmem.group.groups import Group


def check_agreement(group: Group, plan: Plan, others: Mapping[str, Sequence[Any]]) -> None:
    """Raise InvalidInputError on all ranks unless they agree on a plan and other arguments.

    Every rank computes the addresses of all rows from its own copy of these. Collective.

    Args:
        group: the ranks.
        plan: the plan; its modelled times and notes may differ.
        others: name -> values whose ``repr`` shows everything on which ranks must agree.
    """
    if group.world_size == 1:
        return
    values: dict[str, Sequence[Any]] = {
        "table": [t.table for t in plan.tables],
        "placement of table": [(t.table.name, t.pieces) for t in plan.tables],
        "hottest ids of table": [(t.table.name, hashlib.sha256(t.head_ids.tobytes()).hexdigest())
                                 for t in plan.tables],
        "message_bits": [plan.message_bits.to_json()], **others}
    mine = {name: [hashlib.sha256(repr(x).encode()).digest()[:16] for x in held]
            for name, held in values.items()}
    everyones = group.all_gather(mine)
    for name, held in values.items():
        first = everyones[0][name]
        differ = [rank for rank, theirs in enumerate(everyones) if theirs[name] != first]
        if differ:
            other = everyones[differ[0]][name]
            at = next((k for k, (x, y) in enumerate(zip(first, other, strict=False)) if x != y),
                      min(len(first), len(other)))
            raise InvalidInputError(
                f"ranks {differ[:8]} construct other tables than rank 0",
                f"{name} {at} on this rank" if len(held) > 1 else f"{name} on this rank",
                held[at] if at < len(held) else None,
                "the same on all ranks",
                "build the model and its plan from the same values in the same order on every rank "
                "(the order of a set differs between processes), or pass one plan file")
