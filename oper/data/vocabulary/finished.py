"""Finished vocabularies, which can be applied to new logs and extended by new values."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from oper.data.arrays import as_numpy
from oper.data.folder import (
    FOLDER_KIND,
    FOLDER_VERSION,
    MANIFEST,
    Folder,
    read_manifest,
    reading,
)
from oper.data.vocabulary.building import (
    Parts,
    Vocabulary,
    VocabularyFacts,
    build,
    common_kind,
    with_facts,
    write_parquet,
    write_parts,
)
from oper.data.vocabulary.merging import RunMerger
from oper.errors import FileFormatError, require
from oper.rows import remap
from oper.support.files import check_local, new_folder, read_json, write_text

VOCABULARY_KIND, VOCABULARY_VERSION = "oper-vocabulary", 1
_BATCH_ROWS = 1 << 18
_COLUMNS = ("value", "id", "count")  # of `write_parquet`


@dataclass(frozen=True, slots=True)
class FinishedVocabulary:
    """The vocabularies of all sparse columns, as preprocessing or an extension wrote them.

    Attributes:
        path: the folder.
        columns: names of the sparse columns, in order.
        facts: facts about each column's values.
        min_count: values seen fewer than `min_count` times share row 0.
        digest: digest of the manifest, which identifies the vocabulary.
        recipe: name of the recipe with which the vocabulary was made.
        numbering: id of the mapping from values to rows; extensions keep it unless they reorder
            rows.
    """

    path: Path
    columns: tuple[str, ...]
    facts: dict[str, VocabularyFacts]
    min_count: int
    digest: str
    recipe: str
    numbering: str

    @staticmethod
    def open(path: str | os.PathLike[str]) -> FinishedVocabulary:
        """Open a folder written by ``oper preprocess`` or ``oper vocabulary extend``.

        Raises:
            FileFormatError: the folder is not such an output, has another version or raw ids, or is
                damaged.
            InvalidInputError: `path` is a URL.
        """
        check_local(path)
        folder, what = Path(path), f"cannot open {os.fspath(path)!r} as a vocabulary"
        todo = "name a folder that 'oper preprocess' or 'oper vocabulary extend' wrote"
        value = read_manifest(folder, what, todo, (FOLDER_KIND, FOLDER_VERSION),
                              (VOCABULARY_KIND, VOCABULARY_VERSION))
        if value.get("raw_ids"):
            raise FileFormatError(what, "ids", "raw", "row numbers of a vocabulary",
                                  "raw ids have none: pass --raw-ids again instead")
        try:
            columns = tuple(map(str, value["columns"]["sparse"]))
            facts = {n: VocabularyFacts(**value["tables"][n]) for n in columns}
            found = FinishedVocabulary(
                folder, columns, facts, int(value["min_count"]),
                hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:32],
                str(value["recipe"]["name"]), str(value.get("numbering", "")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileFormatError(what, "manifest", str(error), "columns and tables",
                                  todo) from None
        missing = [n for n in columns if not found.file(n).is_file()]
        if missing:
            raise FileFormatError(what, "missing files", missing[:8],
                                  "vocabulary/COLUMN.parquet of every sparse column", todo)
        return found

    def file(self, column: str) -> Path:
        """Return the path of a column's Parquet file, see `write_parquet`."""
        return self.path / "vocabulary" / f"{column}.parquet"

    def unpack(self, column: str, folder: Path) -> Vocabulary:
        """Convert a column's vocabulary to the files of `Vocabulary`, in `folder`, and open it.

        Raises:
            FileFormatError: the file is damaged or contradicts the manifest.
        """
        path, facts = self.file(column), self.facts[column]
        file, width = Folder.open_part(path, _COLUMNS), 1
        with reading(path):
            if not pa.types.is_integer(file.schema_arrow.field("value").type):
                lengths = [pc.max(pc.binary_length(b.column(0))).as_py() or 0
                           for b in file.iter_batches(_BATCH_ROWS, columns=["value"])]
                width = max([1, *lengths])
            num_missing = _missing(file)
        parts = ((values if values.dtype.kind != "S" else values.astype(f"S{width}"), ids, counts)
                 for values, ids, counts in _parts(file, path))
        write_parts(folder, _checked(parts, facts, f"cannot read the vocabulary {str(path)!r}"),
                    file.metadata.num_rows - (num_missing is not None))
        return with_facts(folder, facts, num_missing or 0)


def _missing(file: pq.ParquetFile) -> int | None:
    """Return the count of the null value, which is first; None if the file has none."""
    first = next(file.iter_batches(1), None)
    return first.column(2)[0].as_py() if first is not None and first.column(0).null_count else None


def _parts(file: pq.ParquetFile, path: Path) -> Parts:
    """Yield values (integers or bytes), ids and counts without the null value."""
    with reading(path):
        for batch in file.iter_batches(_BATCH_ROWS):
            if batch.column(0).null_count:
                batch = batch.filter(batch.column(0).is_valid())
            values = batch.column(0)
            yield (values.to_numpy() if pa.types.is_integer(values.type)
                   else as_numpy(values.cast(pa.binary())),
                   batch.column(1).to_numpy(), batch.column(2).to_numpy())


