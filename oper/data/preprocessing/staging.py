"""First pass: parse each unit of the log once and stage it on disk in dictionary-encoded chunks.

Each chunk has two files: the distinct raw values of each column with their counts, and the rows
with codes (0 = missing, k + 1 = the k-th distinct value) in the narrowest integer type. Later
passes process distinct values instead of rows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oper.data.arrays import append_batch, as_numpy, damaged_work, lists, read_batch
from oper.data.reading.derived import Derived
from oper.data.reading.lines import Unit
from oper.data.reading.pagecache import PageDropper
from oper.data.reading.readers import read_unit, where
from oper.data.reading.rows import MAX_EXAMPLES, BadRow, Rows, concat, in_order, piece_rows
from oper.data.recipe import Recipe
from oper.errors import FileFormatError, InvalidInputError


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The K distinct values of one column in one chunk.

    Attributes:
        values: integers or bytes (NumPy kind ``S``) [K], ascending.
        counts: number of occurrences of each value, int64 [K].
        num_missing: number of missing fields.
    """

    values: np.ndarray
    counts: np.ndarray
    num_missing: int


def encode(ids: pa.Array) -> tuple[np.ndarray | pa.ListArray, Distinct]:
    """Dictionary-encode a column of `Rows.sparse`.

    Returns:
        Codes [n], or lists of codes, and the distinct values.
    """
    if pa.types.is_list(ids.type):
        codes, found = encode(ids.flatten())
        return lists(pc.list_value_length(ids).to_numpy(), pa.array(codes)), found
    encoded = ids.dictionary_encode(null_encoding="mask")
    values = as_numpy(encoded.dictionary)
    order = np.argsort(values)
    dtype = np.min_scalar_type(max(1, values.size))
    place = np.empty(values.size + 1, dtype)
    place[0] = 0
    place[order + 1] = np.arange(1, values.size + 1, dtype=dtype)
    codes = encoded.indices
    raw = (pc.fill_null(codes, -1) if codes.null_count else codes).to_numpy(zero_copy_only=False)
    codes = place[raw + 1] if raw.size else place[:0]
    counts = np.bincount(codes, minlength=values.size + 1)
    return codes, Distinct(values[order], counts[1:], int(counts[0]))


class Stage:
    """Writes and reads the files of the first pass in a work folder."""

    def __init__(self, folder: Path, recipe: Recipe, is_large: bool = False) -> None:
        """Use `folder`; the input of a large log (`is_large`) is kept out of the page cache."""
        self._folder, self.is_large = folder, is_large
        self._recipe, self._derived = recipe, Derived(recipe)

    def record(self, number: int) -> dict[str, Any]:
        """Return the record (rows, malformed rows, chunks, ...) of a unit that has been read."""
        return self.noted(f"{number:06d}.json")

    def noted(self, name: str) -> dict[str, Any]:
        """Read the JSON file that `note` wrote as `name`; raises FileFormatError if damaged."""
        path = self._folder / name
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise damaged_work(path, error) from None
        return found

    def minutes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the minutes since 1970 that have rows of a unit, and rows in each; int64 [K]."""
        minutes, rows = read_batch(self._folder / f"{number:06d}.minutes").columns
        return minutes.to_numpy(), rows.to_numpy()

    def write(self, number: int, unit: Unit, max_bad: int) -> None:
        """Read a unit and write its files; raises FileFormatError above `max_bad` bad rows."""
        num_rows = num_bad = 0
        bad: list[BadRow] = []
        chunks: list[dict[str, Any]] = []
        minutes: list[np.ndarray] = []
        size = piece_rows(self._recipe.dense, self._recipe.sparse)
        self._derived.unmatched = [0] * len(self._recipe.joins)
        with contextlib.closing(self._dropper(unit)) as dropper:
            for rows in _chunks(read_unit(unit, self._recipe, dropper.advance), size):
                num_bad += rows.num_bad
                bad += rows.bad[:MAX_EXAMPLES - len(bad)]
                if num_bad > max_bad:
                    too_many_bad(num_bad, max_bad, [where(unit, self._recipe, b) for b in bad[:3]])
                chunks.append(self._write_chunk(self._path(number, len(chunks)),
                                                self._derived.add(rows), num_rows))
                if rows.time is not None:
                    minutes.append(rows.time // 60)
                num_rows += rows.labels.size
        with (self._folder / f"{number:06d}.minutes").open("wb") as file:
            distinct = np.unique(np.concatenate([np.zeros(0, np.int64), *minutes]),
                                 return_counts=True)
            append_batch(file, dict(zip(("minutes", "rows"), distinct, strict=True)))
        self.note(f"{number:06d}.json", {
            "rows": num_rows, "bad": num_bad, "chunks": chunks,
            "unmatched": self._derived.unmatched,
            "first": [where(unit, self._recipe, b) for b in bad]})

    def _dropper(self, unit: Unit) -> PageDropper:
        is_text = self._recipe.layout(unit.layout).format in ("text", "jsonl", "bags")
        return PageDropper(unit.path, unit.start if is_text else 0, self.is_large and is_text)

    def note(self, name: str, value: Any) -> None:
        """Write `value` as JSON, atomically but without fsync.

        Staged files need not survive a crash of the machine, and waiting for the disk would take
        longer than all other work on a unit.
        """
        path = self._folder / name
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(value), encoding="utf-8")
        os.replace(draft, path)

    def _write_chunk(self, path: Path, rows: Rows, first: int) -> dict[str, Any]:
        if self._recipe.by == "time" and rows.time is not None:
            rows = in_order(rows, np.argsort(rows.time, kind="stable"))
        offsets, places, missing, bags, kinds = [], [], [], [], []
        with (path.with_suffix(".rows").open("wb") as file,
              path.with_suffix(".distinct").open("wb") as values):
            append_batch(file, {
                "label": rows.labels, **({} if rows.time is None else {"time": rows.time}),
                **{f"dense {k}": x for k, x in enumerate(rows.dense)}})
            for ids in rows.sparse:
                codes, found = encode(ids)
                offsets.append(append_batch(file, {"codes": codes}))
                places.append(append_batch(values, {"values": found.values,
                                                    "counts": found.counts.astype(np.uint32)}))
                missing.append(found.num_missing)
                bags.append(pa.types.is_list(ids.type))
                kinds.append(found.values.dtype.kind if found.values.size else "")
        times = [] if rows.time is None or not rows.time.size else [
            int(rows.time.min()), int(rows.time.max())]
        return {"first": first, "rows": int(rows.labels.size), "missing": missing,
                "time": times, "codes": offsets, "distinct": places, "bags": bags,
                "kinds": kinds}

    def _path(self, number: int, chunk: int) -> Path:
        return self._folder / f"{number:06d}-{chunk:06d}"

    def chunks(self, number: int) -> list[Chunk]:
        """Return the chunks of a unit that has been read."""
        return [Chunk(self._path(number, k), about)
                for k, about in enumerate(self.record(number)["chunks"])]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A staged chunk of n rows.

    Attributes:
        path: path of its two files, without their suffixes.
        about: its entry in the record of its unit.
    """

    path: Path
    about: dict[str, Any]

    def distinct(self, column: int) -> Distinct:
        """Read a column's distinct values."""
        values, counts = read_batch(self.path.with_suffix(".distinct"),
                                    self.about["distinct"][column]).columns
        return Distinct(as_numpy(values), counts.to_numpy().astype(np.int64),
                        self.about["missing"][column])

    def numbers(self) -> pa.RecordBatch:
        """Read ``label``, ``time`` (if the log has times) and ``dense 0``, ``dense 1``, ..., as in
        `Rows`."""
        return read_batch(self.path.with_suffix(".rows"))

    def codes(self, column: int) -> pa.Array:
        """Read the codes of one column, or lists of codes."""
        return read_batch(self.path.with_suffix(".rows"), self.about["codes"][column]).column(0)

    def drop(self) -> None:
        """Remove the files, once the rows are in the output."""
        for kind in ("rows", "distinct"):
            self.path.with_suffix(f".{kind}").unlink(missing_ok=True)


