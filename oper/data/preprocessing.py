"""From a raw log to Parquet with ids in hotness order.

Three phases, each made of tasks that any number of processes share: read every unit (a part of a
file) once into codes on disk, merge the value counts of the training part column by column into
vocabularies, write every unit with ids. Memory is bounded whatever the size of the log. The work
lies in a folder beside the output, so that a run that was interrupted goes on where it stopped, and
what comes out does not depend on how many processes there were or how often they were stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

from oper.data import estimate, store, workers
from oper.data.detect import find_inputs, plan_units
from oper.data.finished import (
    FinishedVocabulary,
    check_columns,
    unseen_values,
    write_unseen,
)
from oper.data.folder import FOLDER_KIND, FOLDER_VERSION, MANIFEST, SPLITS
from oper.data.lines import natural_key
from oper.data.merging import RunMerger
from oper.data.pagecache import is_large
from oper.data.probing import check_first_rows
from oper.data.readers import Unit
from oper.data.recipe import Recipe, parse_share
from oper.data.sharing import is_done, share
from oper.data.staging import Distinct, Stage, too_many_bad
from oper.data.vocabulary import Vocabulary, build, build_hashed
from oper.data.workfolder import WorkFolder, work_folder
from oper.data.writing import (
    Split,
    WriteOptions,
    Writer,
    spans_of_time,
    split_by_rows,
    split_by_time,
    train_codes,
)
from oper.errors import FileFormatError, InvalidInputError, OperError, fail
from oper.files import no_room, read_json, write_text

_log = logging.getLogger(__name__)



@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """How a log is preprocessed.

    Attributes:
        min_count: values seen less often in the training part share row 0; None = the recipe's.
        valid, test: shares of the rows, at the end, that are the validation and the test part;
            None = the recipe's.
        max_bad: malformed rows that are left out (and reported) before it is an error.
        max_rows: at most so many rows per table, row 0 included; None = no limit.
        hash_rows: hash every value into tables of so many rows instead of building vocabularies.
        vocabulary: a folder whose finished vocabulary is applied instead of building one: an
            earlier output or what ``oper vocabulary extend`` wrote. Values that it lacks share row
            0; ``unseen/COLUMN.parquet`` lists those of the training part.
        layout: name of the files' layout; None = find out.
        force: replace an earlier output, drop work that was begun with other settings.
        num_workers: processes on this machine.
        num_ray_workers: more of them on a Ray cluster that shares the file system.
        row_group_rows: rows of a Parquet row group.
        part_rows: rows of a Parquet file.
        compression: of the Parquet files, ``"none"`` (quickest to read) or ``"zstd"`` (about half
            as large).
        unit_bytes: about the size of the units that large plain files are cut into.
        check_disk: refuse to begin when the disk is estimated to be too small.
        show_progress: a progress bar on stderr.
    """

    min_count: int | None = None
    valid: str | Fraction | None = None
    test: str | Fraction | None = None
    max_bad: int = 0
    max_rows: int | None = None
    hash_rows: int | None = None
    vocabulary: str | os.PathLike[str] | None = None
    layout: str | None = None
    force: bool = False
    num_workers: int = 1
    num_ray_workers: int = 0
    row_group_rows: int = 1 << 16
    part_rows: int = 1 << 21
    compression: str = "none"
    unit_bytes: int = 1 << 28
    check_disk: bool = True
    show_progress: bool = False

    def __post_init__(self) -> None:
        what = "cannot preprocess"
        for name, least in (("min_count", 1), ("max_bad", 0), ("max_rows", 2), ("hash_rows", 2),
                            ("num_workers", 1), ("num_ray_workers", 0), ("row_group_rows", 1),
                            ("part_rows", 1), ("unit_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInputError(fail(what, name, value, f">= {least}", "correct it"))
        if self.compression not in ("none", "zstd"):
            raise InvalidInputError(
                fail(what, "compression", self.compression, "none or zstd", "correct it"))
        if self.hash_rows is not None and (self.max_rows is not None or self.hash_rows > 2**31 - 1):
            raise InvalidInputError(
                fail(what, "hash_rows", self.hash_rows, "below 2^31 and without max_rows",
                     "choose one of them"))
        own = {n: v for n in ("min_count", "max_rows", "hash_rows") if (v := getattr(self, n))}
        if self.vocabulary is not None and own:
            raise InvalidInputError(
                fail(what, "options beside a vocabulary", own, "none of them",
                     "the finished vocabulary has settled them: leave them out"))


def preprocess(
    recipe: Recipe,
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    options: PreprocessOptions | None = None,
) -> dict[str, Any]:
    """Preprocess a log into the folder `output`; returns its manifest.

    The manifest's `problems` tell what makes the result useless though nothing failed (an empty
    part, a table of row 0 only, no label or one among the features); they are logged as warnings.

    The first part of the log trains, the last shares validate and test. Vocabularies and their
    order come from the training part only. `output` appears complete or not at all; work in
    progress lies in ``.NAME.work`` beside it, which is locked while anybody works in it. Processes
    that run the same call at the same time (under torchrun, as an array job, ...) share the work;
    each returns when all of it is done.

    Args:
        recipe: how the log is read.
        inputs: files (plain, or packed by gzip, zstd or bzip2), folders or patterns, here or in a
            store (``s3://...``), or a pipe (``-``); all together are one log, in this order.
        output: the folder to write, here or in a store. What goes into a store is made in the
            folder for temporary files and put there when it is whole, the manifest last.
        options: see `PreprocessOptions`.

    Raises:
        InvalidInputError: an input is missing, `output` holds something else or another run is
            writing it, the disk is too small, or no training row is left.
        FileFormatError: more than `max_bad` malformed rows, a damaged file, or another format.
    """
    options = options or PreprocessOptions()
    with store.spooled(inputs, _local_target(output)) as names:
        if store.is_url(output):
            return _into_store(recipe, names, os.fspath(output), options)
        return _preprocess(recipe, names, Path(output), options)


def _local_target(output: str | os.PathLike[str]) -> Path:
    """Where an output is made: itself, or for one in a store a temporary folder of its own."""
    if not store.is_url(output):
        return Path(output)
    name = hashlib.sha256(store.full_name(os.fspath(output)).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"oper-{os.getuid()}" / name / "out"


def _into_store(recipe: Recipe, inputs: Sequence[str], url: str, options: PreprocessOptions
                ) -> dict[str, Any]:
    """Preprocess into a local folder and put that into a store, the manifest at the end."""
    local = _local_target(url)
    plain, mark, query = url.partition("?")
    there, old = f"{plain.rstrip('/')}/{MANIFEST}{mark}{query}", {}
    held = store.files_below(url)
    if there in held:
        with store.open_input(there) as file, contextlib.suppress(ValueError):
            old = dict(json.load(file))
    is_ours = old.get("kind") == FOLDER_KIND
    if held and not is_ours:
        raise _occupied(store.full_name(url), is_ours)
    _log.info("the output is made in %s (TMPDIR chooses the disk) and then put into the store",
              local.parent)
    manifest = _preprocess(recipe, inputs, local, options)
    if old.get("job") != manifest["job"]:
        if is_ours and not options.force:
            raise _occupied(store.full_name(url), is_ours)
        store.remove_below(url)
        store.upload(local, url, [MANIFEST])
    shutil.rmtree(local.parent, ignore_errors=True)
    return manifest


def _occupied(target: str, is_ours: bool) -> InvalidInputError:
    what = "cannot write the preprocessed folder"
    if is_ours:
        return InvalidInputError(fail(what, "output", target, "a new or empty folder",
                                      "it holds an earlier output: pass --force to replace it"))
    return InvalidInputError(
        fail(what, "output", target, "a new or empty folder, or an earlier output",
             "it holds something else: choose another folder"))


def _preprocess(recipe: Recipe, inputs: Sequence[str], output: Path, options: PreprocessOptions
                ) -> dict[str, Any]:
    """`preprocess` into a local folder, from files that can be read more than once."""
    paths = find_inputs(recipe, inputs)
    _warn_about_order(paths)
    units = plan_units(recipe, paths, options.layout, options.unit_bytes)
    finished = None if options.vocabulary is None else FinishedVocabulary.open(options.vocabulary)
    job = Job(recipe, paths, units, output, options, finished)
    if job.is_there():
        # A process of the same job that comes late, or the same command again.
        _log.info("%s is there already, of the same inputs and settings", job.target)
        return _told(job.read_manifest())
    _check_target(job)
    if job.finished is not None:
        check_columns(job.finished, recipe.names("sparse"))
    check_first_rows(recipe, units, options.max_bad)
    try:
        with (job.opened(), workers.local(job, options.num_workers - 1),
              workers.on_ray(job, options.num_ray_workers)):
            job.run()
    except OperError:
        if not job.outcome():
            raise
    except OSError as error:
        full = no_room(error)
        if full is None:
            raise
        raise InvalidInputError(
            fail("cannot preprocess", "file", os.fspath(full.filename or job.work),
                 "room to write it", f"{full.strerror}: free some, then the same command goes on "
                 f"where it stopped (work so far: {job.work})")) from error
    except KeyboardInterrupt:
        _log.warning("interrupted; the same command goes on where it stopped (work so far: %s)",
                     job.work)
        raise
    return _told(job.outcome())


def _told(manifest: dict[str, Any]) -> dict[str, Any]:
    """Warn of what makes a result useless; returns the manifest."""
    for problem in manifest.get("problems", []):
        _log.warning("warning: %s", problem)
    return manifest


def _warn_about_order(paths: Sequence[str]) -> None:
    natural = sorted(paths, key=natural_key)
    if paths == sorted(paths) and paths != natural:
        _log.warning("the files are read in the order given, %s ..., which is not the order of "
                     "their numbers; quote the pattern to have it expanded in that order",
                     ", ".join(os.path.basename(p) for p in paths[:3]))


def _check_target(job: Job) -> None:
    target = job.target
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    is_ours = job.read_manifest().get("kind") == FOLDER_KIND
    if not is_ours or not job.options.force:
        raise _occupied(str(target), is_ours)


@dataclass(slots=True)
class Job:
    """One preprocessing job: the log, and the folder with what has been done of it."""

    recipe: Recipe
    paths: list[str]
    units: list[Unit]
    target: Path
    options: PreprocessOptions
    finished: FinishedVocabulary | None = None
    _began: bool = False
    _is_large: bool = False
    _vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    _first_rows: list[int] = field(default_factory=list)
    _spans: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def work(self) -> Path:
        """The folder of work in progress."""
        return work_folder(self.target)

    def _folder(self) -> WorkFolder:
        return WorkFolder(self.target, self.identity())

    @property
    def stage(self) -> Stage:
        """The units that have been read."""
        return Stage(self.work / "stage", self.recipe, self._is_large)

    @property
    def shares(self) -> tuple[Fraction, Fraction]:
        """Shares of the validation and the test part."""
        found = []
        for name in ("valid", "test"):
            value = getattr(self.options, name)
            found.append(getattr(self.recipe, name) if value is None else parse_share(
                value, "cannot split the log", name))
        if sum(found) >= 1:
            raise InvalidInputError(
                fail("cannot split the log", "valid + test", str(sum(found)), "below 1",
                     "lower the shares"))
        return found[0], found[1]

    @property
    def min_count(self) -> int:
        """Values seen less often share row 0."""
        if self.finished is not None:
            return self.finished.min_count
        return self.options.min_count or self.recipe.min_count

    def identity(self) -> str:
        """A digest of everything that the output depends on."""
        about = [FOLDER_VERSION, asdict(self.recipe), [u.to_json() for u in self.units],
                 [(store.full_name(p), *store.stamp(p)) for p in self.paths],
                 [str(x) for x in self.shares], self.min_count, self.options.max_bad,
                 self.options.max_rows, self.options.hash_rows, self.options.row_group_rows,
                 self.options.part_rows]
        if self.options.compression != "none":
            about.append(self.options.compression)
        if self.finished is not None:
            about.append(self.finished.digest)
        return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:32]

    def read_manifest(self) -> dict[str, Any]:
        """The manifest in the output folder, or an empty one."""
        with contextlib.suppress(OSError, FileFormatError):
            found = read_json(self.target / MANIFEST, "no manifest")
            if isinstance(found, dict):
                return found
        return {}

    def is_there(self) -> bool:
        """Whether this very job was done before, and need not be done anew."""
        return not self.options.force and self.read_manifest().get("job") == self.identity()

    def outcome(self) -> dict[str, Any]:
        """The manifest once this very job, begun by this call, is done; empty before."""
        found = self.read_manifest() if self._began else {}
        return found if found.get("job") == self.identity() else {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the work folder, a new one or that of an interrupted run, inside the block."""
        with self._folder().opened(self.options.force, self._begin):
            self._began, self._is_large = True, is_large(self.paths)
            yield

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Hold the work folder that another process has opened, inside the block."""
        return self._folder().joined()

    def _begin(self, work: Path) -> None:
        self._estimate()
        for name in ("stage", "tasks", *(f"out/{s}" for s in SPLITS), "out/vocabulary",
                     *(["out/unseen"] if self.finished else [])):
            (work / name).mkdir(parents=True)

    def _estimate(self) -> None:
        need = estimate.disk_need(self.recipe, self.units)
        free = shutil.disk_usage(self.target.parent).free
        _log.info("%s", need.text(free))
        if need.total > free and self.options.check_disk:
            raise InvalidInputError(
                fail("cannot preprocess", "free bytes of the disk", free,
                     f"about {need.total} at the peak", "free some, or pass --no-disk-check"))

    def run(self) -> None:
        """Take part in the job until it is done."""
        try:
            self._take_part()
        except FileNotFoundError:  # another process has moved the output and cleared the work
            if not self.outcome():
                raise

    def _take_part(self) -> None:
        tasks = self.work / "tasks"
        if not is_done(tasks, "staged"):
            self._share("reading", {f"read-{k:06d}": self._reader(k)
                                    for k in range(len(self.units))}, self._bytes())
            share({"staged": self._check_staged}, tasks)
        split = self._split()
        if not is_done(tasks, "counted"):
            self._share("counting", {f"count-{k:03d}": self._counter(k, split) for k in range(
                len(self.recipe.names("sparse")))}, [])
            share({"counted": lambda: None}, tasks)
        if split.by == "rows":
            # What has been written is removed at once, but after it is marked as done.
            self._share("writing", {f"write-{k:06d}": self._unit_writer(k, split)
                                    for k in range(len(self.units))}, self._bytes(),
                        lambda name: self.stage.drop(int(name.removeprefix("write-"))))
        else:
            self._share("writing", {f"write-{k:06d}": self._span_writer(k, split)
                                    for k in range(len(self._spans))},
                        [rows for _, _, rows in self._spans])
        share({"finished": lambda: self._finish(split)}, tasks)

    def _share(self, title: str, tasks: dict[str, Any], sizes: list[int],
               done: Callable[[str], object] = lambda name: None) -> None:
        """Have tasks done; `sizes` of them, in bytes or rows, for the progress bar."""
        unit = "" if sizes else " columns"
        sizes = sizes or [1] * len(tasks)
        weight = dict(zip(tasks, sizes, strict=True))
        with tqdm(total=sum(sizes), desc=title, unit=unit, unit_scale=True,
                  disable=not self.options.show_progress) as bar:
            def tell(name: str) -> None:
                bar.update(weight[name])
                done(name)

            share(tasks, self.work / "tasks", tell)

    def _bytes(self) -> list[int]:
        """Bytes of every unit in its file, about."""
        sizes = {p: store.size(p) for p in self.paths}
        return [max(1, (u.stop or sizes[u.path]) - u.start)
                if self.recipe.layout(u.layout).format in ("text", "jsonl", "bags")
                else max(1, sizes[u.path]) for u in self.units]

    def _reader(self, k: int) -> Any:
        return lambda: self.stage.write(k, self.units[k], self.options.max_bad)

    def _check_staged(self) -> None:
        records = [self.stage.record(k) for k in range(len(self.units))]
        num_bad = sum(r["bad"] for r in records)
        if num_bad > self.options.max_bad:
            too_many_bad(num_bad, self.options.max_bad,
                         [b for r in records for b in r["first"]][:3])
        if not sum(r["rows"] + r["bad"] for r in records):
            raise InvalidInputError(
                fail("cannot preprocess", "inputs", self.paths, "at least one row",
                     "the files are empty, pass others"))
        if not sum(r["rows"] for r in records):
            raise self._no_training_row()

    @staticmethod
    def _no_training_row() -> InvalidInputError:
        return InvalidInputError(
            fail("cannot preprocess", "training rows", 0, "at least one well-formed row",
                 "lower the other shares or pass a longer log"))

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

    def _counter(self, column: int, split: Split) -> Any:
        return lambda: self._count(column, split)

    def _count(self, column: int, split: Split) -> None:
        """Merge the counts of one column's values in the training part into its vocabulary.

        With a finished vocabulary these are the counts of the values that it lacks.
        """
        name = self.recipe.names("sparse")[column]
        folder = self.work / "vocabulary" / f"{column:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        known = self.finished.unpack(name, folder) if self.finished else None
        merger, num_missing, num_train = RunMerger(folder), 0, 0
        for found, num_accesses in self._train_counts(column, split):
            values, counts = found.values, found.counts
            if known is not None:
                values, counts = unseen_values(known, values, counts)
            merger.add(values, counts)
            num_missing += found.num_missing
            num_train += num_accesses
        if not num_train:
            raise self._no_training_row()
        target = self.work / "out" / "vocabulary" / f"{name}.parquet"
        if self.finished is not None and known is not None:
            shutil.copyfile(self.finished.file(name), target)
            unseen = self.work / "out" / "unseen" / f"{name}.parquet"
            has_missing = known.facts.missing_id or known.facts.hashed
            num_values, num = write_unseen(unseen, merger, 0 if has_missing else num_missing)
            self.stage.note(f"unseen-{column:03d}.json", {
                "values": num_values, "accesses": num, "share": num / num_train})
        elif self.options.hash_rows is not None:
            build_hashed(folder, merger, num_missing, self.options.hash_rows)
        else:
            build(folder, merger, num_missing, self.min_count, self.options.max_rows)
        merger.close()
        if known is None:
            Vocabulary(folder).write_parquet(target)

    def _train_counts(self, column: int, split: Split) -> Iterator[tuple[Distinct, int]]:
        """The values of a column in the training part of every chunk, and how many there are."""
        stage = self.stage
        for k, first_row in enumerate(self._first_rows[:-1]):
            for chunk, about in enumerate(stage.record(k)["chunks"]):
                recount = train_codes(stage, split, (k, chunk, first_row), about, column)
                found = stage.distinct(k, chunk, about, column)
                if recount is not None:
                    values, counts = found.values, recount[1:]
                    found = Distinct(values[:counts.size][counts > 0], counts[counts > 0],
                                     int(recount[0]))
                yield found, int(found.counts.sum()) + found.num_missing

    def vocabulary(self, name: str) -> Vocabulary:
        """The vocabulary of a column, once counted."""
        if name not in self._vocabularies:
            number = self.recipe.names("sparse").index(name)
            self._vocabularies[name] = Vocabulary(self.work / "vocabulary" / f"{number:03d}")
        return self._vocabularies[name]

    def _unit_writer(self, k: int, split: Split) -> Any:
        return lambda: self._write(k, lambda: self._writing(split).write_unit(
            k, self._first_rows[k]))

    def _span_writer(self, k: int, split: Split) -> Any:
        return lambda: self._write(k, lambda: self._writing(split).write_span(
            k, len(self.units), *self._spans[k][:2]))

    def _writing(self, split: Split) -> Writer:
        return Writer(self.stage, self.recipe, split, self.vocabulary, self.work / "out",
                      WriteOptions(self.options.row_group_rows, self.options.part_rows,
                                   self._is_large, self.options.compression))

    def _write(self, k: int, write: Callable[[], dict[str, int]]) -> None:
        self.stage.note(f"{k:06d}.rows.json", write())

    def _finish(self, split: Split) -> None:
        manifest = self.manifest(split)
        write_text(self.work / "out" / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        _check_target(self)
        old = self.work / "replaced"
        if self.target.exists():
            os.rename(self.target, old)
        os.rename(self.work / "out", self.target)
        self._folder().remove()

    def manifest(self, split: Split) -> dict[str, Any]:
        """Everything that a reader of the folder needs to know."""
        from oper.data.manifest import describe_job

        records = [self.stage.record(k) for k in range(len(self.units))]
        rows = dict.fromkeys(SPLITS, 0)
        for k in range(len(self.units if split.by == "rows" else self._spans)):
            found = json.loads((self.work / "stage" / f"{k:06d}.rows.json").read_text())
            rows = {s: rows[s] + found[s] for s in SPLITS}
        return describe_job(self, split, records, rows)


