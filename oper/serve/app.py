"""A worker's answers to requests: scores, health, metadata, metrics."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from oper import __version__
from oper.errors import InvalidInputError, OperError
from oper.serve import wire
from oper.serve.batching import Batcher, PendingRequest
from oper.serve.metrics import CONTENT_TYPE, Shared, WorkerMetrics
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor, Request, ServerError

log = logging.getLogger("oper.serve")
_JSON, _BINARY = b"application/json", b"application/octet-stream"
_HEADER_LENGTH, _TIMEOUT = wire.HEADER_LENGTH.encode(), wire.TIMEOUT.encode()


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, and the means to answer it once it is complete.

    Attributes:
        send: sends the answer, after the answers to earlier requests of the connection.
        since: time at which its first byte was read, as `time.monotonic` returns it.
        method, path, headers: the request; header names are in lower case.
        size: size of the body in bytes.
        body: the body; empty if it is larger than `ServeOptions.max_bytes`.
        is_extra: whether it is refused while the worker has too many connections.
        ends: whether the connection closes after the answer.
        status, answer, more: the answer, once `status` is not 0: its HTTP status, body and headers
            other than ``content-length`` and ``connection``.
    """

    send: Callable[[], None]
    since: float = 0.0
    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    size: int = 0
    body: bytes = b""
    is_extra: bool = False
    ends: bool = True
    status: int = 0
    answer: bytes = b""
    more: Sequence[tuple[bytes, bytes]] = ()


