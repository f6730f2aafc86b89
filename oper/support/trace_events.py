"""Traces in the JSON trace-event format of Perfetto and Chrome."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json import dumps
from typing import Any

from oper.support.files import write_text


@dataclass(frozen=True, slots=True)
class Bar:
    """An activity on a timeline.

    Attributes:
        process, thread: numbers that identify the timeline. Its bars may nest, but not overlap
            partly.
        name, category: labels.
        start_us, length_us: begin and duration in microseconds, rounded to nanoseconds in the file.
        args: further values to show, JSON-serializable.
    """

    process: int
    thread: int
    name: str
    category: str
    start_us: float
    length_us: float
    args: Mapping[str, Any]


def trace_of(bars: Iterable[Bar], processes: Mapping[int, str],
             threads: Mapping[tuple[int, int], str],
             about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build a trace: names of processes and threads, then bars in time order.

    Args:
        bars: the bars, in any order.
        processes: maps ids of processes to their names.
        threads: maps (process, thread) ids to names of threads, which are shown in order of ids.
        about: metadata of the trace, JSON-serializable.

    Returns:
        A JSON-serializable trace for `write_trace`.
    """
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        for process, name in processes.items()]
    for (process, thread), name in threads.items():
        found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread,
                      "args": {"name": name}})
        found.append({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread,
                      "args": {"sort_index": thread}})
    # Of bars that begin at the same time, the longer one must come first to contain the other.
    for b in sorted(bars, key=lambda b: (b.start_us, b.process, b.thread, -b.length_us)):
        found.append({"ph": "X", "name": b.name, "cat": b.category, "pid": b.process,
                      "tid": b.thread, "ts": round(b.start_us, 3), "dur": round(b.length_us, 3),
                      "args": dict(b.args)})
    trace: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": found}
    return trace if about is None else {**trace, "otherData": dict(about)}


def write_trace(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write a trace made by `trace_of`, atomically."""
    write_text(path, dumps(trace) + "\n")
