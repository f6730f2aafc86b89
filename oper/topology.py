"""The machine that a plan is made for: memory domains, ranks, links and cost constants.

A memory domain is a set of ranks that share one memory and its bandwidth: one GPU, or one NUMA node
with several processes. Ranks are numbered through the domains in order. A topology is a TOML file::

    name = "h100-8"
    source = "published"            # measured | published | assumed
    hosts_share_links = false       # true: a host has one link, of the sum of its ranks' cross_gbps

    [[domain]]
    copies = 8                      # this many equal domains,
    per_host = 8                    # that many of them on one host (all, when left out)
    ranks = 1                       # ranks in each
    host = 0                        # number of the first host
    memory_bytes = "80GB"
    read_gbps = 2400                # random row reads from memory, shared by the domain's ranks
    cache_gbps = 5500               # repeated reads while the working set fits cache_bytes
    cache_bytes = "50MB"
    link_gbps = 360                 # to other domains of the host, per rank and direction
    cross_gbps = 45                 # to other hosts, per rank and direction

    [[rack]]                        # none: all hosts reach each other alike
    hosts = [0]
    uplink_gbps = 100               # between hosts of the rack and others, per direction

    [costs]
    phase_us = 10.0
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from oper.errors import InvalidInputError, require, require_fields
from oper.support.files import read_toml
from oper.support.kernel import memory_bytes

_SUFFIXES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
             "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MAX_RANKS = 1 << 16  # in a topology file, which may say `copies` and `ranks` in a few bytes


def parse_bytes(value: int | float | str) -> int:
    """Bytes from a number or text such as ``"80GB"`` or ``"24GiB"``; raises InvalidInputError."""
    text = str(value).strip().upper().replace(" ", "")
    digits = text.rstrip("KMGTIB")
    try:
        size = float(digits) * _SUFFIXES[text[len(digits):] or "B"]
    except (KeyError, ValueError):
        size = -1.0
    if not 0 <= size < 1 << 63 or isinstance(value, bool):
        raise InvalidInputError("cannot read a size", "value", value,
                                "a number >= 0 or text like '80GB'",
                                "write bytes, or a number with B, kB, MB, GB or TB (KiB, MiB, ...)")
    return int(size)


@dataclass(frozen=True, slots=True)
class Costs:
    """Calibrated constants of the cost model that are not bandwidths.

    Attributes:
        phase_us: fixed cost of a phase (launch or call, barrier).
        id_ns: per id in the forward pass (resolve, address, loop).
        sort_ns: per id in the backward pass (sort, run lengths).
        reduce_ns: per id in the backward pass (segment reduce), beside its bytes.
        update_ns: per touched row at its owner (merge, optimizer arithmetic), beside its bytes.
        run_ns: per distinct row of a rank's batch in the backward pass (a new sum, its slot),
            beside its bytes.
        refresh_ns: per changed row that a rank copies into its replica, beside its bytes.
        tier_ns: per id and pass, for tables of several tiers (position in hotness order, tier).
        push_tier_ns: the same for tables of several tiers of which any is pushed.
        push_ns: per pushed id at its reader, forward and backward (owner, request).
        push_bag_ns: per bag in the forward pass, for tables with pulled beside pushed rows (a bag's
            pulled rows are found bag by bag).
        odd_ns: per id (or touched row), pass over it and 16 columns, for rows of a width that no
            kernel is made for.
        table_us: per table and phase (a task, and what is set up for it).
        sort_table_us: per table in the backward pass, beside that (counters of the sort).
        far_ns: per id of a pulled tier that lies in other memory domains, at its reader: finding
            each row once, and what was fetched of it.
        wire_ns: per byte that a rank sends to another host or receives from there, in the rank's
            own time: packing, copies, the network stack. No phase computes while it exchanges.
        warm_share: share of the caches that keeps rows and buffers from one batch to the next (0 =
            every batch begins cold).
    """

    phase_us: float = 5.0
    id_ns: float = 0.0
    sort_ns: float = 0.0
    reduce_ns: float = 0.0
    update_ns: float = 0.0
    run_ns: float = 0.0
    refresh_ns: float = 0.0
    tier_ns: float = 0.0
    push_tier_ns: float = 0.0
    push_ns: float = 0.0
    push_bag_ns: float = 0.0
    odd_ns: float = 0.0
    table_us: float = 0.0
    sort_table_us: float = 0.0
    far_ns: float = 0.0
    wire_ns: float = 0.0
    warm_share: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_number("invalid costs", f.name, getattr(self, f.name), at_least=0)
        require_fields(self, "invalid costs", "state a share of the cache",
                       ("warm_share", self.warm_share <= 1, "0..1"))


@dataclass(frozen=True, slots=True)
class Domain:
    """One memory domain; the fields are those of the TOML file."""

    ranks: tuple[int, ...]
    host: int
    memory_bytes: int
    read_gbps: float
    cache_gbps: float
    cache_bytes: int
    link_gbps: float
    cross_gbps: float


@dataclass(frozen=True, slots=True)
class Rack:
    """Hosts that share an uplink to those of other racks; the fields are those of the TOML file."""

    hosts: tuple[int, ...]
    uplink_gbps: float


@dataclass(frozen=True, slots=True)
class Topology:
    """Memory domains and constants of one machine.

    Attributes:
        name: name of the topology.
        domains: ranks 0..W-1 in order through the domains.
        costs: constants of the cost model.
        source: ``"measured"``, ``"published"`` or ``"assumed"``.
        host_memory_bytes: slower memory of each host that may hold rows (0 = none).
        host_gbps: bandwidth of that memory per rank.
        hosts_share_links: whether the ranks of a host share one link to other hosts, so that one
            may use bandwidth that others leave unused; its bandwidth is the sum of their
            `cross_gbps`. Otherwise every rank has a link of its own.
        racks: racks of all hosts; none if hosts are connected to all others alike.
    """

    name: str
    domains: tuple[Domain, ...]
    costs: Costs = field(default_factory=Costs)
    source: str = "assumed"
    host_memory_bytes: int = 0
    host_gbps: float = 0.0
    hosts_share_links: bool = False
    racks: tuple[Rack, ...] = ()

    def __post_init__(self) -> None:
        what = f"invalid topology {self.name!r}"
        numbered = [r for d in self.domains for r in d.ranks]
        if not numbered or numbered != list(range(len(numbered))):
            raise InvalidInputError(what, "ranks", numbered, "0..W-1 in order, at least one",
                                    "list the domains")
        for k, domain in enumerate(self.domains):
            for name in ("memory_bytes", "read_gbps", "cache_gbps", "link_gbps", "cross_gbps"):
                _check_number(what, f"domain[{k}].{name}", getattr(domain, name), above=0)
            _check_number(what, f"domain[{k}].ranks", len(domain.ranks), at_least=1)
            _check_number(what, f"domain[{k}].cache_bytes", domain.cache_bytes, at_least=0)
        for k, rack in enumerate(self.racks):
            _check_number(what, f"rack[{k}].uplink_gbps", rack.uplink_gbps, above=0)
        listed = sorted(h for rack in self.racks for h in rack.hosts)
        require(what, "list every host in one rack, or state no racks", (
            "hosts of racks", listed,
            not self.racks or listed == sorted({d.host for d in self.domains}),
            "the hosts of the domains, each once"))
        _check_number(what, "host_memory_bytes", self.host_memory_bytes, at_least=0)
        _check_number(what, "host_gbps", self.host_gbps, at_least=0)
        require_fields(
            self, what, "state how fast the ranks read that memory, and where the numbers are from",
            ("host_gbps", not self.host_memory_bytes or bool(self.host_gbps),
             "> 0 beside host_memory_bytes"),
            ("source", self.source in ("measured", "published", "assumed"),
             "measured, published or assumed"),
            ("hosts_share_links", isinstance(self.hosts_share_links, bool), "true or false"))

    @property
    def world_size(self) -> int:
        """Number of ranks W."""
        return sum(len(d.ranks) for d in self.domains)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len({d.host for d in self.domains})

    def domain_of(self) -> list[int]:
        """Index of each rank's domain, by rank."""
        return [k for k, d in enumerate(self.domains) for _ in d.ranks]

    @staticmethod
    def from_toml(path: str | os.PathLike[str]) -> Topology:
        """Read a topology file.

        Raises:
            FileFormatError: not TOML.
            InvalidInputError: unknown, missing or bad fields.
        """
        return Topology.from_dict(read_toml(path, f"cannot read {os.fspath(path)!r} as a topology"))

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Topology:
        """The topology of a parsed TOML file; raises InvalidInputError."""
        what = f"invalid topology {value.get('name', '')!r}"
        _check_keys(what, value, {"name", "source", "domain", "costs", "host_memory_bytes",
                                  "host_gbps", "hosts_share_links", "rack"}, {"name", "domain"})
        _check_keys(what, value.get("costs", {}), {f.name for f in fields(Costs)}, set())
        if not isinstance(value["domain"], list):
            raise InvalidInputError(what, "domain", value["domain"], "[[domain]] entries",
                                    "correct the file")
        domains: list[Domain] = []
        for entry in value["domain"]:
            domains += _domains_of(what, entry, sum(len(d.ranks) for d in domains))
        return Topology(
            str(value["name"]), tuple(domains), Costs(**value.get("costs", {})),
            str(value.get("source", "assumed")), parse_bytes(value.get("host_memory_bytes", 0)),
            value.get("host_gbps", 0.0), value.get("hosts_share_links", False),
            _racks_of(what, value.get("rack", [])))

    @staticmethod
    def this_host(world_size: int) -> Topology:
        """`world_size` processes on this machine: one memory domain, assumed constants.

        Tables may take half of its memory.

        ``oper calibrate`` replaces the assumed constants by measured ones.
        """
        memory = memory_bytes("MemTotal") or 8e9
        domain = Domain(tuple(range(world_size)), 0, max(1, int(memory / 2)),
                        40.0, 120.0, 32 << 20, 40.0, 40.0)
        # Order of magnitude of one current server core; measured values come from calibration.
        costs = Costs(phase_us=30.0, id_ns=3.0, sort_ns=5.0, reduce_ns=6.0, update_ns=12.0)
        return Topology(f"this-host-{world_size}", (domain,), costs, "assumed")

    @staticmethod
    def of_domains(domain_of: Sequence[int]) -> Topology:
        """Processes on hosts like this one, with assumed constants of an ordinary network.

        Args:
            domain_of: index of each rank's memory domain, by rank; a domain is a host, whose ranks
                share its link. Ranks of a domain that are not consecutive count as separate hosts.
        """
        here = Topology.this_host(len(domain_of))
        starts = [r for r in range(len(domain_of)) if r == 0 or domain_of[r] != domain_of[r - 1]]
        if len(starts) == 1:
            return here
        ends = [*starts[1:], len(domain_of)]
        domains = tuple(
            replace(here.domains[0], ranks=tuple(range(start, end)), host=host, cross_gbps=1.25)
            for host, (start, end) in enumerate(zip(starts, ends, strict=True)))
        # A phase over TCP costs 50 to 450 us (benchmarks/cluster.json, `phase_us`), and the ranks
        # copy every byte themselves. What tiers and pushed ids cost is of the order that
        # calibration finds: little beside a network of this speed, but it decides between plans
        # that send alike.
        costs = replace(here.costs, phase_us=150.0, tier_ns=1.0, push_tier_ns=3.0, push_ns=3.0,
                        far_ns=12.0, wire_ns=0.4)
        return replace(here, name=f"hosts-{'-'.join(str(len(d.ranks)) for d in domains)}",
                       domains=domains, costs=costs,
                       hosts_share_links=len(starts) < len(domain_of))


