"""Checks that all ranks of a group construct the same tables and load the same entries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oper.errors import InvalidInputError, fail
from oper.plan import Plan
from oper.shmem.group.groups import Group


def check_agreement(group: Group, plan: Plan, others: Mapping[str, Sequence[Any]]) -> None:
    """Raise InvalidInputError on all ranks unless they agree on a plan and other arguments.

    Every rank computes the addresses of all rows from its own copy of these. Collective.

    Args:
        group: the ranks.
        plan: the plan; its modelled times and notes may differ.
        others: name -> values that must be equal on all ranks, compared by ``repr``.
    """
    if group.world_size == 1:
        return
    values: dict[str, Sequence[Any]] = {
        "table": [t.table for t in plan.tables],
        "placement of table": [(t.table.name, t.pieces) for t in plan.tables],
        "hottest ids of table": [(t.table.name, hashlib.sha256(t.head_ids.tobytes()).hexdigest())
                                 for t in plan.tables],
        "message_bits": [plan.message_bits.to_json()], **others}
    _check_same(group, values, lambda ranks: f"ranks {ranks} construct other tables than rank 0",
                "build the model and its plan from the same values in the same order on every rank "
                "(the order of a set differs between processes), or pass one plan file")


def check_same_arguments(group: Group, what: str, arguments: Mapping[str, Sequence[Any]]) -> None:
    """Raise InvalidInputError on all ranks unless all ranks pass the same arguments. Collective.

    Args:
        group: the ranks.
        what: beginning of the message.
        arguments: name -> values, compared by ``repr``.
    """
    _check_same(group, arguments, lambda ranks: f"{what}, since ranks {ranks} pass other arguments "
                "than rank 0", "pass the same arguments on every rank")


def _check_same(group: Group, values: Mapping[str, Sequence[Any]],
                what: Callable[[list[int]], str], todo: str) -> None:
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
                what(differ[:8]),
                f"{name} {at} on this rank" if len(held) > 1 else f"{name} on this rank",
                held[at] if at < len(held) else None, "the same on all ranks", todo)


def errors_of_all(group: Group, missing: Sequence[str], errors: Sequence[str]) -> list[str]:
    """Gather the errors that ranks find in a state dict before any rank loads it. Collective.

    Args:
        group: the ranks.
        missing: names of the entries that this rank's state dict lacks.
        errors: this rank's errors.

    Returns:
        All errors, those of other ranks with their rank in front; empty on all ranks or on none.
        It is also an error if ranks lack different entries.
    """
    everyones = group.all_gather((list(missing), list(errors)))
    found = [text if rank == group.rank else f"rank {rank}: {text}"
             for rank, (_, theirs) in enumerate(everyones) for text in theirs]
    first = everyones[0][0]
    differ = next((rank for rank, (theirs, _) in enumerate(everyones) if theirs != first), None)
    if differ is not None:
        other = everyones[differ][0]
        only = ([x for x in first if x not in other][:8], [x for x in other if x not in first][:8])
        found.append(fail("ranks load different entries", f"missing only on rank 0 or {differ}",
                          only, "the same on all ranks",
                          "pass the same state_dict on every rank"))
    return found
