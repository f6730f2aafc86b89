"""Parse delimited text into rows.

pyarrow splits and converts entire blocks of lines. If it fails or a block has irregular text, the
block is halved until few lines are left, of which each field is checked; malformed rows are
reported, and pyarrow converts the rest. Blocks with quotes are not halved, since a line feed may be
part of a field.
"""

from __future__ import annotations

import csv
import io
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as pacsv

from oper.data.reading import columns as convert
from oper.data.reading.columns import EXPECTED, MalformedError, holds
from oper.data.reading.lines import MARK, Block
from oper.data.reading.rows import MAX_EXAMPLES, BadRow, Rows, by_halves, concat, show
from oper.data.recipe import Column, Layout, Recipe, conditions, finite
from oper.errors import FileFormatError, InvalidInputError

SEPARATORS = (",", "\t", ";", "|", "::", " ")
_UNIT_SEPARATOR = "\x1f"  # replaces separators of several characters
_FEW_LINES = 64  # if a line is irregular, each field of this many lines is checked


@dataclass(frozen=True, slots=True)
class TextLayout:
    """How the lines of one file are split into columns.

    Attributes:
        layout: layout of the recipe.
        columns: the column of each field of a line; fields not in the recipe have kind ``"skip"``.
        dense, sparse: names of the recipe's columns, in its order.
        also: (index of a field, column) for a second or further column read from that field.
    """

    layout: Layout
    columns: tuple[Column, ...]
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    also: tuple[tuple[int, Column], ...] = ()


def separator_of(layout: Layout) -> str:
    """Return the single character that separates the fields in the output of `unified`."""
    return layout.separator if len(layout.separator) == 1 else _UNIT_SEPARATOR


def parse_options(layout: Layout, **more: Any) -> pacsv.ParseOptions:
    """Make pyarrow's options for splitting lines of a layout in the output of `unified`."""
    return pacsv.ParseOptions(
        delimiter=separator_of(layout), quote_char=layout.quote or False,
        double_quote=not layout.escape, escape_char=layout.escape or False,
        newlines_in_values=bool(layout.quote), ignore_empty_lines=False, **more)


def split_line(line: str, layout: Layout) -> list[str]:
    """Split one line into fields; raises FileFormatError if its quoting is invalid."""
    if not layout.quote:
        return line.split(layout.separator)
    try:
        return next(csv.reader([line], **_dialect(layout.separator, layout)), [])
    except csv.Error as error:  # for example, lines that end in a carriage return only
        raise FileFormatError("cannot read the log", "line", line[:80],
                              f"properly quoted fields in lines that end in line feeds ({error})",
                              "correct the quotes, or convert the line ends") from None


def _dialect(separator: str, layout: Layout) -> dict[str, Any]:
    return {"delimiter": separator, "quotechar": layout.quote, "escapechar": layout.escape or None,
            "doublequote": not layout.escape, "strict": False}


def text_layout(recipe: Recipe, layout: Layout, line: str, path: str) -> TextLayout:
    """Match the layout's columns with a file whose first line is `line`.

    Raises:
        FileFormatError: the header lacks a column of the layout, or repeats one.
        InvalidInputError: columns that share a field have different types.
    """
    columns = layout.columns
    also: list[tuple[int, Column]] = []
    if layout.header:
        columns, also = _by_header(layout, split_line(line, layout), path)
    return TextLayout(layout, columns, recipe.names("dense"), recipe.names("sparse"), tuple(also))


def _by_header(layout: Layout, header: Sequence[str], path: str
               ) -> tuple[tuple[Column, ...], list[tuple[int, Column]]]:
    wanted: dict[int, Column] = {}
    # Columns that occur only in the filter are read too.
    known = {n for c in layout.columns for n in (c.name, *c.sources) if c.kind != "skip"}
    only = [Column(n, "sparse", "string") if finite(v) is None else Column(n, "dense", "float")
            for n, v in {n: v for n, _, v in conditions(layout)}.items() if n not in known]
    also: list[tuple[int, Column]] = []
    missing = []
    for column in (*layout.columns, *only):
        if column.kind == "skip":
            continue
        places = [k for k, name in enumerate(header) if name.strip() in column.sources]
        if len(places) != 1:
            missing.append(" or ".join(column.sources))
        elif places[0] not in wanted:
            wanted[places[0]] = column
        elif convert.arrow_type(wanted[places[0]]) == convert.arrow_type(column):
            also.append((places[0], column))
        else:
            raise InvalidInputError(f"cannot read files in recipe layout {layout.name!r}",
                                    "columns of one source", [wanted[places[0]].name, column.name],
                                    "the same type of number or text",
                                    "give them the same parse in the recipe")
    if missing:
        raise FileFormatError(
            f"cannot read {path!r}", "header", ",".join(header),
            f"each of the columns {missing[:8]} exactly once",
            separator_advice(layout, layout.separator.join(header)) or
            "name the columns of its header, or pass a file with these columns")
    return tuple(wanted.get(k, Column(f"skip {k}", "skip")) for k in range(len(header))), also


