"""TCP connections between all ranks of a group, one for each pair."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import time

from oper.errors import OperError
from oper.shmem.group.groups import Group
from oper.support.processes import in_child

_CONNECT_S = 60.0
_HELLO = struct.Struct("<32sq")
_SIOCGIFADDR = 0x8915


def connect(group: Group) -> dict[int, socket.socket]:
    """Connect to every other rank; returns sockets by rank. Collective.

    A peer must send a token that only the group's ranks know. Connections of other processes are
    closed and delay no rank.

    Raises:
        OperError: ranks cannot reach each other; the message lists the addresses tried.
    """
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=group.world_size) as server:
        own = (_own_address(), server.getsockname()[1], secrets.token_bytes(32))
        everyone = group.all_gather(own)
        token = everyone[0][2]
        try:
            for rank in range(group.rank):
                peer = socket.create_connection(everyone[rank][:2], timeout=_CONNECT_S)
                peers[rank] = peer
                peer.sendall(_HELLO.pack(token, group.rank))
            _accept(peers, server, token, group)
        except OSError as error:
            for peer in peers.values():
                peer.close()
            raise OperError(
                "cannot connect to the other ranks", "addresses", [e[:2] for e in everyone][:8],
                "hosts that can reach each other",
                f"set GLOO_SOCKET_IFNAME to the interface between them ({error})") from error
    for peer in peers.values():
        # So that peers notice immediately when this process ends: a forked child, for example a
        # worker of a DataLoader, may run on.
        in_child(peer, socket.socket.close)
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    group.all_gather(None)
    return peers


def _accept(peers: dict[int, socket.socket], server: socket.socket, token: bytes, group: Group
            ) -> None:
    """Add the connections of the higher ranks to `peers`, which has those of the lower ones."""
    deadline = time.monotonic() + _CONNECT_S
    server.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        try:
            while len(peers) < group.world_size - 1:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"waited {_CONNECT_S:g} s")
                for key, _ in ready.select(deadline - time.monotonic()):
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if peer is server:
                        # It may have left.
                        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                            peer, _ = server.accept()
                            peer.setblocking(False)
                            # Readable once the complete handshake has arrived, or on disconnect.
                            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _HELLO.size)
                            ready.register(peer, selectors.EVENT_READ)
                        continue
                    ready.unregister(peer)
                    rank = rank_of(peer, token, group)
                    if rank is None or rank in peers:
                        peer.close()
                    else:
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                        peers[rank] = peer
        finally:
            for key in list(ready.get_map().values()):  # connections that sent no handshake
                if key.fileobj is not server:
                    key.fileobj.close()  # type: ignore[union-attr]


def rank_of(peer: socket.socket, token: bytes, group: Group) -> int | None:
    """Read a peer's handshake; returns its rank, or None if it does not know the token."""
    with contextlib.suppress(OSError, struct.error):
        said, rank = _HELLO.unpack(receive(peer, _HELLO.size))
        if secrets.compare_digest(said, token) and group.rank < rank < group.world_size:
            return int(rank)
    return None


def receive(peer: socket.socket, num_bytes: int) -> bytes:
    """Receive `num_bytes`, fewer if the connection closes first."""
    data = bytearray()
    while len(data) < num_bytes and (more := peer.recv(min(num_bytes - len(data), 1 << 20))):
        data += more
    return bytes(data)


def _own_address() -> str:
    """Return this host's IPv4 address on the interface that gloo uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if name:
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR,
                                    struct.pack("256s", name.encode()[:15]))
                return socket.inet_ntoa(found[20:24])
        master = os.environ.get("MASTER_ADDR", "")
        # MASTER_ADDR may resolve to a loopback address; the default route then gives the address.
        for host in (master, "192.0.2.1"):
            with contextlib.suppress(OSError):
                probe.connect((host, 9))  # nothing is sent: the kernel only chooses an interface
                address = str(probe.getsockname()[0])
                if not address.startswith("127.") or master in ("localhost", address):
                    return address
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
