"""Locks of folders and files between processes."""

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
from typing import BinaryIO

from oper.errors import InvalidInputError
from oper.support.files import errors_name

LOCK = ".lock"  # name of a folder's lock file, which contains the holder's process id and host
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold an exclusive lock of a folder inside the block; the folder is created if missing.

    The system releases the lock when the process exits, even if it is killed. A folder created here
    is removed afterwards if it is empty.

    Args:
        folder: the folder to lock.
        what: beginning of error messages.

    Raises:
        InvalidInputError: another process, named in the message, holds the lock.
        OSError: the folder cannot be created or written to.
    """
    is_new = not os.path.isdir(folder)
    with errors_name(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = _acquire(Path(folder) / LOCK, what)
    try:
        yield
    finally:
        # Unlink before unlocking, so that no other process has locked this file.
        with contextlib.suppress(OSError):
            os.unlink(Path(folder) / LOCK)
        os.close(number)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)


def _acquire(path: Path, what: str) -> int:
    """Open and lock the lock file; return its descriptor."""
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
                what, "folder", str(path.parent), "a folder that no other process has locked",
                f"{holder} has locked it: wait until it exits, or choose another folder") from None
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                warnings.warn(f"{str(path.parent)!r} is on a file system without locks: make sure "
                              "that no other process writes to it", stacklevel=2)
                return number
            os.close(number)
            raise
        os.close(number)  # its holder has removed the file between `open` and `flock`: try again


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for a lock file and hold it inside the block; remove it at the end."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(file.fileno(), path):  # otherwise its last holder has removed it: try again
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


@contextlib.contextmanager
def shared_temporary(folder: Path) -> Iterator[None]:
    """Hold a shared lock of a folder of temporary files inside the block.

    Several processes may hold it at once. The last one removes the folder at the end of its block,
    unless the block raises an error: then the contents remain for another attempt.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not is_at(file.fileno(), lock):  # its last holder has removed it
                continue
            yield
            # Another process may have removed it already.
            if lock_if_free(file) and is_at(file.fileno(), lock):
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()
            return


def lock_if_free(file: BinaryIO) -> bool:
    """Lock an open file exclusively until it is closed, unless another process has locked it;
    return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(number: int, path: Path) -> bool:
    """Whether the open file `number` is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except FileNotFoundError:
        return False
