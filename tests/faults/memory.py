"""A rank that is killed for memory: a control group of its own, where rights allow."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path


def _root() -> Path | None:
    """Where control groups (version 2) with limits of memory are made; None without them."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and "memory" in Path(
                    place, "cgroup.subtree_control").read_text().split():
                return Path(place)
    return None


def can_limit() -> bool:
    """Whether this process may make control groups (version 2) with a limit of memory."""
    try:
        _make_group(64 << 20).rmdir()
    except OSError:
        return False
    return True


def _make_group(num_bytes: int) -> Path:
    """A control group of so many bytes."""
    root = _root()
    if root is None:
        raise OSError("no control groups that limit memory")
    path = root / f"oper-test-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        (path / "memory.max").write_text(str(num_bytes))
        with contextlib.suppress(OSError):
            (path / "memory.swap.max").write_text("0")
    except OSError:
        path.rmdir()
        raise
    return path


def limit_this_process(num_bytes: int) -> None:
    """Put this process into a group of so many bytes; the group goes with `sweep`."""
    (_make_group(num_bytes) / "cgroup.procs").write_text(str(os.getpid()))


def sweep(pid: int) -> None:
    """Remove the groups of a process that has ended."""
    root = _root()
    for path in root.glob(f"oper-test-{pid}-*") if root else ():
        for _ in range(20):  # the kernel takes the last pages back a little later
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)
