"""The folder of work in progress next to an output.

Any number of processes of one job (the same inputs and settings) can use it together; while one
does, processes of other jobs are refused. Each user holds a shared lock on a file in the folder,
which the kernel releases when the process exits or dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from oper.errors import InvalidInputError, OperError
from oper.support.files import write_text
from oper.support.locks import exclusive, lock_if_free

_log = logging.getLogger(__name__)
_ABOUT = "job.json"
OUT = "out"  # the output, until it is moved to its place
_VERSION = 2  # increase it if the folders of earlier code cannot be continued


def work_folder(target: Path) -> Path:
    return target.parent / f".{target.name}.work"


class WorkFolder:
    """``.NAME.work`` next to the output NAME, used by the processes of one job at a time."""

    def __init__(self, target: Path, job: str) -> None:
        """Use the work folder of the output `target` for the job whose identity is `job`."""
        self.path = work_folder(target)
        self._target, self._job = target, job

    @contextlib.contextmanager
    def opened(self, force: bool, begin: Callable[[Path], None]) -> Iterator[None]:
        """Use the folder during the block; it is created, or contains earlier work of this job.

        If the block raises `OperError`, the last user removes the folder. After other exceptions or
        the death of the process, a later run of the same job resumes in it.

        Args:
            force: remove unfinished work of another job, unless that job is running.
            begin: fills a newly created folder.

        Raises:
            InvalidInputError: another job is running, or has left unfinished work and `force` is
                not set.
        """
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self.exclusive():
            about = self._about()
            if not self._is_ours(about):
                is_spent = about.get("job") == self._job
                self._check_unused(about, force or is_spent)
                if is_spent:
                    _log.info("%s is of another release, or its output has been moved: starting "
                              "from scratch", self.path)
                self._make(begin)
            used = self._use()
        try:
            yield
        except OperError:
            with self.exclusive():
                used.close()
                if self._is_ours(self._about()) and not self._is_used():
                    self._remove()
            raise
        finally:
            used.close()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Use the folder, which another process of this job has opened, while the block runs.

        Raises:
            FileNotFoundError: no process has opened it, or the job is finished.
        """
        with self.exclusive():
            if not self._is_ours(self._about()):
                raise FileNotFoundError(str(self.path))
            used = self._use()
        with used:
            yield

    def finish(self, put: Callable[[], None]) -> None:
        """Call `put`, which moves the output to its place, and remove the folder; locked by
        `exclusive`."""
        with self.exclusive():
            put()
            self._remove()

    def clean(self) -> None:
        """Remove what an earlier process of this job left behind because it was killed just after
        it had moved the output to its place; does nothing if the output's folder is read-only."""
        if self._lock.exists() or self.path.exists() or self._waste():
            with contextlib.suppress(OSError), self.exclusive():
                about = self._about()
                if about.get("job") == self._job and not self._is_ours(about) and (
                        not self._is_used()):
                    self._remove()
                self._remove_waste()

    @property
    def _lock(self) -> Path:
        return self._target.parent / f".{self._target.name}.lock"

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Exclude other processes from opening or removing the folder and replacing the output."""
        return exclusive(self._lock)

    def _about(self) -> dict[str, Any]:
        """Read job, host and process that created the folder; empty if it does not exist."""
        try:
            found = json.loads((self.path / _ABOUT).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"job": "damaged"}

    def _is_ours(self, about: dict[str, Any]) -> bool:
        """Whether this job can use the folder's files, whose output has not been moved away."""
        return (about.get("job") == self._job and about.get("version") == _VERSION
                and (self.path / OUT).is_dir())

    def _use(self) -> BinaryIO:
        """Mark the folder as in use until the returned file is closed."""
        file = (self.path / _ABOUT).open("r+b")
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def _is_used(self) -> bool:
        with (self.path / _ABOUT).open("r+b") as file:
            return not lock_if_free(file)

    def _check_unused(self, about: dict[str, Any], force: bool) -> None:
        """Raise InvalidInputError if another job is running, or its work is not to be removed."""
        if about and self._is_used():
            who = f"process {about.get('process')} on {about.get('host')}"
            raise InvalidInputError(
                "cannot preprocess", "output", str(self._target),
                "a folder that no other run is writing",
                f"wait until {who} exits, or choose another folder: that process has other inputs "
                f"or settings, or is of another release, and uses {str(self.path)!r}")
        if about and not force:
            raise InvalidInputError("cannot continue an interrupted run", "work", str(self.path),
                                    "the same inputs and settings",
                                    "pass these again, or start from scratch with --force "
                                    "(force=True)")

    def _make(self, begin: Callable[[Path], None]) -> None:
        self._remove()
        try:
            self.path.mkdir()
            begin(self.path)
        except BaseException:
            self._remove()
            raise
        write_text(self.path / _ABOUT, json.dumps({
            "job": self._job, "version": _VERSION, "host": socket.gethostname(),
            "process": os.getpid()}))

    def _remove(self) -> None:
        """Remove the folder, renamed first so that other processes no longer find it."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, f"{self.path}.{os.getpid()}.{time.monotonic_ns()}")
        self._remove_waste()

    def _waste(self) -> list[Path]:
        """Return folders that are being removed. Locked by `exclusive`, no process removes them."""
        name = re.compile(rf"{re.escape(self.path.name)}\.\d+\.\d+")
        return [x for x in self.path.parent.glob(".*") if name.fullmatch(x.name)]

    def _remove_waste(self) -> None:
        for folder in self._waste():
            for _ in range(3):  # another process may add a file that it was about to create
                shutil.rmtree(folder, ignore_errors=True)
