"""A topology as arrays over ranks (memory domains, hosts, racks, costs per byte), and classes of
interchangeable ranks, over which a relaxation may average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partialmethod
from typing import Any

import numpy as np

from oper.topology import Topology

# Terms of a phase's load on one rank. `memory` and `compute` add up, since one core or one kernel
# does both. This sum, each direction of each link class, and the access to host memory run
# concurrently. In phases with an exchange between hosts it is different: messages are written
# before they are sent and used after they have arrived, so that a rank's own work adds to the time
# of either direction.
TERMS = ("memory", "compute", "link_in", "link_out", "cross_in", "cross_out", "host_memory",
         "rack_in", "rack_out")
REQUEST = "request"  # phase in which hosts request rows from each other, before forward
REFRESH = "refresh"  # phase in which hosts send changed rows to copies, after update
#: Phases in which hosts send each other messages.
EXCHANGES = (REQUEST, "forward", "update", REFRESH)
GROUPS = ("local", *TERMS[2:])


class Term:
    """Indices of `TERMS`."""

    MEMORY, COMPUTE, LINK_IN, LINK_OUT, CROSS_IN, CROSS_OUT, HOST_MEMORY, RACK_IN, RACK_OUT = (
        range(len(TERMS)))


@dataclass(frozen=True, eq=False)
class Machine:
    """Arrays over the ranks 0..W-1 of a topology.

    Attributes:
        topology: the topology.
        domain: int64 [W], index of the rank's memory domain.
        host: int64 [W], index 0..num_hosts-1 of the rank's host.
        num_domain: float64 [W], ranks of the same domain, including the rank itself.
        num_host: float64 [W], ranks of the same host, including the rank itself.
        rack: int64 [W], index of the rank's rack; 0 if the topology has no racks.
        num_rack: float64 [W], ranks of the same rack, including the rank itself.
        seconds_per_unit: float64 [9, W], by term: seconds per byte, or per nanosecond of compute,
            for the result of `on_links`.
        capacity_bytes: float64 [num_domains], memory for tables.
        host_capacity_bytes: float64 [num_hosts], host memory for tables (0 = none).
    """

    topology: Topology
    domain: np.ndarray
    host: np.ndarray
    num_domain: np.ndarray
    num_host: np.ndarray
    rack: np.ndarray
    num_rack: np.ndarray
    seconds_per_unit: np.ndarray
    capacity_bytes: np.ndarray
    host_capacity_bytes: np.ndarray

    @property
    def world_size(self) -> int:
        """Number of ranks W."""
        return self.domain.size

    def local_groups(self, phases: tuple[str, ...]) -> np.ndarray:
        """For each phase, which groups of terms include a rank's own memory and compute time;
        bool [P, 8]."""
        links = ("cross",) * bool(self.host.any()) + ("rack",) * self.has_racks
        return np.array([[g == "local" or (p in EXCHANGES and g.startswith(links)) for g in GROUPS]
                         for p in phases], bool)

    @cached_property
    def shared_terms(self) -> tuple[tuple[int, ...], ...]:
        """Terms of links that the ranks of a host share, and of links that those of a rack share.
        """
        of_host = self.topology.hosts_share_links and (self.num_host > 1).any()
        return ((Term.CROSS_IN, Term.CROSS_OUT) if of_host else (),
                (Term.RACK_IN, Term.RACK_OUT) if self.has_racks else ())

    @cached_property
    def has_racks(self) -> bool:
        """Whether there are several racks."""
        return bool(self.rack.any())

    def on_links(self, units: np.ndarray) -> np.ndarray:
        """Replace units on shared links by their mean over the ranks that share the link.

        Each rank waits for all bytes of the link. Therefore `seconds_per_unit` of a shared link is
        the time of a byte times the number of its ranks, so that the mean gives the time of all
        bytes. float64 [..., 9, W] -> the same shape.
        """
        of_host, of_rack = self.shared_terms
        if not of_host and not of_rack:
            return units
        out = units.copy()
        for term in of_host:
            out[..., term, :] = self.host_sum(units[..., term, :]) / self.num_host
        for term in of_rack:
            out[..., term, :] = self.rack_sum(units[..., term, :]) / self.num_rack
        return out

    def seconds(self, units: np.ndarray) -> np.ndarray:
        """Convert units (bytes, or nanoseconds of compute) to seconds by term and rank.

        float64 [..., 9, W] -> the same shape.
        """
        return self.on_links(units) * self.seconds_per_unit

    def _sum(self, values: np.ndarray, level: str) -> np.ndarray:
        """Sum over the ranks of each rank's domain, host or rack; float64 [..., W] -> [..., W]."""
        group, starts = self._groups[level]
        if starts is not None:
            return np.add.reduceat(values, starts, axis=-1)[..., group]
        member = (group[:, None] == np.arange(group.max() + 1)).astype(float)
        return (values @ member)[..., group]

    domain_sum = partialmethod(_sum, level="domain")
    host_sum = partialmethod(_sum, level="host")
    rack_sum = partialmethod(_sum, level="rack")

    @cached_property
    def _groups(self) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """By level, the group of each rank, and the first rank of each group if groups are
        contiguous. Ranks are numbered domain by domain and domains host by host, so all groups are
        contiguous except a host that is listed twice and a rack of hosts that are not consecutive.
        """
        found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        for level, group in (("domain", self.domain), ("host", self.host), ("rack", self.rack)):
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            ascending = starts.size == group[-1] + 1 and (np.diff(group) >= 0).all()
            found[level] = group, starts if ascending else None
        return found

    def elsewhere_on_host(self, values: np.ndarray) -> np.ndarray:
        """Sum over the other domains of each rank's host; float64 [..., W] -> [..., W]."""
        rest = self.host_sum(values) - self.domain_sum(values)
        return np.where(self.num_host > self.num_domain, rest, 0.0)  # exact zero, not a remainder

    def other_hosts(self, values: np.ndarray) -> np.ndarray:
        """Sum over all other hosts; float64 [..., W] -> [..., W]."""
        rest = values.sum(axis=-1, keepdims=True) - self.host_sum(values)
        return np.where(self.num_host < self.world_size, rest, 0.0)

    def other_racks(self, values: np.ndarray) -> np.ndarray:
        """Sum over all other racks; float64 [..., W] -> [..., W]."""
        return values.sum(axis=-1, keepdims=True) - self.rack_sum(values)

    def per_domain(self, values: np.ndarray) -> np.ndarray:
        """Sum per domain; float64 [W] -> [num_domains]."""
        return np.bincount(self.domain, values, minlength=self.capacity_bytes.size)

    def per_host(self, values: np.ndarray) -> np.ndarray:
        """Sum per host; float64 [W] -> [num_hosts]."""
        return np.bincount(self.host, values, minlength=self.host_capacity_bytes.size)

    def memory_used(self, held: np.ndarray, host_held: np.ndarray) -> np.ndarray:
        """Return the used share of each domain's memory, then of each host's, float64
        [num_domains + num_hosts].

        Args:
            held, host_held: float64 [W], bytes in domain memory and host memory, by the rank that
                they are attributed to.
        """
        return np.concatenate([
            self.per_domain(held) / np.maximum(self.capacity_bytes, 1.0),
            self.per_host(host_held) / np.maximum(self.host_capacity_bytes, 1.0)])


