"""Faults of storage: full disks, folders without write permission, changed and damaged files.

All of them run in one process, or in a child process with limits.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oper
from oper.data import (
    Loader,
    LoaderOptions,
    SyntheticLog,
    load_recipe,
    preprocess,
    write_synthetic_log,
)
from oper.errors import OperError
from oper.plan import Plan, uniform_plan
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.train.model import save_state
from tests.faults.injection import Outcome, small_model, small_state, small_step

DAMAGES = ("truncated", "bit flipped", "foreign")
KINDS = ("checkpoint", "plan", "stats", "parquet")
_NOBODY = 65534
_CONTEXT = multiprocessing.get_context("fork")


# ---- files that were damaged ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A file or folder of one kind.

    Attributes:
        path: its path.
        files: its files, which are damaged in turn.
        read: reads all of it and returns the contents, or raises OperError.
        any_valid: whether changed but valid contents are accepted (a plan may be edited by hand).
    """

    path: Path
    files: list[Path]
    read: Callable[[Path], Any]
    any_valid: bool = False


def make_samples(folder: Path) -> dict[str, Sample]:
    """Write one undamaged file of every kind."""
    model = small_model(1, 0)
    for step in range(3):
        small_step(model, step)
    oper.save_checkpoint(folder / "checkpoint", model, extra={"step": 3}, chunk_bytes=2048)
    tables = [TableSpec("a", 50, 8, ("f",)), TableSpec("b", 1000, 4, ("g", "h"))]
    uniform_plan(tables, 2).save(folder / "plan")
    make_stats([40, 900]).save(folder / "stats")
    cardinalities = tuple(5 + 7 * k for k in range(26))
    write_synthetic_log(folder / "log.txt", SyntheticLog(600, 3, cardinalities, effect=1.0))
    preprocess(load_recipe("criteo-kaggle"), [str(folder / "log.txt")], folder / "parquet")
    samples = {
        "checkpoint": Sample(folder / "checkpoint", [], _read_checkpoint),
        "plan": Sample(folder / "plan", [folder / "plan"], Plan.load, any_valid=True),
        "stats": Sample(folder / "stats", [folder / "stats"], _read_stats),
        "parquet": Sample(folder / "parquet", [], _read_parquet)}
    samples["checkpoint"].files.extend(sorted((folder / "checkpoint").iterdir()))
    samples["parquet"].files.extend(sorted((folder / "parquet").rglob("*.parquet")))
    return samples


def make_stats(num_rows: list[int]) -> AccessStats:
    """Make exact statistics of tables with these numbers of rows, every row touched."""
    rng = np.random.default_rng(0)
    return AccessStats(1000, {f"t{k}": TableStats.from_counts(
        n, np.arange(n), rng.integers(1, 1000, n), (np.array([1, 2]), np.array([600, 400])))
        for k, n in enumerate(num_rows)}, "generated", True)


def _read_checkpoint(path: Path) -> Any:
    model = small_model(1, 0)
    extra = oper.load_checkpoint(path, model)
    return extra, {k: v.numpy().tobytes() for k, v in small_state(model).items()}


def _read_stats(path: Path) -> Any:
    stats = AccessStats.load(path)
    return stats.num_samples, stats.source, {
        n: [np.asarray(getattr(t, c)).tobytes() for c in ("head_ids", "head_counts", "tail_values",
                                                          "length_values", "length_counts")]
        for n, t in stats.tables.items()}


def _read_parquet(path: Path) -> Any:
    found = []
    for split in ("train", "valid"):
        for batch in Loader(path, split, LoaderOptions(128, window=0)):
            found.append(tuple(x.numpy().tobytes() for x in (
                batch.labels, batch.dense_features, batch.sparse_features.values())))
    return found


def damage(data: bytes, how: str, rng: random.Random) -> bytes:
    """Return damaged contents of a file."""
    if how == "truncated":
        return data[:rng.randrange(len(data))]
    if how == "foreign":
        return rng.choice((b"", b"PK\x03\x04", b"\x80\x04K\x01.", b'{"kind": "oper-plan"}', b"PAR1",
                           rng.randbytes(len(data)), b"\x89PNG\r\n" + data))
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1:]


def damaged_file(sample: Sample, how: str, rng: random.Random, folder: Path) -> Outcome:
    """Damage one file of a copy of `sample`: reading must name it in an error, or give equal
    contents."""
    outcome = Outcome()
    good = sample.read(sample.path)
    copy = folder / "copy"
    (shutil.copytree if sample.path.is_dir() else shutil.copy)(sample.path, copy)
    victim = rng.choice(sample.files)
    place = copy if victim == sample.path else copy / victim.relative_to(sample.path)
    place.write_bytes(damage(place.read_bytes(), how, rng))
    try:
        found = sample.read(copy)
        if not sample.any_valid and found != good:
            outcome.break_guarantee(f"{place.name} was read with other content")
    except OperError as error:
        named = str(copy) in str(error) or place.name in str(error)
        if not named and not sample.any_valid:  # an error within a plan names its place there
            outcome.break_guarantee(f"the error does not name the file: {error}")
    except Exception as error:
        outcome.break_guarantee(f"{place.name}: {type(error).__name__}: {error}")
    (shutil.rmtree if copy.is_dir() else os.unlink)(copy)
    outcome.leftovers = [str(p) for p in folder.iterdir()]
    return outcome


