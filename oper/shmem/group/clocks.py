"""Clock differences between ranks on different hosts.

Processes of one host read one clock (`time.monotonic_ns`); those of two cannot be read at once. But
a collective ends on no rank before all ranks have begun it, so it bounds the difference of two
clocks from both sides, whatever path its messages took. The bounds of several collectives are
intersected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from oper.shmem.group.groups import Group
from oper.support.kernel import read

_ROUNDS = 32

# When a rank began and ended each collective, on its own clock, in nanoseconds.
Marks = Sequence[tuple[int, int]]


class Clock(NamedTuple):
    """A rank's clock compared with that of rank 0.

    Attributes:
        ahead_ns: how far it is ahead of rank 0's.
        uncertainty_ns: largest possible error of `ahead_ns`.
    """

    ahead_ns: int
    uncertainty_ns: int


def compare_clocks(group: Group) -> list[Clock]:
    """The ranks' clocks now, by rank. Collective."""
    names = group.all_gather(_name())
    marks = []
    if len(set(names)) > 1:
        for _ in range(_ROUNDS):
            begin = time.monotonic_ns()
            group.all_gather(None)
            marks.append((begin, time.monotonic_ns()))
    return clocks_of(names, group.all_gather(marks))


def clocks_of(names: Sequence[str], marks: Sequence[Marks]) -> list[Clock]:
    """Compute clock differences from the marks of collectives, for `compare_clocks`.

    Args:
        names: name of each rank's clock; ranks with equal names read the same clock.
        marks: by rank, times around the same collectives; not needed if all read one clock.
    """
    found = {names[0]: Clock(0, 0)}
    for name in names:
        if name not in found:
            mine, first = ([m for n, m in zip(names, marks, strict=True) if n == x]
                           for x in (name, names[0]))
            # The first host's ranks had begun before these ended, and the other way round.
            most, least = _shortest(first, mine), -_shortest(mine, first)
            found[name] = Clock((most + least) // 2, max(0, most - least + 1) // 2)
    return [found[name] for name in names]


def _shortest(begins: Sequence[Marks], ends: Sequence[Marks]) -> int:
    """The shortest time, over all collectives, from the moment the last rank of `begins` began one
    to the moment the first rank of `ends` ended it, each by its own clock."""
    return min(min(m[k][1] for m in ends) - max(m[k][0] for m in begins)
               for k in range(len(begins[0])))


def _name() -> str:
    """A name that is equal for processes that read the same clock."""
    name = read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    with contextlib.suppress(OSError):  # a kernel without namespaces for clocks
        name += os.readlink("/proc/self/ns/time")
    return name
