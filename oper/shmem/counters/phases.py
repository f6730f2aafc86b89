"""Time of the kernels by phase: histograms of all batches, and spans on the clock of a host."""

from __future__ import annotations

from typing import NamedTuple

# As csrc/host/counters/phases.h numbers them.
PHASES = ("forward", "reduce", "wait for gradients", "update", "wait for updates", "refresh")
# What a trace has beside them: ids resolved ahead; and, within phases, waits at the barrier of a
# memory domain and exchanges of bytes with other domains.
SPANS = (*PHASES, "resolve", "barrier", "exchange")
#: Of a histogram's buckets but the last: times below so many microseconds.
BUCKETS_US = tuple(1 << k for k in range(23))


class Histogram(NamedTuple):
    """How long a phase has been taking.

    Attributes:
        sum_ns: of all batches together.
        counts: int [24], batches by time: below the bound in `BUCKETS_US` of their place and not
            below the one before it; the last one: the rest.
    """

    sum_ns: int
    counts: tuple[int, ...]


class Span(NamedTuple):
    """Something that a rank has done.

    Attributes:
        name: of `SPANS`.
        begin_ns, end_ns: on the clock of `time.monotonic_ns`, which the processes of a host share.
        sent_bytes: to other memory domains meanwhile.
        thread: that did it, as the system numbers it.
    """

    name: str
    begin_ns: int
    end_ns: int
    sent_bytes: int
    thread: int
