"""Read the Parquet row groups of one split of a preprocessed folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper.analysis.presence import Lookups
from oper.data.folder import Folder, reading
from oper.errors import FileFormatError

_OPEN_FILES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column of n rows, each with one value or a bag of values.

    Attributes:
        values: values [L] of all rows; ids are int32 or int64, as in the file.
        ends: offsets of the bags in `values`, int64 [n + 1], from 0 to L; None if each row has
            one value (L = n).
    """

    values: np.ndarray
    ends: np.ndarray | None = None

    def part(self, start: int, stop: int) -> Column:
        """Return rows `[start, stop)` as a view of the values."""
        if self.ends is None:
            return Column(self.values[start:stop])
        first, last = self.ends[start], self.ends[stop]
        return Column(self.values[first:last], self.ends[start:stop + 1] - first)

    @property
    def lookups(self) -> Lookups:
        """The rows as `Lookups`, without a copy of the values."""
        return Lookups(self.values, None if self.ends is None else self.lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Bag length of each row, int64 [n]; only for a column of bags."""
        assert self.ends is not None
        return np.diff(self.ends)

    def take(self, order: np.ndarray) -> Column:
        """Copy the rows with the indices `order`, int [m], in that order."""
        if self.ends is None:
            return Column(self.values.take(order))
        bags = pa.LargeListArray.from_arrays(self.ends, self.values).take(pa.array(order))
        return Column(bags.flatten().to_numpy(), bags.offsets.to_numpy())


class RowGroups:
    """The G row groups of a split, in the order of files and of groups within a file.

    Attributes:
        folder: the folder.
        split: name of the split.
        columns: names of the columns that readers return.
        bags: names of the list columns; other columns have one number per row.
        rows: rows of each group, int64 [G].
        digest: digest of the manifest, the split, the names and sizes of its files, and `rows`;
            changes if the folder is written again with other contents.
    """

    def __init__(self, folder: Folder, split: str, columns: tuple[str, ...],
                 bags: frozenset[str]) -> None:
        """List the row groups; raises InvalidInputError or FileFormatError.

        Only the first file is opened, and files whose size differs from the manifest's: opening all
        of a folder's thousands of files would take seconds.
        """
        self.folder, self.split, self.columns, self.bags = folder, split, columns, bags
        self._places: list[tuple[Path, int]] = []
        rows: list[int] = []
        files: list[tuple[str, int]] = []
        for part in folder.parts(split):
            size = part.stat().st_size
            found = _rows_from_manifest(folder, f"{split}/{part.name}", size) if files else None
            if found is None:
                about = folder.open_part(part, columns).metadata
                found = [about.row_group(g).num_rows for g in range(about.num_row_groups)]
            self._places += [(part, g) for g in range(len(found))]
            rows += found
            files.append((part.name, size))
        self.rows = np.array(rows, np.int64)
        if self.num_rows != folder.rows[split]:
            raise FileFormatError(f"cannot read {str(folder.path)!r}", f"{split} rows",
                                  self.num_rows, f"{folder.rows[split]} as in the manifest",
                                  "preprocess again")
        known = json.dumps([folder.manifest, split, files, rows], sort_keys=True)
        self.digest = hashlib.sha256(known.encode()).hexdigest()[:32]

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def place(self, group: int) -> tuple[Path, int]:
        """Return the file that contains a group, and the group's index in that file."""
        return self._places[group]


def _rows_from_manifest(folder: Folder, name: str, size: int) -> list[int] | None:
    """Derive the rows of each row group from the manifest; None if it contradicts the file size."""
    known, rows = folder.part_sizes.get(name, (-1, 0))
    full, rest = divmod(rows, folder.row_group_rows)
    if known != size or full > size:  # a group takes at least a byte: the manifest is damaged
        return None
    return [folder.row_group_rows] * full + [rest] * (rest > 0)


class GroupReader:
    """Reads and checks row groups (types, nulls, ids in range, number of rows); not thread-safe.

    Keeps up to 16 files open.
    """

    def __init__(self, groups: RowGroups) -> None:
        self.groups = groups
        folder = groups.folder
        self._ids = frozenset(folder.sparse)
        self._limits = {} if folder.raw_ids else dict(
            zip(folder.sparse, folder.num_rows, strict=True))
        self._files: dict[Path, pq.ParquetFile] = {}

    def read(self, group: int) -> dict[str, Column]:
        """Read all columns of a row group; raises FileFormatError."""
        part, number = self.groups.place(group)
        table = self._table(part, number)
        if table.num_rows != self.groups.rows[group]:
            raise FileFormatError(f"cannot read {str(part)!r}", f"rows of row group {number}",
                                  table.num_rows, f"{self.groups.rows[group]}",
                                  "the folder changed while it was read, open it again")
        return {n: self._column(part, n, table.column(n)) for n in self.groups.columns}

    def _table(self, part: Path, number: int) -> pa.Table:
        names = self.groups.columns
        if part not in self._files:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[part] = self.groups.folder.open_part(part, names)
        file = self._files[part]
        if number >= file.num_row_groups:
            raise FileFormatError(f"cannot read {str(part)!r}", "row groups", file.num_row_groups,
                                  f"more than {number}",
                                  "the folder changed while it was read, open it again")
        with reading(part):
            return file.read_row_group(number, columns=list(names), use_threads=False)

    def _column(self, part: Path, name: str, chunked: pa.ChunkedArray) -> Column:
        array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
        what, again = f"cannot read {str(part)!r}", "preprocess again"
        is_bags = name in self.groups.bags
        is_ids, limit = name in self._ids, self._limits.get(name)
        kind = array.type
        if is_bags:
            if not pa.types.is_list(kind) or array.null_count:
                raise FileFormatError(what, name, f"{kind}, {array.null_count} null rows",
                                      "lists, none null", again)
            kind = kind.value_type
        number = pa.types.is_integer(kind) or (pa.types.is_floating(kind) and not is_ids)
        nulls = (array.values if is_bags else array).null_count
        if not number or nulls:
            raise FileFormatError(
                what, name, f"{array.type}, {nulls} null values",
                f"{'lists of ' * is_bags}{'integers' if is_ids else 'numbers'}, none null", again)
        ends = None
        if is_bags:
            ends = np.asarray(array.offsets.to_numpy(), np.int64)
            array = array.values[ends[0]:ends[-1]]
            ends = ends - ends[0]
        values = array.to_numpy(zero_copy_only=False)
        if is_ids and values.dtype not in (np.int32, np.int64):
            values = values.astype(np.int64)
        # As unsigned integers, negative ids exceed the limit too: one pass checks both bounds.
        if limit is not None and values.size and (
                int(values.view(f"u{values.itemsize}").max()) >= limit):
            raise FileFormatError(what, f"ids of {name}", (int(values.min()), int(values.max())),
                                  f"0 <= id < num_rows={limit}", again)
        return Column(values, ends)


def joined(parts: list[Column]) -> Column:
    """Concatenate the rows of several columns of the same kind."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([p.values for p in parts])
    if parts[0].ends is None:
        return Column(values)
    ends, total = [np.zeros(1, np.int64)], 0
    for p in parts:
        assert p.ends is not None
        ends.append(p.ends[1:] + total)
        total += p.values.size
    return Column(values, np.concatenate(ends))
