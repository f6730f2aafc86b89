"""Helpers for child processes: exiting with their parent, and free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent exits (Linux only).

    If `parent`, the parent's process id, is given and that process has already exited, exit now.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            os._exit(1)


def free_port() -> int:
    """Return a port of the loopback interface that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
