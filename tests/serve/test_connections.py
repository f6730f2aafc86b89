"""Connections of the server and their limits; traces of requests."""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError
from oper.serve import Client, ServeOptions, Server, metrics, tracing, wire
from oper.serve.client import ServerError, _Connection
from oper.serve.connection import Connection
from oper.serve.signals import Signals
from oper.support.trace_events import write_trace
from tests.serve_support import Sums, expected, random_request, value_of
from tests.support import read_trace, wait_for

READ_S = 2.0
KEEP_ALIVE_S = 2
MAX_CONNECTIONS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServeOptions(port=0, workers=1, max_bytes=1 << 20, read_s=READ_S,
                           keep_alive_s=KEEP_ALIVE_S, max_connections=MAX_CONNECTIONS)
    with Server(Sums(0.01), options) as server:
        yield server


def connect(server: Server, buffer: int | None = None) -> socket.socket:
    """Connect; `buffer` limits the bytes of answers that the client's host takes unread."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    host, port = server.address.split(":")
    connection.connect((host, int(port)))
    return connection


def test_requests_go_to_the_worker_with_the_fewest() -> None:
    client = Client("127.0.0.1:1")
    for worker in ("x", "x", "y", "x"):
        connection = _Connection("127.0.0.1:1")
        connection.worker = worker
        client._idle.append(connection)
    taken = [client._take().worker for _ in range(5)]
    assert taken == ["x", "y", "x", "x", None]  # the last used first; then a new connection
    assert [c.worker for c in client._busy] == taken and not client._idle
    client._idle = [client._busy.pop(1), client._busy.pop(1)]  # y, then x, have answered
    assert client._take().worker == "y"  # x has two more requests


def test_endless_and_slow_requests_are_cut_off(server: Server, client: Client) -> None:
    """The server closes connections with endless heads, bodies or trailers, or slow bytes."""
    start = b"POST /v2/models/sums/infer HTTP/1.1\r\nhost: x\r\n"

    def is_cut(connection: socket.socket, first: bytes, again: bytes, times: int) -> bool:
        try:
            connection.sendall(first)
            for _ in range(times):
                connection.sendall(again)
        except ConnectionError:
            return True
        return False

    slow, silent = connect(server), connect(server)
    slow.sendall(b"P")  # begun: from here on it is the head that takes long
    silent.sendall(start)
    begun = time.monotonic()
    line = b"x-%d: " % 7 + b"y" * 8000 + b"\r\n"
    chunked = start + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n" % (1 << 16) + b"z" * (1 << 16) + b"\r\n"
    for first, again, times in (
            (start, line, 2000), (chunked + b"0\r\n", line, 4000), (b"GET /", b"a" * 8000, 2000),
            (chunked, chunk, 1000)):  # 65 MB: more than lies in any buffer on the way
        with connect(server) as connection:
            assert is_cut(connection, first, again, times)
    good = random_request(np.random.default_rng(3), 2)
    while time.monotonic() < begun + READ_S + 60:
        assert np.array_equal(client.score_request(good)[0], expected(good))
        time.sleep(0.1)
        try:
            slow.sendall(b"P")
        except ConnectionError:
            break
    else:
        raise AssertionError("a head that never ends was waited for")
    silent.settimeout(READ_S + 60)
    with silent, contextlib.suppress(ConnectionError):
        assert silent.recv(100).startswith(b"HTTP/1.1 400")
    slow.close()
    assert client.counts.retries == 0


def talk(server: Server, data: bytes) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    with connect(server) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def message(sample: int, more: str = "") -> bytes:
    body, length = wire.encode_request(random_request(np.random.default_rng(sample), 2))
    return (f"POST /v2/models/sums/infer HTTP/1.1\r\nhost: x\r\n{wire.HEADER_LENGTH}: {length}\r\n"
            f"{more}content-length: {len(body)}\r\n\r\n").encode() + body


def test_requests_that_do_not_wait_are_answered_in_their_order(server: Server) -> None:
    """Answers keep the order of requests even if the second request could be answered first."""
    live = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    whole = b"".join(message(k) + live for k in range(40))
    found = talk(server, whole + b"HEAD /nowhere?x=1 HTTP/1.1\r\nconnection: close\r\n\r\n")
    heads = [part.split(b"\r\n\r\n")[0] for part in found.split(b"HTTP/1.1 ")[1:]]
    assert [h[:3] for h in heads] == [b"200", b"200"] * 40 + [b"404"]
    assert found.endswith(b"connection: close\r\n\r\n")  # the answer to HEAD has no body
    scores = [float(x) for k in range(40) for x in expected(random_request(
        np.random.default_rng(k), 2))]
    received = []
    for part in found.split(b"oper-worker")[1:]:
        head, body = part.split(b"\r\n\r\n", 1)
        size = int(head.split(b"inference-header-content-length: ")[1].split(b"\r\n")[0])
        received += np.frombuffer(body[size:size + 8], "<f4").tolist()
    assert received == scores


def test_a_body_is_asked_for_after_earlier_answers(server: Server) -> None:
    head, body = message(2, "expect: 100-continue\r\nconnection: close\r\n").split(
        b"\r\n\r\n", 1)
    with connect(server) as connection:
        connection.settimeout(READ_S / 2)
        connection.sendall(message(1) + head + b"\r\n\r\n")
        answers = connection.makefile("rb")
        while not answers.readline().endswith(b"HTTP/1.1 100 Continue\r\n"):
            pass
        connection.sendall(body)
        assert answers.read().startswith(b"\r\nHTTP/1.1 200 ")


@pytest.mark.parametrize(("data", "begins"), [
    (message(1).replace(b"HTTP/1.1", b"HTTP/1.0", 1), b"HTTP/1.1 200 "),
    (message(1, "connection: close\r\n"), b"HTTP/1.1 200 "),
    (message(1, "expect: 100-continue\r\nconnection: close\r\n"),
     b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 "),
    (message(1, "expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
     b"HTTP/1.1 200 "),
    (b"POST /v2/models/sums/infer HTTP/1.1\r\nexpect: 100-continue\r\n"
     b"content-length: 2000000\r\n\r\n", b"HTTP/1.1 413 "),
    (message(1, "connection: upgrade\r\nupgrade: h2c\r\n"), b"HTTP/1.1 400 "),
    (b"GET /v2 HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"HTTP/1.1 200 "),
    (b"GET http://x/v2/health/live HTTP/1.1\r\nconnection: close\r\n\r\n", b"HTTP/1.1 200 "),
    (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"HTTP/1.1 404 "),
    (b"POST /v2/models/sums/infer HTTP/1.1\r\ncontent-length: 9999999999\r\n\r\nx",
     b"HTTP/1.1 413 "),
    (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx", b"HTTP/1.1 400 "),
    (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
     b"HTTP/1.1 400 "),
    (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"HTTP/1.1 400 "),
    (b"\x16\x03\x01\x02\x00\x01\x00", b"HTTP/1.1 400 "), (b"PRI * HTTP/2.0\r\n\r\n", b"HTTP/1.1 "),
])
def test_the_connection_ends_with_the_answer(server: Server, data: bytes, begins: bytes) -> None:
    found = talk(server, data)
    assert found.startswith(begins), found
    assert b"connection: close\r\n" in found


def test_many_requests_at_once_let_other_connections_have_their_turn() -> None:
    """A worker answers a part of them before it looks at its other sockets."""
    found: list[Any] = []
    app: Any = SimpleNamespace(handle=found.append, options=ServeOptions())
    with (socket.create_server(("127.0.0.1", 0)) as listener,
          socket.create_connection(listener.getsockname()) as client,
          selectors.DefaultSelector() as selector):
        one = Connection(listener.accept()[0], app, selector, found.remove)
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 5000)
        assert selector.select(60)
        one.on_ready(selectors.EVENT_READ)
        assert 0 < len(found) < 1000 and not selector.get_map()  # waits until some are answered
        one._socket.close()


def test_a_client_that_reads_no_answers_is_disconnected(server: Server, client: Client) -> None:
    """The server neither buffers answers without limit nor reads further requests of this client.
    """
    with connect(server, 4096) as deaf:
        deaf.settimeout(READ_S + 60)
        with pytest.raises(ConnectionError):
            while True:
                deaf.sendall(b"GET /v2/models/sums HTTP/1.1\r\n\r\n" * 1000)
    good = random_request(np.random.default_rng(3), 2)
    assert np.array_equal(client.score_request(good)[0], expected(good))


def test_a_client_that_reads_late_gets_all_answers_and_may_go_on(server: Server) -> None:
    """Its answers fill all buffers on the way, so that the server stops reading and resumes."""
    ask, count = b"GET /v2/models/sums HTTP/1.1\r\n\r\n", 20_000
    with connect(server, 4096) as late:
        sender = threading.Thread(target=late.sendall, args=(ask * count,))
        sender.start()
        time.sleep(0.3)  # most likely the server is blocked by then
        answers = late.makefile("rb")
        for _ in range(count):
            assert answers.readline().startswith(b"HTTP/1.1 200")
            size = 0
            while (line := answers.readline()) != b"\r\n":
                size = int(line[16:]) if line.startswith(b"content-length: ") else size
            assert json.loads(answers.read(size))["name"] == "sums"
        sender.join()
        late.sendall(ask)
        assert answers.readline().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("rest", [b"", b"GET /v2", message(4)[:-1]])
def test_a_client_that_has_finished_sending_gets_its_answers(server: Server, rest: bytes) -> None:
    """The client gets them even if its last request is incomplete."""
    with connect(server) as half:
        half.sendall(message(1) + message(2) + rest)
        half.shutdown(socket.SHUT_WR)
        answers = half.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 200") == 2 == answers.count(b"HTTP/1.1 ")


def test_incomplete_requests_are_dropped(server: Server, client: Client) -> None:
    name = r'oper_requests_total\{outcome="gone"\}'
    before = value_of(client.metrics(), name)
    connection = connect(server)
    connection.sendall(b"POST /v2/models/sums/infer HTTP/1.1\r\ncontent-length: 100\r\n\r\nabc")
    time.sleep(0.2)  # most likely the server has seen it by then; it counts in any case
    connection.close()
    wait_for(lambda: value_of(client.metrics(), name) == before + 1)
    assert value_of(client.metrics(), "oper_requests_in_flight") == 0


def test_damaged_http_never_does_more_than_fail(server: Server, client: Client) -> None:
    """Requests with bytes changed, removed or doubled get an answer or a closed connection, and do
    not affect later requests."""
    good = random_request(np.random.default_rng(3), 2)
    whole, length = message(3, "oper-timeout-ms: 500\r\n"), wire.encode_request(good)[1]
    chunked = (b"POST /v2/models/sums/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
               b"\r\n5\r\nabcde\r\n0\r\n\r\n")
    restarts, pids = server.counts["worker_restarts"], server.worker_pids
    rng = random.Random(5)
    statuses = set()
    for k in range(200):
        damaged = bytearray(whole if k % 4 else chunked)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            # Mostly in the head: the body has tests of its own.
            at = at if k % 3 == 0 else at % (length + 100)
            if rng.random() < 0.6:
                damaged[at] = rng.choice((0, 13, 10, 255, 48 + rng.randrange(10),
                                          rng.randrange(256)))
            elif rng.random() < 0.5:
                del damaged[at:at + rng.randint(1, 9)]
            else:
                damaged[at:at] = damaged[at:at + rng.randint(1, 40)]
        with connect(server) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(damaged)
            connection.shutdown(socket.SHUT_WR)
            statuses.add(connection.recv(4096)[9:12])
    assert {b"400", b"404"} <= statuses, statuses
    # 504: of the deadline a digit is left, and the machine is busy.
    assert not {s for s in statuses if s.startswith(b"5")} - {b"504"}, statuses
    assert np.array_equal(client.score_request(good)[0], expected(good))
    assert (server.counts["worker_restarts"], server.worker_pids) == (restarts, pids)


def test_idle_connections_do_not_block_others_and_closed_ones_are_not_used(server: Server,
                                                                           client: Client) -> None:
    request = random_request(np.random.default_rng(0), 2)

    def score() -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(client.score_request, [request] * 16))
        assert all(np.array_equal(scores, expected(request)) for scores, _ in found)

    with contextlib.ExitStack() as idle:
        for k in range(8 * MAX_CONNECTIONS):  # many more than there may be
            one = idle.enter_context(connect(server))
            if k % 2:
                one.send(b"POST /v2")
        score()
    score()
    held = list(client._idle)
    assert held
    wait_for(lambda: all(c.is_closed() for c in held))  # the server keeps them for KEEP_ALIVE_S
    score()
    assert client.counts.requests == 48
    assert client.counts.retries == 0


def test_connections_beyond_those_with_a_request_are_refused(server: Server, client: Client
                                                             ) -> None:
    request = random_request(np.random.default_rng(0), 2)
    assert client.model == "sums"
    before = value_of(client.metrics(), 'oper_requests_total{outcome="overloaded"}')
    with ThreadPoolExecutor(1) as pool:
        with contextlib.ExitStack() as held:
            for _ in range(MAX_CONNECTIONS):  # the client's idle connection gives way
                one = held.enter_context(connect(server))
                one.sendall(b"POST /v2/models/sums/infer HTTP/1.1\r\nhost: x\r\nexpect: "
                            b"100-continue\r\ncontent-length: 9\r\n\r\n")
                assert one.recv(100).startswith(b"HTTP/1.1 100")
            answer = talk(server, b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
            assert b"expected <= 12" in answer
            scores = pool.submit(client.score_request, request)
            wait_for(lambda: client.counts.retries > 0)
        assert np.array_equal(scores.result()[0], expected(request))
    found = value_of(client.metrics(), 'oper_requests_total{outcome="overloaded"}')
    assert found - before == client.counts.retries


def test_idle_connections_give_way_if_file_descriptors_run_out() -> None:
    with Server(Sums(), ServeOptions(port=0, workers=1)) as server, contextlib.ExitStack() as held:
        worker = server.worker_pids[0]
        used = len(os.listdir(f"/proc/{worker}/fd"))
        _, most = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (used + 3, most))
        for _ in range(12):
            held.enter_context(connect(server))
        with Client(server.address, timeout_s=20) as client:
            assert client.score(np.zeros((1, 2)), {"a": np.array([5])}).tolist() == [5]


def test_a_request_that_is_refused_before_it_is_read_is_named(client: Client) -> None:
    with pytest.raises(ServerError, match="too large") as caught:
        client.score_request(random_request(np.random.default_rng(0), 200_000, True))
    assert (caught.value.status, client.counts.retries) == (413, 0)


def test_a_forked_child_reads_none_of_its_parents_answers(client: Client) -> None:
    client.score(np.zeros((1, 2)), {})  # a connection that both could use
    child = os.fork()
    good = False
    try:
        requests = [random_request(np.random.default_rng((child == 0, k)), 3) for k in range(20)]
        good = all(np.array_equal(client.score_request(x)[0], expected(x)) for x in requests)
    finally:
        if child == 0:
            os._exit(not good)
        status = os.waitpid(child, 0)[1]
    assert status == 0
    assert good
    assert client.counts.retries == 0


# ---- traces --------------------------------------------------------------------------------------

STAGES = list(metrics.STAGES)


def test_every_request_has_its_stages(tmp_path: Path) -> None:
    """Requests of several clients that overlap, on two workers."""
    path = tmp_path / "trace.json"
    with Server(Sums(0.005), ServeOptions(port=0, workers=2)) as server:
        client = Client(server.address, timeout_s=30)
        until = time.monotonic() + 1.0

        def flow(seed: int) -> list[tuple[float, float]]:
            request, found = random_request(np.random.default_rng(seed), 3), []
            while (begin := time.monotonic()) < until:
                client.score_request(request)
                found.append((begin, time.monotonic()))
            return found

        with ThreadPoolExecutor(6) as pool:
            flows = [pool.submit(flow, k) for k in range(6)]
            time.sleep(0.2)
            begin = time.monotonic()
            count = server.trace(path, 0.4)
            with pytest.raises(InvalidInputError, match="folder"):
                server.trace(tmp_path)
            asked = [x for f in flows for x in f.result()]
        client.close()
    with pytest.raises(InvalidInputError, match="state='stopped'"):
        server.trace(path)
    # Requests answered in the middle of the recording are in it for certain.
    certain = sum(begin + 0.1 < end < begin + 0.3 for _, end in asked)
    trace = read_trace(path)
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert trace["otherData"] == {"workers": 2, "lost_records": 0}
    lines = defaultdict(list)
    for e in bars:
        lines[e["pid"], e["tid"]].append(e)
    requests = 0
    for (_, thread), found in lines.items():
        if not thread:
            assert {e["name"] for e in found} == {"batch"}
            continue
        for k in range(0, len(found), 6):  # a request, then its stages, one after the other
            whole, *stages = found[k:k + 6]
            assert [whole["name"], *(e["name"] for e in stages)] == ["request", *STAGES]
            assert sum(e["dur"] for e in stages) == pytest.approx(whole["dur"], abs=0.01)
            assert (whole["args"]["samples"], whole["args"]["epoch"]) == (3, 1)
            assert k == 0 or whole["ts"] >= found[k - 6]["ts"] + found[k - 6]["dur"] - 0.002
        requests += len(found) // 6
    assert certain <= requests == count
    assert max(thread for _, thread in lines) > 1  # lines: requests of a worker overlap
    batched = sum(e["args"]["samples"] for e in bars if e["name"] == "batch")
    assert abs(batched - 3 * requests) <= 3 * 6 * 2  # but for those under way at begin or end


class _Worker:
    """A worker's metrics with a tracer, in one process."""

    def __init__(self, predictor: Any = None) -> None:
        shared = metrics.Shared(multiprocessing.get_context("spawn"), 1)
        self.counts = shared.counts
        self.metrics = metrics.WorkerMetrics(shared, 0, predictor or Sums())
        self.tracer = tracing.Tracer(shared)

    def request(self, k: int) -> None:
        self.metrics.observe_request(k, (k + 0.1, k + 0.2, k + 0.3, k + 0.4, k + 0.5), 1, 1)


