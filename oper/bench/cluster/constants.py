"""Measure the constants of an emulated cluster, for the planners.

The costs of a single rank come from ``oper calibrate``, for processes that share this machine. With
all ranks active, this module measures how much slower a rank computes because ranks outnumber
cores; the costs per exchange and per byte on unlimited links; and the bandwidth of the limited
links while all hosts send and receive, including headers and congestion.
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
from oper.bench.core.planning import gather, slowest
from oper.topology import Costs, Topology
from oper.train.model import ranks

_GATHERS, _ROUNDS = 24, 15
_MEMORY_BYTES = 8 << 30  # per host, unless a case says otherwise


def measured_topology(links: Links, alone: Topology, memory_bytes: int | None = None
                      ) -> tuple[Topology, dict[str, Any]]:
    """Measure the emulated cluster of this process. Collective; leaves the links limited.

    Args:
        links: the cluster's hosts and link rates.
        alone: what ``oper calibrate`` measures of processes that share this machine.
        memory_bytes: memory of each rank for rows and buffers; None = `_MEMORY_BYTES` per host.

    Returns:
        The topology, and the measured ``contention`` (slowdown of a rank), ``ns_per_byte``,
        ``phase_us``, ``link_mbits`` by host, and with several racks ``uplink_mbits`` by rack; also
        ``assumed``, the names of costs that `alone` lacks, for which defaults are used.
    """
    unlimited = _unlimited(links, alone.world_size)
    if ranks()[0] == 0:
        set_rates(links, True)
    hosts = _hosts(links, alone, unlimited["contention"], memory_bytes)
    made = calibrate_network.joined(hosts, links.host_of, [
        links.rack_of(h) for h in range(links.num_hosts)], unlimited["ns_per_byte"])
    found: dict[str, Any] = {
        **unlimited, "phase_us": made.costs.phase_us,
        "link_mbits": [8e3 * d.cross_gbps * len(d.ranks) for d in made.domains],
        "assumed": [] if alone.costs.far_ns else ["far_ns"]}
    if made.racks:
        found["uplink_mbits"] = [8e3 * rack.uplink_gbps for rack in made.racks]
    return replace(made, name=f"cluster-{links.num_hosts}x{links.ranks_per_host}"), found


def limit(links: Links, is_limited: bool = True) -> None:
    """Apply or remove the links' rate limits. Collective: ranks synchronise before and after."""
    gather(None)
    if ranks()[0] == 0:
        set_rates(links, is_limited)
    gather(None)


def _hosts(links: Links, alone: Topology, slower: float, memory_bytes: int | None
           ) -> list[Topology]:
    """The topology of each host, each as one memory domain.

    A rank's computations take `slower` times as long as in `alone`, which describes the same
    machine with fewer ranks. `memory_bytes` is the memory of a rank, None = the default per host.
    """
    here, per_host = alone.domains[0], links.ranks_per_host
    share = per_host / (alone.world_size * slower)
    far_ns = alone.costs.far_ns or Topology.of_domains(range(2)).costs.far_ns
    costs = replace(alone.costs, **{
        f.name: getattr(replace(alone.costs, far_ns=far_ns), f.name) * slower
        for f in fields(Costs) if f.name.endswith(("_ns", "_us"))})
    return [replace(alone, costs=costs, domains=(replace(
        here, ranks=tuple(range(per_host)),
        memory_bytes=_MEMORY_BYTES if memory_bytes is None else memory_bytes * per_host,
        read_gbps=here.read_gbps * share * cpu, cache_gbps=here.cache_gbps * share * cpu,
        cache_bytes=here.cache_bytes * per_host // max(links.world_size, alone.world_size),
        link_gbps=here.link_gbps * share),))
        for cpu in (links.host_0_cpu, *[1.0] * (links.num_hosts - 1))]


@functools.lru_cache(maxsize=8)
def _unlimited(links: Links, base: int) -> dict[str, float]:
    """``ns_per_byte`` and ``contention`` on unlimited links. Collective.

    ``contention``: the time that a computation takes while all ranks compute / while `base` ranks
    do. Neither depends on `links.mbits`, but they are measured again for every rate: that takes a
    second and reflects the state of the machine at that time.
    """
    rank, world_size = ranks()
    if rank == 0:
        set_rates(links, False)
    found = calibrate_network.exchange_costs(lambda text: None)
    times = [(_gather_s(rank < min(base, world_size)), _gather_s(True)) for _ in range(_ROUNDS)]
    few, every = (statistics.median(column) for column in zip(*times, strict=True))
    return {"ns_per_byte": float(found["ns_per_byte"]), "contention": max(1.0, every / few)}


def _gather_s(takes_part: bool) -> float:
    """Time (s) until all participating ranks have gathered `_GATHERS` times. Collective."""
    rows, at = torch.ones(1 << 17, 64), torch.randint(0, 1 << 17, (1 << 15,))
    gather(None)
    begin = time.perf_counter()
    for _ in range(_GATHERS if takes_part else 0):
        torch.index_select(rows, 0, at)
    return slowest([time.perf_counter() - begin])[0]
