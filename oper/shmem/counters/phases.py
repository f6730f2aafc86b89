"""Times of the kernels by phase: histograms over all batches, and spans on the host's clock."""

from __future__ import annotations

from typing import NamedTuple

# As csrc/host/counters/phases.h numbers them.
PHASES = ("forward", "reduce", "wait for gradients", "update", "wait for updates", "refresh")
# What a trace has beside them: ids resolved ahead; and, within phases, waits at the barrier of a
# memory domain and exchanges of bytes with other domains.
SPANS = (*PHASES, "resolve", "barrier", "exchange")
#: Of a histogram's buckets but the last: times below that many microseconds.
BUCKETS_US = tuple(1 << k for k in range(23))


class Histogram(NamedTuple):
    """Distribution of a phase's times.

    Attributes:
        sum_ns: total time of all batches.
        counts: int [24], batches by time: entry k counts times below `BUCKETS_US[k]` and not below
            the bound before it; the last entry counts the rest.
    """

    sum_ns: int
    counts: tuple[int, ...]


class Span(NamedTuple):
    """A span of time that a rank spent on one activity.

    Attributes:
        name: one of `SPANS`.
        begin_ns, end_ns: on the clock of `time.monotonic_ns`, which the processes of a host share.
        sent_bytes: bytes sent to other memory domains during the span.
        thread: the system's id of the thread.
    """

    name: str
    begin_ns: int
    end_ns: int
    sent_bytes: int
    thread: int
