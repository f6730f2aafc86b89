"""What the exchange between hosts costs: messages, bytes, and what every host's link carries.

Processes on one machine exchange over its loopback interface: real processors, copies and system
calls, but no wire. What a wire carries is measured by ranks of several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress, run_workers
from oper.bench.core.planning import gather, slowest, world
from oper.bench.core.record import elapsed
from oper.topology import Costs, Topology

_HEADER_BYTES, _PAYLOAD_BYTES = 1024, 4 << 20  # to every other rank
_ROUNDS, _PER_ROUND = 13, 4
_PROBE_S, _REPEATS = 0.3, 3  # seconds that a probe should last, and how often it is repeated
_MOST_BYTES = 1 << 30  # cap on what a host sends per probe, for fast links
_SAME_LINK = 1.08  # measurements of the same link differ by up to this factor


def measure_network(world_size: int) -> dict[str, float]:
    """Costs of an exchange among so many processes.

    Returns:
        ``meeting_us`` (a header and a small payload) and ``ns_per_byte`` that a rank sends or
        receives, both directions at once.
    """
    found, = run_workers(measure, [{}], world_size)
    return {k: float(v) for k, v in found.items()}


def measure(case: Mapping[str, Any], progress: Progress) -> dict[str, float]:
    """The worker function. Collective."""
    progress("exchanging headers and payloads")
    small, large = exchange_s(_HEADER_BYTES), exchange_s(_PAYLOAD_BYTES)
    both_ways = 2 * (world()[1] - 1) * (_PAYLOAD_BYTES - _HEADER_BYTES)
    return {"meeting_us": 2e6 * small, "ns_per_byte": max(0.0, large - small) * 1e9 / both_ways}


def meeting_us() -> float:
    """Microseconds of a header and a small payload. Collective."""
    return 2e6 * exchange_s(_HEADER_BYTES)


def exchange_s(num_bytes: int) -> float:
    """Median seconds of an exchange in which every rank sends so many bytes to every other one.

    Exchanges follow one another without a barrier, as in a step: ranks that leave a barrier at
    different times would count the difference. The first round warms the connections up.
    Collective.
    """
    rank, world_size = world()
    sizes = [0 if r == rank else num_bytes for r in range(world_size)]
    exchange = _exchange(sizes, sizes)
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_PER_ROUND):
            exchange()
        taken.append((time.perf_counter() - begin) / _PER_ROUND)
    return float(np.median(slowest(taken[1:])))


def link_gbps(host_of: Sequence[int]) -> list[float]:
    """GB/s of payload of every host's link, in each direction, all of them busy in both.

    Each host in turn exchanges with all others, while these do not exchange with each other; then
    again with sizes proportional to the measured links, because with equal sizes the slowest link
    decides when the exchange ends. Finally all hosts exchange at once. What this costs the slowest
    link (congestion, a slower path between switches) is deducted from every link in proportion.
    Collective.

    Args:
        host_of: host of each rank, numbered from 0.
    """
    num_hosts = max(host_of) + 1
    if num_hosts == 1:
        return [0.0]
    equal = [1.0] * num_hosts
    alone = [_carried(host_of, equal, h) for h in range(num_hosts)]
    alone = [_carried(host_of, alone, h) for h in range(num_hosts)]
    together = _carried(host_of, equal, None)
    return [x * min(1.0, together / min(alone)) for x in _alike(alone)]


def _alike(values: Sequence[float]) -> list[float]:
    """Replace values within measurement error of each other by their mean, because plans for equal
    hosts are easier to find and to prove."""
    order, found = sorted(range(len(values)), key=lambda k: values[k]), list(values)
    while order:
        group = [k for k in order if values[k] <= values[order[0]] * _SAME_LINK]
        for k in group:
            found[k] = float(np.mean([values[x] for x in group]))
        order = order[len(group):]
    return found


def _carried(host_of: Sequence[int], weights: Sequence[float], only: int | None) -> float:
    """GB/s in each direction of host `only`, which exchanges with all others in proportion to their
    `weights`. With None, of every host while all exchange with all."""
    num_ranks = np.bincount(host_of)

    def size(s: int, r: int, total: float) -> int:
        a, b = host_of[s], host_of[r]
        if a == b or only not in (None, a, b):
            return 0
        other = b if only in (None, a) else a
        rest = sum(weights) - weights[a if only is None else only]
        return max(1, round(total * weights[other] / rest / num_ranks[a] / num_ranks[b]))

    total = float(_PAYLOAD_BYTES)
    while True:
        seconds = _median_s(lambda s, r, total=total: size(s, r, total))  # type: ignore[misc]
        if seconds > _PROBE_S / 2 or total >= _MOST_BYTES:
            return total / seconds / 1e9
        total = min(_MOST_BYTES, total * min(8.0, _PROBE_S / max(seconds, 1e-6)))


def _median_s(size: Callable[[int, int], int]) -> float:
    """Median seconds of exchanges, one by one, in which s sends ``size(s, r)`` bytes to r."""
    rank, world_size = world()
    exchange = _exchange([size(rank, r) for r in range(world_size)],
                         [size(s, rank) for s in range(world_size)])
    taken = []
    for _ in range(_REPEATS):
        gather(None)
        taken.append(elapsed(exchange))
    return float(np.median(slowest(taken)))


def _exchange(there: list[int], back: list[int]) -> Callable[[], None]:
    """A function that repeats one exchange, of these bytes to and from each rank."""
    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.group.transport import transport_of

    transport = transport_of(ProcessGroup())
    send = torch.zeros(sum(there), dtype=torch.uint8)
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    return lambda: transport.exchange(send, there, recv, back)


def across_hosts(shared: Topology, network: Mapping[str, float]) -> Topology:
    """The ranks of a measured memory domain as hosts of their own.

    Args:
        shared: what ranks cost that share memory.
        network: of `measure_network`.
    """
    world_size, here = shared.world_size, shared.domains[0]
    each = replace(here, ranks=(0,), memory_bytes=here.memory_bytes // world_size,
                   read_gbps=here.read_gbps / world_size, cache_gbps=here.cache_gbps / world_size)
    # Ranks spend the time of a byte themselves: a link of twice that speed never binds.
    gbps = 1.0 / max(network["ns_per_byte"], 1e-3)
    return of_hosts([replace(shared, domains=(each,))] * world_size, [gbps] * world_size, network)


def of_hosts(hosts: Sequence[Topology], gbps: Sequence[float], network: Mapping[str, float]
             ) -> Topology:
    """Measured hosts as one cluster; costs are the means of theirs.

    Args:
        hosts: per host, the costs of ranks that share its memory.
        gbps: GB/s that its link carries in each direction, shared by its ranks.
        network: ``meeting_us`` and ``ns_per_byte``.
    """
    domains, begin = [], 0
    for host, (here, carried) in enumerate(zip(hosts, gbps, strict=True)):
        end = begin + here.world_size
        domains.append(replace(here.domains[0], ranks=tuple(range(begin, end)), host=host,
                               cross_gbps=carried / here.world_size))
        begin = end
    costs = {f.name: round(float(np.mean([getattr(h.costs, f.name) for h in hosts])), 3)
             for f in fields(Costs)}
    costs |= {"phase_us": round(network["meeting_us"], 2),
              "wire_ns": round(network["ns_per_byte"], 3),
              "far_ns": costs["far_ns"] or Topology.of_domains(range(2)).costs.far_ns}
    return replace(hosts[0], name=f"measured-hosts-{len(hosts)}", domains=tuple(domains),
                   costs=Costs(**costs))
