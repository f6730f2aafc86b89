"""Derived columns: joins with side tables, and feature crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oper.data.arrays import as_numpy
from oper.data.reading.detect import find_inputs, plan_units
from oper.data.reading.readers import read_unit, where
from oper.data.reading.rows import Rows, concat, in_order
from oper.data.recipe import Cross, Join, Recipe
from oper.data.vocabulary.building import hash64
from oper.errors import FileFormatError, InvalidInputError
from oper.support.numeric import mix64


class Derived:
    """Adds a recipe's joined and crossed columns to rows; side tables are read on first use.

    Attributes:
        unmatched: for each join, the number of rows so far whose key is missing or not in the side
            table.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._tables: list[_SideTable] | None = None
        self.unmatched = [0] * len(recipe.joins)

    def add(self, rows: Rows) -> Rows:
        """Return the rows with the recipe's joined and crossed columns added.

        Raises:
            FileFormatError: a side table has malformed rows or a repeated key.
            InvalidInputError: a key column or a crossed column has lists of ids, or the keys of a
                side table cannot have the type of the log's.
        """
        recipe = self._recipe
        if self._tables is None:
            self._tables = [_SideTable(join) for join in recipe.joins]
        parsed = recipe.names("sparse")
        for k, (join, table) in enumerate(zip(recipe.joins, self._tables, strict=True)):
            found, num_unmatched = table.of(_single(rows.sparse[parsed.index(join.key)], join.key))
            self.unmatched[k] += num_unmatched
            rows = replace(rows, dense=np.concatenate([rows.dense, found.dense]),
                           sparse=(*rows.sparse, *found.sparse))
        every = dict(zip(recipe.sparse, rows.sparse, strict=False))
        crosses = [_crossed(cross, every) for cross in recipe.crosses]
        return replace(rows, sparse=(*rows.sparse, *crosses))


class _SideTable:
    """A side table in memory, with a last row of missing fields for keys without a match."""

    def __init__(self, join: Join) -> None:
        self._name, self._key = join.file, join.key
        recipe = Recipe(join.file, join.file, (join.layout,))
        parts = []
        for unit in plan_units(recipe, find_inputs(recipe, [join.file]), None, 1 << 62):
            for rows in read_unit(unit, recipe):
                if rows.num_bad:
                    raise FileFormatError(
                        "cannot join a side table", "malformed rows", rows.num_bad, "none",
                        f"correct the file, first {where(unit, recipe, rows.bad[0])}")
                parts.append(rows)
        if not parts:
            raise FileFormatError("cannot join a side table", "rows", 0, "at least one",
                                  f"pass another file than {join.file!r}")
        at = recipe.names("sparse").index(join.key)
        table = concat(parts)
        self._keys = _single(table.sparse[at], join.key)
        distinct = pc.count_distinct(self._keys, mode="only_valid").as_py()
        if distinct < len(self._keys) - self._keys.null_count:
            raise FileFormatError(f"cannot join {join.file!r}", f"distinct keys {join.key!r}",
                                  distinct, f"{len(self._keys) - self._keys.null_count}, "
                                  "the number of rows with a key", "keep one row per key")
        kept = replace(table, sparse=tuple(x for k, x in enumerate(table.sparse) if k != at))
        self._rows = concat([kept, _missing_row(kept)])

    def _keys_as(self, kind: pa.DataType) -> pa.Array:
        """Return the table's keys in the log's type; raises InvalidInputError."""
        keys = self._keys
        if pa.types.is_binary(kind) and not pa.types.is_binary(keys.type):
            keys = keys.cast(pa.string())  # the key 17 becomes the text 17
        try:
            return keys.cast(kind)
        except pa.ArrowInvalid as error:
            raise InvalidInputError(
                f"cannot join {self._name!r}", f"keys {self._key!r}", str(error)[:120],
                f"keys of the log's type {kind}", "convert one of both columns") from None

    def of(self, keys: pa.Array) -> tuple[Rows, int]:
        """Return the rows of `keys` [n], and the number of keys that are not in the table.

        Raises InvalidInputError if a key of the table cannot have the type of `keys`.
        """
        known = self._keys_as(keys.type)
        at = pc.index_in(keys, value_set=known, skip_nulls=True)
        last = self._rows.labels.size - 1
        return in_order(self._rows, at.fill_null(last).to_numpy().astype(np.int64)), at.null_count


def _missing_row(like: Rows) -> Rows:
    """Make one row of missing fields with the columns of `like`."""
    none = [pa.array([[] if pa.types.is_list(x.type) else None], x.type) for x in like.sparse]
    return Rows(1, np.zeros(1, np.int64), np.zeros(1, np.int8),
                np.zeros((like.dense.shape[0], 1), np.float32), tuple(none))


def _single(ids: pa.Array, name: str) -> pa.Array:
    """Return a column with one id per row; raises InvalidInputError for lists."""
    if pa.types.is_list(ids.type):
        raise InvalidInputError("cannot join or cross a column", "column", name, "one id per row",
                                "name a column without lists")
    return ids


def _crossed(cross: Cross, columns: dict[str, pa.Array]) -> pa.Array:
    """Hash the combined values of several columns to integers in 0..cross.rows - 1."""
    names: Sequence[str] = cross.of
    state = np.zeros(len(columns[names[0]]), np.uint64)
    for name in names:
        values = _single(columns[name], name).dictionary_encode()
        hashes = np.append(hash64(as_numpy(values.dictionary)), np.uint64(0))  # last = missing
        codes = values.indices.fill_null(len(values.dictionary)).to_numpy()
        state = mix64(state + hashes[codes] + np.uint64(1))
    return pa.array((state % np.uint64(cross.rows)).astype(np.int64))
