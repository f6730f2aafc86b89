"""The case ``loader`` of ``oper bench data``: load batches from a preprocessed folder."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.core import child
from oper.bench.core.launch import Progress, Task, run_workers
from oper.bench.core.planning import gather
from oper.bench.data.cases import log_file, to_parquet
from oper.data import Folder, Loader, LoaderOptions
from oper.data.folder import MANIFEST
from oper.train.model import ranks

_BATCH, _WINDOW, _EPOCHS = 8192, 1 << 17, 5
_SHAPE_BYTES, _SHAPE_FILES = 100 * 10**9, 4000  # limits of the large folder's size
_MODULUS = 1_000_003  # for the squares in checksums


def _open(where: list[Any], rank: int, world_size: int, prefetch: int = 0) -> Loader:
    """A rank's loader on one thread; `where` has folder, samples per batch and rows per shuffling
    window."""
    import torch

    torch.set_num_threads(1)
    path, batch_size, window = where
    return Loader(path, "train", LoaderOptions(batch_size, window, seed=5, rank=rank,
                                               world_size=world_size, prefetch=prefetch))


def _epochs(progress: Progress, where: list[Any]) -> dict[str, Any]:
    """Load the folder `where` (see `_open`) repeatedly. Collective.

    Returns ``epochs``: rows/s of all ranks in each epoch but the first, by the larger of wall and
    processor time, and by processor time.
    """
    loader, found = _open(where, *ranks()), []
    for epoch in range(_EPOCHS + 1):
        loader.set_epoch(epoch)
        gather(None)
        begin, cpu = time.perf_counter(), time.process_time()
        rows = sum(batch.labels.numel() for batch in loader)
        every = gather((rows, time.perf_counter() - begin, time.process_time() - cpu))
        found.append((sum(e[0] for e in every) / max(max(e[1:]) for e in every),
                      sum(e[0] / e[2] for e in every)))
    return {"epochs": found[1:]}


def _sums(parts: Iterable[tuple[np.ndarray, Iterable[np.ndarray]]]) -> list[list[int]]:
    """Checksums of samples that do not depend on their order.

    `parts` yields labels and the ids of each of 26 columns. The result's first row has the number
    of samples and each column's sum; the second the sum of labels and each column's sum of squares
    modulo `_MODULUS`.
    """
    found = np.zeros((2, 27), np.int64)
    for labels, columns in parts:
        ids = [x.astype(np.int64) for x in columns]
        found += [[labels.size, *(x.sum() for x in ids)],
                  [int(labels.sum()), *((x * x % _MODULUS).sum() for x in ids)]]
    return found.tolist()


def _sum_files(data: Path) -> list[list[int]]:
    """`_sums` of the training rows in the files."""
    folder = Folder.open(data)
    tables = (folder.read_part(p, (folder.label, *folder.sparse)) for p in folder.parts("train"))
    return _sums((t.column(folder.label).to_numpy(),
                  [t.column(n).to_numpy() for n in folder.sparse]) for t in tables)


def _sum_batches(where: list[Any]) -> list[list[int]]:
    """`_sums` of the samples in three ranks' batches."""
    batches = (batch for rank in range(3) for batch in _open(where, rank, 3))
    return _sums((b.labels.numpy(), b.sparse_features.values().view(26, -1).numpy())
                 for b in batches)


def _first_batch(where: list[Any]) -> float:
    """Time (s) from opening a folder to the first batch of rank 0 of 8."""
    import torchrec.datasets.utils  # noqa: F401  (not timed)

    begin = time.perf_counter()
    next(iter(_open(where, 0, 8, 1)))
    return time.perf_counter() - begin


def _digests(pipe: Any, where: list[Any], state: str, stop: int = 0) -> None:
    """Send digests of rank 1's batches, resuming from the file `state` if it exists. After `stop`
    batches (if not 0), save the state, send True and wait to be killed."""
    loader, found = _open(where, 1, 2, 2), []
    if os.path.exists(state):
        loader.load_state_dict(json.loads(Path(state).read_text()))
    for batch in loader:
        kjt, digest = batch.sparse_features, hashlib.sha256()
        for x in (batch.dense_features, batch.labels, kjt.values(), kjt.lengths()):
            digest.update(x.numpy().data)
        found.append(digest.hexdigest())
        if len(found) == stop:
            Path(state).write_text(json.dumps(loader.state_dict()))
            pipe.send(True)
            time.sleep(600)
    pipe.send(found)


def loader(num_rows: int, folder: Path) -> dict[str, Any]:
    """`Loader` over a Criteo-like folder (26 sparse, 13 dense columns; zstd; in the page cache).

    ``rows_per_s_per_core``: one rank without prefetch threads, best epoch, by the larger of wall
    and processor time. ``ranks_rows_per_s``: one rank per core, starting each epoch together.
    ``first_batch_s``: time from opening a folder of 100 GB, whose files are hard links to one file,
    to the first batch of rank 0 of 8, without imports.
    """
    data, shape, state = folder / "loader", folder / "shape", folder / "loader-state.json"
    child.call(to_parquet, [str(log_file(folder, num_rows))], str(data), {"compression": "zstd"})
    # Smaller batches for a short log, so that it has several shuffling windows.
    size = min(_BATCH, max(1, num_rows // 32))
    where: list[Any] = [str(data), size, min(_WINDOW, 8 * size)]
    cores = len(os.sched_getaffinity(0))
    one, many = (x["epochs"] for n in (1, cores) for x in run_workers(
        [Task("loader", _epochs, (where,))], n))
    exact = _sum_files(data) == child.call(_sum_batches, where)["value"]
    first, num_files, apparent = _first(data, shape, where[1:])
    whole = child.answer(_digests, where, str(state))
    at = len(whole) // 3 + 1
    killed = child.start(_digests, where, str(state), at)
    killed.wait(None)
    killed.close(0)  # by SIGKILL
    resumed = state.exists() and child.answer(_digests, where, str(state)) == whole[at:]
    train = Folder.open(data).rows["train"]
    stored = sum(p.stat().st_size for p in (data / "train").iterdir())
    best = max(one)
    return {"verified": exact and resumed and bool(whole[at:]), "exact_once": exact,
            "exact_resume": resumed, "rows": train, "bytes_per_row": stored / train,
            "batch_size": size, "rows_per_s_per_core": best[0], "rows_per_cpu_s": best[1],
            "ranks": cores, "ranks_rows_per_s": max(many)[0],
            "ranks_rows_per_cpu_s": max(many)[1] / cores,
            "first_batch_s": first, "shape_files": num_files, "shape_gb": apparent / 1e9}


def _first(data: Path, shape: Path, sizes: list[int]) -> tuple[float, int, int]:
    """Time (s) to the first batch of a folder of up to 100 GB, its number of files and bytes."""
    folder = Folder.open(data)
    part = max(folder.parts("train"), key=lambda p: p.stat().st_size)
    about = folder.part_sizes[f"train/{part.name}"]
    count = min(_SHAPE_FILES, -(-_SHAPE_BYTES // about[0]))
    (shape / "train").mkdir(parents=True)
    names = [f"train/part-{k:05d}-000.parquet" for k in range(count)]
    for name in names:
        os.link(part, shape / name)
    manifest = {**folder.manifest, "rows": {"train": about[1] * count, "valid": 0, "test": 0},
                "parts": dict.fromkeys(names, about)}
    (shape / MANIFEST).write_text(json.dumps(manifest))
    seconds = [child.call(_first_batch, [str(shape), *sizes])["value"] for _ in range(3)]
    return float(np.median(seconds)), count, about[0] * count
