"""``python -m`` and ``python -c`` as forks of a process that has imported torch and torchrec.

A new interpreter needs three seconds of processor time for these imports, and tests start many.
Tests of how a program starts, of its imports or of its memory start a new interpreter.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from typing import Any

from tests.world_support import CONTEXT

_HIGH = 500  # descriptors from here on are unused


class _Descriptor:
    """A file descriptor that can be pickled: an open one in the receiving process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


class Forked(subprocess.Popen[Any]):
    """A process; takes ``[sys.executable, "-m", module, *arguments]``, or ``"-c", code``."""

    _fork: Any = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
                       pass_fds: Any, cwd: Any, env: Any, startupinfo: Any, creationflags: Any,
                       shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
                       errread: int, errwrite: int, *_: Any) -> None:
        assert args[0] == sys.executable and args[1] in ("-m", "-c"), args
        forkserver.ensure_running()
        numbers = {n: n for n in pass_fds} | {
            n: k for n, k in enumerate((p2cread, c2pwrite, errwrite)) if k != -1}
        self._fork = CONTEXT.Process(target=_run, args=(
            list(args[1:]), dict(os.environ if env is None else env), cwd and os.fspath(cwd),
            {n: _Descriptor(k) for n, k in numbers.items()}, os.getpid(),
            forkserver._forkserver._forkserver_address),  # type: ignore[attr-defined]
            daemon=True)  # ends when the test process ends
        self._fork.start()
        self.pid, self._child_created = self._fork.pid, True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._fork is not None:
            self.returncode = self._fork.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._fork.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)


def context_of_servers(kind: str) -> ForkServerContext:
    """Stand in for `torch.multiprocessing.get_context`, which servers start their workers with.

    The fork server is the parent of these workers: `end_with_parent` would end them at once.
    Processes that call it come from `multiprocessing.get_context`, which stays as it is.
    """
    assert kind == "spawn", kind
    # Now, since the fork server and all forks inherit the signals that a server blocks while it
    # starts a worker.
    forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    return CONTEXT


def _run(words: Sequence[str], env: dict[str, str], folder: str | None,
         descriptors: dict[int, int], parent: int, server: str) -> None:
    """Run ``python`` with these arguments, environment, folder and descriptors in the forked
    process. Workers of servers that it starts are forks of the fork server at the address `server`,
    all other processes are real ones."""
    import fcntl

    import torch.multiprocessing

    ours: Any = forkserver._forkserver  # type: ignore[attr-defined]
    ours._forkserver_address, ours.ensure_running = server, lambda: None
    torch.multiprocessing.get_context = context_of_servers
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    high = {n: fcntl.fcntl(k, fcntl.F_DUPFD, _HIGH) for n, k in descriptors.items()}
    for k in descriptors.values():
        os.close(k)
    for n, k in high.items():
        os.dup2(k, n)
        os.close(k)
    # The inherited file objects refer to the fork server's descriptors.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False)
    # Changes of os.environ reach C's getenv, through which kernels read some variables once.
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    if folder is not None:
        os.chdir(folder)
    sys.path[:0] = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if env.get("PYTHONWARNINGS"):
        warnings.simplefilter(env["PYTHONWARNINGS"])  # type: ignore[arg-type]
    os.getppid = lambda: parent  # the test process instead of the fork server
    kind, what, *arguments = words
    sys.argv = ["-c", *arguments]
    try:
        if kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def run(*words: str, env: Mapping[str, str] | None = None, **options: Any
        ) -> subprocess.CompletedProcess[Any]:
    """Run ``python`` with these arguments; `env`: further variables, `options`: of `Popen`.

    The output is text, unless ``text=False``.
    """
    given = options.pop("input", None)
    process = Forked([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                     stderr=subprocess.PIPE, env={**os.environ, **(env or {})},
                     **{"text": True} | options)
    with process:
        out, err = process.communicate(given, timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _popen(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Fork, or start a new process if another command starts it, such as one in another network."""
    return (Forked if words[0] == sys.executable else subprocess.Popen)(words, **options)


# Replaces the module `subprocess` in code whose Python processes may be forks.
FORKS = types.SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE,
                              TimeoutExpired=subprocess.TimeoutExpired)
