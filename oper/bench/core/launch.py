"""Measure cases one after another, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from oper.bench.core.child import Child, ProcessOptions, threads
from oper.bench.core.record import BusyClock, rounded
from oper.errors import OperError
from oper.support.processes import MALLOC, free_port, trim_memory

Progress = Callable[[str], None]  # takes a line of text about the current activity


@dataclass(frozen=True, slots=True)
class Task:
    """A case that calls ``function(progress, *arguments)``.

    Attributes:
        name: the case's name.
        function: a top-level function of a module, which returns the case's figures.
        arguments: further arguments of `function`.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...] = ()

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Call the function."""
        return self.function(progress, *self.arguments)


def run_workers(cases: Sequence[Any], world_size: int, num_threads: int = 1,
                rank_options: Sequence[ProcessOptions] | None = None) -> Iterator[dict[str, Any]]:
    """Measure cases one after another in `world_size` processes; yields rank 0's results.

    Args:
        cases: picklable objects with a ``name`` and a method ``measure(progress)``, which every
            rank calls after initializing the default process group (gloo; only if `world_size` >
            1). The result must be representable as JSON after `record.rounded`.
        world_size: number of processes.
        num_threads: threads of each process, see `child.threads`.
        rank_options: launch options of each rank, whose environment includes the rendezvous
            address; by default all ranks run on this host and use its loopback interface.

    Raises:
        OperError: a worker failed; the message includes its traceback.
    """
    workers: list[Child] = []
    try:
        for rank, options in enumerate(rank_options or _on_this_host(world_size)):
            environment = {
                **MALLOC, **threads(num_threads), "RANK": str(rank),
                "WORLD_SIZE": str(world_size), **options.environment}
            workers.append(Child(_work, (list(cases),), f"rank {rank}",
                                 replace(options, environment=environment)))
        for _ in cases:
            yield _result(workers)
        for worker in workers:
            worker.close(60)
    finally:
        for worker in workers:
            worker.close(0)


def _on_this_host(world_size: int) -> list[ProcessOptions]:
    """Launch options of ranks that share this host and use its loopback interface."""
    port = str(free_port())
    return [ProcessOptions(environment={
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"})
        for rank in range(world_size)]


def _result(workers: Sequence[Child]) -> dict[str, Any]:
    """Wait until every rank has sent its next result, print progress meanwhile, and return rank
    0's."""
    running: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    found: dict[str, Any] = {}
    while running:
        ready: list[Any] = wait(list(running))
        for pipe in ready:
            rank = running[pipe]
            try:
                kind, text = pipe.recv()
            except (EOFError, ConnectionError):
                kind, text = "failed", f"its exit code is {workers[rank].close()}"
            if kind == "failed":  # the first one: the remaining workers fail because of it
                raise OperError("a benchmark process has failed", "rank", rank, "a result",
                                f"see its error:\n{text}")
            if kind == "progress":
                print(f"  {text}", file=sys.stderr, flush=True)
                continue
            del running[pipe]
            if rank == 0:
                found = json.loads(text)
    return found


def _work(pipe: Connection, cases: Sequence[Any]) -> None:
    """Main function of a worker process, whose rank is ``RANK`` in its environment."""
    try:
        _measure(pipe, cases)
    except BaseException:
        with contextlib.suppress(ConnectionError):
            pipe.send(("failed", traceback.format_exc()[-3000:]))
    os._exit(0)  # without the interpreter's shutdown, in which joining gloo's threads may hang


def _measure(pipe: Connection, cases: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        dist.init_process_group("gloo")

    for case in cases:
        def tell(text: str, name: str = case.name) -> None:
            if rank == 0:
                pipe.send(("progress", f"{name}: {text}"))

        pipe.send(("result", json.dumps(rounded(case.measure(tell)))))
        gc.collect()
        trim_memory()  # for the next case, since `MALLOC` keeps freed memory in this process
    if world_size > 1:
        dist.barrier()


def measured(cases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Measure cases; yields each case's entry of the record as soon as it is complete.

    If a case fails, its entry has the error as ``failed`` and ``verified`` false, and the remaining
    cases are still measured.

    Args:
        cases: objects with a ``name`` and a method ``measure(progress)``, which returns the case's
            figures. A case without a ``world_size`` is measured in this process. Consecutive cases
            with equal ``world_size`` and equal ``shape``, an optional attribute, share
            ``world_size`` worker processes of ``threads_per_rank`` threads. Such cases may have a
            method ``hosts()``, which returns a context manager that yields the launch options of
            each rank.
    """
    left = list(cases)
    while left:
        _, same = next(itertools.groupby(
            left, lambda c: (getattr(c, "world_size", 0), getattr(c, "shape", None))))
        group, done = list(same), 0
        try:
            for found in _together(group) if hasattr(group[0], "world_size") else map(_here, group):
                done += 1
                yield {"name": group[done - 1].name, **found}
        except Exception as error:
            if done == len(group):  # all cases succeeded; closing their processes failed
                raise
            if not isinstance(error, OperError):
                traceback.print_exc()
            yield {"name": group[done].name, "verified": False,
                   "failed": f"{type(error).__name__}: {error}"}
            done += 1
        left = left[done:]


def _here(case: Any) -> dict[str, Any]:
    @functools.lru_cache(maxsize=1)
    def tell(text: str) -> None:
        """Print the case's progress, except for immediate repetitions."""
        print(f"  {case.name}: {text}", file=sys.stderr, flush=True)

    clock = BusyClock()
    found = case.measure(tell)
    return rounded({"other_busy_cores": clock.others(), **found})


def _together(cases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    first = cases[0]
    with first.hosts() if hasattr(first, "hosts") else contextlib.nullcontext() as rank_options:
        yield from run_workers(cases, first.world_size, first.threads_per_rank, rank_options)
