"""Moves of all replica groups to another plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oper.errors import DeadlineError, DesyncError, OperError, PeerLostError, require
from oper.plan import Plan
from oper.shmem.group.agreement import check_agreement, check_same_arguments
from oper.shmem.migration import Migration


def begin_move(tables: Any, plan: Plan, bytes_per_step: int | None, make: Callable[[], Migration]
               ) -> Migration:
    """Begin to move the tables of all replica groups to another plan. Collective over all groups.

    The groups are synchronized first. Either all groups begin, or all raise an error and stay with
    the old plan.

    Args:
        tables: this group's tables.
        plan: as for `ShardedTables.start_migration`.
        bytes_per_step: must be None; replica groups move all rows at once.
        make: begins the move of this group, collectively, and returns it.

    Raises:
        InvalidInputError: `bytes_per_step` is not None, or ranks pass different arguments.
        OperError: another group cannot move; also the errors of `make`.
    """
    what, groups = "cannot move tables to another plan", tables.replicas.groups
    tables.replicas.synchronize()  # first, since other groups may wait for this one in an update
    # Of all ranks, since a rank that stops here must not leave its group waiting.
    check_same_arguments(groups.whole, what, {"bytes_per_step": [bytes_per_step]})
    require(what, "move all rows at once", (
        "bytes_per_step", bytes_per_step, bytes_per_step is None,
        "None in replica groups, which do not change the same rows in a step"))
    check_agreement(groups.whole, plan, {"world_size": [plan.world_size]})
    problem: OperError | None = None
    try:
        move = make()
    except (PeerLostError, DeadlineError, DesyncError):
        raise
    except OperError as error:
        problem = error
    able = groups.counterparts.all_gather(problem is None)
    if problem is not None:
        raise problem
    if not all(able):
        move.stop()
        raise OperError(what, "replica groups that cannot start the move",
                        [g for g, x in enumerate(able) if not x], "none",
                        "see the errors of the ranks of these groups")
    return move
