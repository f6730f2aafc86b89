"""A preprocessing job: reading, counting and writing tasks, which several processes can share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from oper.data.folder import FOLDER_KIND, MANIFEST, SPLITS
from oper.data.preprocessing.manifest import describe
from oper.data.preprocessing.sharing import is_done, share
from oper.data.preprocessing.spec import JobSpec
from oper.data.preprocessing.staging import Stage, kinds_of, too_many_bad
from oper.data.preprocessing.workfolder import OUT, WorkFolder
from oper.data.preprocessing.writing import (
    Split,
    Writer,
    spans_of_time,
    split_by_rows,
    split_by_time,
    train_values,
)
from oper.data.reading import estimate, store
from oper.data.reading.pagecache import is_large
from oper.data.vocabulary.building import Vocabulary, build, build_hashed
from oper.data.vocabulary.finished import write_unseen
from oper.data.vocabulary.merging import RunMerger
from oper.data.vocabulary.raw_keys import MISSING_KEY, RawKeys
from oper.errors import FileFormatError, InvalidInputError, require
from oper.support.files import read_json, write_text

_log = logging.getLogger(__name__)
_PLAN = "plan.json"  # in the work folder: estimated disk, memory and time of the job
_RAW_TABLES = "raw.json"  # in the stage: manifest entries of columns of raw ids


def occupied(target: str, is_ours: bool) -> InvalidInputError:
    """Make the error for a folder that has an earlier output (`is_ours`) or other files."""
    what = "cannot write the preprocessed folder"
    if is_ours:
        return InvalidInputError(what, "output", target, "a new or empty folder",
                                 "it holds an earlier output: pass --force (force=True) to replace "
                                 "it")
    return InvalidInputError(what, "output", target, "a new or empty folder, or an earlier output",
                             "it holds something else: choose another folder")


@dataclass(slots=True)
class Job(JobSpec):
    """One preprocessing job, whose work in progress is kept in a folder next to the output."""

    _began: bool = False
    _is_large: bool = False
    _stage: Stage | None = None
    _vocabularies: dict[str, Vocabulary | RawKeys] = field(default_factory=dict)
    _first_rows: list[int] = field(default_factory=list)
    _spans: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def folder(self) -> WorkFolder:
        return WorkFolder(self.target, self.identity())

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            self._stage = Stage(self.work / "stage", self.recipe, self._is_large)
        return self._stage

    def read_manifest(self) -> dict[str, Any]:
        """Read the manifest in the output folder; empty if it is missing or damaged."""
        with contextlib.suppress(OSError, FileFormatError):
            found = read_json(self.target / MANIFEST, "no manifest")
            if isinstance(found, dict):
                return found
        return {}

    def is_there(self) -> bool:
        """Whether the output folder holds the result of this job and `force` is off."""
        return not self.options.force and self.read_manifest().get("job") == self.identity()

    def check_target(self) -> None:
        """Raise InvalidInputError if the output folder must not be replaced."""
        target = self.target
        if target.is_dir() and (target.is_mount() or target.samefile(os.curdir)):
            raise InvalidInputError(
                "cannot write the preprocessed folder", "output", str(target),
                "a folder that can be replaced, neither a mount point nor the current folder",
                "name a new folder inside it")
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
        is_ours = self.read_manifest().get("kind") == FOLDER_KIND
        if not is_ours or not self.options.force:
            raise occupied(str(target), is_ours)

    def outcome(self) -> dict[str, Any]:
        """Return the output's manifest if this object began the job and it is done; else empty."""
        found = self.read_manifest() if self._began else {}
        return found if found.get("job") == self.identity() else {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Create the work folder, or reuse an interrupted run's, and lock it during the block."""
        with self.folder.opened(self.options.force, self._begin):
            self._began, self._is_large = True, is_large(self.paths)
            yield

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Use the work folder, which another process of this job has opened, while the block runs;
        see `WorkFolder.joined`."""
        return self.folder.joined()

    def _begin(self, work: Path) -> None:
        needs = self._estimate()
        for name in ("stage", "tasks", *(f"{OUT}/{s}" for s in SPLITS),
                     *([] if self.options.raw_ids else [f"{OUT}/vocabulary"]),
                     *([f"{OUT}/unseen"] if self.finished else [])):
            (work / name).mkdir(parents=True)
        write_text(work / _PLAN, json.dumps(asdict(needs)))

    def _estimate(self) -> estimate.Needs:
        need = estimate.needs(self.recipe, self.units, self.options.id_bytes)
        free = shutil.disk_usage(self.target.parent).free
        _log.info("%s", need.text(free))
        require("cannot preprocess", "free some space, or pass --no-disk-check",
                ("free bytes of the disk", free,
                 need.disk_bytes <= free or not self.options.check_disk,
                 f"about {need.disk_bytes} at the peak"))
        return need

    def run(self) -> None:
        """Run tasks of the job that no other process has claimed, until all are done."""
        try:
            self._take_part()
        except FileNotFoundError:  # another process has moved the output and cleared the work
            if not self.outcome():
                raise

    def _take_part(self) -> None:
        tasks = self.work / "tasks"
        if not is_done(tasks, "staged"):
            self._share("reading", {f"read-{k:06d}": partial(self._read, k)
                                    for k in range(len(self.units))}, self._bytes())
            share({"staged": self._check_staged}, tasks)
        split = self._split()
        if not self.options.raw_ids and not is_done(tasks, "counted"):
            self._share("counting", {f"count-{k:03d}": partial(self._count, k, split)
                                     for k in range(len(self.recipe.sparse))}, [])
            share({"counted": lambda: None}, tasks)
        by_rows = split.by == "rows"
        sizes = self._bytes() if by_rows else [rows for _, _, rows in self._spans]
        # The stage files of a unit are removed as soon as its writing task is marked as done.
        self._share("writing", {f"write-{k:06d}": partial(self._write, k, split)
                                for k in range(len(sizes))}, sizes, self._drop if by_rows else None)
        share({"finished": lambda: self._finish(split)}, tasks)

    def _drop(self, task: str) -> None:
        for chunk in self.stage.chunks(int(task.removeprefix("write-"))):
            chunk.drop()

    def _share(self, title: str, tasks: dict[str, Any], sizes: list[int],
               done: Callable[[str], None] | None = None) -> None:
        """Share tasks with other processes; `sizes` (bytes or rows) drive the progress bar."""
        unit = "" if sizes else " columns"
        sizes = sizes or [1] * len(tasks)
        weight = dict(zip(tasks, sizes, strict=True))
        with tqdm(total=sum(sizes), desc=title, unit=unit, unit_scale=True,
                  disable=not self.options.show_progress) as bar:
            def tell(name: str) -> None:
                bar.update(weight[name])
                if done is not None:
                    done(name)

            share(tasks, self.work / "tasks", tell)

    def _bytes(self) -> list[int]:
        """Return the approximate number of input bytes of each unit."""
        sizes = {p: store.size(p) for p in self.paths}
        return [max(1, (u.stop or sizes[u.path]) - u.start)
                if self.recipe.layout(u.layout).format in ("text", "jsonl", "bags")
                else max(1, sizes[u.path]) for u in self.units]

    def _read(self, k: int) -> None:
        self.stage.write(k, self.units[k], self.options.max_bad)

    def _check_staged(self) -> None:
        self.check_unchanged()
        records = [self.stage.record(k) for k in range(len(self.units))]
        num_bad = sum(r["bad"] for r in records)
        if num_bad > self.options.max_bad:
            too_many_bad(num_bad, self.options.max_bad,
                         [b for r in records for b in r["first"]][:3])
        require("cannot preprocess", "check for empty files and a filter that excludes all rows",
                ("inputs", self.paths, any(r["rows"] + r["bad"] for r in records),
                 "at least one row"))
        if not sum(r["rows"] for r in records):
            raise InvalidInputError("cannot preprocess", "well-formed rows", 0, "at least one",
                                    "correct the log or the recipe: all rows are malformed")
        kinds = kinds_of(records, [u.path for u in self.units], self.recipe.sparse)
        if self.options.raw_ids:
            self.stage.note(_RAW_TABLES, {
                name: {"hashed_texts": kind == "S", "missing_id": MISSING_KEY}
                for name, kind in zip(self.recipe.sparse, kinds, strict=True)})

    def _split(self) -> Split:
        records = [self.stage.record(k) for k in range(len(self.units))]
        self._first_rows = [0]
        for r in records:
            self._first_rows.append(self._first_rows[-1] + r["rows"])
        if self.recipe.by == "rows":
            return split_by_rows(self.recipe, self._first_rows[-1], *self.shares)
        with tempfile.TemporaryDirectory(dir=self.work, prefix="minutes.") as folder:
            merger = RunMerger(Path(folder))
            for k in range(len(self.units)):
                merger.add(*self.stage.minutes(k))
            self._spans = spans_of_time(merger.slices, self.options.part_rows)
            return split_by_time(self.recipe, merger.slices, *self.shares)

    def _count(self, column: int, split: Split) -> None:
        """Merge one column's value counts in the training part and write its vocabulary.

        With a finished vocabulary, copy it and write the counts of values that it lacks.
        """
        name = self.recipe.sparse[column]
        folder = self.work / "vocabulary" / f"{column:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        known = self.finished.unpack(name, folder) if self.finished else None
        merger, num_missing, num_train = RunMerger(folder), 0, 0
        for chunk, first_row in ((chunk, first) for k, first in enumerate(self._first_rows[:-1])
                                 for chunk in self.stage.chunks(k)):
            found = train_values(chunk, split, first_row, column)
            values, counts = found.values, found.counts
            num_train += int(counts.sum()) + found.num_missing
            if known is not None:
                new = ~known.has(values)
                values, counts = values[new], counts[new]
            merger.add(values, counts)
            num_missing += found.num_missing
        target = self.work / OUT / "vocabulary" / f"{name}.parquet"
        if self.finished is not None and known is not None:
            shutil.copyfile(self.finished.file(name), target)
            unseen = self.work / OUT / "unseen" / f"{name}.parquet"
            has_missing = known.facts.missing_id or known.facts.hashed
            num_values, num = write_unseen(unseen, merger, 0 if has_missing else num_missing)
            self.stage.note(f"unseen-{column:03d}.json", {
                "values": num_values, "accesses": num,
                "share": num / max(num_train, 1)})  # 0 accesses: all bags are empty
        elif self.options.hash_rows is not None:
            build_hashed(folder, merger, num_missing, self.options.hash_rows).write_parquet(target)
        else:
            build(folder, merger, num_missing, self.min_count, self.options.max_rows
                  ).write_parquet(target)
        merger.close()

    def vocabulary(self, name: str) -> Vocabulary | RawKeys:
        """Open the vocabulary of a counted column, or `RawKeys` if ids stay raw."""
        if name not in self._vocabularies:
            number = self.recipe.sparse.index(name)
            self._vocabularies[name] = RawKeys(name) if self.options.raw_ids else Vocabulary(
                self.work / "vocabulary" / f"{number:03d}")
        return self._vocabularies[name]

    def _write(self, k: int, split: Split) -> None:
        """Write the k-th unit (split by rows) or the k-th span of time (split by time)."""
        writer = Writer(self.stage, self.recipe, split, self.vocabulary, self.work / OUT,
                        self.options)
        self.stage.note(f"{k:06d}.rows.json", writer.write_unit(k, self._first_rows[k])
                        if split.by == "rows" else
                        writer.write_span(k, len(self.units), *self._spans[k][:2]))

    def _finish(self, split: Split) -> None:
        manifest = self.manifest(split)
        write_text(self.work / OUT / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        self.folder.finish(self._put)

    def _put(self) -> None:
        """Move the finished output to its place, and an output that it replaces to the work folder.
        """
        self.check_target()
        if self.target.exists():
            os.rename(self.target, self.work / "replaced")
        os.rename(self.work / OUT, self.target)

    def _tables(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's ``tables``: facts about the values of each sparse column."""
        if self.options.raw_ids:
            return self.stage.noted(_RAW_TABLES)
        found = {name: self.vocabulary(name) for name in self.recipe.sparse}
        return {name: asdict(v.facts) for name, v in found.items() if isinstance(v, Vocabulary)}

    def manifest(self, split: Split) -> dict[str, Any]:
        """Make the manifest of the finished job."""
        records = [self.stage.record(k) for k in range(len(self.units))]
        rows = dict.fromkeys(SPLITS, 0)
        for k in range(len(self.units if split.by == "rows" else self._spans)):
            found = self.stage.noted(f"{k:06d}.rows.json")
            rows = {s: rows[s] + found[s] for s in SPLITS}
        columns = self.recipe.sparse
        unseen = {} if self.finished is None else {
            name: self.stage.noted(f"unseen-{k:03d}.json") for k, name in enumerate(columns)}
        return {**describe(self, split, records, rows, self._tables(), unseen),
                "plan": json.loads((self.work / _PLAN).read_text())}
