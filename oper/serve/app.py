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
from oper.errors import InvalidInputError, OperError
from oper.serve import wire
from oper.serve.batching import Batcher, ExpiredError, OverloadedError, PendingRequest
from oper.serve.connection import JSON, Exchange
from oper.serve.metrics import CONTENT_TYPE, Shared, WorkerMetrics
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor

log = logging.getLogger("oper.serve")
TIMEOUT = b"oper-timeout-ms"  # header with the time that the client will wait
_BINARY = b"application/octet-stream"
_HEADER_LENGTH = wire.HEADER_LENGTH.encode()


class _NoSuchAddressError(OperError):
    """The path is not one of the server's."""


class _WrongMethodError(OperError):
    """The path does not support this method."""


class _TooLargeError(OperError):
    """The body is larger than `ServeOptions.max_bytes`."""


# The status and, of scoring requests, the outcome in the metrics for each kind of error.
_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    _NoSuchAddressError: (404, ""), _WrongMethodError: (405, "invalid"),
    _TooLargeError: (413, "oversized"), InvalidInputError: (400, "invalid"),
    OverloadedError: (503, "overloaded"), ExpiredError: (504, "expired"),
    Exception: (500, "failed")}


class App:
    """Answers HTTP requests of a worker.

    Args:
        predictor: the model.
        options: options of the server.
        shared: the memory of all workers.
        place: index of this worker in `shared`.
        submitted: called after a request has been queued in `batcher`.

    Attributes:
        batcher: scores the requests.
        counted: the worker's metrics.
        in_flight: number of unanswered scoring requests.
    """

    def __init__(self, predictor: Predictor, options: ServeOptions, shared: Shared, place: int,
                 submitted: Callable[[], None]) -> None:
        self.counted = WorkerMetrics(shared, place, predictor)
        self.batcher = Batcher(predictor, options.batching, self.counted.observe_batch)
        self.in_flight = 0
        self._signature, self._max_bytes = predictor.signature, options.max_bytes
        self._submitted = submitted
        model = f"/v2/models/{self._signature.name}"
        self._infer_path = f"{model}/infer"
        # Health: a worker gets connections only while it is ready.
        self._pages: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            **dict.fromkeys(("/v2/health/live", "/v2/health/ready", f"{model}/ready"),
                            lambda: (b"", JSON)),
            "/v2": self._about, model: self._metadata,
            "/metrics": lambda: (shared.page(), CONTENT_TYPE.encode())}
        # A header that tells clients which of their connections share a worker.
        self._worker = b"oper-worker", str(os.getpid()).encode()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request immediately or, if it is to be scored, when its batch is done."""
        path, method = exchange.path, exchange.method.decode("latin-1")
        is_scored = path == self._infer_path
        self.in_flight += is_scored
        try:
            if not is_scored and path not in self._pages:
                raise _NoSuchAddressError(
                    "no such address", "path", path, f"{self._infer_path} or one of "
                    f"{sorted(self._pages)}", "use one of these paths")
            allowed = "POST" if is_scored else "GET, HEAD"
            if method not in allowed.split(", "):
                raise _WrongMethodError(f"cannot answer at {path}", "method", method, allowed,
                                        "use an allowed method")
            if is_scored:
                self._infer(exchange)
            else:
                exchange.answer(200, *self._pages[path]())
        except Exception as error:
            self._refuse(exchange, error)

    def abandoned(self, path: str) -> None:
        """Count a request whose connection closed before it was complete."""
        if path == self._infer_path:
            self.counted.count("gone")

    def _about(self) -> tuple[bytes, bytes]:
        return _dump(name="oper", version=__version__, extensions=["binary_tensor_data"],
                     parameters={"model": self._signature.name}), JSON

    def _metadata(self) -> tuple[bytes, bytes]:
        s = self._signature
        shapes = {"dense": [-1, s.num_dense], "lengths": [len(s.features), -1], "ids": [-1]}
        return _dump(
            name=s.name, platform="oper",
            inputs=[{"name": n, "datatype": wire.INPUTS[n], "shape": shape}
                    for n, shape in shapes.items()],
            outputs=[{"name": "scores", "datatype": "FP32", "shape": [-1]}],
            parameters={"features": list(s.features), "num_rows": list(s.num_rows)}), JSON

    # ---- scores ----------------------------------------------------------------------------------

    def _infer(self, exchange: Exchange) -> None:
        if exchange.size > self._max_bytes:
            exchange.ends = True
            raise _TooLargeError("the request is too large", "bytes", exchange.size,
                                 f"<= {self._max_bytes}", "send fewer samples at a time")
        begin = time.monotonic()
        length = _number(exchange.headers, _HEADER_LENGTH)
        timeout = _number(exchange.headers, TIMEOUT)
        if length is not None and not length.is_integer():
            raise InvalidInputError("cannot score the request", wire.HEADER_LENGTH, length,
                                    "a whole number of bytes", "send the length of the JSON header")
        request = wire.decode_request(exchange.body, None if length is None else int(length),
                                      self._signature)
        exchange.body = b""
        if not request.num_samples:
            self._send_scores(exchange, np.zeros(0, np.float32), 0)
            return
        deadline = float("inf") if timeout is None else begin + timeout / 1e3
        self.batcher.submit(PendingRequest(
            request, partial(self._scored, exchange, time.monotonic()), deadline, begin))
        self._submitted()

    def _scored(self, exchange: Exchange, decoded: float, pending: PendingRequest) -> None:
        """Answer a request that the batcher has scored or refused."""
        if pending.result is None:
            self._refuse(exchange, pending.error or RuntimeError("no result"))
            return
        scored = time.monotonic()
        self._send_scores(exchange, *pending.result)
        self.counted.observe_request(
            exchange.since, (pending.arrived, decoded, pending.begun, scored, time.monotonic()),
            pending.request.num_samples, pending.result[1])

    def _send_scores(self, exchange: Exchange, scores: np.ndarray, epoch: int) -> None:
        # Clients that send tensors as JSON get scores as JSON.
        body, length = wire.encode_scores(scores, epoch, self._signature.name,
                                          _HEADER_LENGTH in exchange.headers)
        more = [self._worker]
        if length is not None:
            more.append((_HEADER_LENGTH, b"%d" % length))
        self._done("ok")
        exchange.answer(200, body, JSON if length is None else _BINARY, more)

    def _refuse(self, exchange: Exchange, error: Exception) -> None:
        is_scored = exchange.path == self._infer_path
        status, outcome = next(x for kind, x in _REFUSALS.items() if isinstance(error, kind))
        if status == 500:
            log.error("a request could not be answered", exc_info=error)
        text = str(error) if isinstance(error, OperError) else (
            f"the model failed: {type(error).__name__}; see the server's log")
        more = {405: [(b"allow", b"POST" if is_scored else b"GET, HEAD")],
                503: [(b"retry-after", b"1")]}.get(status, [])
        if is_scored:
            self._done(outcome)
        exchange.answer(status, _dump(error=text), JSON, more)

    def _done(self, outcome: str) -> None:
        self.in_flight -= 1
        self.counted.count(outcome)


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
