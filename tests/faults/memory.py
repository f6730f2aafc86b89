"""A rank that is killed for lack of memory, in a control group of its own if permissions allow."""

import contextlib
import os
import secrets
import time
from pathlib import Path


def _place() -> tuple[Path, str, str] | None:
    """Return where a control group of version 2 or 1 can be made, and its files for the limits of
    memory and of swap; None if neither is possible."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, name, kind, options, *_ = line.split()
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and "memory" in Path(
                    name, "cgroup.subtree_control").read_text().split():
                return Path(name), "memory.max", "memory.swap.max"
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(name), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    return None


def can_limit() -> bool:
    """Whether this process may create control groups with a memory limit."""
    try:
        _make_group(64 << 20).rmdir()
    except OSError:
        return False
    return True


def _make_group(num_bytes: int) -> Path:
    """Create a control group with a limit in bytes."""
    place = _place()
    if place is None:
        raise OSError("no control groups that limit memory")
    folder, memory, swap = place
    path = folder / f"oper-test-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        (path / memory).write_text(str(num_bytes))
        with contextlib.suppress(OSError):
            (path / swap).write_text(str(num_bytes) if "memsw" in swap else "0")
    except OSError:
        path.rmdir()
        raise
    return path


def limit_this_process(num_bytes: int) -> None:
    """Move this process to a control group with a limit in bytes; `sweep` removes the group."""
    (_make_group(num_bytes) / "cgroup.procs").write_text(str(os.getpid()))


def sweep(pid: int) -> None:
    """Remove the control groups of a process that has ended."""
    place = _place()
    for path in place[0].glob(f"oper-test-{pid}-*") if place else ():
        for _ in range(20):  # the kernel takes the last pages back a little later
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)
