"""How much disk a preprocessing job will need, from the first lines of its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from oper.data.lines import open_text
from oper.data.readers import Unit, open_parquet
from oper.data.recipe import Layout, Recipe
from oper.tables import format_bytes

_SAMPLE_BYTES = 1 << 22


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
    num_sparse, num_dense = len(recipe.names("sparse")), len(recipe.names("dense"))
    for path in paths:
        count, row_bytes = _rows(path, layouts[path])
        rows += count
        # Codes of 1 to 4 bytes; distinct values with counts at most as large as the text itself.
        work += count * (9 + 4 * num_dense + 3 * num_sparse + min(0.5 * row_bytes, 6 * num_sparse))
        output += count * (2 + 5 * bool(recipe.time) + 4 * num_dense + 4 * num_sparse)
    return DiskNeed(rows, int(work), int(output))


def _rows(path: str, layout: Layout) -> tuple[int, float]:
    """Rows of a file, about, and bytes of a row."""
    size = os.path.getsize(path)
    if layout.format == "parquet":
        count = open_parquet(path).metadata.num_rows
        return count, size / max(1, count)
    if layout.format == "npy":
        each = 4 * sum(c.kind == "sparse" for c in layout.columns)
        return size // each, float(each)
    with open_text(path) as (text, raw):
        sample = text.read(_SAMPLE_BYTES)
        ratio = len(sample) / max(1, min(raw.tell(), size)) if text is not raw else 1.0
    lines = max(1, sample.count(b"\n"))
    return int(size * ratio * lines / max(1, len(sample))), len(sample) / lines
