"""What the kernel tells of this machine in the files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def read(path: str) -> str:
    """A file's text without the space around it; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def pairs(path: str) -> dict[str, str]:
    """``key : value`` lines of a file; the first of equal keys."""
    found: dict[str, str] = {}
    for line in read(path).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def memory_bytes(name: str) -> int:
    """A line of /proc/meminfo, such as ``MemTotal``; 0 where the kernel does not say."""
    return int(pairs("/proc/meminfo").get(name, "0").split()[0]) * 1024


def huge_pages(name: str) -> str:
    """The choice in force of a huge-page setting: ``never`` of ``always madvise [never]``; empty
    where the kernel has no such setting."""
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
