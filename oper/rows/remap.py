"""Re-maps: new row numbers of tables, as ``oper vocabulary extend --reorder`` writes them.

A folder with ``remap/COLUMN.npy`` for each sparse column: int32 [num_rows], the new number of each
row; row 0 stays. Rows of a table that has grown are numbered behind the old ones first.
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
    """The re-map in a folder, by column; raises FileFormatError if it is absent or damaged."""
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
    """Raise FileFormatError unless every row has a number of its own and row 0 stays."""
    ok = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows[0] == 0
    if not ok or not np.array_equal(np.sort(rows), np.arange(rows.size)):
        raise FileFormatError(what, "rows", column, "each number once, row 0 in its place",
                              "extend the vocabulary again")


def of_table(spec: TableSpec, remap: Remap) -> np.ndarray | None:
    """New numbers of a table's rows, found by the names of its features; None if the re-map has
    none.

    Raises:
        InvalidInputError: its features have different re-maps, or the table has another number of
            rows.
    """
    named = [remap[n] for n in spec.features if n in remap]
    if not named:
        return None
    if len(named) < len(spec.features) or any(not np.array_equal(named[0], x) for x in named[1:]):
        raise InvalidInputError(f"cannot renumber table {spec.name!r}", "features", spec.features,
                                "one re-map for all features of a table",
                                "give them tables of their own")
    if named[0].size != spec.num_rows:
        raise InvalidInputError(f"cannot renumber table {spec.name!r}", "num_rows", spec.num_rows,
                                f"{named[0].size} as in the re-map",
                                "make the table as large as its vocabulary: "
                                "a table that grows starts from a checkpoint")
    return named[0]
