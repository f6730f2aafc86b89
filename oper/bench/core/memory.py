"""Memory, descriptors and processor time of processes as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from oper.errors import OperError


def pss_bytes(pid: int, mapping: str = "") -> int:
    """Proportional set size: resident bytes, shared pages divided by the processes that map them.

    Args:
        pid: the process.
        mapping: only mappings whose name contains this text; all by default.

    Raises:
        OperError: there is no such process, or no permission to inspect it.
    """
    if not mapping:
        return _kilobytes(r"^Pss:\s+(\d+) kB", _read(pid, "smaps_rollup"))
    total, wanted = 0, False
    for line in _read(pid, "smaps").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            wanted = mapping in line
        elif wanted and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def unfiled_pss_bytes(pid: int) -> int:
    """Like `pss_bytes`, without pages of files.

    Pages of libraries are left out, since their share per process depends on the number of
    processes.

    Raises:
        OperError: there is no such process, or no permission to inspect it.
    """
    return _kilobytes(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", _read(pid, "smaps_rollup"))


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OperError("cannot read a process's memory", "pid", pid, "a running process",
                        str(error)) from error


def _kilobytes(pattern: str, text: str) -> int:
    return sum(int(x) << 10 for x in re.findall(pattern, text, re.M))


def peak_rss_mb(pid: int | str = "self") -> float:
    """Peak resident memory of a process so far, in units of 10^6 bytes (the kernel's VmHWM).

    `getrusage` is unsuitable, since its peak starts from that of the parent process.
    """
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.M)
    if found is None:
        raise OperError("cannot read the peak memory", f"/proc/{pid}/status", text[:40],
                        "a line VmHWM", "run on Linux with /proc mounted")
    return int(found[1]) * 1024 / 1e6


def reset_peak(pid: int) -> None:
    """Reset a process's `peak_rss_mb` to what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def num_descriptors(pid: int) -> int:
    """Open file descriptors of a process; raises OperError."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError as error:
        raise OperError("cannot count descriptors", "pid", pid, "a running process",
                        str(error)) from error


def cpu_seconds(pid: int) -> float:
    """Processor time (s) that a process and its descendants have used so far, including descendants
    that have ended and were waited for; 0 if the process itself has ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))

    def total(pid: int) -> int:
        return ticks.get(pid, 0) + sum(map(total, children.get(pid, ())))

    return total(pid) / os.sysconf("SC_CLK_TCK")
