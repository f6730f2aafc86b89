"""Dynamic batching: requests that arrive while the model is busy are scored together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, OperError, fail
from oper.serve.requests import Predictor, Request, join


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How requests become batches.

    Attributes:
        max_samples: of a batch; a single larger request is a batch of its own.
        max_wait_ms: how long the oldest request of a batch may wait for others to join it while
            the model is idle; 0 = never (as Triton's ``max_queue_delay_microseconds`` by default):
            those that come while the model works are scored together in any case.
        max_queued: samples that may wait; a request beyond that is refused at once.
    """

    max_samples: int = 1024
    max_wait_ms: float = 0.0
    max_queued: int = 16_384

    def __post_init__(self) -> None:
        for name, least in (("max_samples", 1), ("max_wait_ms", 0), ("max_queued", 1)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise InvalidInputError(fail("invalid batching", name, value, f">= {least}",
                                             "correct it"))


class OverloadedError(OperError, RuntimeError):
    """Too many samples wait already; nothing has been done for this request. Retry later."""


class ExpiredError(OperError, TimeoutError):
    """The deadline of a request passed while it waited; it has not been scored."""


@dataclass(slots=True)
class Ticket:
    """A request on its way.

    Attributes:
        request: what is scored.
        done: called once, on the batcher's thread, when `result` or `error` is set.
        deadline: on the clock of `time.monotonic`; not scored after it.
        result: scores float32 [B] and the epoch.
        error: why there are none.
    """

    request: Request
    done: Callable[[Ticket], Any]
    deadline: float = float("inf")
    arrived: float = field(default_factory=time.monotonic)
    result: tuple[np.ndarray, int] | None = None
    error: Exception | None = None


class Batcher:
    """Scores requests in batches, on a thread of its own.

    Requests enter after they have been checked: one that is refused never meets a batch. When the
    model fails on a batch, its requests are scored one by one, so that a failure stays with the
    request that causes it.

    Args:
        predictor: what scores.
        options: how requests become batches; may be replaced while it runs.
        observe: told ``(num_requests, num_samples, seconds)`` after every batch.
    """

    def __init__(self, predictor: Predictor, options: BatchOptions,
                 observe: Callable[[int, int, float], Any] | None = None) -> None:
        self._predictor, self.options = predictor, options
        self._observe = observe or (lambda requests, samples, seconds: None)
        self._waiting: deque[Ticket] = deque()
        self._queued = 0  # samples in `_waiting`
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="oper-batcher", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Samples that wait."""
        return self._queued

    def submit(self, ticket: Ticket) -> None:
        """Take a checked request in; `ticket.done` follows from the batcher's thread.

        Raises:
            OverloadedError: the queue is full, or the batcher is closing.
        """
        size = ticket.request.num_samples
        with self._changed:
            if self._closing:
                raise OverloadedError(fail("cannot score the request", "server", "shutting down",
                                           "running", "ask another one"))
            if self._queued and self._queued + size > self.options.max_queued:
                raise OverloadedError(fail(
                    "too many requests", "samples waiting", self._queued + size,
                    f"<= {self.options.max_queued}", "retry later"))
            self._waiting.append(ticket)
            self._queued += size
            if len(self._waiting) == 1 or self._queued >= self.options.max_samples:
                self._changed.notify()

    def score(self, request: Request, timeout_s: float = 60.0) -> tuple[np.ndarray, int]:
        """Submit and wait; raises what `submit` raises, or the model's error."""
        ready = threading.Event()
        ticket = Ticket(request, lambda _: ready.set(), time.monotonic() + timeout_s)
        self.submit(ticket)
        ready.wait()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    def close(self) -> None:
        """Score what waits, then stop. Later requests are refused."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._score(batch)

    def _next_batch(self) -> list[Ticket]:
        """The next tickets, at least one; none when the batcher is closed and nothing waits."""
        o = self.options
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return []
            until = self._waiting[0].arrived + o.max_wait_ms / 1e3
            while self._queued < o.max_samples and not self._closing:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch: list[Ticket] = []
            size = 0
            while self._waiting:
                more = self._waiting[0].request.num_samples
                if batch and size + more > o.max_samples:
                    break
                batch.append(self._waiting.popleft())
                size += more
            self._queued -= size
            return batch

    def _score(self, batch: list[Ticket]) -> None:
        now = time.monotonic()
        live = []
        for ticket in batch:
            if ticket.deadline < now:
                ticket.error = ExpiredError(fail(
                    "the request was not scored", "waited (s)", round(now - ticket.arrived, 3),
                    "less than its deadline", "allow more time, or send less"))
                ticket.done(ticket)
            else:
                live.append(ticket)
        if not live:
            return
        joined = join([t.request for t in live])
        try:
            scores, epoch = self._predictor.predict(joined)
            if len(scores) != joined.num_samples:
                raise OperError(fail("the model is broken", "scores", len(scores),
                                     f"{joined.num_samples}, one per sample", "correct predict()"))
        except Exception as error:
            if len(live) > 1:
                for ticket in live:
                    self._score([ticket])
                return
            live[0].error = error
            live[0].done(live[0])
            return
        at = 0
        for ticket in live:
            size = ticket.request.num_samples
            ticket.result = scores[at:at + size], epoch
            at += size
        self._observe(len(live), joined.num_samples, time.monotonic() - now)
        for ticket in live:
            ticket.done(ticket)
