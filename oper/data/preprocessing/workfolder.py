"""The folder of work in progress next to an output, and the processes that use it.

Any number of processes of one job (the same inputs and settings) work in it together; a process of
another job is refused while one of them runs. Each holds a shared lock on a file inside, which the
kernel releases when the process ends, however it ends.
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

from oper.errors import InvalidInputError, OperError
from oper.support.files import write_text
from oper.support.locks import alone

_ABOUT = "job.json"


def work_folder(target: Path) -> Path:
    """The folder of work in progress of the output `target`."""
    return target.parent / f".{target.name}.work"


class WorkFolder:
    """``.NAME.work`` next to the output NAME, used by the processes of one job at a time."""

    def __init__(self, target: Path, job: str) -> None:
        """The work folder of the output `target`, for the job with the digest `job`."""
        self.path = work_folder(target)
        self._target, self._job = target, job

    @contextlib.contextmanager
    def opened(self, force: bool, begin: Callable[[Path], None]) -> Iterator[None]:
        """Use the folder inside the block: a new one, or an existing one of this same job.

        If an `OperError` leaves the block, the folder is removed; after any other end, such as by a
        signal, the same job can continue in it.

        Args:
            force: drop unfinished work that another job, which has ended, left there.
            begin: fills a new folder.

        Raises:
            InvalidInputError: another job is at work, or has left unfinished work without `force`.
        """
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self.alone():
            about = self._about()
            if about.get("job") != self._job:
                self._check_unused(about, force)
                self._make(begin)
            used = self._use()
        try:
            yield
        except OperError:
            with self.alone():
                used.close()
                if self._about().get("job") == self._job and not self._is_used():
                    self._remove()
            raise
        finally:
            used.close()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Use the folder, which another process of this job has opened, inside the block.

        Raises:
            FileNotFoundError: none has done so, or the work is finished.
        """
        with self.alone():
            if self._about().get("job") != self._job:
                raise FileNotFoundError(str(self.path))
            used = self._use()
        with used:
            yield

    def finish(self, put: Callable[[], None]) -> None:
        """Put the output in its place by calling `put`, and remove the folder.

        No other process reads the output in the meantime (`alone`).
        """
        with self.alone():
            put()
            self._remove()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """A block during which no other process reads, enters or removes the folder, or replaces
        the output."""
        return alone(self._target.parent / f".{self._target.name}.lock")

    def _about(self) -> dict[str, Any]:
        """The job, host and process that began the work in the folder; empty if there is none."""
        try:
            found: dict[str, Any] = json.loads((self.path / _ABOUT).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError:
            return {"job": "damaged"}
        return found

    def _use(self) -> BinaryIO:
        """An open file that marks the folder as in use until it is closed."""
        file = (self.path / _ABOUT).open("r+b")
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def _is_used(self) -> bool:
        with (self.path / _ABOUT).open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _check_unused(self, about: dict[str, Any], force: bool) -> None:
        """Raise InvalidInputError if another job needs the contents of the folder."""
        if about and self._is_used():
            who = f"process {about.get('process')} on {about.get('host')}"
            raise InvalidInputError(
                "cannot preprocess", "output", str(self._target),
                "a folder that no other run is writing",
                f"a run with other inputs or settings, started by {who}, uses "
                f"{str(self.path)!r}: wait until it ends, or choose another folder")
        if about and not force:
            raise InvalidInputError("cannot continue an interrupted run", "work", str(self.path),
                                    "the same inputs and settings",
                                    "pass these again, or start from scratch with --force")

    def _make(self, begin: Callable[[Path], None]) -> None:
        self._remove()
        try:
            self.path.mkdir()
            begin(self.path)
        except BaseException:
            self._remove()
            raise
        write_text(self.path / _ABOUT, json.dumps({
            "job": self._job, "host": socket.gethostname(), "process": os.getpid()}))

    def _remove(self) -> None:
        """Remove the folder; once it is renamed no process can add files to it."""
        waste = self.path.with_name(f"{self.path.name}.{os.getpid()}.{time.monotonic_ns()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, waste)
        for _ in range(3):  # a process that looks for work may just have made a file
            shutil.rmtree(waste, ignore_errors=True)
