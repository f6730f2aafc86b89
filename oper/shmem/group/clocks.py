"""Clock differences between ranks on different hosts.

Processes on one host read the same clock (`time.monotonic_ns`), but clocks of two hosts cannot be
read at the same moment. A collective ends on no rank before all ranks have begun it, so its begin
and end times bound the difference between two clocks from both sides. The bounds from several
collectives are intersected.
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
        ahead_ns: this clock's time minus the time of rank 0's clock, in nanoseconds.
        uncertainty_ns: largest possible error of `ahead_ns`, in nanoseconds.
    """

    ahead_ns: int
    uncertainty_ns: int


def compare_clocks(group: Group) -> list[Clock]:
    """Compare the ranks' clocks; returns them by rank. Collective."""
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
            # Ranks of either host began each collective before ranks of the other host ended it.
            most, least = _shortest(first, mine), -_shortest(mine, first)
            found[name] = Clock((most + least) // 2, max(0, most - least + 1) // 2)
    return [found[name] for name in names]


def _shortest(begins: Sequence[Marks], ends: Sequence[Marks]) -> int:
    """Return the minimum over all collectives of (earliest end among the ranks in `ends`) - (latest
    begin among the ranks in `begins`), each on its own clock, in nanoseconds."""
    return min(min(m[k][1] for m in ends) - max(m[k][0] for m in begins)
               for k in range(len(begins[0])))


def _name() -> str:
    """Return a name of this process's clock, equal for processes that read the same clock."""
    name = read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    with contextlib.suppress(OSError):  # a kernel without namespaces for clocks
        name += os.readlink("/proc/self/ns/time")
    return name
