"""What sharded tables tell of their work: time by phase, rows read, bytes sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from oper.errors import OperError, fail
from oper.shmem.table_rows import LogicalRows
from oper.traffic import SENT, Traffic

# As csrc/host/context.h numbers them.
PHASES = ("forward", "reduce", "wait for gradients", "update", "wait for updates", "refresh")


class MeasuredTables(LogicalRows):
    """Base of `ShardedTables`: counters that its kernels keep."""

    _handle: int

    def _check_open(self) -> None:
        if self._heap is None:
            raise OperError(fail("sharded tables were closed", "tables", list(self.specs)[:8],
                                 "open tables", "use them before close()"))

    def sent_bytes(self, reset: bool = False) -> dict[str, list[int]]:
        """Bytes that this rank has sent to other memory domains, by kind and receiver.

        Args:
            reset: start again from 0.

        Returns:
            int [W] for each kind of `oper.traffic.SENT`; empty in a single domain.
        """
        _, *flat = torch.ops.oper.context_sent_bytes(self._handle, reset) or [0]
        size = self.group.world_size
        return {kind: flat[k * size:(k + 1) * size] for k, kind in enumerate(SENT)} if flat else {}

    def phase_ns(self) -> dict[str, int]:
        """Nanoseconds of the last forward and backward pass of this rank, by phase."""
        return dict(zip(PHASES, torch.ops.oper.context_phases(self._handle), strict=True))

    def traffic(self, reset: bool = False) -> Traffic:
        """What this rank has read since it was built, or since the last reset: rows, ids, sums and
        gradients by table and by the rank whose memory they came from. Counting never stops; call
        this between batches. Not collective.

        Args:
            reset: start again from zero.
        """
        self._check_open()
        pieces = [(d.table, d.column, d.column + d.dim) for d in self.directories]
        empty = Traffic.empty(self.group.rank, self.group.world_size, pieces)
        forward, backward, *counts = torch.ops.oper.context_traffic(self._handle, reset)
        return replace(empty, counts=np.array(counts, np.int64).reshape(empty.counts.shape),
                       num_forward=forward, num_backward=backward)
