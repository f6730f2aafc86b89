"""Prometheus metrics of all workers, in memory that they share with the supervisor.

Each worker has its own counters, and a ring buffer of what it did while a trace is recorded. A
worker that replaces a failed one continues with its counters. Gauges are those of the workers that
accept connections.
"""

from __future__ import annotations

import ctypes
import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

log = logging.getLogger("oper.serve")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .1, .25, .5, 1., 5.)
_SAMPLES = tuple(float(1 << k) for k in range(15))
_REQUESTS = tuple(float(1 << k) for k in range(9))
# Consecutive stages of a request: first to last byte read; decoded and checked; batch begun;
# scored; answer written.
STAGES = ("receive", "decode", "wait", "score", "answer")
# Of a scoring request, by the HTTP status of the answer; 0 = none, as the client has gone.
_OUTCOMES = {200: "ok", 400: "invalid", 405: "invalid", 413: "oversized", 503: "overloaded",
             504: "expired", 500: "failed", 0: "gone"}
_DOMAINS = ("local", "remote")
# Records of a trace: their kind, begin, then end and numbers of the kind. Times are in seconds, as
# `time.monotonic` returns them, a clock that the processes of a host share.
REQUEST, BATCH, LOOKUP = range(3)
_RECORDS, _WIDTH = 4096, 9  # records of a worker's ring buffer, numbers per record
_LOOKUPS = 64  # most lookups of one batch in a trace


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with all its series.

    Attributes:
        name: name without Prometheus' suffixes.
        kind: ``"counter"``, ``"gauge"`` or ``"histogram"``.
        about: help text.
        label: name of the label that distinguishes the series; "" if there is one series.
        values: values of the label, one per series; () = one series per feature with raw keys.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: str
    about: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The metric's full name in Prometheus' text format."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def lines(self, values: Sequence[str], numbers: np.ndarray) -> Iterator[str]:
        """Yield the lines of the series with these values of the label in Prometheus' text format.

        `numbers` has one row per series: one number, or those of a histogram's buckets, of larger
        amounts, and their sum.
        """
        yield f"# HELP {self.family} {self.about}"
        yield f"# TYPE {self.family} {self.kind}"
        for value, row in zip(values, numbers, strict=True):
            value = value.replace("\\", r"\\").replace('"', r'\"').replace("\n", r"\n")
            label = f'{self.label}="{value}"' if self.label else ""
            mark, comma = f"{{{label}}}" if label else "", "," if label else ""
            if self.kind != "histogram":
                yield f"{self.family}{mark} {float(row[0])}"
                continue
            counts = np.cumsum(row[:-1]).tolist()
            for bound, count in zip((*self.buckets, "+Inf"), counts, strict=True):
                yield f'{self.name}_bucket{{{label}{comma}le="{bound}"}} {count}'
            yield f"{self.name}_count{mark} {counts[-1]}"
            yield f"{self.name}_sum{mark} {float(row[-1])}"


_ANSWERED = Metric("oper_requests", "counter", "Requests by outcome; gone = the connection closed "
                   "before the request was complete.", "outcome",
                   tuple(dict.fromkeys(_OUTCOMES.values())))
_LATENCY = Metric("oper_request_seconds", "histogram", "Time from a complete request to its "
                  "scores, without its wait in the socket for the end of the batch under way.",
                  buckets=_LATENCY_S)
_STAGE = Metric("oper_stage_seconds", "histogram", "Time of each stage of a request: receive "
                "(first byte read to the whole request), decode, wait (for its batch), score, "
                "answer.", "stage", STAGES, _LATENCY_S)
_BATCH_SAMPLES = Metric("oper_batch_samples", "histogram", "Samples scored together.",
                        buckets=_SAMPLES)
_BATCH_REQUESTS = Metric("oper_batch_requests", "histogram", "Requests scored together.",
                         buckets=_REQUESTS)
_BATCH_SECONDS = Metric("oper_batch_seconds", "histogram", "Time of the model on a batch.",
                        buckets=_LATENCY_S)
