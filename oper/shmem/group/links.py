"""Measured bandwidth of every host's link; all ranks take part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from oper.shmem.group.groups import Group
from oper.shmem.group.transport import transport_of

_FIRST_BYTES = 4 << 20  # of a host in the first probe; later ones are larger where links are fast
_PROBE_S, _REPEATS = 0.3, 3  # seconds that a probe should last, and how often it is repeated
_MOST_BYTES = 1 << 30  # cap on what a host sends per probe, for fast links
_SAME_LINK = 1.08  # measurements of the same link differ by up to this factor


def link_gbps(group: Group, host_of: Sequence[int], rack_of: Sequence[int] | None = None
              ) -> list[float]:
    """GB/s of payload of every host's link in each direction, with all links busy both ways.

    Each host in turn exchanges with all others, while these do not exchange with each other; then
    again with sizes proportional to the measured links, because with equal sizes the slowest link
    decides when the exchange ends. Finally all hosts exchange at once. The loss that the slowest
    link then shows (congestion, a slower path between switches) is deducted from every link in
    proportion. Hosts of different racks do not exchange, unless a host is alone in its rack.
    Collective.

    Args:
        group: the ranks.
        host_of: host of each rank, numbered from 0.
        rack_of: rack of each host, numbered from 0; None = one rack.
    """
    num_hosts = max(host_of) + 1
    if num_hosts == 1:
        return [0.0]
    if rack_of is None or min(np.bincount(rack_of)) == 1:
        rack_of = [0] * num_hosts
    equal = [1.0] * num_hosts
    alone = [_carried(group, host_of, equal, h, rack_of) for h in range(num_hosts)]
    alone = [_carried(group, host_of, alone, h, rack_of) for h in range(num_hosts)]
    together = _carried(group, host_of, equal, None, rack_of)
    return [x * min(1.0, together / min(alone)) for x in _alike(alone)]


def uplink_gbps(group: Group, rack_of: Sequence[int]) -> list[float]:
    """GB/s of payload of racks' uplinks in each direction, while all ranks exchange with other
    racks.

    All racks get the figure of the slowest uplink; it is lower still if the links of hosts carry
    less. Collective.

    Args:
        group: the ranks.
        rack_of: rack of each rank, numbered from 0.
    """
    racks = max(rack_of) + 1
    return [_carried(group, rack_of, [1.0] * racks, None, [0] * racks)] * racks


def _alike(values: Sequence[float]) -> list[float]:
    """Replace values that are equal within the measurement error by their mean, because plans for
    equal hosts are easier to find and to certify."""
    order, found = sorted(range(len(values)), key=lambda k: values[k]), list(values)
    while order:
        same = [k for k in order if values[k] <= values[order[0]] * _SAME_LINK]
        for k in same:
            found[k] = float(np.mean([values[x] for x in same]))
        order = order[len(same):]
    return found


def _carried(group: Group, host_of: Sequence[int], weights: Sequence[float], only: int | None,
             rack_of: Sequence[int]) -> float:
    """GB/s in each direction of host `only`, which exchanges with all others of its rack in
    proportion to their `weights`. With None, of every host while all of a rack exchange."""
    num_ranks = np.bincount(host_of)
    in_rack = np.bincount(rack_of, weights)

    def size(s: int, r: int, total: float) -> int:
        a, b = host_of[s], host_of[r]
        if a == b or only not in (None, a, b) or rack_of[a] != rack_of[b]:
            return 0
        other = b if only in (None, a) else a
        rest = in_rack[rack_of[a]] - weights[a if only is None else only]
        return max(1, round(total * weights[other] / rest / num_ranks[a] / num_ranks[b]))

    total = float(_FIRST_BYTES)
    while True:
        seconds = _median_s(group, lambda s, r, total=total: size(s, r, total))  # type: ignore[misc]
        if seconds > _PROBE_S / 2 or total >= _MOST_BYTES:
            return total / seconds / 1e9
        total = min(_MOST_BYTES, total * min(8.0, _PROBE_S / max(seconds, 1e-6)))


def _median_s(group: Group, size: Callable[[int, int], int]) -> float:
    """Median seconds of exchanges, run one at a time, in which rank s sends ``size(s, r)`` bytes to
    rank r."""
    ranks = range(group.world_size)
    exchange = repeated_exchange(group, [size(group.rank, r) for r in ranks],
                                 [size(s, group.rank) for s in ranks])
    taken = []
    for _ in range(_REPEATS):
        group.all_gather(None)
        begin = time.perf_counter()
        exchange()
        taken.append(time.perf_counter() - begin)
    return float(np.median(np.max(group.all_gather(taken), axis=0)))


def repeated_exchange(group: Group, there: list[int], back: list[int]) -> Callable[[], None]:
    """A function that repeats one exchange, with `there[r]` bytes to and `back[r]` bytes from rank
    r."""
    transport = transport_of(group)
    send = torch.zeros(sum(there), dtype=torch.uint8)
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    return lambda: transport.exchange(send, there, recv, back)
