"""Convert a preprocessed folder of events to one of sequences, with one row per user or session."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from oper.data.arrays import lists, places_of, table_of
from oper.data.folder import MANIFEST, SPLITS, Folder, reading
from oper.data.preprocessing.manifest import parts_of
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.writing import PartWriter
from oper.errors import InvalidInputError, require
from oper.support.files import new_folder, write_text

_ROWS_AT_ONCE = 1 << 20  # target number of events in memory, limited by _MAX_FILES
_MAX_FILES = 256         # maximum number of files open at once
_BATCH_ROWS = 1 << 16


@dataclass(slots=True)
class _Sequences:
    """Makes sequences from a folder's events; `events` counts the events kept, by split."""

    folder: Folder
    by: str
    columns: tuple[str, ...]
    max_length: int | None
    min_length: int
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    @property
    def read(self) -> tuple[str, ...]:
        own = self.folder
        return (own.label, *own.dense, self.by, *self.columns, *([own.time] if own.time else []))

    def single(self, users: np.ndarray) -> np.ndarray:
        """Whether each id denotes one user, bool [n]; false for rare, unseen and missing users."""
        found: np.ndarray = (users > 0) & (users != (self.folder.missing_ids.get(self.by) or -1))
        return found

    def make(self, split: str, table: pa.Table) -> pa.Table:
        """Make one row per user from a table that has all events of its users."""
        own = self.folder
        users = table.column(self.by).to_numpy()
        rows = np.flatnonzero(self.single(users))
        users = users[rows]
        # By user, then time; events of one second keep the order of the log.
        order = np.argsort(users, kind="stable") if not own.time else np.lexsort(
            (table.column(own.time).to_numpy()[rows], users))
        rows, users = rows[order], users[order]
        starts = np.flatnonzero(np.diff(users, prepend=-1))
        ends = np.append(starts, users.size)[1:]
        keep = ends - starts >= self.min_length
        starts, ends = starts[keep], ends[keep]
        if self.max_length is not None:
            starts = np.maximum(starts, ends - self.max_length)
        lengths = ends - starts
        events, last = rows[places_of(starts, lengths)], rows[ends - 1]
        self.events[split] += events.size
        found: dict[str, Any] = {own.bucket: np.zeros(last.size, np.int8)}
        for n in self.read:
            values = table.column(n).to_numpy()
            found[n] = lists(lengths, values[events]) if n in self.columns else values[last]
        return table_of(found)


