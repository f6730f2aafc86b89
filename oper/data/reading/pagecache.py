"""Prevents files that are read or written once from filling the page cache.

A log that is large compared with the memory evicts everything else, and gigabytes of dirty pages
finally make every writer wait for the disk. Pages that are released at once are also reused, which
costs a fraction of fresh ones, especially on virtual machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from oper.data.reading import store

_STEP = 1 << 23         # bytes between two calls
_SHARE_OF_MEMORY = 8    # smaller logs may stay in the cache for the next reader


def is_large(paths: Sequence[str]) -> bool:
    """Whether these files together take more than an eighth of this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(store.size(p) for p in paths) * _SHARE_OF_MEMORY > memory


class Passing:
    """Keeps a file that is read or written once, from `start` on, out of the page cache.

    The kernel is told regularly that the pages before the current position are no longer needed. It
    drops the clean ones and begins to write the dirty ones, which a later call drops; no call
    waits. This is only advice: on a system without such a call nothing happens.
    """

    def __init__(self, path: str | os.PathLike[str], start: int = 0, use: bool = True) -> None:
        """Follow the file `path`, which exists; with `use` false do nothing."""
        can = use and hasattr(os, "posix_fadvise") and not store.is_url(path)
        self._file = os.open(path, os.O_RDONLY) if can else -1
        self._start = self._at = self._told = start

    def advance(self, count: int) -> None:
        """Note that `count` more bytes were read or written."""
        self._at += count
        if self._at - self._told >= _STEP:
            self._tell()

    def _tell(self) -> None:
        self._told = self._at
        if self._file >= 0:
            with contextlib.suppress(OSError):
                # From the start each time: pages that were dirty, or only partly passed, go now.
                os.posix_fadvise(self._file, self._start, self._at - self._start,
                                 os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Note that the end is reached."""
        self._tell()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
