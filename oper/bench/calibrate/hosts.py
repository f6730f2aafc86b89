"""``oper calibrate`` on several hosts at once, started by torchrun.

Every host measures by itself what its ranks cost; then all ranks together measure the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from oper.bench.calibrate import network
from oper.bench.core.planning import gather, world
from oper.errors import InvalidInputError, fail
from oper.topology import Rack, Topology

_LOOPBACK_RANKS = 2  # enough to measure what a byte costs its sender and receiver


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def measure_hosts(measure_here: Callable[[int], Topology], hosts_per_rack: int = 0) -> Topology:
    """Topology of the hosts in the default process group. Collective.

    Args:
        measure_here: measures a number of ranks that share this host's memory; called on the first
            rank of each host, while the others wait.
        hosts_per_rack: hosts that share an uplink to others, in the order of their ranks; 0: none.

    Raises:
        InvalidInputError: ranks are not numbered host by host.
    """
    from oper.shmem.group.domains import find_domains
    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.group.links import link_gbps, uplink_gbps

    domain_of = find_domains(ProcessGroup())
    if sorted(domain_of) != domain_of:
        raise InvalidInputError(fail(
            "cannot calibrate", "hosts of the ranks", domain_of, "ranks numbered host by host",
            "start them with torchrun"))
    rank, _ = world()
    mine = None
    if domain_of.index(domain_of[rank]) == rank:
        here = measure_here(domain_of.count(domain_of[rank]))
        mine = here, network.measure_network(_LOOPBACK_RANKS)["ns_per_byte"]
    found = [x for x in gather(mine) if x is not None]
    hosts = [here for here, _ in found]
    if len(hosts) == 1:
        return hosts[0]
    rack_of = [h // (hosts_per_rack or len(hosts)) for h in range(len(hosts))]
    links = link_gbps(ProcessGroup(), domain_of, rack_of)
    uplinks = (uplink_gbps(ProcessGroup(), [rack_of[h] for h in domain_of]) if any(rack_of)
               else [])
    racks = tuple(Rack(tuple(h for h, k in enumerate(rack_of) if k == rack), gbps)
                  for rack, gbps in enumerate(uplinks))
    return network.of_hosts(hosts, links, {
        "phase_us": network.phase_us(),
        "ns_per_byte": sum(x for _, x in found) / len(found)}, racks)
