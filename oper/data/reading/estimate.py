"""The disk, memory and time that a job will need, from the first lines of its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oper.data.reading import store
from oper.data.reading.lines import open_text
from oper.data.reading.readers import Unit, num_arrays_rows, open_parquet
from oper.data.reading.rows import piece_rows
from oper.data.reading.text import split_line, text_layout
from oper.data.recipe import Column, Layout, Recipe
from oper.tables import format_bytes

_SAMPLE_BYTES = 1 << 22
_SAMPLE_LINES = 1000  # that fields are looked at of
# One core on Criteo text (39 fields at 200 MB/s), and on text that pyarrow parses; gzip.
_FIELD_S, _OTHER_FIELD_S, _UNPACKED_BYTES_PER_S = 30e-9, 90e-9, 300e6
_LEAST_MEMORY = 224 << 20  # of a worker: the interpreter, pyarrow, and a block


@dataclass(frozen=True, slots=True)
class Needs:
    """Estimated from the first rows of every file.

    Attributes:
        rows: of the log.
        work_bytes: of disk for the work folder when all units have been read.
        output_bytes: of disk for what is kept, not compressed.
        memory_bytes: of each worker at its peak.
        core_seconds: processor time of all workers together, modelled: what a field takes on the
            machine on which the constants were measured.
    """

    rows: int
    work_bytes: int
    output_bytes: int
    memory_bytes: int
    core_seconds: float

    @property
    def disk_bytes(self) -> int:
        """At most at the peak; where the split is by rows, a unit's share of the work goes once the
        unit is written."""
        return self.work_bytes + self.output_bytes

    def text(self, free: int | None = None) -> str:
        """The estimate in words; `free` are the bytes left on the disk."""
        return (f"about {self.rows:,} rows; disk: about {format_bytes(self.work_bytes)} while "
                f"working, {format_bytes(self.output_bytes)} to keep"
                + ("" if free is None else f"; {format_bytes(free)} free")
                + f"; memory: about {format_bytes(self.memory_bytes)} for each worker; time: about "
                + (f"{self.core_seconds / 60:,.0f} minutes" if self.core_seconds > 99 else
                   f"{self.core_seconds:.0f} seconds") + " of one core (modelled)")


def needs(recipe: Recipe, units: Sequence[Unit], id_bytes: int = 4) -> Needs:
    """The needs of a job, assuming that its rows are like the first ones of each file; an id that
    is written takes `id_bytes`."""
    rows, work, output, seconds = 0, 0.0, 0.0, 0.0
    paths = dict.fromkeys(u.path for u in units)
    layouts = {u.path: recipe.layout(u.layout) for u in units}
    num_dense, num_added = len(recipe.dense), len(recipe.sparse) - len(recipe.names("sparse"))
    for path in paths:
        layout = layouts[path]
        found = _sampled(path, layout, recipe)
        count, ids = found.rows, found.ids + num_added
        rows += count
        # Codes of 1 to 4 bytes; distinct values with counts at most as large as the text itself.
        work += count * (9 + 4 * num_dense + 4 * found.num_bags + 3 * ids
                         + min(0.5 * found.row_bytes, 6 * ids))
        # Parquet tells by about a quarter of a byte per id where bags begin.
        output += count * (2 + 5 * bool(recipe.time) + 4 * num_dense + id_bytes * ids
                           + (0.25 * ids if found.num_bags else 0))
        plain = layout.format == "text" and not layout.quote and len(layout.separator) == 1
        seconds += count * ((num_dense + ids + 1) * (_FIELD_S if plain else _OTHER_FIELD_S)
                            + found.row_bytes * found.unpacked / _UNPACKED_BYTES_PER_S)
    held = piece_rows(recipe.dense, recipe.sparse) * 8 * (num_dense + len(recipe.sparse) + 4)
    return Needs(rows, int(work), int(output), _LEAST_MEMORY + min(held, 12 * (rows + 1) * (
        num_dense + len(recipe.sparse))), round(seconds, 1))


@dataclass(frozen=True, slots=True)
class _Sampled:
    """About a file: rows, bytes of a row, ids of a row over all columns, columns of bags,
    whether it is to be unpacked."""

    rows: int
    row_bytes: float
    ids: float
    num_bags: int
    unpacked: bool = False


def _sampled(path: str, layout: Layout, recipe: Recipe) -> _Sampled:
    size, sparse = store.size(path), layout.of("sparse")
    if layout.format == "parquet":
        meta = open_parquet(path).metadata
        rows = max(1, meta.num_rows)
        ids = [_values(meta, c) / rows for c in sparse]
        return _Sampled(meta.num_rows, size / rows, sum(ids), sum(x != 1 for x in ids))
    if layout.format == "npy":
        rows = num_arrays_rows(path)
        ids_of_row = size / max(1, rows) / 4
        is_bags = path.endswith(".npz")
        return _Sampled(rows, 4 * ids_of_row, ids_of_row, len(sparse) * is_bags)
    with open_text(path) as (text, raw):
        sample = text.read(_SAMPLE_BYTES)
        ratio = len(sample) / max(1, min(raw.tell(), size)) if text is not raw else 1.0
    lines = max(1, sample.count(b"\n"))
    bags = [c for c in sparse if c.multi]
    ids_of_bags = _ids_of_bags(sample, layout, recipe, path) if bags else 0.0
    return _Sampled(int(size * ratio * lines / max(1, len(sample))), len(sample) / lines,
                    len(sparse) - len(bags) + ids_of_bags, len(bags), text is not raw)


def _values(meta: Any, column: Column) -> int:
    """Values of a column of a Parquet file, those of its lists counted one by one."""
    found = 0
    for group in range(meta.num_row_groups):
        part = meta.row_group(group)
        for k in range(part.num_columns):
            name = part.column(k).path_in_schema
            found += part.column(k).num_values * any(
                name == s or name.startswith(f"{s}.") for s in column.sources)
    return found


def _ids_of_bags(sample: bytes, layout: Layout, recipe: Recipe, path: str) -> float:
    """Ids of a row in all columns with several, of the first lines."""
    lines = sample.decode(layout.encoding, "replace").split("\n")[:_SAMPLE_LINES]
    lines = [line for line in lines[:-1] or lines if line]
    if layout.format == "bags":
        return sum(len(line.split()) for line in lines) / max(1, len(lines))
    found = 0
    if layout.format == "jsonl":
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                record = json.loads(line)
                found += sum(str(record.get(c.sources[0]) or "").count(c.multi) + 1
                             for c in layout.of("sparse") if c.multi)
    else:
        text = text_layout(recipe, layout, lines[0] if lines else "", path)
        every = [*enumerate(text.columns), *text.also]
        for line in lines[layout.header:]:
            fields = split_line(line, layout)
            found += sum(fields[k].count(c.multi) + 1 for k, c in every
                         if c.multi and k < len(fields) and fields[k])
    return found / max(1, len(lines) - layout.header)
