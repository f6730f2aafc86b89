"""Recipes of CSV and Parquet files whose columns are named on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oper.data.reading import store
from oper.data.reading.lines import expand_inputs
from oper.data.recipe import Recipe, recipe_from_dict
from oper.errors import InvalidInputError, fail

GENERIC = ("csv", "parquet")


@dataclass(frozen=True, slots=True)
class Choice:
    """Columns of a file of one's own.

    Attributes:
        sparse: names of the id columns; ``NAME:c`` for fields that hold several ids with the
            character c between them. Ids are texts in CSV files; in Parquet files integers, texts
            or lists of these.
        label: a column of 0 and 1; None = none.
        dense: number columns.
        time: a time column to split by; None = the order of the rows.
        time_format: ``"unix"``, ``"unix_ms"``, ``"iso"`` or ``"iso_zone"``.
        separator: of CSV files.
        filter: of Parquet files, see `oper.data.recipe.Layout`.
    """

    sparse: Sequence[str]
    label: str | None = None
    dense: Sequence[str] = ()
    time: str | None = None
    time_format: str = "unix"
    separator: str = ","
    filter: Sequence[str] = ()


def generic_recipe(kind: str, choice: Choice) -> Recipe:
    """The recipe ``"csv"`` or ``"parquet"``; raises InvalidInputError."""
    if not choice.sparse:
        raise InvalidInputError(
            fail(f"cannot read {kind} files", "sparse columns", list(choice.sparse),
                 "at least one", "name the id columns with --sparse a,b,c"))
    columns: list[dict[str, Any]] = []
    if choice.label is not None:
        columns.append({"name": "label", "kind": "label", "source": [choice.label]})
    if choice.time is not None:
        columns.append({"name": "time", "kind": "time", "parse": choice.time_format,
                        "source": [choice.time]})
    columns += [{"name": n, "kind": "dense", "parse": "float"} for n in choice.dense]
    for name in choice.sparse:
        plain, _, multi = name.rpartition(":") if len(name) > 2 and name[-2] == ":" else (
            name, "", "")
        columns.append({"name": plain, "kind": "sparse", "parse": "string",
                        **({"multi": multi} if multi else {})})
    split: Mapping[str, Any] = {"by": "time" if choice.time else "rows", "valid": "1/10",
                                "buckets": 10, "bucket_column": "bucket"}
    value: dict[str, Any] = {"name": kind, "column": columns, "split": split}
    if kind == "csv":
        if choice.filter:
            raise InvalidInputError(fail("cannot read csv files", "filter", list(choice.filter),
                                         "none: only Parquet files are filtered",
                                         "filter them before"))
        value |= {"separator": choice.separator, "header": True, "quote": '"'}
    else:
        value |= {"format": "parquet", "filter": list(choice.filter)}
    return recipe_from_dict(value, f"cannot read {kind} files")


def check_generic_inputs(kind: str, inputs: Sequence[str]) -> None:
    """Say what to do about files that are not of `kind`; raises InvalidInputError."""
    files = [name for name in inputs if not store.is_pipe(name)]
    for path in expand_inputs(files) if files else []:
        with store.open_input(path) as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet != (kind == "parquet"):
            raise InvalidInputError(
                fail(f"cannot read {path!r}", "format", "Parquet" if is_parquet else "text",
                     kind, f"use the recipe {'parquet' if is_parquet else 'csv'!r}"))
