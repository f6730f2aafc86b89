"""The client of the serving benchmark: LoadGen in a separate process sends queries over HTTP.

LoadGen (C++) issues queries on a fixed schedule, so that a slow server does not delay arrivals. The
Python code sends requests encoded before the run and records when each response is complete;
responses are decoded and compared after the run.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from oper.bench.core.child import Child, obey
from oper.bench.serve import loadgen
from oper.bench.serve.models import ServeWork
from oper.errors import OperError

TOLERANCE = 1e-5  # absolute error of a score, since requests are batched differently
_CONNECTIONS = 64  # limit of the queries in flight
_ANSWER_S = 60.0  # time limit of a command, in addition to the length of a run
_PATIENCE_S = 10.0  # time limit of a query, including retries
_PAUSE_S = 0.02  # delay before a retry
_SEND_BYTES = 1 << 20  # send buffer of a socket: sending a query does not block


@dataclass(slots=True)
class Seen:
    """The result of one run.

    Attributes:
        result: LoadGen's result.
        begin, end: times of issue and completion of each request, float64 [N], seconds on the clock
            of `time.monotonic`.
        epoch: epoch of the weights that scored each request, int64 [N]; 0 = failed.
        wrong: number of requests whose scores differ from the expected ones of their epoch.
        failed: number of requests without scores.
        retries: number of times that a request was sent again.
        messages: up to 5 messages of failed requests.
        cores: mean number of cores that the client kept busy, including LoadGen.
        unchecked: query index, epoch and scores float32 [candidates] of each response, if no
            expected scores are known.
    """

    result: loadgen.Result
    begin: np.ndarray
    end: np.ndarray
    epoch: np.ndarray
    wrong: int
    failed: int
    retries: int
    messages: list[str]
    cores: float = 0.0
    unchecked: list[tuple[int, int, np.ndarray]] = field(default_factory=list)

    @property
    def latency_ms(self) -> np.ndarray:
        """Time (ms) from LoadGen's issue to the complete response, float64 [N]."""
        return (self.end - self.begin) * 1e3


class LoadClient(Child):
    """Sends LoadGen's queries to a running server, from another process.

    Args:
        address: address of the server, ``HOST:PORT``.
        served: the model and its queries.
        once: whether a query has its user features once instead of once per candidate.

    Attributes:
        seen: results of all runs so far.
    """

    def __init__(self, address: str, served: ServeWork, once: bool = False) -> None:
        super().__init__(_client, (address, served, once), "the client of the benchmark")
        self.seen: list[Seen] = []
        self.wait(_ANSWER_S)

    def learn(self) -> np.ndarray:
        """Send all queries one by one and store their scores as the expected ones.

        They are the expected scores of all epochs with the current epoch's parity, since two sets
        of weights alternate.

        Returns:
            Scores float32 [num_queries, candidates].
        """
        scores: np.ndarray = self.ask("learn", seconds=10 * _ANSWER_S)
        return scores

    def start(self, settings: loadgen.Settings) -> None:
        """Start a run; returns when LoadGen issues its first query."""
        self.ask("run", settings)

    def finish(self, seconds: float) -> Seen:
        """Wait for the started run, whose length is about `seconds`, and return its result."""
        self.seen.append(self.wait(seconds + 5 * _ANSWER_S))
        return self.seen[-1]

    def run(self, settings: loadgen.Settings) -> loadgen.Result:
        """Run LoadGen once; returns its result."""
        self.start(settings)
        return self.finish(settings.min_duration_s).result


@dataclass(slots=True)
class _Query:
    """One of LoadGen's queries in flight."""

    number: int
    index: int
    begin: float


