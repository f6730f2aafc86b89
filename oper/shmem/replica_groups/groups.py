"""Replica groups: groups of ranks, each of which holds all tables.

Lookups and updates stay within a group. All groups have the same plan, so rank r of every group
owns the same rows, in the same slots. These ranks are called counterparts; a rank exchanges
gradients and rows with its counterparts only.
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
        mine: the ranks of this rank's replica group.
        counterparts: one rank per replica group: this rank, and the ranks with the same number in
            the other groups; its rank g is in replica group g.
        every: number of updates between two synchronizations.
    """

    whole: Group
    mine: Group
    counterparts: Group
    every: int

    @property
    def count(self) -> int:
        """Number of replica groups."""
        return self.counterparts.world_size

    def gradient_scale(self, scale: float) -> float:
        """Return the factor on the gradients that a group sums, given the factor `scale` that one
        group of all ranks would use (1 / number of ranks for a mean).

        With ``every = 1`` the sums are added up over all groups, so the factor is `scale`. With
        more, an update has the samples of one group only: the factor is `scale` times `count`.
        """
        return scale if self.every == 1 else scale * self.count


def split(whole: Group, count: int, every: int) -> ReplicaGroups | None:
    """Divide ranks into groups of consecutive ranks; returns None if `count` is 1. Collective.

    Args:
        whole: all ranks, of ``torch.distributed``.
        count: number of groups, the same on all ranks.
        every: number of updates between two synchronizations, the same on all ranks.

    Raises:
        InvalidInputError: a number is below 1, `count` does not divide the number of ranks,
            `every` is not 1 although `count` is, or the groups' ranks are not divided into memory
            domains in the same way.
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