def separator_advice(layout: Layout, line: str) -> str:
    """Suggest another separator with which the first line `line` has the layout's columns.

    Returns "" if none of `SEPARATORS` fits.
    """
    if "\0" in line:
        return "its zero bytes look like UTF-16: convert it to UTF-8"
    for separator in SEPARATORS:
        fields = [field.strip() for field in line.split(separator)]
        fits = all(any(s in fields for s in c.sources) for c in layout.columns if c.kind != "skip"
                   ) if layout.header else len(fields) == len(layout.columns)
        if fits and separator != layout.separator:
            shown = "\\t" if separator == "\t" else separator
            return (f"its fields are separated by {separator!r}: pass --separator '{shown}' "
                    "(recipe csv), or correct the recipe's separator")
    return ""


def parse_block(block: Block, text: TextLayout) -> Rows:
    """Parse a block of lines; malformed rows are left out and described in `Rows.bad`."""
    data = unified(block.data, text.layout)
    try:
        if _is_odd(data, text):
            raise MalformedError("")
        rows = _convert(data, text, block.first_row, None)
        if rows.rows.size > block.num_lines:
            raise MalformedError("")
        return replace(rows, num_lines=block.num_lines)
    except (MalformedError, pa.ArrowInvalid):
        if text.layout.quote or block.num_lines <= _FEW_LINES:
            return _row_by_row(data, text, block)
        return concat([parse_block(half, text) for half in _halves(block)])


