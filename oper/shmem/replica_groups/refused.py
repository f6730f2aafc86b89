"""Batches that a replica group refuses while the other groups train with them (``every > 1``).

The group counts the update that it skips in all collections of the model, so that all groups
synchronize after the same batches. It cannot know which collections the batch would have trained if
some batches leave out some of them.
"""

from __future__ import annotations

from typing import Any

from oper.errors import OperError


def _family(own: Any) -> list[Any]:
    """Return the model's collections (`ShardedTables`) in replica groups, the same on all ranks."""
    return sorted((t for t in own.tables.family if t.replicas is not None and t._heap is not None),
                  key=lambda tables: tables.number)


def note_refused(own: Any, differ: bool) -> None:
    """Count the update that this rank's group skips, in all collections of the model.

    Args:
        own: the `Synchronizer` of the collection in which a rank has refused the batch.
        differ: whether frozen tables may differ between the group's ranks; the tables that all of
            them have frozen are then found first. Collective in this case.
    """
    counted, family = own.counted, _family(own)
    all_frozen: list[Any] = [[tables.frozen] for tables in family]
    if differ and own.tables.is_one_domain:  # else no rank can continue
        all_frozen = list(zip(*own.tables.all_gather([t.frozen for t in family]), strict=True))
    for tables, frozen in zip(family, all_frozen, strict=True):
        replicas, by_all = tables.replicas, frozenset.intersection(*frozen)
        if tables.frozen_by_all and len(by_all) == len(tables.specs):
            continue  # nothing trains them
        replicas.is_assumed |= replicas is not own
        if replicas.counted == counted:  # else already updated in this batch, or `is_uneven`
            tables.count_step(by_all)  # as in the other groups
            replicas.count_skipped(len({*frozen}) > 1)


def check_counts(own: Any) -> None:
    """Compare the updates of the model's collections at the beginning of a batch, or before a
    synchronization.

    Raises:
        OperError: a batch has left out a collection, and the group has counted an update of another
            one for a refused batch, which no synchronization has confirmed yet.
    """
    family = [t for t in _family(own) if t.is_trained()]
    if len({t.replicas.counted for t in family}) > 1:
        for tables in family:
            tables.replicas.is_uneven = True
    if own.is_uneven and any(t.replicas.is_assumed for t in family):
        raise OperError(
            "this replica group has refused a batch, and cannot know which collections the other "
            "groups have trained with it", "updates by collection",
            {", ".join(list(t.specs)[:8]): t.replicas.counted for t in family},
            "the same, from batches that train all collections",
            "restart the job from its last checkpoint; to make later refusals harmless, look up "
            "every collection in every batch, with empty bags if necessary")
