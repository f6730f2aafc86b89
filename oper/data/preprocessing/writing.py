"""Last pass: staged units to Parquet parts with ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper.data.arrays import lists
from oper.data.folder import SPLITS
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.staging import Coded, Stage
from oper.data.reading.pagecache import Passing
from oper.data.reading.rows import piece_rows
from oper.data.recipe import Recipe
from oper.data.vocabulary.building import Slices, Vocabulary
from oper.data.vocabulary.raw_keys import RawKeys

_DAY = 86400
_PART = "\0part"  # no column of a log is called that: the split of each row, as of `Split.parts`


@dataclass(frozen=True, slots=True)
class Split:
    """The boundaries of a log's parts and time buckets.

    Attributes:
        by: ``"rows"`` or ``"time"``.
        first_valid, first_test: first row number (by rows) or second (by time) of the parts.
        start: start of the first bucket: 0 (by rows), or a second (by time).
        span: number of rows or seconds that the buckets cover.
        buckets: number of buckets.
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
        """Time buckets of rows, int8 [n], or int16 if there are more than 127 buckets."""
        found = (place - self.start) * self.buckets // self.span
        return found.astype(np.int8 if self.buckets <= 127 else np.int16)


def split_by_rows(recipe: Recipe, num_rows: int, valid: Fraction, test: Fraction) -> Split:
    """The split of a log in order of time."""
    last = int(num_rows * test)
    first_test = num_rows - last
    return Split("rows", first_test - int(num_rows * valid), first_test, 0, max(1, num_rows),
                 recipe.buckets)


def split_by_time(recipe: Recipe, slices: Slices, valid: Fraction, test: Fraction) -> Split:
    """The split of a log with times: at whole minutes, with no share above the requested one.

    Args:
        recipe: number or length of the buckets.
        slices: minutes since 1970 in which there are rows, int64 [K], ascending, and rows of each,
            int64 [K]; one such pair per slice, with at least one minute in all.
        valid, test: shares of the rows.
    """
    total, begin, end = 0, 0, 0
    for minutes, counts in slices():
        begin = begin if total else int(minutes[0])
        end, total = int(minutes[-1]) + 1, total + int(counts.sum())
    wanted = [int(total * test), int(total * test) + int(total * valid)]
    cuts = [end, end]  # the first minute from which on there are at most that many rows
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


