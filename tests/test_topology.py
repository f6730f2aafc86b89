"""Topologies: the TOML file, its defaults, and one clear error for each thing that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from oper.errors import FileFormatError, InvalidInputError
from oper.topology import Costs, Rack, Topology, parse_bytes

FILE = """
name = "two-hosts"
source = "published"
host_memory_bytes = "1TB"
host_gbps = 20
hosts_share_links = true
[[domain]]
copies = 4
per_host = 2
ranks = 2
memory_bytes = "80GB"
read_gbps = 2000
cache_gbps = 5000
cache_bytes = "50MiB"
link_gbps = 360
cross_gbps = 45
[[domain]]
host = 2
memory_bytes = 1000
read_gbps = 10.5
[[rack]]
hosts = [0, 2]
uplink_gbps = 12.5
[[rack]]
hosts = [1]
uplink_gbps = 25
[costs]
phase_us = 10
"""


def read(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return Topology.from_toml(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    topology = read(tmp_path, FILE)
    assert (topology.name, topology.source, topology.world_size, topology.num_hosts) == (
        "two-hosts", "published", 9, 3)
    assert [d.ranks for d in topology.domains] == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    assert [d.host for d in topology.domains] == [0, 0, 1, 1, 2]
    assert topology.domain_of() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    first, last = topology.domains[0], topology.domains[-1]
    assert (first.memory_bytes, first.cache_bytes, first.cross_gbps) == (80 * 10**9, 50 << 20, 45)
    # Missing values are derived from the given ones.
    assert (last.cache_gbps, last.link_gbps, last.cross_gbps, last.cache_bytes) == (
        10.5, 10.5, 10.5, 0)
    assert topology.costs == Costs(phase_us=10)
    assert topology.host_memory_bytes == 10**12
    assert topology.hosts_share_links
    assert topology.racks == (Rack((0, 2), 12.5), Rack((1,), 25))


def test_a_file_that_says_nothing_of_shared_links_has_none(tmp_path: Path) -> None:
    """Older files: every rank has its own link, and all pairs of hosts are equally fast."""
    start, stop = FILE.index("[[rack]]"), FILE.index("[costs]")
    text = FILE[:start].replace("hosts_share_links = true\n", "") + FILE[stop:]
    topology = read(tmp_path, text)
    assert topology.hosts_share_links is False and topology.racks == ()


@pytest.mark.parametrize(("old", "new", "words"), [
    ('memory_bytes = "80GB"\n', "", r"missing keys=\['domain\[0\]\.memory_bytes'\]"),
    ('memory_bytes = "80GB"', "memory_bytes = 0", r"domain\[0\]\.memory_bytes=0, .*>= 1"),
    ('memory_bytes = "80GB"', 'memory_bytes = "lots"',
     r"domain\[0\]\.memory_bytes='lots', expected a whole number of bytes >= 0, or text"),
    ('memory_bytes = "80GB"', 'memory_bytes = "-1GB"', r"domain\[0\]\.memory_bytes='-1GB'"),
    ('memory_bytes = "80GB"', "memory_bytes = inf", r"domain\[0\]\.memory_bytes=inf"),
    ("read_gbps = 2000\n", "", r"missing keys=\['domain\[0\]\.read_gbps'\]"),
    ("read_gbps = 2000", "read_gbps = nan", r"domain\[0\]\.read_gbps=nan"),
    ("read_gbps = 2000", 'read_gbps = "fast"', r"domain\[0\]\.read_gbps='fast'"),
    ("link_gbps = 360", "link_gbps = -1", r"link_gbps=-1"),
    ("cache_bytes", "cash_bytes", "cash_bytes"),
    ('source = "published"', 'source = "guessed"', "source='guessed'"),
    ('name = "two-hosts"\n', "", "'name'"),
    ("copies = 4", "copies = 0", "copies=0, expected an integer >= 1"),
    ("copies = 4", "copies = 1.5", "copies=1.5"),
    ("ranks = 2", "ranks = 0", "ranks=0"),
    ("per_host = 2", "per_host = 0", "per_host=0"),
    ("host = 2\n", "host = -1\n", "host=-1"),
    ("phase_us = 10", "phase_us = -1", r"costs\.phase_us=-1, expected a finite number >= 0"),
    ("phase_us = 10", 'phase_us = "x"', "phase_us='x'"),
    ("phase_us = 10", "phase_ms = 1", "phase_ms"),
    ("host_gbps = 20\n", "", "when host_memory_bytes > 0"),
    ("host_gbps = 20\n", "colour = 3\n", "colour"),
    ("hosts_share_links = true", "hosts_share_links = 1", "hosts_share_links=1, expected true"),
    ("hosts = [1]", "hosts = [0]", r"hosts of racks=\[0, 0, 2\].*each once"),
    ("hosts = [1]", "hosts = [1, 3]", r"hosts of racks=\[0, 1, 2, 3\]"),
    ("hosts = [1]", "hosts = 1", r"rack\[1\]\.hosts=1, expected a list of integers"),
    ("uplink_gbps = 25", "uplink_gbps = 0", r"rack\[1\]\.uplink_gbps=0, .*> 0"),
    ("uplink_gbps = 25", "uplink_mbits = 25", "uplink_mbits"),
    ('name = "two-hosts"', f"name = 0x{'f' * 6000}", "name=a number of more than 4300 digits"),
    ("[costs]", "[costs", "expected TOML"),
])
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in FILE
    kind = FileFormatError if words == "expected TOML" else InvalidInputError
    with pytest.raises(kind, match=words):
        read(tmp_path, FILE.replace(old, new, 1))


@pytest.mark.parametrize("domain", ["domain = 3", "domain = []", "domain = [1]",
                                    'domain = {ranks = 1}', "[domain]\nranks = 1"])
def test_no_domains_is_an_error(tmp_path: Path, domain: str) -> None:
    with pytest.raises(InvalidInputError, match=r"domain|ranks=\[\]"):
        read(tmp_path, f'name = "x"\n{domain}\n')


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        Topology.from_toml(tmp_path / "nothing.toml")


@pytest.mark.parametrize(("value", "expected"), [
    (7, 7), (1.5e3, 1500), ("80GB", 80 * 10**9), ("24 GiB", 24 << 30), ("1e3", 1000),
    ("0.5kb", 500), ("3B", 3)])
def test_sizes(value: int | float | str, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", ["", "GB", "1XB", "1GBGB", -1, 0.5, float("nan"), True, None,
                                   "inf"])
def test_bad_sizes(value: object) -> None:
    with pytest.raises(InvalidInputError, match="cannot read a size"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_this_host() -> None:
    topology = Topology.this_host(4)
    assert (topology.world_size, topology.num_hosts, topology.source) == (4, 1, "assumed")
    assert 0 < topology.domains[0].memory_bytes < 1 << 50


@pytest.mark.parametrize("domain_of, ranks", [
    ([0, 0], [(0, 1)]), ([0, 0, 1, 1], [(0, 1), (2, 3)]), ([0, 1, 1, 0], [(0,), (1, 2), (3,)])])
def test_hosts_of_memory_domains(domain_of: list[int], ranks: list[tuple[int, ...]]) -> None:
    made = Topology.of_domains(domain_of)
    assert [d.ranks for d in made.domains] == ranks and made.num_hosts == len(ranks)
    assert made.source == "assumed"
