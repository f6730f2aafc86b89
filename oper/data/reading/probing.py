"""Check the first records of a log before work begins, to report systematic errors early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from oper.data.generic import GENERIC
from oper.data.preprocessing.staging import too_many_bad
from oper.data.reading.columns import TOP_SECONDS, is_valid
from oper.data.reading.lines import Unit, first_line, first_of_each_file
from oper.data.reading.readers import read_first, where
from oper.data.reading.rows import BadRow
from oper.data.reading.text import separator_advice, split_line
from oper.data.recipe import Column, Recipe, finite

_FILES = 4  # number of files whose first records are checked


def check_first_rows(recipe: Recipe, units: Sequence[Unit], max_bad: int) -> None:
    """Read the first records of up to 4 files and raise the errors that a full pass would raise.

    Raises:
        FileFormatError: a file has more than `max_bad` malformed rows in its first records (the
            message suggests a remedy), or other columns.
        InvalidInputError: a column of a Parquet file has an unsupported type.
    """
    for unit in first_of_each_file(units)[:_FILES]:
        rows = read_first(unit, recipe)
        if rows is not None and rows.num_bad > max_bad:
            too_many_bad(rows.num_bad, max_bad, [where(unit, recipe, b) for b in rows.bad[:3]],
                         _advice(unit, recipe, rows.bad[0]))


def _advice(unit: Unit, recipe: Recipe, bad: BadRow) -> str:
    layout = recipe.layout(unit.layout)
    column = next((c for c in layout.columns if c.name == bad.column), None)
    found = ""
    if layout.format not in ("text", "parquet"):
        pass  # a malformed record does not show what to change in the recipe
    elif column is None:
        line = first_line(unit.path, layout.encoding)
        if len(split_line(line, layout)) != len(layout.columns):
            found = separator_advice(layout, line)
    elif column.kind == "time":
        parse = _time_parse(column, bad.value)
        found = parse and f"times look like {_TIMES[parse]}: " + (
            f"pass --time-format {parse}" if recipe.name in GENERIC
            else f'set parse = "{parse}" for column {column.name!r} in the recipe')
    else:
        flag, parse = _other_parse(column, bad.value)
        found = parse and (f"pass {flag}" if recipe.name in GENERIC else
                           f"set {parse} for column {column.name!r} in the recipe")
    return f"{found or 'correct the log'}, or raise --max-bad"


_TIMES = {"unix": "seconds since 1970", "unix_ms": "milliseconds since 1970",
          "iso": "dates without a zone", "iso_zone": "dates with a zone"}


def _time_parse(column: Column, value: str) -> str:
    """Find the `parse` under which a malformed time would be valid; empty if there is none."""
    number = finite(value)
    if number is not None:
        found = ("unix" if abs(number) < TOP_SECONDS else
                 "unix_ms" if abs(number) / 1000 < TOP_SECONDS else "")
    else:
        try:
            found = "iso" if datetime.fromisoformat(value).tzinfo is None else "iso_zone"
        except ValueError:
            found = ""
    return found if found != column.parse else ""


def _other_parse(column: Column, value: str) -> tuple[str, str]:
    """Find the `parse` under which a malformed value would be valid.

    Returns it as a command-line flag and as a recipe entry; both are empty if there is none.
    """
    number = finite(value)
    if column.kind == "label" and number is not None:
        return (f"--threshold with the smallest number that gives label 1, or --label "
                f"{column.sources[0]}:number to keep the numbers",
                'parse = "threshold" and threshold = the smallest number that gives label 1, or '
                'parse = "number" to keep the numbers')
    if column.kind == "label":
        return (f"--among with the strings that give label 1, such as {value!r}",
                f'parse = "among" and positive = the strings that give label 1, such as {value!r}')
    if column.kind == "dense" and number is not None and column.parse == "int":
        return "", 'parse = "float"'
    if column.kind == "sparse" and column.parse not in ("integral", "string"):
        parse = next((p for p in ("int", "uint64", "integral") if is_valid(
            replace(column, parse=p), value.encode())), "string")
        return f"--sparse {column.name}:{parse}", f'parse = "{parse}"'
    return "", ""
