"""Re-maps: new row numbers of tables, written by ``oper vocabulary extend --reorder``.

The output folder has a file ``remap/COLUMN.npy`` for each sparse column: int32 [num_rows], the new
number of each row; row 0 keeps its number. If a table has grown, its new rows are first numbered
after the old ones, and the re-map applies to these numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from oper.errors import FileFormatError, InvalidInputError
from oper.tables import TableSpec

FOLDER = "remap"
Remap = Mapping[str, np.ndarray]


def load_remap(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the re-map in a folder, by column; raises FileFormatError if it is absent or damaged."""
    what = f"cannot read the re-map of {os.fspath(folder)!r}"
    found = {}
    for path in sorted((Path(folder) / FOLDER).glob("*.npy")):
        try:
            found[path.stem] = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise FileFormatError(what, "file", str(path), "a complete .npy file",
                                  f"{str(error)[:200]}: extend the vocabulary again") from None
        _check(what, path.stem, found[path.stem])
    if not found:
        raise FileFormatError(what, f"{FOLDER}/*.npy files", 0, "one per column",
                              "pass the output of 'oper vocabulary extend --reorder'")
    return found


def _check(what: str, column: str, rows: np.ndarray) -> None:
    """Raise FileFormatError unless `rows` is a permutation of 0..n-1 that keeps row 0."""
    ok = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows[0] == 0
    if not ok or not np.array_equal(np.sort(rows), np.arange(rows.size)):
        raise FileFormatError(what, f"row numbers of column {column!r}",
                              rows.ravel()[:8].tolist(),
                              "each of 0..n-1 once, beginning with 0",
                              "extend the vocabulary again")


def of_table(spec: TableSpec, remap: Remap) -> np.ndarray | None:
    """Return the new row numbers of a table, int [num_rows], or None if the re-map has no column
    named like one of its features.

    Raises:
        InvalidInputError: the table's features have different re-maps or only some have one, or the
            table has another number of rows.
    """
    named = [remap[n] for n in spec.features if n in remap]
    if not named:
        return None
    if len(named) < len(spec.features) or any(not np.array_equal(named[0], x) for x in named[1:]):
        raise InvalidInputError(f"cannot renumber table {spec.name!r}", "features", spec.features,
                                "the same re-map for all features of a table",
                                "give each feature its own table")
    if named[0].size != spec.num_rows:
        raise InvalidInputError(f"cannot renumber table {spec.name!r}", "num_rows", spec.num_rows,
                                f"{named[0].size}, the number of rows of the re-map",
                                "if the table has grown, use oper.load_checkpoint instead")
    return named[0]
