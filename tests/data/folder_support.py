"""Contents of preprocessed folders, for comparisons."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from oper.data import Folder


def parquet_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.parquet"))}


def digest(folder: Path) -> str:
    """Return a digest of all files of a folder, except for the manifest's job id."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "manifest.json":
                found = json.loads(data)
                del found["job"]
                data = json.dumps(found).encode()
            state.update(str(path.relative_to(folder)).encode() + data)
    return state.hexdigest()


def ids_of(folder: Path, column: str) -> dict[Any, int]:
    """Return the mapping from a column's raw values to ids."""
    table = pq.read_table(folder / "vocabulary" / f"{column}.parquet").to_pydict()
    return dict(zip(table["value"], table["id"], strict=True))


def encoded(folder: Path, column: str) -> list[Any]:
    """Return the ids, or bags of ids, in the training and validation parts."""
    opened = Folder.open(folder, allow_raw=True)
    return [v for split in ("train", "valid") for part in opened.parts(split)
            for v in opened.read_part(part, (column,)).column(column).to_pylist()]


def decoded(folder: Path, split: str = "train") -> dict[str, list[Any]]:
    """Return a part's columns with ids replaced by raw values; None for missing values and id 0."""
    found = pq.read_table(folder / split).to_pydict()
    for name in Folder.open(folder).sparse:
        value = {i: v for v, i in ids_of(folder, name).items()}
        found[name] = [[value.get(i) for i in x] if isinstance(x, list) else value.get(x)
                       for x in found[name]]
    return found
