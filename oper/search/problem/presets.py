"""Topology presets shipped with the package: servers with common GPUs and published constants."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

from oper.errors import InvalidInputError, require
from oper.topology import Topology

THIS_HOST = "this-host"
MAX_THIS_HOST = 1024  # upper limit of ranks on one machine, one per core


def preset_names() -> list[str]:
    """Names of the shipped presets, such as ``"h100-8"`` (one host of 8 GPUs) or ``"h100-2x8"``
    (two hosts of 8 GPUs)."""
    folder = resources.files("oper") / "topologies"
    names = (f.name for f in folder.iterdir())
    return sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml"))


def topology_preset(name: str, world_size: int | None = None) -> Topology:
    """Return the topology with a given name.

    Args:
        name: a preset, ``"GPU-HxN"`` for H hosts with N GPUs of a preset's kind, ``"this-host"``,
            or the path of a TOML file.
        world_size: number of ranks of ``"this-host"`` (default 2). For other topologies None, or
            the topology's own number of ranks.

    Raises:
        InvalidInputError: there is no such preset or file, the file is not a topology, or
            `world_size` does not match.
    """
    if name == THIS_HOST:
        world_size = 2 if world_size is None else world_size
        require(f"cannot plan for {THIS_HOST}",
                "name a topology of several hosts, such as h100-16x8, or a TOML file",
                ("world_size", world_size, 1 <= world_size <= MAX_THIS_HOST,
                 f"1..{MAX_THIS_HOST} processes of one machine"))
        return Topology.this_host(world_size)
    topology = _find(name)
    require(f"topology {name!r} has a fixed number of ranks", "do not pass a world size",
            ("world_size", world_size, world_size in (None, topology.world_size),
             f"{topology.world_size}"))
    return topology


def is_preset(name: str) -> bool:
    """Whether `topology_preset` takes a name for one of its own machines instead of a file."""
    return name.startswith(THIS_HOST) or name in preset_names() or _many(name) is not None


def _many(name: str) -> re.Match[str] | None:
    """Match a name of several hosts of a preset's kind, ``"GPU-HxN"``."""
    found = re.fullmatch(r"([a-z0-9]+)-(\d{1,3})x(\d{1,2})", name)
    return found if found and f"{found[1]}-2x8" in preset_names() else None


def _find(name: str) -> Topology:
    folder = resources.files("oper") / "topologies"
    if name in preset_names():
        with resources.as_file(folder / f"{name}.toml") as path:
            return Topology.from_toml(path)
    if many := _many(name):
        return _hosts(many[1], int(many[2]), int(many[3]))
    try:
        return Topology.from_toml(name)
    except (FileNotFoundError, IsADirectoryError):
        raise InvalidInputError("no such topology", "topology", name,
                                f"'{THIS_HOST}', a TOML file, or one of {preset_names()}",
                                "name a preset or write a TOML file") from None


def _hosts(kind: str, num_hosts: int, per_host: int) -> Topology:
    """A topology of `num_hosts` hosts of `per_host` GPUs, with the constants of the shipped
    two-host preset of that kind."""
    require("invalid topology", "name at least one host and one GPU, e.g. h100-2x8",
            ("hosts, GPUs per host", (num_hosts, per_host), min(num_hosts, per_host) >= 1, ">= 1"))
    shipped = _find(f"{kind}-2x8")
    one = shipped.domains[0]
    domains = tuple(replace(one, ranks=(r,), host=r // per_host)
                    for r in range(num_hosts * per_host))
    return replace(shipped, name=f"{kind}-{num_hosts}x{per_host}", domains=domains)
