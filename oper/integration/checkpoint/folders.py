"""The folders of a checkpoint: itself, the next one while it is saved, and the previous one; and
steps of saving or loading that succeed on all ranks or fail on all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from oper.errors import (
    DeadlineError,
    FileFormatError,
    InvalidInputError,
    OperError,
    PeerLostError,
    fail,
    require,
)
from oper.integration.checkpoint.delta_files import base_of, remove_deltas
from oper.integration.checkpoint.files import (
    CHECKSUMS,
    METADATA,
    open_folder,
    path_of,
    present_and_previous,
)
from oper.shmem.group.groups import Group, SingleGroup, default_group
from oper.shmem.rows import LogicalRows
from oper.support.files import disk_full_error

_T = TypeVar("_T")
_FILES = re.compile(
    rf"__\d+_\d+\.distcp|{re.escape(METADATA)}(\.tmp)?|(\..*)?{re.escape(CHECKSUMS)}(\..*\.tmp)?")


class Folders:
    """The folders that saving a checkpoint uses.

    Args:
        path: the checkpoint's folder, without symbolic links.

    Attributes:
        saving: the next checkpoint until all ranks have written it.
        previous: the last checkpoint until the next one is in place.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.previous = present_and_previous(path)
        self.saving = path.with_name(f"{path.name}.saving")

    def check(self, what: str) -> None:
        """Raise InvalidInputError, beginning with `what`, if a folder that is removed or replaced
        holds anything but a checkpoint, or files of one that has not been completed.
        """
        for folder in (self._path, self.previous, self.saving):
            if os.path.lexists(folder) and not (
                    _has_only_files(folder)
                    or (folder != self.saving and _is_checkpoint(folder))):
                raise InvalidInputError(
                    what, "folder", str(folder),
                    "an earlier checkpoint, an empty folder, or none",
                    "it is not a checkpoint and would be removed: move it, or choose another folder"
                    if folder == self._path else
                    "it would be removed: move it, or choose another folder for the checkpoint")

    def make_room(self) -> None:
        """Prepare the folder `saving`; raises the errors of `check`."""
        self.check("cannot save a checkpoint")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_checkpoint(self._path) and _is_checkpoint(self.previous):
            self.previous.rename(self._path)  # after a crash between the renames of `put_in_place`
        self._remove(self.saving, self.previous)

    def put_in_place(self) -> None:
        """Replace the checkpoint by the one in `saving`."""
        if self._path.exists():
            self._path.rename(self.previous)
        self.saving.rename(self._path)
        _sync(self._path.parent)
        self._remove(self.previous)

    def remove(self) -> None:
        """Remove the checkpoint and its deltas; raises the errors of `check`."""
        self.check("cannot remove a checkpoint")
        self._remove(self._path, self.previous, self.saving)
        remove_deltas(self._path)

    @staticmethod
    def _remove(*folders: Path) -> None:
        for folder in folders:
            if folder.exists():
                shutil.rmtree(folder)


def _is_checkpoint(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / METADATA).exists()


def _has_only_files(folder: Path) -> bool:
    """Whether a folder is empty or contains only files that a checkpoint has or had for a time."""
    return not folder.is_symlink() and folder.is_dir() and all(
        _FILES.fullmatch(x.name) for x in folder.iterdir())


def _sync(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(path: Path) -> Path:
    """Return `path` if it is a complete checkpoint, else the folder of the previous checkpoint.

    Raises:
        InvalidInputError: neither is complete.
    """
    for candidate in present_and_previous(path):
        if (candidate / METADATA).exists():
            return candidate
    raise InvalidInputError("cannot load a checkpoint", "folder", str(path),
                            f"a complete checkpoint with {METADATA}",
                            "name the folder that save_checkpoint wrote")


# ---- steps of all ranks --------------------------------------------------------------------------


class Ranks:
    """Runs the steps of saving or loading so that each succeeds on all ranks or fails on all.

    Args:
        tables: the model's collections of tables; if any are sharded, their group identifies a lost
            rank. None = the steps are run on this rank only, without communication.
        what: start of error messages, such as "cannot save a checkpoint".
        path: the checkpoint's folder, for error messages.

    Attributes:
        rank: this rank.
        world_size: number of ranks W.
        first: whether this is rank 0.
    """

    def __init__(self, tables: Sequence[LogicalRows] | None, what: str, path: Path) -> None:
        self._group: Group = SingleGroup() if tables is None else default_group()
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self.first = self.rank == 0
        self._what, self._path = what, path
        self._tables = next((t for t in tables or () if not t.group.is_local
                             and t.group.world_size == self.world_size), None)
        self._opened: tuple[str, str] | None = None

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in rank order."""
        return (self._tables or self._group).all_gather(value)

    def step(self, action: Callable[[], _T]) -> list[_T]:
        """Run `action` on every rank and return all results in rank order. Collective.

        If it fails on any rank, all ranks raise the same error.
        """
        result: Any = None
        problem: Exception | None = None
        try:
            result = action()
        except (PeerLostError, DeadlineError):
            raise
        except Exception as error:
            problem = error
        everyone = self.all_gather((result, self._description(problem)))
        found = {rank: described for rank, (_, described) in enumerate(everyone) if described}
        if not found:
            return [value for value, _ in everyone]
        kind, text = next(iter(found.values()))
        if len(set(found.values())) == 1 and kind is not OperError:
            raise kind(text) from problem
        raise kind(fail(self._what, "folder", str(self._path), "success on every rank",
                        "; ".join(f"rank {r}: {t}" for r, (_, t) in found.items()))) from problem

    def open(self, find: Callable[[], Path], stack: contextlib.ExitStack) -> tuple[Path, Path]:
        """Open a checkpoint's folder until `stack` is closed. Collective.

        Args:
            find: returns the folder.
            stack: closes it.

        Returns:
            The folder, and a path that continues to refer to it when another one replaces it (see
            `path_of`). In errors of `step`, this path has the folder's name.

        Raises:
            InvalidInputError: ranks have found different checkpoints.
        """
        found: list[tuple[Path, Path]] = []

        def open_it() -> str:
            folder = find()
            number = open_folder(folder)
            stack.callback(os.close, number)
            found.append((folder, path_of(number)))
            self._opened = str(path_of(number)), str(folder)
            return base_of(path_of(number))

        bases = self.step(open_it)
        require(self._what, "load again", ("checkpoints that the ranks have found", bases,
                                           len(set(bases)) == 1, "the same one on all ranks; "
                                           "another run has just replaced it"))
        return found[0]

    def _description(self, error: Exception | None) -> tuple[type[OperError], str] | None:
        """Return the class and text of an error to send to the other ranks."""
        if error is None:
            return None
        kinds: tuple[type[OperError], ...] = (FileFormatError, InvalidInputError)
        kind = next((k for k in kinds if isinstance(error, k)), OperError)
        text = str(disk_full_error(error) or error) or type(error).__name__
        return kind, text if self._opened is None else text.replace(*self._opened)