def _checked(parts: Parts, facts: VocabularyFacts, what: str) -> Parts:
    """Yield `parts` after checking that values ascend, and ids are in range and, unless hashed,
    unique; raises FileFormatError."""
    last: Any = None
    taken, count = np.zeros(facts.num_rows, bool), 0
    for values, ids, counts in parts:
        if values.size:
            ascend = bool((values[1:] > values[:-1]).all()) and (last is None or values[0] > last)
            low, high = int(ids.min()), int(ids.max())
            if not (ascend and 1 <= low <= high < facts.num_rows):
                raise FileFormatError(what, "first value, ids", (str(values[0]), low, high),
                                      f"ascending values with ids in 1..{facts.num_rows - 1}",
                                      "preprocess again")
            taken[ids], last = True, values[-1]
            count += values.size
        yield values, ids, counts
    if not facts.hashed and int(np.count_nonzero(taken)) != count:
        raise FileFormatError(what, "distinct ids", int(np.count_nonzero(taken)),
                              f"{count}, one for each value", "preprocess again")


def check_columns(finished: FinishedVocabulary, columns: Sequence[str]) -> None:
    """Raise InvalidInputError unless a vocabulary has exactly these sparse columns, in order."""
    require("cannot apply a vocabulary", "pass the recipe and columns that it was made with",
            ("sparse columns", list(columns), finished.columns == tuple(columns),
             f"{list(finished.columns)} as in {str(finished.path)!r}"))


def extend(path: str | os.PathLike[str], folders: Sequence[str | os.PathLike[str]],
           output: str | os.PathLike[str], min_count: int | None = None,
           max_rows: int | None = None, reorder: bool = False) -> dict[str, Any]:
    """Write a vocabulary with new values appended to the old ones; returns its manifest.

    Old values keep their rows. New values get the rows after them, by descending total count over
    all `folders`, ties by ascending value. Rows are then in frequency order only within each
    extension; planning does not need that order, since statistics list the hot ids.

    With `reorder`, all rows are renumbered by their total count in the vocabulary and all
    `folders`, and ``remap/COLUMN.npy`` has the new number of each row, see `oper.rows.remap`.

    Args:
        path: folder of the vocabulary.
        folders: folders preprocessed with it; the unseen values of their training parts are added.
        output: the folder to write, which must not exist.
        min_count: new values seen fewer times are not added; None = the vocabulary's `min_count`.
        max_rows: maximum number of rows per table, old rows included; None = no limit.
        reorder: put all rows into frequency order; needs memory for the counts of a column's rows.

    Raises:
        InvalidInputError: a column is hashed or has more than `max_rows` rows, a folder was
            preprocessed with another vocabulary or is named twice, `output` exists, or its disk is
            full.
        FileFormatError: a folder or vocabulary is damaged.
    """
    what = "cannot extend a vocabulary"
    old = FinishedVocabulary.open(path)
    hashed = [n for n, f in old.facts.items() if f.hashed]
    real = [os.path.realpath(f) for f in folders]
    twice = sorted({f for f in real if real.count(f) > 1})
    require(what, "hashed columns need no extension: a hash has a row for every value",
            ("hashed columns", hashed[:8], not hashed, "none"))
    require(what, "name the folders of different days",
            ("folders", twice, not twice, "each of them once, since counts are added up"))
    sources = [_source(what, old, Path(f)) for f in folders]
    require(what, "name folders preprocessed with --vocabulary",
            ("folders", sources, bool(sources), "at least one"))
    least = old.min_count if min_count is None else min_count
    with new_folder(what, output) as out:
        (out / "vocabulary").mkdir()
        facts = {n: _extend_column(old, n, sources, out.parent, (least, max_rows))
                 for n in old.columns}
        numbering = old.numbering
        if reorder:
            (out / remap.FOLDER).mkdir()
            facts = {n: _reorder_column(out, n, sources, f) for n, f in facts.items()}
            numbering = numbering_of(out / "vocabulary")
        manifest = {
            "kind": VOCABULARY_KIND, "version": VOCABULARY_VERSION, "recipe": {"name": old.recipe},
            "columns": {"sparse": list(old.columns)}, "min_count": least, "max_rows": max_rows,
            "extends": {"path": os.path.abspath(path), "digest": old.digest},
            "numbering": numbering, "folders": [os.path.abspath(f) for f in folders],
            "tables": {n: asdict(f) for n, f in facts.items()},
            "new_rows": {n: f.num_rows - old.facts[n].num_rows for n, f in facts.items()}}
        write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _source(what: str, old: FinishedVocabulary, folder: Path) -> Path:
    try:
        applied = read_json(folder / MANIFEST, what).get("vocabulary") or {}
    except (OSError, AttributeError):
        applied = {}
    require(what, "leave it out: its unseen values are relative to another vocabulary, or unknown",
            ("folder", str(folder), applied.get("digest") == old.digest,
             f"one preprocessed with --vocabulary {old.path}"))
    return folder


