"""Prometheus metrics of all workers, in memory that they share with the supervisor.

Each worker has its own counters. A worker that replaces a failed one continues with its counters;
only the gauges are reset.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .1, .25, .5, 1., 5.)
_SAMPLES = tuple(float(1 << k) for k in range(15))
_REQUESTS = tuple(float(1 << k) for k in range(9))
# Consecutive stages of a request: first to last byte received; decoded and checked; batch begun;
# scored; answer written.
STAGES = ("receive", "decode", "wait", "score", "answer")
_OUTCOMES = ("ok", "invalid", "oversized", "overloaded", "expired", "failed", "gone")
_DOMAINS = ("local", "remote")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with all its series.

    Attributes:
        name: name without Prometheus' suffixes.
        kind: ``"counter"``, ``"gauge"`` or ``"histogram"``.
        about: help text.
        label: name of the label that distinguishes the series; "" if there is one series.
        values: values of the label, one per series; of the label ``feature`` those of a `Layout`.
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

    @property
    def width(self) -> int:
        """Number of counters per series; a histogram has its buckets, an overflow bucket and the
        sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def lines(self, series: Sequence[np.ndarray]) -> Iterator[str]:
        """Yield the lines of all series in Prometheus' text format."""
        yield f"# HELP {self.family} {self.about}"
        yield f"# TYPE {self.family} {self.kind}"
        for value, numbers in zip(self.values, series, strict=True):
            label = f'{self.label}="{_escaped(value)}"' if self.label else ""
            mark = f"{{{label}}}" if label else ""
            if self.kind != "histogram":
                yield f"{self.family}{mark} {float(numbers[0])}"
                continue
            counts = np.cumsum(numbers[:-1])
            for bound, count in zip((*self.buckets, "+Inf"), counts, strict=True):
                more = f"{label}," if label else ""
                yield f'{self.name}_bucket{{{more}le="{bound}"}} {float(count)}'
            yield f"{self.name}_count{mark} {float(counts[-1])}"
            yield f"{self.name}_sum{mark} {float(numbers[-1])}"


def _escaped(label: str) -> str:
    """Return a label's value as Prometheus' text format requires."""
    return label.replace("\\", r"\\").replace('"', r'\"').replace("\n", r"\n")


_REQUEST = Metric("oper_requests", "counter", "Requests by outcome.", "outcome", _OUTCOMES)
_LATENCY = Metric("oper_request_seconds", "histogram", "Time from a complete request to its "
                  "scores.", buckets=_LATENCY_S)
_STAGE = Metric("oper_stage_seconds", "histogram", "Time of each consecutive stage of a request.",
                "stage", STAGES, _LATENCY_S)
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
WORKERS = (_REQUEST, _LATENCY, _STAGE, _BATCH_SAMPLES, _BATCH_REQUESTS, _BATCH_SECONDS, _QUEUED,
           _IN_FLIGHT, _ROWS, _KEYS, _UNKNOWN_KEYS, _EPOCH)
# Metrics of the supervisor: (metric, field of `oper.serve.server.Counts`, factor to the metric's
# unit).
SUPERVISOR = (
    (Metric("oper_workers", "gauge", "Workers that take requests."), "workers", 1.0),
    (Metric("oper_worker_restarts", "counter", "Workers that exited and were replaced."),
     "worker_restarts", 1.0),
    (Metric("oper_publications", "counter", "New weights published since the start."),
     "publications", 1.0),
    (Metric("oper_failed_publications", "counter", "Weights that could not be published."),
     "failed_publications", 1.0),
    (Metric("oper_weights_lag_seconds", "gauge", "Time from the training step of the last "
            "published delta to its use."), "weights_lag_us", 1e-6))


class Layout:
    """The places of a worker's counters.

    Args:
        key_features: features whose ids are raw keys.

    Attributes:
        metrics: the workers' metrics, with the values of all labels.
        places: offset of each series by (metric, label value).
        size: number of counters per worker.
    """

    def __init__(self, key_features: tuple[str, ...] = ()) -> None:
        self.key_features = key_features
        of_keys = (_KEYS, _UNKNOWN_KEYS)
        self.metrics = [replace(m, values=key_features) if m in of_keys else m
                        for m in WORKERS if key_features or m not in of_keys]
        self.places, self.size = dict[tuple[str, str], int](), 0
        for metric in self.metrics:
            for value in metric.values:
                self.places[metric.name, value] = self.size
                self.size += metric.width

    def of_worker(self, numbers: Any, worker: int) -> Any:
        """Return a worker's part of the shared counters, a memoryview of float64 [size]."""
        whole = memoryview(numbers).cast("B").cast("d")
        return whole[worker * self.size:(worker + 1) * self.size]

    def forget(self, numbers: Any, worker: int) -> None:
        """Reset the gauges of a worker that has exited."""
        mine = self.of_worker(numbers, worker)
        for metric in self.metrics:
            if metric.kind == "gauge":
                mine[self.places[metric.name, ""]] = 0.0


