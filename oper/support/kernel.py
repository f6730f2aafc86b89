"""Facts about this machine from the kernel's files in /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def read(path: str) -> str:
    """A file's text without surrounding white space; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def pairs(path: str) -> dict[str, str]:
    """``key : value`` lines of a file; the first one where a key repeats."""
    found: dict[str, str] = {}
    for line in read(path).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def memory_bytes(name: str) -> int:
    """Bytes in a line of /proc/meminfo, such as ``MemTotal``; 0 if the line is missing."""
    return int(pairs("/proc/meminfo").get(name, "0").split()[0]) * 1024


def huge_pages(name: str) -> str:
    """The huge-page setting in force, e.g. ``never`` of ``always madvise [never]``.

    Empty if the kernel has no such setting.
    """
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
