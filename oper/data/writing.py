"""Last pass: staged units to Parquet parts with ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper import native
from oper.data.folder import SPLITS
from oper.data.pagecache import Passing
from oper.data.recipe import Recipe
from oper.data.staging import Coded, Stage
from oper.data.vocabulary import Slices, Vocabulary

_DAY = 86400


@dataclass(frozen=True, slots=True)
class Split:
    """Where the parts of a log begin and its time buckets lie.

    Attributes:
        by: ``"rows"`` or ``"time"``.
        first_valid, first_test: first row number (by rows) or second (by time) of the parts.
        start: where the buckets begin: 0, or a second.
        span: rows or seconds that the buckets cover.
        buckets: their number.
    """

    by: str
    first_valid: int
    first_test: int
    start: int
    span: int
    buckets: int

    def parts(self, place: np.ndarray) -> np.ndarray:
        """0 (train), 1 (valid) or 2 (test) of rows by their number or second: int8 [n]."""
        return ((place >= self.first_valid).astype(np.int8) + (place >= self.first_test))

    def bucket(self, place: np.ndarray) -> np.ndarray:
        """Time bucket, int8 [n], or int16 where there are more than 127."""
        found = (place - self.start) * self.buckets // self.span
        return found.astype(np.int8 if self.buckets <= 127 else np.int16)


def split_by_rows(recipe: Recipe, num_rows: int, valid: Fraction, test: Fraction) -> Split:
    """The split of a log in order of time."""
    last = int(num_rows * test)
    first_test = num_rows - last
    return Split("rows", first_test - int(num_rows * valid), first_test, 0, max(1, num_rows),
                 recipe.buckets)


def split_by_time(recipe: Recipe, slices: Slices, valid: Fraction, test: Fraction) -> Split:
    """The split of a log with times: whole minutes, of which no share exceeds what is asked for.

    Args:
        recipe: number or length of the buckets.
        slices: minutes since 1970 in which there are rows, int64 [K], ascending, and rows of each,
            int64 [K]; slice by slice, at least one minute in all.
        valid, test: shares of the rows.
    """
    total, begin, end = 0, 0, 0
    for minutes, counts in slices():
        begin = begin if total else int(minutes[0])
        end, total = int(minutes[-1]) + 1, total + int(counts.sum())
    wanted = [int(total * test), int(total * test) + int(total * valid)]
    cuts = [end, end]  # the first minute from which on there are at most so many rows
    before = 0
    for minutes, counts in slices():
        after = total - before - np.concatenate([[0], np.cumsum(counts)[:-1]])
        for k, rows in enumerate(wanted):
            at = int(np.searchsorted(-after, -rows))
            if cuts[k] == end and at < minutes.size:
                cuts[k] = int(minutes[at])
        before += int(counts.sum())
    first_test, first_valid = (cut * 60 for cut in cuts)
    start, stop = begin * 60, end * 60
    buckets = recipe.buckets
    if recipe.bucket_seconds:
        start -= start % _DAY
        buckets = -(-(stop - start) // recipe.bucket_seconds)
        stop = start + buckets * recipe.bucket_seconds
    return Split("time", first_valid, first_test, start, stop - start, buckets)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Sizes of Parquet files: rows of a row group, rows of a part; whether the log is large."""

    row_group_rows: int = 1 << 16
    part_rows: int = 1 << 21
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes units, one after the other or in different processes.

    Attributes:
        stage: the rows.
        recipe: names of the columns.
        split: where the parts begin.
        vocabulary: opens a column's vocabulary.
        output: the folder; parts go to ``train``, ``valid`` and ``test`` inside.
        options: sizes.
    """

    stage: Stage
    recipe: Recipe
    split: Split
    vocabulary: Callable[[str], Vocabulary]
    output: Path
    options: WriteOptions

    def write(self, number: int, first_row: int) -> dict[str, int]:
        """Write a unit whose first row is row `first_row` of the log; returns rows by split."""
        sparse = self.recipe.names("sparse")
        writers = [_PartWriter(self.output / s, number, self.options, sparse) for s in SPLITS]
        for chunk, about in enumerate(self.stage.record(number)["chunks"]):
            rows, times = self.stage.place(number, chunk, about)
            place = rows + first_row if self.split.by == "rows" else times
            table = self._table(number, chunk, about, place)
            if self.recipe.time:
                table = table.append_column(
                    pa.field(self.recipe.time, pa.int64(), nullable=False), pa.array(times))
            parts = self.split.parts(place)
            for k, writer in enumerate(writers):
                if (parts == k).all():
                    writer.write(table)
                elif (parts == k).any():
                    writer.write(_of_part(table, parts == k))
        for writer in writers:
            writer.close()
        return {split: w.num_rows for split, w in zip(SPLITS, writers, strict=True)}

    def _table(self, number: int, chunk: int, about: dict[str, Any], place: np.ndarray
               ) -> pa.Table:
        labels, dense = self.stage.numbers(number, chunk, about)
        columns: dict[str, Any] = {
            self.recipe.label: labels, self.recipe.bucket_column: self.split.bucket(place)}
        columns.update(zip(self.recipe.names("dense"), dense, strict=True))
        for k, name in enumerate(self.recipe.names("sparse")):
            ids = self.vocabulary(name).lookup(self.stage.values(number, chunk, about, k))
            columns[name] = _as_column(self.stage.codes(number, chunk, about, k), ids)
        arrays = [pa.array(c) for c in columns.values()]
        # Nothing is null: readers and writers then need not look.
        return pa.Table.from_arrays(arrays, schema=pa.schema(
            [pa.field(n, a.type, nullable=False) for n, a in zip(columns, arrays, strict=True)]))


def _of_part(table: pa.Table, keep: np.ndarray) -> pa.Table:
    """The rows that are to be kept; neighbours without a copy."""
    at = np.flatnonzero(keep)
    if at[-1] - at[0] + 1 == at.size:
        return table.slice(int(at[0]), at.size)
    return table.filter(pa.array(keep))


def _as_column(coded: Coded, ids: np.ndarray) -> Any:
    found = native.gather(ids, coded.codes)
    if coded.lengths is None:
        return found
    offsets = np.zeros(coded.lengths.size + 1, np.int32)
    np.cumsum(coded.lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(found))


class _PartWriter:
    """Writes tables as Parquet parts with row groups of equal size, whatever the tables' sizes."""

    def __init__(self, folder: Path, unit: int, options: WriteOptions,
                 ids: Sequence[str]) -> None:
        self._folder, self._unit, self._options = folder, unit, options
        self._ids = frozenset(ids)
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._num_pending = self._num_parts = self._part_rows = self.num_rows = 0

    def close(self) -> None:
        if self._num_pending:
            self._flush(self._num_pending)
        self._end_part()

    def _end_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._passing.close()
        self._writer, self._part_rows = None, 0

    def write(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._num_pending += table.num_rows
        self.num_rows += table.num_rows
        group = self._options.row_group_rows
        if self._num_pending >= group:
            self._flush(self._num_pending // group * group)

    def _flush(self, count: int) -> None:
        """Write the first `count` pending rows."""
        table = pa.concat_tables(self._pending)
        self._pending, self._num_pending = [table.slice(count)], table.num_rows - count
        group = self._options.row_group_rows
        for start in range(0, count, group):
            if self._writer is None:
                name = f"part-{self._unit:05d}-{self._num_parts:03d}.parquet"
                # Ids and numbers as they are: a dictionary would cost time and save little of the
                # ids, and unpacking costs those who train more than reading the bytes.
                few = [f.name for f in table.schema
                       if f.name not in self._ids and not pa.types.is_floating(f.type)]
                self._writer = pq.ParquetWriter(
                    self._folder / name, table.schema, compression="none", use_dictionary=few,
                    write_statistics=False, write_page_checksum=True)
                self._passing = Passing(self._folder / name, use=self._options.is_large)
                self._num_parts += 1
            piece = table.slice(start, min(group, count - start))
            self._writer.write_table(piece, row_group_size=group)
            self._passing.advance(piece.nbytes)
            self._part_rows += piece.num_rows
            if self._part_rows >= self._options.part_rows:
                self._end_part()


def train_codes(stage: Stage, split: Split, where: tuple[int, int, int], about: dict[str, Any],
                column: int) -> np.ndarray | None:
    """Counts int64 [K + 1] of codes in the training part of a chunk; None = all of it trains.

    Args:
        stage: the rows.
        split: where the training part ends.
        where: unit, chunk, number of the unit's first row.
        about: the chunk's entry in the unit's record.
        column: of the sparse ones.
    """
    number, chunk, first_row = where
    if split.by == "rows":
        low, high = first_row + about["first"], first_row + about["first"] + about["rows"] - 1
    else:
        low, high = about["time"] or (0, -1)
    if high < split.first_valid:
        return None
    codes = stage.codes(number, chunk, about, column)
    if low >= split.first_valid:
        return np.zeros(1, np.int64)
    rows, times = stage.place(number, chunk, about)
    keep = (rows + first_row if split.by == "rows" else times) < split.first_valid
    if codes.lengths is not None:
        keep = np.repeat(keep, codes.lengths)
    return np.bincount(codes.codes[keep])

