"""The case ``loader`` of ``oper bench data``: from a preprocessed folder to KeyedJaggedTensors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.data.cases import command, log_file, run_worker
from oper.data import Folder
from oper.data.folder import MANIFEST

_BATCH, _WINDOW, _EPOCHS = 8192, 1 << 17, 5
_SHAPE_BYTES, _SHAPE_FILES = 100 * 10**9, 4000  # the files of a short log are too small for both
_PREPROCESS = """
from oper.data import PreprocessOptions, load_recipe, preprocess
value = preprocess(load_recipe("criteo-kaggle"), [sys.argv[1]], sys.argv[2],
                   PreprocessOptions(compression="zstd"))["rows"]
"""
_OPEN = """
import hashlib, torch, torchrec
from torchrec.datasets.utils import Batch
from oper.data import Loader, LoaderOptions
torch.set_num_threads(1)
def opened(rank, world_size, prefetch=0):
    return Loader(sys.argv[1], "train", LoaderOptions(
        int(sys.argv[2]), int(sys.argv[3]), seed=5, rank=rank, world_size=world_size,
        prefetch=prefetch))
def digest(batch):
    kjt, state = batch.sparse_features, hashlib.sha256()
    for x in (batch.dense_features, batch.labels, kjt.values(), kjt.lengths()):
        state.update(x.numpy().data)
    return state.hexdigest()
"""
# Epochs one after the other, the first to warm up; each begins when the parent says so.
_EPOCH = _OPEN + """
loader, value = opened(int(sys.argv[4]), int(sys.argv[5])), []
for epoch in range(int(sys.argv[6])):
    loader.set_epoch(epoch)
    print(flush=True)
    sys.stdin.readline()
    at, cpu, rows = time.perf_counter(), time.process_time(), 0
    for batch in loader:
        rows += batch.labels.numel()
    value.append([rows, time.perf_counter() - at, time.process_time() - cpu])
"""
_SUMS = _OPEN + """
value = [[0] * 27 for _ in range(2)]
for rank in range(3):
    for batch in opened(rank, 3):
        value[0][0] += batch.labels.numel()
        value[1][0] += int(batch.labels.sum())
        ids = batch.sparse_features.values().view(26, -1)
        for c, (total, squares) in enumerate(zip(ids.sum(1).tolist(),
                                                 (ids * ids % 1000003).sum(1).tolist())):
            value[0][c + 1] += total
            value[1][c + 1] += squares
"""
_FIRST = _OPEN + """
at = time.perf_counter()
batch = next(iter(opened(0, 8, 1)))
value = [time.perf_counter() - at, batch.labels.numel()]
"""
_DIGESTS = _OPEN + """
import os
loader, state = opened(1, 2, 2), sys.argv[4]
if os.path.exists(state):
    loader.load_state_dict(json.load(open(state)))
value = []
for batch in loader:
    value.append(digest(batch))
    if len(sys.argv) > 5 and len(value) == int(sys.argv[5]):
        json.dump(loader.state_dict(), open(state, "w"))
        print(flush=True)
        time.sleep(600)
"""


def loader(num_rows: int, folder: Path) -> dict[str, Any]:
    """`Loader` over a Criteo-like folder (26 sparse, 13 dense columns; zstd; in the page cache).

    ``rows_per_s_per_core`` is the best of some epochs of one rank without a thread, by the longer
    of its wall and its processor time; ``ranks_rows_per_s`` that of as many ranks as there are
    cores, each epoch begun by all at once. ``first_batch_s`` is from opening a folder of 100 GB,
    whose files are hard links to one, to the first batch of rank 0 of 8; imports do not count.
    """
    data, shape, state = folder / "loader", folder / "shape", folder / "loader-state.json"
    for path in (data, shape):
        shutil.rmtree(path, ignore_errors=True)
    state.unlink(missing_ok=True)
    run_worker(_PREPROCESS, str(log_file(folder, num_rows)), str(data))
    # Windows of half of what there is where there is little: several are needed to tell anything.
    size = min(_BATCH, max(1, num_rows // 32))
    where = [str(data), str(size), str(min(_WINDOW, 8 * size))]
    one = _epochs(where, 1)
    cores = len(os.sched_getaffinity(0))
    many = _epochs(where, cores)
    exact = _sums(data) == run_worker(_SUMS, *where)["value"]
    first, num_files, apparent = _first(data, shape, where[1:])
    whole = run_worker(_DIGESTS, *where, str(state))["value"]
    at = len(whole) // 3 + 1
    with subprocess.Popen(command(_DIGESTS, *where, str(state), str(at)), text=True,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    resumed = state.exists() and run_worker(_DIGESTS, *where, str(state))["value"] == whole[at:]
    train = Folder.open(data).rows["train"]
    stored = sum(p.stat().st_size for p in (data / "train").iterdir())
    for path in (data, shape):
        shutil.rmtree(path)
    state.unlink(missing_ok=True)
    best = max(one)
    return {"verified": exact and resumed and bool(whole[at:]), "exact_once": exact,
            "exact_resume": resumed, "rows": train, "bytes_per_row": stored / train,
            "batch_size": size, "rows_per_s_per_core": best[0], "rows_per_cpu_s": best[1],
            "ranks": cores, "ranks_rows_per_s": max(many)[0],
            "ranks_rows_per_cpu_s": max(many)[1] / cores,
            "first_batch_s": first, "shape_files": num_files, "shape_gb": apparent / 1e9}


def _epochs(where: list[str], world_size: int) -> list[tuple[float, float]]:
    """Rows/s of each epoch but the first, by the longer of wall and processor time and by processor
    time alone, of all ranks together."""
    ranks = [subprocess.Popen(
        command(_EPOCH, *where, str(rank), str(world_size), str(_EPOCHS + 1)), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(world_size)]
    for _ in range(_EPOCHS + 1):
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    told = [json.loads(process.communicate()[0])["value"] for process in ranks]
    return [(sum(e[0] for e in epoch) / max(max(e[1:]) for e in epoch),
             sum(e[0] / e[2] for e in epoch)) for epoch in zip(*told, strict=True)][1:]


def _sums(data: Path) -> list[list[int]]:
    """What the ranks' batches should add up to, from the files themselves."""
    folder = Folder.open(data)
    rows, labels, sums, squares = 0, 0, [0] * 26, [0] * 26
    for part in folder.parts("train"):
        table = folder.read_part(part, (folder.label, *folder.sparse))
        rows += table.num_rows
        labels += int(table.column(folder.label).to_numpy().sum())
        for c, name in enumerate(folder.sparse):
            ids = table.column(name).to_numpy().astype(np.int64)
            sums[c] += int(ids.sum())
            squares[c] += int((ids * ids % 1000003).sum())
    return [[rows, *sums], [labels, *squares]]


def _first(data: Path, shape: Path, sizes: list[str]) -> tuple[float, int, int]:
    """Seconds to the first batch of a folder of 100 GB, its files and its bytes."""
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
    seconds = [run_worker(_FIRST, str(shape), *sizes)["value"][0] for _ in range(3)]
    return float(np.median(seconds)), count, about[0] * count
