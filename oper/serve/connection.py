"""HTTP/1.1 on one connection, parsed by llhttp, with limits on all resources that clients use.

The head (request line and headers) is limited in size and time. The body is limited in size, and so
is the overhead of its encoding (chunk sizes, trailers). Pipelined requests are answered in order.
"""

from __future__ import annotations

import http
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools

from oper.serve.app import App, Exchange
from oper.serve.requests import ServerError

log = logging.getLogger("oper.serve")
_READ_BYTES = 256 << 10  # read at once of an announced body
# Read at once otherwise: all requests in it are answered before other connections are served.
_SHORT_READ_BYTES = 16 << 10
_MAX_HEAD = 64 << 10  # bytes
_FRAMING = 8  # maximum encoded size relative to max_bytes; a one-byte chunk takes six bytes
_PATIENCE = 4  # larger bodies, relative to max_bytes, are refused before they are read
_MAX_PIPELINED = 16  # with more unanswered requests, a connection is not read further
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}


class Connection:
    """One client connection.

    Args:
        socket_: the accepted socket.
        app: answers the requests.
        selector: calls `on_ready` when the socket can be read or written.
        closed: called with the connection once it is closed.

    Attributes:
        since: time at which the current request's first byte was read, or at which the connection
            became idle.
        is_extra: whether its requests are refused while there are too many connections.
    """

    def __init__(self, socket_: socket.socket, app: App, selector: selectors.BaseSelector,
                 closed: Callable[[Connection], object]) -> None:
        self._socket, self._app, self._selector, self._closed = socket_, app, selector, closed
        self._parser: Any = httptools.HttpRequestParser(self)
        self._pending: deque[Exchange] = deque()  # complete requests, unanswered
        self._unread = 0  # bytes received since the last complete request
        self._unsent = bytearray()
        self._blocked_since = float("inf")  # since when the client has not read its answers
        self._ends = False  # no further requests are read
        self._events = 0  # events for which the selector waits
        self.since, self.is_extra = time.monotonic(), False
        self.on_message_begin()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    # ---- the parser's callbacks ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._request = Exchange(self._flush)
        self._url, self._parts = b"", list[bytes]()
        self._announced, self._in_body, self._expects = 0, False, False
        self._waits = False  # the client sends the body after "100 Continue"

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_body = True
        try:
            self._request.path = httptools.parse_url(self._url).path.decode()
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            self._request.path = self._url.decode("latin-1")
        headers = self._request.headers
        announced = headers.get(b"content-length", b"0")
        self._announced = int(announced) if announced.isdigit() else 0
        # HTTP/1.0 has no such headers, and its clients would take this line for the answer.
        self._expects = b"expect" in headers and self._parser.get_http_version() == "1.1"
        self._waits = self._expects and self._announced <= self._app.options.max_bytes
        self._ask_for_body()

    def _ask_for_body(self) -> None:
        """Send "100 Continue" if the client waits for it and has its earlier answers."""
        if self._waits and self._in_body and not self._pending and not self._ends:
            self._waits = False
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._waits = False
        self._request.size += len(body)
        if self._request.size <= self._app.options.max_bytes:
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
        """Pass the request to the app, unless an earlier one was the connection's last."""
        if self._ends:
            return
        request = self._request
        request.method, request.since = self._parser.get_method().decode("latin-1"), self.since
        self._pending.append(request)
        request.is_extra, self._ends = self.is_extra, request.ends
        self._app.handle(request)

    # ---- the socket ------------------------------------------------------------------------------

    def on_ready(self, events: int) -> None:
        """Write and read what is possible without waiting."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send(b"")
            if events & selectors.EVENT_READ:
                self._receive(self._socket.recv(self._read_bytes()))
                if self._in_body and not self._ends:  # most likely the rest has arrived, too
                    self._receive(self._socket.recv(self._read_bytes()))
        except BlockingIOError:
            pass
        except OSError:  # the client has gone
            self.abort()
        except Exception:  # other connections must go on
            log.exception("a connection failed")
            self.abort()
        self._watch()

    def _read_bytes(self) -> int:
        """Return the number of bytes to read next."""
        left = self._announced - self._request.size if self._in_body else 0
        return max(_SHORT_READ_BYTES, min(left, _READ_BYTES))

    def _watch(self) -> None:
        """Close the connection if its last answer has been sent; otherwise wait until the socket
        can be written, or read if further requests may be read. Nothing is read of a client that
        does not read its answers."""
        if self._is_closed:
            return
        events = 0
        if self._unsent:
            events = selectors.EVENT_WRITE
        elif not self._ends:
            events = selectors.EVENT_READ if len(self._pending) <= _MAX_PIPELINED else 0
        elif not self._pending:
            self.abort()
        if events == self._events:
            return
        if self._events:
            self._selector.unregister(self._socket)
        if events:
            self._selector.register(self._socket, events, self.on_ready)
        self._events = events

    def _receive(self, data: bytes) -> None:
        """Parse received bytes, handle complete requests and enforce the limits."""
        if not data:  # the client has finished sending; it still gets its answers
            self._abandon()
            self._ends = True
            if self._pending:
                self._pending[-1].ends = True
            return
        if not self._unread:
            self.since = time.monotonic()
        self._unread += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is supported
        except httptools.HttpParserError as error:
            problem = str(error)
        most, size = self._app.options.max_bytes, max(self._request.size, self._announced)
        if self._ends:
            return
        if problem:
            self._refuse_malformed(problem)
        elif self._in_body and (size > _PATIENCE * most or (
                self._expects and self._announced > most)  # the client waits with its body
                or (self.is_extra and self._app.is_full())):
            self._request.size = size
            self._handle()  # the app refuses it
        elif self._unread > (limit := _MAX_HEAD + (_FRAMING * most if self._in_body else 0)):
            self._refuse(400, "cannot read the request", "bytes", self._unread, f"<= {limit}",
                         "send shorter headers or larger chunks")

    def _send(self, data: bytes) -> None:
        """Send `data`, after what could not be sent before."""
        is_blocked = bool(self._unsent and data)
        self._unsent += data
        if is_blocked:  # until `on_ready`
            return
        try:
            del self._unsent[:self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the client has gone
            self.abort()
        if not self._unsent:
            self._blocked_since = float("inf")
        elif self._blocked_since == float("inf"):
            self._blocked_since = time.monotonic()

    # ---- answers ---------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send the answers that are ready, in the order of their requests."""
        pending = self._pending
        while pending and pending[0].status:
            exchange = pending.popleft()
            lines = [_STATUS[exchange.status]]
            for name, value in exchange.more:
                lines += name, b": ", value, b"\r\n"
            lines.append(b"content-length: %d\r\n" % len(exchange.answer))
            lines.append(b"connection: close\r\n\r\n" if exchange.ends else b"\r\n")
            if exchange.method != "HEAD":
                lines.append(exchange.answer)
            self._send(b"".join(lines))
            if exchange.ends:
                self._ends = True
                pending.clear()
        self._ask_for_body()
        if not self._unread:
            self.since = time.monotonic()
        self._watch()

    def _abandon(self) -> None:
        """Tell the application that the current request's body will not be complete."""
        if self._in_body and not self._ends:
            self._app.abandon(self._request)
        self._in_body = False

    def _refuse(self, status: int, *message: object) -> None:
        """Answer an incomplete or invalid request, then close the connection."""
        self._abandon()
        self._ends = True
        self._pending.append(Exchange(self._flush))
        self._app.refuse(self._pending[-1], ServerError(status, *message))

    def _refuse_malformed(self, problem: str) -> None:
        self._refuse(400, "cannot read the request", "HTTP", problem, "HTTP/1.1",
                     "send a well-formed HTTP/1.1 request")

    # ---- interface to the worker -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is no unanswered request, and nothing to be sent."""
        return not (self._pending or self._in_body or self._ends)

    @property
    def _is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Close the connection after sending all answers written so far."""
        self._ends = True
        self._watch()

    def abort(self) -> None:
        """Close the connection without sending anything more."""
        if self._is_closed:
            return
        self._abandon()
        self._ends = True
        self._pending.clear()
        self._unsent.clear()
        if self._events:
            self._selector.unregister(self._socket)
            self._events = 0
        self._socket.close()
        self._closed(self)

    def expire(self, now: float) -> None:
        """Close the connection if one of its time limits has passed.

        `ServeOptions.read_s` limits the time to receive a request or until the client reads an
        answer; `ServeOptions.keep_alive_s` limits the idle time.
        """
        options, waited = self._app.options, now - self.since
        if now - self._blocked_since > options.read_s:
            self.abort()
        elif self._ends or self._pending:
            return
        elif not self._unread and not self._in_body:
            if waited > options.keep_alive_s:
                self.close()
        elif waited > options.read_s:
            self._refuse(408 if self._in_body else 400, "the request did not arrive", "waited (s)",
                         options.read_s, "the complete request by then", "send it again")
