"""HTTP/1.1 on one connection, parsed by llhttp, with limits on all resources that clients use.

The head (request line and headers) is limited in size and time. The body is limited in size, and so
is the overhead of its encoding (chunk sizes, trailers). Pipelined requests are answered in order.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import httptools

from oper.errors import fail
from oper.serve.options import ServeOptions

JSON = b"application/json"
_MAX_HEAD = 64 << 10  # bytes
_FRAMING = 8  # maximum encoded size relative to max_bytes; a one-byte chunk takes six bytes
_PATIENCE = 4  # larger bodies, relative to max_bytes, are refused before they are read
_MAX_PIPELINED = 16  # with more unanswered requests, a connection is not read further
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
Headers = Sequence[tuple[bytes, bytes]]


class Owner(Protocol):
    """The worker that a connection belongs to."""

    options: ServeOptions
    connections: set[Connection]

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, immediately or later."""

    def should_close(self) -> bool:
        """Whether a connection closes after the answer that is being written."""
        ...

    def abandoned(self, path: str) -> None:
        """Record that a connection closed before a request to `path` was complete."""


class Exchange:
    """A request, and the means to answer it once it is complete.

    Attributes:
        method, url, headers: the request; header names are in lower case.
        since: time at which its first byte arrived, as `time.monotonic` returns it.
        size: size of the body in bytes.
        body: the body; empty if it is larger than `ServeOptions.max_bytes`.
        ends: whether the connection closes after the answer.
        response: status, body, content type and further headers of the answer, once there is one.
    """

    __slots__ = ("_connection", "body", "ends", "headers", "method", "response", "since", "size",
                 "url")

    def __init__(self, connection: Connection) -> None:
        self._connection, self.since, self.ends = connection, 0.0, True
        self.method, self.url, self.body, self.size = b"", b"", b"", 0
        self.headers: dict[bytes, bytes] = {}
        self.response: tuple[int, bytes, bytes, Headers] | None = None

    @property
    def path(self) -> str:
        """The path of `url`."""
        try:
            return str(httptools.parse_url(self.url).path.decode())
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            return self.url.decode("latin-1")

    def answer(self, status: int, body: bytes = b"", kind: bytes = JSON, more: Headers = ()
               ) -> None:
        """Send the answer, after the answers to earlier requests of the connection.

        `kind` is the content type, and `more` are further headers.
        """
        self.response = status, body, kind, more
        self._connection.flush()