class _Line:
    """A connection with at most one query in flight."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.socket = socket.create_connection(place, _PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        # The worker that owns the connection (known after the first response), and the one in whose
        # count of queries in flight the current query is.
        self.worker = self.asked = b""
        self.query: _Query | None = None
        self.is_kept = True
        self._got = b""
        self._whole = 0

    def send(self, query: _Query, data: bytes) -> None:
        """Send a query over the connection; raises OSError."""
        self.query, self._got, self._whole = query, b"", 0
        self.socket.sendall(data)

    def read(self) -> bytes | None:
        """Read available bytes; returns the response with headers once it is complete, else None.
        Raises OSError if the connection is closed."""
        part = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        if not part:
            raise ConnectionError("closed by the server")
        self._got = self._got + part if self._got else part
        if not self._whole and (at := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:at + 2]
            self._whole = at + 4 + int(_field(head, b"content-length"))
            self.worker = _field(head, b"oper-worker") or self.worker
            self.is_kept = _field(head, b"connection") != b"close"
        return self._got if self._whole and len(self._got) >= self._whole else None


def _field(head: bytes, name: bytes) -> bytes:
    """The value of header `name`, in the form that `oper.serve.connection` writes; empty if
    missing."""
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


class _Sender:
    """Sends queries over up to `connections` connections, read by one thread. LoadGen's thread and
    the reading thread share all state under `_lock`."""

    def __init__(self, address: str, served: ServeWork, connections: int, once: bool = False
                 ) -> None:
        from oper.serve.wire import HEADER_LENGTH, encode_request

        host, _, port = address.rpartition(":")
        self._place, self._most = (host.strip("[]"), int(port)), connections
        self._messages = []
        for request in map(served.query, range(served.num_queries)):
            body, length = encode_request(request.expanded()) if not once else encode_request(
                request, served.signature.features)
            self._messages.append(
                f"POST /v2/models/{served.signature.name}/infer HTTP/1.1\r\nhost: {address}\r\n"
                f"content-type: application/octet-stream\r\n{HEADER_LENGTH}: {length}\r\n"
                f"oper-timeout-ms: {_PATIENCE_S * 1e3:.0f}\r\ncontent-length: {len(body)}\r\n\r\n"
                .encode() + body)
        self._expected: dict[int, np.ndarray] = {}  # by epoch modulo 2
        self._lock = threading.RLock()
        self._idle: list[_Line] = []
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._asked: Counter[bytes] = Counter()  # queries in flight, by worker
        self._waiting: deque[_Query] = deque()
        self._again: deque[tuple[float, _Query]] = deque()  # retries by time
        self._answers: list[tuple[float, float, int, bytes]] = []
        self._failures: list[str] = []
        self._retries = 0
        self._poll = select.epoll()
        threading.Thread(target=self._read, daemon=True).start()

    def learn(self) -> np.ndarray:
        found = []
        for index in range(len(self._messages)):
            line = _Line(self._place)
            with line.socket:
                line.send(_Query(0, index, 0.0), self._messages[index])
                select.select([line.socket], [], [], _ANSWER_S)
                while (answer := line.read()) is None:
                    select.select([line.socket], [], [], _ANSWER_S)
            found.append(_scores(answer))
        epochs = {epoch for _, epoch in found}
        if len(epochs) != 1:
            raise OperError("cannot learn the scores", "epochs", sorted(epochs), "one",
                            "do not publish while the scores are being learned")
        scores = np.stack([s for s, _ in found])
        self._expected[epochs.pop() % 2] = scores
        return scores

    def run(self, settings: loadgen.Settings, on_start: Callable[[], None] = lambda: None) -> Seen:
        self._answers, self._failures, self._retries = [], [], 0
        begin, busy = time.perf_counter(), time.process_time()
        waiting = [on_start]

        def issue(pairs: list[tuple[int, int]]) -> None:
            if waiting:
                waiting.pop()()
            self._issue(pairs)

        result = loadgen.run(settings, issue)
        cores = (time.process_time() - busy) / (time.perf_counter() - begin)
        wrong, epochs = 0, list[int]()
        unchecked: list[tuple[int, int, np.ndarray]] = []
        for _, _, index, answer in self._answers:
            epochs.append(0)
            if answer:
                scores, epochs[-1] = _scores(answer)
                if self._expected:
                    wrong += not same(scores, self._expected[epochs[-1] % 2][index])
                else:
                    unchecked.append((index, epochs[-1], scores))
        times = np.array([(b, e) for b, e, _, _ in self._answers]).reshape(-1, 2)
        return Seen(result, times[:, 0], times[:, 1], np.array(epochs, np.int64), wrong,
                    len(self._failures), self._retries, self._failures[:5], cores, unchecked)

    def _issue(self, pairs: list[tuple[int, int]]) -> None:
        now = time.monotonic()
        with self._lock:
            self._waiting.extend(_Query(number, index, now) for number, index in pairs)
            self._send()

    def _send(self) -> None:
        """Send waiting queries while connections are available. `_lock` must be held."""
        while self._waiting and (line := self._line()) is not None:
            query = self._waiting.popleft()
            self._asked[line.worker] += 1
            line.asked = line.worker
            try:
                line.send(query, self._messages[query.index])
            except OSError as error:
                self._cut(line, error)

    def _line(self) -> _Line | None:
        """An idle connection to the worker with the fewest queries in flight; a new connection if
        that worker has any and the limit allows it; None if neither is available."""
        line = min(reversed(self._idle), key=lambda x: self._asked[x.worker], default=None)
        if line is not None and (not self._asked[line.worker] or len(self._lines) >= self._most):
            self._idle.remove(line)
            return line
        if len(self._lines) >= self._most:
            return None
        try:
            line = _Line(self._place)
        except OSError as error:
            self._later(self._waiting.popleft(), error)
            return None
        self._lines[line.socket.fileno()] = line
        self._poll.register(line.socket, select.EPOLLIN)
        return line

    def _cut(self, line: _Line, error: Exception | None = None) -> None:
        """Close a connection; with `error`, schedule a retry of its query."""
        self._poll.unregister(line.socket)
        del self._lines[line.socket.fileno()]
        line.socket.close()
        if line in self._idle:
            self._idle.remove(line)
        if line.query is not None and error is not None:
            self._asked[line.asked] -= 1
            self._later(line.query, error)

    def _later(self, query: _Query, error: Exception | str) -> None:
        """Schedule a retry of a query, or fail it if it was first sent more than `_PATIENCE_S`
        ago."""
        now = time.monotonic()
        if now - query.begin > _PATIENCE_S:
            self._failures.append(str(error))
            self._finish(query, b"")
        else:
            self._retries += 1
            self._again.append((now + _PAUSE_S, query))

    def _finish(self, query: _Query, answer: bytes) -> None:
        self._answers.append((query.begin, time.monotonic(), query.index, answer))
        loadgen.complete([query.number])

    def _read(self) -> None:
        while True:
            ready = self._poll.poll(_PAUSE_S if self._again else 0.2)
            with self._lock:
                for number, _ in ready:
                    if number in self._lines:
                        self._hear(self._lines[number])
                while self._again and self._again[0][0] <= time.monotonic():
                    self._waiting.append(self._again.popleft()[1])
                self._send()

    def _hear(self, line: _Line) -> None:
        try:
            answer = line.read()
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._cut(line, error)
            return
        query = line.query
        if answer is None or query is None:
            return
        self._asked[line.asked] -= 1
        line.query = None
        if line.is_kept:
            self._idle.append(line)
        else:
            self._cut(line)
        if answer.startswith(b"HTTP/1.1 200 "):
            self._finish(query, answer)
        elif answer.startswith(b"HTTP/1.1 503 "):
            self._later(query, "overloaded")
        else:
            self._failures.append(answer.partition(b"\r\n\r\n")[2].decode("latin-1"))
            self._finish(query, b"")


def same(scores: np.ndarray, expected: np.ndarray) -> bool:
    """Whether all scores equal the expected ones within `TOLERANCE`."""
    return bool(np.abs(scores - expected).max() <= TOLERANCE)


def _scores(answer: bytes) -> tuple[np.ndarray, int]:
    """Scores and epoch of a response with its headers; raises OperError if it has none."""
    from oper.serve.wire import HEADER_LENGTH, decode_scores

    head, _, body = answer.partition(b"\r\n\r\n")
    length = _field(head + b"\r\n", HEADER_LENGTH.encode())
    if not head.startswith(b"HTTP/1.1 200 ") or not length:
        raise OperError("the server returned no scores", "answer", answer[:200], "scores",
                        "see its log above")
    return decode_scores(body, int(length))


def _client(control: Any, address: str, served: ServeWork, once: bool) -> None:
    sender = _Sender(address, served, _CONNECTIONS, once)
    control.send(True)
    run = partial(sender.run, on_start=partial(control.send, None))
    while obey(control, {"learn": sender.learn, "run": run}):
        pass
