"""Helpers for processes: glibc's allocator, forks, exiting with the parent, and free ports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

# Above these sizes, glibc returns freed blocks to the system, and reusing them causes page faults.
# PyTorch allocates large buffers in every batch and is up to 3 times faster without this.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592",
          "MALLOC_TOP_PAD_": "268435456"}
_PR_SET_PDEATHSIG = 1
_T = TypeVar("_T")
_DUTIES: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_child(held: _T, do: Callable[[_T], object]) -> None:
    """Call ``do(held)`` at the beginning of every process that is forked from this one while `held`
    exists; `do` must not refer to it. If calls fail, the others are made nonetheless; Python then
    passes the first error to ``sys.unraisablehook``, which prints it, and the child continues."""
    _DUTIES[held] = do


def when_dropped(held: object, do: Callable[..., object], *arguments: object
                 ) -> weakref.finalize[Any, Any]:
    """Call ``do(*arguments)`` when `held` is garbage-collected, but not when the process exits.

    Returns:
        The finalizer. Calling it makes the call at once, and only once.
    """
    found = weakref.finalize(held, do, *arguments)
    found.atexit = False
    return found


def _begin_child() -> None:
    first: Exception | None = None
    for held, do in list(_DUTIES.items()):
        try:
            do(held)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


os.register_at_fork(after_in_child=_begin_child)


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent exits (Linux only).

    If `parent`, the parent's process id, is given and that process has already exited, exit now.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            os._exit(1)


def free_port() -> int:
    """Return a port of the loopback interface that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def raise_file_limit() -> None:
    """Allow this process as many open files as the system does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def allocator_settings() -> Iterator[None]:
    """Start processes inside the block with the settings `MALLOC`, unless the user has set them."""
    added = MALLOC.keys() - os.environ.keys()
    os.environ.update({name: MALLOC[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def trim_memory() -> None:
    """Return this process's freed memory to the system if the C library is glibc.

    Without this call, freed blocks between allocated ones remain with the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
