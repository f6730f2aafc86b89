"""Folders and files that one process at a time writes into."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from oper.errors import InvalidInputError
from oper.support.files import named

LOCK = ".lock"  # in the folder; while it is held it names the holder
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Lock a folder, which is created if missing, against other processes that lock it.

    The system releases the lock when the process ends, however it ends. A folder created here that
    is still empty afterwards is removed.

    Args:
        folder: the folder to be written into.
        what: how an error begins.

    Raises:
        InvalidInputError: another process holds the lock; the message names it.
        OSError: the folder cannot be created or written into.
    """
    is_new = not os.path.isdir(folder)
    with named(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = _acquire(Path(folder) / LOCK, what)
    try:
        yield
    finally:
        # While the lock is held: no other process can have locked the file.
        with contextlib.suppress(OSError):
            os.unlink(Path(folder) / LOCK)
        os.close(number)
        if is_new:
            with contextlib.suppress(OSError):  # there is something in it
                os.rmdir(folder)


def _acquire(path: Path, what: str) -> int:
    """A descriptor of the lock file, locked."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(number, path):
                os.truncate(number, 0)
                os.write(number, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return number
        except BlockingIOError:
            holder = os.read(number, 300).decode(errors="replace") or "another process"
            os.close(number)
            raise InvalidInputError(
                what, "folder", str(path.parent), "one that no other process is writing into",
                f"{holder} is; wait until it ends, or name another folder") from None
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                warnings.warn(f"{str(path.parent)!r} is on a file system without locks: make sure "
                              "that no other process writes into it", stacklevel=2)
                return number
            os.close(number)
            raise
        os.close(number)  # removed by its holder between the two calls


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block, waiting for its present holder first; remove it at the
    end."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(file.fileno(), path):  # else its last holder has removed it
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


@contextlib.contextmanager
def used(folder: Path) -> Iterator[None]:
    """Use a folder of temporary files inside the block; it is made if it does not exist.

    Any number of processes may use it at once. The last one to leave removes the folder, unless an
    error ends its block: then the contents are kept for another attempt.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not is_at(file.fileno(), lock):  # its last holder has removed it
                continue
            yield
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(file.fileno(), lock):  # another one may have been faster
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.unlink()
            return


def is_at(number: int, path: Path) -> bool:
    """Whether an open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except FileNotFoundError:
        return False
