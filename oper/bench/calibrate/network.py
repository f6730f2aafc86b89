"""The costs of an exchange between hosts, and ``oper calibrate`` on several hosts.

Processes on one machine exchange over its loopback interface: real processors, copies and system
calls, but no wire. The bandwidth of real links is measured by `oper.shmem.group.links`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from oper.bench.core.launch import Progress, run_workers
from oper.bench.core.planning import gather, slowest
from oper.errors import InvalidInputError
from oper.topology import Costs, Rack, Topology
from oper.train.model import ranks

_HEADER_BYTES, _PAYLOAD_BYTES = 1024, 4 << 20  # to every other rank
_ROUNDS, _PER_ROUND = 13, 4
_LOOPBACK_RANKS = 2  # enough to measure what a byte costs its sender and receiver


def measure_network(world_size: int) -> dict[str, float]:
    """Costs of an exchange among `world_size` processes.

    Returns:
        ``phase_us`` (a header and a small payload) and ``ns_per_byte`` that a rank sends or
        receives, both directions at once.
    """
    found, = run_workers([Exchange()], world_size)
    return found


@dataclass(frozen=True, slots=True)
class Exchange:
    """The case that `measure_network` runs in every process."""

    name: ClassVar[str] = "network"

    def measure(self, progress: Progress) -> dict[str, float]:
        """Exchange headers and payloads. Collective."""
        progress("exchanging headers and payloads")
        small, large = exchange_s(_HEADER_BYTES), exchange_s(_PAYLOAD_BYTES)
        both_ways = 2 * (ranks()[1] - 1) * (_PAYLOAD_BYTES - _HEADER_BYTES)
        return {"phase_us": 2e6 * small, "ns_per_byte": max(0.0, large - small) * 1e9 / both_ways}


def exchange_s(num_bytes: int) -> float:
    """Median seconds of an exchange in which every rank sends `num_bytes` to every other rank.

    Exchanges follow one another without a barrier, as in a step: after a barrier the difference in
    the times at which ranks leave it would be counted too. The first round warms the connections
    up. Collective.
    """
    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.group.links import repeated_exchange

    rank, world_size = ranks()
    sizes = [0 if r == rank else num_bytes for r in range(world_size)]
    exchange = repeated_exchange(ProcessGroup(), sizes, sizes)
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_PER_ROUND):
            exchange()
        taken.append((time.perf_counter() - begin) / _PER_ROUND)
    return float(np.median(slowest(taken[1:])))


def across_hosts(shared: Topology, network: Mapping[str, float]) -> Topology:
    """A topology in which each rank of a measured memory domain is a host of its own.

    Args:
        shared: measured costs of ranks that share memory.
        network: the result of `measure_network`.
    """
    world_size, here = shared.world_size, shared.domains[0]
    each = replace(here, ranks=(0,), memory_bytes=here.memory_bytes // world_size,
                   read_gbps=here.read_gbps / world_size, cache_gbps=here.cache_gbps / world_size)
    # Ranks spend the time of a byte themselves: a link of twice that speed never binds.
    gbps = 1.0 / max(network["ns_per_byte"], 1e-3)
    return of_hosts([replace(shared, domains=(each,))] * world_size, [gbps] * world_size, network)


def of_hosts(hosts: Sequence[Topology], gbps: Sequence[float], network: Mapping[str, float],
             racks: tuple[Rack, ...] = ()) -> Topology:
    """Combine measured hosts into one cluster whose costs are the means over the hosts.

    Args:
        hosts: per host, the costs of ranks that share its memory.
        gbps: GB/s that its link carries in each direction, shared by its ranks.
        network: ``phase_us`` and ``ns_per_byte``.
        racks: groups of hosts that share an uplink, if any.
    """
    domains, begin = [], 0
    for host, (here, carried) in enumerate(zip(hosts, gbps, strict=True)):
        end = begin + here.world_size
        domains.append(replace(here.domains[0], ranks=tuple(range(begin, end)), host=host,
                               cross_gbps=carried / here.world_size))
        begin = end
    costs = {f.name: round(float(np.mean([getattr(h.costs, f.name) for h in hosts])), 3)
             for f in fields(Costs)}
    costs |= {"phase_us": round(network["phase_us"], 2),
              "wire_ns": round(network["ns_per_byte"], 3),
              "far_ns": costs["far_ns"] or Topology.of_domains(range(2)).costs.far_ns}
    return replace(hosts[0], name=f"measured-hosts-{len(hosts)}", domains=tuple(domains),
                   costs=Costs(**costs),
                   hosts_share_links=any(h.world_size > 1 for h in hosts), racks=racks)


def measure_hosts(measure_here: Callable[[int], Topology], hosts_per_rack: int = 0) -> Topology:
    """Topology of the hosts in the default process group. Collective.

    Args:
        measure_here: measures a number of ranks that share this host's memory; called on the first
            rank of each host, while the others wait.
        hosts_per_rack: hosts that share an uplink to others, in the order of their ranks; 0: none.

    Raises:
        InvalidInputError: the ranks of a host are not numbered consecutively.
    """
    from oper.shmem.group.domains import find_domains
    from oper.shmem.group.groups import ProcessGroup

    domain_of = find_domains(ProcessGroup())
    if sorted(domain_of) != domain_of:
        raise InvalidInputError("cannot calibrate", "hosts of the ranks", domain_of,
                                "ranks numbered host by host", "start them with torchrun")
    rank, _ = ranks()
    mine = None
    if domain_of.index(domain_of[rank]) == rank:
        here = measure_here(domain_of.count(domain_of[rank]))
        mine = here, measure_network(_LOOPBACK_RANKS)["ns_per_byte"]
    found = [x for x in gather(mine) if x is not None]
    hosts = [here for here, _ in found]
    if len(hosts) == 1:
        return hosts[0]
    rack_of = [h // (hosts_per_rack or len(hosts)) for h in range(len(hosts))]
    return joined(hosts, domain_of, rack_of, sum(x for _, x in found) / len(found))


def joined(hosts: Sequence[Topology], host_of: Sequence[int], rack_of: Sequence[int],
           ns_per_byte: float) -> Topology:
    """Measure links, uplinks and phases; returns the hosts as one cluster. Collective.

    Args:
        hosts: per host, the costs of ranks that share its memory.
        host_of: host of each rank.
        rack_of: rack of each host; hosts of several racks share an uplink.
        ns_per_byte: processor time of a rank per byte that it sends or receives.
    """
    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.group.links import link_gbps, uplink_gbps

    network = {"phase_us": 2e6 * exchange_s(_HEADER_BYTES), "ns_per_byte": ns_per_byte}
    links = link_gbps(ProcessGroup(), host_of, rack_of)
    uplinks = uplink_gbps(ProcessGroup(), [rack_of[h] for h in host_of]) if any(rack_of) else []
    return of_hosts(hosts, links, network, tuple(
        Rack(tuple(h for h, k in enumerate(rack_of) if k == rack), gbps)
        for rack, gbps in enumerate(uplinks)))
