"""Read units of work of any file format as rows."""

from __future__ import annotations

import json
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import json as pajson

from oper.data.arrays import lists, read_header
from oper.data.reading import columns as convert, store
from oper.data.reading.columns import MalformedError, holds
from oper.data.reading.lines import (
    Block,
    Progress,
    Unit,
    first_line,
    is_empty,
    line_of,
    read_blocks,
)
from oper.data.reading.rows import MAX_EXAMPLES, BadRow, Rows, by_halves, show
from oper.data.reading.text import TextLayout, no_rows, parse_block, rows_of, text_layout
from oper.data.recipe import Column, Layout, Recipe, conditions
from oper.errors import FileFormatError, InvalidInputError

_BATCH_ROWS = 1 << 16
_FIRST_ROWS = 1000        # rows of a Parquet file that `read_first` reads
_FIRST_BYTES = 1 << 17    # bytes of a text file that `read_first` reads
_Parse = Callable[[bytes, np.ndarray], Rows]  # parses lines, given their row indices in the unit


def read_unit(unit: Unit, recipe: Recipe, progress: Progress = lambda _: None) -> Iterator[Rows]:
    """Yield the rows of a unit, piece by piece.

    Args:
        unit: the unit to read.
        recipe: how to read it.
        progress: called with the number of bytes read from a text file since the last call.

    Raises:
        FileFormatError: the file is damaged, or has other columns than the recipe.
        InvalidInputError: a filter does not fit the file, or ``.npy`` files are missing or remote.
    """
    layout = recipe.layout(unit.layout)
    if layout.format == "parquet":
        yield from _read_parquet(unit, recipe, layout)
    elif layout.format == "npy":
        yield from _read_npy(unit, recipe)
    else:
        parse = _parser(unit, recipe, _text_layout(unit, recipe))
        yield from map(parse, read_blocks(unit, layout, progress))


def read_first(unit: Unit, recipe: Recipe) -> Rows | None:
    """Read some of the first rows of a unit; None if it has no rows.

    Raises:
        FileFormatError: as for `read_unit`.
        InvalidInputError: a Parquet column has a type that its `parse` does not accept.
    """
    layout = recipe.layout(unit.layout)
    if layout.format == "parquet":
        for table, rows in _tables(open_parquet(unit.path), unit.path, layout, None, _FIRST_ROWS):
            columns = _arrow_columns(layout, table, unit.path)
            _check_types(columns, unit.path)
            return _arrow_rows(columns, recipe, rows)
        return None
    if layout.format == "npy":
        return next(read_unit(unit, recipe), None)
    parse = _parser(unit, recipe, _text_layout(unit, recipe))
    return next(map(parse, read_blocks(unit, layout, block_bytes=_FIRST_BYTES)), None)


