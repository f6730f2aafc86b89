"""Finds new full checkpoints and deltas of a training run, for a server.

A full checkpoint begins a chain, which its deltas continue one by one (see `delta_files`). A
missing, repeated, out-of-order or damaged delta raises an error that names it, and later deltas of
the chain are ignored; the next full checkpoint begins a new chain.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from oper.errors import FileFormatError
from oper.integration.checkpoint.delta_files import (
    Delta,
    base_of,
    folder_of,
    keys_of_part,
    load_packed,
    look,
    open_part,
)
from oper.integration.checkpoint.files import (
    METADATA,
    CheckpointReader,
    as_format_error,
    place_of,
)
from oper.rows.directory import MAX_ROWS
from oper.shmem.counters.changes import EXPIRED
from oper.support.files import ArrayFile

# Raised for intact files with other contents, by NumPy, torch and its unpickler.
_MALFORMED = (LookupError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True, slots=True, eq=False)
class KeyChange:
    """Slots of a dynamic table whose keys have been replaced or removed.

    Attributes:
        slots: int64 [n], distinct; the key in slot s has row s + 1.
        keys: int64 [n], the slots' new keys; without meaning where `is_held` is false.
        is_held: bool [n]; False = the slot has no key any more (removed or expired).
    """

    slots: np.ndarray
    keys: np.ndarray
    is_held: np.ndarray


@dataclass(frozen=True, slots=True)
class Change:
    """The weights that one delta changes.

    Attributes:
        number: position of the delta in the chain, from 0.
        step: training step that the delta contains.
        time_s: time at which this step was complete, as `time.time` returns it, in seconds.
        rows: maps tables to ids int64 [n] and rows [n, dim] in the saved dtype. Every access reads
            them from the delta's files, one table at a time.
        dense: weights other than tables, by ``state_dict`` key.
        keys: changed keys by name of dynamic table.
    """

    number: int
    step: int
    time_s: float
    rows: Mapping[str, tuple[np.ndarray, torch.Tensor]]
    dense: dict[str, torch.Tensor]
    keys: Mapping[str, KeyChange] = field(default_factory=dict)


class Follower:
    """Follows a training run in a folder.

    Args:
        newest: returns the newest full weights, a checkpoint's folder or a file; raises
            FileNotFoundError or FileFormatError while there are none.
        in_service: whether the server uses, or is about to use, the weights that `newest` returns
            now; if so, there must be some.
    """

    def __init__(self, newest: Callable[[], Path], in_service: bool = True) -> None:
        self._newest = newest
        self._seen = self._stamp(newest()) if in_service else (None,)
        self._begin()

    def _begin(self) -> None:
        self._next, self._step = 0, -1
        self._refused = ""
        self._types: dict[str, set[torch.dtype]] | None = None  # see `_types_of`

    @staticmethod
    def _stamp(path: Path) -> tuple[Any, ...]:
        found = path.stat()
        return path, found.st_ino, found.st_mtime_ns, found.st_size, (
            base_of(path) if path.is_dir() else "")

    def has_whole(self) -> bool:
        """Whether there are new full weights since the start or the last call that returned True.

        After True, publish them; `changes` continues from them.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            now = self._stamp(self._newest())
        except (FileNotFoundError, FileFormatError):  # being replaced
            return False
        # A checkpoint's folder is never modified, only replaced, so that its inode changes. It has
        # another name while it is being replaced.
        is_new = now[1:] != self._seen[1:]
        self._seen = now
        if is_new:
            self._begin()
        return is_new

    def changes(self) -> Iterator[Change]:
        """Yield the deltas that have become complete, in order; call `applied` after each.

        Raises:
            FileFormatError: the chain is broken; raised once. Afterwards nothing is yielded until
                `has_whole` has returned True.
        """
        place = self._seen[0]
        if self._refused or place is None or not place.is_dir():
            return
        try:
            base = base_of(place)
            if base != self._seen[-1]:
                return  # a new checkpoint has just replaced it
            if self._types is None:
                self._types = _types_of(place)
            folder = folder_of(place_of(place)) / base
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
            if not self._is_in_place():
                return
            self._refused = str(error)
            raise

    def _is_in_place(self) -> bool:
        """Whether the checkpoint in service is still there. Once another one has replaced it, its
        files and deltas are removed in any order, and may look damaged or like a broken chain."""
        try:
            return base_of(self._seen[0]) == self._seen[-1]
        except FileNotFoundError:
            return False

    def applied(self, change: Change) -> None:
        """Record that the server now uses the weights of `change`."""
        self._next, self._step = change.number + 1, change.step

    def again(self) -> None:
        """Make `has_whole` return True once more, for the same weights; deltas then follow from the
        first one on."""
        self._seen = (None,)

    def refuse(self, why: str) -> None:
        """Yield no more changes until there are new full weights; `why` must not be empty."""
        self._refused = why

    def _check_gap(self, folder: Path) -> None:
        """Raise FileFormatError if there are deltas after a missing one."""
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        beyond = min((n for n in names if n.isdigit() and int(n) > self._next), default="")
        if beyond and f"{self._next:06d}" not in names:
            raise FileFormatError(f"the chain of deltas in {str(folder)!r} is broken", "delta",
                                  f"{self._next:06d} is missing, {beyond} exists",
                                  "all of them in order", "wait for the next full checkpoint")

    def _read(self, delta: Delta) -> Change:
        """Open a complete delta and verify its position in the chain and its dense weights."""
        what = f"cannot follow delta {delta.number:06d}"
        if self._step >= 0 and delta.since != self._step:
            raise FileFormatError(what, "continues step", delta.since,
                                  f"{self._step}, the one in service",
                                  "wait for the next full checkpoint")
        places: dict[str, dict[int, list[tuple[ArrayFile, int]]]] = {}
        dense: dict[str, torch.Tensor] = {}
        keys: dict[str, list[_KeyItem]] = {}
        made = 0
        for path in (p for paths in delta.files.values() for p in paths):
            file = open_part(path)
            if file.meta.get("attempt", "") != delta.attempt:
                raise FileNotFoundError(path)  # a run that continues has just replaced it
            with as_format_error(what, f"content of {path.name}", "changed rows and a dense state, "
                                 "as DeltaCheckpoints writes", "wait for the next full checkpoint",
                                 _MALFORMED):
                made = max(made, int(file.meta.get("time_us", 0)))
                for k, (_, table, column, parts) in enumerate(file.meta["items"]):
                    if "rows" in parts:
                        places.setdefault(table, {}).setdefault(int(column), []).append((file, k))
                    elif parts[0] in ("keys", EXPIRED):
                        keys.setdefault(table, []).append(_key_item(file, k, parts[0]))
                if "state" in file.names:
                    dense |= _dense(file.read("state"))
                for name in file.names:  # verifies checksums of arrays that are not used, too
                    if not name.endswith((".ids", ".rows", "state", *_OF_KEYS)):
                        file.read(name)
        rows = _Rows(what, places, self._types or {}, self.refuse)
        return Change(delta.number, delta.step, made / 1e6, rows, dense,
                      {table: _joined_keys(items) for table, items in keys.items()})


