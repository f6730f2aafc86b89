"""Starts the worker processes of a benchmark and brings their results back."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oper.errors import OperError, fail
from oper.serve.allocator import MALLOC
from oper.support.processes import end_with_parent, free_port

Progress = Callable[[str], None]  # told what is going on

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank runs.

    Attributes:
        command: what its command line begins with.
        environment: variables, before those that are the same for all ranks.
        cgroup: file that its process id is written to.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cgroup: Path | None = None


def run_workers(cases: Sequence[Any], world_size: int, num_threads: int = 1,
                seats: Sequence[Seat] | None = None) -> Iterator[dict[str, Any]]:
    """Measure cases in `world_size` processes, one after another; yields what rank 0 returns.

    Args:
        cases: each has a ``name`` and ``measure(progress)``, which is called on every rank with the
            default process group ready; what it returns can be written as JSON. They can be
            pickled.
        world_size: processes.
        num_threads: threads of each process (``OMP_NUM_THREADS``).
        seats: where each rank runs; side by side on this host by default.

    Raises:
        OperError: a worker has failed; its log is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="oper-bench-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(list(cases)))
        workers = _start(folder, seats or _here(world_size), num_threads)
        try:
            for k in range(len(cases)):
                yield _wait_for(folder / f"case-{k}.json", workers, folder)
            for worker in workers:
                worker.wait(timeout=60)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _here(world_size: int) -> list[Seat]:
    """Ranks of one host, over its loopback interface."""
    port = str(free_port())
    return [Seat(environment={
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"})
        for rank in range(world_size)]


def _start(folder: Path, seats: Sequence[Seat], num_threads: int) -> list[subprocess.Popen[bytes]]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    workers = []
    for rank, seat in enumerate(seats):
        # torchrun's own variables would make workers of one of its processes look for its store.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        environment = {
            **inherited, **MALLOC, "OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore", "RANK": str(rank), "WORLD_SIZE": str(len(seats)),
            **seat.environment}
        with open(folder / f"rank-{rank}.log", "wb") as log:
            worker = subprocess.Popen(
                [*seat.command, sys.executable, "-m", "oper.bench.core.launch", str(folder)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        workers.append(worker)
        if seat.cgroup is not None:
            seat.cgroup.write_text(str(worker.pid))
    return workers


def _wait_for(result: Path, workers: Sequence[subprocess.Popen[bytes]], folder: Path
              ) -> dict[str, Any]:
    shown = ""
    while not result.exists():
        for rank, worker in enumerate(workers):
            if worker.poll() not in (None, 0):
                # The others fail because of it a moment later; the first one knows why.
                log = (folder / f"rank-{rank}.log").read_text(errors="replace")[-3000:]
                raise OperError(fail("a benchmark process has failed", "rank, exit code",
                                     (rank, worker.returncode), "0", f"its log ends:\n{log}"))
        with contextlib.suppress(OSError):
            now = (folder / "progress").read_text()
            if now != shown:
                print(f"  {now}", file=sys.stderr, flush=True)
                shown = now
        time.sleep(_POLL_S)
    return json.loads(result.read_text())


def main(folder: Path) -> None:
    """What a worker process does; its environment says which rank it is."""
    end_with_parent()
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        dist.init_process_group("gloo")
    for k, case in enumerate(pickle.loads((folder / "job").read_bytes())):

        def progress(text: str, name: str = case.name) -> None:
            if rank == 0:
                _replace(folder / "progress", f"{name}: {text}")

        result = case.measure(progress)
        if rank == 0:
            _replace(folder / f"case-{k}.json", json.dumps(result))
    if world_size > 1:
        dist.barrier()
    sys.stdout.flush()
    # Tearing gloo's threads down in the interpreter's exit may hang; everything is written.
    os._exit(0)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
