"""What a connection may cost a worker: bounds that uvicorn leaves to its users.

A head (request line and headers) may neither be endless nor take for ever, and a message may not
have more bytes around its body than the body can justify (chunk sizes, trailers). The body is
bounded by `oper.serve.app`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

_MAX_HEAD = 64 << 10  # bytes; h11's bound, which uvicorn's other parser does not have
_FRAMING = 8  # times the largest body: chunks of one byte are six


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every connection.

    Attributes:
        max_bytes: of a body.
        read_s: for a head to arrive, from its first byte on.
        idle_s: until the first byte.
    """

    max_bytes: int
    read_s: float
    idle_s: float


def bounded(protocol: Any, limits: Limits) -> Any:
    """A subclass of one of uvicorn's HTTP protocols that keeps the limits.

    Its `expire` must be called about every second.
    """
    # An order, not a time: uvloop's clock stands still for all that comes in one go.
    turns = itertools.count()

    class Bounded(protocol):  # type: ignore[misc]
        """See above."""

        unread = 0  # bytes since the last answer
        since = float("inf")  # when the first of them came, or the connection
        idle_since = 0  # turn in which the last request was answered, or the connection came

        def connection_made(self, transport: Any) -> None:
            self.since, self.idle_since = self.loop.time(), next(turns)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            if not self.unread:
                self.since = self.loop.time()
            self.unread += len(data)
            super().data_received(data)
            if self.unread > _MAX_HEAD + (0 if self.in_head else _FRAMING * limits.max_bytes):
                self.refuse("more bytes than a request may have")

        @property
        def in_head(self) -> bool:
            """Whether no request is in hand."""
            return self.cycle is None or self.cycle.response_complete

        def on_response_complete(self) -> None:
            self.unread = 0
            self.idle_since = next(turns)
            super().on_response_complete()

        def expire(self, now: float) -> None:
            """Close the connection when a head, or the first byte, takes too long."""
            if self.in_head and self.timeout_keep_alive_task is None and (
                    now - self.since > (limits.read_s if self.unread else limits.idle_s)):
                self.refuse("the request did not arrive in time")

        def refuse(self, why: str) -> None:
            """Answer 400 where no answer has begun, and close."""
            if self.transport.is_closing():
                return
            if self.in_head:
                self.send_400_response(why)
            self.transport.close()

    return Bounded