class Connection(asyncio.Protocol):
    """One client connection.

    Attributes:
        since: time at which the current request's first byte arrived, or at which the connection
            became idle.
        last_used: position of the connection's last use in the order of uses of all connections.
    """

    # A counter, since several uses may have the same time.
    _uses = itertools.count()

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser: Any = httptools.HttpRequestParser(self)
        self._pending: deque[Exchange] = deque()  # complete requests, unanswered
        self._unread = 0  # bytes received since the last complete request
        self.since = time.monotonic()
        self._blocked_since = float("inf")  # since when the client has not read its answers
        self._ends = False  # no further requests are read
        self.last_used = next(self._uses)
        self.on_message_begin()

    # ---- the parser's callbacks ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._request = Exchange(self)
        self._parts: list[bytes] = []
        self._announced, self._in_body = 0, False

    def on_url(self, url: bytes) -> None:
        self._request.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_body = True
        headers = self._request.headers
        announced = headers.get(b"content-length", b"0")
        self._announced = int(announced) if announced.isdigit() else 0
        if b"expect" in headers and not self._pending and not self._ends and (
                self._announced <= self._owner.options.max_bytes):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._request.size += len(body)
        if self._request.size <= self._owner.options.max_bytes:
            self._parts.append(body)
        else:
            self._parts.clear()

    def on_message_complete(self) -> None:
        request, parser = self._request, self._parser
        request.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        request.ends = not parser.should_keep_alive() or parser.should_upgrade() or (
            parser.get_http_version() != "1.1")
        self._in_body, self._unread = False, 0
        if parser.should_upgrade() and self._announced:  # the parser does not parse the body
            self._refuse_malformed("Upgrade with a body")
        else:
            self._handle()

    def _handle(self) -> None:
        """Pass the request to the owner, unless an earlier one was the connection's last."""
        if self._ends:
            return
        request = self._request
        request.method, request.since = self._parser.get_method(), self.since
        self._pending.append(request)
        self._ends = request.ends
        self._owner.handle(request)

    # ---- asyncio's callbacks ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)  # call pause_writing if any bytes are unsent
        self._owner.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connections.discard(self)
        self._pending.clear()
        if self._in_body and not self._ends:
            self._owner.abandoned(self._request.path)

    def eof_received(self) -> bool:
        """Keep the connection open for pending answers after the client has finished sending."""
        if self._pending and not self._in_body:
            self._ends = True
            self._pending[-1].ends = True
        return bool(self._pending)

    def pause_writing(self) -> None:
        """Stop reading requests of a client that does not read its answers."""
        self._blocked_since = time.monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read requests again, once the client has read enough answers."""
        self._blocked_since = float("inf")
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, handle complete requests and enforce the limits."""
        if self._ends:
            return
        if not self._unread:
            self.since = time.monotonic()
        self._unread += len(data)
        problem = self._parse(data)
        most, size = self._owner.options.max_bytes, max(self._request.size, self._announced)
        if problem is None:
            return
        if problem:
            self._refuse_malformed(problem)
        elif self._in_body and size > _PATIENCE * most:
            self._request.size = size
            self._handle()  # the owner refuses it by its size
        elif self._unread > (limit := _MAX_HEAD + (_FRAMING * most if self._in_body else 0)):
            self._refuse(400, fail("cannot read the request", "bytes", self._unread,
                                   f"<= {limit}", "send shorter headers or larger chunks"))
        if len(self._pending) > _MAX_PIPELINED:
            self._transport.pause_reading()

    def _parse(self, data: bytes) -> str | None:
        """Return what is wrong with `data`, or None if no further requests are read."""
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is supported
        except httptools.HttpParserError as error:
            problem = str(error)
        return None if self._ends else problem

    # ---- answers ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the answers that are ready, in the order of their requests."""
        pending = self._pending
        while pending and pending[0].response is not None:
            exchange = pending.popleft()
            status, body, kind, more = exchange.response or (0, b"", b"", ())
            ends = exchange.ends or self._owner.should_close()
            lines = [_STATUS[status], b"content-type: ", kind, b"\r\ncontent-length: ",
                     b"%d" % len(body), b"\r\n"]
            for name, value in more:
                lines += (name, b": ", value, b"\r\n")
            lines.append(b"connection: close\r\n\r\n" if ends else b"\r\n")
            if exchange.method != b"HEAD":
                lines.append(body)
            self._transport.write(b"".join(lines))
            self.last_used = next(self._uses)
            if ends:
                self.close()
                pending.clear()
        if not self._unread:
            self.since = time.monotonic()
        if self._blocked_since == float("inf") and not self._ends and (
                len(pending) <= _MAX_PIPELINED):
            self._transport.resume_reading()

    def _refuse(self, status: int, text: str) -> None:
        """Answer an incomplete or invalid request, then close the connection."""
        if self._in_body:
            self._owner.abandoned(self._request.path)
        self._ends = True
        self._pending.append(Exchange(self))
        self._pending[-1].answer(status, json.dumps({"error": text}).encode())

    def _refuse_malformed(self, problem: str) -> None:
        self._refuse(400, fail("cannot read the request", "HTTP", problem, "HTTP/1.1",
                               "send a well-formed HTTP/1.1 request"))

    # ---- interface to the worker -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is no unanswered request."""
        return not self._pending and not self._in_body

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after sending all answers written so far."""
        self._ends = True
        self._transport.close()

    def expire(self, now: float) -> None:
        """Close the connection if one of its time limits has passed.

        `ServeOptions.read_s` limits the time to receive a request or until the client reads an
        answer; `ServeOptions.keep_alive_s` limits the idle time.
        """
        options = self._owner.options
        if now - self._blocked_since > options.read_s:
            self._transport.abort()
        elif self._ends or self._pending:
            return
        elif not self._unread and not self._in_body:
            if now - self.since > options.keep_alive_s:
                self.close()
        elif now - self.since > options.read_s:
            self._refuse(408 if self._in_body else 400, fail(
                "the request did not arrive", "waited (s)", options.read_s,
                "the complete request by then", "send it again"))
