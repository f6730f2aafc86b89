"""The constants of an emulated cluster, measured on it: what the planners are told.

What a rank costs by itself comes from ``oper calibrate`` (processes that share this machine). Here
are measured, by all ranks at once: how much slower a rank computes because there are more of them
than cores; what a meeting and a byte cost a rank on links without limit; and what the links carry
with their limits, all hosts sending and receiving at once, headers and congestion included.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import fields, replace
from typing import Any

import torch

from oper.bench.calibrate import network as calibrate_network
from oper.bench.cluster.network import Links, set_rates
from oper.bench.core.planning import gather, slowest, world
from oper.topology import Costs, Domain, Topology

_GATHERS, _ROUNDS = 24, 15
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
    gbps = calibrate_network.link_gbps(links.host_of)
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
    times = [(_gather_s(rank < min(base, world_size)), _gather_s(True)) for _ in range(_ROUNDS)]
    few, every = (statistics.median(column) for column in zip(*times, strict=True))
    return {"ns_per_byte": float(found["ns_per_byte"]), "contention": max(1.0, every / few)}


def _gather_s(takes_part: bool) -> float:
    """Seconds until all ranks that gather rows have done so. Collective."""
    rows, at = torch.ones(1 << 17, 64), torch.randint(0, 1 << 17, (1 << 15,))
    gather(None)
    begin = time.perf_counter()
    for _ in range(_GATHERS if takes_part else 0):
        torch.index_select(rows, 0, at)
    return slowest([time.perf_counter() - begin])[0]