# ---- folders that take no more -------------------------------------------------------------------

WRITES = ("checkpoint", "plan", "stats", "state")


def _writer(what: str, size: int) -> Callable[[Path], Any]:
    """Return a function that writes about `size` bytes of prepared data to a path."""
    if what == "checkpoint":
        model, extra = small_model(1, 0), {"filling": torch.zeros(size // 4)}
        return lambda path: oper.save_checkpoint(path, model, extra=extra)
    if what == "state":
        return lambda path: save_state(path, {"weight": torch.zeros(size // 4)})
    if what == "plan":
        return uniform_plan([TableSpec(f"t{k}", 50, 8, (f"f{k}",)) for k in range(size // 200)],
                            2).save
    return make_stats([40, max(50, size // 2)]).save


def _in_child(body: Callable[..., str], *args: Any) -> str:
    """Return the result of `body` in a separate process, or the text of its error."""
    with _CONTEXT.Pool(1, torch.set_num_threads, (1,)) as pool:
        try:
            return pool.apply_async(body, args).get(60)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _write_with_limit(what: str, path: Path, limit: int) -> str:
    """Write a file that is larger than the file size limit of the process."""
    write = _writer(what, 8 * limit)  # the limit also applies to shared memory
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return _attempt(write, path)


def _write_without(what: str, path: Path, size: int) -> str:
    return _attempt(_writer(what, size), path)


def _attempt(write: Callable[[Path], Any], path: Path) -> str:
    try:
        write(path)
    except (OperError, OSError) as error:
        return f"refused {error}"
    return "written"


def _judge(answer: str, path: Path, before: dict[str, bytes], words: tuple[str, ...]) -> Outcome:
    outcome = Outcome()
    if not answer.startswith("refused"):
        outcome.break_guarantee(f"the write {answer}")
    elif not any(word in answer for word in words):
        outcome.break_guarantee(f"the error does not say why: {answer}")
    for name, content in before.items():
        if not (path.parent / name).exists() or (path.parent / name).read_bytes() != content:
            outcome.break_guarantee(f"{name} has changed")
    return outcome


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def full_disk(what: str, rng: random.Random, folder: Path, tmpfs: bool) -> Outcome:
    """Overwrite a file on a full disk: the old file must remain, and no other file."""
    place = folder / "disk"
    place.mkdir()
    mounted = tmpfs and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={rng.randint(512, 800)}k", "oper-test", place],
        check=False, capture_output=True).returncode == 0
    try:
        path = place / "file"
        _writer(what, 4000)(path)
        before = _content(place)
        if mounted:
            answer = _in_child(_write_without, what, path, 2 << 20)
        else:
            answer = _in_child(_write_with_limit, what, path, rng.randint(20_000, 60_000))
        outcome = _judge(answer, path, before, ("No space left", "File too large"))
        if str(path) not in answer:
            outcome.break_guarantee(f"the error does not name {path}: {answer}")
        if what == "checkpoint":  # a failed save leaves a partial one, which the next save removes
            _writer(what, 4000)(path)
            if oper.load_checkpoint(path, small_model(1, 0))["filling"].numel() != 1000:
                outcome.break_guarantee("the next checkpoint is not whole")
        outcome.leftovers = [p.name for p in place.iterdir() if p.name != "file"]
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)
    shutil.rmtree(place)
    return outcome


def _write_as_nobody(what: str, path: Path) -> str:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    return _write_without(what, path, 4000)


def read_only_folder(what: str, rng: random.Random, folder: Path) -> Outcome:
    """Write into a folder without permission."""
    place = folder / "closed"
    place.mkdir()
    path = place / ("file" if rng.random() < 0.5 else "below/file")
    _writer(what, 4000)(place / "file")
    before = _content(place)
    os.chmod(place, 0o555)
    folder.chmod(0o755)
    try:
        answer = _in_child(_write_as_nobody, what, path)
    finally:
        os.chmod(place, 0o755)
    outcome = _judge(answer, place / "file", before, ("Permission denied",))
    outcome.leftovers = [p.name for p in place.iterdir() if p.name != "file"]
    shutil.rmtree(place)
    return outcome


def can_mount() -> bool:
    """Whether this process may mount a small file system."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "oper-test", place],
                              check=False, capture_output=True) if shutil.which("mount") else None
        if done is None or done.returncode:
            return False
        subprocess.run(["umount", place], check=True)
    return True
