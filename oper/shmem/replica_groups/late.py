"""Replica groups that are late: they have skipped the update after which a synchronization was due.

The other groups wait within that update, in one collection after the other, in the order in which
the backward pass updates them. A late group therefore has to synchronize its collections in that
order before it makes any other collective call with the other groups; in training, each update
makes one of these synchronizations. The order is that of the last updates, and before the first
ones the reverse order of the collections, in which backward passes usually update them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

UPDATES = itertools.count()  # numbers the updates of all collections of this process


def catch_up(family: Iterable[Any]) -> None:
    """Make the synchronizations for which this rank's group is late, in the order of updates.
    Collective over the ranks of this group, and over other groups if this one is late.

    Args:
        family: the collections of a model (`ShardedTables`).
    """
    found = sorted((t.replicas for t in family if t.replicas is not None and t._heap is not None),
                   key=lambda replicas: replicas.last_update)
    while any(x.is_late for x in found):
        for x in found:
            x.catch_up()