def make_machine(topology: Topology, reserve_bytes: int | tuple[int, ...] = 0,
                 memory_bytes: int | tuple[int, ...] | None = None) -> Machine:
    """Make the arrays of `topology`.

    Args:
        topology: the machine.
        reserve_bytes: memory that tables may not use, per rank.
        memory_bytes: upper limit of the remaining memory, per rank; None = no limit.
    """
    domain = np.array(topology.domain_of(), np.int64)
    hosts = sorted({d.host for d in topology.domains})
    host = np.array([hosts.index(topology.domains[k].host) for k in domain], np.int64)
    near = np.bincount(domain)[domain].astype(float)
    rack_of = {h: k for k, rack in enumerate(topology.racks) for h in rack.hosts}
    rack = np.array([rack_of.get(topology.domains[k].host, 0) for k in domain], np.int64)
    in_rack = np.bincount(rack)[rack].astype(float)
    unit = np.zeros((len(TERMS), domain.size))
    for r, k in enumerate(domain):
        d = topology.domains[k]
        unit[Term.MEMORY, r] = near[r] / (d.read_gbps * 1e9)
        unit[Term.COMPUTE, r] = 1e-9
        unit[[Term.LINK_IN, Term.LINK_OUT], r] = 1 / (d.link_gbps * 1e9)
        unit[[Term.CROSS_IN, Term.CROSS_OUT], r] = 1 / (d.cross_gbps * 1e9)
    if topology.hosts_share_links:
        of_host = np.bincount(host, 1 / unit[Term.CROSS_IN]) / np.bincount(host)
        unit[[Term.CROSS_IN, Term.CROSS_OUT]] = 1 / of_host[host]
    if topology.racks:
        uplink = np.array([x.uplink_gbps for x in topology.racks])
        unit[[Term.RACK_IN, Term.RACK_OUT]] = in_rack / (uplink[rack] * 1e9)
    if topology.host_gbps:
        unit[Term.HOST_MEMORY] = 1 / (topology.host_gbps * 1e9)
    capacity = np.array([d.memory_bytes for d in topology.domains], float)
    capacity -= np.bincount(domain, np.broadcast_to(reserve_bytes, domain.size))
    if memory_bytes is not None:
        cap = np.bincount(domain, np.broadcast_to(memory_bytes, domain.size))
        capacity = np.minimum(capacity, cap)
    return Machine(topology, domain, host, near, np.bincount(host)[host].astype(float), rack,
                   in_rack, unit, capacity, np.full(len(hosts), float(topology.host_memory_bytes)))


