"""Emulate hosts on one machine: network namespaces, connected through rate-limited links.

Every host is a namespace with one veth interface, whose peer is a port of a switch. A switch is a
bridge in a separate namespace, so that the machine's network does not change. A token bucket (tbf)
at each end of a link limits one direction. All names begin with `PREFIX`; a run removes the
namespaces that a killed run has left behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import ClassVar

from oper.bench.core.child import ProcessOptions
from oper.errors import OperError
from oper.support.locks import locked
from oper.topology import Topology

PREFIX = "oper-cluster-"
INTERFACE = "eth0"
_SUBNET = "10.213.7."  # only used inside the namespaces
_UPLINK = "uplink"
_NAMESPACES = Path("/run/netns")
_BURST_S = 0.001  # capacity of a token bucket; short, so that idle time saves up little bandwidth
_LEAST_BURST_BYTES = 72 << 10  # larger than a GSO segment, which tbf would otherwise split
_QUEUE_BYTES = 32 << 20  # larger than TCP's data in flight, so that no packet is dropped
_PERIOD_US = 20_000  # period of CPU quotas
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Links:
    """An emulated cluster.

    Attributes:
        num_hosts: number of hosts.
        mbits: rate (Mbit/s) of every host's link, in each direction.
        ranks_per_host: number of ranks of each host.
        slow_host_share: rate of host 0's link relative to `mbits`.
        uplink_mbits: rate (Mbit/s) between two racks with half of the hosts each; 0 = one rack.
        host_0_cpu: limit of the cores that each rank of host 0 may use; 1 = no limit.
    """

    num_hosts: int
    mbits: float
    ranks_per_host: int = 1
    slow_host_share: float = 1.0
    uplink_mbits: float = 0.0
    host_0_cpu: float = 1.0

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.num_hosts * self.ranks_per_host

    @property
    def host_of(self) -> list[int]:
        """Host of each rank; ranks are numbered host by host."""
        return [r // self.ranks_per_host for r in range(self.world_size)]

    def rack_of(self, host: int) -> int:
        """The rack of a host, which is the index of its switch."""
        return int(self.uplink_mbits > 0 and host >= self.num_hosts // 2)


@dataclass(frozen=True, slots=True)
class OnHosts:
    """Base of cases whose ranks are on emulated hosts, see `oper.bench.core.launch.measured`.

    Attributes:
        name: the case's name in the record.
        links: the cluster.
        constants: the topology of processes that share this machine.
    """

    name: str
    links: Links
    constants: Topology = field(default_factory=functools.partial(Topology.this_host, 2),
                                kw_only=True)
    threads_per_rank: ClassVar[int] = 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.links.world_size

    @property
    def shape(self) -> tuple[int, int, bool, float]:
        """A key, equal for cases that can share processes and namespaces: rates may differ."""
        links = self.links
        return links.num_hosts, links.ranks_per_host, links.uplink_mbits > 0, links.host_0_cpu

    def hosts(self) -> contextlib.AbstractContextManager[list[ProcessOptions]]:
        """The context manager that creates the hosts, see `cluster`."""
        return cluster(self.links)


def why_not() -> str:
    """The reason why network namespaces cannot be created here; ``""`` if they can."""
    if os.geteuid() != 0:
        return "creating network namespaces and limiting their links requires root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) are not installed"
    return ""


def check_possible() -> None:
    """Raise OperError, with the reason, if namespaces cannot be created."""
    if reason := why_not():
        raise OperError("cannot emulate a cluster", "user id", os.geteuid(),
                        f"0 (root), with iproute2 installed ({reason})",
                        "install iproute2 and run as root, e.g. with sudo or in a virtual machine")


def _run(*words: str) -> str:
    """Run a command and return what it prints; raises OperError with its message if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OperError("cannot emulate a cluster", "command", " ".join(words), "exit code 0",
                        f"resolve its error: {done.stderr.strip()}")
    return done.stdout


def _set(space: str, *commands: str) -> None:
    """Run commands of ``ip`` in a namespace."""
    for command in commands:
        _run("ip", "-n", space, *command.split())


def host_name(host: int) -> str:
    """Name of a host's network namespace."""
    return f"{PREFIX}{host}"


def _switch_name(rack: int) -> str:
    return f"{PREFIX}switch{rack}"


def set_rates(links: Links, is_limited: bool) -> None:
    """Apply the rate limits of `links` to a running cluster, or remove them."""
    ends = []
    for host in range(links.num_hosts):
        rate = links.mbits * (links.slow_host_share if host == 0 else 1.0)
        ends += [(host_name(host), INTERFACE, rate),
                 (_switch_name(links.rack_of(host)), f"port{host}", rate)]
    if links.uplink_mbits:
        ends += [(_switch_name(rack), _UPLINK, links.uplink_mbits) for rack in (0, 1)]
    for space, device, rate in ends:
        words = ["tc", "-n", space, "qdisc", "replace", "dev", device, "root"]
        if is_limited:
            burst = max(_LEAST_BURST_BYTES, round(rate * 1e6 / 8 * _BURST_S))
            words += ["tbf", "rate", f"{round(rate * 1000)}kbit", "burst", str(burst),
                      "limit", str(_QUEUE_BYTES)]
        else:
            words += ["pfifo", "limit", "10000"]
        _run(*words)


