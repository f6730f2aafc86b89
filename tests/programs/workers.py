"""Run programs in this process, or in separate processes that may crash or hang.

Two ranks need two processes in one gloo group. Starting them takes seconds, so they run many
programs and are replaced only if a program has ended them.
"""

import gc
import tempfile
import time
from collections import Counter
from typing import Any

from tests.programs.program import Program
from tests.world_support import RankFailedError, World, received, report

# A program takes milliseconds, but the machine may be busy. OPER's own deadline, which a program
# may exceed, is shorter.
START_S, DEADLINE_S, OPER_DEADLINE_S = 600.0, 120.0, 15
BROKEN = "crash or hang"


class Local:
    """Runs programs with one rank in this process.

    Args:
        fault: one of `faults.FAULTS` to plant, or None.
    """

    def __init__(self, fault: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._fault = fault

    def run(self, program: Program) -> Any:
        """Return the program's `oracle.Report`."""
        return _run(program, 0, self._folder.name, self._fault)

    def close(self) -> None:
        """Remove files that programs have written."""
        self._folder.cleanup()


class Processes:
    """Runs programs in one process per rank.

    Args:
        world_size: number of ranks.
        fault: one of `faults.FAULTS` to plant, or None.
    """

    def __init__(self, world_size: int, fault: str | None = None) -> None:
        self._world_size, self._fault = world_size, fault
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._world: World | None = None
        self._broken = 0  # programs in a row that the processes have not survived

    def run(self, program: Program) -> Any:
        """Return the program's `oracle.Report`: that of rank 0, with the first finding of any rank.
        """
        from tests.programs.oracle import Finding, Report

        try:
            if self._world is None:
                self._world = World(
                    self._world_size, _serve, self._folder.name, self._fault, timeout_s=START_S,
                    env={"OPER_DEADLINE_S": str(OPER_DEADLINE_S), "OMP_NUM_THREADS": "1"})
                for rank in range(self._world_size):  # they import torch first
                    self._world.receive(rank)
            self._world.deadline = time.monotonic() + DEADLINE_S
            for rank in range(self._world_size):
                self._world.send(rank, program)
            reports = [self._world.receive(rank) for rank in range(self._world_size)]
        except (RankFailedError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            self._stop()
            self._broken += 1
            if self._broken > 20:
                raise RuntimeError(f"all programs have ended; the last report: {text}") from error
            finding = Finding(BROKEN, _last(program), len(program.actions) - 1, text)
            return Report(Counter({(finding.action, BROKEN): 1}), Counter(), finding)
        self._broken = 0
        found = [r for r in reports if r.finding is not None]
        # A rank that received a finding has fewer details than the rank that made it.
        found.sort(key=lambda r: r.finding.text.startswith("ranks: another"))
        return found[0] if found else reports[0]

    def _stop(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world = None

    def close(self) -> None:
        """End the processes."""
        self._stop()
        self._folder.cleanup()


def _last(program: Program) -> str:
    return program.actions[-1][0] if program.actions else "shard"


def _serve(rank: int, world_size: int, folder: str, fault: str | None) -> None:
    """Run programs on one rank and send reports, until the process is ended."""
    import torch.distributed as dist

    from tests.programs import oracle  # which imports the rest

    assert oracle
    if world_size == 1:
        dist.destroy_process_group()  # programs make their own
    gc.collect()
    gc.freeze()
    report("ready")
    while True:
        report(_run(received(), rank, folder, fault))


def _run(program: Program, rank: int, folder: str, fault: str | None) -> Any:
    from tests.programs.faults import planted
    from tests.programs.oracle import run
    from tests.programs.sides import Talk

    with planted(fault):
        return run(program, Talk(rank, program.world_size, folder))
