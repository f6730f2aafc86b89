"""Estimate a job's disk, memory and time from the first rows of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from oper.data.reading import store
from oper.data.reading.lines import Unit, first_of_each_file, open_text
from oper.data.reading.readers import num_arrays_rows, open_parquet, read_first
from oper.data.reading.rows import piece_rows
from oper.data.recipe import Recipe
from oper.data.vocabulary.merging import MEMORY_BYTES, slice_entries
from oper.tables import format_bytes

_SAMPLE_BYTES = 1 << 22
# Measured on one core: seconds per field of text; bytes of gzip text per second.
_FIELD_S, _UNPACKED_BYTES_PER_S = 90e-9, 300e6
_LEAST_MEMORY = 192 << 20  # per worker: the interpreter, pyarrow, and a block


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a job, estimated from the first rows of every file.

    Attributes:
        rows: rows of the log.
        work_bytes: disk space of the work folder when all units have been read.
        output_bytes: disk space of the output without compression.
        memory_bytes: peak memory of each worker, if strings are not longer than in the first rows.
            The number of distinct values is overestimated: new values are as frequent in the entire
            log as in its first rows.
        core_seconds: total processor time of all workers, modelled from the time per field measured
            on a reference machine.
    """

    rows: int
    work_bytes: int
    output_bytes: int
    memory_bytes: int
    core_seconds: float

    @property
    def disk_bytes(self) -> int:
        """Bound on the peak disk space: work folder plus output.

        The peak is lower if the split is by rows, since each unit's files in the work folder are
        removed once it is written.
        """
        return self.work_bytes + self.output_bytes

    def text(self, free: int | None = None) -> str:
        """Format the estimate in one line; `free`: free bytes on the disk, None = omit."""
        rows = float(f"{self.rows:.3g}")
        time = (f"{self.core_seconds / 60:,.0f} min" if self.core_seconds > 99 else
                f"{max(1, self.core_seconds):.0f} s")
        return (f"about {rows:,.0f} rows; disk: about {format_bytes(self.work_bytes)} while "
                f"working, {format_bytes(self.output_bytes)} to keep"
                + ("" if free is None else f"; {format_bytes(free)} free")
                + f"; memory: up to about {format_bytes(self.memory_bytes)} for each worker; "
                f"time: about {time} of one core (modelled)")


def needs(recipe: Recipe, units: Sequence[Unit], id_bytes: int = 4) -> Needs:
    """Estimate the needs of a job by extrapolating from the first rows of each file.

    `id_bytes` is the size of an id in the output.
    """
    rows, work, output, seconds = 0, 0.0, 0.0, 0.0
    every: list[_Sampled] = []
    num_dense, num_added = len(recipe.dense), len(recipe.sparse) - len(recipe.names("sparse"))
    for unit in first_of_each_file(units):
        found = _sampled(unit, recipe)
        every.append(found)
        count, ids = found.rows, found.ids + num_added
        rows += count
        # Codes take 1 to 4 bytes; distinct values with their counts take less than the text.
        work += count * (9 + 4 * num_dense + 4 * found.num_bags + 3 * ids
                         + min(0.5 * found.row_bytes, 6 * ids))
        # Parquet's repetition levels take about a quarter of a byte per id of a bag.
        output += count * (2 + 5 * bool(recipe.time) + 4 * num_dense + id_bytes * ids
                           + (0.25 * ids if found.num_bags else 0))
        seconds += count * ((num_dense + ids + 1) * _FIELD_S
                            + found.row_bytes * found.unpacked / _UNPACKED_BYTES_PER_S)
    return Needs(rows, int(work), int(output), _memory(recipe, rows, every), round(seconds, 1))


