"""Dry run: preprocess the first rows of a log in a temporary folder and report the result."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as pacsv, json as pajson

from oper.data.preprocessing import job
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.run import preprocess
from oper.data.reading import store
from oper.data.reading.detect import find_inputs, plan_units
from oper.data.reading.estimate import needs
from oper.data.reading.lines import Unit, read_blocks
from oper.data.reading.readers import open_parquet
from oper.data.reading.text import parse_options, unified
from oper.data.recipe import Column, Layout, Recipe
from oper.errors import InvalidInputError, OperError

ROWS = 10_000
_BLOCK_BYTES = 1 << 17


def dry_run(recipe: Recipe, inputs: store.Inputs, options: PreprocessOptions) -> dict[str, Any]:
    """Preprocess about the first 10,000 rows, and estimate the needs of the entire log.

    Returns:
        ``rows``, ``bad_rows``, ``split``, ``tables`` and ``problems`` of the manifest of these
        rows; ``layout``, the name of the first file's layout; ``columns``, one dict per column with
        its name, kind, parse, transform and the facts of `describe_columns`; and ``plan``, the
        fields of `oper.data.reading.estimate.Needs`.

    Raises:
        InvalidInputError: as in `preprocess`, or the log consists of ``.npy`` arrays.
        FileFormatError: as in `preprocess`.
    """
    with (tempfile.TemporaryDirectory(prefix="oper-dry-run-") as work,
          store.spooled(inputs, Path(work) / "out") as names):
        paths = find_inputs(recipe, names)
        units = plan_units(recipe, paths, options.layout, 1 << 62)
        layouts = {u.path: recipe.layout(u.layout) for u in units}
        copies, left = [], ROWS
        for k, path in enumerate(paths):
            if left > 0:
                copies.append(_first_rows(path, layouts[path], Path(work) / str(k), left))
                left -= copies[-1][1]
        logger, level = logging.getLogger(job.__name__), logging.getLogger(job.__name__).level
        logger.setLevel(logging.WARNING)  # the needs of the copies are irrelevant
        try:
            with _naming({c: path for (c, _), path in zip(copies, paths, strict=False)}):
                manifest = preprocess(recipe, [c for c, _ in copies], Path(work) / "out", replace(
                    options, num_workers=1, num_ray_workers=0, show_progress=False))
        finally:
            logger.setLevel(level)
        layout = layouts[paths[0]]
        facts = describe_columns(copies[0][0], layout)
        derived = [(c, False) for join in recipe.joins for c in join.columns] + [
            (Column(c.name, "sparse", "cross"), False) for c in recipe.crosses]
        columns = [
            {"name": c.name, "kind": c.kind, "parse": c.parse, "transform": c.transform,
             **(next((facts[n] for n in c.sources if n in facts), {}) if own else {})}
            for c, own in [*((c, True) for c in layout.columns if c.kind != "skip"), *derived]]
        return {**{n: manifest[n] for n in ("rows", "bad_rows", "split", "tables", "problems")},
                "layout": layout.name, "columns": columns,
                "plan": asdict(needs(recipe, units, options.id_bytes))}


@contextlib.contextmanager
def _naming(originals: dict[str, str]) -> Iterator[None]:
    """Name the user's files instead of their copies in the errors of a block.

    Args:
        originals: path of each copy -> path of the file.
    """
    try:
        yield
    except OperError as error:
        text = str(error)
        for copy, path in originals.items():  # as they are, and as `repr` writes them
            text = text.replace(copy, path).replace(repr(copy)[1:-1], repr(path)[1:-1])
        raise type(error)(text) from error


def describe_columns(path: str, layout: Layout) -> dict[str, dict[str, Any]]:
    """Describe the columns of a file by its first rows; empty for a format without columns.

    Returns, by column, ``type`` (as inferred by pyarrow), ``missing`` (share of the rows),
    ``distinct`` (number of values, None for lists) and ``example`` (up to 40 characters).
    """
    table = _table(path, layout)
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_list = pa.types.is_list(column.type) or pa.types.is_struct(column.type)
        known = column.drop_null()
        found[name] = {
            "type": str(column.type), "missing": column.null_count / max(1, len(column)),
            "distinct": None if is_list else len(known.unique()),
            "example": str(known[0].as_py())[:40] if len(known) else ""}
    return found


def _table(path: str, layout: Layout) -> pa.Table:
    """Read the first rows; pyarrow infers types, names are the file's or the layout's."""
    if layout.format == "parquet":
        file = open_parquet(path)
        first = next(file.iter_batches(ROWS), None)  # the rest of the file is not read
        return file.schema_arrow.empty_table() if first is None else pa.table(first)
    if layout.format not in ("text", "jsonl"):
        return pa.table({})
    data = b"".join(_first_lines(path, layout, ROWS))
    if layout.format == "jsonl":
        return pajson.read_json(pa.BufferReader(data), pajson.ReadOptions(
            use_threads=False, block_size=len(data) + 1))
    names = None if layout.header else [c.sources[0] for c in layout.columns]
    return pacsv.read_csv(
        pa.BufferReader(unified(data, layout)), pacsv.ReadOptions(
            use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options(layout, invalid_row_handler=lambda _: "skip"),
        pacsv.ConvertOptions(strings_can_be_null=True))


def _first_lines(path: str, layout: Layout, num_rows: int) -> list[bytes]:
    """Read blocks of complete records, header included, until they have `num_rows` records."""
    blocks: list[bytes] = []
    found = 0
    for block in read_blocks(Unit(path), replace(layout, header=False), block_bytes=_BLOCK_BYTES):
        blocks.append(block.data)
        found += block.num_lines
        if found >= num_rows:
            break
    return blocks


def _first_rows(path: str, layout: Layout, folder: Path, num_rows: int) -> tuple[str, int]:
    """Copy a file's first rows to plain text or Parquet; returns the path and approximate rows."""
    if layout.format == "npy":
        raise InvalidInputError("cannot make a dry run", "format", "npy", "text or Parquet",
                                "leave --dry-run out: the format of such files is fixed")
    # Folders NAME=VALUE in the path are columns of a partitioned data set.
    partition = [p for p in path.split("/")[:-1] if "=" in p]
    target = folder.joinpath(*partition) / os.path.basename(path.partition("?")[0])
    target.parent.mkdir(parents=True)
    if layout.format == "parquet":
        table = _table(path, layout)
        pq.write_table(table, target)
        return str(target), table.num_rows
    blocks = _first_lines(path, layout, num_rows)
    target.write_bytes(b"".join(blocks))
    return str(target), sum(b.count(b"\n") for b in blocks)
