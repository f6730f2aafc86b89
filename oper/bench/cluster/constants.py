"""The constants of an emulated cluster, measured on it: what the planners are told.

What a rank costs by itself comes from ``oper calibrate`` (processes that share this machine). Here
are measured, by all ranks at once: how much slower a rank computes because there are more of them
than cores; what a meeting and a byte cost a rank on links without limit; and what the links carry
with their limits, all hosts sending and receiving at once, headers and congestion included.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from oper.bench.calibrate import network as calibrate_network
from oper.bench.cluster.network import Links, set_rates
from oper.bench.core.planning import gather, slowest, world
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from oper.topology import Costs, Domain, Topology

_PROBE_S = 0.3  # a link is kept busy for so long, several times
_REPEATS = 3
_GATHERS = 24
_MEMORY_BYTES = 8 << 30  # per host, unless a case says otherwise


def measured_topology(links: Links, alone: Topology, memory_bytes: int | None = None
                      ) -> tuple[Topology, dict[str, Any]]:
    """The cluster that this process is a rank of. Collective; leaves the links limited.

    Args:
        links: what it is like.
        alone: constants of processes that share this machine, of ``oper calibrate``.
        memory_bytes: of each rank, for rows and buffers.

    Returns:
        The topology, and what was measured: ``contention``, ``ns_per_byte``, ``meeting_us``,
        ``link_mbits`` by host.
    """
    rank, _ = world()
    unlimited = _unlimited(links, alone.world_size)
    if rank == 0:
        set_rates(links, True)
    meeting_us = calibrate_network.meeting_us()
    gbps = _link_gbps(links)
    found = {"contention": round(unlimited["contention"], 3),
             "ns_per_byte": round(unlimited["ns_per_byte"], 3), "meeting_us": round(meeting_us, 1),
             "link_mbits": [round(8e3 * x, 2) for x in gbps]}
    return _topology(links, alone, found, memory_bytes), found


def _topology(links: Links, alone: Topology, found: dict[str, Any], memory_bytes: int | None
              ) -> Topology:
    here, slower, per_host = alone.domains[0], found["contention"], links.ranks_per_host
    share = per_host / (alone.world_size * slower)
    domains = tuple(
        Domain(tuple(r for r, h in enumerate(links.host_of) if h == host), host,
               _MEMORY_BYTES if memory_bytes is None else memory_bytes * per_host,
               here.read_gbps * share * _cpu(links, host),
               here.cache_gbps * share * _cpu(links, host),
               here.cache_bytes * per_host // max(links.world_size, alone.world_size),
               here.link_gbps * share, mbits / 8e3 / per_host)
        for host, mbits in enumerate(found["link_mbits"]))
    costs = {f.name: getattr(alone.costs, f.name) * slower for f in fields(Costs)
             if f.name.endswith(("_ns", "_us"))}
    far_ns = Topology.of_domains(range(2)).costs.far_ns if not alone.costs.far_ns else 0.0
    return Topology(
        f"cluster-{links.num_hosts}x{per_host}", domains,
        replace(alone.costs, **{**costs, "phase_us": found["meeting_us"],
                                "wire_ns": found["ns_per_byte"],
                                "far_ns": costs["far_ns"] or far_ns * slower}), alone.source)


def _cpu(links: Links, host: int) -> float:
    return links.host_0_cpu if host == 0 else 1.0


@functools.lru_cache(maxsize=8)
def _unlimited(links: Links, base: int) -> dict[str, float]:
    """Costs of a rank that do not depend on the limits; measured once per limit all the same, which
    takes a second and shows what the machine does at the time."""
    rank, world_size = world()
    if rank == 0:
        set_rates(links, False)
    found = calibrate_network.measure({}, lambda text: None)
    few = _gather_s(rank < min(base, world_size))
    every = _gather_s(True)
    return {"ns_per_byte": float(found["ns_per_byte"]), "contention": max(1.0, every / few)}


def _gather_s(takes_part: bool) -> float:
    """Mean seconds of the slowest rank that gathers rows while others do, or not. Collective."""
    rows, at = torch.ones(1 << 17, 64), torch.randint(0, 1 << 17, (1 << 15,))
    gather(None)
    begin = time.perf_counter()
    for _ in range(_GATHERS if takes_part else 0):
        torch.index_select(rows, 0, at)
    return slowest([time.perf_counter() - begin])[0]


def _exchange_s(sizes: Callable[[int, int], int], repeats: int) -> float:
    """Median seconds of an exchange in which s sends `sizes(s, r)` bytes to r. Collective."""
    rank, world_size = world()
    transport = transport_of(ProcessGroup())
    there = [sizes(rank, r) for r in range(world_size)]
    back = [sizes(s, rank) for s in range(world_size)]
    send = torch.zeros(sum(there), dtype=torch.uint8)
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    taken = []
    for _ in range(repeats + 1):
        gather(None)
        begin = time.perf_counter()
        transport.exchange(send, there, recv, back)
        taken.append(time.perf_counter() - begin)
    return float(np.median(slowest(taken[1:])))


def _link_gbps(links: Links) -> list[float]:
    """GB/s of each host's link in each direction, of payload, all of them busy in both."""
    hosts = links.host_of
    groups: list[Sequence[int]] = [range(links.num_hosts)]
    if links.slow_host_share < 1 and links.num_hosts > 2:
        groups = [[0], range(1, links.num_hosts)]
    found = [0.0] * links.num_hosts
    for members in groups:
        among = set(members) if len(members) > 1 else set(range(links.num_hosts))
        mbits = min(links.rates[h] for h in members)
        num_pairs = links.ranks_per_host**2 * (len(among) - 1)
        each = max(1024, round(_PROBE_S * mbits * 1e6 / 8 / num_pairs))

        def size(s: int, r: int, members: Sequence[int] = members, among: set[int] = among,
                 each: int = each) -> int:
            a, b = hosts[s], hosts[r]
            busy = a != b and a in among and b in among and (a in members or b in members)
            return each * busy

        gbps = each * num_pairs / _exchange_s(size, _REPEATS) / 1e9
        for host in members:
            found[host] = gbps
    return found
