"""Detect which layout of a recipe a file has, and divide files into units of work."""

from __future__ import annotations

import json
from collections.abc import Sequence

from oper.data.reading.columns import is_valid
from oper.data.reading.lines import Unit, expand_inputs, first_line, is_empty, units_of_text
from oper.data.reading.readers import is_arrays, is_companion, is_parquet, open_parquet
from oper.data.reading.text import split_line
from oper.data.recipe import Layout, Recipe
from oper.errors import FileFormatError, InvalidInputError, require

_UNIT_ROWS = 1 << 20  # approximate rows of a unit of a Parquet file


def find_inputs(recipe: Recipe, inputs: Sequence[str]) -> list[str]:
    """Expand `inputs` to the files to read, in order; raises as `expand_inputs` does."""
    paths = [p for p in expand_inputs(inputs) if not is_companion(p, recipe.layouts)]
    if not paths:
        raise InvalidInputError("cannot read the log", "inputs", list(inputs),
                                "a file of sparse ids", "name the ..._sparse.npy files")
    return paths


def plan_units(recipe: Recipe, paths: Sequence[str], asked: str | None, unit_bytes: int,
               num_threads: int = 1) -> list[Unit]:
    """Divide files into units of work, in the same way in every process.

    Args:
        recipe: the recipe.
        paths: the files, in order.
        asked: name of the layout of all files; None = detect it for each file.
        unit_bytes: approximate bytes of text of a unit; text files with quoted fields, and files
            compressed other than by gzip, are one unit each.
        num_threads: number of threads that index a gzip file, see `oper.data.reading.cuts`.

    Raises:
        FileFormatError: a file has none of the recipe's layouts.
        InvalidInputError: a file fits several layouts, `asked` does not exist, or the lines of
            several files number the users.
    """
    units: list[Unit] = []
    numbering: list[str] = []  # files whose lines number the users
    for path in paths:
        layout = recipe.layout(asked) if asked else choose_layout(recipe, path)
        if layout.counts_lines and "user" in recipe.names("sparse"):
            numbering.append(path)
        if layout.format == "parquet":
            units += _parquet_units(path, layout)
        elif layout.format == "npy":
            units.append(Unit(path, layout.name))
        else:
            units += units_of_text(path, layout, unit_bytes, num_threads)
    require("cannot read the log", "join the files, or begin every line with its user's number "
            "(first = \"user\" in a recipe)",
            ("files whose lines number the users", numbering[:8], len(numbering) <= 1,
             "one, since users of several files would get the same numbers"))
    return units


def _parquet_units(path: str, layout: Layout) -> list[Unit]:
    meta = open_parquet(path).metadata
    units, start, rows = [], 0, 0
    for group in range(meta.num_row_groups):
        rows += meta.row_group(group).num_rows
        if rows >= _UNIT_ROWS or group == meta.num_row_groups - 1:
            units.append(Unit(path, layout.name, start, group + 1))
            start, rows = group + 1, 0
    return units or [Unit(path, layout.name)]


def choose_layout(recipe: Recipe, path: str) -> Layout:
    """Detect the layout of a file; raises as `plan_units` does."""
    if is_parquet(path) or is_arrays(path):
        kind = "parquet" if is_parquet(path) else "npy"
        found = [x for x in recipe.layouts if x.format == kind]
    else:
        found = _text_layouts(recipe, path)
    if found and ((found[0].format in ("text", "jsonl", "bags") and is_empty(path))
                  or (len(found) == 1 and not (found[0].ask and len(recipe.layouts) > 1))):
        return found[0]
    if found:
        raise InvalidInputError(f"cannot tell the layout of {path!r}", "layout",
                                [x.name for x in found], "one of them",
                                "the columns fit several: choose one with --layout")
    line = first_line(path)
    raise FileFormatError(f"cannot read {path!r} by recipe {recipe.name!r}", "first line",
                          line[:120],
                          f"one of the layouts {', '.join(map(_describe, recipe.layouts))}",
                          "pass a log in one of these layouts, or choose another recipe")


def _describe(layout: Layout) -> str:
    if layout.format != "text":
        return f"{layout.name} ({layout.format})"
    names = ",".join(c.sources[0] for c in layout.columns if c.kind != "skip")[:80]
    return f"{layout.name} ({f'header {names}' if layout.header else len(layout.columns)} columns)"


def _text_layouts(recipe: Recipe, path: str) -> list[Layout]:
    every = [x for x in recipe.layouts if x.format in ("text", "jsonl", "bags")]
    if len(every) <= 1 and len(recipe.layouts) == 1:
        return every
    fits = {x.name: _fit(x, first_line(path, x.encoding)) for x in every}
    best = max(fits.values(), default=0)
    return [x for x in every if best and fits[x.name] == best]


def _fit(layout: Layout, line: str) -> int:
    """Score a first line: 0 = does not fit the layout, 1 = number of columns fits, 2 = values too.
    """
    if not line:
        return 1
    wanted = [c.sources for c in layout.columns if c.kind != "skip"]
    if layout.format == "jsonl":
        try:
            keys = set(json.loads(line))
        except (TypeError, ValueError):
            return int(line.startswith("{"))
        return 1 + all(keys & set(names) for names in wanted) if line.startswith("{") else 0
    if layout.format == "bags":
        return 2 * line.replace(" ", "").isdigit()
    fields = split_line(line, layout)
    if layout.header:
        return 2 * all(any(f.strip() in names for f in fields) for names in wanted)
    if len(fields) != len(layout.columns):
        return 0
    valid = all(is_valid(c, f.encode()) for c, f in zip(layout.columns, fields, strict=True))
    return 1 + valid
