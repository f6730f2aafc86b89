"""TorchRec's planner in a process of its own: its time limit holds and its memory is not ours."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from oper.plan import Plan
from oper.search.problem.statement import Problem

_START_S = 120.0  # importing torchrec on a busy machine
_GRACE_S = 2.0  # on top of the time limit, for the proposal that runs when it ends


class TorchRecPlanner:
    """TorchRec's proposals for one problem after another, in a child process.

    Args:
        time_limit_s: per problem; a planner that has not come back by then is ended, and what it
            has proposed so far counts.
    """

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def propose(self, problem: Problem) -> dict[str, Plan]:
        """Best plan of each of TorchRec's proposers; empty where none came in time or fits."""
        found: dict[str, Plan] = {}
        # A child that dies, e.g. for want of memory, keeps what it has sent; the next problem gets
        # another one.
        with contextlib.suppress(EOFError, OSError):
            pipe = self._ready()
            pipe.send((problem, self.time_limit_s))
            deadline = time.monotonic() + self.time_limit_s + _GRACE_S
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                message = pipe.recv()
                if message is None:
                    return found
                found[message[0]] = message[1]
        self.close()
        return found

    def _ready(self) -> Connection:
        """The pipe to a child that has imported TorchRec; raises EOFError where none comes up."""
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_S):
            raise EOFError
        self._pipe.recv()
        return self._pipe

    def close(self) -> None:
        """End the child."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def __enter__(self) -> TorchRecPlanner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _serve(pipe: Connection) -> None:
    """The child: proposals for every problem that comes, None after the last."""
    import logging
    import warnings

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    from oper.integration.torchrec_proposals import torchrec_proposals

    pipe.send(None)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            problem, time_limit_s = pipe.recv()
            for proposal in torchrec_proposals(problem, time_limit_s):
                pipe.send(proposal)
            pipe.send(None)
