"""Traces of a server: the stages of every request, batches, lookups and publications as a timeline.

While a trace is recorded, every worker writes records to its ring buffer in the shared memory; the
supervisor empties these buffers and writes the trace file at the end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, require
from oper.serve.metrics import BATCH, REQUEST, STAGES, Shared
from oper.support.files import check_target
from oper.support.trace_events import Bar, trace_of, write_trace

_MOST = 100_000  # records of a trace; as requests, they take 450 MB and seconds to write
_EMPTY_S = 0.05  # interval at which rings are emptied
_ABOUT = "cannot trace the server"


class Tracer:
    """Records what a server does; see `oper.serve.Server.trace`."""

    def __init__(self, shared: Shared) -> None:
        self._workers, self._counts = shared.workers(), shared.counts
        self._turn = threading.Lock()
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
        return sum(int((records[:, 0] == REQUEST).sum()) for records in found.values())

    def _record(self, seconds: float, ends: Callable[[], bool]
                ) -> tuple[dict[int, np.ndarray], int]:
        """Return the records of all workers by process id, and the number of those lost."""
        parts: dict[int, list[np.ndarray]] = {}
        read, lost, num_kept = self._workers["written"].tolist(), 0, 0
        self._publications.clear()
        self._counts.is_tracing = 1
        try:
            until = time.monotonic() + seconds
            while self._counts.is_tracing:
                if time.monotonic() >= until or num_kept >= _MOST or ends():
                    self._counts.is_tracing = 0
                time.sleep(_EMPTY_S)
                for k, worker in enumerate(self._workers):
                    ring, begin, count = worker["ring"], read[k], int(worker["written"])
                    first = max(begin, count - len(ring))
                    records = ring[np.arange(first, count) % len(ring)]
                    # The worker may have overwritten some meanwhile, and be writing one more.
                    whole = min(max(first, int(worker["written"]) + 1 - len(ring)), count)
                    lost += whole - begin
                    read[k] = count
                    num_kept += count - whole
                    parts.setdefault(int(worker["process"]), []).append(records[whole - first:])
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
        for kind, begin, end, requests, samples in records[records[:, 0] > REQUEST][:, :5]:
            if kind == BATCH:
                add(pid, 0, "batch", begin, end, requests=requests, samples=samples)
            else:
                add(pid, 0, "lookup", begin, end)
        free: list[float] = []  # by line: the end of its last request
        asked = records[records[:, 0] == REQUEST]
        for begin, *ends, samples, epoch in asked[np.argsort(asked[:, 1])][:, 1:].tolist():
            line = next((k for k, end in enumerate(free) if end <= begin), len(free))
            free[line:line + 1] = [ends[-1]]
            threads[pid, line + 1] = f"requests {line + 1}"
            add(pid, line + 1, "request", begin, ends[-1], samples=samples, epoch=epoch)
            for name, first, last in zip(STAGES, (begin, *ends), ends, strict=False):
                add(pid, line + 1, name, first, last)
    return trace_of(bars, processes, threads, {"workers": len(found), "lost_records": lost})
