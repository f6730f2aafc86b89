"""A rank that is killed for memory: a control group of its own, where rights allow."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def can_limit() -> bool:
    """Whether this process may make control groups (version 2) with a limit of memory."""
    try:
        with _group(64 << 20):
            return True
    except OSError:
        return False


class _group(contextlib.AbstractContextManager["Path"]):
    """A control group of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._path = _ROOT / f"oper-test-{os.getpid()}-{secrets.token_hex(4)}"
        self._num_bytes = num_bytes

    def __enter__(self) -> Path:
        self._path.mkdir()
        try:
            (self._path / "memory.max").write_text(str(self._num_bytes))
            with contextlib.suppress(OSError):
                (self._path / "memory.swap.max").write_text("0")
        except OSError:
            self._path.rmdir()
            raise
        return self._path

    def __exit__(self, *_: object) -> None:
        self._path.rmdir()


def limit_this_process(num_bytes: int) -> None:
    """Put this process into a group of so many bytes; the group goes with `sweep`."""
    group = _group(num_bytes)
    path = group.__enter__()
    (path / "cgroup.procs").write_text(str(os.getpid()))


def sweep(pid: int) -> None:
    """Remove the groups of a process that has ended."""
    for path in _ROOT.glob(f"oper-test-{pid}-*"):
        path.rmdir()
