"""How much disk a preprocessing job will need, from the first lines of its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oper.data.reading import store
from oper.data.reading.lines import open_text
from oper.data.reading.readers import Unit, num_arrays_rows, open_parquet
from oper.data.reading.text import split_line, text_layout
from oper.data.recipe import Column, Layout, Recipe
from oper.tables import format_bytes

_SAMPLE_BYTES = 1 << 22
_SAMPLE_LINES = 1000  # that fields are looked at of


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Estimated bytes.

    Attributes:
        rows: of the log.
        work: of the work folder when all units have been read.
        output: of what is kept.
    """

    rows: int
    work: int
    output: int

    @property
    def total(self) -> int:
        """At most at the peak; where the split is by rows, a unit's share of the work goes once the
        unit is written."""
        return self.work + self.output

    def text(self, free: int) -> str:
        """For a person."""
        return (f"about {self.rows:,} rows; disk: about {format_bytes(self.work)} while working, "
                f"{format_bytes(self.output)} to keep; {format_bytes(free)} free")


def disk_need(recipe: Recipe, units: Sequence[Unit]) -> DiskNeed:
    """The need of a job, assuming that its rows are like the first ones of each file."""
    rows, work, output = 0, 0.0, 0.0
    paths = dict.fromkeys(u.path for u in units)
    layouts = {u.path: recipe.layout(u.layout) for u in units}
    num_dense = len(recipe.names("dense"))
    for path in paths:
        found = _sampled(path, layouts[path], recipe)
        count, ids = found.rows, found.ids
        rows += count
        # Codes of 1 to 4 bytes; distinct values with counts at most as large as the text itself.
        work += count * (9 + 4 * num_dense + 4 * found.num_bags + 3 * ids
                         + min(0.5 * found.row_bytes, 6 * ids))
        # Parquet tells by about a quarter of a byte per id where bags begin.
        output += count * (2 + 5 * bool(recipe.time) + 4 * num_dense + 4 * ids
                           + (0.25 * ids if found.num_bags else 0))
    return DiskNeed(rows, int(work), int(output))


@dataclass(frozen=True, slots=True)
class _Sampled:
    """About a file: rows, bytes of a row, ids of a row over all columns, columns of bags."""

    rows: int
    row_bytes: float
    ids: float
    num_bags: int


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
                    len(sparse) - len(bags) + ids_of_bags, len(bags))


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