def spans_of_time(slices: Slices, num_rows: int) -> list[tuple[int, int, int]]:
    """Cut a log's time into spans of whole minutes with about `num_rows` rows each.

    Args:
        slices: as for `split_by_time`.
        num_rows: rows of a span, unless a single minute has more.

    Returns:
        First second, the second after the last, and rows of each span, ascending.
    """
    spans: list[tuple[int, int, int]] = []
    before, previous = 0, -1
    for minutes, counts in slices():
        number = (before + np.cumsum(counts) - counts) // num_rows
        starts = np.flatnonzero(np.diff(number, prepend=-1))
        for first, last in zip(starts, [*starts[1:], minutes.size], strict=True):
            rows = int(counts[first:last].sum())
            begin, end = int(minutes[first]) * 60, (int(minutes[last - 1]) + 1) * 60
            if int(number[first]) == previous:
                begin, _, more = spans.pop()
                rows += more
            previous = int(number[first])
            spans.append((begin, end, rows))
        before += int(counts.sum())
    return spans


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `[start, stop)` of a chunk of a unit; `about` is the chunk's record."""

    unit: int
    chunk: int
    about: dict[str, Any]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes units, or spans of time, one after the other or in different processes.

    Attributes:
        stage: the rows; a chunk of a log that is split by time is in order of time.
        recipe: names of the columns.
        split: boundaries of the parts.
        vocabulary: opens a column's vocabulary, or its `RawKeys` if ids stay raw.
        output: the folder; parts go to ``train``, ``valid`` and ``test`` inside.
        options: row groups, parts and compression.
    """

    stage: Stage
    recipe: Recipe
    split: Split
    vocabulary: Callable[[str], Vocabulary | RawKeys]
    output: Path
    options: PreprocessOptions

    def write_unit(self, number: int, first_row: int) -> dict[str, int]:
        """Write a unit whose first row is row `first_row` of the log; returns rows by split."""
        return self._write(number, (
            self._table(RowRange(number, chunk, about, 0, about["rows"]), first_row)
            for chunk, about in enumerate(self.stage.record(number)["chunks"]) if about["rows"]))

    def write_span(self, number: int, num_units: int, first: int, last: int) -> dict[str, int]:
        """Write the rows of the seconds `[first, last)` of all units in order of time.

        Rows of one second keep the order of the log. Each chunk is in order of time, so a span is a
        contiguous range of every chunk. Returns rows by split.
        """
        every = (RowRange(unit, chunk, about, 0, about["rows"]) for unit in range(num_units)
                 for chunk, about in enumerate(self.stage.record(unit)["chunks"]))
        near = [x for x in every if x.about["time"] and x.about["time"][0] < last
                and first <= x.about["time"][1]]
        return self._write(number, self._in_order(self._between(near, first, last), first, last))

    def _write(self, number: int, tables: Iterable[pa.Table]) -> dict[str, int]:
        writers = [PartWriter(self.output / s, number, self.options, self.recipe.sparse,
                              self.stage.is_large) for s in SPLITS]
        for table in tables:
            parts = table.column(_PART).to_numpy()
            table = table.drop_columns([_PART])
            for k, writer in enumerate(writers):
                if (parts == k).all():
                    writer.write(table)
                elif (parts == k).any():
                    writer.write(_of_part(table, parts == k))
        for writer in writers:
            writer.close()
        return {split: w.num_rows for split, w in zip(SPLITS, writers, strict=True)}

    def _between(self, ranges: Sequence[RowRange], first: int, last: int) -> list[RowRange]:
        found = []
        for x in ranges:
            times = self.stage.place(x.unit, x.chunk, x.about)[1][x.start:x.stop]
            start, stop = (x.start + int(k) for k in np.searchsorted(times, [first, last]))
            if start < stop:
                found.append(replace(x, start=start, stop=stop))
        return found

    def _in_order(self, ranges: Sequence[RowRange], first: int, last: int
                  ) -> Iterator[pa.Table]:
        """Tables of ranges that lie between two seconds, in order of time, of bounded size."""
        num_rows = sum(x.stop - x.start for x in ranges)
        if last - first <= 1:
            yield from (self._table(x, 0) for x in ranges)
        elif num_rows > piece_rows(self.recipe.dense, self.recipe.sparse):
            middle = (first + last) // 2
            for start, stop in ((first, middle), (middle, last)):
                yield from self._in_order(self._between(ranges, start, stop), start, stop)
        elif ranges:
            table = pa.concat_tables([self._table(x, 0) for x in ranges])
            times = table.column(self.recipe.time).to_numpy()
            if (np.diff(times) < 0).any():
                table = table.combine_chunks().take(pa.array(np.argsort(times, kind="stable")))
            yield table

    def _table(self, x: RowRange, first_row: int) -> pa.Table:
        """The rows of a range with ids, and the part to which each belongs."""
        rows = slice(x.start, x.stop)
        numbers, times = self.stage.place(x.unit, x.chunk, x.about)
        place = numbers[rows] + first_row if self.split.by == "rows" else times[rows]
        labels, dense = self.stage.numbers(x.unit, x.chunk, x.about)
        columns: dict[str, Any] = {
            self.recipe.label: labels[rows], self.recipe.bucket_column: self.split.bucket(place)}
        columns.update(zip(self.recipe.dense, dense[:, rows], strict=True))
        for k, name in enumerate(self.recipe.sparse):
            columns[name] = self._ids(x, k, name)
        if self.recipe.time:
            columns[self.recipe.time] = times[rows]
        columns[_PART] = self.split.parts(place)
        arrays = [pa.array(c) for c in columns.values()]
        # Nothing is null: readers and writers then need not look.
        return pa.Table.from_arrays(arrays, schema=pa.schema(
            [pa.field(n, a.type, nullable=False) for n, a in zip(columns, arrays, strict=True)]))

    def _ids(self, x: RowRange, k: int, name: str) -> Any:
        """The ids of the k-th sparse column: int32 (raw ones int64), or lists of them."""
        coded = self.stage.codes(x.unit, x.chunk, x.about, k)
        values = self.stage.values(x.unit, x.chunk, x.about, k)
        codes, lengths = coded.codes[x.start:x.stop], None
        if coded.lengths is not None:
            begin = int(coded.lengths[:x.start].sum())
            lengths = coded.lengths[x.start:x.stop]
            codes = coded.codes[begin:begin + int(lengths.sum())]
        if codes.size * 4 < values.size:  # of a short range only the values that it has
            there, codes = np.unique(codes, return_inverse=True)
            ids = self.vocabulary(name).lookup(values[there[there > 0] - 1])
            ids = ids if there.size and there[0] == 0 else ids[1:]
        else:
            ids = self.vocabulary(name).lookup(values)
        return _as_column(Coded(codes, lengths), ids)


def _of_part(table: pa.Table, keep: np.ndarray) -> pa.Table:
    """The rows of a part; contiguous ones without a copy."""
    at = np.flatnonzero(keep)
    if at[-1] - at[0] + 1 == at.size:
        return table.slice(int(at[0]), at.size)
    return table.filter(pa.array(keep))


def _as_column(coded: Coded, ids: np.ndarray) -> Any:
    found = ids[coded.codes]
    return found if coded.lengths is None else lists(coded.lengths, found)


class PartWriter:
    """Writes tables as Parquet parts with row groups of equal size, whatever the sizes of the
    tables given."""

    def __init__(self, folder: Path, unit: int, options: PreprocessOptions,
                 sparse: Collection[str], is_large: bool = False) -> None:
        """Write into `folder`; a large log is kept out of the page cache."""
        self._folder, self._unit, self._options, self._is_large = folder, unit, options, is_large
        self._sparse = set(sparse)  # columns of ids
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
                self._writer = pq.ParquetWriter(
                    self._folder / name, table.schema, write_statistics=False,
                    write_page_checksum=True, **self._encodings(table.schema))
                self._passing = Passing(self._folder / name, use=self._is_large)
                self._num_parts += 1
            piece = table.slice(start, min(group, count - start))
            self._writer.write_table(piece, row_group_size=group)
            self._passing.advance(piece.nbytes)
            self._part_rows += piece.num_rows
            if self._part_rows >= self._options.part_rows:
                self._end_part()

    def _encodings(self, schema: pa.Schema) -> dict[str, Any]:
        """How columns are encoded: data that is read many times should be fast to read."""
        if self._options.compression == "none":
            # Ids and numbers as they are: a dictionary would cost time and save little of the
            # ids, and unpacking costs those who train more than reading the bytes.
            return {"compression": "none", "use_dictionary": [
                f.name for f in schema
                if f.name not in self._sparse and not pa.types.is_floating(f.type)]}
        # zstd finds little in ids but their empty upper bytes, which lie together once the bytes
        # are split; at a level far below 1 it takes these almost as well in two thirds of the
        # time. Numbers repeat: a dictionary takes three quarters off, and zstd hardly more.
        paths = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name
                 for f in schema}
        ids = [path for n, path in paths.items() if n in self._sparse]
        packed = [paths[f.name] for f in schema if not pa.types.is_floating(_values(f.type))]
        return {"compression": dict.fromkeys(packed, "zstd"),
                "compression_level": dict.fromkeys(packed, -20),
                "use_dictionary": [path for path in paths.values() if path not in ids],
                "column_encoding": dict.fromkeys(ids, "BYTE_STREAM_SPLIT")}


def _values(of: pa.DataType) -> pa.DataType:
    """The type of a column, or of its elements if it contains lists."""
    return of.value_type if pa.types.is_list(of) else of


def train_codes(stage: Stage, split: Split, where: tuple[int, int, int], about: dict[str, Any],
                column: int) -> np.ndarray | None:
    """Counts of codes, int64 [K + 1], in the training part of a chunk; None if all of it is for
    training.

    Args:
        stage: the rows.
        split: boundaries of the parts.
        where: the unit, the chunk, and the number of the unit's first row.
        about: the chunk's entry in the unit's record.
        column: index of the sparse column.
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

