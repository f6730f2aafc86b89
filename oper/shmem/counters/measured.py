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
    """Return the counts of a kernel context's reads; `reset` then sets them to zero."""
    pieces = [(d.table, d.column, d.column + d.dim) for d in rows.directories]
    empty = Traffic.empty(rows.group.rank, rows.group.world_size, pieces)
    forward, backward, *counts = torch.ops.oper.context_traffic(handle, reset)
    return replace(empty, counts=np.array(counts, np.int64).reshape(empty.counts.shape),
                   num_forward=forward, num_backward=backward)


def spans_of(handle: int) -> tuple[list[Span], int]:
    """Return the spans recorded by a context since the last call, and the number of spans lost
    because the buffer was full."""
    lost, *flat = torch.ops.oper.context_spans(handle)
    width = len(Span._fields)
    return [Span(SPANS[flat[k]], *flat[k + 1:k + width])
            for k in range(0, len(flat), width)], lost


class MeasuredTables(LogicalRows):
    """Base of `ShardedTables`: access to counters and clocks of the kernels."""

    handle: int
    _process: int  # id of the process that made the tables
    collection: int  # number in the group's `Register`
    is_watched = True  # whether the ranks of a domain share a barrier with `BarrierState`s
    on_device = False  # whether rows are in device memory
    num_steps: int  # number of updates
    _skipped: dict[str, int]  # by table, number of updates in which it was frozen
    _most_spans = 0  # capacity of the buffer of spans; 0 = not tracing

    def _check_open(self) -> HostHeap:
        if self._heap is None:
            self._refuse()
        return self._heap

    def _check_process(self) -> None:
        """Raise OperError if the tables are closed, or in a forked child, which would write to its
        parent's rows and barriers."""
        self._check_open()
        if os.getpid() != self._process:
            raise OperError("sharded tables cannot be changed in a forked process", "process",
                            os.getpid(), f"process {self._process}, which made them",
                            "look up under torch.no_grad(), or shard a model in the child")

    def _refuse(self, *_: Any) -> NoReturn:
        """Raise the OperError for the use of closed tables."""
        raise OperError("sharded tables were closed", "tables", list(self.specs)[:8], "open tables",
                        "use them before close()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OperError("sharded tables cannot be pickled", "tables", list(self.specs)[:8],
                        "no pickling, since rows are in memory that ranks share",
                        "save and load the model's state_dict instead")

    def _raise_peer_failure(self, code: int, detail: int) -> tuple[int, int]:
        """Raise the error if a status code of the kernels reports a failed peer; returns other
        codes and their detail."""
        if self._exchange is not None:
            return self._exchange.check(code, detail)
        return raise_peer_failure(self, code, detail)

    def sent_bytes(self, reset: bool = False) -> dict[str, list[int]]:
        """Return the number of bytes that this rank has sent to other memory domains.

        Args:
            reset: set the counters to zero afterwards.

        Returns:
            For each kind of `oper.rows.traffic.SENT`, int [W] by receiver; empty with one domain.
        """
        return {} if self._exchange is None else self._exchange.sent_bytes(reset)

    def check_clock(self) -> None:
        """Raise OperError if the kernels do not time their phases."""
        if self.on_device:
            raise OperError("cannot time phases", "device", str(self.device),
                            "tables in host memory", "use torch.profiler, which names the kernels")

    def phase_ns(self) -> dict[str, int]:
        """Return the nanoseconds of this rank's last forward and backward pass, by phase
        (`PHASES`); raises OperError for tables in device memory."""
        self.check_clock()
        return dict(zip(PHASES, torch.ops.oper.context_phases(self.handle), strict=True))

    def phase_histograms(self, reset: bool = False) -> dict[str, Histogram]:
        """Return histograms of this rank's phase times by phase (`PHASES`). Not collective.

        They cover all batches since the current plan was adopted or since the last reset.

        Args:
            reset: set the histograms to zero afterwards.

        Raises:
            OperError: the tables are in device memory.
        """
        self.check_clock()
        flat = torch.ops.oper.context_phase_histograms(self.handle, reset)
        width = len(flat) // len(PHASES)
        return {name: Histogram(flat[k], tuple(flat[k + 1:k + width]))
                for name, k in zip(PHASES, range(0, len(flat), width), strict=True)}

    def trace_phases(self, most: int) -> None:
        """Start or stop recording begin and end of phases, for `take_spans`. Not collective.

        Args:
            most: maximum number of spans stored between calls of `take_spans`; 0 = stop.
        """
        if most or self._most_spans:
            self.check_clock()
            torch.ops.oper.context_trace(self.handle, most)
            self._most_spans = most

    def take_spans(self) -> tuple[list[Span], int]:
        """Return the spans recorded on this rank since the last call, and the number of spans lost
        because the buffer was full."""
        self.check_clock()
        return spans_of(self.handle)

    def traffic(self, reset: bool = False) -> Traffic:
        """Return how many rows, ids, partial sums and gradients this rank has read, by table and by
        the rank whose memory it read them from. Not collective; call it between batches.

        Args:
            reset: set the counters to zero afterwards; by default they count on until the tables
                move to another plan.
        """
        self._check_open()
        return kernel_traffic(self, self.handle, reset)

    def memory_bytes(self) -> dict[str, list[int]]:
        """Return the size in bytes of rows, replicas and optimizer states, without send buffers, by
        kind of memory and rank: ``{"device": [W], "host": [W]}``."""
        return self._layout.memory_bytes(self.directories)

    @property
    def page_kind(self) -> str:
        """Kind of memory pages of the rows, see `HostHeap` and `DeviceHeap`; ``"closed"`` after
        `close`."""
        return self._heap.page_kind if self._heap else "closed"

    def table_steps(self, table: str) -> int:
        """Return the number of updates of a table, the step t of bias corrections."""
        return self.num_steps - self._skipped[table]

    def set_table_steps(self, table: str, steps: int) -> None:
        """Set the number of updates of one table, for loading a checkpoint."""
        for name in self._skipped:  # the numbers of other tables stay the same
            self._skipped[name] += steps - self.num_steps
        self.num_steps = steps
        self._skipped[table] = 0
