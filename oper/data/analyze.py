"""Access statistics of the training part of a preprocessed folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from oper.analysis import CountOptions, KeyCounter, TableCounter
from oper.data.folder import Folder
from oper.data.loading.groups import Column, GroupReader, RowGroups
from oper.errors import FileFormatError
from oper.stats import AccessStats


def analyze_folder(
    path: str | os.PathLike[str],
    *,
    options: CountOptions | None = None,
    show_progress: bool = False,
) -> AccessStats:
    """Count the ids of a preprocessed folder's training part, in total and per time bucket.

    Presence is measured on sampled windows (see `PresenceSampler`), everything else on all ids. For
    raw ids, the statistics have a histogram of counts but no list of hot ids (see `KeyCounter`).

    Args:
        path: a folder that ``oper preprocess`` wrote.
        options: presence windows and memory limits; None = the defaults of `CountOptions`.
        show_progress: show a progress bar on stderr.

    Raises:
        FileFormatError: the folder is not a preprocessed one, a part is damaged, columns or rows
            are missing, or an id is out of range.
        InvalidInputError: `path` is a URL.
    """
    folder = Folder.open(path, allow_raw=True)
    counters = _counters(folder, options or CountOptions())
    groups = RowGroups(folder, "train", (folder.bucket, *folder.sparse),
                       frozenset(folder.multi_hot))
    reader, labels = GroupReader(groups), _labels(folder)
    with tqdm(total=groups.num_rows, desc="counting", unit=" rows", unit_scale=True,
              disable=not show_progress) as bar:
        for group in range(groups.rows.size):
            found = reader.read(group)
            buckets = found[folder.bucket].values
            _check_buckets(groups.place(group)[0], folder, buckets)
            _count(counters, labels, buckets, [found[n] for n in folder.sparse])
            bar.update(buckets.size)
    kind = "synthetic log" if folder.manifest.get("synthetic") else "log"
    name = folder.manifest.get("recipe", {}).get("name", "?")
    return AccessStats(
        groups.num_rows, {n: c.finish() for n, c in zip(folder.sparse, counters, strict=True)},
        f"{kind}, recipe {name}, training part", folder.ids_in_hotness_order,
        numbering=str(folder.manifest.get("numbering", "")))


def _labels(folder: Folder) -> list[str]:
    """Return the labels of the time buckets, which differ between folders of different times or
    logs: statistics of several days keep a bucket for each when they are merged."""
    starts, job = folder.bucket_starts, str(folder.manifest.get("job", ""))
    return [f"{folder.bucket} {start}" for start in starts] or [
        f"{label} of log {job[:8]}" if job else label for label in folder.bucket_labels]


def _check_buckets(part: os.PathLike[str], folder: Folder, buckets: np.ndarray) -> None:
    count = len(folder.bucket_labels)
    if buckets.size and (buckets.dtype.kind != "i" or buckets.min() < 0 or buckets.max() >= count):
        raise FileFormatError(f"cannot read {os.fspath(part)!r}", folder.bucket,
                              f"{buckets.dtype} in {buckets.min()}..{buckets.max()}",
                              f"integers in 0..{count - 1}", "preprocess again")


def _counters(folder: Folder, options: CountOptions) -> Sequence[TableCounter | KeyCounter]:
    if folder.raw_ids:
        return [KeyCounter(options.presence_samples, options.sparse_budget_bytes)
                for _ in folder.sparse]
    return options.counters(folder.sparse, folder.num_rows)


def _count(counters: Sequence[TableCounter | KeyCounter], labels: list[str], buckets: np.ndarray,
           columns: list[Column]) -> None:
    """Count the rows of one row group, split where the time bucket changes."""
    cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), buckets.size]
    for start, stop in itertools.pairwise(cuts):
        if start < stop:
            for counter, column in zip(counters, columns, strict=True):
                counter.add([column.part(start, stop).lookups], labels[buckets[start]])