_QUEUED = Metric("oper_queued_samples", "gauge", "Samples waiting to be scored.")
_IN_FLIGHT = Metric("oper_requests_in_flight", "gauge", "Unanswered scoring requests.")
_ROWS = Metric("oper_embedding_rows_read", "counter", "Embedding rows read, by the memory domain "
               "that holds them.", "domain", _DOMAINS)
_KEYS = Metric("oper_keys_read", "counter", "Raw keys looked up, by feature.", "feature", ())
_UNKNOWN_KEYS = Metric("oper_unknown_keys_read", "counter", "Raw keys looked up that have no row "
                       "and read the default row, by feature.", "feature", ())
_EPOCH = Metric("oper_weights_epoch", "gauge", "Epoch of the weights in use; the lowest of all "
                "workers.")
WORKERS = (_ANSWERED, _LATENCY, _STAGE, _BATCH_SAMPLES, _BATCH_REQUESTS, _BATCH_SECONDS, _QUEUED,
           _IN_FLIGHT, _ROWS, _KEYS, _UNKNOWN_KEYS, _EPOCH)
# Metrics of the supervisor: (metric, field of `Shared.counts`, factor to the metric's unit).
SUPERVISOR = (
    (Metric("oper_workers", "gauge", "Workers that take requests."), "workers", 1.0),
    (Metric("oper_worker_restarts", "counter", "Workers that exited and were replaced."),
     "worker_restarts", 1.0),
    (Metric("oper_publications", "counter", "New weights published, deltas included."),
     "publications", 1.0),
    (Metric("oper_failed_publications", "counter", "Weights that could not be published."),
     "failed_publications", 1.0),
    (Metric("oper_weights_lag_seconds", "gauge", "Time from the training step of the last delta to "
            "its rows in service; 0 after a publication of all weights."), "weights_lag_us", 1e-6))


class Counts(ctypes.Structure):
    """The supervisor's counters."""

    _fields_ = [(name, ctypes.c_long) for name in (
        *(field for _, field, _ in SUPERVISOR), "is_tracing")]


class Shared:
    """The memory that the supervisor shares with its workers.

    Args:
        context: the context of `multiprocessing` that starts the workers.
        workers: number of workers.
        key_features: features whose ids are raw keys.

    Attributes:
        counts: the supervisor's counters, whole numbers; workers record traces while
            ``counts.is_tracing`` is not 0.
        metrics: the workers' metrics, each with the values of its label.
    """

    def __init__(self, context: Any, workers: int, key_features: tuple[str, ...] = ()) -> None:
        self.metrics = [(m, m.values or key_features) for m in WORKERS if m.values or key_features]
        self._types = [
            *((m.name, float, (len(values), len(m.buckets) + 2 if m.buckets else 1))
              for m, values in self.metrics),
            ("ring", float, (_RECORDS, _WIDTH)), ("written", int), ("process", int),
            ("connections", int)]
        self._memory = context.RawArray(ctypes.c_char, workers * np.dtype(self._types).itemsize)
        self.counts = context.RawValue(Counts)
        self.workers()["connections"] = -1

    def workers(self) -> np.ndarray:
        """Return the shared memory of the workers as an array with one record per worker.

        A record has a field for each metric, by its name. In addition, ``ring`` has the last
        records of a trace, ``written`` is how many there were, ``process`` is the id of the
        process, and ``connections`` the number of open connections, -1 if it does not accept any.
        """
        return np.frombuffer(self._memory, np.dtype(self._types))

    def page(self) -> bytes:
        """Return the metrics of supervisor and workers in Prometheus' text format."""
        lines = [line for metric, field, unit in SUPERVISOR for line in metric.lines(
            [""], np.array([[getattr(self.counts, field) * unit]]))]
        workers = self.workers()
        accepting = workers[workers["connections"] >= 0]
        for metric, values in self.metrics:
            numbers = (accepting if metric.kind == "gauge" else workers)[metric.name]
            is_lowest = metric is _EPOCH and bool(numbers.size)
            lines += metric.lines(values, numbers.min(0) if is_lowest else numbers.sum(0))
        return ("\n".join(lines) + "\n").encode()