def num_dropped(links: Links) -> int:
    """Number of packets that the rate limits have dropped since they were last set."""
    spaces = [host_name(h) for h in range(links.num_hosts)]
    spaces += [_switch_name(rack) for rack in range(1 + (links.uplink_mbits > 0))]
    words = " ".join(_run("tc", "-n", space, "-s", "qdisc", "show") for space in spaces)
    return sum(int(part.split(",")[0]) for part in words.split("(dropped ")[1:])


# -- processor time --------------------------------------------------------------------------------


def why_no_quota() -> str:
    """The reason why processor time cannot be limited here; ``""`` if it can."""
    return "" if _quota_root() else (
        f"no writable cgroup with the cpu controller under {str(_CGROUP)!r}")


def _quota_root() -> tuple[Path, bool] | None:
    """The writable cgroup with the cpu controller and whether it is version 2; None if missing."""
    with contextlib.suppress(OSError):
        if "cpu" in (_CGROUP / "cgroup.subtree_control").read_text().split():
            return (_CGROUP, True) if os.access(_CGROUP, os.W_OK) else None
    one = _CGROUP / "cpu"
    return (one, False) if (one / "cpu.cfs_quota_us").exists() and os.access(one, os.W_OK) else None


def _make_quota(cores: float) -> Path:
    """Create a cgroup whose processes together may use up to `cores` cores."""
    root = _quota_root()
    assert root is not None, why_no_quota()
    folder = root[0] / f"{PREFIX}0"
    folder.mkdir(exist_ok=True)
    quota = str(round(cores * _PERIOD_US))
    if root[1]:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(quota)
    return folder


# -- setting up and taking down --------------------------------------------------------------------


@contextlib.contextmanager
def cluster(links: Links) -> Iterator[list[ProcessOptions]]:
    """Create namespaces, bridges and unlimited links, and remove them after the block.

    Yields the launch options of each rank. During the block SIGTERM raises `SystemExit`, so that
    everything is removed then, too.

    Raises:
        OperError: not root, ip or tc is missing, or one of their commands fails.
        InvalidInputError: another process already runs a cluster on this machine.
    """
    check_possible()
    with locked(Path(tempfile.gettempdir()) / f"{PREFIX}lock", "cannot emulate a cluster"):
        remove_leftovers()
        before = signal.signal(signal.SIGTERM, _exit)
        try:
            yield _set_up(links)
        finally:
            remove_leftovers()
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _set_up(links: Links) -> list[ProcessOptions]:
    switches = [_switch_name(rack) for rack in range(1 + (links.uplink_mbits > 0))]
    for space in (*switches, *map(host_name, range(links.num_hosts))):
        _run("ip", "netns", "add", space)
    for space in switches:
        _set(space, "link add bridge type bridge", "link set bridge up")
    if links.uplink_mbits:
        _set(switches[0], f"link add {_UPLINK} type veth peer name {_UPLINK} netns {switches[1]}")
        for space in switches:
            _set(space, f"link set {_UPLINK} master bridge up")
    for host in range(links.num_hosts):
        switch, port = switches[links.rack_of(host)], f"port{host}"
        _set(host_name(host), f"link add {INTERFACE} type veth peer name {port} netns {switch}",
             f"addr add {_SUBNET}{host + 1}/24 dev {INTERFACE}",
             f"link set {INTERFACE} up", "link set lo up")
        _set(switch, f"link set {port} master bridge up")
    quota = _make_quota(links.host_0_cpu * links.ranks_per_host) if links.host_0_cpu < 1 else None
    rank_options = []
    for rank, host in enumerate(links.host_of):
        environment = {"LOCAL_RANK": str(rank % links.ranks_per_host),
                       "LOCAL_WORLD_SIZE": str(links.ranks_per_host),
                       "MASTER_ADDR": f"{_SUBNET}1", "MASTER_PORT": "29500",
                       "GLOO_SOCKET_IFNAME": INTERFACE}
        rank_options.append(ProcessOptions(("ip", "netns", "exec", host_name(host)), environment,
                          quota / "cgroup.procs" if quota and host == 0 else None))
    return rank_options


def remove_leftovers() -> None:
    """Kill the processes in this benchmark's namespaces; remove the namespaces and the cgroup."""
    names = [p.name for p in _NAMESPACES.glob(f"{PREFIX}*")] if _NAMESPACES.is_dir() else []
    for name in names:
        # `ip netns pids` fails for a partly created namespace, which has no processes.
        until = time.monotonic() + 10
        while time.monotonic() < until and (pids := subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True,
                check=False).stdout.split()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)
    root = _quota_root()
    if root is None:
        return
    folder = root[0] / f"{PREFIX}0"
    for _ in range(50):  # a killed process leaves the cgroup a moment later
        with contextlib.suppress(FileNotFoundError, OSError):
            folder.rmdir()
        if not folder.exists():
            break
        time.sleep(0.1)
