"""Measurements of sharded tables: time by phase, rows read, bytes sent."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from oper.errors import OperError
from oper.rows.traffic import Traffic
from oper.shmem.counters.phases import PHASES, SPANS, Histogram, Span
from oper.shmem.group.desync import raise_peer_failure
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.rows import LogicalRows


def kernel_traffic(rows: LogicalRows, handle: int, reset: bool) -> Traffic:
    """Rows that the kernels of a placement have read; `reset` sets the counters to zero."""
    pieces = [(d.table, d.column, d.column + d.dim) for d in rows.directories]
    empty = Traffic.empty(rows.group.rank, rows.group.world_size, pieces)
    forward, backward, *counts = torch.ops.oper.context_traffic(handle, reset)
    return replace(empty, counts=np.array(counts, np.int64).reshape(empty.counts.shape),
                   num_forward=forward, num_backward=backward)


class MeasuredTables(LogicalRows):
    """Base of `ShardedTables`: counters kept by its kernels."""

    handle: int
    _process: int  # that made them
    collection: int  # its number in the register of the group
    is_watched = True  # ranks of a domain share a barrier that tells where they are
    times_phases = True  # whether its kernels have a clock
    num_steps: int  # backward passes that updated
    _skipped: dict[str, int]  # by table, how many of them it sat out
    _most_spans = 0  # kept at a time while it is traced

    def _check_open(self) -> HostHeap:
        if self._heap is None:
            self._refuse()
        return self._heap

    def _check_process(self) -> None:
        """Raise in a forked child, which would write its parent's rows and enter its barriers."""
        self._check_open()
        if os.getpid() != self._process:
            raise OperError("sharded tables cannot be changed in a forked process", "process",
                            os.getpid(), f"process {self._process}, which made them",
                            "look up under torch.no_grad(), or shard a model in the child")

    def _refuse(self, *_: Any) -> NoReturn:
        """Raise the error for a call of closed tables."""
        raise OperError("sharded tables were closed", "tables", list(self.specs)[:8], "open tables",
                        "use them before close()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OperError("sharded tables cannot be pickled", "tables", list(self.specs)[:8],
                        "one handle on the shared rows",
                        "save and load the model's state_dict instead")

    def _raise_peer_failure(self, code: int, detail: int) -> tuple[int, int]:
        """Raise the error for a status code of the kernels about peers; other codes are
        returned."""
        if self._exchange is not None:
            return self._exchange.check(code, detail)
        return raise_peer_failure(self, code, detail)

    def sent_bytes(self, reset: bool = False) -> dict[str, list[int]]:
        """Bytes that this rank has sent to other memory domains, by kind and receiver.

        Args:
            reset: set the counters to zero.

        Returns:
            int [W] for each kind of `oper.rows.traffic.SENT`; empty in a single domain.
        """
        return {} if self._exchange is None else self._exchange.sent_bytes(reset)

    def check_clock(self) -> None:
        """Raise OperError if phases are not timed."""
        if not self.times_phases:
            raise OperError("cannot time phases", "device", str(self.device),
                            "tables in host memory", "use torch.profiler, which names the kernels")

    def phase_ns(self) -> dict[str, int]:
        """Nanoseconds of the last forward and backward pass of this rank, by phase."""
        self.check_clock()
        return dict(zip(PHASES, torch.ops.oper.context_phases(self.handle), strict=True))

    def phase_histograms(self, reset: bool = False) -> dict[str, Histogram]:
        """Histograms of this rank's phase times, under the present plan or since the last reset.

        Not collective.

        Args:
            reset: set the histograms to zero.
        """
        self.check_clock()
        flat = torch.ops.oper.context_phase_histograms(self.handle, reset)
        width = len(flat) // len(PHASES)
        return {name: Histogram(flat[k], tuple(flat[k + 1:k + width]))
                for name, k in zip(PHASES, range(0, len(flat), width), strict=True)}

    def trace_phases(self, most: int) -> None:
        """From now on, record when phases begin and end, for `take_spans`. Not collective.

        Args:
            most: most spans kept at a time; 0 = stop recording.
        """
        if most or self._most_spans:
            self.check_clock()
            torch.ops.oper.context_trace(self.handle, most)
            self._most_spans = most

    def take_spans(self) -> tuple[list[Span], int]:
        """Spans recorded on this rank since the last call, and the number of spans lost because the
        buffer was full.
        """
        self.check_clock()
        lost, *flat = torch.ops.oper.context_spans(self.handle)
        width = len(Span._fields)
        return [Span(SPANS[flat[k]], *flat[k + 1:k + width])
                for k in range(0, len(flat), width)], lost

    def traffic(self, reset: bool = False) -> Traffic:
        """What this rank has read since it was built, or since the last reset.

        Counts rows, ids, sums and gradients by table and by the rank whose memory they came from.
        Counting never stops; call this between batches. Not collective.

        Args:
            reset: set the counters to zero.
        """
        self._check_open()
        return kernel_traffic(self, self.handle, reset)

    def memory_bytes(self) -> dict[str, list[int]]:
        """Bytes of rows, replicas and optimizer states by kind of memory and rank, without the
        outbox: ``{"device": [W], "host": [W]}``."""
        return self._layout.memory_bytes(self.directories)

    @property
    def page_kind(self) -> str:
        """Kind of the pages behind the rows in device memory."""
        return self._heap.page_kind if self._heap else "closed"

    def table_steps(self, table: str) -> int:
        """Number of updates of a table, the step t of bias corrections."""
        return self.num_steps - self._skipped[table]

    def set_table_steps(self, table: str, steps: int) -> None:
        """Set a table's number of updates, as when a state is loaded."""
        for name in self._skipped:  # the others keep their number
            self._skipped[name] += steps - self.num_steps
        self.num_steps = steps
        self._skipped[table] = 0