class WorkerMetrics:
    """Counts what one worker does, and records it while a trace is made.

    Args:
        shared: the memory of all workers.
        worker: the worker's index.
        predictor: the worker's predictor.
    """

    def __init__(self, shared: Shared, worker: int, predictor: Any) -> None:
        self._mine, self._counts = shared.workers()[worker], shared.counts
        self._mine["process"] = os.getpid()
        self._series = {(m.name, value): row for m, values in shared.metrics
                        for value, row in zip(values, self._mine[m.name], strict=True)}
        self._keys = [f for name, f in self._series if name == _KEYS.name]
        self._seen: dict[tuple[str, str], int] = {}
        self._predictor = predictor
        self._has_lookups = hasattr(predictor, "trace_lookups") and hasattr(predictor,
                                                                            "take_lookups")
        self._looks = False  # whether the predictor records its lookups

    def _observe(self, metric: Metric, amount: float, value: str = "") -> None:
        row = self._series[metric.name, value]
        row[bisect_left(metric.buckets, amount)] += 1
        row[-1] += amount

    def count(self, status: int) -> None:
        """Count a scoring request by the status of its answer; 0 = it was given up."""
        self._series[_ANSWERED.name, _OUTCOMES[status]][0] += 1

    def observe_request(self, begin: float, ends: Sequence[float], samples: int, epoch: int
                        ) -> None:
        """Record a scored request.

        Args:
            begin: time at which its first byte was read, as `time.monotonic` returns it.
            ends: time at which each of its `STAGES` ended.
            samples: number of its samples.
            epoch: epoch of the weights.
        """
        if self._counts.is_tracing:
            self._write(REQUEST, begin, *ends, samples, epoch)
        self._observe(_LATENCY, ends[3] - ends[0])
        for stage, end in zip(STAGES, ends, strict=True):
            self._observe(_STAGE, end - begin, stage)
            begin = end

    def observe_batch(self, requests: int, samples: int, begin: float, end: float) -> None:
        """Record a scored batch, and the lookups that the predictor has recorded for it."""
        self._observe(_BATCH_REQUESTS, requests)
        self._observe(_BATCH_SAMPLES, samples)
        self._observe(_BATCH_SECONDS, end - begin)
        is_on = bool(self._counts.is_tracing)
        if is_on:
            self._write(BATCH, begin, end, requests, samples)
        if self._has_lookups and (is_on or self._looks):
            try:
                self._trace_lookups(is_on)
            except Exception:  # the batch's requests must be answered
                log.exception("no lookups in traces: the predictor cannot record them")
                self._has_lookups = False

    def _trace_lookups(self, is_on: bool) -> None:
        if is_on and self._looks:
            for begin, end in self._predictor.take_lookups():
                self._write(LOOKUP, begin, end)
        if is_on != self._looks:
            self._predictor.trace_lookups(_LOOKUPS if is_on else 0)
            self._looks = is_on

    def _write(self, *numbers: float) -> None:
        count = int(self._mine["written"])
        self._mine["ring"][count % _RECORDS, :len(numbers)] = numbers
        self._mine["written"] = count + 1

    def report(self, queued: int, in_flight: int) -> None:
        """Update the gauges, and add the rows and keys that the predictor has read since the last
        call."""
        predictor = self._predictor
        for metric, value in ((_QUEUED, queued), (_IN_FLIGHT, in_flight),
                              (_EPOCH, predictor.epoch)):
            self._series[metric.name, ""][0] = value
        rows = predictor.rows_read()
        keys: Mapping[str, tuple[int, int]] = getattr(predictor, "keys_read", dict)()
        totals = {(_ROWS.name, domain): rows.get(domain, 0) for domain in _DOMAINS}
        for feature in self._keys:
            totals[_KEYS.name, feature], totals[_UNKNOWN_KEYS.name, feature] = keys.get(
                feature, (0, 0))
        for at, total in totals.items():
            self._series[at][0] += total - self._seen.get(at, 0)
        self._seen = totals
