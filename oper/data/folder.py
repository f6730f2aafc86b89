"""A preprocessed folder: its manifest, Parquet parts and embedding tables."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper.errors import FileFormatError, require
from oper.support.files import check_local, read_json
from oper.tables import TableSpec

FOLDER_KIND = "oper-preprocessed"
FOLDER_VERSION = 4
MANIFEST = "manifest.json"
LOOKUPS = "lookups.parquet"  # only in the output of 'oper generate', which is not preprocessed
SPLITS = ("train", "valid", "test")
MAX_BUCKETS = 1 << 15  # buckets are int16
_MOST_S = 1 << 40      # beyond all times that logs may have


def _names(value: Any) -> tuple[str, ...]:
    """Return the column names of a manifest entry; raises unless they are distinct strings."""
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise TypeError(f"{value!r} is not a list of names")
    if len(set(value)) < len(value):
        raise ValueError(f"{value!r} repeats a name")
    return tuple(value)


def _whole(name: str, value: Any, least: int, most: int = (1 << 63) - 1) -> int:
    """Return a manifest entry; raises unless it is an integer in `least`..`most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r} is not an integer in {least}..{most}")
    return value


def read_manifest(folder: Path, what: str, todo: str, *kinds: tuple[str, int]) -> dict[str, Any]:
    """Read the manifest of a folder, which must have one of the given kinds and versions.

    Args:
        folder: the folder.
        what: the beginning of error messages, such as "cannot open ...".
        todo: the remedy named if there is no manifest.
        kinds: accepted pairs of kind and version.

    Raises:
        FileFormatError: the manifest is missing, damaged, or of another kind or version.
    """
    try:
        manifest = read_json(folder / MANIFEST, what)
    except (FileNotFoundError, NotADirectoryError):
        raise FileFormatError(what, "manifest", MANIFEST, "an existing file", todo) from None
    found = (manifest.get("kind"), manifest.get("version")) if isinstance(manifest, dict) else ()
    if found not in kinds:
        raise FileFormatError(what, "kind, version", found, f"one of {kinds}",
                              "preprocess again with this release")
    return manifest


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that ``oper preprocess`` wrote.

    Attributes:
        path: the folder.
        manifest: the parsed ``manifest.json``.
        label: name of the label column.
        dense: names of the dense columns.
        sparse: names of the sparse columns; each has an embedding table of the same name.
        bucket: name of the time bucket column.
        num_rows: rows of each table, in the order of `sparse`; empty if ids are raw.
        rows: rows of the log by split.
        multi_hot: names of the sparse columns that hold a bag of ids per row.
        missing_ids: by sparse column, the id of a missing field; 0 if missing fields share row 0
            with rare and unseen values (in hashed columns row 0 is only for missing fields).
        raw_ids: whether ids are raw 64-bit keys, for dynamic tables, instead of row numbers.
        part_sizes: bytes and rows of each Parquet file, by ``SPLIT/FILE``.
        row_group_rows: rows of every row group except a file's last.
        time: name of the time column, int64 seconds since 1970; empty for a log without times.
    """

    path: Path
    manifest: dict[str, Any]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    bucket: str
    num_rows: tuple[int, ...]
    rows: dict[str, int]
    multi_hot: tuple[str, ...]
    time: str
    missing_ids: dict[str, int]
    raw_ids: bool
    part_sizes: dict[str, tuple[int, int]]
    row_group_rows: int

    @staticmethod
    def open(path: str | os.PathLike[str], allow_raw: bool = False) -> Folder:
        """Open a preprocessed folder.

        Args:
            path: the folder.
            allow_raw: whether a folder with raw ids is accepted.

        Raises:
            FileFormatError: the manifest is missing, incomplete, or of another kind or version.
            InvalidInputError: the path is a URL, or the ids are raw without `allow_raw`.
        """
        check_local(path)
        folder = Path(path)
        what = f"cannot open {os.fspath(path)!r} as a preprocessed folder"
        todo = "name a folder that 'oper preprocess' wrote"
        if (folder / LOOKUPS).exists():
            todo = ("'oper generate' wrote lookups there, which have no labels to train on; their "
                    "statistics are in a separate file: " + todo)
        manifest = read_manifest(folder, what, todo, (FOLDER_KIND, FOLDER_VERSION))
        try:
            columns, tables = manifest["columns"], manifest["tables"]
            sparse, multi_hot = _names(columns["sparse"]), _names(columns["multi_hot"])
            if not set(multi_hot) <= set(sparse):
                raise ValueError(f"multi_hot={list(multi_hot)} are not all sparse columns")
            _whole("buckets", manifest["split"]["buckets"], 1, MAX_BUCKETS)
            _whole("first_second", manifest["split"].get("first_second", 0), -_MOST_S, _MOST_S)
            _whole("seconds", manifest["split"].get("seconds", 1), 1, _MOST_S)
            for name in ("recipe", "dense_transforms"):
                if not isinstance(manifest.get(name, {}), dict):
                    raise TypeError(f"{name} is not an object")
            raw = bool(manifest["raw_ids"])
            num_rows = () if raw else tuple(
                _whole(f"num_rows of {n!r}", tables[n]["num_rows"], 1) for n in sparse)
            lowest, tops = (-1 << 63, [(1 << 63) - 1] * len(sparse)) if raw else (
                0, [rows - 1 for rows in num_rows])
            found = Folder(
                folder, manifest, str(columns["label"]), _names(columns["dense"]), sparse,
                str(columns["bucket"]), num_rows,
                {split: _whole(split, manifest["rows"][split], 0) for split in SPLITS},
                multi_hot, str(columns["time"]),
                {n: _whole(f"missing_id of {n!r}", tables[n]["missing_id"], lowest, top)
                 for n, top in zip(sparse, tops, strict=True)}, raw,
                {str(name): (_whole("bytes", size, 0), _whole("rows", rows, 0))
                 for name, (size, rows) in manifest["parts"].items()},
                _whole("row_group_rows", manifest["row_group_rows"], 1))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileFormatError(what, "manifest", str(error), "columns, tables and rows",
                                  "preprocess again") from None
        require(f"cannot use {os.fspath(path)!r} here",
                "train a DLRM on it, with dynamic.rows in the configuration of oper train, or "
                "preprocess without --raw-ids",
                ("ids", "raw", allow_raw or not raw, "row numbers of a vocabulary"))
        return found

    @property
    def ids_in_hotness_order(self) -> bool:
        """Whether ids 1, 2, ... were assigned by descending count in the training part."""
        return bool(self.manifest.get("ids_in_hotness_order", False))

    @property
    def has_graded_labels(self) -> bool:
        """Whether labels are arbitrary numbers (``parse = "number"``) instead of 0 and 1; False if
        there are no rows."""
        part = next((part for split in SPLITS for part in self.parts(split)), None)
        return part is not None and pa.types.is_floating(
            self.open_part(part, (self.label,)).schema_arrow.field(self.label).type)

    @property
    def bucket_labels(self) -> list[str]:
        """Label of each time bucket, by bucket index."""
        return [f"{self.bucket} {k}" for k in range(self.manifest["split"]["buckets"])]

    @property
    def bucket_starts(self) -> list[str]:
        """Start of each time bucket (ISO 8601, UTC), by bucket index; empty if the log was split by
        rows or preprocessed by a release that did not write these times."""
        split = self.manifest["split"]
        if "first_second" not in split or "seconds" not in split:
            return []
        first, seconds, count = split["first_second"], split["seconds"], split["buckets"]
        return [str(np.datetime64(first - -k * seconds // count, "s")) for k in range(count)]

    def tables(self, dim: int, num_rows: Sequence[int] = (), **fields: Any
               ) -> tuple[TableSpec, ...]:
        """Return one `TableSpec` per sparse column, in the order of `sparse`.

        Args:
            dim: embedding dimension of every table.
            num_rows: rows of each table, in the order of `sparse`; required if ids are raw, since
                the folder then does not determine them, and otherwise ignored.
            fields: other fields of `TableSpec`, the same for every table.
        """
        return tuple(TableSpec(name, rows, dim, (name,), **fields) for name, rows in zip(
            self.sparse, num_rows if self.raw_ids else self.num_rows, strict=True))

    def parts(self, split: str) -> list[Path]:
        """List the Parquet files of a split in order.

        Raises InvalidInputError for an unknown split, FileFormatError if its files are missing.
        """
        what = f"cannot read {str(self.path)!r}"
        require(what, "choose one of them", ("split", split, split in SPLITS, f"one of {SPLITS}"))
        # By numbers: file 1000 of a unit comes after file 999.
        found = sorted((self.path / split).glob("part-*.parquet"),
                       key=lambda p: [int(x) for x in re.findall("[0-9]+", p.name)])
        if not found and self.rows[split]:
            raise FileFormatError(what, "split", split,
                                  f"Parquet parts with {self.rows[split]} rows", "preprocess again")
        return found

    @staticmethod
    def open_part(path: Path, columns: tuple[str, ...]) -> pq.ParquetFile:
        """Open one Parquet file of a folder; raises FileFormatError if it is missing, damaged, or
        lacks one of `columns`."""
        what = f"cannot read {str(path)!r}"
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            names = file.schema_arrow.names
        except (pa.ArrowException, ValueError, OSError) as error:  # names need not be UTF-8
            raise FileFormatError(what, "content", str(error), "a complete Parquet file",
                                  "preprocess again") from None
        missing = [name for name in columns if name not in names]
        if missing:
            raise FileFormatError(what, "missing columns", missing, f"all of {list(columns)[:20]}",
                                  "preprocess again")
        return file

    def read_part(self, path: Path, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of one part; raises FileFormatError if it is damaged or lacks one."""
        file = self.open_part(path, columns)
        with reading(path):
            return file.read(columns=list(columns))

    def read_columns(self, columns: tuple[str, ...], splits: Sequence[str] = SPLITS
                     ) -> dict[str, np.ndarray]:
        """Read columns that are not lists, from all parts of `splits`: by name, [rows]. Raises the
        errors of `read_part`."""
        parts = [self.read_part(part, columns) for split in splits for part in self.parts(split)]
        return {name: np.concatenate([part.column(name).to_numpy() for part in parts])
                if parts else np.zeros(0) for name in columns}


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert pyarrow errors and OSErrors that the block raises to FileFormatError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise FileFormatError(f"cannot read {os.fspath(path)!r}", "content", str(error)[:200],
                              "a Parquet file without damage", "preprocess again") from None
