"""Properties of this machine, read from /proc and /sys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # bytes; version 1 reports a number near 2^63 if there is no limit


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


def memory_limit() -> int:
    """Return the lowest memory limit of this process's control group and of those that contain it,
    in bytes; 0 if there is none."""
    return min((limit for limit, _ in _memory_groups()), default=0)


def available_memory() -> int:
    """Return how many bytes this process can still allocate: the machine's free memory, or what the
    limits of its control groups leave. Cached files count as free, since the kernel removes them
    when memory is needed."""
    return min([memory_bytes("MemAvailable"), *(limit - used for limit, used in _memory_groups())])


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and used memory, without cached files, in bytes of each control group with a
    limit that this process belongs to."""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, most, current = _CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, most, current = (f"{_CGROUPS}/memory", "memory.limit_in_bytes",
                                   "memory.usage_in_bytes")
        else:
            continue
        # A container may see the path of its group outside of it, but its own group at the root.
        for folder in (group := PurePosixPath(path), *group.parents):
            limit = read(f"{root}/{folder}/{most}")
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                stat = read(f"{root}/{folder}/memory.stat")
                # Version 1 counts the groups within this one only in entries named total_*.
                of = {key.removeprefix("total_"): int(n)
                      for key, n in map(str.split, stat.splitlines())}
                used = int(read(f"{root}/{folder}/{current}") or 0)
                yield int(limit), used - of.get("active_file", 0) - of.get("inactive_file", 0)


def huge_pages(name: str) -> str:
    """Return the active setting of transparent huge pages, e.g. ``never`` of ``always [never]``.

    "" if the kernel does not have the setting `name`.
    """
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