class App:
    """Answers HTTP requests of a worker.

    Args:
        predictor: the model.
        options: options of the server.
        shared: the memory of all workers.
        place: index of this worker in `shared`.
        should_close: whether a connection closes after the answer that is being given.
        is_full: whether the worker has too many connections.

    Attributes:
        options, is_full: the arguments.
        batcher: scores the requests.
        counted: the worker's metrics.
        in_flight: number of unanswered scoring requests.
    """

    def __init__(self, predictor: Predictor, options: ServeOptions, shared: Shared, place: int,
                 should_close: Callable[[], bool], is_full: Callable[[], bool]) -> None:
        self.options, self.is_full = options, is_full
        self.counted = WorkerMetrics(shared, place, predictor)
        self.batcher = Batcher(predictor, options.batching, self.counted.observe_batch)
        self.in_flight = 0
        self._predictor, self._should_close = predictor, should_close
        self._signature = predictor.signature
        model = f"/v2/models/{self._signature.name}"
        self._infer_path = f"{model}/infer"
        # Health: a worker gets connections only while it is ready.
        self._pages: dict[str, Callable[[], bytes]] = {
            **dict.fromkeys(("/v2/health/live", "/v2/health/ready", f"{model}/ready"), bytes),
            "/v2": self._about, model: self._metadata, "/metrics": shared.page}
        self._worker = wire.WORKER.encode(), str(os.getpid()).encode()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request immediately or, if it is to be scored, when its batch is done."""
        path, is_scored = exchange.path, self._is_scored(exchange)
        self.in_flight += is_scored
        try:
            if exchange.is_extra and self.is_full():
                exchange.ends = True
                most = self.options.max_connections
                raise ServerError(503, "too many requests", "connections with a request",
                                  f"over {most}", f"<= {most}", "retry later")
            if not is_scored and path not in self._pages:
                raise ServerError(404, "no such address", "path", path,
                                  f"{self._infer_path} or one of {sorted(self._pages)}",
                                  "correct the path of the request")
            allowed = self._allowed(exchange)
            if exchange.method not in allowed.split(", "):
                raise ServerError(405, f"cannot answer at {path}", "method", exchange.method,
                                  allowed, "use an allowed method")
            if is_scored:
                self._infer(exchange)
            else:
                kind = CONTENT_TYPE.encode() if path == "/metrics" else _JSON
                self._answer(exchange, 200, self._pages[path](), kind)
        except Exception as error:
            self.refuse(exchange, error)

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer a request with an error."""
        status = error.status if isinstance(error, ServerError) else (
            400 if isinstance(error, InvalidInputError) else 500)
        if status == 500:
            log.error("a request could not be answered", exc_info=error)
        text = str(error) if isinstance(error, OperError) else (
            f"the model failed: {type(error).__name__}; see the server's log")
        more = {405: (b"allow", self._allowed(exchange).encode()), 503: (b"retry-after", b"1")}
        self._answer(exchange, status, _dump(error=text), _JSON,
                     *([more[status]] if status in more else []))

    def abandon(self, exchange: Exchange) -> None:
        """Count a request whose connection closed before it was complete."""
        if self._is_scored(exchange):
            self.counted.count(0)

    def _is_scored(self, exchange: Exchange) -> bool:
        return exchange.path == self._infer_path

    def _allowed(self, exchange: Exchange) -> str:
        return "POST" if self._is_scored(exchange) else "GET, HEAD"

    def _answer(self, exchange: Exchange, status: int, body: bytes, kind: bytes,
                *more: tuple[bytes, bytes]) -> None:
        if self._is_scored(exchange):
            self.in_flight -= 1
            self.counted.count(status)
        exchange.ends = exchange.ends or self._should_close()
        exchange.status, exchange.answer = status, body
        exchange.more = (b"content-type", kind), *more
        exchange.send()

    def _about(self) -> bytes:
        return _dump(name="oper", version=__version__, extensions=["binary_tensor_data"],
                     parameters={"model": self._signature.name})

    def _metadata(self) -> bytes:
        s = self._signature
        shapes = {"dense": [-1, s.num_dense], "lengths": [len(s.features), -1], "ids": [-1]}
        return _dump(
            name=s.name, platform="oper",
            inputs=[{"name": n, "datatype": wire.INPUTS[n], "shape": shape}
                    for n, shape in shapes.items()],
            outputs=[{"name": "scores", "datatype": "FP32", "shape": [-1]}],
            parameters={"features": list(s.features), "num_rows": list(s.num_rows)})

    # ---- scores ----------------------------------------------------------------------------------

    def _infer(self, exchange: Exchange) -> None:
        if exchange.size > self.options.max_bytes:
            exchange.ends = True
            raise ServerError(413, "the request is too large", "bytes", exchange.size,
                              f"<= {self.options.max_bytes}", "send fewer samples at a time")
        begin = time.monotonic()
        length = _number(exchange.headers, _HEADER_LENGTH, int)
        timeout = _number(exchange.headers, _TIMEOUT, float)
        request = wire.decode_request(exchange.body, length, self._signature)
        exchange.body = b""
        if not request.num_samples:
            self._send_scores(exchange, request, np.zeros(0, np.float32),
                              int(self._predictor.epoch))
            return
        deadline = float("inf") if timeout is None else begin + timeout / 1e3
        self.batcher.submit(PendingRequest(
            request, partial(self._scored, exchange, time.monotonic()), deadline, begin))

    def _scored(self, exchange: Exchange, decoded: float, pending: PendingRequest) -> None:
        """Answer a request that the batcher has scored or refused."""
        if pending.result is None:
            self.refuse(exchange, pending.error or RuntimeError("no result"))
            return
        scored = time.monotonic()
        self._send_scores(exchange, pending.request, *pending.result)
        self.counted.observe_request(
            exchange.since, (pending.arrived, decoded, pending.begun, scored, time.monotonic()),
            pending.request.num_samples, pending.result[1])

    def _send_scores(self, exchange: Exchange, request: Request, scores: np.ndarray, epoch: int
                     ) -> None:
        # Clients that send tensors as JSON get scores as JSON.
        body, length = wire.encode_scores(scores, epoch, self._signature.name,
                                          _HEADER_LENGTH in exchange.headers, request.label)
        if length is None:
            self._answer(exchange, 200, body, _JSON, self._worker)
        else:
            self._answer(exchange, 200, body, _BINARY, self._worker,
                         (_HEADER_LENGTH, b"%d" % length))


def _number(headers: dict[bytes, bytes], name: bytes, kind: Callable[[bytes], Any]) -> Any:
    """Return the number in a header, converted by `kind`; None if the header is missing."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e12:
        raise InvalidInputError(
            "cannot score the request", name.decode(), text.decode("latin-1"),
            f"{'a whole' if kind is int else 'a'} number in [0, 1e12)",
            "correct or omit this header")
    return value


def _dump(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
