"""Keep files that are read or written once out of the page cache.

A log that is large compared with the memory would evict everything else, and gigabytes of dirty
pages would finally block every writer. Released pages are also reused, which is cheaper than
allocating new ones, especially on virtual machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from oper.data.reading import store

_STEP = 1 << 23         # bytes between two calls of posix_fadvise
_SHARE_OF_MEMORY = 8    # logs smaller than 1/8 of the memory may stay cached for the next reader


def is_large(paths: Sequence[str]) -> bool:
    """Whether the total size of `paths` exceeds an eighth of this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(store.size(p) for p in paths) * _SHARE_OF_MEMORY > memory


class PageDropper:
    """Keeps a file that is read or written sequentially from `start` on out of the page cache.

    Every 8 MiB, posix_fadvise(DONTNEED) is called for all pages before the current position. The
    kernel drops clean pages and starts to write dirty ones, which a later call drops; no call
    blocks. Without posix_fadvise nothing happens.
    """

    def __init__(self, path: str | os.PathLike[str], start: int = 0, use: bool = True) -> None:
        """Follow the existing file `path`; if `use` is false, all methods do nothing."""
        can = use and hasattr(os, "posix_fadvise") and not store.is_url(path)
        self._file = os.open(path, os.O_RDONLY) if can else -1
        self._start = self._at = self._dropped = start

    def advance(self, count: int) -> None:
        """Note that `count` more bytes were read or written."""
        self._at += count
        if self._at - self._dropped >= _STEP:
            self._drop()

    def _drop(self) -> None:
        self._dropped = self._at
        if self._file >= 0:
            with contextlib.suppress(OSError):
                # From the start each time: pages that were dirty until now can be dropped.
                os.posix_fadvise(self._file, self._start, self._at - self._start,
                                 os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Release all pages up to the current position, and stop following the file."""
        self._drop()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
