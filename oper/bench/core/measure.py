"""One case on one rank: interleaved timing of contenders, and the figures common to all entries."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.planning import slowest, total
from oper.bench.core.workload import TIMED, Workload, bags_of, make_batch, timed_ids
from oper.rl_rec.intervals import difference
from oper.search.replay.simulate import Bags
from oper.search.replay.wire import WireReplay
from oper.train.model import ranks

if TYPE_CHECKING:
    from oper.plan import Plan
    from oper.shmem.tables import ShardedTables

Call = Callable[[int], Any]  # takes the index of the call


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a benchmark.

    Attributes:
        name: the case's name in the record.
        work: the workload.
        world_size: number of OPER's processes.
        num_threads: total number of threads of OPER's processes, and number of threads of each
            unsharded contender's single process.
        num_batches: number of distinct timed batches.
        num_stats_batches: number of batches from which access statistics are collected; none of
            them is timed.
        rounds, per_round: see `record.interleave`.
    """

    name: str
    work: Workload
    world_size: int = 2
    num_threads: int = 2
    num_batches: int = 32
    num_stats_batches: int = 32
    rounds: int = 12
    per_round: int = 5

    @property
    def threads_per_rank(self) -> int:
        """Threads of each of OPER's processes."""
        return max(1, self.num_threads // self.world_size)


def quick_case(case: Any) -> Any:
    """A copy of a `Case` with a third of the rounds, 3 calls each, and 8 statistics batches."""
    return replace(case, num_stats_batches=8, rounds=case.rounds // 3, per_round=3)


class Run:
    """Helpers for measuring a case on one rank.

    Args:
        case: a `Case`, or an object with ``rounds`` and ``per_round`` and, for the methods that
            draw batches, ``work`` and ``num_batches``.
        progress: function that reports the current activity.

    Attributes:
        case: the case.
        rank, world_size: this process's rank and the number of ranks.
        say: the argument `progress`.
        others: mean number of cores that other programs kept busy, by timed phase.
    """

    def __init__(self, case: Any, progress: Progress) -> None:
        self.case = case
        self.rank, self.world_size = ranks()
        self.others: dict[str, float] = {}
        self.say = progress

    @property
    def work(self) -> Workload:
        """The case's workload."""
        work: Workload = self.case.work
        return work

    def ids(self, rank: int | None = None) -> Sequence[np.ndarray]:
        """The timed batches of a rank, by default this one; see `workload.batch_ids`."""
        return timed_ids(self.work, self.rank if rank is None else rank, self.world_size,
                         self.case.num_batches)

    def batches(self) -> list[Any]:
        """This rank's timed batches with dense features and labels, see `workload.make_batch`."""
        return [make_batch(self.work, x, (TIMED, self.rank, k)) for k, x in enumerate(self.ids())]

    def everyones_ids(self) -> list[list[np.ndarray]]:
        """Ids of the timed batches of all ranks, indexed by batch and rank."""
        every = [self.ids(r) for r in range(self.world_size)]
        return [list(x) for x in zip(*every, strict=True)]

    def gradient(self, seed: int, num_samples: int) -> torch.Tensor:
        """A random output gradient, float32 [num_samples, sum of dims]."""
        shape = num_samples, self.work.dim * len(self.work.num_rows)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3

    def set_gradient(self, sides: Iterable[Any], batch: Any) -> None:
        """Set the same output gradient on every `Side`, for all steps. Collective."""
        gradient = self.gradient(self.work.seed + self.rank,
                                 self.work.batch_size // self.world_size)
        for side in sides:
            side.order_gradient(gradient, batch)

    def simulated_bytes(self, plan: Plan, host_of: Sequence[int], training: bool, steps: int
                        ) -> list[int]:
        """Simulated bytes that all ranks send between hosts, for each of the first `steps` steps.
        `host_of` maps each rank to its host."""
        replay, count = WireReplay(plan, host_of, training=training), self.case.num_batches
        everyones = [timed_ids(self.work, r, self.world_size, min(steps, count))
                     for r in range(self.world_size)]
        return [int(replay.step([
            {f: Bags(*x) for f, x in zip(self.work.features, bags_of(self.work, ids), strict=True)}
            for ids in (x[k % count] for x in everyones)]).sum()) for k in range(steps)]

    def time(self, runs: Mapping[str, Call], align: Callable[[], None], phase: str = "",
             before: Mapping[str, Call] | None = None, rounds: tuple[int, int] | None = None
             ) -> dict[str, np.ndarray]:
        """Time contenders in alternation, after warming up each of them. Collective.

        Args:
            runs, align, before: see `record.interleave`.
            phase: name of the timed phase, the key in `others`.
            rounds: (rounds, timed calls per round); by default the case's.

        Returns:
            float64 [rounds * calls] seconds by contender; each is the maximum over ranks.
        """
        gc.collect()
        gc.freeze()  # so that collections during the measurement skip all existing objects
        try:
            turns, calls = rounds or (self.case.rounds, self.case.per_round)
            self.say(f"measuring {phase or ', '.join(runs)}: {turns} rounds of {calls}")
            record.interleave(runs, align, 1, 2, before=before)
            clock = record.BusyClock()
            mine = record.interleave(runs, align, turns, calls, before=before)
            self.others[phase] = clock.others(total)
        finally:
            gc.unfreeze()
        return {n: np.array(slowest(s.tolist())) for n, s in mine.items()}

    def finish(self, tables: ShardedTables, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Close OPER's tables and return the case's entry of the record. Collective. The entry is
        `figures` plus the workload and settings on rank 0, and empty elsewhere."""
        page_kind = tables.page_kind
        if dist.is_initialized():
            dist.barrier()
        tables.close()
        case, others = self.case, self.others
        return {} if self.rank else {
            **figures, "page_kind": page_kind, "workload": asdict(self.work),
            "world_size": self.world_size, "num_batches": case.num_batches,
            "threads_per_rank": case.threads_per_rank,
            "num_stats_batches": case.num_stats_batches,
            "other_busy_cores": others.get("", others)}


class Steps:
    """A contender's forward pass, and the backward pass of its most recent output.

    Args:
        forward: function from the index of a batch to its output.
        gradient: gradient with respect to every output.
    """

    def __init__(self, forward: Callable[[int], torch.Tensor], gradient: torch.Tensor) -> None:
        self._forward, self._gradient = forward, gradient
        self._out: torch.Tensor | None = None

    def forward(self, number: int) -> None:
        """Run the forward pass of a batch."""
        self._out = self._forward(number)

    def backward(self, number: int) -> None:
        """Run the backward pass and update of the last forward pass; ignores `number`."""
        assert self._out is not None
        self._out.backward(self._gradient)
        self._out = None

    def step(self, number: int) -> None:
        """Run the forward pass of a batch, its backward pass and the update."""
        self.forward(number)
        self.backward(number)


def median_phases(tables: ShardedTables, ticks: Sequence[Sequence[int]]) -> dict[str, float]:
    """Median milliseconds per phase of a step, averaged over ranks. Collective. `ticks`: this
    rank's ``phase_ns().values()`` of each step."""
    mine = np.median(np.array(ticks, np.float64), axis=0) / 1e6
    return {name: x / ranks()[1] for name, x in zip(
        tables.phase_ns(), total(mine.tolist()), strict=True)}


def summaries(seconds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """`record.summary` by contender."""
    return {name: record.summary(s) for name, s in seconds.items()}


def aligner(tables: ShardedTables) -> Callable[[], None]:
    """A function that synchronizes the ranks. It first waits in gloo's barrier, which sleeps, so
    that waiting ranks leave the cores to a single-process contender."""
    def align() -> None:
        if dist.is_initialized():
            dist.barrier()
        tables.barrier()

    return align


def over(inputs: Sequence[Any], call: Callable[[Any], Any]) -> Call:
    """A function of k that returns `call` of input k, modulo the number of inputs."""
    return lambda k: call(inputs[k % len(inputs)])


def on_threads(count: int, call: Call) -> Call:
    """`call` on `count` threads of torch. torch's number of threads is changed only when the
    contender changes, and the first call after such a change is not timed."""
    def run(number: int) -> Any:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return call(number)

    return run


def nothing(number: int) -> None:
    """Do nothing: the call of a rank, or before a contender's call, where there is nothing to do.
    """


def paired(values: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Geometric mean of ``values[k] / base[k]``, for measurements made in turn, with its 95 %
    bootstrap interval over k: ``mean``, ``low``, ``high``."""
    found = difference(np.log(values), np.log(base))
    return {k: math.exp(x) for k, x in asdict(found).items()}
