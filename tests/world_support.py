"""Real process groups for tests: one process per rank over gloo, none of which outlives its test.
"""

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# The modules that the fork server imports, so that ranks start fast: all slow imports that several
# tests share. The server itself never runs torch code.
_PRELOAD = ["torch", "torch.distributed", "numpy", "pytest", "torchrec.models.dlrm",
            "torchrec.distributed.train_pipeline", "oper.train.loop", "oper.bench.tables.train",
            "oper.integration.checkpoint.files", "oper.search.planner", "hypothesis.strategies",
            "oper.sharding", "oper.integration.keys.managed_collision", "numpy.ma",
            "tests.runtime_support", "tests.frozen"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(_PRELOAD)


class RankFailedError(AssertionError):
    """A rank has raised an exception; the message is its traceback."""


class World:
    """Processes of one gloo group that run `body(rank, world_size, *args)`.

    A rank may report with `report(value)` before it ends; its return value is its last report.
    In a rank, `received()` returns the value that `send` has sent to it. `labels`: a letter for
    each rank; ranks with different letters share no memory; empty = all share.

    Attributes:
        deadline: time on the clock of `time.monotonic` until which reports are awaited.
    """

    def __init__(self, world_size: int, body: Callable[..., Any], *args: Any,
                 env: dict[str, str] | None = None, timeout_s: float = 240.0, labels: str = ""
                 ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.deadline = time.monotonic() + timeout_s
        self._pipes: list[Connection] = []
        self.processes = []
        store = str(Path(self._folder.name) / "store")
        # Ranks get the whole environment, since the fork server's is that of the first test.
        whole = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        for rank in range(world_size):
            mine, theirs = CONTEXT.Pipe()
            if labels:
                whole = {**whole, "OPER_DOMAIN": labels[rank]}
            process = CONTEXT.Process(
                target=_main, daemon=True,
                args=(rank, world_size, store, theirs, whole, body, args))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [p.pid or 0 for p in self.processes]

    def send(self, rank: int, value: Any) -> None:
        """Send a rank the result of its next `received()`; raises OSError if it has ended."""
        self._pipes[rank].send_bytes(pickle.dumps(value))

    def receive(self, rank: int) -> Any:
        """Return a rank's next report; raises RankFailedError with its traceback, or after the
        deadline."""
        left = max(0.0, self.deadline - time.monotonic())
        if not self._pipes[rank].poll(left):
            raise RankFailedError(f"rank {rank} says nothing in time")
        try:
            good, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            raise RankFailedError(
                f"rank {rank} ended with {self.processes[rank].exitcode}") from None
        if not good:
            raise RankFailedError(f"rank {rank}:\n{value}")
        return value

    def close(self) -> None:
        """End the remaining processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


@contextlib.contextmanager
def caught(*kinds: type[BaseException]) -> Iterator[list[str]]:
    """Yield a list that gets the error that the block raises, as ``"Kind: text"``; without `kinds`,
    an error of this project."""
    from oper.errors import OperError

    found, kinds = list[str](), kinds or (OperError,)
    try:
        yield found
    except kinds as error:
        found.append(f"{type(error).__name__}: {error}")


def fork() -> int:
    """Call `os.fork` while torch's threads are idle. CPython 3.11 waits for ever in the child if
    another thread creates or deletes its Python state at that moment, as gloo's threads do after a
    collective."""
    time.sleep(0.2)
    return os.fork()


def child_of(body: Callable[[], object]) -> int:
    """Return the exit status of a forked child that calls `body`: 0 unless it raises or takes 20
    seconds."""
    child = fork()
    if child == 0:
        try:
            signal.alarm(20)
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def world(world_size: int, body: Callable[..., Any], *args: Any, **options: Any
          ) -> Iterator[World]:
    """Start a `World`, which ends with the block."""
    running = World(world_size, body, *args, **options)
    try:
        yield running
    finally:
        running.close()


def run_world(world_size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return the results of `body(rank, world_size, *args)` by rank."""
    with world(world_size, body, *args, **options) as running:
        return [running.receive(rank) for rank in range(world_size)]


_pipe: Connection | None = None


def report(value: Any) -> None:
    """Send an intermediate report from a rank."""
    _send(True, value)


def received() -> Any:
    """Wait, in a rank, for the next value that the test sends."""
    assert _pipe is not None, "not a rank of a World"
    return pickle.loads(_pipe.recv_bytes())


def _send(good: bool, value: Any) -> None:
    assert _pipe is not None, "not a rank of a World"
    # Plain pickle, since torch's reducers would send tensors as files in shared memory.
    _pipe.send_bytes(pickle.dumps((good, value)))


def _main(rank: int, world_size: int, store: str, pipe: Connection, env: dict[str, str],
          body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _pipe
    _pipe = pipe
    # Changes of os.environ reach C's getenv, through which kernels read some variables once.
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                world_size=world_size)
        dist.barrier()  # the others fail to connect if a rank ends before
        _send(True, body(rank, world_size, *args))
        dist.destroy_process_group()
    except BaseException:
        _send(False, traceback.format_exc())


def segments() -> list[list[str]]:
    """Return the fields of /proc/self/maps of each shared segment that this process maps."""
    return [line.split() for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:oper" in line]


def open_descriptors() -> list[str]:
    """Return what each open descriptor of this process refers to, e.g. "socket:[4711]"."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by this or another thread
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def descriptors() -> list[str]:
    """Return the names of this process's descriptors of shared segments and of other processes."""
    return [name for name in open_descriptors() if "memfd:oper" in name or "pidfd" in name]


def held_segments() -> int:
    """Count shared segments that this process maps or holds open, and descriptors that monitor
    others."""
    return len(segments()) + len(descriptors())


def leftovers(pids: list[int]) -> list[str]:
    """List processes, named shared memory and sockets of `pids` that still exist."""
    found = []
    names = [p.name for p in Path("/dev/shm").iterdir()]
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(f"process {pid} ({state})")
        found += [f"/dev/shm/{n}" for n in names if re.search(rf"(?<!\d){pid}(?!\d)", n)]
    found += [f"/dev/shm/{n}" for n in names if "oper" in n]
    for line in Path("/proc/net/unix").read_text().splitlines():
        if any(f"oper-{pid}-" in line for pid in pids):
            found.append(f"socket {line.split()[-1]}")
    return found
