"""Follows what a training run saves, for a server: whole weights, then the changes of each step.

A whole checkpoint begins a chain, which its deltas continue one by one (see `delta_files`). A delta
that is missing, doubled, out of order or damaged is refused by name, and nothing after it is taken:
the next whole checkpoint begins a new chain.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.errors import FileFormatError
from oper.integration.checkpoint.delta_files import (
    Delta,
    base_of,
    folder_of,
    look,
    open_part,
)
from oper.support.files import ArrayFile


@dataclass(frozen=True, slots=True)
class Change:
    """What one delta changes.

    Attributes:
        number, step: its place in the chain; the training step that it holds.
        time_s: when that step had been made, on the clock of `time.time`.
        rows: by table, ids int64 [n] and rows float [n, dim]; a delta's are read from its files
            whenever they are asked for, table by table.
        dense: weights beside the tables, by ``state_dict`` key.
    """

    number: int
    step: int
    time_s: float
    rows: Mapping[str, tuple[np.ndarray, torch.Tensor]]
    dense: dict[str, torch.Tensor]


class Follower:
    """Follows a training run in a folder.

    Args:
        newest: finds the newest whole weights, a checkpoint's folder or a file; raises
            FileNotFoundError or FileFormatError while there are none.
        in_service: whether the weights that it finds now are in service, or about to be; if so,
            there must be some.
    """

    def __init__(self, newest: Callable[[], Path], in_service: bool = True) -> None:
        self._newest = newest
        self._seen = self._stamp(newest()) if in_service else (None,)
        self._begin()

    def _begin(self) -> None:
        self._next, self._step = 0, -1
        self._refused = ""

    @staticmethod
    def _stamp(path: Path) -> tuple[Any, ...]:
        found = path.stat()
        return path, found.st_ino, found.st_mtime_ns, found.st_size, (
            base_of(path) if path.is_dir() else "")

    def has_whole(self) -> bool:
        """Whether there are new whole weights, since the start or the last call that found some.

        The caller publishes them; `changes` then continues from them.
        """
        try:
            now = self._stamp(self._newest())
        except (FileNotFoundError, FileFormatError):  # being replaced
            return False
        # A checkpoint's folder is never modified, only replaced.
        if now == self._seen:
            return False
        self._seen = now
        self._begin()
        return True

    def changes(self) -> Iterator[Change]:
        """The deltas that have become complete since, in order; call `applied` after each.

        Raises:
            FileFormatError: the chain is broken; raised once, then there are no changes until
                `has_whole` is true.
        """
        place = self._seen[0]
        if self._refused or place is None or not place.is_dir():
            return
        try:
            base = base_of(place)
            if base != self._seen[-1]:
                return  # replaced just now
            folder = folder_of(place) / base
            while (at := folder / f"{self._next:06d}").is_dir():
                delta = look(at, self._next)
                if not delta.is_complete:
                    return
                yield self._read(delta)
                if self._next == delta.number:  # not applied
                    return
            self._check_gap(folder)
        except FileNotFoundError:  # removed with the checkpoint that it continued
            return
        except FileFormatError as error:
            self._refused = str(error)
            raise

    def applied(self, change: Change) -> None:
        """The weights in service are those of `change` now."""
        self._next, self._step = change.number + 1, change.step

    def refuse(self, why: str) -> None:
        """Take no more changes until there are whole weights."""
        self._refused = why

    def _check_gap(self, folder: Path) -> None:
        """Raise FileFormatError if there are deltas after a missing one."""
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        beyond = min((n for n in names if n.isdigit() and int(n) > self._next), default="")
        if beyond and f"{self._next:06d}" not in names:
            raise FileFormatError(f"the chain of deltas in {str(folder)!r} is broken", "delta",
                                  f"{self._next:06d} is missing, {beyond} is there",
                                  "all of them in order", "wait for the next whole checkpoint")

    def _read(self, delta: Delta) -> Change:
        """The weights of a complete delta, checked."""
        what = f"cannot follow delta {delta.number:06d}"
        if self._step >= 0 and delta.since != self._step:
            raise FileFormatError(what, "continues step", delta.since,
                                  f"{self._step}, the one in service",
                                  "wait for the next whole checkpoint")
        places: dict[str, dict[int, list[tuple[ArrayFile, int]]]] = {}
        dense: dict[str, torch.Tensor] = {}
        made = 0
        for path in (p for paths in delta.files.values() for p in paths):
            file = open_part(path)
            made = max(made, int(file.meta.get("time_us", 0)))
            try:
                for k, (_, table, column, parts) in enumerate(file.meta["items"]):
                    if "rows" in parts:
                        places.setdefault(table, {}).setdefault(int(column), []).append((file, k))
                if "state" in file.names:
                    dense |= _dense(file.read("state"))
                for name in file.names:  # nothing of a delta that is damaged anywhere is served
                    if not name.endswith((".ids", ".rows", "state")):
                        file.read(name)
            except (KeyError, ValueError, TypeError, RuntimeError) as error:
                raise FileFormatError(what, path.name, f"{type(error).__name__}: {error}",
                                      "rows and a state",
                                      "wait for the next whole checkpoint") from error
        return Change(delta.number, delta.step, made / 1e6, _Rows(what, places, self.refuse),
                      dense)


class _Rows(Mapping[str, tuple[np.ndarray, torch.Tensor]]):
    """Rows of a delta by table, in files that stay open: no more than one table's are in memory,
    unless they are kept. Damaged ones raise FileFormatError, and the chain ends.

    Args:
        what: what an error begins with.
        places: by table and first column, the files and the number of the item in each.
        refuse: called with the text of the error if rows are damaged.
    """

    def __init__(self, what: str, places: dict[str, dict[int, list[tuple[ArrayFile, int]]]],
                 refuse: Callable[[str], None]) -> None:
        self._what, self._places, self._refuse = what, places, refuse

    def __getitem__(self, table: str) -> tuple[np.ndarray, torch.Tensor]:
        places = self._places[table]
        try:
            pieces = {column: [(file.read(f"{k}.ids").astype(np.int64), _floats(
                file.read(f"{k}.rows"))) for file, k in found] for column, found in places.items()}
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            damaged = FileFormatError(self._what, f"rows of table {table!r}",
                                      f"{type(error).__name__}: {error}", "ids and rows",
                                      "wait for the next whole checkpoint")
            self._refuse(str(damaged))
            raise damaged from error
        return _joined(self._what, table, pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _floats(rows: np.ndarray) -> torch.Tensor:
    """The rows stored by `delta_files.rows_to_numpy`, as floats."""
    found = torch.from_numpy(rows)
    return found if found.dtype.is_floating_point else found.view(torch.bfloat16)


def _dense(packed: np.ndarray) -> dict[str, torch.Tensor]:
    """The model's dense weights from a state packed by `delta_files.pack_state`."""
    found = torch.load(io.BytesIO(packed.tobytes()), weights_only=True)
    return {path[1]: value for path, value in zip(found["paths"], found["values"], strict=True)
            if len(path) == 2 and path[0] == "model" and isinstance(value, torch.Tensor)}


def _joined(what: str, table: str, pieces: dict[int, list[tuple[np.ndarray, torch.Tensor]]]
            ) -> tuple[np.ndarray, torch.Tensor]:
    """Rows of all ranks and column pieces as one, ids ascending."""
    first = next(iter(pieces.values()))
    if len(pieces) == len(first) == 1 and bool((np.diff(first[0][0]) > 0).all()):
        return first[0]  # without a copy
    ids: np.ndarray | None = None
    columns = []
    for _, found in sorted(pieces.items()):
        mine = np.concatenate([i for i, _ in found])
        order = np.argsort(mine, kind="stable")
        if ids is not None and not np.array_equal(ids, mine[order]):
            raise FileFormatError(what, f"pieces of table {table!r}",
                                  f"{ids.size} and {mine.size} rows", "the same rows",
                                  "wait for the next whole checkpoint")
        ids = mine[order]
        columns.append(torch.cat([v for _, v in found])[torch.from_numpy(order)])
    assert ids is not None
    return ids, torch.cat(columns, dim=1)
