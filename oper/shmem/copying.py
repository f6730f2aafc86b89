"""Copies of sharded tables: ``copy.deepcopy`` of a model that holds some."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from oper.shmem.exchange.pull import choose_pull
from oper.shmem.optim.optimizers import STATE_PARTS

if TYPE_CHECKING:
    from oper.shmem.tables import ShardedTables

# What copies share or take over by value.
_KEPT = ("num_steps", "frozen", "seed", "_rounding_keys", "_arguments", "name")


def copied(tables: ShardedTables, memo: dict[int, Any]) -> ShardedTables:
    """Tables of their own, with the rows, states, steps and rates of `tables`. Collective.

    Args:
        tables: what to copy; a move to another plan that is under way is not copied.
        memo: of ``copy.deepcopy``.
    """
    tables.barrier()  # peers may still be updating
    other = tables.prepare(tables.plan)
    for name in _KEPT:
        setattr(other, name, getattr(tables, name))
    other._skipped = dict(tables._skipped)
    other._pending = list(tables._pending)
    other.bounds = copy.deepcopy(tables.bounds, memo)
    other.param_groups = [{k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"}
                          for group in tables.param_groups]
    if tables.pull is not False:
        choose_pull(other, tables.pull)
    rank = tables.group.rank
    for k, d in enumerate(tables.directories):
        for part in ("rows", *(name for name, _ in STATE_PARTS[d.table.optimizer])):
            other.view(part, k, rank).copy_(tables.view(part, k, rank))
    other.publish()
    return other