_DOMAIN_KEYS = {"copies", "per_host", "ranks", "host", "memory_bytes", "read_gbps", "cache_gbps",
                "cache_bytes", "link_gbps", "cross_gbps"}


def _domains_of(what: str, entry: Any, first_rank: int) -> list[Domain]:
    """The domains of one ``[[domain]]`` entry, ranks counted from `first_rank`."""
    _check_keys(what, entry, _DOMAIN_KEYS, {"memory_bytes", "read_gbps"})
    copies, ranks = entry.get("copies", 1), entry.get("ranks", 1)
    per_host, host = entry.get("per_host", copies), entry.get("host", 0)
    require(what, "correct the file", *(
        (name, value, type(value) is int and value >= low, f"an integer >= {low}")
        for name, value, low in (("copies", copies, 1), ("ranks", ranks, 1),
                                 ("per_host", per_host, 1), ("host", host, 0))))
    stop = first_rank + copies * ranks
    require(what, "correct the file",
            ("ranks of all domains", stop, stop <= MAX_RANKS, f"at most {MAX_RANKS}"))
    read = entry["read_gbps"]
    link = entry.get("link_gbps", read)
    return [
        Domain(tuple(range(first_rank + k * ranks, first_rank + (k + 1) * ranks)),
               host + k // per_host, parse_bytes(entry["memory_bytes"]), read,
               entry.get("cache_gbps", read), parse_bytes(entry.get("cache_bytes", 0)), link,
               entry.get("cross_gbps", link))
        for k in range(copies)]


