"""Memory, file descriptors and processor time of processes, from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from oper.support import kernel


def pss_bytes(pid: int, mapping: str = "") -> int:
    """Proportional set size (bytes) of a process.

    That is its resident memory, where each shared page counts as its size divided by the number of
    processes that map it.

    Args:
        pid: the process id.
        mapping: count only mappings whose name contains this text; ``""`` = all mappings.

    Raises:
        OSError: the process does not exist, or this user may not inspect it.
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
    """Proportional set size (bytes) of a process without file-backed pages.

    Library pages are excluded because their share per process depends on the number of processes.
    Raises OSError as `pss_bytes` does.
    """
    return _kilobytes(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", _read(pid, "smaps_rollup"))


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")


def _kilobytes(pattern: str, text: str) -> int:
    return sum(int(x) << 10 for x in re.findall(pattern, text, re.M))


def peak_rss_mb(pid: int | str = "self") -> float:
    """Peak resident memory of a process so far, in 10^6 bytes (VmHWM of ``/proc/pid/status``).

    `getrusage` is unsuitable, because a child's peak starts at that of its parent.
    """
    return int(kernel.pairs(f"/proc/{pid}/status")["VmHWM"].split()[0]) * 1024 / 1e6


def reset_peak(pid: int) -> None:
    """Reset a process's `peak_rss_mb` to its current resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def num_descriptors(pid: int) -> int:
    """Number of open file descriptors of a process; raises OSError as `pss_bytes` does."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_seconds(pid: int) -> float:
    """Processor time (s) used so far by a process and its descendants, including those that have
    exited and were waited for; 0 if the process itself has exited."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited since the listing
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))

    def total(pid: int) -> int:
        return ticks.get(pid, 0) + sum(map(total, children.get(pid, ())))

    return total(pid) / os.sysconf("SC_CLK_TCK")
