"""Draw synthetic lookups, count them, and optionally write them to Parquet."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from oper.analysis import CountOptions
from oper.analysis.presence import Lookups
from oper.data.arrays import lists
from oper.data.folder import LOOKUPS
from oper.data.generate.generator import Workload
from oper.errors import InvalidInputError
from oper.stats import AccessStats
from oper.support.files import atomic_write, check_local

_BATCH = 1 << 14


def count_workload(workload: Workload, num_samples: int,
                   folder: str | os.PathLike[str] | None = None, show_progress: bool = False
                   ) -> AccessStats:
    """Draw `num_samples` samples of a workload and count them; its days are the time buckets.

    Args:
        workload: the models from which lookups are drawn.
        num_samples: number of samples, at least 1.
        folder: where to write the lookups too, as ``lookups.parquet`` with a column ``day`` and one
            list column per table; the schema's metadata marks them as synthetic. None = nowhere.
        show_progress: show a progress bar on stderr.

    Raises:
        InvalidInputError: `num_samples` < 1, or `folder` is a URL or already holds lookups.
    """
    if folder is not None:
        check_local(folder)
    path = None if folder is None else Path(folder) / LOOKUPS
    if path is not None and path.exists():
        raise InvalidInputError("cannot write lookups", "path", str(path), "no such file yet",
                                "choose another folder")
    counters = CountOptions().counters([t.name for t in workload.tables],
                                       [t.num_rows for t in workload.tables])
    schema = pa.schema([("day", pa.int8()), *((t.name, pa.list_(pa.int64()))
                                              for t in workload.tables)],
                       {"synthetic": "true", "source": workload.name})
    with (contextlib.ExitStack() as stack,
          tqdm(total=num_samples, desc="drawing", unit=" samples", unit_scale=True,
               disable=not show_progress) as bar):
        writer = None
        if path is not None:
            file = stack.enter_context(atomic_write(path))
            writer = stack.enter_context(pq.ParquetWriter(file, schema, compression="lz4",
                                                          use_dictionary=False))
        for day, batch in workload.batches(num_samples, _BATCH):
            for counter, found in zip(counters, batch.values(), strict=True):
                counter.add([found], f"day {day}")
            size = next(iter(batch.values())).num_samples
            if writer is not None:
                columns = [pa.array(np.full(size, day, np.int8)), *map(_lists, batch.values())]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            bar.update(size)
    return AccessStats(num_samples, {t.name: c.finish() for t, c in zip(
        workload.tables, counters, strict=True)}, workload.name)


def _lists(lookups: Lookups) -> pa.Array:
    return lists(np.ones(lookups.ids.size, np.int64) if lookups.lengths is None
                 else lookups.lengths, lookups.ids.astype(np.int64))