def _racks_of(what: str, entries: Any) -> tuple[Rack, ...]:
    """The ``[[rack]]`` entries."""
    out = []
    for entry in entries if isinstance(entries, list) else [entries]:
        _check_keys(what, entry, {"hosts", "uplink_gbps"}, {"hosts", "uplink_gbps"})
        hosts = entry["hosts"]
        require(what, "correct the file", (
            "hosts of a rack", hosts,
            isinstance(hosts, list) and all(type(h) is int for h in hosts), "a list of integers"))
        out.append(Rack(tuple(hosts), entry["uplink_gbps"]))
    return tuple(out)


def _check_number(what: str, name: str, value: Any, *, above: float = -math.inf,
                  at_least: float = -math.inf) -> None:
    """Raise InvalidInputError unless `value` is a finite number within its limit."""
    is_number = isinstance(value, Real | int) and value is not True and value is not False
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer that no float holds
        number = math.nan
    if math.isfinite(number) and number > above and number >= at_least:
        return
    limit = f">= {at_least}" if above == -math.inf else f"> {above}"
    raise InvalidInputError(what, name, value, f"a number {limit}", "state what the machine has")


def _check_keys(what: str, value: Any, known: set[str], needed: set[str]) -> None:
    keys = set(value) if isinstance(value, dict) else None
    if keys is None or keys - known or needed - keys:
        raise InvalidInputError(what, "keys", sorted(keys) if keys is not None else value,
                                f"{sorted(needed)} and at most {sorted(known)}", "correct the file")
