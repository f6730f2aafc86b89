"""From a raw log to Parquet with ids in hotness order.

Three passes over the files, each in bounded memory: count the rows (for the split by time), count
the values of the training part (for the vocabularies), write both parts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

import oper
from oper.data.delimited import MAX_EXAMPLES, BadRow, Rows, parse_block
from oper.data.folder import FOLDER_KIND, FOLDER_VERSION, MANIFEST, SPLITS
from oper.data.lines import count_rows, expand_inputs, natural_key, read_blocks
from oper.data.recipe import Recipe, parse_share
from oper.data.vocabulary import Vocabulary, VocabularyCounter
from oper.errors import FileFormatError, InvalidInputError, fail

_log = logging.getLogger(__name__)
ABOUT_SUFFIX = ".about.json"  # a file beside a log that says what the log is


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """How a log is preprocessed.

    Attributes:
        min_count: values seen less often in the training part share row 0; None = the recipe's.
        valid: share of the rows, at the end, that is the validation part; None = the recipe's.
        max_bad: malformed rows that are left out (and reported) before it is an error.
        max_rows: at most so many rows per table, row 0 included; None = no limit.
        force: replace an earlier output.
        row_group_rows: rows of a Parquet row group.
        part_rows: rows of a Parquet file.
        show_progress: a progress bar on stderr.
    """

    min_count: int | None = None
    valid: str | Fraction | None = None
    max_bad: int = 0
    max_rows: int | None = None
    force: bool = False
    row_group_rows: int = 1 << 16
    part_rows: int = 1 << 21
    show_progress: bool = False

    def __post_init__(self) -> None:
        what = "cannot preprocess"
        for name, least in (("min_count", 1), ("max_bad", 0), ("max_rows", 2),
                            ("row_group_rows", 1), ("part_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInputError(fail(what, name, value, f">= {least}", "correct it"))


def preprocess(
    recipe: Recipe,
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    options: PreprocessOptions | None = None,
) -> dict[str, Any]:
    """Preprocess a log into the folder `output`; returns its manifest.

    The log is split by rows: the first part trains, the last share `valid` validates. Vocabularies
    and their order come from the training part only. `output` appears complete or not at all.

    Args:
        recipe: how the log is read.
        inputs: files (plain or gzip) or patterns; all files together are one log, in this order.
        output: the folder to write.
        options: see `PreprocessOptions`.

    Raises:
        InvalidInputError: an input is missing, `output` exists, or no training row is left.
        FileFormatError: more than `max_bad` malformed rows, or a damaged file.
    """
    options = options or PreprocessOptions()
    target = Path(output)
    paths = expand_inputs(inputs)
    _warn_about_order(paths)
    with _staging(target, options.force) as staging:
        job = _Job(recipe, paths, options)
        job.count()
        vocabularies = job.build_vocabularies()
        rows = job.write(staging, vocabularies)
        manifest = job.manifest(vocabularies, rows)
        text = json.dumps(manifest, indent=1) + "\n"
        (staging / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def _warn_about_order(paths: Sequence[str]) -> None:
    natural = sorted(paths, key=natural_key)
    if paths == sorted(paths) and paths != natural:
        _log.warning("the files are read in the order given, %s ..., which is not the order of "
                     "their numbers; quote the pattern to have it expanded in that order",
                     ", ".join(os.path.basename(p) for p in paths[:3]))


@contextlib.contextmanager
def _staging(target: Path, force: bool) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its place at the end, or vanishes on an error."""
    _check_target(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)  # mkdtemp makes it private
        yield staging
        _check_target(target, force)
        if target.exists():
            old = staging.with_suffix(".old")
            os.rename(target, old)
            os.rename(staging, target)
            shutil.rmtree(old)
        else:
            os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    what = "cannot write the preprocessed folder"
    kind = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        kind = json.loads((target / MANIFEST).read_text(encoding="utf-8")).get("kind")
    if kind != FOLDER_KIND:
        raise InvalidInputError(
            fail(what, "output", str(target), "a new or empty folder, or an earlier output",
                 "it holds something else: choose another folder"))
    if not force:
        raise InvalidInputError(
            fail(what, "output", str(target), "a new or empty folder",
                 "it holds an earlier output: pass --force to replace it"))


