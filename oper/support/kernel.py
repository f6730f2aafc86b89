"""Properties of this machine, read from /proc and /sys."""

from __future__ import annotations

from pathlib import Path


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


def huge_pages(name: str) -> str:
    """Return the active setting of transparent huge pages, e.g. ``never`` of ``always [never]``.

    "" if the kernel does not have the setting `name`.
    """
    text = read(f"/sys/kernel/mm/transparent_hugepage/{name}")
    return text.partition("[")[2].partition("]")[0] or text