def write_sequences(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    by: str,
    *,
    columns: Sequence[str] | None = None,
    max_length: int | None = None,
    min_length: int = 1,
    compression: str = "none",
) -> dict[str, Any]:
    """Convert a folder of events to a folder with one row per user (or session), for `Loader`.

    Every user with events in a part (train, valid, test) becomes one row of that part: the user's
    id, and for every other sparse column the bag of its ids in these events, in time order if
    the log has times, otherwise in the order of the log. Label, dense columns and time are those of
    the last event. Users that share a row (rare, unseen or missing ones) are left out. Ids and
    table sizes do not change. Events are partitioned by user on disk, so that about a million (or
    1/256 of the part, if that is more) are in memory at once.

    Args:
        path: a folder that ``oper preprocess`` wrote.
        output: the folder to write, which must not exist.
        by: name of the sparse column of users or sessions, with one id per row.
        columns: other sparse columns to keep, each with one id per row; None = all.
        max_length: number of a user's latest events to keep; None = all.
        min_length: users with fewer events in a part are left out of that part.
        compression: compression of the Parquet files, ``"none"`` or ``"zstd"``.

    Returns:
        The manifest of the new folder; its ``sequences["events"]`` has, by part, the number of
        events kept and in total.

    Raises:
        InvalidInputError: a column or length is unsuitable, users share hashed rows, `output`
            exists, or its disk is full.
        FileFormatError: the folder is damaged.
    """
    what = "cannot write sequences"
    folder = Folder.open(path)
    single = [n for n in folder.sparse if n not in folder.multi_hot]
    kept = tuple(n for n in folder.sparse if n != by and (columns is None or n in columns))
    for name in (by, *kept, *(columns or ())):
        if name not in single:
            is_named = name in (by, *(columns or ()))
            raise InvalidInputError(
                what, "column", name, f"a sparse column with one id per row, one of {single}",
                "name one of them" if is_named else "leave it out by naming the columns to keep: "
                "in a sequence of bags, the ids of one event run into those of the next event")
    require(what, "choose another length",
            ("min_length", min_length, min_length >= 1, ">= 1"),
            ("max_length", max_length, max_length is None or max_length >= 1, "None or >= 1"))
    made = _Sequences(folder, by, kept, max_length, min_length)
    num_sharing = folder.manifest["tables"][by].get("num_collisions", 0)
    require(what, "preprocess without --hash",
            (f"users of {by!r} that share a row", num_sharing, not num_sharing,
             "none, since their events would be mixed in one sequence"))
    options = PreprocessOptions(compression=compression)
    with new_folder(what, output) as out:
        (out / "vocabulary").mkdir()
        rows = {}
        for split in SPLITS:
            (out / split).mkdir()
            writer = PartWriter(out / split, 0, options, (by, *kept))
            for table in _by_user(made, split, out.parent):
                writer.write(made.make(split, table))
            writer.close()
            rows[split] = writer.num_rows
        for name in (by, *kept):
            shutil.copyfile(folder.path / "vocabulary" / f"{name}.parquet",
                            out / "vocabulary" / f"{name}.parquet")
        manifest = _manifest(made, rows, options)
        manifest["parts"] = parts_of(out)
        write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _by_user(made: _Sequences, split: str, work: Path) -> Iterator[pa.Table]:
    """Yield the events of a split in tables, each of which has all events of its users."""
    folder = made.folder
    count = min(_MAX_FILES, max(1, -(-folder.rows[split] // _ROWS_AT_ONCE)))
    if count == 1:
        parts = [folder.read_part(part, made.read) for part in folder.parts(split)]
        yield from [pa.concat_tables(parts)] if parts else []
        return
    files = [work / f"{split}-{k}.arrow" for k in range(count)]
    writers: list[Any] = []
    for part in folder.parts(split):
        batches = folder.open_part(part, made.read).iter_batches(_BATCH_ROWS,
                                                                 columns=list(made.read))
        while True:
            with reading(part):
                batch = next(batches, None)
            if batch is None:
                break
            writers = writers or [pa.ipc.new_stream(file, batch.schema) for file in files]
            users = batch.column(made.by).to_numpy()
            # The events of users that share a row would all be in one file and may be too many.
            numbers = np.where(made.single(users), users % count, -1)
            for k, writer in enumerate(writers):
                writer.write_batch(batch.filter(pa.array(numbers == k)))
    for writer in writers:
        writer.close()
    for file in files:
        yield pa.ipc.open_stream(file.read_bytes()).read_all()
        file.unlink()


def _manifest(made: _Sequences, rows: dict[str, int], options: PreprocessOptions) -> dict[str, Any]:
    """Make the manifest of the new folder, except for ``parts``."""
    old = {k: v for k, v in made.folder.manifest.items() if k not in ("vocabulary", "unseen")}
    kept = [n for n in made.folder.sparse if n == made.by or n in made.columns]
    return {
        **old, "job": "", "rows": rows, "row_group_rows": options.row_group_rows,
        "problems": [f"no user has a sequence in the {split} part" for split in SPLITS
                     if made.folder.rows[split] and not rows[split]],
        # A sequence spans time buckets.
        "split": {**old["split"], "buckets": 1, "order": f"by {made.by}"},
        "columns": {**old["columns"], "sparse": kept, "multi_hot": list(made.columns)},
        "tables": {n: old["tables"][n] for n in kept},
        "ids_in_hotness_order": False,  # each user occurs once, and some events are left out
        "sequences": {"of": made.by, "folder": os.path.abspath(made.folder.path),
                      "max_length": made.max_length, "min_length": made.min_length,
                      "events": {s: [n, made.folder.rows[s]] for s, n in made.events.items()}}}