class _Rows(Mapping[str, tuple[np.ndarray, torch.Tensor]]):
    """Maps tables to a delta's rows, which every access reads from the open files.

    Damaged rows, and rows of another type than in the checkpoint that the delta extends, raise
    FileFormatError and end the chain.

    Args:
        what: beginning of error messages.
        places: by table and first column, the files and the number of the item in each.
        types: as `_types_of` returns them.
        refuse: called with the error's text if rows are damaged.
    """

    def __init__(self, what: str, places: dict[str, dict[int, list[tuple[ArrayFile, int]]]],
                 types: dict[str, set[torch.dtype]], refuse: Callable[[str], None]) -> None:
        self._what, self._places, self._types, self._refuse = what, places, types, refuse

    def __getitem__(self, table: str) -> tuple[np.ndarray, torch.Tensor]:
        places = self._places[table]
        try:
            pieces = {column: [(file.read(f"{k}.ids").astype(np.int64), _floats(
                file.read(f"{k}.rows"))) for file, k in found] for column, found in places.items()}
            wanted = self._types.get(table)
            for values in (v for found in pieces.values() for _, v in found):
                if wanted and values.dtype not in wanted:
                    raise TypeError(f"values are {values.dtype}, but those of the checkpoint are "
                                    f"{', '.join(map(str, wanted))}")
            return _joined(self._what, table, pieces)
        except _MALFORMED as error:
            damaged = FileFormatError(self._what, f"rows of table {table!r}",
                                      f"{type(error).__name__}: {error}", "ids and rows",
                                      "wait for the next full checkpoint")
            self._refuse(str(damaged))
            raise damaged from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


