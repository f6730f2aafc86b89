"""Properties of this machine, read from /proc and /sys."""

from __future__ import annotations

from pathlib import Path

# Files of version 2 of control groups; those of version 1 are in its folder "memory".
_GROUP = "/sys/fs/cgroup"


def read(path: str) -> str:
    """Return a file's text without surrounding white space; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def pairs(path: str) -> dict[str, str]:
    """Return the ``key : value`` lines of a file; of a repeated key, the first value."""
    found: dict[str, str] = {}
    for line in read(path).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def memory_bytes(name: str) -> int:
    """Return an entry of /proc/meminfo, such as ``MemTotal``, in bytes; 0 if it is missing."""
    return int(pairs("/proc/meminfo").get(name, "0").split()[0]) * 1024


def memory_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None if there is none."""
    text = read(f"{_GROUP}/memory.max") or read(f"{_GROUP}/memory/memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def used_bytes_of_group() -> int:
    """Return the bytes of memory that this process's control group uses, without cached files,
    which the kernel removes when memory is needed; 0 if it is not known."""
    used = read(f"{_GROUP}/memory.current") or read(f"{_GROUP}/memory/memory.usage_in_bytes")
    stat = read(f"{_GROUP}/memory.stat") or read(f"{_GROUP}/memory/memory.stat")
    # Version 1 counts groups within this one only in entries named total_*.
    of = {key.removeprefix("total_"): int(n) for key, n in map(str.split, stat.splitlines())}
    return int(used or 0) - of.get("active_file", 0) - of.get("inactive_file", 0)


def huge_pages(name: str) -> str:
    """Return the active setting of transparent huge pages, e.g. ``never`` of ``always [never]``.

    "" if the kernel does not have the setting `name`.
    """
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
