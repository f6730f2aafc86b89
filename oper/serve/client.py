"""A client of the scoring server: deadlines, retries, a pool of connections."""

from __future__ import annotations

import collections
import contextlib
import http.client
import io
import json
import random
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from oper.errors import DeadlineError, InvalidInputError, require
from oper.ranges import Rule
from oper.serve import wire
from oper.serve.requests import Request, ServerError
from oper.support.processes import in_child

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.5
_MAX_IDLE = 64  # idle connections in the pool
_SEND_BYTES = 1 << 20  # send buffer, large enough to send most requests without waiting
_MAX_LOST = 3  # connections that one request may lose; beyond, the request may be the cause
# Below the largest timeout of a socket.
_TIMEOUT_S = Rule(lambda x: 0 <= x <= 1e9, "a number of seconds from 0 to 1000000000")


class _Incoming(io.RawIOBase):
    """What a socket receives until a deadline; a timeout of the socket would begin anew with each
    part of an answer. `HTTPResponse` calls `makefile`."""

    def __init__(self, source: socket.socket, until: float) -> None:
        self._source, self._until = source, until

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError
        self._source.settimeout(left)
        return self._source.recv_into(buffer)


class _Connection(http.client.HTTPConnection):
    """A connection to the server, opened by its first request.

    Attributes:
        worker: process id of the server's worker with this connection; None before an answer.
    """

    worker: str | None = None

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str],
            timeout_s: float) -> http.client.HTTPResponse:
        """Send a request, head and body at once so that the server wakes up once; return the answer
        to be read, which must arrive within `timeout_s`, like the connection before."""
        until = time.monotonic() + timeout_s
        if not self.sock:
            self.timeout = timeout_s
            self.connect()
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self.sock.settimeout(timeout_s)
        head = [f"{method} {path} HTTP/1.1", f"content-length: {len(body)}",
                *(f"{name}: {value}" for name, value in headers.items())]
        # A server that refuses the request may answer and close before it has read all.
        with contextlib.suppress(ConnectionError):
            self.sock.sendall("\r\n".join([*head, "\r\n"]).encode("ascii") + body)
        incoming: Any = _Incoming(self.sock, until)
        return http.client.HTTPResponse(incoming, method=method)

    def is_closed(self) -> bool:
        """Whether the server has closed the idle connection: nothing else makes it readable."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))


@dataclass(slots=True)
class ClientCounts:
    """Counts of a client's requests.

    Attributes:
        requests: requests that were scored.
        retries: requests sent again because the connection was lost or the server was overloaded.
    """

    requests: int = 0
    retries: int = 0


class Client:
    """Scores samples on a server. Thread-safe.

    If a connection breaks (its worker has exited, or the server is draining) or the server is
    overloaded, the client retries after a pause, until `timeout_s` has passed. Scoring does not
    change the server, so retries are safe.

    Each connection belongs to one worker of the server. The client uses an idle connection of the
    worker with the fewest unanswered requests of this client. A forked child opens connections of
    its own.

    Args:
        address: ``host:port``, or the URL ``http://host:port``.
        timeout_s: seconds for a request including its retries.
        model: the model's name on the server; None = the name that the server reports.

    Raises:
        InvalidInputError: `address` has no host or no valid port, or `timeout_s` is out of range.
    """

    def __init__(self, address: str, timeout_s: float = 10.0, model: str | None = None) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        _check_address(self._address)
        require("cannot connect", "choose a time in this range",
                ("timeout_s", timeout_s, _TIMEOUT_S.allows(timeout_s, float), _TIMEOUT_S.expected))
        self.timeout_s, self.counts = float(timeout_s), ClientCounts()
        self._model = model
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []  # the most recently used last
        self._busy: list[_Connection] = []
        in_child(self, Client._reconnect)

    def score(self, dense: np.ndarray, features: Mapping[str, Any],
              user: Mapping[str, Any] | None = None) -> np.ndarray:
        """Score samples.

        Args:
            dense: float [B, num_dense], converted to float32.
            features: maps feature names to one id per sample (int [B]), or to a pair of ids
                (int [L]) and lengths (int [B]). Features without an entry get empty bags.
            user: features that all samples share, in the form of `features` for a single sample.
                They are sent, checked and looked up once.

        Returns:
            Scores, float32 [B].

        Raises:
            InvalidInputError: `dense` is not numbers, ids or lengths are not integers or have
                another shape, or a feature's lengths do not add up to the number of its ids.
            ServerError: the server refuses the request, e.g. for an unknown feature (status 400).
            DeadlineError: there is no answer within `timeout_s`.
        """
        try:
            dense = np.ascontiguousarray(dense, np.float32)
        except (ValueError, TypeError) as error:
            raise InvalidInputError("cannot score", "dense", str(error), "numbers, [B, num_dense]",
                                    "pass an array of numbers") from None
        # Without samples, no sample has the user's bags.
        given = [*features.items(), *((user or {}).items() if dense.shape[0] else ())]
        names = [name for name, _ in given]
        require("cannot score", "pass names of the model's features",
                ("features", names, all(isinstance(n, str) for n in names), "names of type str"))
        ids, lengths = [np.zeros(0, np.int64)], np.zeros((len(names), dense.shape[0]), np.int32)
        for k, (name, value) in enumerate(given):
            size = dense.shape[0] if k < len(features) else 1
            pair = value if isinstance(value, tuple) else (value, np.ones(size, np.int32))
            require("cannot score", "pass an array of ids, or ids and lengths",
                    (f"values of {name!r}", len(pair), len(pair) == 2, "2, ids and lengths"))
            mine = _whole(f"ids of {name!r}", pair[0], np.int64).reshape(-1)
            counts = _whole(f"lengths of {name!r}", pair[1], np.int32)
            if counts.shape != (size,):
                raise InvalidInputError("cannot score", "shape of lengths", counts.shape,
                                        f"({size},), one per sample", "give one length per sample")
            # The server knows only the ids of all features together, and would take surplus ids of
            # one feature for missing ids of the next.
            total = int(counts.sum())
            require("cannot score", "pass one id per sample, or ids and their lengths",
                    (f"number of ids of {name!r}", mine.size, mine.size == total,
                     f"{total}, the sum of its lengths"))
            ids.append(mine)
            lengths[k, :size] = counts
        request = Request(dense, lengths, np.concatenate(ids),
                          tuple(range(len(features), len(names))))
        return self.score_request(request, names)[0]

    def score_request(self, request: Request, features: Sequence[str] | None = None
                      ) -> tuple[np.ndarray, int]:
        """Score a request.

        Args:
            request: the samples.
            features: the features of its bags; None = the model's, in order.

        Returns:
            Scores, float32 [B], and the epoch of the weights.
        """
        body, header_length = wire.encode_request(request, features)
        answer, data = self._call("POST", f"{self._model_path}/infer", body, {
            wire.HEADER_LENGTH: str(header_length), "content-type": "application/octet-stream"})
        length = answer.headers.get(wire.HEADER_LENGTH)
        with self._lock:
            self.counts.requests += 1
        return wire.decode_scores(data, None if length is None else int(length))

    @property
    def model(self) -> str:
        """The model's name on the server."""
        if self._model is None:
            self._model = str(self._fetched("/v2", "parameters", "model"))
        return self._model

    def metadata(self) -> dict[str, Any]:
        """Return the model's inputs and outputs; ``parameters`` contains its features."""
        found: dict[str, Any] = self._fetched(self._model_path)
        return found

    @property
    def _model_path(self) -> str:
        return f"/v2/models/{urllib.parse.quote(self.model, safe='')}"

    def _fetched(self, path: str, *keys: str) -> Any:
        """Return the JSON object at `path`, or the value in it selected by the nested `keys`."""
        data = self._call("GET", path)[1]
        try:
            found = dict(json.loads(data))
            for key in keys:
                found = found[key]
            return found
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ServerError(
                200, f"{self._address} is not a scoring server", path, data[:60],
                "JSON of the protocol", "pass the address that oper serve prints") from None

    def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text format."""
        return self._call("GET", "/metrics")[1].decode()

    def is_ready(self) -> bool:
        """Whether the server accepts requests now; waits at most 1 s and does not retry."""
        try:
            return self._once("GET", "/v2/health/ready", b"", {}, 1.0)[0].status == 200
        except (OSError, http.client.HTTPException):
            return False

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, path: str, body: bytes = b"",
              headers: Mapping[str, str] | None = None) -> tuple[http.client.HTTPResponse, bytes]:
        place, until = f"no scores from {self._address}", time.monotonic() + self.timeout_s
        pause, problem, lost = _FIRST_PAUSE_S, "", 0
        while lost <= _MAX_LOST and (left := until - time.monotonic()) > 0:
            try:
                answer, data = self._once(method, path, body, headers or {}, left)
            except TimeoutError:
                problem = problem or "no answer"
                break
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                lost += not isinstance(error, ConnectionRefusedError | socket.gaierror)
            else:
                if answer.status == 200:
                    return answer, data
                problem = _message(data)
                if answer.status != 503:
                    raise ServerError(answer.status, problem)
            if lost <= _MAX_LOST:
                with self._lock:
                    self.counts.retries += 1
                # Random, so that clients of the same failed worker do not all retry at once.
                time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5),
                                        until - time.monotonic())))
                pause = min(2 * pause, _LAST_PAUSE_S)
        if lost > _MAX_LOST:
            raise ServerError(0, place, "connections lost", lost,
                              f"<= {_MAX_LOST} for one request ({problem})",
                              "check the server's log")
        raise DeadlineError(place, "timeout_s", self.timeout_s, f"an answer in time ({problem})",
                            "check the server")

    def _once(self, method: str, path: str, body: bytes, headers: Mapping[str, str],
              left: float) -> tuple[http.client.HTTPResponse, bytes]:
        connection, keep = self._take(), False
        try:
            answer = connection.ask(method, path, body, {
                "host": self._address, wire.TIMEOUT: f"{left * 1e3:.0f}", **headers}, left)
            answer.begin()
            data = answer.read()
            connection.worker = answer.headers.get(wire.WORKER, connection.worker)
            keep = not answer.will_close
        finally:
            with self._lock:
                self._busy.remove(connection)
                keep = keep and len(self._idle) < _MAX_IDLE
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()
        return answer, data

    def _reconnect(self) -> None:
        """Close a forked child's copies of connections: on these, the child and its parent would
        read each other's answers."""
        self._lock = threading.Lock()  # another thread may have held it
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle, self._busy = [], []

    def _take(self) -> _Connection:
        """Return an idle connection of the worker with the fewest unanswered requests, or a new
        one; among equals, the most recently used, whose worker has warm caches."""
        with self._lock:
            asked = collections.Counter(c.worker for c in self._busy)
            while self._idle:
                found = min(reversed(self._idle), key=lambda c: asked[c.worker])
                self._idle.remove(found)
                if not found.is_closed():
                    break
                found.close()  # no request was lost
            else:
                found = _Connection(self._address)
            self._busy.append(found)
        return found


def _check_address(address: str) -> None:
    """Raise InvalidInputError unless `address` is ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInputError("cannot connect", "address", address, "host:port",
                                "pass the address that 'oper serve' prints")


def _whole(name: str, value: Any, dtype: type[np.integer]) -> np.ndarray:
    """Convert integers to `dtype`; raises InvalidInputError for floats, which NumPy truncates, and
    for numbers that 32 bits cannot hold. Unsigned 64-bit keys keep their bits."""
    found = np.asarray(value)
    if found.size and found.dtype.kind not in "iu":
        raise InvalidInputError("cannot score", name, found.dtype.name, "integers",
                                "pass integers, e.g. ids.astype(numpy.int64)")
    whole = found.astype(dtype)
    if dtype is np.int32 and not np.array_equal(whole, found):
        raise InvalidInputError("cannot score", name, int(found[whole != found][0]),
                                "32-bit integers", "pass numbers that fit 32 bits")
    return whole


def _message(data: bytes) -> str:
    """Return the error message in the body of an answer."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(data)["error"])
    return data[:200].decode("utf-8", "replace")
