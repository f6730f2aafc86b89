"""Replica groups: groups of ranks, each of which holds all tables.

Lookups and updates stay within a group. All groups have the same plan, so rank r of every group
owns the same rows, in the same slots. These ranks are called counterparts; a rank exchanges
gradients and rows with its counterparts only.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from oper.errors import require
from oper.plan import check_synchronization
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import Group, ProcessGroup

# By process group of all ranks: the groups made from it. Process groups hold sockets and threads,
# so that new ones for every sharded model would add up.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Background:
    """A second group of the same counterparts, for exchanges while training continues.

    Attributes:
        group: the counterparts. Exchanges of `ReplicaGroups.counterparts` cannot mix with its own.
        thread: makes the exchanges in the order in which they are submitted, which is the same on
            all counterparts.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="oper-synchronization")


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The replica groups as seen by one rank.

    Attributes:
        whole: all ranks.
        mine: the ranks of this rank's replica group.
        counterparts: one rank per replica group: this rank, and the ranks with the same number in
            the other groups; its rank g is in replica group g.
        every: number of updates between two synchronizations.
        delay: number of updates made while a synchronization is under way, at most `every`.
        background: exchanges rows during these updates; None if `delay` is 0.
        bits: bits per number of rows (with ``every = 1``, of gradients) sent to counterparts.
    """

    whole: Group
    mine: Group
    counterparts: Group
    every: int
    delay: int = 0
    background: Background | None = None
    bits: int = 32

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


def split(whole: Group, count: int, every: int, delay: int = 0, bits: int = 32
          ) -> ReplicaGroups | None:
    """Divide ranks into groups of consecutive ranks; returns None if `count` is 1. Collective.

    Args:
        whole: all ranks, of ``torch.distributed``.
        count: number of groups, the same on all ranks.
        every: number of updates between two synchronizations, the same on all ranks.
        delay: number of updates made while a synchronization is under way, the same on all ranks.
        bits: see `ReplicaGroups`, the same on all ranks.

    Raises:
        InvalidInputError: `count` or `every` is below 1, `count` does not divide the number of
            ranks, `every` is not 1 although `count` is, `delay` is not allowed with `every`, `bits`
            is not one of `SYNCHRONIZE_BITS`, or not 32 although `count` is 1, or the groups' ranks
            are not divided into memory domains in the same way.
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
    check_synchronization(what, count, every, delay, bits)
    if count == 1:
        return None
    import torch.distributed as dist

    assert isinstance(whole, ProcessGroup)
    ranks, known = whole.ranks, _KNOWN.setdefault(whole.handle, {})
    each = size // count
    number, place = divmod(whole.rank, each)

    def group_of(some: slice, use: str) -> ProcessGroup:
        if (count, use) not in known:
            known[count, use] = dist.new_group(ranks[some], use_local_synchronization=True)
        return ProcessGroup(known[count, use])

    mine = group_of(slice(number * each, (number + 1) * each), "mine")
    counterparts = group_of(slice(place, None, each), "counterparts")
    domains = whole.all_gather(find_domains(mine))[::each]
    require(what, "give every group the same number of hosts, and every host the same number of "
            "ranks", ("memory domains of the ranks, by group", domains,
                      all(x == domains[0] for x in domains), "the same in all groups"))
    background: Background | None = None
    if delay:
        again = group_of(slice(place, None, each), "background")
        background = known.get((count, Background)) or Background(again)
        known[count, Background] = background
    return ReplicaGroups(whole, mine, counterparts, every, delay, background, bits)
