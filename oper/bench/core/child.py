"""Child processes of a benchmark, each of which ends with its parent."""

from __future__ import annotations

import contextlib
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
from oper.serve.allocator import MALLOC
from oper.support.processes import end_with_parent

_ANSWER_S = 600.0
# Environment of a process with one thread; Arrow takes its number of threads from OpenMP's.
_ALONE = {"OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1", "POLARS_MAX_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Where and how a process runs.

    Attributes:
        command: prefix of its command line.
        environment: environment variables added to, or replacing, those of this process; by default
            the allocator's settings, unless the user has set them.
        cgroup: file that its process id is written to.
        log: file for its output.
        sockets: sockets that it inherits, under the same descriptor numbers.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {
        k: v for k, v in MALLOC.items() if k not in os.environ})
    cgroup: Path | None = None
    log: Path | None = None
    sockets: Sequence[socket.socket] = ()


class Child:
    """A child process with a pipe to it.

    Args:
        function: a top-level function of a module, called in the process with its end of the pipe
            and `arguments`. It may send a message when it is ready, and returns when the pipe is
            closed.
        arguments: arguments of `function`; must be picklable.
        what: its name in errors.
        options: where and how it runs.

    Attributes:
        pipe: this process's end of the pipe.
        pid: process id of the child.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any], what: str,
                 options: ProcessOptions | None = None) -> None:
        options = options or ProcessOptions()
        job = pickle.dumps((function, tuple(arguments)))  # before anything is started
        # torchrun's own variables would make workers of one of its processes look for its store.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        ours, theirs = socket.socketpair()
        self.pipe = Connection(ours.detach())
        self._what = what
        log = open(options.log, "wb") if options.log else None  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [*options.command, sys.executable, "-m", __name__, str(theirs.fileno()),
                 str(os.getpid())],
                env={**inherited, **options.environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[s.fileno() for s in (theirs, *options.sockets)])
        if log:
            log.close()
        self.pid = self._process.pid
        if options.cgroup is not None:
            options.cgroup.write_text(str(self.pid))
        with contextlib.suppress(ConnectionError):  # what it has failed by is told when it is asked
            self.pipe.send_bytes(job)

    def send(self, *words: Any) -> None:
        """Send a command and its arguments."""
        self.pipe.send(words)

    def wait(self, seconds: float | None = _ANSWER_S) -> Any:
        """Wait for the next answer; raises it if it is an exception, and OperError if none comes.
        """
        try:
            if self.pipe.poll(seconds):
                answer = self.pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except (EOFError, ConnectionError):
            pass
        raise OperError(f"{self._what} has failed", "waited (s)", seconds, "an answer in less",
                        "see its error above")

    def ask(self, *words: Any, seconds: float = _ANSWER_S) -> Any:
        """Send a command and wait for its answer."""
        self.send(*words)
        return self.wait(seconds)

    def cpu_seconds(self) -> float:
        """Processor time (s) so far, see `memory.cpu_seconds`."""
        return cpu_seconds(self.pid)

    def close(self, seconds: float = 10.0) -> int:
        """End the process, by force after `seconds`; returns its exit code."""
        self.pipe.close()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def obey(pipe: Any, commands: Mapping[str, Callable[..., Any]]) -> bool:
    """In the child: answer one command; returns False when the other end has closed."""
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
    """Start a process with one thread and this process's allocator settings."""
    return Child(function, arguments, "a measured process", ProcessOptions(environment=_ALONE))


def answer(function: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a process with one thread and return the first message it sends; raises
    OperError."""
    child = start(function, *arguments)
    try:
        return child.wait(None)
    finally:
        child.close()


def call(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run and measure a function in a process with one thread.

    Returns:
        ``seconds`` and processor time ``cpu`` (s), peak memory of the process ``rss_mb`` (10^6
        bytes), and what the function returned, ``value``.

    Raises:
        OperError: the process failed; its error is on stderr.
    """
    found: dict[str, Any] = answer(measure_call, function, *arguments)
    return found


def measure_call(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """The part of `call` that runs in the child."""
    begin, cpu = time.perf_counter(), time.process_time()
    value = function(*arguments)
    pipe.send({"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu,
               "rss_mb": peak_rss_mb(), "value": value})


def main() -> None:
    """Entry point of the child."""
    end_with_parent(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as pipe:
        function, arguments = pickle.loads(pipe.recv_bytes())
        function(pipe, *arguments)


if __name__ == "__main__":
    main()
