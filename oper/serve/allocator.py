"""How glibc's allocator is set for processes that run models."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

# glibc gives freed blocks above these sizes back and takes them anew, page fault by page fault.
# PyTorch allocates its large buffers in every batch and is up to 3 times faster without that.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592",
          "MALLOC_TOP_PAD_": "268435456"}


@contextlib.contextmanager
def for_children() -> Iterator[None]:
    """Start processes inside the block with the settings `MALLOC`, unless the user has set them."""
    added = MALLOC.keys() - os.environ.keys()
    os.environ.update({name: MALLOC[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def give_back() -> None:
    """Return this process's freed memory to the system, if the C library (glibc) can.

    Otherwise freed blocks between others stay with the process, even if no more blocks of their
    size are requested.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
