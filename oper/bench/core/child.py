"""Child processes of a benchmark; each exits when its parent does."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from oper.bench.core.memory import cpu_seconds, peak_rss_mb
from oper.errors import OperError
from oper.support.processes import MALLOC, end_with_parent

_ANSWER_S = 600.0  # default time limit of a child's answer
_STDERR = 2  # descriptor of this process's stderr: only results go to its stdout
# Children write to this process's stderr, where warnings of Python and of torch's C++ code would
# appear once per child. Errors still appear, and the user may set other values.
_QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How to launch a `Child`.

    Attributes:
        command: words in front of the Python command, such as ``taskset -c 0``.
        environment: environment variables added to, or replacing, those of this process; by default
            the allocator settings (`MALLOC`) that the user has not set.
        cgroup: ``cgroup.procs`` file to which the child's process id is written, or None.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {
        k: v for k, v in MALLOC.items() if k not in os.environ})
    cgroup: Path | None = None


def threads(count: int) -> dict[str, str]:
    """Environment variables of a process in which every library uses `count` threads.

    ``OMP_NUM_THREADS`` also sets the number of Arrow's threads that compute.
    """
    return dict.fromkeys(("OMP_NUM_THREADS", "ARROW_IO_THREADS", "POLARS_MAX_THREADS"), str(count))


class Child:
    """A child process connected to this process by a pipe.

    Args:
        function: top-level function of a module. The child calls it with the child's end of the
            pipe and `arguments`. It should return when the pipe is closed.
        arguments: arguments of `function`; must be picklable.
        what: name of the child in errors.
        options: how to launch the child.

    Attributes:
        pipe: this process's end of the pipe.
        pid: process id of the child.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any], what: str,
                 options: ProcessOptions | None = None) -> None:
        options = options or ProcessOptions()
        job = pickle.dumps((function, tuple(arguments)))  # before anything is started
        # If torchrun started this process, its variables would point the children to its store.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        ours, theirs = socket.socketpair()
        self.pipe = Connection(ours.detach())
        self._what = what
        with theirs:
            self._process = subprocess.Popen(
                [*options.command, sys.executable, "-m", __name__, str(theirs.fileno()),
                 str(os.getpid())],
                env={**_QUIET, **inherited, **options.environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        if options.cgroup is not None:
            options.cgroup.write_text(str(self.pid))
        with contextlib.suppress(ConnectionError):  # the next `wait` reports the failure
            self.pipe.send_bytes(job)

    def send(self, *words: Any) -> None:
        """Send a command and its arguments."""
        self.pipe.send(words)

    def wait(self, seconds: float | None = _ANSWER_S) -> Any:
        """Return the child's next message, or raise it if it is an exception. Raises OperError if
        the child closes its pipe or `seconds` pass first; None = no limit."""
        try:
            if self.pipe.poll(seconds):
                answer = self.pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except (EOFError, ConnectionError):
            raise OperError(f"{self._what} has failed", "its pipe", "closed", "an answer",
                            "see the traceback on its stderr") from None
        raise OperError(f"{self._what} has failed", "waited (s)", seconds, "an answer by then",
                        "it still runs: see whether it is stuck or the machine is overloaded")

    def ask(self, *words: Any, seconds: float = _ANSWER_S) -> Any:
        """Send a command and return the answer to it, see `wait`."""
        self.send(*words)
        return self.wait(seconds)

    def cpu_seconds(self) -> float:
        """Processor time (s) that the child has used so far, see `memory.cpu_seconds`."""
        return cpu_seconds(self.pid)

    def close(self, seconds: float = 10.0) -> int:
        """Close the pipe and return the child's exit code; kills the child after `seconds`."""
        self.pipe.close()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def obey(pipe: Any, commands: Mapping[str, Callable[..., Any]]) -> bool:
    """Receive one command in the child and send its result, or its error as an `OperError`; returns
    False if the parent has closed the pipe."""
    try:
        command, *words = pipe.recv()
    except (EOFError, ConnectionError):
        return False
    try:
        pipe.send(commands[command](*words))
    except Exception as error:
        pipe.send(error if isinstance(error, OperError) else OperError(repr(error)))
    return True


# ---- measured processes --------------------------------------------------------------------------


def start(function: Callable[..., None], *arguments: Any) -> Child:
    """Start a single-threaded process with this process's allocator settings."""
    return Child(function, arguments, "a measured process", ProcessOptions(environment=threads(1)))


def answer(function: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a single-threaded process and return the first message that it sends.
    Raises OperError if the process fails."""
    with contextlib.closing(start(function, *arguments)) as child:
        return child.wait(None)


def call(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run a function in a single-threaded process and measure it.

    Returns:
        ``seconds``: wall time (s); ``cpu``: processor time (s); ``rss_mb``: peak resident memory of
        the process (10^6 bytes); ``value``: the function's result.

    Raises:
        OperError: the process failed; its traceback is on stderr.
    """
    found: dict[str, Any] = answer(measure_call, function, *arguments)
    return found


def measure_call(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """Run `function` in the child and send the result of `call` to the parent."""
    begin, cpu = time.perf_counter(), time.process_time()
    value = function(*arguments)
    pipe.send({"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu,
               "rss_mb": peak_rss_mb(), "value": value})


def main() -> None:
    """Entry point of the child."""
    end_with_parent(int(sys.argv[2]))
    logging.disable(logging.WARNING)  # torch logs some when it is imported; errors still appear
    with Connection(int(sys.argv[1])) as pipe:
        function, arguments = pickle.loads(pipe.recv_bytes())
        function(pipe, *arguments)


if __name__ == "__main__":
    main()
