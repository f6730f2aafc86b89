"""Last pass: write the staged rows to Parquet parts, with ids in place of raw values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from oper.data.arrays import lists, table_of
from oper.data.folder import MAX_BUCKETS, SPLITS
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.staging import Chunk, Distinct, Stage
from oper.data.reading.pagecache import PageDropper
from oper.data.reading.rows import piece_rows
from oper.data.recipe import Recipe
from oper.data.vocabulary.building import Slices, Vocabulary
from oper.data.vocabulary.raw_keys import RawKeys
from oper.errors import InvalidInputError

_DAY = 86400
_PART = "\0part"  # temporary column with `Split.parts`; names of real columns contain no zero byte


@dataclass(frozen=True, slots=True)
class Split:
    """The boundaries of a log's parts and time buckets.

    Attributes:
        by: ``"rows"``: the place of a row is its index in the log; ``"time"``: its time in seconds
            since 1970.
        first_valid, first_test: first place of the validation and of the test part.
        start: first place of the first bucket.
        span: number of rows or seconds that the buckets cover.
        buckets: number of buckets.
    """

    by: str
    first_valid: int
    first_test: int
    start: int
    span: int
    buckets: int

    def places(self, chunk: Chunk, numbers: pa.RecordBatch, first_row: int) -> np.ndarray:
        """Return the places of a chunk's rows, int64 [n].

        Args:
            chunk: the chunk.
            numbers: its `Chunk.numbers`.
            first_row: row number in the log of the first row of the chunk's unit.
        """
        if self.by == "time":
            return numbers.column("time").to_numpy()
        return np.arange(numbers.num_rows) + (chunk.about["first"] + first_row)

    def parts(self, place: np.ndarray) -> np.ndarray:
        """Map places [n] to parts, int8 [n]: 0 = train, 1 = valid, 2 = test."""
        return ((place >= self.first_valid).astype(np.int8) + (place >= self.first_test))

    def bucket(self, place: np.ndarray) -> np.ndarray:
        """Map places [n] to time buckets, int8 [n], or int16 for more than 127 buckets."""
        found = (place - self.start) * self.buckets // self.span
        return found.astype(np.int8 if self.buckets <= 127 else np.int16)


def split_by_rows(recipe: Recipe, num_rows: int, valid: Fraction, test: Fraction) -> Split:
    """Split a log that is in time order by row numbers; shares are of `num_rows`."""
    last = int(num_rows * test)
    first_test = num_rows - last
    return Split("rows", first_test - int(num_rows * valid), first_test, 0, max(1, num_rows),
                 recipe.buckets)


def split_by_time(recipe: Recipe, slices: Slices, valid: Fraction, test: Fraction) -> Split:
    """Split a log by time at full minutes.

    The rows of test, and of valid and test together, are as many as possible without exceeding the
    requested shares; valid alone may exceed its share if a minute at its end has many rows.

    Args:
        recipe: gives the number or the length of the buckets.
        slices: yields pairs of ascending minutes since 1970 that have rows, int64 [K], and the
            number of rows in each, int64 [K]; at least one minute in total.
        valid, test: requested shares of the rows.

    Raises:
        InvalidInputError: there are more than `MAX_BUCKETS` buckets of ``bucket_seconds``.
    """
    total, begin, end = 0, 0, 0
    for minutes, counts in slices():
        begin = begin if total else int(minutes[0])
        end, total = int(minutes[-1]) + 1, total + int(counts.sum())
    wanted = [int(total * test), int(total * test) + int(total * valid)]
    cuts = [end, end]  # first minutes of test and valid: at most `wanted` rows are from there on
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
        if buckets > MAX_BUCKETS:
            raise InvalidInputError(
                "cannot divide the log's time into buckets", "buckets of bucket_seconds="
                f"{recipe.bucket_seconds} in {(stop - start) / _DAY:g} days", buckets,
                f"at most {MAX_BUCKETS}", "raise [split] bucket_seconds, or remove rows whose "
                "time is wrong")
        stop = start + buckets * recipe.bucket_seconds
    return Split("time", first_valid, first_test, start, stop - start, buckets)


def spans_of_time(slices: Slices, num_rows: int) -> list[tuple[int, int, int]]:
    """Divide a log's time into spans of full minutes with about `num_rows` rows each.

    Args:
        slices: as for `split_by_time`.
        num_rows: approximate rows of a span; a minute is never divided.

    Returns:
        (start, stop, rows) of each span `[start, stop)` in seconds since 1970, ascending.
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
    """Rows `[start, stop)` of a chunk."""

    chunk: Chunk
    start: int
    stop: int

    @staticmethod
    def whole(chunk: Chunk) -> RowRange:
        """Return all rows of a chunk."""
        return RowRange(chunk, 0, chunk.about["rows"])


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the rows of a unit, or of a span of time, to Parquet parts.

    Attributes:
        stage: the staged rows; if the log is split by time, each chunk is sorted by time.
        recipe: names of the columns.
        split: boundaries of the parts.
        vocabulary: opens a column's vocabulary, or its `RawKeys` if ids stay raw.
        output: folder whose subfolders ``train``, ``valid`` and ``test`` get the files.
        options: row group and file sizes, and compression.
    """

    stage: Stage
    recipe: Recipe
    split: Split
    vocabulary: Callable[[str], Vocabulary | RawKeys]
    output: Path
    options: PreprocessOptions

    def write_unit(self, number: int, first_row: int) -> dict[str, int]:
        """Write a unit that begins with row `first_row` of the log; returns rows by split."""
        return self._write(number, (self._table(RowRange.whole(chunk), first_row)
                                    for chunk in self.stage.chunks(number) if chunk.about["rows"]))

    def write_span(self, number: int, num_units: int, first: int, last: int) -> dict[str, int]:
        """Write all rows of the seconds `[first, last)`, sorted by time; returns rows by split.

        Rows of one second keep the order of the log. Since chunks are sorted by time, a span is a
        contiguous range of each chunk.
        """
        near = [RowRange.whole(chunk) for unit in range(num_units)
                for chunk in self.stage.chunks(unit) if (times := chunk.about["time"])
                and times[0] < last and first <= times[1]]
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
            times = x.chunk.numbers().column("time").to_numpy()[x.start:x.stop]
            start, stop = (x.start + int(k) for k in np.searchsorted(times, [first, last]))
            if start < stop:
                found.append(replace(x, start=start, stop=stop))
        return found

    def _in_order(self, ranges: Sequence[RowRange], first: int, last: int
                  ) -> Iterator[pa.Table]:
        """Yield rows of `ranges` (in seconds `[first, last)`) as sorted tables of limited size."""
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
        """Make the output rows of a range, with the temporary column `_PART`."""
        numbers = x.chunk.numbers()
        place = self.split.places(x.chunk, numbers, first_row)[x.start:x.stop]
        numbers = numbers.slice(x.start, x.stop - x.start)
        columns: dict[str, Any] = {
            self.recipe.label: numbers.column("label"),
            self.recipe.bucket_column: self.split.bucket(place),
            **{name: numbers.column(f"dense {k}") for k, name in enumerate(self.recipe.dense)},
            **{name: self._ids(x, k, name) for k, name in enumerate(self.recipe.sparse)}}
        if self.recipe.time:
            columns[self.recipe.time] = numbers.column("time")
        columns[_PART] = self.split.parts(place)
        return table_of(columns)

    def _ids(self, x: RowRange, k: int, name: str) -> Any:
        """Look up the ids of the k-th sparse column: int32 (raw ids int64), or lists of these."""
        coded = x.chunk.codes(k).slice(x.start, x.stop - x.start)
        is_list, values = pa.types.is_list(coded.type), x.chunk.distinct(k).values
        codes = (coded.flatten() if is_list else coded).to_numpy()
        if codes.size * 4 < values.size:  # a short range: look up only the values in it
            there, codes = np.unique(codes, return_inverse=True)
            ids = self.vocabulary(name).lookup(values[there[there > 0] - 1])
            ids = ids if there.size and there[0] == 0 else ids[1:]
        else:
            ids = self.vocabulary(name).lookup(values)
        return lists(pc.list_value_length(coded).to_numpy(), ids[codes]) if is_list else ids[codes]


def _of_part(table: pa.Table, keep: np.ndarray) -> pa.Table:
    """Select the rows where `keep` is true, as a view if they are contiguous."""
    at = np.flatnonzero(keep)
    if at[-1] - at[0] + 1 == at.size:
        return table.slice(int(at[0]), at.size)
    return table.filter(pa.array(keep))


class PartWriter:
    """Writes tables of any sizes as Parquet files with row groups of equal size."""

    def __init__(self, folder: Path, unit: int, options: PreprocessOptions,
                 sparse: Collection[str], is_large: bool = False) -> None:
        """Write to `folder`; the files of a large log (`is_large`) stay out of the page cache."""
        self._folder, self._unit, self._options, self._is_large = folder, unit, options, is_large
        self._sparse = set(sparse)  # columns of ids
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._num_pending = self._num_parts = self._part_rows = self.num_rows = 0

    def close(self) -> None:
        """Write the remaining rows and close the last file."""
        if self._num_pending:
            self._flush(self._num_pending)
        self._end_part()

    def _end_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._dropper.close()
        self._writer, self._part_rows = None, 0

    def write(self, table: pa.Table) -> None:
        """Add rows; complete row groups are written immediately."""
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
                self._dropper = PageDropper(self._folder / name, use=self._is_large)
                self._num_parts += 1
            piece = table.slice(start, min(group, count - start))
            self._writer.write_table(piece, row_group_size=group)
            self._dropper.advance(piece.nbytes)
            self._part_rows += piece.num_rows
            if self._part_rows >= self._options.part_rows:
                self._end_part()

    def _encodings(self, schema: pa.Schema) -> dict[str, Any]:
        """Choose encodings of columns that are fast to read, since data is read many times."""
        if self._options.compression == "none":
            # Ids and floats in plain encoding: dictionaries save little on ids, and decoding costs
            # a training run more time than reading the additional bytes.
            return {"compression": "none", "use_dictionary": [
                f.name for f in schema
                if f.name not in self._sparse and not pa.types.is_floating(f.type)]}
        # Ids compress mainly by their zero upper bytes, which byte stream split makes adjacent;
        # level -20 compresses these almost as well as level 1 in two thirds of the time. Floats
        # repeat: a dictionary removes three quarters of the bytes, and zstd hardly more.
        paths = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name
                 for f in schema}
        ids = [path for n, path in paths.items() if n in self._sparse]
        packed = [paths[f.name] for f in schema if not pa.types.is_floating(_values(f.type))]
        return {"compression": dict.fromkeys(packed, "zstd"),
                "compression_level": dict.fromkeys(packed, -20),
                "use_dictionary": [path for path in paths.values() if path not in ids],
                "column_encoding": dict.fromkeys(ids, "BYTE_STREAM_SPLIT")}


def _values(of: pa.DataType) -> pa.DataType:
    return of.value_type if pa.types.is_list(of) else of


def train_values(chunk: Chunk, split: Split, first_row: int, column: int) -> Distinct:
    """Count the distinct values of a column in the training rows of a chunk.

    Args:
        chunk: the chunk.
        split: boundaries of the parts.
        first_row: row number in the log of the first row of the chunk's unit.
        column: index of the sparse column.
    """
    about, found = chunk.about, chunk.distinct(column)
    if split.by == "rows":
        low, high = first_row + about["first"], first_row + about["first"] + about["rows"] - 1
    else:
        low, high = about["time"] or (0, -1)
    if high < split.first_valid:
        return found
    counts = np.zeros(1, np.int64)  # by code; codes past the end do not occur
    if low < split.first_valid:
        keep = split.places(chunk, chunk.numbers(), first_row) < split.first_valid
        codes = chunk.codes(column)
        if pa.types.is_list(codes.type):
            keep = np.repeat(keep, pc.list_value_length(codes).to_numpy())
            codes = codes.flatten()
        counts = np.bincount(codes.to_numpy()[keep], minlength=1)  # all bags may be empty
    some = counts[1:] > 0
    return Distinct(found.values[:some.size][some], counts[1:][some], int(counts[0]))
