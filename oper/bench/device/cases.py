"""Shared code of the benchmarks on a device: workloads, inputs, clocks, minimal bytes.

One process and one device: `DeviceTables` is compared with torch's and fbgemm's kernels on the same
tables and ids. On a CPU device the same code runs on small cases, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core import record
from oper.bench.core.workload import Workload, batch_ids, hottest_ids
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.batch import Lookup
from oper.tables import TableSpec

ELEMENT_BYTES = {"float32": 4, "float16": 2}


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """One case.

    Attributes:
        name: for the record.
        work: the workload; `Workload.batch_size` samples on the one device.
        dtype: type of the rows, ``"float32"`` or ``"float16"``; outputs are float32.
        num_batches: distinct batches that are timed in turn.
        rounds, per_round: see `record.interleave`.
        copy_bytes: size of the copy by which the bandwidth is measured.
        device: the device on which it runs.
    """

    name: str
    work: Workload
    dtype: str = "float32"
    num_batches: int = 4
    rounds: int = 10
    per_round: int = 4
    copy_bytes: int = 4 << 30
    device: str = "cuda"

    def tables(self) -> list[TableSpec]:
        """The tables, with row-wise Adagrad state."""
        return [replace(t, dtype=self.dtype) for t in self.work.tables()]


def with_head_plan(case: DeviceCase) -> Plan:
    """Rows striped over one rank, with an explicit head of a tenth of every table's rows."""
    rng = np.random.default_rng(case.work.seed)
    return _in_tiers(case, [rng.permutation(n)[:max(1, n // 10)].astype(np.int64)
                            for n in case.work.num_rows], "striped")


def host_tail_plan(case: DeviceCase, share: float = 0.05) -> Plan:
    """The hottest `share` of every table's rows in device memory, the others in the host's."""
    return _in_tiers(case, [hottest_ids(case.work, k, max(1, int(n * share)))
                            for k, n in enumerate(case.work.num_rows)], "owned", "host")


def _in_tiers(case: DeviceCase, heads: Sequence[np.ndarray], placement: str,
              memory: str = "device") -> Plan:
    """A plan with each table's head, as a list of ids, and its tail in memory `memory`."""
    entries = []
    for t, head in zip(case.tables(), heads, strict=True):
        tiers = [Tier(0, head.size, placement, (0,))]
        if head.size < t.num_rows:
            tiers.append(Tier(head.size, t.num_rows, "owned", (0,), memory=memory))
        entries.append(TablePlan(t, (Piece(0, t.dim, tuple(tiers)),), head))
    return Plan(1, tuple(entries))


@dataclass(slots=True)
class Inputs:
    """A batch on the device.

    Attributes:
        lookup: the batch for `DeviceTables`.
        by_table: ids of each table, int64 [B * pooling].
        offsets: int64 [T * B + 1], bounds of all bags.
        distinct_rows: distinct (table, row) pairs.
    """

    lookup: Lookup
    by_table: list[torch.Tensor]
    offsets: torch.Tensor
    distinct_rows: int


def draw_inputs(case: DeviceCase, device: torch.device, number: int) -> Inputs:
    """Batch `number` of a case."""
    work = case.work
    columns = torch.from_numpy(batch_ids(work, 0, 1, number)).to(device)
    num_bags = len(columns) * work.batch_size
    lengths = torch.full((num_bags,), work.pooling, dtype=torch.int64, device=device)
    lookup = Lookup(columns.reshape(-1), lengths, torch.arange(len(columns)), work.batch_size)
    return Inputs(lookup, list(columns),
                  torch.arange(0, num_bags * work.pooling + 1, work.pooling, device=device),
                  sum(int(torch.unique(ids).numel()) for ids in columns))


def floor_bytes(case: DeviceCase, distinct_rows: float) -> dict[str, float]:
    """Fewest bytes that must pass through the device's memory, by phase.

    Forward: distinct rows and ids read, outputs written. Update: output gradients and ids read, the
    distinct rows and their states read and written. A step does both.
    """
    work = case.work
    num_bags = work.batch_size * len(work.num_rows)
    rows = distinct_rows * work.dim * ELEMENT_BYTES[case.dtype]
    outputs, ids = 4 * num_bags * work.dim, 8 * num_bags * work.pooling
    forward = rows + ids + outputs
    update = outputs + ids + 2 * rows + 8 * distinct_rows
    return {"forward": forward, "update": update, "step": forward + update}


class Clock:
    """Times calls on a device by events, on the CPU by the host's clock.

    The device is kept busy while a call is launched, so that the time between the events is the
    device's own: otherwise kernels of some 50 us would wait for Python to launch the next one.
    """

    _DELAY_CYCLES = 6_000_000  # 3 ms at 2 GHz, longer than any contender takes to launch

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not a public function.
        self._delay = getattr(torch.cuda, "_sleep", None) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until all launched work has finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call takes on the device."""
        if self._device.type != "cuda":
            return record.elapsed(call)
        if self._delay is not None:
            self._delay(self._DELAY_CYCLES)
        return self._between(call)

    def seconds_in_a_row(self, call: Callable[[], Any], count: int) -> float:
        """Seconds per call when it is launched `count` times without a pause, including the
        launches."""
        def calls() -> None:
            for _ in range(count):
                call()

        seconds = self._between(calls) if self._device.type == "cuda" else record.elapsed(calls)
        return seconds / count

    def _between(self, call: Callable[[], Any]) -> float:
        begin_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event) / 1e3


def interleave(case: DeviceCase, clock: Clock, runs: Mapping[str, Callable[[int], Any]],
               before: Mapping[str, Callable[[int], Any]] | None = None
               ) -> dict[str, dict[str, float]]:
    """`record.interleave` after a round of warming up, by the device's clock; summaries by name."""
    record.interleave(runs, clock.wait, 1, case.per_round, before=before)
    taken = record.interleave(runs, clock.wait, case.rounds, case.per_round, before=before,
                              seconds=clock.seconds)
    return {name: record.summary(t) for name, t in taken.items()}


def copy_gbps(case: DeviceCase, device: torch.device, clock: Clock) -> float:
    """Bandwidth of a copy within the device's memory, bytes read plus bytes written per second."""
    source = torch.empty(case.copy_bytes // 4, dtype=torch.float32, device=device)
    source.uniform_()
    target = torch.empty_like(source)
    times = [clock.seconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * case.copy_bytes / float(np.median(times[2:])) / 1e9
