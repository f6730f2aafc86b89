"""A worker's answers to requests: scores, health, metadata, metrics."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from oper import __version__
from oper.errors import InvalidInputError, OperError, fail
from oper.serve import metrics, wire
from oper.serve.batching import ExpiredError, OverloadedError, PendingRequest
from oper.serve.connection import JSON, Exchange
from oper.serve.requests import Signature

log = logging.getLogger("oper.serve")
TIMEOUT = b"oper-timeout-ms"  # header with the time that the client will wait
_BINARY = b"application/octet-stream"
_HEADER_LENGTH = wire.HEADER_LENGTH.encode()


class _Refused(Exception):
    """An error answer: HTTP status, outcome for the metrics, message, allowed methods."""

    def __init__(self, status: int, outcome: str, text: str, allow: str = "") -> None:
        super().__init__(text)
        self.status, self.outcome, self.allow = status, outcome, allow


class App:
    """Answers HTTP requests of a worker.

    Args:
        signature: the model's inputs.
        submit: queues a validated request; see `oper.serve.batching.Batcher.submit`.
        counted: this worker's metrics.
        max_bytes: maximum size of a request's body.
        page: returns the text of ``/metrics``.

    Attributes:
        in_flight: number of unanswered scoring requests.
    """

    def __init__(self, signature: Signature, submit: Callable[[PendingRequest], None],
                 counted: metrics.WorkerMetrics, max_bytes: int,
                 page: Callable[[], bytes]) -> None:
        self.signature, self._submit, self._counted = signature, submit, counted
        self._max_bytes, self._page = max_bytes, page
        self.in_flight = 0
        self._model = f"/v2/models/{signature.name}"
        self._infer_path = f"{self._model}/infer"
        # A header that tells clients which of their connections share a worker.
        self._worker = b"oper-worker", str(os.getpid()).encode()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request immediately or, if it is to be scored, when its batch is done."""
        is_scored = exchange.path == self._infer_path
        self.in_flight += is_scored
        try:
            if is_scored:
                self._infer(exchange)
            else:
                self._get(exchange)
        except _Refused as error:
            self._refuse(exchange, error)
        except Exception as error:  # a bug in this package: answer so that the client does not wait
            log.exception("a request could not be answered")
            self._refuse(exchange, _Refused(500, "failed", repr(error)))

    def abandoned(self, path: str) -> None:
        """Count a request whose connection closed before it was complete."""
        if path == self._infer_path:
            self._counted.count("gone")

    # ---- health, metadata, metrics ---------------------------------------------------------------

    def _get(self, exchange: Exchange) -> None:
        path = exchange.path
        health = ("/v2/health/live", "/v2/health/ready", f"{self._model}/ready")
        if path in (*health, "/v2", self._model, "/metrics"):
            _check_method(exchange, "GET, HEAD")
        if path in health:
            # A worker gets connections only while it is ready.
            exchange.answer(200)
        elif path == "/v2":
            exchange.answer(200, _dump(name="oper", version=__version__,
                                       extensions=["binary_tensor_data"],
                                       parameters={"model": self.signature.name}))
        elif path == self._model:
            exchange.answer(200, self._metadata())
        elif path == "/metrics":
            exchange.answer(200, self._page(), metrics.CONTENT_TYPE.encode())
        else:
            raise _Refused(404, "", fail(
                "no such address", "path", path,
                f"{self._model}[/infer], /v2/health/live, /v2/health/ready or /metrics",
                "use one of these paths"))

    def _metadata(self) -> bytes:
        s = self.signature
        shapes = {"dense": [-1, s.num_dense], "lengths": [len(s.features), -1], "ids": [-1]}
        return _dump(
            name=s.name, platform="oper",
            inputs=[{"name": n, "datatype": wire.INPUTS[n], "shape": shape}
                    for n, shape in shapes.items()],
            outputs=[{"name": "scores", "datatype": "FP32", "shape": [-1]}],
            parameters={"features": list(s.features), "num_rows": list(s.num_rows)})

    # ---- scores ----------------------------------------------------------------------------------

    def _infer(self, exchange: Exchange) -> None:
        _check_method(exchange, "POST")
        if exchange.size > self._max_bytes:
            exchange.ends = True
            raise _Refused(413, "oversized", fail(
                "the request is too large", "bytes", exchange.size, f"<= {self._max_bytes}",
                "send fewer samples at a time"))
        begin = time.monotonic()
        try:
            length = _number(exchange.headers, _HEADER_LENGTH)
            timeout = _number(exchange.headers, TIMEOUT)
            if length is not None and not length.is_integer():
                raise InvalidInputError("cannot score the request", wire.HEADER_LENGTH, length,
                                        "a whole number of bytes",
                                        "send the length of the JSON header")
            request = wire.decode_request(exchange.body, None if length is None else int(length),
                                          self.signature)
        except InvalidInputError as error:
            raise _Refused(400, "invalid", str(error)) from None
        exchange.body = b""
        if not request.num_samples:
            self._send_scores(exchange, np.zeros(0, np.float32), 0)
            return
        deadline = float("inf") if timeout is None else begin + timeout / 1e3
        decoded = time.monotonic()
        try:
            self._submit(PendingRequest(request, partial(self._scored, exchange, decoded), deadline,
                                        begin))
        except OverloadedError as error:
            raise _Refused(503, "overloaded", str(error)) from None

    def _scored(self, exchange: Exchange, decoded: float, pending: PendingRequest) -> None:
        """Answer a request that the batcher has scored or refused."""
        error = pending.error
        if pending.result is not None:
            scored = time.monotonic()
            self._send_scores(exchange, *pending.result)
            self._counted.observe_request(exchange.since, (
                pending.arrived, decoded, pending.begun, scored, time.monotonic()),
                pending.request.num_samples, pending.result[1])
        elif isinstance(error, ExpiredError):
            self._refuse(exchange, _Refused(504, "expired", str(error)))
        elif isinstance(error, InvalidInputError):
            self._refuse(exchange, _Refused(400, "invalid", str(error)))
        else:
            log.error("the model failed on a request", exc_info=error)
            what = str(error) if isinstance(error, OperError) else (
                f"the model failed: {type(error).__name__}; see the server's log")
            self._refuse(exchange, _Refused(500, "failed", what))

    def _send_scores(self, exchange: Exchange, scores: np.ndarray, epoch: int) -> None:
        # Clients that send tensors as JSON get scores as JSON.
        body, length = wire.encode_scores(scores, epoch, self.signature.name,
                                          _HEADER_LENGTH in exchange.headers)
        more = [self._worker]
        if length is not None:
            more.append((_HEADER_LENGTH, b"%d" % length))
        self._done("ok")
        exchange.answer(200, body, JSON if length is None else _BINARY, more)

    def _refuse(self, exchange: Exchange, error: _Refused) -> None:
        more = []
        if error.allow:
            more.append((b"allow", error.allow.encode()))
        if error.status == 503:
            more.append((b"retry-after", b"1"))
        if exchange.path == self._infer_path:
            self._done(error.outcome)
        exchange.answer(error.status, _dump(error=str(error)), JSON, more)

    def _done(self, outcome: str) -> None:
        self.in_flight -= 1
        self._counted.count(outcome)


def _check_method(exchange: Exchange, allowed: str) -> None:
    method = exchange.method.decode("latin-1")
    if method not in allowed.split(", "):
        raise _Refused(405, "invalid", fail(
            f"cannot answer at {exchange.path}", "method", method, allowed,
            "use an allowed method"), allowed)


def _number(headers: dict[bytes, bytes], name: bytes) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e12:
        raise InvalidInputError("cannot score the request", name.decode(), text.decode("latin-1"),
                                "a number in [0, 1e12)", "correct or omit this header")
    return value


def _dump(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