def test_records_lost_by_a_full_ring_buffer_are_counted(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest record of a full ring is not used, since the worker may be replacing it."""
    monkeypatch.setattr(metrics, "_RECORDS", 8)
    worker = _Worker()
    worker.request(0)  # before it

    def write() -> bool:
        assert worker.counts.is_tracing
        for k in range(20):
            worker.request(k)
        return True  # ends the recording

    assert worker.tracer.record(tmp_path / "t.json", 60.0, write) == 7
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"]["lost_records"] == 13 and worker.counts.is_tracing == 0
    starts = [e["ts"] for e in trace["traceEvents"] if e["name"] == "request"]
    assert starts == [k * 1e6 for k in range(7)]


def test_a_recording_ends_before_it_takes_too_much_memory(tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST", 10)
    worker = _Worker()

    def write() -> bool:
        for k in range(6):
            worker.request(k)
        return False

    assert worker.tracer.record(tmp_path / "t.json", 60.0, write) == 12


class _Failing(Sums):
    """Its lookups cannot be recorded."""

    def trace_lookups(self, most: int) -> None:
        if self.seconds:
            raise ValueError("no memory")

    def take_lookups(self) -> list[Any]:
        return [(1.0,)]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_lookups_that_cannot_be_recorded_fail_no_batch(
        seconds: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = _Worker(_Failing(seconds))

    def write() -> bool:
        for k in range(3):
            worker.metrics.observe_batch(1, 1, k, k + 0.5)
        return True

    worker.tracer.record(tmp_path / "t.json", 60.0, write)
    names = [e["name"] for e in read_trace(tmp_path / "t.json")["traceEvents"] if e["ph"] == "X"]
    assert names == ["batch"] * 3
    assert caplog.text.count("the predictor cannot record them") == 1


def test_a_recording_leaves_the_publications_of_the_last_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next recording may begin while a trace is being written."""
    tracer, join = _Worker().tracer, tracing._joined

    def join_late(*arguments: Any) -> Any:
        monkeypatch.setattr(tracing, "_joined", join)
        tracer.record(tmp_path / "next.json", 0.01, lambda: False)
        return join(*arguments)

    def publish() -> bool:
        tracer.add_publication(1.0, 2.0, 7)
        return True

    monkeypatch.setattr(tracing, "_joined", join_late)
    tracer.record(tmp_path / "t.json", 60.0, publish)
    for name, number in (("t.json", 1), ("next.json", 0)):
        assert (tmp_path / name).read_text().count('"publication"') == number


def test_a_stopping_server_finishes_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    server = Server(Sums(), ServeOptions(trace=str(tmp_path / "t.json"), trace_s=60.0))
    signals, worker = Signals(), _Worker()

    def write_late(*arguments: Any) -> None:
        time.sleep(0.3)
        write_trace(*arguments)

    monkeypatch.setattr(tracing, "write_trace", write_late)
    server._thread, server._tracer = threading.Thread(target=server._stop.wait), worker.tracer
    server._thread.start()
    signals.trace = True

    def stop_soon() -> None:
        signals.stop = bool(worker.counts.is_tracing)

    server.serve_until_signalled(stop_soon, signals)
    assert read_trace(tmp_path / "t.json")["otherData"]["lost_records"] == 0


@pytest.mark.parametrize("path", ["", "pages"])
def test_files_that_cannot_be_written_are_refused(
        path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="writable folder"):
        tracing.check_trace(path, 5.0)


def test_a_server_that_was_not_started_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not started"):
        Server(Sums()).trace(tmp_path / "t.json")
