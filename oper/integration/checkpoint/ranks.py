"""Steps of saving or loading a checkpoint that succeed on all ranks or fail on all."""

from __future__ import annotations

import contextlib
import os
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
from oper.integration.checkpoint.delta_files import base_of
from oper.integration.checkpoint.files import open_folder, path_of
from oper.shmem.group.groups import Group, SingleGroup, default_group
from oper.shmem.rows import LogicalRows
from oper.support.files import disk_full_error

_T = TypeVar("_T")


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
