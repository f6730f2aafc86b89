"""The HTTP application of a worker (ASGI): scoring, health, metadata, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from oper import __version__
from oper.errors import InvalidInputError, OperError, fail
from oper.serve import metrics, wire
from oper.serve.batching import Batcher, ExpiredError, OverloadedError, Ticket
from oper.serve.requests import Request, Signature

log = logging.getLogger("oper.serve")
TIMEOUT = b"oper-timeout-ms"  # how long the client will wait
_PATIENCE = 4  # times the largest body that is read
_BINARY = b"application/octet-stream"
_JSON = b"application/json"
_HEADER_LENGTH = wire.HEADER_LENGTH.encode()
_Send = Callable[[dict[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]


class _Refused(Exception):
    """An answer other than scores: status, outcome for the metrics, text, methods allowed."""

    def __init__(self, status: int, outcome: str, text: str, allow: str = "") -> None:
        super().__init__(text)
        self.status, self.outcome, self.allow = status, outcome, allow


class App:
    """Answers requests.

    Args:
        signature: of the model.
        batcher: where checked requests go.
        counted: metrics of this worker.
        max_bytes: of a request's body.
        read_s: for a request's body to arrive.
        page: makes the text of ``/metrics`` and its content type.

    Attributes:
        lets_go: whether the connection of the request in hand is to end with its answer.
    """

    def __init__(self, signature: Signature, batcher: Batcher, counted: metrics.WorkerMetrics,
                 max_bytes: int, read_s: float, page: Callable[[], tuple[bytes, str]]) -> None:
        self.signature, self.batcher, self.counted = signature, batcher, counted
        self.max_bytes, self.read_s, self.page = max_bytes, read_s, page
        self.lets_go: Callable[[], bool] = lambda: False
        self._model = f"/v2/models/{signature.name}"
        # Clients with several connections can tell which of them lead to the same worker.
        self._worker = b"oper-worker", str(os.getpid()).encode()

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        try:
            if scope["path"] == f"{self._model}/infer":
                await self._infer(scope, receive, send)
            else:
                await self._get(scope, send)
        except _Refused as error:
            await self._refuse(error, send)
        except _GoneError:
            pass

    async def _get(self, scope: dict[str, Any], send: _Send) -> None:
        path = scope["path"]
        health = ("/v2/health/live", "/v2/health/ready", f"{self._model}/ready")
        if path in (*health, "/v2", self._model, "/metrics"):
            _check_method(scope, "GET, HEAD")
        if path in health:
            # A worker takes connections once its model is there and none once it drains.
            await _answer(send, 200, b"", _JSON)
        elif path == "/v2":
            await _answer(send, 200, _dump(name="oper", version=__version__,
                                           extensions=["binary_tensor_data"],
                                           parameters={"model": self.signature.name}), _JSON)
        elif path == self._model:
            await _answer(send, 200, self._metadata(), _JSON)
        elif path == "/metrics":
            loop = asyncio.get_running_loop()
            text, kind = await loop.run_in_executor(None, self.page)
            await _answer(send, 200, text, kind.encode())
        else:
            raise _Refused(404, "", fail(
                "no such address", "path", path,
                f"{self._model}[/infer], /v2/health/live, /v2/health/ready or /metrics",
                "correct it"))

    def _metadata(self) -> bytes:
        s = self.signature
        shapes = {"dense": [-1, s.num_dense], "lengths": [len(s.features), -1], "ids": [-1]}
        return _dump(
            name=s.name, platform="oper",
            inputs=[{"name": n, "datatype": wire.INPUTS[n][0], "shape": shape}
                    for n, shape in shapes.items()],
            outputs=[{"name": "scores", "datatype": "FP32", "shape": [-1]}],
            parameters={"features": list(s.features), "num_rows": list(s.num_rows)})

    async def _infer(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        outcome = "failed"
        self.counted.in_flight.inc()
        try:
            scores, epoch = await self._score(scope, receive)
            # A client that sends its numbers in JSON gets them so.
            binary = any(name == _HEADER_LENGTH for name, _ in scope["headers"])
            body, length = wire.encode_scores(scores, epoch, self.signature.name, binary)
            outcome = "ok"
            more = [self._worker]
            if self.lets_go():
                more.append((b"connection", b"close"))
            if length is not None:
                more.append((_HEADER_LENGTH, str(length).encode()))
            await _answer(send, 200, body, _JSON if length is None else _BINARY, more)
        except _Refused as error:
            outcome = error.outcome
            raise
        except _GoneError:
            outcome = "gone"
            raise
        finally:
            self.counted.in_flight.dec()
            self.counted.requests.labels(outcome).inc()

    async def _score(self, scope: dict[str, Any], receive: _Receive) -> tuple[np.ndarray, int]:
        _check_method(scope, "POST")
        headers = dict(scope["headers"])
        try:
            async with asyncio.timeout(self.read_s):
                body = await self._body(headers, receive)
        except TimeoutError:
            raise _Refused(408, "gone", fail(
                "the request did not arrive", "waited (s)", self.read_s, "all of it in less",
                "send it again")) from None
        begin = time.monotonic()
        try:
            length = _number(headers, _HEADER_LENGTH)
            timeout = _number(headers, TIMEOUT)
            request = wire.decode_request(body, None if length is None else int(length),
                                          self.signature)
        except InvalidInputError as error:
            raise _Refused(400, "invalid", str(error)) from None
        if not request.num_samples:
            return np.zeros(0, np.float32), 0
        deadline = float("inf") if timeout is None else begin + timeout / 1e3
        result = await self._wait(request, deadline)
        self.counted.latency.observe(time.monotonic() - begin)
        return result

    async def _wait(self, request: Request, deadline: float) -> tuple[np.ndarray, int]:
        """The batcher's answer, brought over from its thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def done(ticket: Ticket) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake)

        ticket = Ticket(request, done, deadline)
        try:
            self.batcher.submit(ticket)
        except OverloadedError as error:
            raise _Refused(503, "overloaded", str(error)) from None
        await future
        if ticket.result is not None:
            return ticket.result
        if isinstance(ticket.error, ExpiredError):
            raise _Refused(504, "expired", str(ticket.error))
        if isinstance(ticket.error, InvalidInputError):
            raise _Refused(400, "invalid", str(ticket.error))
        log.error("the model failed on a request", exc_info=ticket.error)
        what = str(ticket.error) if isinstance(ticket.error, OperError) else (
            f"the model failed: {type(ticket.error).__name__}; see the server's log")
        raise _Refused(500, "failed", what)

    async def _body(self, headers: dict[bytes, bytes], receive: _Receive) -> bytes:
        """The whole body, never more than `max_bytes` of it.

        Of one that is not much too large the rest is read and dropped: a client that is still
        sending when the connection ends would not see the answer.
        """
        announced = headers.get(b"content-length", b"0")
        size = int(announced) if announced.isdigit() else 0
        parts: list[bytes] = []
        have, more = 0, size <= _PATIENCE * self.max_bytes
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            body = message.get("body", b"")
            have += len(body)
            if max(size, have) <= self.max_bytes:
                parts.append(body)
            more = message.get("more_body", False) and have <= _PATIENCE * self.max_bytes
        if max(size, have) > self.max_bytes:
            raise _Refused(413, "oversized", fail(
                "the request is too large", "bytes", max(size, have), f"<= {self.max_bytes}",
                "send fewer samples at a time"))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _refuse(self, error: _Refused, send: _Send) -> None:
        more = []
        if error.allow:
            more.append((b"allow", error.allow.encode()))
        if error.status == 503:
            more.append((b"retry-after", b"1"))
        if error.status in (408, 413):
            more.append((b"connection", b"close"))  # the rest of the body is not read
        await _answer(send, error.status, _dump(error=str(error)), _JSON, more)


def _check_method(scope: dict[str, Any], allowed: str) -> None:
    if scope["method"] not in allowed.split(", "):
        raise _Refused(405, "invalid", fail(
            f"cannot answer at {scope['path']}", "method", scope["method"], allowed,
            "send the request by one of these"), allowed)


class _GoneError(Exception):
    """The client has gone before its request was whole."""


def _number(headers: dict[bytes, bytes], name: bytes) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e12:
        raise InvalidInputError(fail("cannot score the request", name.decode(),
                                     text.decode("latin-1"), "a number >= 0", "correct it"))
    return value


def _dump(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def _answer(send: _Send, status: int, body: bytes, kind: bytes,
                  more: list[tuple[bytes, bytes]] | None = None) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()),
               *(more or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