def _halves(block: Block) -> tuple[Block, Block]:
    """Divide a block of two or more lines near its middle."""
    data = block.data
    at = (data.rfind(b"\n", 0, len(data) // 2) + 1) or data.index(b"\n") + 1
    first = Block(block.path, data[:at], block.first_row)
    return first, Block(block.path, data[at:], block.first_row + first.num_lines)


def unified(data: bytes, layout: Layout) -> bytes:
    """Convert text to UTF-8 with separators of one character."""
    if layout.encoding == "latin-1" and not data.isascii():
        data = data.decode("latin-1").encode()
    if len(layout.separator) > 1:
        if _UNIT_SEPARATOR.encode() in data:
            data = data.replace(_UNIT_SEPARATOR.encode(), b"\xef\xbf\xbd")
        data = data.replace(layout.separator.encode(), _UNIT_SEPARATOR.encode())
    return data


def _is_odd(data: bytes, text: TextLayout) -> bool:
    """Whether a block may contain text that pyarrow accepts but the recipe does not allow."""
    # pyarrow also ends a line at a carriage return without a line feed.
    if b"\0" in data or (b"\r" in data and not text.layout.quote
                         and data.count(b"\r") != data.count(b"\r\n")):
        return True
    # pyarrow takes an empty line for a row of missing fields, which labels and times must not be.
    if len(text.columns) > 1 and all(c.kind not in ("label", "time") for c in text.columns) and (
            data.startswith((b"\n", b"\r\n")) or b"\n\n" in data
            or (b"\r" in data and b"\n\r\n" in data)):
        return True
    # pyarrow accepts hexadecimal integers. A false positive only costs time. A single character is
    # found much faster than two.
    return any(x in data and b"0" + x in data for x in (b"x", b"X")) and any(
        c.parse in ("int", "uint32", "uint64") for c in text.columns)


def _convert(data: bytes, text: TextLayout, first_row: int, rows: np.ndarray | None) -> Rows:
    """Convert lines with pyarrow; raises MalformedError or ArrowInvalid if one is malformed.

    `rows` are the lines' indices in the unit; None = consecutive from `first_row` on.
    """
    names = [str(k) for k in range(len(text.columns))]
    layout = text.layout
    used = {str(k): c for k, c in enumerate(text.columns) if c.kind != "skip"}
    if data.startswith(MARK):  # part of the first field: the file's own mark is removed already
        data = MARK + data     # pyarrow skips one
    table = pacsv.read_csv(
        pa.BufferReader(data),
        pacsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options(layout),
        pacsv.ConvertOptions(
            check_utf8=False, column_types={k: convert.arrow_type(c) for k, c in used.items()},
            include_columns=list(used), null_values=[""], strings_can_be_null=True))
    if rows is None:
        rows = np.arange(first_row, first_row + table.num_rows)
    for name, how, value in conditions(layout):
        place = next(k for k, c in used.items() if name in (c.name, *c.sources))
        fields = convert.compared(used[place], table.column(place))
        keep = holds(fields, how, value, f"layout {layout.name}")
        table, rows = table.filter(keep), rows[keep.to_numpy()]
    columns = {c.name: (c, table.column(k).combine_chunks()) for k, c in used.items()}
    columns.update({c.name: (c, columns[text.columns[k].name][1]) for k, c in text.also})
    return rows_of(columns, text.dense, text.sparse, rows)


def rows_of(columns: dict[str, tuple[Column, pa.Array]], dense: Sequence[str],
            sparse: Sequence[str], rows: np.ndarray) -> Rows:
    """Convert Arrow columns [n] to rows with the indices `rows` [n]; raises MalformedError."""
    label = [p for p in columns.values() if p[0].kind == "label"]
    time = [p for p in columns.values() if p[0].kind == "time"]
    count = rows.size
    numbers = np.zeros((len(dense), count), np.float32)
    for k, name in enumerate(dense):
        numbers[k] = convert.dense(*columns[name])
    return Rows(
        count, rows, convert.labels(*label[0]) if label else np.ones(count, np.int8), numbers,
        tuple(convert.ids(*columns[name]) for name in sparse),
        convert.times(*time[0]) if time else None)


def _row_by_row(data: bytes, text: TextLayout, block: Block) -> Rows:
    """Parse a block field by field, leaving out malformed rows."""
    records = _records(data, text, block)
    bad: list[BadRow] = []
    good = []
    for k, fields in enumerate(records):
        if not _is_kept(fields, text):
            continue
        found = _judge(fields, text, block.first_row + k)
        if found is None:
            good.append(k)
        else:
            bad.append(found)

    def parse(start: int, stop: int) -> Rows:
        some = good[start:stop]
        return _convert(_written([records[k] for k in some], text), text, 0,
                        np.array(some, np.int64) + block.first_row)

    # pyarrow may refuse a record that `_judge` accepts.
    rows = by_halves(len(good), parse, lambda k, error: BadRow(
        block.first_row + good[k], "", show(b" ".join(records[good[k]])), str(error)[:120]),
        lambda: no_rows((*text.columns, *(c for _, c in text.also)), text.dense, text.sparse),
        (MalformedError, pa.ArrowInvalid))
    reports = sorted([*bad, *rows.bad], key=lambda b: b.row)[:MAX_EXAMPLES]
    return replace(rows, num_lines=block.num_lines, num_bad=len(bad) + rows.num_bad,
                   bad=tuple(reports))


def _records(data: bytes, text: TextLayout, block: Block) -> list[list[bytes]]:
    separator = separator_of(text.layout).encode()
    if not text.layout.quote:
        return [line.removesuffix(b"\r").split(separator) for line in data.split(b"\n")[:-1]]
    lines = io.StringIO(data.decode("latin-1"), newline="")  # one character per byte
    dialect = _dialect(separator.decode(), text.layout)
    limit = csv.field_size_limit(len(data))  # skipped fields may be long
    try:
        records = [[f.encode("latin-1") for f in record] or [b""]
                   for record in csv.reader(lines, **dialect)]
        why = "" if len(records) <= block.num_lines else "a carriage return outside of quotes"
    except csv.Error as error:
        records, why = [], str(error)
    finally:
        csv.field_size_limit(limit)
    if why:
        raise FileFormatError(f"cannot read {block.path!r}",
                              f"text from row {block.first_row + 1} on", why,
                              "properly quoted fields", "correct the quotes and line ends")
    return records


_COMPARES = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
             ">": operator.gt, ">=": operator.ge}


def _is_kept(fields: list[bytes], text: TextLayout) -> bool:
    """Whether a record passes the filter; true for incomparable ones, which are then malformed."""
    if len(fields) != len(text.columns):
        return True
    for name, how, value in conditions(text.layout):
        column, field = next(p for p in zip(text.columns, fields, strict=True)
                             if p[0].kind != "skip" and name in (p[0].name, *p[0].sources))
        if not field or field.decode("utf-8", "replace") in column.missing:
            return False
        kind = convert.filter_type(column)
        is_text = (pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind)
                   ) and not convert.compares_numbers(kind, how, value)
        number: type[int | float] = int if pa.types.is_integer(kind) else float
        try:
            pair: tuple[Any, Any] = (field, value.encode()) if is_text else (
                number(field), number(value))
        except ValueError:
            return True
        if not _COMPARES[how](*pair):
            return False
    return True


def _judge(fields: list[bytes], text: TextLayout, row: int) -> BadRow | None:
    columns = text.columns
    if len(fields) != len(columns):
        return BadRow(row, "", show(b" ".join(fields)),
                      f"{len(columns)} columns instead of {len(fields)}")
    for column, field in zip(columns, fields, strict=True):
        if not convert.is_valid(column, field) or (b"\r" in field and not text.layout.quote):
            return BadRow(row, column.name, show(field), EXPECTED[column.parse])
    return None


def _written(records: list[list[bytes]], text: TextLayout) -> bytes:
    if not text.layout.quote:
        separator = separator_of(text.layout).encode()
        return b"".join(separator.join(fields) + b"\n" for fields in records)
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_MINIMAL,
                        **_dialect(separator_of(text.layout), text.layout))
    writer.writerows([f.decode("latin-1") for f in fields] for fields in records)
    return out.getvalue().encode("latin-1")


def no_rows(columns: Sequence[Column], dense: Sequence[str], sparse: Sequence[str]) -> Rows:
    """Make a result with 0 rows and the types of the columns."""
    empty = {c.name: (c, pa.array([], convert.arrow_type(c))) for c in columns if c.kind != "skip"}
    return rows_of(empty, dense, sparse, np.zeros(0, np.int64))
