"""Access statistics of a preprocessed folder's training part."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from oper.analysis import CountOptions, TableCounter
from oper.analysis.presence import Lookups
from oper.data.folder import Folder, reading
from oper.errors import FileFormatError, fail
from oper.stats import AccessStats

_BATCH_ROWS = 1 << 16


def analyze_folder(
    path: str | os.PathLike[str],
    *,
    options: CountOptions | None = None,
    show_progress: bool = False,
) -> AccessStats:
    """Exact access statistics of the training part, with its time buckets.

    Presence is measured on sampled windows (see `PresenceSampler`), everything else on all ids.

    Args:
        path: a folder that preprocessing wrote.
        options: presence windows and memory.
        show_progress: a progress bar on stderr.

    Raises:
        FileFormatError: not a preprocessed folder, a damaged part, missing columns or rows.
        InvalidInputError: an id out of range.
    """
    folder = Folder.open(path)
    options = options or CountOptions()
    dense = options.dense_tables(folder.num_rows)
    counters = [TableCounter(name, rows, d, options.presence_samples,
                             options.sparse_budget_bytes)
                for name, rows, d in zip(folder.sparse, folder.num_rows, dense, strict=True)]
    total = folder.rows["train"]
    num_samples = 0
    with tqdm(total=total, desc="counting", unit=" rows", unit_scale=True,
              disable=not show_progress) as bar:
        for part in folder.parts("train"):
            columns = (folder.bucket, *folder.sparse)
            file = folder.open_part(part, columns)
            batches = file.iter_batches(_BATCH_ROWS, columns=list(columns))
            while True:
                with reading(part):
                    batch = next(batches, None)
                if batch is None:
                    break
                buckets = _integers(part, folder.bucket, batch.column(folder.bucket))
                _check_buckets(part, folder, buckets)
                lookups = [_lookups(part, name, batch.column(name)) for name in folder.sparse]
                _count(counters, folder.bucket_labels, buckets, lookups)
                num_samples += batch.num_rows
                bar.update(batch.num_rows)
    if num_samples != total:
        raise FileFormatError(
            fail(f"cannot analyze {os.fspath(path)!r}", "training rows", num_samples,
                 f"{total} as the manifest says", "parts are missing, preprocess again"))
    kind = "synthetic log" if folder.manifest.get("synthetic") else "log"
    name = folder.manifest.get("recipe", {}).get("name", "?")
    return AccessStats(
        num_samples, {n: c.finish() for n, c in zip(folder.sparse, counters, strict=True)},
        f"{kind}, recipe {name}, training part", folder.ids_in_hotness_order)


def _lookups(part: os.PathLike[str], name: str, column: pa.Array) -> Lookups:
    """Ids of a column, and lengths where it holds bags."""
    if not pa.types.is_list(column.type):
        return Lookups(_integers(part, name, column))
    lengths = pc.list_value_length(column)
    return Lookups(_integers(part, name, column.flatten()), _integers(part, name, lengths))


def _integers(part: os.PathLike[str], name: str, column: object) -> np.ndarray:
    array = column.to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    if array.dtype.kind not in "iu":  # a column with nulls comes as float
        raise FileFormatError(
            fail(f"cannot read {os.fspath(part)!r}", name, array.dtype.name,
                 "integers without nulls", "preprocess again"))
    return np.asarray(array)


def _check_buckets(part: os.PathLike[str], folder: Folder, buckets: np.ndarray) -> None:
    count = len(folder.bucket_labels)
    if buckets.size and (buckets.min() < 0 or buckets.max() >= count):
        raise FileFormatError(
            fail(f"cannot read {os.fspath(part)!r}", folder.bucket,
                 (int(buckets.min()), int(buckets.max())), f"0..{count - 1}", "preprocess again"))


def _count(counters: list[TableCounter], labels: list[str], buckets: np.ndarray,
           lookups: list[Lookups]) -> None:
    """Count one batch, cut where the time bucket changes."""
    cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), buckets.size]
    ends = [None if x.lengths is None else np.concatenate([[0], np.cumsum(x.lengths)])
            for x in lookups]
    for start, stop in itertools.pairwise(cuts):
        if start < stop:
            label = labels[buckets[start]]
            for counter, x, end in zip(counters, lookups, ends, strict=True):
                ids = x.ids[start:stop] if end is None else x.ids[end[start]:end[stop]]
                lengths = None if x.lengths is None else x.lengths[start:stop]
                counter.add([Lookups(ids, lengths)], label)
