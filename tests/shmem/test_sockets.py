"""Exchanges over TCP between ranks of this process, and how their connections are made."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng

from oper.errors import OperError
from oper.shmem.group import connections
from oper.shmem.group.connections import connect, receive
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.library import register
from tests.runtime_support import run_ranks

DONE, WAITS, LOST, UNEXPECTED = range(4)


class Rank:
    """One end of the exchanges, within this process."""

    def __init__(self, rank: int, connections: list[socket.socket | None]) -> None:
        self.ops, self.connections = torch.ops.oper, connections
        for peer in connections:
            if peer is not None:
                peer.setblocking(False)
        self.handle = self.ops.sockets_open([c.fileno() if c else -1 for c in connections])

    def begin(self, send: list[np.ndarray], recv_bytes: list[int]) -> bool:
        self.received = torch.zeros(sum(recv_bytes), dtype=torch.uint8)
        self.recv_bytes = recv_bytes
        self.sent = torch.from_numpy(np.concatenate(send))
        return bool(self.ops.sockets_begin(self.handle, self.sent, [x.size for x in send],
                                           self.received, recv_bytes))

    def run(self, timeout_ms: int = 1) -> tuple[int, int]:
        result, rank = self.ops.sockets_run(self.handle, timeout_ms)
        return result, rank

    def close(self) -> None:
        self.ops.sockets_close(self.handle)
        for peer in self.connections:
            if peer is not None:
                peer.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


def make(world_size: int) -> list[Rank]:
    register()
    grid: list[list[socket.socket | None]] = [[None] * world_size for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            grid[a][b], grid[b][a] = _pair()
    return [Rank(r, grid[r]) for r in range(world_size)]


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    found = make(3)
    yield found
    for rank in found:
        rank.close()


@pytest.mark.parametrize("most", [3, 1 << 12, 3 << 20])
def test_every_byte_arrives(ranks: list[Rank], most: int) -> None:
    """Segments have unequal sizes, are partly empty, and exceed the socket buffers.

    All ranks run alternately on one thread, so a rank that served its peers one after another would
    never finish.
    """
    rng = default_rng(most)
    for _ in range(3):
        data = [[rng.integers(0, 256, int(rng.integers(0, most + 1)) * int(rng.integers(0, 2)),
                              np.uint8) for _ in ranks] for _ in ranks]
        for r, rank in enumerate(ranks):
            assert rank.begin(data[r], [data[s][r].size for s in range(3)])
        left = set(range(3))
        while left:
            left -= {r for r in left if ranks[r].run()[0] == DONE}
        for r, rank in enumerate(ranks):
            expected = np.concatenate([data[s][r] for s in range(3)])
            assert np.array_equal(rank.received.numpy(), expected)


def _bytes(n: int) -> list[np.ndarray]:
    return [np.full(n, 7, np.uint8)] * 3


def test_a_peer_that_is_late_is_waited_for(ranks: list[Rank]) -> None:
    ranks[0].begin(_bytes(8), [8] * 3)
    ranks[1].begin(_bytes(8), [8] * 3)
    assert [ranks[r].run(20)[0] for r in (0, 1)] == [WAITS, WAITS]
    assert not ranks[0].begin(_bytes(8), [8] * 3), "the exchange before is not done"


def test_a_lost_peer_is_named(ranks: list[Rank]) -> None:
    ranks[1].begin(_bytes(8), [8] * 3)
    ranks[2].close()
    assert ranks[1].run(1000) == (LOST, 2)


@pytest.mark.parametrize("skips, num_bytes", [(0, 9), (1, 8)])
def test_another_exchange_is_refused(ranks: list[Rank], skips: int, num_bytes: int) -> None:
    """Refuses a wrong number of bytes, and a rank that has skipped an exchange."""
    for _ in range(skips):
        ranks[0].begin([np.zeros(0, np.uint8)] * 3, [0] * 3)
        assert ranks[0].run()[0] == DONE
    ranks[0].begin(_bytes(8), [8] * 3)
    ranks[1].begin(_bytes(num_bytes), [8] * 3)
    ranks[1].run()
    assert ranks[0].run(1000) == (UNEXPECTED, 1)


def test_a_connection_without_the_token_is_refused(ranks: list[Rank]) -> None:
    ranks[0].begin(_bytes(8), [8] * 3)
    peer = ranks[1].connections[0]
    assert peer is not None
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    assert ranks[0].run(1000) == (UNEXPECTED, 1)


class _Besieged:
    """Connect a rank to whose port other processes connect before the other ranks do."""

    def __init__(self, group: ThreadGroup, strangers: list[socket.socket]) -> None:
        self._group, self._strangers = group, strangers
        self.rank, self.world_size = group.rank, group.world_size

    def all_gather(self, value: Any) -> list[Any]:
        everyone = self._group.all_gather(value)
        if self.rank == 0 and value is not None:
            for host, port, _ in everyone:
                self._strangers += [socket.create_connection((host, port)) for _ in range(3)]
                self._strangers[-1].sendall(b"GET / HTTP/1.1\r\n")
                self._strangers[-2].sendall(b"x" * 100)
        self._group.all_gather(None)
        return everyone


def test_other_connections_cause_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that send nothing, an incomplete greeting, or a wrong greeting cause no delay."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    strangers: list[socket.socket] = []
    begin = time.monotonic()
    peers = run_ranks(3, lambda group: connect(_Besieged(group, strangers)))
    assert time.monotonic() - begin < 20
    for a in range(3):
        assert sorted(peers[a]) == [r for r in range(3) if r != a]
        for b, peer in peers[a].items():
            peer.sendall(bytes([10 * a + b]))
    for a in range(3):  # a single byte is received
        for b, peer in peers[a].items():
            assert select.select([peer], [], [], 10)[0] == [peer]
            assert peer.recv(2) == bytes([10 * b + a])
    for connection in [*strangers, *(p for of in peers for p in of.values())]:
        connection.close()


class _Group:
    """Rank 2 of a group, in which rank 0 listens at `address` and rank 1 does not listen."""

    rank, world_size, is_local = 2, 3, False

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def all_gather(self, value: Any) -> list[Any]:
        with socket.create_server(("", 0)) as server:
            closed = server.getsockname()[1]
        return [(*self._address, b"t" * 32), (self._address[0], closed, b""), value]


def test_a_rank_that_cannot_connect_to_all_closes_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with pytest.raises(OperError, match="cannot connect to the other ranks"):
            connect(_Group(server.getsockname()[:2]))
        peer, _ = server.accept()
        with peer:
            assert receive(peer, 100)[:32] == b"t" * 32  # the greeting, then the end


class _Waiting:
    """Rank 0 of a group, to which rank 1 and another process connect and rank 2 does not."""

    rank, world_size, is_local = 0, 3, False

    def __init__(self) -> None:
        self.connected: list[socket.socket] = []

    def all_gather(self, value: Any) -> list[Any]:
        for hello in (connections._HELLO.pack(value[2], 1), b"GET"):
            self.connected.append(socket.create_connection(("127.0.0.1", value[1]), 10))
            self.connected[-1].sendall(hello)
        return [value] * 3


def test_a_rank_to_which_not_all_connect_closes_its_connections(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CONNECT_S", 0.3)
    group = _Waiting()
    with pytest.raises(OperError, match="cannot connect to the other ranks") as error:
        connect(group)
    for peer in group.connected:
        with peer, contextlib.suppress(ConnectionResetError):  # if bytes were not read
            assert receive(peer, 1) == b""
    assert error.value.__cause__ is not None  # whose frames keep sockets alive
