"""The machine that a plan is made for: memory domains, ranks, links and cost constants.

A memory domain is a set of ranks that share one memory and its bandwidth: one GPU, or one NUMA node
with several processes. Ranks are numbered consecutively, domain by domain. docs/reference/files.md
describes the TOML file format.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar

from oper.errors import InvalidInputError, require, require_fields
from oper.ranges import (
    Amount,
    Count,
    Parsed,
    Positive,
    Rule,
    Share,
    one_of,
    rules_of,
)
from oper.support.files import read_toml
from oper.support.kernel import memory_bytes, memory_limit
from oper.support.settings import Reader

_SUFFIXES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
             "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = "a whole number of bytes >= 0, or text like '80GB'"
MAX_RANKS = 1 << 16  # in a topology file, since a typo in `copies` could ask for far too many


def parse_bytes(value: int | float | str) -> int:
    """Parse a size in bytes: a whole number, or text such as ``"80GB"`` or ``"24GiB"``; raises
    InvalidInputError for other values."""
    try:
        text = str(value).strip().upper().replace(" ", "")
        digits = text.rstrip("KMGTIB")
        size = float(digits) * _SUFFIXES[text[len(digits):] or "B"]
    except (KeyError, ValueError):
        size = -1.0
    is_whole = not isinstance(value, float) or value.is_integer()
    if not 0 <= size < 1 << 63 or isinstance(value, bool) or not is_whole:
        raise InvalidInputError("cannot read a size", "value", value, _SIZE,
                                "write bytes, or a number with B, kB, MB, GB or TB (KiB, MiB, ...)")
    return int(size)


#: Bandwidth in GB/s, in a range in which times are finite numbers above 0.
_GBPS = Rule(lambda x: 1e-9 <= x <= 1e15, "a number from 1e-9 to 1e15")
Gbps = Annotated[float, _GBPS]
#: A constant of the cost model, in a range in which times are finite.
Cost = Annotated[float, Rule(lambda x: 0 <= x <= 1e15, "a finite number >= 0, at most 1e15")]
Bytes = Annotated[int, Parsed(parse_bytes, _SIZE)]
Source = Annotated[str, one_of("measured", "published", "assumed")]


@dataclass(frozen=True, slots=True)
class Costs:
    """Calibrated constants of the cost model, all except the bandwidths.

    The model adds these costs to the time of memory traffic (bytes / bandwidth).

    Attributes:
        phase_us: microseconds per phase (kernel launch or call, barrier).
        id_ns: nanoseconds per id in the forward pass (locating the row, loop overhead).
        sort_ns: ns per id in the backward pass (sorting the ids, finding equal ones).
        reduce_ns: ns per id in the backward pass (adding its gradient to the row's sum).
        update_ns: ns per touched row at its owner (merging the ranks' sums, optimizer arithmetic).
        run_ns: ns per distinct row of a rank's batch in the backward pass (beginning its sum,
            writing its slot).
        refresh_ns: ns per changed row that a rank copies into its replica.
        tier_ns: ns per id in the forward and in the backward pass, for tables of several tiers
            (finding the id's position in hotness order, and its tier).
        push_tier_ns: replaces `tier_ns` for tables of several tiers, at least one of them pushed.
        push_ns: ns per pushed id at its reader, in the forward and in the backward pass (finding
            the owner, writing the request).
        push_bag_ns: ns per bag in the forward pass, for tables with both pulled and pushed rows
            (each bag's pulled rows are found separately).
        odd_ns: additional ns for each block of 16 columns that a kernel passes over, per id (in the
            update per touched row), for row widths without a specialised kernel.
        table_us: microseconds per table and phase (scheduling and setting up its task).
        sort_table_us: additional microseconds per table in the backward pass (clearing the sort's
            counters).
        far_ns: ns per id of a pulled tier with owners in other memory domains, at its reader
            (de-duplicating the ids and locating the fetched rows).
        wire_ns: CPU time of a rank in ns per byte that it sends to or receives from other hosts
            (packing, copies, network stack). It does not overlap with the computation of a phase.
        key_ns: ns per id of a dynamic table in the forward pass (hashing it, finding its row).
        key_count_ns: ns per distinct key that has a row, in the update (collecting and counting
            it).
        key_insert_ns: ns per id without a row, in the update (sorting, merging, admitting the key
            and initialising its row).
        warm_share: share of the caches, 0..1, that retains rows and buffers from one batch to the
            next (0 = every batch begins with cold caches).
    """

    phase_us: Cost = 5.0
    id_ns: Cost = 0.0
    sort_ns: Cost = 0.0
    reduce_ns: Cost = 0.0
    update_ns: Cost = 0.0
    run_ns: Cost = 0.0
    refresh_ns: Cost = 0.0
    tier_ns: Cost = 0.0
    push_tier_ns: Cost = 0.0
    push_ns: Cost = 0.0
    push_bag_ns: Cost = 0.0
    odd_ns: Cost = 0.0
    table_us: Cost = 0.0
    sort_table_us: Cost = 0.0
    far_ns: Cost = 0.0
    wire_ns: Cost = 0.0
    key_ns: Cost = 0.0
    key_count_ns: Cost = 0.0
    key_insert_ns: Cost = 0.0
    warm_share: Share = 0.0

    def __post_init__(self) -> None:
        require_fields(self, "invalid costs", "correct this number", *rules_of(self))


@dataclass(frozen=True, slots=True)
class Domain:
    """One memory domain; `ranks` and `host` are global numbers, other fields as in the TOML file.
    """

    ranks: tuple[int, ...]
    host: int
    memory_bytes: Positive
    read_gbps: Gbps
    cache_gbps: Gbps
    cache_bytes: Count
    link_gbps: Gbps
    cross_gbps: Gbps


@dataclass(frozen=True, slots=True)
class Rack:
    """Hosts that share one uplink to all other racks; fields as in the TOML file."""

    hosts: tuple[int, ...]
    uplink_gbps: Gbps


_Part = TypeVar("_Part", Domain, Rack)


@dataclass(frozen=True, slots=True)
class Topology:
    """Memory domains and constants of one machine.

    Attributes:
        name: name of the topology.
        domains: memory domains, whose ranks are 0..W-1 in order.
        costs: constants of the cost model.
        source: origin of the figures: ``"measured"``, ``"published"`` or ``"assumed"``.
        host_memory_bytes: bytes per host of slower memory that may store rows (0 = none).
        host_gbps: bandwidth of that memory in GB/s per rank.
        hosts_share_links: whether all ranks of a host share one link to other hosts, whose
            bandwidth is the sum of their `cross_gbps`; otherwise each rank has its own link.
        racks: the racks of all hosts; empty if every pair of hosts is connected equally.

    Raises:
        InvalidInputError: a field has an invalid value.
    """

    name: str
    domains: tuple[Domain, ...]
    costs: Costs = field(default_factory=Costs)
    source: Source = "assumed"
    host_memory_bytes: Count = 0
    host_gbps: Amount = 0.0
    hosts_share_links: Annotated[bool, Rule(lambda x: type(x) is bool, "true or false")] = False
    racks: tuple[Rack, ...] = ()

    def __post_init__(self) -> None:
        what = f"invalid topology {self.name!r}"
        numbered = [r for d in self.domains for r in d.ranks]
        if not numbered or numbered != list(range(len(numbered))):
            raise InvalidInputError(what, "ranks", numbered, "0..W-1 in order, at least one",
                                    "number the ranks of all domains consecutively")
        require(what, "correct this field", *(
            (f"{name}[{k}].{field}", getattr(part, field), is_right, expected)
            for name, parts in (("domain", self.domains), ("rack", self.racks))
            for k, part in enumerate(parts) for field, is_right, expected in rules_of(part)))
        listed = sorted(h for rack in self.racks for h in rack.hosts)
        require(what, "list every host in exactly one rack, or remove all [[rack]] entries", (
            "hosts of racks", listed,
            not self.racks or listed == sorted({d.host for d in self.domains}),
            "the hosts of the domains, each once"))
        require_fields(
            self, what, "correct this field", *rules_of(self),
            ("host_gbps", not self.host_memory_bytes or bool(self.host_gbps),
             "> 0 GB/s when host_memory_bytes > 0"),
            ("host_gbps", self.host_gbps == 0 or _GBPS.allows(self.host_gbps), _GBPS.expected))

    @property
    def world_size(self) -> int:
        """Number of ranks W."""
        return sum(len(d.ranks) for d in self.domains)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len({d.host for d in self.domains})

    def domain_of(self) -> list[int]:
        """Return the index of each rank's domain, int [W]."""
        return [k for k, d in enumerate(self.domains) for _ in d.ranks]

    def divided(self, count: int) -> Topology:
        """Return the topology for one of `count` groups of consecutive hosts.

        All groups use the same plan and wait for each other. Where groups differ, each host
        therefore has the least memory and bandwidth that the hosts at its position have in any
        group, and each rack the slowest uplink.

        Raises:
            InvalidInputError: `count` does not divide the number of hosts, or the groups would
                differ in ranks per host, memory domains or hosts of racks.
        """
        if count == 1:
            return self

        def check(is_right: bool) -> None:
            require(f"cannot divide the hosts of topology {self.name!r}",
                    "choose a number that divides the hosts into groups of equal hosts and racks",
                    ("number of groups", count, is_right,
                     f"a divisor of {self.num_hosts} hosts that makes equal groups"))

        check(count > 1 and self.num_hosts % count == 0)
        size = self.world_size // count
        groups = [self._group(range(k * size, (k + 1) * size)) for k in range(count)]
        shapes = [([(d.ranks, d.host) for d in domains], [r.hosts for r in racks])
                  for domains, racks in groups]
        members, hosts = zip(*shapes[0][0], strict=True)
        check(all(x == shapes[0] for x in shapes) and len({*hosts}) * count == self.num_hosts
              and [r for ranks in members for r in ranks] == list(range(size)))
        domains, racks = (tuple(_least(x) for x in zip(*parts, strict=True))
                          for parts in zip(*groups, strict=True))
        which = "one" if all(x == groups[0] for x in groups) else "slowest hosts"
        return replace(self, name=f"{self.name}, {which} of {count} groups", domains=domains,
                       racks=racks)

    def _group(self, ranks: range) -> tuple[tuple[Domain, ...], tuple[Rack, ...]]:
        """Return the domains that begin at the given ranks, and their racks, numbered from 0."""
        inside = [d for d in self.domains if d.ranks[0] in ranks]
        index = {h: k for k, h in enumerate(sorted({d.host for d in inside}))}
        domains = tuple(replace(d, ranks=tuple(r - ranks.start for r in d.ranks),
                                host=index[d.host]) for d in inside)
        racks = tuple(replace(x, hosts=tuple(index[h] for h in x.hosts if h in index))
                      for x in self.racks if not index.keys().isdisjoint(x.hosts))
        return domains, racks if len(racks) > 1 else ()

    @staticmethod
    def from_toml(path: str | os.PathLike[str]) -> Topology:
        """Read a topology file.

        Raises:
            FileFormatError: the file is not TOML.
            InvalidInputError: a field is unknown, missing or has an invalid value.
        """
        return Topology.from_dict(read_toml(path, f"cannot read {os.fspath(path)!r} as a topology"))

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Topology:
        """Make a topology from a parsed TOML file; raises InvalidInputError as `from_toml` does."""
        name = value.get("name")
        what = "invalid topology" + (f" {name!r}" if isinstance(name, str) else "")
        file = Reader(lambda name, value, expected: InvalidInputError(
            what, name, value, expected, "correct the topology file")
                      ).build(_File, value)
        domains: list[Domain] = []
        for entry in file.domain:
            domains += entry.domains(sum(len(d.ranks) for d in domains))
        return Topology(file.name, tuple(domains), file.costs, file.source, file.host_memory_bytes,
                        file.host_gbps, file.hosts_share_links, file.rack)

    @staticmethod
    def this_host(world_size: int) -> Topology:
        """Return a topology of `world_size` processes on this machine: one memory domain.

        Tables may take half of the memory, or of the control group's limit (of a container or job)
        if that is lower. Bandwidths and costs are assumed; ``oper calibrate`` measures them.
        """
        memory = memory_bytes("MemTotal") or 8e9
        memory = min(memory, memory_limit() or memory)
        domain = Domain(tuple(range(world_size)), 0, max(1, int(memory / 2)),
                        40.0, 120.0, 32 << 20, 40.0, 40.0)
        # Order of magnitude of one current server core; measured values come from calibration.
        costs = Costs(phase_us=30.0, id_ns=3.0, sort_ns=5.0, reduce_ns=6.0, update_ns=12.0)
        return Topology(f"this-host-{world_size}", (domain,), costs, "assumed")

    @staticmethod
    def of_domains(domain_of: Sequence[int]) -> Topology:
        """Return a topology of hosts like this one with assumed constants of a 10 Gbit/s network.

        Args:
            domain_of: index of each rank's memory domain, int [W]. Each domain is a host, whose
                ranks share its link. A domain of non-consecutive ranks becomes several hosts, which
                divide its memory.
        """
        here = Topology.this_host(len(domain_of))
        starts = [r for r in range(len(domain_of)) if r == 0 or domain_of[r] != domain_of[r - 1]]
        if len(starts) == 1:
            return here
        ends = [*starts[1:], len(domain_of)]
        parts = Counter(domain_of[start] for start in starts)
        whole = here.domains[0]
        domains = tuple(
            replace(whole, ranks=tuple(range(start, end)), host=host, cross_gbps=1.25,
                    memory_bytes=max(1, whole.memory_bytes // parts[domain_of[start]]))
            for host, (start, end) in enumerate(zip(starts, ends, strict=True)))
        # A phase over TCP costs 50 to 450 us (benchmarks/cluster.json, `phase_us`), and ranks spend
        # CPU time on every byte. The costs of tiers and pushed ids have the order of magnitude that
        # calibration measures: small compared with such a network, but they decide between plans
        # that send the same number of bytes.
        costs = replace(here.costs, phase_us=150.0, tier_ns=1.0, push_tier_ns=3.0, push_ns=3.0,
                        far_ns=12.0, wire_ns=0.4)
        return replace(here, name=f"hosts-{'-'.join(str(len(d.ranks)) for d in domains)}",
                       domains=domains, costs=costs,
                       hosts_share_links=len(starts) < len(domain_of))


@dataclass(frozen=True, slots=True)
class _DomainEntry:
    """A ``[[domain]]`` entry of a topology file."""

    memory_bytes: Bytes
    read_gbps: Gbps
    copies: Positive = 1
    ranks: Positive = 1
    per_host: Positive | None = None
    host: Count = 0
    cache_gbps: Gbps | None = None
    cache_bytes: Bytes = 0
    link_gbps: Gbps | None = None
    cross_gbps: Gbps | None = None

    def domains(self, first_rank: int) -> list[Domain]:
        """Return the domains, whose ranks start at `first_rank`."""
        stop = first_rank + self.copies * self.ranks
        require("invalid topology", "reduce copies or ranks of the domains",
                ("number of ranks", stop, stop <= MAX_RANKS, f"<= {MAX_RANKS}"))
        link = self.link_gbps or self.read_gbps
        return [
            Domain(tuple(range(start, start + self.ranks)),
                   self.host + k // (self.per_host or self.copies), self.memory_bytes,
                   self.read_gbps, self.cache_gbps or self.read_gbps, self.cache_bytes, link,
                   self.cross_gbps or link)
            for k, start in enumerate(range(first_rank, stop, self.ranks))]


@dataclass(frozen=True, slots=True)
class _File:
    """A topology file."""

    name: str
    domain: tuple[_DomainEntry, ...]
    source: Source = "assumed"
    costs: Costs = field(default_factory=Costs)
    host_memory_bytes: Bytes = 0
    host_gbps: Amount = 0.0
    hosts_share_links: bool = False
    rack: tuple[Rack, ...] = ()


def _least(parts: Sequence[_Part]) -> _Part:
    """Return a domain or rack with the members of the first and the least of every figure."""
    figures = [x.name for x in fields(parts[0]) if x.name not in ("ranks", "host", "hosts")]
    return replace(parts[0], **{x: min(getattr(p, x) for p in parts) for x in figures})
