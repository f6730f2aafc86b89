"""Prometheus metrics of all workers together, through ``prometheus_client``'s multi-process files.

A worker's counts stay when it ends; what it has in hand (queue, requests, rows) ends with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oper.errors import MissingDependencyError, fail

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported
_MEMORY, _PREFIX = "/dev/shm", "oper-serve-"
_LATENCY_S = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .1, .25, .5, 1., 5.)
# From its first byte to the whole request; until it is checked; until its batch begins; until there
# are scores; until the answer is written.
STAGES = ("receive", "decode", "wait", "score", "answer")
_SAMPLES = tuple(float(1 << k) for k in range(15))
_REQUESTS = tuple(float(1 << k) for k in range(9))


class Folder:
    """A folder for the files of one server, in memory where there is such a place.

    Workers count in mapped files. On a disk the system writes them back every few seconds, and
    whoever counts meanwhile waits for the disk: milliseconds in the middle of a request.

    A killed server leaves its folder behind; the next one of the user removes it. Whether the
    owner lives is told by its lock on the folder, which ends with it.
    """

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        if "TMPDIR" not in os.environ and os.access(_MEMORY, os.R_OK | os.W_OK | os.X_OK):
            place = _MEMORY
        for left in Path(place).glob(f"{_PREFIX}*"):
            self._remove_if_left(left)
        self._lock = -1
        while self._lock < 0:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
            self._lock = _locked(Path(self.path))  # -1: another server took it for left behind

    def remove(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @staticmethod
    def _remove_if_left(folder: Path) -> None:
        lock = _locked(folder)
        if lock >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """An open, locked descriptor of a folder of this user, or -1."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        if os.fstat(number).st_uid == os.getuid():
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return number
    except OSError:  # its server lives
        pass
    os.close(number)
    return -1


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
        stages = p.Histogram("oper_stage_seconds", "Parts of a request's time, one after another.",
                             ["stage"], buckets=_LATENCY_S, registry=none)
        self.stages = {name: stages.labels(name) for name in STAGES}
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
        self._by_outcome: dict[str, Any] = {}

    def count(self, outcome: str) -> None:
        """Count a request that is done."""
        child = self._by_outcome.get(outcome)
        if child is None:
            child = self._by_outcome[outcome] = self.requests.labels(outcome)
        child.inc()

    def observe_batch(self, requests: int, samples: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_requests.observe(requests)
        self.batch_samples.observe(samples)
        self.batch_seconds.observe(seconds)

    def observe_stages(self, begin: float, ends: Sequence[float]) -> None:
        """Count a request by when its stages ended."""
        for stage, end in zip(self.stages.values(), ends, strict=True):
            stage.observe(end - begin)
            begin = end

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
        yield p.metrics_core.GaugeMetricFamily(
            "oper_weights_lag_seconds", "From the training step of the last change to its weights "
            "in service.", value=self._counts.weights_lag_us / 1e6)


def page(folder: str, counts: Any) -> tuple[bytes, str]:
    """The metrics of all workers as text, and its content type."""
    p = prometheus()
    registry = p.CollectorRegistry()
    p.multiprocess.MultiProcessCollector(registry, path=folder)
    registry.register(_Supervised(counts))
    return p.generate_latest(registry), p.CONTENT_TYPE_LATEST
