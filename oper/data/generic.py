"""Recipes ``csv`` and ``parquet``, whose columns are named on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oper.data.reading import store
from oper.data.reading.lines import expand_inputs
from oper.data.reading.readers import is_parquet
from oper.data.recipe import KINDS, TRANSFORMS, Layout, Recipe, finite, recipe_from_dict
from oper.errors import InvalidInputError, require

GENERIC = ("csv", "parquet")


@dataclass(frozen=True, slots=True)
class Choice:
    """The columns to read from CSV or Parquet files, and how to parse them.

    Attributes:
        sparse: names of the id columns; ``NAME:c`` for fields of several ids separated by the
            character c, ``NAME:PARSE`` for ids that are not strings (see
            `oper.data.recipe.Column`), ``NAME:bins=18/30`` for numbers that are divided into bins.
            In Parquet files ids are integers, strings or lists of these.
        label: name of a column of 0 and 1, unless `threshold` or `among` is given; ``NAME:number``
            and ``NAME:log1p`` keep numbers (transformed) as labels; None = no label.
        dense: names of the numeric columns; ``NAME:log1p`` applies log(1 + max(x, 0)).
        time: name of the time column to split by; None = split by the order of the rows.
        time_format: ``"unix"``, ``"unix_ms"``, ``"iso"`` or ``"iso_zone"``.
        separator: field separator of CSV files.
        filter: conditions on rows, see `oper.data.recipe.Layout`.
        threshold: the label is 1 for numbers >= `threshold`, else 0.
        among: the label is 1 for strings in `among`, else 0.
        encoding: encoding of CSV files, ``"utf-8"`` or ``"latin-1"``.
        join: path of a side table whose columns are added; CSV with a header, or Parquet.
        join_on: key column of the join, ``NAME`` or ``NAME=NAME_IN_SIDE_TABLE``.
        join_sparse, join_dense: columns of the side table to add, in the form of `sparse`, `dense`.
        cross: crossed columns ``A*B=N``: the ids of A and B, hashed together into N rows.
    """

    sparse: Sequence[str]
    label: str | None = None
    dense: Sequence[str] = ()
    time: str | None = None
    time_format: str = "unix"
    separator: str = ","
    filter: Sequence[str] = ()
    threshold: float | None = None
    among: Sequence[str] = ()
    encoding: str = "utf-8"
    join: str | None = None
    join_on: str = ""
    join_sparse: Sequence[str] = ()
    join_dense: Sequence[str] = ()
    cross: Sequence[str] = ()


def generic_recipe(kind: str, choice: Choice) -> Recipe:
    """Make the recipe of `kind` ``"csv"`` or ``"parquet"``; raises InvalidInputError."""
    if not choice.sparse:
        raise InvalidInputError(f"cannot read {kind} files", "sparse columns", list(choice.sparse),
                                "at least one", "name the id columns with --sparse a,b,c")
    what = f"cannot read {kind} files"
    require(what, "pass the missing options, or leave all of these out",
            ("threshold, among", (choice.threshold, list(choice.among)),
             (choice.threshold is None) + (not choice.among) + (choice.label is not None) > 1,
             "at most one of them, and only with a label"),
            ("join, join-on", (choice.join, choice.join_on),
             bool(choice.join) == bool(choice.join_on) == bool(
                 choice.join_sparse or choice.join_dense),
             "a file, its key and columns, or none of them"))
    columns: list[dict[str, Any]] = []
    if choice.label is not None:
        name, _, kept = choice.label.rpartition(":")
        is_number = bool(name) and kept in ("number", "log1p")
        require(what, "keep the numbers, or turn them into 0 and 1",
                ("label", choice.label, not is_number or (
                    choice.threshold is None and not choice.among),
                 "no threshold and no among with a label that is a number"))
        columns.append({"name": "label", "kind": "label",
                        "source": [name if is_number else choice.label]})
        if is_number:
            columns[-1] |= {"parse": "number", "transform": "log1p" if kept == "log1p" else "none"}
        elif choice.threshold is not None:
            columns[-1] |= {"parse": "threshold", "threshold": choice.threshold}
        elif choice.among:
            columns[-1] |= {"parse": "among", "positive": list(choice.among)}
    if choice.time is not None:
        columns.append({"name": "time", "kind": "time", "parse": choice.time_format,
                        "source": [choice.time]})
    columns += _columns(choice.dense, choice.sparse)
    split: Mapping[str, Any] = {"by": "time" if choice.time else "rows", "valid": "1/10",
                                "buckets": 10, "bucket_column": "bucket"}
    value: dict[str, Any] = {"name": kind, "column": columns, "split": split,
                             "cross": [_cross(what, text) for text in choice.cross]}
    if choice.join is not None:
        key, _, on = choice.join_on.partition("=")
        value["join"] = {"file": choice.join, "key": key, "on": on or key,
                         "column": _columns(choice.join_dense, choice.join_sparse)}
        with store.open_input(choice.join) as file:
            if file.read(4) == b"PAR1":
                value["join"] |= {"format": "parquet", "header": False, "quote": ""}
    value |= _form(kind, choice.separator, choice.encoding)
    if choice.filter:
        value["filter"] = list(choice.filter)
    return recipe_from_dict(value, what)


def _form(kind: str, separator: str, encoding: str) -> dict[str, Any]:
    """Return the fields of a `Layout` for files of `kind`, except name and columns."""
    return {"format": "parquet"} if kind == "parquet" else {
        "separator": separator, "header": True, "quote": '"', "encoding": encoding}


def file_layout(kind: str, separator: str, encoding: str) -> Layout:
    """Make a `Layout` for files of `kind` (``"text"``, ``"parquet"``, ...) whose columns are still
    unknown: its list of columns is empty."""
    return Layout(kind, (), **_form(kind, separator, encoding))


def _columns(dense: Sequence[str], sparse: Sequence[str]) -> list[dict[str, Any]]:
    """Convert columns in the form of `Choice` to column entries of a recipe."""
    found: list[dict[str, Any]] = []
    for text in dense:
        name, _, transform = text.rpartition(":")
        found.append({"name": name, "kind": "dense", "parse": "float", "transform": transform}
                     if name and transform in TRANSFORMS else
                     {"name": text, "kind": "dense", "parse": "float"})
    for text in sparse:
        entry: dict[str, Any] = {"kind": "sparse", "parse": "string"}
        if len(text) > 2 and text[-2] == ":":
            text, entry["multi"] = text[:-2], text[-1]
        name, _, parse = text.rpartition(":")
        if name and parse in KINDS["sparse"]:
            text, entry["parse"] = name, parse
        elif name and parse.startswith("bins="):
            text, entry["parse"] = name, "bins"
            # Other text is refused by `recipe_from_dict`, which names the column.
            entry["bins"] = [x if (number := finite(x)) is None else number
                             for x in parse.removeprefix("bins=").split("/")]
        found.append({"name": text, **entry})
    return found


def _cross(what: str, text: str) -> dict[str, Any]:
    names, _, rows = text.rpartition("=")
    if not names or not rows.isdigit():
        raise InvalidInputError(what, "cross", text, "A*B=N", "name columns A, B and N rows")
    return {"name": names.replace("*", "_x_"), "of": names.split("*"), "rows": int(rows)}


def check_generic_inputs(kind: str, inputs: Sequence[str]) -> None:
    """Raise InvalidInputError for CSV files given as ``"parquet"`` and vice versa."""
    files = [name for name in inputs if not store.is_pipe(name)]
    for path in expand_inputs(files) if files else []:
        found = "parquet" if is_parquet(path) else "csv"
        if found != kind:
            raise InvalidInputError(f"cannot read {path!r}", "format", found, kind,
                                    f"use the recipe {found!r}")
