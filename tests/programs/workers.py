"""Who runs programs: this process, or processes of their own that may crash or hang.

W = 2 needs two processes in one gloo group. Making them takes seconds, so they run program after
program and are made anew only after one that they did not survive.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from typing import Any

from tests.programs.program import Program
from tests.world_support import _CONTEXT, World

# A program takes milliseconds; OPER's own deadline, which it may run into, is shorter. All on a
# machine that may be busy with other things.
START_S, DEADLINE_S, OPER_DEADLINE_S = 600.0, 120.0, 15
BROKEN = "crash or hang"


class Local:
    """Runs programs at W = 1 in this process.

    Args:
        fault: one of `faults.FAULTS` to be planted, or None.
    """

    def __init__(self, fault: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._fault = fault

    def run(self, program: Program) -> Any:
        """The program's `oracle.Report`."""
        return _run(program, 0, self._folder.name, self._fault)

    def close(self) -> None:
        """Remove what programs have written."""
        self._folder.cleanup()


class Processes:
    """Runs programs in one process per rank.

    Args:
        world_size: ranks.
        fault: one of `faults.FAULTS` to be planted, or None.
    """

    def __init__(self, world_size: int, fault: str | None = None) -> None:
        self._world_size, self._fault = world_size, fault
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._world: World | None = None
        self._pipes: list[Any] = []
        self._broken = 0  # programs in a row that the processes have not survived

    def run(self, program: Program) -> Any:
        """The program's `oracle.Report`: rank 0's, with the first finding of any rank."""
        from tests.programs.oracle import Finding, Report

        reports = []
        try:
            if self._world is None:
                self._start()
            until = time.monotonic() + DEADLINE_S
            for pipe in self._pipes:
                pipe.send(program)
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    raise EOFError(f"rank {rank} hangs")
                reports.append(pipe.recv())
        except (EOFError, OSError) as error:
            text = f"{type(error).__name__}: {error} {self._why()}"
            self._stop()
            self._broken += 1
            if self._broken > 20:
                raise RuntimeError(f"no program runs any more; the last says {text}") from error
            finding = Finding(BROKEN, _last(program), len(program.actions) - 1, text)
            return Report(Counter({(finding.action, BROKEN): 1}), Counter(), finding)
        self._broken = 0
        found = [r for r in reports if r.finding is not None]
        # A rank that only heard of a finding knows less than the one that made it.
        found.sort(key=lambda r: r.finding.text.startswith("ranks: another"))
        return found[0] if found else reports[0]

    def _start(self) -> None:
        ends = [_CONTEXT.Pipe() for _ in range(self._world_size)]
        self._pipes = [mine for mine, _ in ends]
        theirs = [x for _, x in ends]
        self._world = World(self._world_size, _serve, theirs, self._folder.name, self._fault,
                            env={"OPER_DEADLINE_S": str(OPER_DEADLINE_S), "OMP_NUM_THREADS": "1"})
        for pipe in theirs:
            pipe.close()
        for rank, pipe in enumerate(self._pipes):  # they import torch first
            if not pipe.poll(START_S) or pipe.recv() != "ready":
                raise EOFError(f"rank {rank} does not start")

    def _why(self) -> str:
        """What the ranks have said before they ended."""
        assert self._world is not None
        said = []
        for process, pipe in zip(self._world.processes, self._world._pipes, strict=True):
            process.join(0.2)
            if pipe.poll():
                try:
                    said.append(pipe.recv_bytes()[-1500:].decode("utf8", "replace"))
                except EOFError:
                    said.append(f"exit {process.exitcode}")
        return "\n".join(said)

    def _stop(self) -> None:
        if self._world is not None:
            self._world.close()
        for pipe in self._pipes:
            pipe.close()
        self._world, self._pipes = None, []

    def close(self) -> None:
        """End the processes."""
        self._stop()
        self._folder.cleanup()


def _last(program: Program) -> str:
    return program.actions[-1][0] if program.actions else "shard"


def _serve(rank: int, world_size: int, pipes: list[Any], folder: str, fault: str | None) -> None:
    """The body of one rank: programs in, reports out, until it is ended."""
    import torch.distributed as dist

    from tests.programs import oracle  # which imports the rest

    assert oracle
    if world_size == 1:
        dist.destroy_process_group()  # programs make their own
    gc.collect()
    gc.freeze()
    pipes[rank].send("ready")
    while True:
        pipes[rank].send(_run(pipes[rank].recv(), rank, folder, fault))


def _run(program: Program, rank: int, folder: str, fault: str | None) -> Any:
    from tests.programs.faults import planted
    from tests.programs.oracle import run
    from tests.programs.sides import Talk

    with planted(fault):
        return run(program, Talk(rank, program.world_size, folder))
