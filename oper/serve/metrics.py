"""Prometheus metrics of all workers together, through ``prometheus_client``'s multi-process files.

A worker's counts stay when it ends; what it has in hand (queue, requests, rows) ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from oper.errors import MissingDependencyError, fail

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported
_LATENCY_S = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .1, .25, .5, 1., 5.)
_SAMPLES = tuple(float(1 << k) for k in range(15))
_REQUESTS = tuple(float(1 << k) for k in range(9))


def use_folder(folder: str) -> None:
    """Keep this process's metrics in `folder`; before anything imports ``prometheus_client``."""
    os.environ[FOLDER_VARIABLE] = folder


def forget(pid: int, folder: str) -> None:
    """Drop what an ended worker had in hand."""
    prometheus().multiprocess.mark_process_dead(pid, folder)


def prometheus() -> Any:
    """The ``prometheus_client`` package; raises MissingDependencyError."""
    try:
        import prometheus_client
        import prometheus_client.multiprocess
    except ImportError as error:
        raise MissingDependencyError(fail("cannot serve", "import", str(error),
                                          "prometheus_client", "install oper[serve]")) from error
    return prometheus_client


class WorkerMetrics:
    """What one worker counts."""

    def __init__(self) -> None:
        p = prometheus()
        none = p.CollectorRegistry()  # what is exported is read back from the folder
        self.requests = p.Counter("oper_requests", "Requests by outcome.", ["outcome"],
                                  registry=none)
        self.latency = p.Histogram("oper_request_seconds", "From the whole request read to its "
                                   "scores ready.", buckets=_LATENCY_S, registry=none)
        self.batch_samples = p.Histogram("oper_batch_samples", "Samples scored together.",
                                         buckets=_SAMPLES, registry=none)
        self.batch_requests = p.Histogram("oper_batch_requests", "Requests scored together.",
                                          buckets=_REQUESTS, registry=none)
        self.batch_seconds = p.Histogram("oper_batch_seconds", "Time of the model on a batch.",
                                         buckets=_LATENCY_S, registry=none)
        self.queued = p.Gauge("oper_queued_samples", "Samples that wait for a batch.",
                              registry=none, multiprocess_mode="livesum")
        self.in_flight = p.Gauge("oper_requests_in_flight", "Requests without an answer yet.",
                                 registry=none, multiprocess_mode="livesum")
        self.rows = p.Counter("oper_embedding_rows_read", "Embedding rows read, by the memory "
                              "domain that holds them.", ["domain"], registry=none)
        self.epoch = p.Gauge("oper_weights_epoch", "Publication that batches are scored with; "
                             "the oldest of all workers.", registry=none,
                             multiprocess_mode="livemin")
        self._rows_seen: dict[str, int] = {}

    def observe_batch(self, requests: int, samples: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_requests.observe(requests)
        self.batch_samples.observe(samples)
        self.batch_seconds.observe(seconds)

    def observe_rows(self, total: dict[str, int]) -> None:
        """Take a predictor's `rows_read` into account."""
        for domain, count in total.items():
            self.rows.labels(domain).inc(count - self._rows_seen.get(domain, 0))
            self._rows_seen[domain] = count


class _Supervised:
    """What the supervising process knows, as a collector."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Any]:
        p = prometheus()
        for name, kind, about in (
                ("workers", p.metrics_core.GaugeMetricFamily, "Workers that take requests."),
                ("worker_restarts", p.metrics_core.CounterMetricFamily,
                 "Workers replaced because they had ended."),
                ("publications", p.metrics_core.CounterMetricFamily,
                 "New weights published since the start."),
                ("failed_publications", p.metrics_core.CounterMetricFamily,
                 "Weights that could not be published.")):
            yield kind(f"oper_{name}", about, value=getattr(self._counts, name))


def page(folder: str, counts: Any) -> tuple[bytes, str]:
    """The metrics of all workers as text, and its content type."""
    p = prometheus()
    registry = p.CollectorRegistry()
    p.multiprocess.MultiProcessCollector(registry, path=folder)
    registry.register(_Supervised(counts))
    return p.generate_latest(registry), p.CONTENT_TYPE_LATEST
