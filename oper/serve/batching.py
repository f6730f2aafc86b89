"""Dynamic batching: requests that arrive while the model is busy are scored together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, OperError, require
from oper.serve.options import BatchOptions
from oper.serve.requests import Predictor, Request, ServerError, join

_MAX_EXPANDED = 1 << 24  # ids of a batch whose shared bags are copied to every sample
_SMOOTHING = 0.1  # weight of a new measurement in the moving average of the time per sample


@dataclass(slots=True)
class PendingRequest:
    """A queued request. Times are in seconds, as `time.monotonic` returns them.

    Attributes:
        request: the samples to score.
        done: called with this object once, when `result` or `error` is set.
        deadline: time after which the request is not scored.
        arrived: time at which the request was completely received.
        begun: time at which scoring of its batch began.
        result: scores float32 [B], and the epoch of the weights.
        error: the error if the request could not be scored.
    """

    request: Request
    done: Callable[[PendingRequest], Any]
    deadline: float = float("inf")
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    result: tuple[np.ndarray, int] | None = None
    error: Exception | None = None


class Batcher:
    """Scores requests in batches, on the calling thread.

    Callers validate requests before submitting them. If the model fails on a batch, its requests
    are scored one by one, so that only the requests that cause the failure fail.

    Args:
        predictor: the model.
        options: batching options; the attribute `options` may be replaced at any time.
        observe: called with ``(num_requests, num_samples, begin, end)`` after every batch.

    Attributes:
        queued: number of queued samples.
    """

    def __init__(self, predictor: Predictor, options: BatchOptions,
                 observe: Callable[[int, int, float, float], Any] | None = None) -> None:
        self._predictor, self.options = predictor, options
        self._observe = observe or (lambda requests, samples, begin, end: None)
        self._waiting: deque[PendingRequest] = deque()
        self._until = float("inf")  # the earliest deadline of those waiting
        self.queued = 0
        self._sample_s = 0.0  # moving average of the seconds per sample

    def submit(self, pending: PendingRequest) -> None:
        """Queue a validated request for scoring by `turn`.

        Raises:
            ServerError: the queue is full (status 503).
        """
        size = pending.request.num_samples
        if self.queued and self.queued + size > self.options.max_queued:
            raise ServerError(503, "too many requests", "samples waiting", self.queued + size,
                              f"<= {self.options.max_queued}", "retry later")
        self._waiting.append(pending)
        self._until = min(self._until, pending.deadline)
        self.queued += size

    def due_s(self) -> float:
        """Return the seconds until the next batch is due, <= 0 if now; infinite if nothing is
        queued.

        A batch is due when it is full, `BatchOptions.max_wait_ms` after its oldest request has
        arrived, or earlier if a request is expected to miss its deadline otherwise.
        """
        if not self._waiting:
            return float("inf")
        o, oldest = self.options, self._waiting[0]
        if not o.max_wait_ms or self.queued >= o.max_samples:
            return 0.0
        return min(oldest.arrived + o.max_wait_ms / 1e3,
                   self._until - self.queued * self._sample_s) - time.monotonic()

    def turn(self) -> None:
        """Score one batch of queued requests and call their `done`."""
        if live := self._next_batch():
            self._score(live)

    def _next_batch(self) -> list[PendingRequest]:
        """Remove the next batch from the queue, oldest request first. Requests whose deadline has
        passed get a ServerError (504). The batch ends before a request that would make it exceed
        `max_samples` or the deadline of one of its requests."""
        now, most = time.monotonic(), self.options.max_samples
        batch: list[PendingRequest] = []
        size, until = 0, float("inf")
        while self._waiting:
            pending = self._waiting[0]
            more = pending.request.num_samples
            is_late = pending.deadline < now
            ends = now + (size + more) * self._sample_s
            if not is_late and batch and (size + more > most or ends > until):
                break
            self._waiting.popleft()
            self.queued -= more
            if is_late:
                pending.error = ServerError(
                    504, "the request was not scored", "waited (s)",
                    round(now - pending.arrived, 3), "less than its deadline",
                    "allow more time, or send fewer samples")
                pending.done(pending)
                continue
            batch.append(pending)
            size += more
            until = min(until, pending.deadline)
        self._until = min((p.deadline for p in self._waiting), default=float("inf"))
        return batch

    def _joined(self, requests: list[Request]) -> Request:
        """Join requests.

        Raises InvalidInputError if shared bags would have to be copied to very many samples: the
        copies for a small request could take all memory.
        """
        shares = bool(getattr(self._predictor, "shares_bags", False))
        kinds = {r.shared for r in requests}
        if kinds != {()} and not (shares and len(kinds) == 1):
            total = sum(r.num_expanded for r in requests)
            require("cannot score the request", "send fewer samples or ids of user_features",
                    ("ids of all samples", total, total <= _MAX_EXPANDED, f"<= {_MAX_EXPANDED}"))
        joined = join(requests)
        return joined if shares else joined.expanded()

    def _score(self, live: list[PendingRequest]) -> None:
        begin = time.monotonic()
        try:
            joined = self._joined([p.request for p in live])
            scores, epoch = self._predictor.predict(joined)
            # Of other types of numbers, too, such as NumPy's float64, which answers cannot hold.
            scores, epoch = np.asarray(scores, np.float32), int(epoch)
            if scores.shape != (joined.num_samples,):
                raise OperError("predict() is incorrect", "shape of scores", scores.shape,
                                f"{(joined.num_samples,)}, one per sample", "correct the predictor")
            if not np.isfinite(scores).all():
                raise InvalidInputError("cannot score the request", f"scores of epoch {epoch}",
                                        "inf or nan", "finite numbers",
                                        "send smaller dense features, or publish other weights")
        except Exception as error:
            if len(live) > 1:
                for pending in live:
                    self._score([pending])
                return
            if isinstance(error, ServerError):  # from another server: the model is its client
                error = OperError(str(error)).with_traceback(error.__traceback__)
            live[0].error = error
            live[0].done(live[0])
            return
        end = time.monotonic()
        measured = (end - begin) / max(1, joined.num_samples)
        self._sample_s += (_SMOOTHING if self._sample_s else 1.0) * (measured - self._sample_s)
        self._observe(len(live), joined.num_samples, begin, end)
        at = 0
        for pending in live:
            size = pending.request.num_samples
            pending.result, pending.begun = (scores[at:at + size], epoch), begin
            at += size
            pending.done(pending)
