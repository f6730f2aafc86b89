"""Measure an exchange between hosts, and run ``oper calibrate`` on several hosts.

Processes on one machine exchange messages over its loopback interface, which includes the processor
time of copies and system calls, but no wire. `oper.shmem.group.links` measures real links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from oper.bench.core.launch import Progress, Task, run_workers
from oper.bench.core.planning import gather, slowest
from oper.errors import InvalidInputError
from oper.topology import Costs, Rack, Topology
from oper.train.model import ranks

_HEADER_BYTES, _PAYLOAD_BYTES = 1024, 4 << 20  # to each peer
_ROUNDS, _PER_ROUND = 13, 4
_LOOPBACK_RANKS = 2  # enough to measure the cost of a byte to sender and receiver


def measure_network(world_size: int) -> dict[str, float]:
    """Costs of an exchange among `world_size` processes on this machine.

    Returns:
        ``phase_us``: time (us) of exchanging a header and a small payload. ``ns_per_byte``: time
        (ns) per byte that a rank sends or receives, while it does both.
    """
    found, = run_workers([Task("network", exchange_costs)], world_size)
    return found


def exchange_costs(progress: Progress) -> dict[str, float]:
    """The costs of `measure_network`, for the ranks of this process group. Collective."""
    progress("exchanging headers and payloads")
    small, large = exchange_s(_HEADER_BYTES), exchange_s(_PAYLOAD_BYTES)
    both_ways = 2 * (ranks()[1] - 1) * (_PAYLOAD_BYTES - _HEADER_BYTES)
    return {"phase_us": 2e6 * small, "ns_per_byte": max(0.0, large - small) * 1e9 / both_ways}


def exchange_s(num_bytes: int) -> float:
    """Median time (s) of an exchange in which each rank sends `num_bytes` to every peer.
    Collective.

    Exchanges follow each other without barriers, as in a step. A barrier would add the difference
    between the times at which ranks leave it. The first round warms up and does not count.
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
    """A topology in which each rank of a measured memory domain is a separate host.

    Args:
        shared: measured topology of ranks that share memory, with a single domain.
        network: the result of `measure_network`.
    """
    world_size, here = shared.world_size, shared.domains[0]
    each = replace(here, ranks=(0,), memory_bytes=here.memory_bytes // world_size,
                   read_gbps=here.read_gbps / world_size, cache_gbps=here.cache_gbps / world_size)
    # The loopback interface has no wire: ranks spend ns_per_byte of processor time to send and
    # again to receive. A link of 1 / ns_per_byte is therefore never the bottleneck.
    gbps = 1.0 / max(network["ns_per_byte"], 1e-3)
    return of_hosts([replace(shared, domains=(each,))] * world_size, [gbps] * world_size, network)


def of_hosts(hosts: Sequence[Topology], gbps: Sequence[float], network: Mapping[str, float],
             racks: tuple[Rack, ...] = ()) -> Topology:
    """Combine measured hosts into one cluster, whose costs are the means over the hosts.

    Args:
        hosts: measured topology of each host, with a single domain.
        gbps: bandwidth (GB/s) of each host's link in each direction, shared by its ranks.
        network: ``phase_us`` and ``ns_per_byte``, see `measure_network`.
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
    """Measure the topology of the default process group's hosts. Collective.

    Args:
        measure_here: function from a number of ranks to their measured topology on this host;
            called on each host's first rank, while the host's remaining ranks wait.
        hosts_per_rack: number of consecutive hosts (in rank order) that share an uplink; 0 = no
            racks.

    Raises:
        InvalidInputError: the ranks are not numbered host by host.
    """
    from oper.shmem.group.domains import find_domains
    from oper.shmem.group.groups import ProcessGroup

    domain_of = find_domains(ProcessGroup())
    if sorted(domain_of) != domain_of:
        raise InvalidInputError("cannot calibrate", "host of each rank", domain_of,
                                "ranks numbered host by host", "start the ranks with torchrun")
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
    """Measure links, uplinks and exchanges; returns the hosts as one cluster. Collective.

    Args:
        hosts: measured topology of each host, with a single domain.
        host_of: host of each rank.
        rack_of: rack of each host. With several racks, the hosts of each share its uplink.
        ns_per_byte: processor time (ns) of a rank per byte that it sends or receives.
    """
    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.group.links import link_gbps, uplink_gbps

    network = {"phase_us": 2e6 * exchange_s(_HEADER_BYTES), "ns_per_byte": ns_per_byte}
    links = link_gbps(ProcessGroup(), host_of, rack_of)
    uplinks = uplink_gbps(ProcessGroup(), [rack_of[h] for h in host_of]) if any(rack_of) else []
    return of_hosts(hosts, links, network, tuple(
        Rack(tuple(h for h, k in enumerate(rack_of) if k == rack), gbps)
        for rack, gbps in enumerate(uplinks)))
