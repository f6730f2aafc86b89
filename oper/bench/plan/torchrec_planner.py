"""Run TorchRec's planner in a child process, which bounds its time and separates its memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from multiprocessing.connection import Connection

from oper.bench.core.child import Child
from oper.errors import OperError
from oper.plan import Plan
from oper.search.problem.statement import Problem

_START_S = 120.0  # time limit of importing torchrec on a busy machine
_GRACE_S = 2.0  # added to the time limit, for the proposal in progress when it expires


@functools.cache
def torchrec_planner(time_limit_s: float) -> TorchRecPlanner | None:
    """The planner shared by all cases; None if the limit is 0 or torchrec is not installed."""
    if time_limit_s > 0 and importlib.util.find_spec("torchrec"):
        return TorchRecPlanner(time_limit_s)
    return None


class TorchRecPlanner:
    """Runs TorchRec's proposers for one problem after another in a child process.

    Args:
        time_limit_s: time limit (s) per problem. A child that exceeds it is killed, and the
            proposals that it has sent are used.
    """

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self._child: Child | None = None

    def propose(self, problem: Problem) -> dict[str, Plan]:
        """The best plan of each proposer by name; empty if none is found in time or none fits."""
        found: dict[str, Plan] = {}
        # If the child dies, e.g. out of memory, the proposals received so far are used, and the
        # next problem starts another child.
        with contextlib.suppress(EOFError, OSError, OperError):
            if self._child is None:
                self._child = Child(_serve, (), "TorchRec's planner")
                self._child.wait(_START_S)
            pipe = self._child.pipe
            pipe.send((problem, self.time_limit_s))
            deadline = time.monotonic() + self.time_limit_s + _GRACE_S
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                message = pipe.recv()
                if message is None:
                    return found
                found[message[0]] = message[1]
        self.close()
        return found

    def close(self) -> None:
        """Kill the child, which otherwise exits with this process."""
        if self._child is not None:
            self._child.close(0)
        self._child = None


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