def by_group(loads: np.ndarray, has_local: np.ndarray) -> np.ndarray:
    """Add up terms by the groups that run concurrently (`GROUPS`).

    Args:
        loads: float64 [..., 9, W], by term.
        has_local: bool [..., 8], which groups include the rank's own memory and compute.

    Returns:
        float64 [..., 8, W].
    """
    local = (loads[..., Term.MEMORY, :] + loads[..., Term.COMPUTE, :])[..., None, :]
    out = local * has_local[..., None]
    out[..., 1:, :] += loads[..., Term.LINK_IN:, :]
    return np.asarray(out)


def add_wire(units: np.ndarray, machine: Machine) -> None:
    """Add the ranks' own time for sending and receiving between hosts to their compute, in place.

    Args:
        units: float64 [..., 9, W], by term and rank.
    """
    units[..., Term.COMPUTE, :] += machine.topology.costs.wire_ns * (
        units[..., Term.CROSS_OUT, :] + units[..., Term.CROSS_IN, :])


@dataclass(frozen=True, slots=True, eq=False)
class RankClasses:
    """Classes of interchangeable ranks, of interchangeable domains and of interchangeable hosts.

    Attributes:
        of_rank: int64 [W], class of each rank.
        ranks: the ranks of each class.
        of_domain: int64 [num_domains], class of each domain.
        of_host: int64 [num_hosts], class of each host.
    """

    of_rank: np.ndarray
    ranks: tuple[np.ndarray, ...]
    of_domain: np.ndarray
    of_host: np.ndarray

    @property
    def num_domain_classes(self) -> int:
        """Number of domain classes."""
        return int(self.of_domain.max()) + 1

    @property
    def num_host_classes(self) -> int:
        """Number of host classes."""
        return int(self.of_host.max()) + 1


def rank_classes(machine: Machine, distinguished: Iterable[Iterable[int]] = ()) -> RankClasses:
    """Partition the ranks so that permuting a class leaves the machine unchanged.

    Args:
        distinguished: sets of ranks named by constraints; their members are not merged with other
            ranks.

    A rank is described by its domain's constants and by which sets name it, a domain by its ranks,
    a host by its domains, a rack by its hosts. Ranks with equal descriptions at all levels can be
    swapped, because links depend only on whether two ranks share a domain, a host or a rack. So the
    mean load over a class equals the load of a plan made symmetric by averaging, and it depends on
    a plan only through the amount that each class owns.
    """
    sets = [frozenset(s) for s in distinguished]
    domains = machine.topology.domains
    marks = [tuple(r in s for s in sets) for r in range(machine.world_size)]
    capacity = machine.capacity_bytes.tolist()  # after limits for single ranks in constraints
    of_domain = [(capacity[k], d.read_gbps, d.cache_gbps, d.cache_bytes, d.link_gbps,
                  d.cross_gbps, tuple(sorted(marks[r] for r in d.ranks)))
                 for k, d in enumerate(domains)]
    of_host = {host: tuple(sorted(of_domain[k] for k, d in enumerate(domains) if d.host == host))
               for host in {d.host for d in domains}}
    of_rack = {h: (rack.uplink_gbps, tuple(sorted(of_host[x] for x in rack.hosts)))
               for rack in machine.topology.racks for h in rack.hosts}
    key_of_host = {host: (found, of_rack.get(host)) for host, found in of_host.items()}
    domain_keys = [(of_domain[k], key_of_host[d.host]) for k, d in enumerate(domains)]
    rank_keys = [(domain_keys[k], marks[r]) for r, k in enumerate(machine.domain.tolist())]
    of_rank = _numbered(rank_keys)
    ranks = tuple(np.flatnonzero(of_rank == c) for c in range(int(of_rank.max()) + 1))
    return RankClasses(of_rank, ranks, _numbered(domain_keys),
                       _numbered([key_of_host[h] for h in sorted(of_host)]))


def _numbered(keys: Sequence[Any]) -> np.ndarray:
    """Number the keys in the order of first occurrence, equal keys alike; int64 [N]."""
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[k] for k in keys], np.int64)


def neighbourhoods(machine: Machine) -> tuple[np.ndarray, str]:
    """Groups of ranks separated by the slowest links: hosts, or on a single host memory domains.

    Returns:
        Index of each rank's group, int64 [W], and the term of the links that come in from other
            groups, ``"cross_in"`` or ``"link_in"``.
    """
    if (machine.host != machine.host[0]).any():
        return machine.host, "cross_in"
    return machine.domain, "link_in"


def first_neighbourhood(machine: Machine) -> list[int]:
    """The ranks of the first host; on a single host, of the first memory domain."""
    of_rank, _ = neighbourhoods(machine)
    return [int(r) for r in np.flatnonzero(of_rank == of_rank[0])]


def copy_sets(machine: Machine) -> list[tuple[int, ...]]:
    """Sets with one rank of every host: the first rank of each host, the second, and so on.

    Empty if there is only one host, or hosts have only one rank.
    """
    hosts = [np.flatnonzero(machine.host == h) for h in range(machine.host_capacity_bytes.size)]
    most = max(h.size for h in hosts)
    if len(hosts) == 1 or most == 1:
        return []
    return [tuple(int(h[n % h.size]) for h in hosts) for n in range(most)]
