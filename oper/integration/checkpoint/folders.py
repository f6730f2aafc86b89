"""The folders of a checkpoint: itself, the next one while it is saved, and the previous one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from oper.errors import InvalidInputError
from oper.integration.checkpoint.delta_files import remove_deltas
from oper.integration.checkpoint.files import CHECKSUMS, METADATA, present_and_previous

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
        holds something else than a checkpoint, or than files of one that has not been completed.
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
