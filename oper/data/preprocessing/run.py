"""From a raw log to Parquet with ids in hotness order.

Three phases, each made of tasks that any number of processes share: read every unit (a part of a
file) once into codes on disk, merge the value counts of the training part column by column into
vocabularies, write every unit with ids. Memory is bounded whatever the size of the log. Work in
progress is kept in a folder next to the output, so an interrupted run continues where it stopped,
and the output does not depend on the number of processes or interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.data.folder import FOLDER_KIND, MANIFEST
from oper.data.preprocessing import workers
from oper.data.preprocessing.job import Job, occupied
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.workfolder import WorkFolder
from oper.data.reading import store
from oper.data.reading.detect import find_inputs, plan_units
from oper.data.reading.lines import natural_key
from oper.data.reading.probing import check_first_rows
from oper.data.recipe import Recipe
from oper.data.vocabulary.finished import (
    FinishedVocabulary,
    check_columns,
)
from oper.errors import InvalidInputError, OperError
from oper.support.files import no_room
from oper.support.locks import alone, used

_log = logging.getLogger(__name__)


def preprocess(
    recipe: Recipe,
    inputs: store.Inputs,
    output: str | os.PathLike[str],
    options: PreprocessOptions | None = None,
) -> dict[str, Any]:
    """Preprocess a log into the folder `output`; returns its manifest.

    The manifest's `problems` list reasons why the output is useless although nothing failed (an
    empty part, a table with row 0 only, no label, or a label that is also a feature); they are
    logged as warnings.

    The first part of the log is for training, the last parts are for validation and test.
    Vocabularies and their order come from the training part only. `output` appears complete or not
    at all; work in progress is kept in ``.NAME.work`` next to it, which is locked while a process
    works in it. Processes that run the same call at the same time (under torchrun, as an array job,
    ...) share the work; each returns when all of it is done.

    Args:
        recipe: how the log is read.
        inputs: a file (plain, or packed by gzip, zstd or bzip2), folder or pattern, here or in a
            store (``s3://...``), or a pipe (``-``); or several, which are one log in this order.
        output: the folder to write, here or in a store. Output for a store is made in the folder
            for temporary files and uploaded when it is complete, the manifest last. If several
            processes on one machine run the same call, one of them uploads it.
        options: see `PreprocessOptions`.

    Raises:
        InvalidInputError: an input is missing, `output` holds something else or another run is
            writing it, the disk is too small, or no training row is left.
        FileFormatError: more than `max_bad` malformed rows, a damaged file, or another format.
    """
    options = options or PreprocessOptions()
    if not store.is_url(output):
        target = Path(os.path.realpath(output))  # a link stays, and what it names is written
        with store.spooled(inputs, target) as names:
            return _preprocess(recipe, names, target, options)
    url = os.fspath(output)
    folder = _local_folder(url)
    # Another run may write to the same place; it must find its files until it has put them there.
    with used(folder), store.spooled(inputs, folder / "out") as names:
        return _into_store(recipe, names, _Place(url, folder, _manifest_in(url)), options)


def _local_folder(url: str) -> Path:
    """The local folder in which outputs for a URL are made, each in a folder named by its job."""
    name = hashlib.sha256(store.full_name(url).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"oper-{os.getuid()}" / name


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an output in a store.

    Attributes:
        url: URL of the folder.
        local: the temporary folder in which outputs for it are made.
        manifest: manifest of an output that is already there; empty if there is none.
    """

    url: str
    local: Path
    manifest: dict[str, Any]


def _manifest_in(url: str) -> dict[str, Any]:
    """The manifest of the output in a folder of a store, or an empty one; raises InvalidInputError
    if the folder contains something else."""
    plain, mark, query = url.partition("?")
    there, found = f"{plain.rstrip('/')}/{MANIFEST}{mark}{query}", None
    held = store.files_below(url)
    if there in held:
        with store.open_input(there) as file, contextlib.suppress(ValueError):
            found = json.load(file)
    if isinstance(found, dict) and found.get("kind") == FOLDER_KIND:
        return found
    if held:
        raise occupied(store.full_name(url), False)
    return {}


def _into_store(recipe: Recipe, inputs: Sequence[str], place: _Place, options: PreprocessOptions
                ) -> dict[str, Any]:
    """Preprocess into a local folder and upload it to a store, the manifest last."""
    url, local = place.url, place.local
    _log.info("the output is made in %s (TMPDIR chooses the disk) and then put into the store",
              local)
    manifest = _preprocess(recipe, inputs, local / "out", options, place)
    if manifest is place.manifest:
        return manifest
    target = local / manifest["job"] / "out"
    # One after another on this machine: two would remove each other's files.
    with alone(local / "upload.lock"), WorkFolder(target, manifest["job"]).alone():
        now = _manifest_in(url)
        if now != place.manifest:  # another run was faster
            if now.get("job") == manifest["job"]:
                return manifest
            if not options.force:
                raise occupied(store.full_name(url), True)
        store.remove_below(url)
        store.upload(target, url, [MANIFEST])
    return manifest


def _preprocess(recipe: Recipe, inputs: Sequence[str], output: Path, options: PreprocessOptions,
                place: _Place | None = None) -> dict[str, Any]:
    """`preprocess` into a local folder, from files that can be read more than once.

    If the output at `place` is already that of this same job, nothing is done and its manifest is
    returned.
    """
    paths = find_inputs(recipe, inputs)
    _check_apart(paths, str(output) if place is None else place.url)
    _warn_about_order(paths)
    units = plan_units(recipe, paths, options.layout, options.unit_bytes, options.num_workers)
    finished = None if options.vocabulary is None else FinishedVocabulary.open(options.vocabulary)
    job = Job(recipe, paths, units, output, options, finished)
    if place:  # jobs with one destination work in separate folders
        job.target = place.local / job.identity() / output.name
    if place and place.manifest and not options.force:
        if place.manifest.get("job") != job.identity():
            raise occupied(store.full_name(place.url), True)
        _log.info("%s is there already, of the same inputs and settings",
                  store.full_name(place.url))
        return _told(place.manifest)
    if job.is_there():
        # A process of the same job that comes late, or the same command again.
        _log.info("%s is there already, of the same inputs and settings", job.target)
        return _told(job.read_manifest())
    job.check_target()
    if job.finished is not None:
        check_columns(job.finished, recipe.sparse)
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
        raise InvalidInputError("cannot preprocess", "file", os.fspath(full.filename or job.work),
                                "enough space to write it",
                                f"{full.strerror}: free some space; the same command then "
                                f"continues where it stopped (work so far: {job.work})") from error
    except KeyboardInterrupt:
        _log.warning("interrupted; the same command continues where it stopped (work so far: %s)",
                     job.work)
        raise
    return _told(job.outcome())


def _told(manifest: dict[str, Any]) -> dict[str, Any]:
    """Log the problems of a result as warnings; returns the manifest."""
    for problem in manifest.get("problems", []):
        _log.warning("warning: %s", problem)
    return manifest


def _check_apart(paths: Sequence[str], output: str) -> None:
    """Raise InvalidInputError for inputs inside the output, which would be read as part of the log
    and, with ``--force``, removed."""
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
