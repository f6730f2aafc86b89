"""Estimate a job's disk, memory and time from the first rows of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from oper.data.reading import store
from oper.data.reading.lines import Unit, first_of_each_file, open_text
from oper.data.reading.readers import num_arrays_rows, open_parquet, read_first
from oper.data.reading.rows import piece_rows
from oper.data.recipe import Recipe
from oper.tables import format_bytes

_SAMPLE_BYTES = 1 << 22
# Measured on one core: seconds per field of text; bytes of gzip text per second.
_FIELD_S, _UNPACKED_BYTES_PER_S = 90e-9, 300e6
_LEAST_MEMORY = 224 << 20  # per worker: the interpreter, pyarrow, and a block


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a job, estimated from the first rows of every file.

    Attributes:
        rows: rows of the log.
        work_bytes: disk space of the work folder when all units have been read.
        output_bytes: disk space of the output without compression.
        memory_bytes: peak memory of each worker.
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
        return (f"about {rows:,.0f} rows; disk: about {format_bytes(self.work_bytes)} while "
                f"working, {format_bytes(self.output_bytes)} to keep"
                + ("" if free is None else f"; {format_bytes(free)} free")
                + f"; memory: about {format_bytes(self.memory_bytes)} for each worker; time: about "
                + (f"{self.core_seconds / 60:,.0f} min" if self.core_seconds > 99 else
                   f"{max(1, self.core_seconds):.0f} s") + " of one core (modelled)")


def needs(recipe: Recipe, units: Sequence[Unit], id_bytes: int = 4) -> Needs:
    """Estimate the needs of a job by extrapolating from the first rows of each file.

    `id_bytes` is the size of an id in the output.
    """
    rows, work, output, seconds = 0, 0.0, 0.0, 0.0
    num_dense, num_added = len(recipe.dense), len(recipe.sparse) - len(recipe.names("sparse"))
    for unit in first_of_each_file(units):
        found = _sampled(unit, recipe)
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
    held = piece_rows(recipe.dense, recipe.sparse) * 8 * (num_dense + len(recipe.sparse) + 4)
    return Needs(rows, int(work), int(output), _LEAST_MEMORY + min(held, 12 * (rows + 1) * (
        num_dense + len(recipe.sparse))), round(seconds, 1))


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Estimates for one file: rows, bytes of text per row, ids per row in all parsed columns,
    number of list columns, and whether the file is compressed."""

    rows: int
    row_bytes: float
    ids: float
    num_bags: int
    unpacked: bool


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
        return _Sampled(rows, row_bytes, len(layout.of("sparse")), 0, unpacked)
    bags = [pa.types.is_list(x.type) for x in first.sparse]
    ids = sum(len(x.flatten() if several else x)
              for x, several in zip(first.sparse, bags, strict=True))
    return _Sampled(rows, row_bytes, ids / first.rows.size, sum(bags), unpacked)
