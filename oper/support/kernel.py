"""Properties of this machine, read from /proc and /sys."""

from __future__ import annotations

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
    found = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = f"{_CGROUPS}/memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see the path of its group outside of it, but its own group at the root.
        for folder in (group := PurePosixPath(path), *group.parents):
            text = read(f"{root}/{folder}/{name}")
            if text.isdigit() and int(text) < _NO_LIMIT:
                found.append(int(text))
    return min(found, default=0)


def huge_pages(name: str) -> str:
    """Return the active setting of transparent huge pages, e.g. ``never`` of ``always [never]``.

    "" if the kernel does not have the setting `name`.
    """
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
