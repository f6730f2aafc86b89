"""A helper process that obeys commands from a pipe and ends with the process that started it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

from oper.errors import OperError, fail
from oper.serve.allocator import for_children

_ANSWER_S = 600.0


class Child:
    """A spawned process.

    Args:
        function: called in the process with its end of the pipe and `arguments`. It may send a
            message when it is ready, and returns when the pipe is closed.
        arguments: for `function`; they can be pickled.
        what: its name in errors.
        daemon: False for a process that starts processes itself.

    Attributes:
        pipe: our end.
        pid: of the process.
    """

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...], what: str,
                 daemon: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._what = what
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=daemon)
        with for_children():
            self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def send(self, *words: Any) -> None:
        """Give a command and its arguments."""
        self.pipe.send(words)

    def wait(self, seconds: float = _ANSWER_S) -> Any:
        """The next answer; raises it where it is an exception, and OperError without one."""
        try:
            if self.pipe.poll(seconds):
                answer = self.pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except EOFError:
            pass
        raise OperError(fail(f"{self._what} has failed", "waited (s)", seconds, "an answer in less",
                             "see its error above"))

    def ask(self, *words: Any, seconds: float = _ANSWER_S) -> Any:
        """Give a command and wait for its answer."""
        self.send(*words)
        return self.wait(seconds)

    def close(self, seconds: float = 10.0) -> int:
        """End it, by force after so long; the exit code."""
        self.pipe.close()
        self._process.join(seconds)
        self._process.kill()
        self._process.join()
        return int(self._process.exitcode or 0)


def obey(pipe: Any, commands: Mapping[str, Callable[..., Any]]) -> bool:
    """In the process: answer one command; False when the other end has closed."""
    try:
        command, *words = pipe.recv()
    except EOFError:
        return False
    try:
        pipe.send(commands[command](*words))
    except Exception as error:
        pipe.send(error if isinstance(error, OperError) else OperError(repr(error)))
    return True
