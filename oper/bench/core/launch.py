"""Measures cases one after another, in this process or in worker processes."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from oper.bench.core.child import Child, ProcessOptions
from oper.errors import OperError
from oper.serve.allocator import MALLOC
from oper.support.processes import free_port

Progress = Callable[[str], None]  # told what is going on


def run_workers(cases: Sequence[Any], world_size: int, num_threads: int = 1,
                rank_options: Sequence[ProcessOptions] | None = None) -> Iterator[dict[str, Any]]:
    """Measure cases in `world_size` processes, one after another; yields rank 0's results.

    Args:
        cases: each has a ``name`` and ``measure(progress)``, which is called on every rank with the
            default process group ready; its result must be representable as JSON. Cases must be
            picklable.
        world_size: number of processes.
        num_threads: threads of each process (``OMP_NUM_THREADS``).
        rank_options: where each rank runs, with its environment; by default side by side on this
            host.

    Raises:
        OperError: a worker failed; its log is in the message.
    """
    workers: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="oper-bench-") as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(world_size)]
        try:
            for rank, options in enumerate(rank_options or _here(world_size)):
                environment = {
                    **MALLOC, "OMP_NUM_THREADS": str(num_threads), "PYTHONWARNINGS": "ignore",
                    "RANK": str(rank), "WORLD_SIZE": str(world_size), **options.environment}
                workers.append(Child(_work, (list(cases),), f"rank {rank}", replace(
                    options, environment=environment, log=logs[rank])))
            for _ in cases:
                yield _result(workers, logs)
            for worker in workers:
                worker.close(60)
        finally:
            for worker in workers:
                worker.close(0)


def _here(world_size: int) -> list[ProcessOptions]:
    """Ranks of one host, over its loopback interface."""
    port = str(free_port())
    return [ProcessOptions(environment={
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"})
        for rank in range(world_size)]


def _result(workers: Sequence[Child], logs: Sequence[Path]) -> dict[str, Any]:
    """What rank 0 returns next; what it tells until then is printed."""
    running: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while running:
        ready: list[Any] = wait(list(running))
        for pipe in ready:
            try:
                kind, text = pipe.recv()
            except (EOFError, ConnectionError):
                rank = running.pop(pipe)
                code = workers[rank].close()
                if code:
                    # The others fail because of it a moment later; the first one knows why.
                    log = logs[rank].read_text(errors="replace")[-3000:]
                    raise OperError("a benchmark process has failed", "rank, exit code",
                                    (rank, code), "0", f"its log ends:\n{log}") from None
                continue
            if kind == "result":
                found: dict[str, Any] = json.loads(text)
                return found
            print(f"  {text}", file=sys.stderr, flush=True)
    raise OperError("the benchmark's processes ended early", "results", 0, "one per case",
                    "see the log above")


def _work(pipe: Connection, cases: Sequence[Any]) -> None:
    """What a worker process does; its environment says which rank it is."""
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        dist.init_process_group("gloo")

    def tell(kind: str, text: str) -> None:
        if rank == 0:
            pipe.send((kind, text))

    for case in cases:
        result = case.measure(lambda text, name=case.name: tell("progress", f"{name}: {text}"))
        tell("result", json.dumps(result))
    if world_size > 1:
        dist.barrier()
    sys.stdout.flush()
    # Tearing gloo's threads down in the interpreter's exit may hang; everything is written.
    os._exit(0)


def measured(cases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Measure cases; yields each entry of the record as soon as it is complete.

    Args:
        cases: each has a ``name`` and ``measure(progress)``, which returns its figures. Consecutive
            cases of one class with a ``world_size`` are measured in that many worker processes with
            ``threads_per_rank`` threads each, other cases in this process.
    """
    for (_, world_size), group in itertools.groupby(
            cases, lambda c: (type(c), getattr(c, "world_size", 0))):
        together = list(group)
        figures = run_workers(together, world_size, together[0].threads_per_rank) if (
            world_size) else (case.measure(teller(case.name)) for case in together)
        for case, found in zip(together, figures, strict=True):
            yield {"name": case.name, **found}


def teller(name: str) -> Progress:
    """A function that reports a case's progress on stderr, without repeating the same text."""
    @functools.lru_cache(maxsize=1)
    def tell(text: str) -> None:
        print(f"  {name}: {text}", file=sys.stderr, flush=True)

    return tell