class WorkerMetrics:
    """Updates the metrics of one worker.

    Args:
        numbers: counters of all workers, shared ``double [workers * layout.size]``.
        worker: the worker's index.
        layout: the places of the counters.
    """

    def __init__(self, numbers: Any, worker: int, layout: Layout) -> None:
        self._numbers = layout.of_worker(numbers, worker)
        self._places, self._key_features = layout.places, layout.key_features
        self._stages = [self._places[_STAGE.name, stage] for stage in STAGES]
        self._seen: dict[tuple[str, str], int] = {}

    def _add(self, metric: Metric, value: str, amount: float) -> None:
        self._numbers[self._places[metric.name, value]] += amount

    def _add_since(self, metric: Metric, value: str, total: int) -> None:
        """Add what has been added to `total` since the last call."""
        self._add(metric, value, total - self._seen.get((metric.name, value), 0))
        self._seen[metric.name, value] = total

    def _observe(self, metric: Metric, amount: float, at: int = -1) -> None:
        at = self._places[metric.name, ""] if at < 0 else at
        self._numbers[at + bisect_left(metric.buckets, amount)] += 1
        self._numbers[at + len(metric.buckets) + 1] += amount

    def count(self, outcome: str) -> None:
        self._add(_REQUEST, outcome, 1)

    def observe_request(self, begin: float, ends: Sequence[float], samples: int, epoch: int
                        ) -> None:
        """Record a scored request.

        Args:
            begin: time at which its first byte arrived, as `time.monotonic` returns it.
            ends: time at which each of its `STAGES` ended.
            samples: number of its samples.
            epoch: epoch of the weights.
        """
        self._observe(_LATENCY, ends[3] - ends[0])
        for at, end in zip(self._stages, ends, strict=True):
            self._observe(_STAGE, end - begin, at)
            begin = end

    def observe_batch(self, requests: int, samples: int, begin: float, end: float) -> None:
        self._observe(_BATCH_REQUESTS, requests)
        self._observe(_BATCH_SAMPLES, samples)
        self._observe(_BATCH_SECONDS, end - begin)

    def set_gauges(self, queued: int, in_flight: int, epoch: int) -> None:
        """Set the gauges: queued samples, unanswered requests, and the epoch in use."""
        for metric, value in ((_QUEUED, queued), (_IN_FLIGHT, in_flight), (_EPOCH, epoch)):
            self._numbers[self._places[metric.name, ""]] = value

    def observe_reads(self, predictor: Any) -> None:
        """Add rows and keys read since the last call, from a predictor's totals `rows_read` and,
        if it has them, `keys_read`."""
        total = predictor.rows_read()
        for domain in _DOMAINS:
            self._add_since(_ROWS, domain, total.get(domain, 0))
        keys: Mapping[str, tuple[int, int]] = getattr(predictor, "keys_read", dict)()
        for feature in self._key_features:
            num_keys, num_unknown = keys.get(feature, (0, 0))
            self._add_since(_KEYS, feature, num_keys)
            self._add_since(_UNKNOWN_KEYS, feature, num_unknown)


def page(numbers: Any, counts: Any, layout: Layout) -> bytes:
    """Return the metrics of supervisor and workers in Prometheus' text format."""
    table = np.frombuffer(numbers, np.float64).reshape(-1, layout.size)
    lines = [line for metric, field, unit in SUPERVISOR
             for line in metric.lines([np.array([getattr(counts, field) * unit])])]
    for metric in layout.metrics:
        series = [table[:, at:at + metric.width] for at in (
            layout.places[metric.name, value] for value in metric.values)]
        if metric is _EPOCH:  # a worker that has not reported yet has 0
            known = series[0][series[0] > 0]
            lines += metric.lines([np.array([known.min() if known.size else 0.0])])
        else:
            lines += metric.lines([x.sum(axis=0) for x in series])
    return ("\n".join(lines) + "\n").encode()
