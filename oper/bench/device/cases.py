"""Shared code of the GPU benchmarks: cases, batches, clocks, minimal memory traffic.

One process compares `DeviceTables` with torch's and fbgemm's kernels on one device, with the same
tables and ids. Tests run the same code on small cases on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core import record
from oper.bench.core.workload import Workload, batch_ids
from oper.data.generate.ids import scatter_ids
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.batch import Lookup
from oper.tables import TableSpec

ELEMENT_BYTES = {"float32": 4, "float16": 2}
_DEVICE_SHARE = 0.05  # share of a table's rows that `host_tail_plan` puts into device memory


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """A case of the benchmarks on one device.

    Attributes:
        name: the case's name in the record.
        work: the workload; the device has all `Workload.batch_size` samples.
        dtype: dtype of the rows, ``"float32"`` or ``"float16"``; outputs are float32.
        num_batches: number of distinct timed batches.
        rounds, per_round: see `record.interleave`.
        copy_bytes: size of the copy that measures the memory bandwidth, see `copy_gbps`.
        device: the torch device, ``"cuda"`` or ``"cpu"``.
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
        """The table specifications, with rows of `dtype`."""
        return [replace(t, dtype=self.dtype) for t in self.work.tables()]


def with_head_plan(case: DeviceCase) -> Plan:
    """A plan for one rank with a random tenth of every table's rows as its explicit head."""
    rng = np.random.default_rng(case.work.seed)
    return _in_tiers(case, [rng.permutation(n)[:max(1, n // 10)].astype(np.int64)
                            for n in case.work.num_rows], "striped")


def host_tail_plan(case: DeviceCase) -> Plan:
    """A plan with the hottest 5 % of every table's rows in device memory, the rest in host memory.
    """
    return _in_tiers(case, [scatter_ids(np.arange(max(1, int(n * _DEVICE_SHARE))), n)
                            for n in case.work.num_rows], "owned", "host")


def _in_tiers(case: DeviceCase, heads: Sequence[np.ndarray], placement: str,
              memory: str = "device") -> Plan:
    """A plan for one rank in which every table has a head tier and a tail tier.

    Args:
        case: the case.
        heads: for each table, the ids of the head's rows, int64 [H].
        placement: placement of the head; the tail is owned.
        memory: memory of the tail, ``"device"`` or ``"host"``.
    """
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
        offsets: offsets of all bags, int64 [T * B + 1].
        distinct_rows: number of distinct (table, row) pairs.
    """

    lookup: Lookup
    by_table: list[torch.Tensor]
    offsets: torch.Tensor
    distinct_rows: int


def draw_inputs(case: DeviceCase, device: torch.device, number: int) -> Inputs:
    """Draw the case's batch with index `number`."""
    work = case.work
    columns = torch.from_numpy(batch_ids(work, 0, 1, number)).to(device)
    num_bags = len(columns) * work.batch_size
    lengths = torch.full((num_bags,), work.pooling, dtype=torch.int64, device=device)
    lookup = Lookup(columns.reshape(-1), lengths, torch.arange(len(columns)), work.batch_size)
    return Inputs(lookup, list(columns),
                  torch.arange(0, num_bags * work.pooling + 1, work.pooling, device=device),
                  sum(int(torch.unique(ids).numel()) for ids in columns))


def floor_bytes(case: DeviceCase, distinct_rows: float) -> dict[str, float]:
    """Minimum bytes of device memory traffic by phase. ``forward``: distinct rows and ids read,
    outputs written. ``update``: output gradients and ids read, distinct rows and their 4-byte
    states read and written. ``step``: the sum."""
    work = case.work
    num_bags = work.batch_size * len(work.num_rows)
    rows = distinct_rows * work.dim * ELEMENT_BYTES[case.dtype]
    outputs, ids = 4 * num_bags * work.dim, 8 * num_bags * work.pooling
    forward = rows + ids + outputs
    update = outputs + ids + 2 * rows + 8 * distinct_rows
    return {"forward": forward, "update": update, "step": forward + update}


class Clock:
    """Times calls on a GPU by CUDA events, on the CPU by the host's clock.

    Before each timed call, a delay kernel keeps the GPU busy while Python launches the call's
    kernels. They then run without gaps, so that the time between the events does not include
    launches, which take longer than kernels of about 50 us.
    """

    _DELAY_CYCLES = 6_000_000  # 3 ms at 2 GHz, longer than any contender takes to launch

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.cuda._sleep is not public and may disappear.
        self._delay = getattr(torch.cuda, "_sleep", None) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until all launched work has finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Time (s) that a call takes on the device, without launching its kernels."""
        if self._device.type != "cuda":
            return record.elapsed(call)
        if self._delay is not None:
            self._delay(self._DELAY_CYCLES)
        return self._between(call)

    def seconds_in_a_row(self, call: Callable[[], Any], count: int) -> float:
        """Mean time (s) of `count` consecutive calls, including their launches."""
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
    """Run `record.interleave` with the device's clock after a warm-up round; `summary` by name."""
    record.interleave(runs, clock.wait, 1, case.per_round, before=before)
    taken = record.interleave(runs, clock.wait, case.rounds, case.per_round, before=before,
                              measure=clock.seconds)
    return {name: record.summary(t) for name, t in taken.items()}


def copy_gbps(case: DeviceCase, device: torch.device, clock: Clock) -> float:
    """Bandwidth of a copy within device memory: (bytes read + bytes written) / time, in GB/s."""
    source = torch.empty(case.copy_bytes // 4, dtype=torch.float32, device=device)
    source.uniform_()
    target = torch.empty_like(source)
    times = [clock.seconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * case.copy_bytes / float(np.median(times[2:])) / 1e9