_KINDS = {"i": "signed integers", "u": "unsigned integers", "S": "strings"}


def kinds_of(records: Sequence[dict[str, Any]], paths: Sequence[str], columns: Sequence[str]
             ) -> list[str]:
    """Return the NumPy kind of each sparse column's values: ``"i"``, ``"u"`` or ``"S"``.

    The kind is ``""`` for a column whose fields are all missing.

    Args:
        records: record of each unit, see `Stage.record`.
        paths: file of each unit.
        columns: names of the sparse columns.

    Raises:
        InvalidInputError: a column has values of two kinds, or lists in one file and single values
            in another.
    """
    found = []
    for k, name in enumerate(columns):
        kinds: dict[str, str] = {}  # by kind, the first file with such values
        forms: dict[str, str] = {}
        for record, path in zip(records, paths, strict=True):
            for chunk in record["chunks"]:
                if chunk["kinds"][k]:
                    kinds.setdefault(chunk["kinds"][k], path)
                if chunk["rows"]:
                    forms.setdefault("lists" if chunk["bags"][k] else "one id per row", path)
        named = {_KINDS[kind]: path for kind, path in kinds.items()}
        for several in (named, forms):
            if len(several) > 1:
                raise InvalidInputError("cannot preprocess", f"types of column {name!r}", several,
                                        "the same type in all files",
                                        "convert the files, so that equal values get equal ids")
        found.append(next(iter(kinds), ""))
    return found


def too_many_bad(count: int, max_bad: int, listed: list[str],
                 advice: str = "correct the log or raise --max-bad") -> None:
    """Raise FileFormatError: `count` malformed rows exceed `max_bad`; `listed` are examples."""
    raise FileFormatError(
        f"cannot preprocess: malformed rows={count}, expected <= max_bad={max_bad}; {advice}; "
        f"the first: {'; '.join(listed)}")


def _chunks(pieces: Iterator[Rows], size: int) -> Iterator[Rows]:
    """Combine consecutive pieces into chunks of at least `size` rows, except for the last one."""
    pending: list[Rows] = []
    lines = 0
    for rows in pieces:
        pending.append(rows)
        lines += rows.num_lines
        if lines >= size:
            yield _emptied(pending)
            lines = 0
    if pending:
        yield _emptied(pending)


def _emptied(pending: list[Rows]) -> Rows:
    """Concatenate pieces and drop them, so that they take no memory while the chunk is written."""
    chunk = concat(pending)
    pending.clear()
    return chunk

