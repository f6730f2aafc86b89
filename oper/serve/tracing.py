"""Traces of a server: the stages of every request, batches, lookups and publications as a timeline.

While a trace is recorded, every worker writes records to a ring buffer in memory shared with the
supervisor, which empties these buffers and writes the trace file at the end. All times are those of
`time.monotonic`, a clock that the processes of a host share.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, require
from oper.serve.metrics import STAGES, Layout, WorkerMetrics
from oper.support.files import check_target
from oper.support.trace_events import Bar, trace_of, write_trace

log = logging.getLogger("oper.serve")
_RECORDS = 4096  # of a worker's ring buffer
_MOST = 100_000  # records of a trace; as requests, they take 450 MB and seconds to write
_WIDTH = 9  # numbers of a record: kind, begin, then those of the kind
_HEAD = 2  # numbers before the ring: records written so far, process id
_REQUEST, _BATCH, _LOOKUP = range(3)
_LOOKUPS = 64  # most lookups of one batch
_EMPTY_S = 0.05  # interval at which rings are emptied
_ABOUT = "cannot trace the server"


def shared_rings(context: Any, workers: int) -> Any:
    """Return the ring buffers of all workers, in memory that processes of `context` share."""
    return context.RawArray(ctypes.c_double, workers * (_HEAD + _RECORDS * _WIDTH))


def _ring(rings: Any, worker: int) -> np.ndarray:
    size = _HEAD + _RECORDS * _WIDTH
    return np.frombuffer(rings, np.float64)[worker * size:(worker + 1) * size]


class TracedMetrics(WorkerMetrics):
    """A worker's metrics, which also writes requests, batches and lookups to the worker's ring
    buffer while a trace is recorded.

    Args:
        numbers, worker, layout: see `WorkerMetrics`.
        rings: the result of `shared_rings`.
        counts: `oper.serve.server.Counts`; records are written while `is_tracing` is not 0.
        predictor: the worker's predictor.
    """

    def __init__(self, numbers: Any, worker: int, layout: Layout, rings: Any, counts: Any,
                 predictor: Any) -> None:
        super().__init__(numbers, worker, layout)
        self._ring, self._counts = _ring(rings, worker), counts
        self._ring[1] = os.getpid()
        has_lookups = hasattr(predictor, "trace_lookups") and hasattr(predictor, "take_lookups")
        self._predictor: Any = predictor if has_lookups else None
        self._looks = False  # whether the predictor records its lookups

    def _write(self, *numbers: float) -> None:
        count = int(self._ring[0])
        at = _HEAD + count % _RECORDS * _WIDTH
        self._ring[at:at + len(numbers)] = numbers
        self._ring[0] = count + 1

    def observe_request(self, begin: float, ends: Sequence[float], samples: int, epoch: int
                        ) -> None:
        """See `WorkerMetrics`."""
        super().observe_request(begin, ends, samples, epoch)
        if self._counts.is_tracing:
            self._write(_REQUEST, begin, *ends, samples, epoch)

    def observe_batch(self, requests: int, samples: int, begin: float, end: float) -> None:
        """See `WorkerMetrics`."""
        super().observe_batch(requests, samples, begin, end)
        is_on = bool(self._counts.is_tracing)
        if is_on:
            self._write(_BATCH, begin, end, requests, samples)
        if self._predictor is not None and (is_on or self._looks):
            try:
                self._trace_lookups(is_on)
            except Exception:  # the batch's requests must be answered
                log.exception("no lookups in traces: the predictor cannot record them")
                self._predictor = None

    def _trace_lookups(self, is_on: bool) -> None:
        if is_on and self._looks:
            for begin, end in self._predictor.take_lookups():
                self._write(_LOOKUP, begin, end)
        if is_on != self._looks:
            self._predictor.trace_lookups(_LOOKUPS if is_on else 0)
            self._looks = is_on


class Tracer:
    """Records what a server does; see `oper.serve.Server.trace`.

    Args:
        rings: the result of `shared_rings`.
        workers: number of workers.
        counts: the supervisor's counters.
    """

    def __init__(self, rings: Any, workers: int, counts: Any) -> None:
        self._rings = [_ring(rings, k) for k in range(workers)]
        self._counts, self._turn = counts, threading.Lock()
        # Begin, begin of the switch, end and epoch of each publication.
        self._publications: list[tuple[float, float, float, int]] = []

    def add_publication(self, begin: float, switch: float, epoch: int) -> None:
        """Record a publication that ends now."""
        if self._counts.is_tracing:
            self._publications.append((begin, switch, time.monotonic(), epoch))

    def record(self, path: str | os.PathLike[str], seconds: float, ends: Callable[[], bool]
               ) -> int:
        """Record for `seconds`, until `ends` returns True or there are `_MOST` records; then write
        the trace to `path`.

        Returns:
            The number of requests in the trace.
        """
        check_trace(path, seconds)
        if not self._turn.acquire(blocking=False):
            raise InvalidInputError(_ABOUT, "trace", "in progress", "one at a time",
                                    "wait until it has been written")
        try:
            found, lost = self._record(seconds, ends)
            publications = self._publications.copy()  # the next recording may begin
        finally:
            self._turn.release()
        write_trace(path, _joined(found, publications, lost))
        return sum(int((records[:, 0] == _REQUEST).sum()) for records in found.values())

    def _record(self, seconds: float, ends: Callable[[], bool]
                ) -> tuple[dict[int, np.ndarray], int]:
        """Return the records of all workers by process id, and the number of those lost."""
        parts: dict[int, list[np.ndarray]] = {}
        read, lost = [int(ring[0]) for ring in self._rings], 0
        self._publications.clear()
        self._counts.is_tracing = 1
        try:
            until = time.monotonic() + seconds
            is_last, num_kept = False, 0
            while not is_last:
                is_last = time.monotonic() >= until or num_kept >= _MOST or ends()
                if is_last:
                    self._counts.is_tracing = 0
                time.sleep(_EMPTY_S)
                for k, ring in enumerate(self._rings):
                    begin, count = read[k], int(ring[0])
                    first = max(begin, count - _RECORDS)
                    records = ring[_HEAD:].reshape(_RECORDS, _WIDTH)[
                        np.arange(first, count) % _RECORDS]
                    # The worker may have overwritten some meanwhile, and be writing one more.
                    whole = min(max(first, int(ring[0]) + 1 - _RECORDS), count)
                    lost += whole - begin
                    read[k] = count
                    num_kept += count - whole
                    parts.setdefault(int(ring[1]), []).append(records[whole - first:])
        finally:
            self._counts.is_tracing = 0
        return {pid: np.concatenate(x) for pid, x in parts.items()}, lost


def check_trace(path: str | os.PathLike[str], seconds: float) -> None:
    """Raise InvalidInputError unless a trace of `seconds` can be written to `path`."""
    check_target(path)
    require(_ABOUT, "pass up to 600 seconds",
            ("seconds", seconds, 0 < seconds <= 600, "above 0, at most 600"))


def _joined(found: dict[int, np.ndarray], publications: Sequence[tuple[float, float, float, int]],
            lost: int) -> dict[str, Any]:
    """Combine the records of all workers, float64 [n, 9] by process id, into one trace."""
    supervisor = os.getpid()
    processes = {supervisor: "supervisor"} | {pid: f"worker {pid}" for pid in found}
    threads = {(supervisor, 0): "publications"}
    bars: list[Bar] = []
    start = min([*(x[0] for x in publications), *(x[:, 1].min() for x in found.values() if x.size)],
                default=0.0)

    def add(process: int, thread: int, name: str, begin: float, end: float, **args: float) -> None:
        bars.append(Bar(process, thread, name, "request" if thread else "batch",
                        (begin - start) * 1e6, (end - begin) * 1e6,
                        {key: int(value) for key, value in args.items()}))

    for begin, switch, end, epoch in publications:
        add(supervisor, 0, "publication", begin, end, epoch=epoch)
        add(supervisor, 0, "switch", switch, end, epoch=epoch)
    for pid, records in found.items():
        threads[pid, 0] = "batches"
        for kind, begin, end, requests, samples in records[records[:, 0] > _REQUEST][:, :5]:
            if kind == _BATCH:
                add(pid, 0, "batch", begin, end, requests=requests, samples=samples)
            else:
                add(pid, 0, "lookup", begin, end)
        free: list[float] = []  # by line: the end of its last request
        asked = records[records[:, 0] == _REQUEST]
        for begin, *ends, samples, epoch in asked[np.argsort(asked[:, 1])][:, 1:].tolist():
            line = next((k for k, end in enumerate(free) if end <= begin), len(free))
            free[line:line + 1] = [ends[-1]]
            threads[pid, line + 1] = f"requests {line + 1}"
            add(pid, line + 1, "request", begin, ends[-1], samples=samples, epoch=epoch)
            for name, first, last in zip(STAGES, (begin, *ends), ends, strict=False):
                add(pid, line + 1, name, first, last)
    return trace_of(bars, processes, threads, {"workers": len(found), "lost_records": lost})
