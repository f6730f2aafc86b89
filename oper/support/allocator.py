"""Settings of glibc's allocator for processes that run models."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

# Above these sizes, glibc returns freed blocks to the system, and reusing them causes page faults.
# PyTorch allocates large buffers in every batch and is up to 3 times faster without this.
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
    """Return this process's freed memory to the system if the C library is glibc.

    Without this call, freed blocks between allocated ones remain with the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
