"""Replica groups: which ranks hold all tables together, and which are counterparts.

Lookups and updates stay within a group. Rank r of a group exchanges rows only with its
counterparts, the ranks with the same number in the other groups: all groups have the same plan, so
counterparts own the same rows in the same slots.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from oper.errors import require
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import Group, ProcessGroup

# By process group of all ranks, and number of groups: a rank's group and counterparts. Process
# groups hold sockets and threads, so that new ones for every sharded model would add up.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The replica groups as seen by one rank.

    Attributes:
        whole: all ranks.
        mine: the ranks of this rank's group.
        counterparts: the ranks with this rank's number in all groups, by group.
        every: number of updates between two synchronizations.
    """

    whole: Group
    mine: Group
    counterparts: Group
    every: int

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.counterparts.world_size

    def gradient_scale(self, scale: float) -> float:
        """Return the factor on a group's gradients, given that of one group with all ranks.

        A group that updates by itself takes its own samples as representative of all.
        """
        return scale if self.every == 1 else scale * self.count


def split(whole: Group, count: int, every: int) -> ReplicaGroups | None:
    """Divide ranks into groups of consecutive ranks; None if `count` is 1. Collective.

    Args:
        whole: all ranks, of ``torch.distributed``.
        count: number of groups, the same on all ranks.
        every: number of updates between two synchronizations, the same on all ranks.

    Raises:
        InvalidInputError: an argument is invalid, or the groups are not equal in size and in their
            memory domains.
    """
    what = "cannot form replica groups"
    for name, value in (("replica_groups", count), ("synchronize_every", every)):
        require(what, "pass a whole number", (
            name, value, type(value) is int and value >= 1, "an integer >= 1"))
    size = whole.world_size
    require(what, "pass a number of groups that divides the number of ranks, of at least 2 if "
            "synchronize_every is given",
            ("replica_groups", count, size % count == 0,
             f"a divisor of {size}, the number of ranks"),
            ("synchronize_every", every, count > 1 or every == 1, "1 without replica groups"))
    if count == 1:
        return None
    import torch.distributed as dist

    assert isinstance(whole, ProcessGroup)
    key = whole.process_group or dist.group.WORLD
    ranks, known = dist.get_process_group_ranks(key), _KNOWN.setdefault(key, {})
    each = size // count
    number, place = divmod(whole.rank, each)
    if count not in known:
        mine, others = (dist.new_group(some, use_local_synchronization=True)
                        for some in (ranks[number * each:(number + 1) * each], ranks[place::each]))
        known[count] = mine, others
    mine, counterparts = map(ProcessGroup, known[count])
    domains = whole.all_gather(find_domains(mine))[::each]
    require(what, "give every group the same number of hosts, and every host the same number of "
            "ranks", ("memory domains of the ranks, by group", domains,
                      all(x == domains[0] for x in domains), "the same in all groups"))
    return ReplicaGroups(whole, mine, counterparts, every)
