"""Helpers for child processes: ending with their parent, and free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when the one that started it has ended (Linux).

    With `parent`, the id of that process, this one also ends if its parent has already ended.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            os._exit(1)


def free_port() -> int:
    """A port of this machine's loopback interface that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