def numbering_of(folder: Path) -> str:
    """Return a digest of a folder's vocabulary files, which identifies their mapping to rows."""
    state = hashlib.sha256()
    for path in sorted(folder.glob("*.parquet")):
        state.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                state.update(piece)
    return state.hexdigest()[:32]


def _reorder_column(out: Path, name: str, sources: Sequence[Path], facts: VocabularyFacts
                    ) -> VocabularyFacts:
    """Renumber the rows of a column's extended vocabulary file by count, and write the re-map."""
    path = out / "vocabulary" / f"{name}.parquet"
    table = pq.read_table(path)  # by ascending value, a missing field first
    ids = table.column("id").to_numpy()
    counts = np.zeros(facts.num_rows, np.int64)
    counts[ids] = table.column("count").to_numpy()
    for folder in map(Folder.open, sources):
        for part in folder.parts("train"):
            found = folder.read_part(part, (name,)).column(name)
            found = found.combine_chunks().flatten() if pa.types.is_list(found.type) else found
            counts += np.bincount(found.to_numpy(), minlength=facts.num_rows)
    rows = np.zeros(facts.num_rows, np.int32)  # row 0 stays row 0
    rows[ids[np.argsort(-counts[ids], kind="stable")]] = np.arange(1, facts.num_rows)
    np.save(out / remap.FOLDER / f"{name}.npy", rows)
    pq.write_table(pa.table([table.column("value"), rows[ids], counts[ids]], schema=table.schema),
                   path, compression="lz4", use_dictionary=False, write_statistics=False)
    return replace(facts, missing_id=int(rows[facts.missing_id]))


def _extend_column(old: FinishedVocabulary, name: str, sources: Sequence[Path], work: Path,
                   limits: tuple[int, int | None]) -> VocabularyFacts:
    """Write one column's extended vocabulary to ``work/out``; `limits`: min_count and max_rows."""
    known, new = work / "known", work / "new"
    for folder in (known, new):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    before = old.unpack(name, known)
    merger, num_missing = RunMerger(new), 0
    for path in (s / "unseen" / f"{name}.parquet" for s in sources):
        file = Folder.open_part(path, _COLUMNS)
        with reading(path):
            num_missing += _missing(file) or 0
        for values, _, counts in _parts(file, path):
            merger.add(values, counts)
    facts, (least, max_rows) = before.facts, limits
    require(f"cannot extend the vocabulary of {name!r}", "pass a larger number, or none",
            ("max_rows", max_rows, max_rows is None or max_rows >= facts.num_rows,
             f">= {facts.num_rows}, the rows that it has and keeps"))
    most_new = None if max_rows is None else max_rows - facts.num_rows + 1
    added = build(new, merger, num_missing, least, most_new)
    more = added.facts
    merger.close()
    shift = facts.num_rows - 1
    missing_id = facts.missing_id or (more.missing_id + shift if more.missing_id else 0)
    given = replace(facts, num_rows=facts.num_rows + more.num_rows - 1, missing_id=missing_id)
    require(f"cannot extend the vocabulary of {name!r}", "pass --max-rows",
            ("rows", given.num_rows, given.num_rows <= 1 << 31, "<= 2^31"))
    missing = before.num_missing if facts.missing_id else num_missing
    write_parquet(work / "out" / "vocabulary" / f"{name}.parquet",
                  lambda: _merged(before, added, shift),
                  (missing_id, missing) if missing_id else None)
    return given


def _merged(old: Vocabulary, new: Vocabulary, shift: int) -> Parts:
    """Merge old and new values in ascending order; `shift` is added to new ids."""
    values, ids, counts = new.arrays()
    kind, at = common_kind(old.arrays()[0], values), 0
    for part, after in itertools.pairwise(itertools.chain(old.parts(), [None])):
        assert part is not None
        end = values.size if after is None else int(np.searchsorted(values, after[0][0]))
        places = np.searchsorted(part[0], values[at:end])
        yield (np.insert(part[0].astype(kind, copy=False), places, values[at:end]),
               np.insert(part[1], places, ids[at:end] + np.int32(shift)),
               np.insert(part[2], places, counts[at:end]))
        at = end
    if at < values.size:  # there were no old values
        yield values[at:].astype(kind, copy=False), ids[at:] + np.int32(shift), counts[at:]


def write_unseen(path: Path, merger: RunMerger, num_missing: int) -> tuple[int, int]:
    """Write the values that a vocabulary lacks to Parquet, see `write_parquet`; all ids are 0.

    Returns:
        Number of distinct values (missing fields count as one) and of their occurrences.
    """
    def parts() -> Parts:
        for values, counts in merger.slices():
            yield values, np.zeros(values.size, np.int32), counts

    write_parquet(path, parts, (0, num_missing) if num_missing else None)
    found = [(v.size, int(c.sum())) for v, c in merger.slices()]
    return (sum(n for n, _ in found) + (num_missing > 0),
            sum(n for _, n in found) + num_missing)
