"""Measurement of the bandwidth of links between hosts and racks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from oper.shmem.group.groups import Group
from oper.shmem.group.transport import transport_of

_FIRST_BYTES = 4 << 20  # bytes per host in the first probe; increased until probes last long enough
_PROBE_S, _REPEATS = 0.3, 3  # target duration of a probe in seconds, and number of repetitions
_MOST_BYTES = 1 << 30  # limit on the bytes per host and probe
_SAME_LINK = 1.08  # measurements of the same link differ by up to this factor


def link_gbps(group: Group, host_of: Sequence[int], rack_of: Sequence[int] | None = None
              ) -> list[float]:
    """Measure the payload bandwidth of every host's link, in GB/s per direction. Collective.

    First, each host alone exchanges data with all other hosts. This is repeated with message sizes
    proportional to the measured bandwidths, since with equal sizes the slowest link determines the
    duration. Then all hosts exchange at the same time; the factor by which the slowest link is
    slower than before (congestion, slow paths between switches) is applied to all links. Only hosts
    in the same rack exchange data, unless some rack has only one host. Returns 0 for a single host.

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
    """Measure the payload bandwidth of the racks' uplinks, in GB/s per direction. Collective.

    All ranks exchange with ranks of other racks at the same time. The result is the bandwidth of
    the slowest uplink for every rack, or less if the hosts' own links limit it.

    Args:
        group: the ranks.
        rack_of: rack of each rank, numbered from 0.
    """
    racks = max(rack_of) + 1
    return [_carried(group, rack_of, [1.0] * racks, None, [0] * racks)] * racks


def _alike(values: Sequence[float]) -> list[float]:
    """Replace values that differ by less than the measurement error by their mean, since plans for
    equal hosts are easier to find and certify."""
    order, found = sorted(range(len(values)), key=lambda k: values[k]), list(values)
    while order:
        same = [k for k in order if values[k] <= values[order[0]] * _SAME_LINK]
        for k in same:
            found[k] = float(np.mean([values[x] for x in same]))
        order = order[len(same):]
    return found


def _carried(group: Group, host_of: Sequence[int], weights: Sequence[float], only: int | None,
             rack_of: Sequence[int]) -> float:
    """Return GB/s per direction of host `only` while it exchanges with all other hosts of its rack
    in proportion to `weights`; if None, of each host while all hosts of a rack exchange."""
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
    """Return the median seconds of an exchange of ``size(s, r)`` bytes from rank s to rank r."""
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
    """Return a function that performs an exchange with `there[r]` bytes to rank r and `back[r]`
    bytes from rank r."""
    transport = transport_of(group)
    send = torch.zeros(sum(there), dtype=torch.uint8)
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    return lambda: transport.exchange(send, there, recv, back)