def _check_types(columns: dict[str, tuple[Column, pa.Array]], path: str) -> None:
    for column, array in columns.values():
        kind = array.type
        is_list = any(is_one(kind) for is_one in (
            pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
        kind = kind.value_type if is_list else kind
        if column.kind == "sparse" and (pa.types.is_nested(kind) or pa.types.is_temporal(kind)):
            raise InvalidInputError(f"cannot read {path!r}",
                                    f"type of the id column {column.name!r}", str(kind),
                                    "integers, strings or lists of these",
                                    "convert the column to one of these types")
        is_fraction = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        if column.kind == "sparse" and is_fraction and column.parse in ("string", "hex32"):
            raise InvalidInputError(
                f"cannot read {path!r}", f"type of the id column {column.name!r}", str(kind),
                "integers, strings or lists of these", "for ids written as 17850.0 pass "
                f'--sparse {column.name}:integral, or set parse = "integral" in the recipe')


def where(unit: Unit, recipe: Recipe, bad: BadRow) -> str:
    """Describe a malformed row for a message: file, row, column, value found and expected."""
    layout = recipe.layout(unit.layout)
    if layout.format in ("text", "jsonl", "bags"):
        row = line_of(unit, layout, bad.row)
    else:
        row = bad.row + 1
        if unit.start:  # the unit begins after other row groups of a Parquet file
            about = open_parquet(unit.path).metadata
            row += sum(about.row_group(group).num_rows for group in range(unit.start))
    return (f"{unit.path}, row {row}, column {bad.column or '-'}: {bad.value!r}, "
            f"expected {bad.expected}")


def _text_layout(unit: Unit, recipe: Recipe) -> TextLayout | None:
    """Return the `TextLayout` of a unit; None if its format is not delimited text."""
    layout = recipe.layout(unit.layout)
    if layout.format != "text":
        return None
    line = first_line(unit.path, layout.encoding)
    if not line and is_empty(unit.path):
        layout = replace(layout, header=False)  # there is nothing to split
    return text_layout(recipe, layout, line, unit.path)


def _parser(unit: Unit, recipe: Recipe, text: TextLayout | None) -> Callable[[Block], Rows]:
    """Return the function that parses blocks of lines of a unit."""
    if text is not None:
        return partial(parse_block, text=text)
    layout = recipe.layout(unit.layout)
    parse = (_objects(recipe, layout) if layout.format == "jsonl"
             else _bags(recipe, layout))
    return partial(_by_lines, recipe=recipe, layout=layout, parse=parse)


def _arrow_columns(layout: Layout, table: pa.Table, path: str
                   ) -> dict[str, tuple[Column, pa.Array]]:
    columns = {}
    for column in layout.columns:
        if column.kind == "skip":
            continue
        found = [name for name in column.sources if name in table.schema.names]
        if len(found) != 1:
            raise FileFormatError(f"cannot read {path!r}", "columns", table.schema.names[:20],
                                  f"exactly one column {' or '.join(column.sources)!r}",
                                  "name a column of the file as its source")
        columns[column.name] = (column, table.column(found[0]).combine_chunks())
    return columns


_OBJECT_TYPES = {"string": pa.string(), "among": pa.string(), "iso": pa.string(),
                 "iso_zone": pa.string(), "hex32": pa.string()}
# Ids are not read as float64, which is exact only for integers below 2^53.
_OBJECT_IDS = {"int": pa.int64(), "uint32": pa.int64(), "uint64": pa.uint64()}


def _object_type(column: Column) -> pa.DataType:
    """Return the Arrow type in which a field of JSON objects is read."""
    if column.multi:
        return pa.string()
    if column.kind == "sparse" and column.parse in _OBJECT_IDS:
        return _OBJECT_IDS[column.parse]
    return _OBJECT_TYPES.get(column.parse, pa.float64())


def _objects(recipe: Recipe, layout: Layout) -> _Parse:
    """Return a parser of lines with one JSON object each."""
    wanted = [c for c in layout.columns if c.kind != "skip"]
    schema = pa.schema({name: _object_type(c) for c in wanted for name in c.sources})
    options = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def parse(data: bytes, rows: np.ndarray) -> Rows:
        if rows.size == 1 and not isinstance(json.loads(data), dict):
            raise MalformedError("")
        table = pajson.read_json(
            pa.BufferReader(data), pajson.ReadOptions(use_threads=False, block_size=len(data) + 1),
            options)
        if table.num_rows != rows.size:
            raise MalformedError("")
        arrays = {}
        for column in wanted:
            # An object has the column under one of its names; under the others it is null.
            array = pc.coalesce(*map(table.column, column.sources)).combine_chunks()
            arrays[column.name] = (column, array.cast(pa.binary())
                                   if pa.types.is_string(array.type) else array)
        return rows_of(arrays, recipe.names("dense"), recipe.names("sparse"), rows)

    return parse


def _by_lines(block: Block, recipe: Recipe, layout: Layout, parse: _Parse) -> Rows:
    """Parse a block of lines; malformed lines are isolated by bisection (`by_halves`)."""
    lines = block.data.split(b"\n")[:-1]

    def some(start: int, stop: int) -> Rows:
        return parse(b"\n".join(lines[start:stop]) + b"\n",
                     np.arange(start, stop) + block.first_row)

    def blame(k: int, error: Exception) -> BadRow:
        column = str(error)[:40] if isinstance(error, MalformedError) else ""
        return BadRow(block.first_row + k, column, show(lines[k]), "a row of the recipe")

    return by_halves(len(lines), some, blame, lambda: no_rows(
        layout.columns, recipe.names("dense"), recipe.names("sparse")),
        (MalformedError, ValueError))


def _bags(recipe: Recipe, layout: Layout) -> _Parse:
    """Return a parser of lines with one user's items each (see `Layout.first`)."""
    first = layout.first

    def parse(data: bytes, rows: np.ndarray) -> Rows:
        fields = [line.split() for line in data.split(b"\n")[:-1]]
        if any(not f for f in fields) or any(
                not x.isdigit() or len(x) > 18 for f in fields for x in f):
            raise MalformedError("items")
        numbers = [np.array(f, np.int64) for f in fields]
        if first == "count" and any(n[0] != n.size - 1 for n in numbers):
            raise MalformedError("count")
        items = numbers if first == "item" else [n[1:] for n in numbers]
        users = np.array([n[0] for n in numbers], np.int64) if first == "user" else rows
        lengths = np.array([x.size for x in items], np.int32)
        bags = {"user": pa.array(users), "item": lists(lengths, np.concatenate(items))}
        names = recipe.names("sparse")
        return Rows(rows.size, rows, np.ones(rows.size, np.int8),
                    np.zeros((0, rows.size), np.float32), tuple(bags[n] for n in names))

    return parse


def _read_parquet(unit: Unit, recipe: Recipe, layout: Layout) -> Iterator[Rows]:
    file = open_parquet(unit.path)
    stop = file.num_row_groups if unit.stop is None else unit.stop
    first = 0
    for group in range(unit.start, stop):
        try:
            for table, rows in _tables(file, unit.path, layout, group, _BATCH_ROWS):
                columns = _arrow_columns(layout, table, unit.path)
                yield _arrow_rows(columns, recipe, rows + first)
            first += file.metadata.row_group(group).num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise FileFormatError(f"cannot read {unit.path!r}", f"row group {group}",
                                  str(error)[:200], "undamaged data", "fetch it again") from None


def _tables(file: pq.ParquetFile, path: str, layout: Layout, group: int | None, size: int
            ) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield filtered tables of the layout's columns, and the rows' indices before the filter.

    Columns that the file lacks are read from folders ``NAME=VALUE`` in its path (partitions as in
    Hive and Spark), as strings.

    Args:
        file: the file.
        path: its path.
        layout: columns to read, and the filter.
        group: row group to read; None = all.
        size: maximum number of rows per table.
    """
    filters = conditions(layout)
    wanted = dict.fromkeys([n for c in layout.columns for n in c.sources if c.kind != "skip"]
                           + [name for name, _, _ in filters])
    held = file.schema_arrow.names
    folders = {k: None if v == "__HIVE_DEFAULT_PARTITION__" else unquote(v) for k, v in (
        part.split("=", 1) for part in path.split("/")[:-1] if "=" in part)}
    added = [n for n in wanted if n in folders and n not in held]
    unknown = [n for n, _, _ in filters if n not in held and n not in folders]
    if unknown:
        raise InvalidInputError(f"cannot filter {path!r}", "columns", unknown,
                                f"columns of the file, such as {held[:20]}",
                                "name columns of the file in the filter")
    first = 0
    for batch in file.iter_batches(size, row_groups=None if group is None else [group],
                                   columns=[n for n in wanted if n in held]):
        table, rows = _decoded(batch), np.arange(first, first + batch.num_rows)
        first += batch.num_rows
        for name in added:
            table = table.append_column(name, pa.array([folders[name]] * len(rows), pa.string()))
        for name, operator, value in filters:
            own = [c for c in layout.columns if c.kind != "skip" and name in (c.name, *c.sources)]
            fields = table.column(name)
            keep = holds(convert.without_missing(own[0], fields) if own else fields, operator,
                         value, path)
            table, rows = table.filter(keep), rows[keep.to_numpy()]
        if rows.size:
            yield table, rows


def _decoded(batch: pa.RecordBatch) -> pa.Table:
    """Make a table of a batch, with values in place of dictionary codes (pandas' categories)."""
    table = pa.table(batch)
    for k, x in enumerate(batch.columns):
        if pa.types.is_dictionary(x.type):
            table = table.set_column(k, table.column_names[k], x.dictionary_decode())
    return table


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file; raises FileFormatError."""
    try:
        return pq.ParquetFile(store.open_input(path) if store.is_url(path) else path)
    except (pa.ArrowInvalid, OSError) as error:
        raise FileFormatError(f"cannot read {path!r}", "content", str(error)[:200],
                              "a complete Parquet file",
                              "pass a Parquet file, or fetch this one again") from None


def _arrow_rows(columns: dict[str, tuple[Column, pa.Array]], recipe: Recipe, rows: np.ndarray
                ) -> Rows:
    """Convert Arrow columns to rows; malformed rows are isolated by bisection (`by_halves`)."""
    dense, sparse = recipe.names("dense"), recipe.names("sparse")

    def some(start: int, stop: int) -> Rows:
        part = {name: (c, a.slice(start, stop - start)) for name, (c, a) in columns.items()}
        return rows_of(part, dense, sparse, rows[start:stop])

    def blame(k: int, error: Exception) -> BadRow:
        column, array = columns.get(str(error), next(iter(columns.values())))
        return BadRow(int(rows[k]), column.name, show(str(array[k].as_py()).encode()),
                      convert.EXPECTED[column.parse])

    def none() -> Rows:
        try:
            return some(0, 0)  # with the types of the file, such as lists
        except MalformedError:  # a column has a type that it must not have
            return no_rows([c for c, _ in columns.values()], dense, sparse)

    return by_halves(rows.size, some, blame, none)


def _read_npy(unit: Unit, recipe: Recipe) -> Iterator[Rows]:
    """Read ``X_sparse.npy`` (or ``X_sparse_multi_hot.npz``), ``X_dense.npy``, ``X_labels.npy``."""
    dense, labels = map(_load, companions(unit.path))
    names = recipe.names("sparse")
    if unit.path.endswith(".npz"):
        members: Any = _Members(unit.path, len(names))
    else:
        members = _load(unit.path)
    shapes = (dense.shape[:2], labels.reshape(len(labels), -1).shape, members.shape)
    count = len(labels)
    if shapes != ((count, len(recipe.names("dense"))), (count, 1), (count, len(names))):
        raise FileFormatError(f"cannot read {unit.path!r}", "shapes of dense, labels, sparse",
                              shapes, f"rows x {len(recipe.names('dense'))}, 1, {len(names)}",
                              "pass matching files")
    for start in range(0, count, _BATCH_ROWS):
        part = slice(start, min(start + _BATCH_ROWS, count))
        rows = np.arange(part.start, part.stop)
        numbers = np.asarray(dense[part], np.float32).T
        truth = np.asarray(labels[part]).reshape(-1)
        good = np.isfinite(numbers).all(axis=0) & ((truth == 0) | (truth == 1))
        every = (members.columns(part) if isinstance(members, _Members)
                 else [np.asarray(members[part, k], np.int64) for k in range(len(names))])
        sparse = [pa.array(v[good]) if v.ndim == 1 else lists(
            np.full(int(good.sum()), v.shape[1]), v[good].reshape(-1)) for v in every]
        bad = tuple(_bad_arrays_row(recipe, int(k) + start, truth[k], numbers[:, k])
                    for k in (~good).nonzero()[0][:MAX_EXAMPLES])
        yield Rows(rows.size, rows[good], truth[good].astype(np.int8), numbers[:, good],
                   tuple(sparse), None, int((~good).sum()), bad)


def _bad_arrays_row(recipe: Recipe, row: int, label: Any, dense: np.ndarray) -> BadRow:
    """Describe a malformed row by its label or else by its first non-finite dense value [D]."""
    if label not in (0, 1):
        return BadRow(row, recipe.label, str(label), convert.EXPECTED["binary"])
    k = int(np.isfinite(dense).argmin())
    return BadRow(row, recipe.names("dense")[k], str(dense[k]), "a finite number")


def num_arrays_rows(path: str) -> int:
    """Return the number of rows of a day of ``.npy`` arrays; raises as `read_unit` does."""
    return len(_load(_companion(path, "labels")))


def companions(path: str) -> list[str]:
    """Return the paths of the dense and labels files of the day whose sparse ids are in `path`."""
    return [_companion(path, name) for name in ("dense", "labels")]


def _companion(path: str, name: str) -> str:
    """Return the path of the ``dense`` or ``labels`` file of a day whose sparse ids are in `path`.
    """
    day = path.removesuffix("_sparse.npy").removesuffix("_sparse_multi_hot.npz")
    return f"{day}_{name}.npy"


def _load(path: str) -> np.ndarray:
    if store.is_url(path):
        raise InvalidInputError("cannot read arrays", "path", path,
                                "a local file, since arrays are memory-mapped",
                                "copy the day's files to a local folder")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InvalidInputError(
            "cannot read arrays", "path", path, "an existing file",
            "put the day's dense, sparse and labels files into one folder") from None
    except (ValueError, EOFError, OSError, SyntaxError, tokenize.TokenError) as error:
        raise FileFormatError(f"cannot read {path!r}", "content", str(error)[:200],
                              "a complete .npy file", "fetch it again") from None


class _Members:
    """The members ``0.npy``, ``1.npy``, ... of a multi-hot ``.npz``, read in blocks of rows.

    Attributes:
        shape: numbers of rows and of members.
    """

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        try:
            archive = zipfile.ZipFile(path)
            self._files = [archive.open(f"{k}.npy") for k in range(count)]
            heads = [read_header(file) for file in self._files]
        # RuntimeError: a damaged directory marks a member as encrypted or oddly compressed.
        except (zipfile.BadZipFile, KeyError, RuntimeError, ValueError, OSError) as error:
            raise FileFormatError(f"cannot read {path!r}", "content", str(error)[:200],
                                  f"a complete .npz with members 0..{count - 1}",
                                  "fetch it again") from None
        bad = [h for h in heads if len(h[0]) != 2 or h[1] or h[2].kind not in "iu"
               or h[0][0] != heads[0][0][0]]
        if bad:
            raise FileFormatError(
                f"cannot read {path!r}", "shape, Fortran order and dtype of a member", bad[0],
                f"({heads[0][0][0]}, ids per bag), False, integers", "regenerate the file")
        self._heads = heads
        self.shape = (heads[0][0][0], count)

    def columns(self, part: slice) -> Iterator[np.ndarray]:
        """Yield rows `part` of every member, int64 [n, ids per bag]; parts must be consecutive."""
        count = part.stop - part.start
        for file, (shape, _, dtype) in zip(self._files, self._heads, strict=True):
            raw = file.read(count * shape[1] * dtype.itemsize)
            if len(raw) != count * shape[1] * dtype.itemsize:
                raise FileFormatError(f"cannot read {self._path!r}", "rows of a member",
                                      "fewer than in its header", f"{shape[0]}", "fetch it again")
            yield np.frombuffer(raw, dtype).reshape(count, shape[1]).astype(np.int64)


def is_companion(path: str, layouts: Sequence[Layout]) -> bool:
    """Whether the name is that of the labels or dense columns of a day of ``.npy`` arrays."""
    return any(x.format == "npy" for x in layouts) and path.endswith(("_dense.npy", "_labels.npy"))


def is_arrays(path: str) -> bool:
    """Whether the name is that of the sparse ids of a day of ``.npy`` arrays."""
    return path.endswith(("_sparse.npy", "_sparse_multi_hot.npz"))


def is_parquet(path: str) -> bool:
    """Whether a file begins with the magic bytes of Parquet."""
    with store.open_input(path) as file:
        return file.read(4) == b"PAR1"
