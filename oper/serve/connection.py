"""HTTP/1.1 on one connection: parsed by llhttp, with limits on everything that a client may cost.

The head (request line and headers) is limited in size and time, the body in size, and a message may
not have more bytes around its body (chunk sizes, trailers) than the body justifies. Requests that
follow each other without waiting (pipelining) are answered in their order.
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
_FRAMING = 8  # times the largest body: chunks of one byte are six
_PATIENCE = 4  # times the largest body that is read
_MAX_PIPELINED = 16  # requests of one connection without an answer, before it is read further
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
Headers = Sequence[tuple[bytes, bytes]]


class Owner(Protocol):
    """The worker that a connection belongs to."""

    options: ServeOptions
    connections: set[Connection]

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""

    def should_close(self) -> bool:
        """Whether a connection closes after the present answer."""
        ...

    def abandoned(self, path: str) -> None:
        """Note that a request to `path` ended before it was complete."""


class Exchange:
    """A request and the means to answer it.

    Attributes:
        method, path, headers: the request; header names are in lower case.
        since: when its first byte arrived, on the clock of `time.monotonic`.
        size: bytes of the body.
        body: the body; empty if it is larger than `ServeOptions.max_bytes`.
        ends: whether the connection closes after the answer.
    """

    __slots__ = ("_connection", "body", "ends", "headers", "method", "path", "response", "since",
                 "size")

    def __init__(self, connection: Connection, method: bytes, path: str,
                 headers: dict[bytes, bytes], size: int = 0) -> None:
        self._connection, self.method, self.path = connection, method, path
        self.headers, self.size, self.body, self.ends = headers, size, b"", True
        self.since = connection.since
        self.response: tuple[int, bytes, bytes, Headers] | None = None

    def answer(self, status: int, body: bytes = b"", kind: bytes = JSON, more: Headers = ()
               ) -> None:
        """Send the answer, after those to earlier requests."""
        self.response = status, body, kind, more
        self._connection.flush()


class Connection(asyncio.Protocol):
    """One client connection.

    Attributes:
        since: when the first byte of the present request arrived, or the connection was made.
        last_used: grows from one use of any connection to the next.
    """

    # An order, not a time: a clock may stand still for all that comes in one go.
    _uses = itertools.count()

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser: Any = httptools.HttpRequestParser(self)
        self._pending: deque[Exchange] = deque()
        self._whole: list[Exchange] = []  # parsed, not handled yet
        self._unread = 0  # bytes since the last whole request
        self.since = time.monotonic()
        self._blocked_since = float("inf")  # the client does not read its answers
        self._ends = False  # nothing more is read
        self.last_used = next(self._uses)
        self.on_message_begin()

    # ---- the parser's callbacks ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", cast("dict[bytes, bytes]", {})
        self._parts: list[bytes] = []
        self._size, self._announced, self._in_body = 0, 0, False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_body = True
        announced = self._headers.get(b"content-length", b"0")
        self._announced = int(announced) if announced.isdigit() else 0
        if b"expect" in self._headers and not self._pending and (
                self._announced <= self._owner.options.max_bytes):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= self._owner.options.max_bytes:
            self._parts.append(body)
        else:
            self._parts.clear()

    def on_message_complete(self) -> None:
        exchange = self._exchange(self._size)
        parts = self._parts
        exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        exchange.ends = not self._parser.should_keep_alive() or self._parser.should_upgrade() or (
            self._parser.get_http_version() != "1.1")
        self._whole.append(exchange)
        self._in_body, self._unread = False, 0

    def _exchange(self, size: int = 0) -> Exchange:
        """The message in hand."""
        return Exchange(self, self._parser.get_method(), self._path(), self._headers, size)

    def _path(self) -> str:
        try:
            return str(httptools.parse_url(self._url).path.decode())
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            return self._url.decode("latin-1")

    # ---- asyncio's callbacks ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the connection is made."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)  # to be told of whatever is not read at once
        self._owner.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._owner.connections.discard(self)
        self._pending.clear()
        if self._in_body and not self._ends:
            self._owner.abandoned(self._path())

    def eof_received(self) -> bool:
        """The client sends nothing more, but may still wait for answers."""
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
        """Parse bytes that have arrived."""
        if self._ends:
            return
        if not self._unread:
            self.since = time.monotonic()
        self._unread += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # what it would change to is not spoken here
            if self._announced and self._whole:  # the parser leaves the body out
                self._whole.pop()
                problem = "Upgrade with a body"
        except httptools.HttpParserError as error:
            problem = str(error)
        if self._take_in():
            return
        most, size = self._owner.options.max_bytes, max(self._size, self._announced)
        if problem:
            self._refuse(400, fail("cannot read the request", "HTTP", problem, "HTTP/1.1",
                                   "send a well-formed HTTP/1.1 request"))
        elif self._in_body and size > _PATIENCE * most:
            self._whole.append(self._exchange(size))  # too large, whatever else comes
            self._take_in()
        elif self._unread > _MAX_HEAD + (_FRAMING * most if self._in_body else 0):
            self._refuse(400, fail("cannot read the request", "bytes", self._unread,
                                   "fewer around its body", "send less"))
        if len(self._pending) > _MAX_PIPELINED:
            self._transport.pause_reading()

    def _take_in(self) -> bool:
        """Have whole requests answered; whether nothing more is to be read."""
        whole, self._whole = self._whole, []
        for exchange in whole:
            self._pending.append(exchange)
            self._ends = exchange.ends
            self._owner.handle(exchange)
            if self._ends:
                break
        return self._ends

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
                self._ends = True
                pending.clear()
                self._transport.close()
        if not self._unread:
            self.since = time.monotonic()
        if self._blocked_since == float("inf") and not self._ends and (
                len(pending) <= _MAX_PIPELINED):
            self._transport.resume_reading()

    def _refuse(self, status: int, text: str) -> None:
        """Answer what has not been read to its end, and read no more."""
        if self._in_body:
            self._owner.abandoned(self._path())
        self._ends = True
        exchange = Exchange(self, b"", "", {})
        self._pending.append(exchange)
        exchange.answer(status, json.dumps({"error": text}).encode())

    # ---- what the worker asks --------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is no unanswered request."""
        return not self._pending and not self._in_body

    @property
    def is_closing(self) -> bool:
        """Whether the connection is already closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all answers given have been sent."""
        self._ends = True
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def expire(self, now: float) -> None:
        """Close the connection if a request arrives, an answer is read or an idle time passes too
        slowly."""
        options = self._owner.options
        if now - self._blocked_since > options.read_s:
            self.abort()
        elif self._ends or self._pending:
            return
        elif not self._unread and not self._in_body:
            if now - self.since > options.keep_alive_s:
                self.close()
        elif now - self.since > options.read_s:
            self._refuse(408 if self._in_body else 400, fail(
                "the request did not arrive", "waited (s)", options.read_s, "all of it in less",
                "send it again"))
