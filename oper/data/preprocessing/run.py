"""`preprocess`: convert a raw log to Parquet with ids in frequency order.

A job has three phases, whose tasks several processes can share:

1. Read each unit (a file or a part of one) once, and stage its rows on disk as codes.
2. Merge the value counts of the training part into one vocabulary per column.
3. Write the staged rows with ids.

Memory does not grow with the log. Work in progress is kept in a folder next to the output, so that
an interrupted run can resume. The output depends neither on interruptions nor on the number of
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from oper.data.folder import FOLDER_KIND, MANIFEST
from oper.data.preprocessing import workers
from oper.data.preprocessing.job import Job, occupied
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.reading import store
from oper.data.reading.detect import find_inputs, plan_units
from oper.data.reading.lines import natural_key
from oper.data.reading.probing import check_first_rows
from oper.data.recipe import Recipe
from oper.data.vocabulary.finished import FinishedVocabulary, check_columns
from oper.errors import InvalidInputError, OperError
from oper.support.files import check_local, disk_full_error
from oper.support.locks import exclusive, shared_temporary

_log = logging.getLogger(__name__)


def preprocess(
    recipe: Recipe,
    inputs: store.Inputs,
    output: str | os.PathLike[str],
    options: PreprocessOptions | None = None,
) -> dict[str, Any]:
    """Preprocess a log into the folder `output`.

    The first part of the log is for training, the last parts are for validation and test.
    Vocabularies and their order come from the training part only. `output` is written atomically;
    work in progress is kept in ``.NAME.work`` next to it, which is locked while in use. Processes
    that run the same call at the same time (under torchrun, as an array job, ...) share the work;
    each returns when all of it is done.

    Args:
        recipe: how the log is read.
        inputs: a file (plain, or compressed by gzip, zstd or bzip2), folder or pattern, local or in
            a store (``s3://...``), or a pipe (``-``); or several, which form one log in this order.
        output: the folder to write, local or in a store. Output for a store is made in a temporary
            folder and uploaded when it is complete, the manifest last. If several processes on one
            machine run the same call, one of them uploads it.
        options: see `PreprocessOptions`; None = the defaults.

    Returns:
        The manifest. Its ``problems`` are reasons why the output is nearly useless although nothing
        failed (an empty part, a table with row 0 only, no label, a feature that leaks the label),
        which are also logged as warnings.

    Raises:
        InvalidInputError: an input is missing, `output` holds something else or another run is
            writing it, the disk is too small, or no training row is left.
        FileFormatError: more than `max_bad` malformed rows, a damaged file, or another format.
    """
    options = options or PreprocessOptions()
    if not store.is_url(output):
        check_local(output)
        target = Path(os.path.realpath(output))  # a symbolic link is kept and its target written
        with store.spooled(inputs, target) as names:
            return _run(_job(recipe, names, str(target), target, options))
    url = os.fspath(output)
    folder = _local_folder(url)
    # Marked as used, so that a run with the same destination does not remove the files.
    with shared_temporary(folder), store.spooled(inputs, folder / "out") as names:
        return _into_store(recipe, names, url, folder, options)


def _local_folder(url: str) -> Path:
    """Return the local folder for outputs to a URL; each job makes its output in a subfolder."""
    name = hashlib.sha256(store.full_name(url).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"oper-{os.getuid()}" / name


def _manifest_in(url: str, own: Collection[str] = ()) -> dict[str, Any]:
    """Read the manifest in a folder of a store; empty if the folder does not exist or has no files.

    Files named in `own` (relative paths) are disregarded without a manifest: an interrupted upload
    left them. Raises InvalidInputError if the folder contains something else.
    """
    there, found = store.inside(url, MANIFEST), None
    held = store.files_below(url)
    if there in held:
        with store.open_input(there) as file, contextlib.suppress(ValueError):
            found = json.load(file)
    if isinstance(found, dict) and found.get("kind") == FOLDER_KIND:
        return found
    if not set(held) <= {store.inside(url, name) for name in own}:
        raise occupied(store.full_name(url), False)
    return {}


def _into_store(recipe: Recipe, inputs: Sequence[str], url: str, folder: Path,
                options: PreprocessOptions) -> dict[str, Any]:
    """Run a job in the local `folder` and upload its output to a store, the manifest last."""
    name = store.full_name(url)
    job = _job(recipe, inputs, url, folder / "out", options)
    # Jobs with one destination work in separate folders.
    job.target = folder / job.identity() / "out"
    # If the output is made already, an earlier run of this job was interrupted while it uploaded.
    own = [str(p.relative_to(job.target)) for p in job.target.rglob("*")]
    found = _manifest_in(url, own)
    if found and not options.force:
        if found.get("job") != job.identity():
            raise occupied(name, True)
        _log.info("%s already exists, with the same inputs and settings", name)
        return _with_warnings(found)
    _log.info("the output is made in %s (set TMPDIR for another disk), then uploaded to the store",
              folder)
    manifest = _run(job)
    # One upload at a time on this machine: each begins by removing all files at the URL.
    with exclusive(folder / "upload.lock"), job.folder.exclusive():
        now = _manifest_in(url, own)
        if now != found:  # another run was faster
            if now.get("job") == manifest["job"]:
                return manifest
            if not options.force:
                raise occupied(name, True)
        store.remove_below(url)
        store.upload(job.target, url, [MANIFEST])
    return manifest


def _job(recipe: Recipe, inputs: Sequence[str], output: str, target: Path,
         options: PreprocessOptions) -> Job:
    """Make the job that preprocesses re-readable `inputs` into the local folder `target`; `output`
    is its final place."""
    paths = find_inputs(recipe, inputs)
    _check_apart(paths, output)
    _warn_about_order(paths)
    units = plan_units(recipe, paths, options.layout, options.unit_bytes, options.num_workers)
    finished = None if options.vocabulary is None else FinishedVocabulary.open(options.vocabulary)
    return Job(recipe, paths, units, target, options, finished)


def _run(job: Job) -> dict[str, Any]:
    """Run a job; returns the existing manifest, without work, if its output is there."""
    options = job.options
    job.folder.clean()
    if job.is_there():
        # Another process has finished this job in the meantime, or the command was repeated.
        _log.info("%s already exists, with the same inputs and settings", job.target)
        return _with_warnings(job.read_manifest())
    job.check_target()
    if job.finished is not None:
        check_columns(job.finished, job.recipe.sparse)
    check_first_rows(job.recipe, job.units, options.max_bad)
    try:
        with (job.opened(), workers.local(job, options.num_workers - 1),
              workers.on_ray(job, options.num_ray_workers)):
            job.run()
    except OperError:
        if not job.outcome():
            raise
    except OSError as error:
        full = disk_full_error(error)
        if full is None:
            raise
        raise InvalidInputError("cannot preprocess", "file", os.fspath(full.filename or job.work),
                                "enough space to write it",
                                f"{full.strerror}: free some space; the same command then "
                                f"continues where it stopped (work so far: {job.work})") from error
    except KeyboardInterrupt:
        _log.warning("interrupted; the same command continues where it stopped (work so far: %s)",
                     job.work)
        raise
    return _with_warnings(job.outcome())


def _with_warnings(manifest: dict[str, Any]) -> dict[str, Any]:
    """Log the problems in `manifest` as warnings; returns it."""
    for problem in manifest.get("problems", []):
        _log.warning("warning: %s", problem)
    return manifest


def _check_apart(paths: Sequence[str], output: str) -> None:
    """Raise InvalidInputError for inputs inside the output, which ``--force`` would remove."""
    folder = store.full_name(output).rstrip("/") + "/"
    inside = [p for p in paths if store.full_name(
        p if store.is_url(p) else os.path.realpath(p)).startswith(folder)]
    if inside:
        raise InvalidInputError("cannot preprocess", "inputs", inside[:3],
                                f"files outside of the output {folder!r}",
                                "write to a folder outside of the log")


def _warn_about_order(paths: Sequence[str]) -> None:
    natural = sorted(paths, key=natural_key)
    if paths == sorted(paths) and paths != natural:
        _log.warning("the files are read in the order given, %s ..., which is not the order of "
                     "their numbers; quote the pattern to have it expanded in that order",
                     ", ".join(os.path.basename(p) for p in paths[:3]))