def _memory(recipe: Recipe, rows: int, files: Sequence[_Sampled]) -> int:
    """Estimate the peak memory of a worker in bytes: that of the phase that needs the most.

    The factors, of copies that exist at the same time, are measured.
    """
    num_dense, num_sparse = len(recipe.dense), len(recipe.sparse)
    most = piece_rows(recipe.dense, recipe.sparse)
    chunk = min(rows + 1, most)
    reading = counting = 0.0
    for file in files:
        columns = file.columns
        # The rows as they are parsed, joined to a chunk and put in order.
        raw = chunk * sum(c.per_row * (c.mean_bytes + 4) for c in columns) + 4 * chunk * num_dense
        # One column's distinct values: as parsed, padded to the longest, in order, and as a file.
        reading = max(reading, (2 + (recipe.by == "time")) * raw + max((
            c.distinct(chunk) * (3 * c.longest + c.mean_bytes + 40) + 8 * chunk * c.per_row
            for c in columns), default=0.0))
    for same in zip(*(file.columns for file in files), strict=True):
        longest = max(c.longest for c in same)
        num = max(c.distinct(rows) for c in same)
        counting = max(counting, min(num * (longest + 8), 1.0 * MEMORY_BYTES)
                       + min(num, slice_entries(longest)) * (3.5 * longest + 80))
    writing = min(8 * most * (num_dense + num_sparse + 4), 12 * (rows + 1) * (
        num_dense + num_sparse))
    return _LEAST_MEMORY + int(max(reading, counting, writing))


@dataclass(frozen=True, slots=True)
class _Column:
    """The ids of a sparse column in the first rows of a file: ids per row, their mean and largest
    size in bytes, the number of distinct ones, and the share of ids that occur once."""

    per_row: float
    mean_bytes: float
    longest: int
    num_distinct: int
    once: float

    def distinct(self, rows: int) -> float:
        """Bound the expected number of distinct ids in `rows` rows: the share of new ids decreases,
        and in the first rows it is about the share of those that occur once (Good-Turing)."""
        num = rows * self.per_row
        return min(num, self.num_distinct + num * self.once)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Estimates for one file: rows, bytes of text per row, ids per row in all parsed columns,
    number of list columns, whether the file is compressed, and its sparse columns."""

    rows: int
    row_bytes: float
    ids: float
    num_bags: int
    unpacked: bool
    columns: tuple[_Column, ...]


def _sampled(unit: Unit, recipe: Recipe) -> _Sampled:
    path, layout = unit.path, recipe.layout(unit.layout)
    size, unpacked = store.size(path), False
    if layout.format in ("parquet", "npy"):
        rows = (num_arrays_rows(path) if layout.format == "npy"
                else open_parquet(path).metadata.num_rows)
        row_bytes = size / max(1, rows)
    else:
        with open_text(path) as (text, raw):
            sample, unpacked = text.read(_SAMPLE_BYTES), text is not raw
            ratio = len(sample) / max(1, min(raw.tell(), size)) if unpacked else 1.0
        row_bytes = len(sample) / max(1, sample.count(b"\n"))
        rows = int(size * ratio / max(1.0, row_bytes))
    first = read_first(unit, recipe)
    if first is None or not first.rows.size:
        return _Sampled(rows, row_bytes, len(layout.of("sparse")), 0, unpacked, tuple(
            _Column(0.0, 0.0, 1, 0, 0.0) for _ in recipe.names("sparse")))
    bags = [pa.types.is_list(x.type) for x in first.sparse]
    every = [x.flatten() if several else x for x, several in zip(first.sparse, bags, strict=True)]
    return _Sampled(rows, row_bytes, sum(map(len, every)) / first.rows.size, sum(bags), unpacked,
                    tuple(_column(x, first.rows.size) for x in every))


def _column(ids: pa.Array, num_rows: int) -> _Column:
    """Describe the ids of a column in `num_rows` rows."""
    counts = pc.value_counts(ids.drop_null()).field("counts").to_numpy()
    per_row = len(ids) / num_rows
    once = float((counts == 1).sum()) / max(1, len(ids))
    if not pa.types.is_binary(ids.type):
        return _Column(per_row, ids.type.bit_width / 8, ids.type.bit_width // 8, counts.size, once)
    sizes = pc.binary_length(ids).fill_null(0).to_numpy()
    return _Column(per_row, float(sizes.mean()) if sizes.size else 0.0,
                   max(1, int(sizes.max(initial=0))), counts.size, once)