_KeyItem = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # the part; as in `KeyChange`
_OF_KEYS = (".slots", ".keys", ".seen")  # arrays of such an item


def _key_item(file: ArrayFile, k: int, part: str) -> _KeyItem:
    """Read item `k` of a file, records of a directory or slots whose keys have expired."""
    if part == EXPIRED:
        slots = file.read(f"{k}.slots").astype(np.int64)
        return part, slots, np.zeros_like(slots), np.zeros(slots.size, bool)
    numbers, records = keys_of_part(
        {f"{k}{name}": file.read(f"{k}{name}") for name in _OF_KEYS}, k, MAX_ROWS)
    return part, numbers.numpy(), records[:, 0].numpy(), (records[:, 2] >= 0).numpy()


def _joined_keys(items: list[_KeyItem]) -> KeyChange:
    """Join the changed keys of all ranks; a key that has changed may also have expired."""
    gone = np.concatenate([np.zeros(0, np.int64), *(s for part, s, *_ in items if part == EXPIRED)])
    found = [x for x in items if x[0] != EXPIRED]
    slots, keys, is_held = (np.concatenate([np.zeros(0, dtype), *(x[k] for x in found)])
                            for k, dtype in ((1, np.int64), (2, np.int64), (3, bool)))
    is_held &= ~np.isin(slots, gone)
    more = np.setdiff1d(gone, slots)
    return KeyChange(np.concatenate([slots, more]), np.concatenate([keys, np.zeros_like(more)]),
                     np.concatenate([is_held, np.zeros(more.size, bool)]))


def _types_of(checkpoint: Path) -> dict[str, set[torch.dtype]]:
    """Return the types of the weights of a checkpoint by the name of their module or table; a name
    that several paths end with has those of all of them. Raises FileNotFoundError if it has been
    removed."""
    (checkpoint / METADATA).stat()
    found: dict[str, set[torch.dtype]] = {}
    for key, value in CheckpointReader(checkpoint).read_metadata().state_dict_metadata.items():
        name, _, last = key.rpartition(".")
        if last == "weight" and isinstance(value, TensorStorageMetadata):
            # As in a plan, with or without the module's path; see `Target.keys`.
            for end in {name, re.sub(r"\.embedding(_bag)?s\.", ".", name)}:
                while end:
                    found.setdefault(end, set()).add(value.properties.dtype)
                    end = end.partition(".")[2]
    return found


def _floats(rows: np.ndarray) -> torch.Tensor:
    """Undo `delta_files.rows_to_numpy`."""
    found = torch.from_numpy(rows)
    return found.view(torch.bfloat16) if found.dtype == torch.int16 else found


def _dense(packed: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the model's dense weights from a state packed by `delta_files.pack_state`."""
    found = load_packed(packed)
    if any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in found["values"]):
        raise ValueError("weights are sparse")
    return {path[1]: value for path, value in zip(found["paths"], found["values"], strict=True)
            if len(path) == 2 and path[0] == "model" and isinstance(value, torch.Tensor)}


def _joined(what: str, table: str, pieces: dict[int, list[tuple[np.ndarray, torch.Tensor]]]
            ) -> tuple[np.ndarray, torch.Tensor]:
    """Join the rows of all ranks and column shards; ids are ascending in the result."""
    first = next(iter(pieces.values()))
    if len(pieces) == len(first) == 1 and bool((np.diff(first[0][0]) > 0).all()):
        return first[0]  # without a copy
    ids: np.ndarray | None = None
    columns = []
    for _, found in sorted(pieces.items()):
        mine = np.concatenate([i for i, _ in found])
        order = np.argsort(mine, kind="stable")
        if ids is not None and not np.array_equal(ids, mine[order]):
            raise FileFormatError(what, f"rows of table {table!r} in its column shards",
                                  {"shared": np.intersect1d(ids, mine).size,
                                   "in one shard only": np.setxor1d(ids, mine).size},
                                  "the same rows in all column shards of a delta",
                                  "wait for the next full checkpoint")
        ids = mine[order]
        columns.append(torch.cat([v for _, v in found])[torch.from_numpy(order)])
    assert ids is not None
    return ids, torch.cat(columns, dim=1)
