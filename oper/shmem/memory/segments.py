"""Anonymous shared memory: creation, mapping, and the error if there is too little of it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path

import torch

from oper.errors import OperError
from oper.shmem.settings import SEND_BUFFER_ENV
from oper.tables import format_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_segment(num_bytes: int, name: str = "oper") -> int:
    """Create an anonymous memory file of fixed size; returns its descriptor. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, num_bytes: int, writable: bool) -> int:
    """Map a segment; returns its address. Raises OSError."""
    return _address(int(torch.ops.oper.map_segment(fd, num_bytes, writable)))


def map_over_segment(address: int, fd: int, offset: int, num_bytes: int, writable: bool) -> None:
    """Map part of a segment at `address`, in place of pages mapped there. Raises OSError."""
    _address(int(torch.ops.oper.map_over_segment(address, fd, offset, num_bytes, writable)))


def _address(found: int) -> int:
    if -4096 < found < 0:
        raise OSError(-found, os.strerror(-found))
    return found


def page_kind(huge_bytes: int, num_bytes: int) -> str:
    """Describe the page sizes of `num_bytes` bytes, of which `huge_bytes` are in huge pages."""
    share = huge_bytes / num_bytes if num_bytes else 0.0
    return "2MiB" if share > 0.99 else "4KiB" if share < 0.01 else f"{share:.0%} 2MiB, rest 4KiB"


def no_segment(what: str, num_bytes: int, error: OSError, num_send_buffer_bytes: int = 0
               ) -> OperError:
    """Return the error for memory that could not be allocated, with the limit and a remedy.

    Args:
        what: start of the message, e.g. ``"cannot create the shared arena"``.
        num_bytes: requested bytes.
        error: the system's error.
        num_send_buffer_bytes: requested bytes that are for send buffers, which a setting limits.
    """
    limit, todo = _limit(error)
    if num_send_buffer_bytes:
        todo += (f", or set {SEND_BUFFER_ENV} below {num_send_buffer_bytes // 2}, since "
                 f"{format_bytes(num_send_buffer_bytes)} of these bytes are for send buffers")
    return OperError(what, "bytes", num_bytes, limit, f"{todo} ({error.strerror or error})")


def _limit(error: OSError) -> tuple[str, str]:
    """Return the limit that an allocation has exceeded, and how to raise it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"a free file descriptor (RLIMIT_NOFILE={most})", "raise `ulimit -n`"
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"files of at most RLIMIT_FSIZE={most} bytes", "raise `ulimit -f`"
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if error.errno == errno.ENOMEM and most != resource.RLIM_INFINITY:
        return (f"address space within RLIMIT_AS={most} bytes, {_used_address_space()} of them in "
                "use", "raise `ulimit -v`")
    return ("enough free memory within the limit of this process's control group",
            "end other programs, raise the limit of the control group, or use more ranks")


def _used_address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
