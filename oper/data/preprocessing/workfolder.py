"""The folder of work in progress beside an output, and the lock that its users hold.

Any number of processes of one job (the same inputs and settings) work in it together; a process of
another job is kept out while one of them lives. The kernel releases the lock of a process that has
died, whatever it died of, so that a lock file that was left behind bars nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from oper.errors import InvalidInputError, OperError, fail
from oper.support.files import write_text
from oper.support.locks import is_at

_ABOUT = "job.json"
_MOMENT_S = 0.05  # longer than anybody holds the lock alone for looking around


def work_folder(target: Path) -> Path:
    """The folder of work in progress of the output `target`."""
    return target.parent / f".{target.name}.work"


class WorkFolder:
    """``.NAME.work`` beside the output NAME, used by the processes of one job at a time."""

    def __init__(self, target: Path, job: str) -> None:
        """The work folder of the output `target`, for the job with the digest `job`."""
        self.path = work_folder(target)
        self._target, self._job = target, job
        self._lock = _Lock(target.parent / f".{target.name}.lock")

    @contextlib.contextmanager
    def opened(self, force: bool, begin: Callable[[Path], None]) -> Iterator[None]:
        """Work in the folder inside the block: a new one, or that of this very job.

        An error of the package's own that leaves the block takes the folder along; after any other
        end, as by a signal, the same job goes on in it.

        Args:
            force: drop what another job, which has ended, has left there.
            begin: fills a new folder.

        Raises:
            InvalidInputError: another job is at work, or has left unfinished work without `force`.
        """
        self._target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._enter(force, begin)
            yield
        except OperError:
            self._leave(remove=True)
            raise
        finally:
            self._leave()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Work in the folder inside the block, which a process of this job has opened.

        Raises:
            FileNotFoundError: none has, or the work is done.
        """
        try:
            self._lock.acquire(alone=False)
            if self._about().get("job") != self._job:
                raise FileNotFoundError(str(self.path))
            yield
        finally:
            self._leave()

    def remove(self) -> None:
        """Remove the folder; under another name nobody adds a file meanwhile."""
        waste = self.path.with_name(f"{self.path.name}.{os.getpid()}.{time.monotonic_ns()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, waste)
        for _ in range(3):  # a process that looks for work may just have made a file
            shutil.rmtree(waste, ignore_errors=True)

    def _about(self) -> dict[str, Any]:
        """Who began the work in the folder; empty where nobody has."""
        try:
            found: dict[str, Any] = json.loads((self.path / _ABOUT).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError:
            return {"job": "damaged"}
        return found

    def _enter(self, force: bool, begin: Callable[[Path], None]) -> None:
        seen = ""
        while True:
            alone = self._lock.acquire()
            about = self._about()
            is_mine = about.get("job") == self._job
            if not alone and is_mine:
                return
            if not alone and about:
                raise self._at_work(about)
            if not alone or (about and not is_mine and seen != about["job"]):
                # Somebody is about to begin, or has begun this moment and is between two locks.
                seen = about.get("job", "")
                self._lock.release()
                time.sleep(_MOMENT_S)
                continue
            if about and not is_mine and not force:
                raise InvalidInputError(
                    fail("cannot go on with an interrupted run", "work", str(self.path),
                         "the same inputs and settings",
                         "give these again, or pass --force to begin anew"))
            if not is_mine:
                self._make(begin)
            self._lock.share()
            if self._lock.is_current() and self._about().get("job") == self._job:
                return
            self._lock.release()

    def _make(self, begin: Callable[[Path], None]) -> None:
        self.remove()
        try:
            self.path.mkdir()
            begin(self.path)
        except BaseException:
            self.remove()
            raise
        write_text(self.path / _ABOUT, json.dumps({
            "job": self._job, "host": socket.gethostname(), "process": os.getpid()}))

    def _at_work(self, about: dict[str, Any]) -> InvalidInputError:
        who = f"process {about.get('process')} on {about.get('host')}"
        return InvalidInputError(
            fail("cannot preprocess", "output", str(self._target),
                 "a folder that no other run is writing",
                 f"one with other inputs or settings, begun by {who}, is at work in "
                 f"{str(self.path)!r}: wait for its end, or choose another folder"))

    def _leave(self, remove: bool = False) -> None:
        """Release the lock; the last one removes its file and, with `remove`, the folder."""
        self._lock.release()
        if not self._lock.path.exists() or not self._lock.acquire(wait=False):
            return
        about = self._about()
        if remove and about.get("job") == self._job:
            self.remove()
        self._lock.path.unlink(missing_ok=True)
        self._lock.release()


class _Lock:
    """A lock file that one process holds alone, or several share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def acquire(self, alone: bool = True, wait: bool = True) -> bool:
        """Hold the lock; whether alone.

        Args:
            alone: try so first.
            wait: where others hold it share it with them, once none holds it alone.
        """
        while True:
            # The file of a lock that is only to be shared has been made by whoever shares it.
            self._file = self.path.open("ab" if alone else "r+b")
            if alone and self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                if self.is_current():
                    return True
            elif not wait:
                break
            elif self._flock(fcntl.LOCK_SH) and self.is_current():
                return False
            self.release()  # its last holder has removed the file
        self.release()
        return False

    def share(self) -> None:
        """Let others in; for a moment nobody holds the lock, see `is_current`."""
        self._flock(fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Whether the file that is held is the one that others find."""
        assert self._file is not None
        return is_at(self._file.fileno(), self.path)

    def release(self) -> None:
        """Hold the lock no longer, if at all."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flock(self, how: int) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, how)
        except BlockingIOError:
            return False
        return True
