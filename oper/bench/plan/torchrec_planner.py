"""Run TorchRec's planner in a child process, which bounds its time and separates its memory."""

from __future__ import annotations

import contextlib
import functools
import time
from multiprocessing.connection import Connection

from oper.bench.core.child import Child
from oper.errors import OperError
from oper.plan import Plan
from oper.search.problem.statement import Problem

_START_S = 120.0  # time limit of importing torchrec on a busy machine
_GRACE_S = 2.0  # added to the time limit, for the proposal in progress when it expires


def propose(problem: Problem, time_limit_s: float) -> dict[str, Plan]:
    """The best plan of each of TorchRec's proposers by name; empty if none is found in time or none
    fits. One child process serves all problems; if it exceeds the limit or dies, e.g. out of
    memory, the proposals that it has sent are used, and the next problem starts another one."""
    found: dict[str, Plan] = {}
    child = _planner()
    with contextlib.suppress(EOFError, OSError):
        child.pipe.send((problem, time_limit_s))
        deadline = time.monotonic() + time_limit_s + _GRACE_S
        while child.pipe.poll(max(0.0, deadline - time.monotonic())):
            message = child.pipe.recv()
            if message is None:
                return found
            found[message[0]] = message[1]
    child.close(0)
    _planner.cache_clear()
    return found


@functools.cache
def _planner() -> Child:
    child = Child(_serve, (), "TorchRec's planner")
    with contextlib.suppress(OperError):  # a child that has died proposes nothing
        child.wait(_START_S)
    return child


def _serve(pipe: Connection) -> None:
    """Child process: send the proposals for each received problem, then None."""
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
