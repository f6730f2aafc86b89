"""A rank that is killed for lack of memory, in a control group of its own if permissions allow."""

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where control groups with memory limits are created, and the files for the limits."""

    path: Path
    memory: str
    swap: str


def _place() -> _Place | None:
    """Return where a control group of version 2 or 1 can be made; None if neither is possible."""
    for line in (PROC / "mounts").read_text().splitlines():
        _, name, kind, options, *_ = line.split()
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and "memory" in Path(
                    name, "cgroup.subtree_control").read_text().split():
                return _Place(Path(name), "memory.max", "memory.swap.max")
        if kind == "cgroup" and "memory" in options.split(","):
            own = Path(name, _own_group().lstrip("/"))  # whose limits hold as well
            return _Place(own if own.is_dir() else Path(name), "memory.limit_in_bytes",
                          "memory.memsw.limit_in_bytes")
    return None


def _own_group() -> str:
    """Return the name of this process's memory control group (version 1)."""
    for line in (PROC / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path
    return "/"


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
    path = place.path / f"oper-test-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        (path / place.memory).write_text(str(num_bytes))
        with contextlib.suppress(OSError):
            (path / place.swap).write_text(str(num_bytes) if "memsw" in place.swap else "0")
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
    for path in place.path.glob(f"oper-test-{pid}-*") if place else ():
        for _ in range(20):  # the kernel takes the last pages back a little later
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)
