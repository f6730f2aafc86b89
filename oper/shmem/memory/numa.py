"""NUMA nodes of this host as Linux describes them, and binding of memory to one of them.

Source: Documentation/ABI/stable/sysfs-devices-node of the Linux kernel; mbind(2).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oper.support import kernel

SYSTEM = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node of a host.

    Attributes:
        number: the kernel's number of the node.
        processors: numbers of the processors assigned to the node.
    """

    number: int
    processors: tuple[int, ...]


def find_nodes() -> list[Node]:
    """Return the nodes with processors and with memory that this process may use, by number.

    Processors of a node without such memory are assigned to the nearest node that has some. Nodes
    without processors (memory behind a slower link) are left out. If the system does not report
    nodes, the result is a single node with all processors.
    """
    try:
        numbers = sorted(int(p.name[4:]) for p in SYSTEM.glob("node[0-9]*"))
        processors = {n: _members(SYSTEM / f"node{n}" / "cpulist") for n in numbers}
        with_memory = set(numbers)
        if (SYSTEM / "has_memory").exists():
            with_memory &= set(_members(SYSTEM / "has_memory"))
        with_memory &= _allowed() or with_memory
        usable = [n for n in numbers if n in with_memory and processors[n]]
        held = {n: list(processors[n]) for n in usable}
        for n in numbers if usable else ():
            if n not in held and processors[n]:
                text = (SYSTEM / f"node{n}" / "distance").read_text(encoding="ascii")
                away = dict(zip(numbers, map(int, text.split()), strict=True))
                held[min(usable, key=lambda k: (away[k], k))] += processors[n]
    except (OSError, ValueError):
        held = {}
    found = [Node(n, tuple(sorted(cpus))) for n, cpus in held.items()]
    return found or [Node(0, tuple(range(os.cpu_count() or 1)))]


def local_domain(nodes: Sequence[Sequence[int]]) -> int:
    """Return the index in `nodes`, lists of processors, that has most of this process's allowed
    processors."""
    mine = os.sched_getaffinity(0)
    shares = [len(mine.intersection(cpus)) for cpus in nodes]
    return shares.index(max(shares))


def bind(address: int, num_bytes: int, node: int) -> str:
    """Bind the pages of a range to one node from now on; returns "", or why this failed."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return f"no known system call number for {os.uname().machine}"
    words = node // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    # The kernel uses one bit less than `maxnode`.
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_BIND), mask, ctypes.c_ulong(words * _LONG_BITS + 1), ctypes.c_uint(0))
    return os.strerror(ctypes.get_errno()) if failed else ""


def _members(path: Path) -> list[int]:
    return _numbers(path.read_text(encoding="ascii"))


def _numbers(text: str) -> list[int]:
    """Parse a list of numbers such as ``0-3,8``."""
    found: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _allowed() -> set[int]:
    """Return the nodes whose memory this process may use; empty if the system does not report it.
    """
    return set(_numbers(kernel.pairs(str(STATUS)).get("Mems_allowed_list", "")))
