"""Memory domains: which ranks of a group can address each other's memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

from oper.errors import InvalidInputError
from oper.shmem.group.groups import Group

DOMAIN_ENV = "OPER_DOMAIN"
_CONNECT_S = 5.0


class DomainGroup:
    """A `Group` of the ranks of one memory domain, numbered from 0 within the domain.

    Collectives involve all ranks of all domains, so all domains must make the same calls.

    Attributes:
        whole: the group of all ranks.
        rank: number of this rank within its domain.
        world_size: number of ranks in the domain.
        members: ranks of the domain in `whole`, ascending.
    """

    def __init__(self, group: Group, members: list[int]) -> None:
        self.whole = group
        self.members = members
        self.rank = members.index(group.rank)
        self.world_size = len(members)
        self.is_local = group.is_local

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of the domain's ranks. Collective over `whole`."""
        values = self.whole.all_gather(value)
        return [values[rank] for rank in self.members]


def find_domains(group: Group) -> list[int]:
    """Return the index of each rank's memory domain, int [W]. Collective.

    Domains are numbered in the order of their lowest ranks. Ranks share a domain if they run as one
    user on one kernel, in the same PID, user and network namespaces, have the same value of the
    environment variable ``OPER_DOMAIN``, and can connect to each other's local sockets.

    Raises:
        InvalidInputError: the `domains` of a `ThreadGroup` do not have one entry per rank.
    """
    if group.world_size == 1:
        return [0]
    if group.is_local:
        return _stated(getattr(group, "domains", None), group.world_size)
    with private_server(group.world_size) as server:
        everyone = group.all_gather((_identity(), os.getpid(), server.getsockname()))
        mine = everyone[group.rank][0]
        reached = {rank for rank, (identity, pid, peer) in enumerate(everyone)
                   if rank == group.rank or (identity == mine and _reaches(peer, pid))}
        # The server must stay open until all ranks have tried to connect.
        sees = group.all_gather(reached)
    domains: list[list[int]] = []
    for rank in range(group.world_size):
        for members in domains:
            if all(m in sees[rank] and rank in sees[m] for m in members):
                members.append(rank)
                break
        else:
            domains.append([rank])
    return [next(k for k, members in enumerate(domains) if rank in members)
            for rank in range(group.world_size)]


def _stated(labels: Any, world_size: int) -> list[int]:
    """Number the domains of virtual ranks from 0, given a label for each rank."""
    if labels is None:
        return [0] * world_size
    if len(labels) != world_size:
        raise InvalidInputError("cannot determine memory domains", "domains", labels,
                                f"{world_size} labels, one per rank", "pass one label per rank")
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return [number[label] for label in labels]


def _identity() -> tuple[str, ...]:
    """Return a value that is equal for processes that may share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "net")]
    return (os.environ.get(DOMAIN_ENV, ""), socket.gethostname(), boot, str(os.getuid()), *spaces)


def private_server(backlog: int) -> socket.socket:
    """Return a socket that listens under an abstract name of its own, which other processes learn
    from this one only."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0oper-{os.getpid()}-{secrets.token_hex(16)}")
    server.listen(backlog)
    return server


def _reaches(name: bytes, pid: int) -> bool:
    """Return whether the process `pid` listens on the abstract socket `name`."""
    with contextlib.suppress(OSError):
        os.close(os.pidfd_open(pid))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(name)
            return peer_credentials(probe)[0] == pid
    return False


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the PID and user id of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
