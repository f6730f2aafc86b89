"""Times of the kernels by phase: histograms over all batches, and spans on the host's clock."""

from __future__ import annotations

from typing import NamedTuple

# In the order of csrc/host/counters/phases.h.
PHASES = ("forward", "reduce", "wait for gradients", "update", "wait for updates", "refresh")
# Spans of a trace: phases; `resolve`, in advance of lookups; and, within phases, waits at the
# barrier of a memory domain and exchanges of bytes with other domains.
SPANS = (*PHASES, "resolve", "barrier", "exchange")
#: Upper bounds of a histogram's buckets, except the last one, in microseconds.
BUCKETS_US = tuple(1 << k for k in range(23))


class Histogram(NamedTuple):
    """Distribution of a phase's times.

    Attributes:
        sum_ns: total time of all batches in nanoseconds.
        counts: int [24], number of batches with a time in each bucket: entry k counts times below
            `BUCKETS_US[k]` and at least `BUCKETS_US[k - 1]`; the last entry counts longer times.
    """

    sum_ns: int
    counts: tuple[int, ...]


class Span(NamedTuple):
    """A span of time that a rank spent on one activity.

    Attributes:
        name: one of `SPANS`.
        begin_ns, end_ns: times of `time.monotonic_ns`, a clock that all processes of a host share.
        sent_bytes: bytes sent to other memory domains during the span.
        thread: the system's id of the thread.
    """

    name: str
    begin_ns: int
    end_ns: int
    sent_bytes: int
    thread: int