@dataclass(slots=True)
class _Job:
    """One run: the log, and what has been found out about it."""

    recipe: Recipe
    paths: list[str]
    options: PreprocessOptions
    file_rows: list[int] = field(default_factory=list)
    num_rows: int = 0
    first_valid: int = 0
    num_bad: int = 0
    bad: list[BadRow] = field(default_factory=list)

    @property
    def share(self) -> Fraction:
        valid = self.options.valid
        return self.recipe.valid if valid is None else parse_share(
            valid, "cannot split the log", "valid")

    @property
    def min_count(self) -> int:
        return self.options.min_count or self.recipe.min_count

    def count(self) -> None:
        """Pass 1: rows of the log and the first row of the validation part."""
        share = self.share
        with self._bar("counting rows") as bar:
            self.file_rows = count_rows(self.paths, self.recipe.header, bar.update)
        self.num_rows = sum(self.file_rows)
        self.first_valid = self.num_rows - int(self.num_rows * share)
        if not self.num_rows:
            raise InvalidInputError(
                fail("cannot preprocess", "inputs", self.paths, "at least one row",
                     "the files are empty, pass others"))

    def build_vocabularies(self) -> list[Vocabulary]:
        """Pass 2: count the values of the training part."""
        counters = [VocabularyCounter() for _ in self.recipe.names("sparse")]
        num_train = 0
        with contextlib.closing(self._read("counting values")) as blocks:
            for rows in blocks:
                end = int(np.searchsorted(rows.rows, self.first_valid))
                num_train += end
                for k, counter in enumerate(counters):
                    counter.add(rows.sparse[k, :end], rows.missing[k, :end])
                if rows.rows.size and rows.rows[-1] >= self.first_valid:
                    break
        if not num_train:
            raise InvalidInputError(
                fail("cannot preprocess", "training rows", 0, "at least one well-formed row",
                     "lower the validation share or pass a longer log"))
        return [c.finish(self.min_count, self.options.max_rows) for c in counters]

    def write(self, staging: Path, vocabularies: list[Vocabulary]) -> dict[str, int]:
        """Pass 3: write both parts; returns their rows."""
        (staging / "vocabulary").mkdir()
        for name, vocabulary in zip(self.recipe.names("sparse"), vocabularies, strict=True):
            vocabulary.write(staging / "vocabulary" / f"{name}.parquet")
        with contextlib.ExitStack() as stack:
            writers = {split: stack.enter_context(_PartWriter(staging / split, self.options))
                       for split in SPLITS}
            for rows in self._read("writing"):
                table = self._table(rows, vocabularies)
                end = int(np.searchsorted(rows.rows, self.first_valid))
                writers["train"].write(table.slice(0, end))
                writers["valid"].write(table.slice(end))
        return {split: writer.num_rows for split, writer in writers.items()}

    def _table(self, rows: Rows, vocabularies: list[Vocabulary]) -> pa.Table:
        recipe = self.recipe
        buckets = (rows.rows * recipe.buckets // self.num_rows).astype(np.int8)
        columns: dict[str, np.ndarray] = {
            recipe.names("label")[0]: rows.labels, recipe.bucket_column: buckets}
        columns.update(zip(recipe.names("dense"), rows.dense, strict=True))
        for k, (name, vocabulary) in enumerate(
                zip(recipe.names("sparse"), vocabularies, strict=True)):
            columns[name] = vocabulary.lookup(rows.sparse[k], rows.missing[k])
        return pa.table(columns)

    def _read(self, title: str) -> Generator[Rows]:
        """Parse the log, counting malformed rows from the start."""
        self.num_bad, self.bad = 0, []
        header = (self.recipe.separator.join(c.name for c in self.recipe.columns)
                  if self.recipe.header else None)
        with self._bar(title) as bar:
            for block in read_blocks(self.paths, header, bar.update):
                rows = parse_block(block, self.recipe)
                if rows.num_bad:
                    self._report(rows)
                yield rows

    def _report(self, rows: Rows) -> None:
        self.num_bad += rows.num_bad
        self.bad += rows.bad[:MAX_EXAMPLES - len(self.bad)]
        if self.num_bad > self.options.max_bad:
            listed = "; ".join(str(bad) for bad in self.bad[:3])
            raise FileFormatError(
                fail("cannot preprocess", "malformed rows", self.num_bad,
                     f"<= max_bad={self.options.max_bad}",
                     f"correct the log or raise --max-bad; the first: {listed}"))

    def _bar(self, title: str) -> tqdm:
        total = sum(os.path.getsize(p) for p in self.paths)
        return tqdm(total=total, desc=title, unit="B", unit_scale=True,
                    disable=not self.options.show_progress)

    def manifest(self, vocabularies: list[Vocabulary], rows: dict[str, int]) -> dict[str, Any]:
        """Everything that a reader of the folder needs to know."""
        recipe = self.recipe
        inputs = [{"path": os.path.abspath(p), "bytes": os.path.getsize(p), "rows": n, **_about(p)}
                  for p, n in zip(self.paths, self.file_rows, strict=True)]
        transforms = {c.name: c.transform for c in recipe.columns if c.kind == "dense"}
        return {
            "kind": FOLDER_KIND, "version": FOLDER_VERSION,
            "recipe": {"name": recipe.name, "title": recipe.title},
            "synthetic": any(i.get("synthetic") for i in inputs),
            "inputs": inputs,
            "rows": rows,
            "bad_rows": {"count": self.num_bad, "max_bad": self.options.max_bad,
                         "first": [str(bad) for bad in self.bad]},
            "split": {"by": "rows in order of time", "valid": str(self.share),
                      "first_valid_row": self.first_valid, "buckets": recipe.buckets},
            "columns": {"label": recipe.names("label")[0], "dense": list(recipe.names("dense")),
                        "sparse": list(recipe.names("sparse")), "bucket": recipe.bucket_column},
            "dense_transforms": transforms,
            "min_count": self.min_count, "max_rows": self.options.max_rows,
            "ids_in_hotness_order": True,
            "tables": {name: {"num_rows": v.num_rows, "num_distinct": v.num_distinct,
                              "num_once": v.num_once, "num_rare_accesses": v.num_rare,
                              "missing_id": v.missing_id}
                       for name, v in zip(recipe.names("sparse"), vocabularies, strict=True)},
            "versions": {"oper": oper.__version__, "python": platform.python_version(),
                         "numpy": np.__version__, "pyarrow": pa.__version__},
        }


def _about(path: str) -> dict[str, Any]:
    """What the file beside a log says of it; nothing for logs without one."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        about = json.loads(Path(path + ABOUT_SUFFIX).read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return {"synthetic": bool(about.get("synthetic", False)), "about": about}
    return {}


class _PartWriter:
    """Writes tables as Parquet parts with row groups of equal size, whatever the tables' sizes."""

    def __init__(self, folder: Path, options: PreprocessOptions) -> None:
        self._folder, self._options = folder, options
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._num_pending = self._num_parts = self._part_rows = self.num_rows = 0

    def __enter__(self) -> _PartWriter:
        self._folder.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._num_pending:
            self._flush(self._num_pending)
        if self._writer is not None:
            self._writer.close()

    def write(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._num_pending += table.num_rows
        self.num_rows += table.num_rows
        group = self._options.row_group_rows
        if self._num_pending >= group:
            self._flush(self._num_pending // group * group)

    def _flush(self, count: int) -> None:
        """Write the first `count` pending rows."""
        table = pa.concat_tables(self._pending)
        self._pending, self._num_pending = [table.slice(count)], table.num_rows - count
        group = self._options.row_group_rows
        for start in range(0, count, group):
            if self._writer is None:
                path = self._folder / f"part-{self._num_parts:05d}.parquet"
                self._writer = pq.ParquetWriter(path, table.schema, compression="lz4")
                self._num_parts += 1
            piece = table.slice(start, min(group, count - start))
            self._writer.write_table(piece, row_group_size=group)
            self._part_rows += piece.num_rows
            if self._part_rows >= self._options.part_rows:
                self._writer.close()
                self._writer, self._part_rows = None, 0
