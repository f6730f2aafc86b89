"""Vocabularies: from raw values to ids in hotness order, counted on the training part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper.analysis import SparseCounter


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Ids of the raw values of one column.

    Id 0 stands for every other value: seen fewer than `min_count` times in the training part, cut
    by a limit on the rows, or never seen. Ids 1, 2, ... go to the other values by count,
    descending, ties by value, ascending; a missing field is a value of its own, before all others.

    Attributes:
        values: uint32 [K], ascending, the values that have an id.
        ids: int32 [K], the id of each.
        missing_id: id of a missing field.
        counts: int64 [num_rows - 1], accesses of ids 1, 2, ... in the training part.
        num_distinct: values (with a missing field as one) seen in the training part.
        num_rare: accesses in the training part of values that share row 0.
        num_once: values seen once there; over all accesses the Good-Turing estimate of the
            probability that the next one is new, which the statistics of ids cannot show.
    """

    values: np.ndarray
    ids: np.ndarray
    missing_id: int
    counts: np.ndarray
    num_distinct: int
    num_rare: int
    num_once: int

    @property
    def num_rows(self) -> int:
        """Rows of the table, with row 0."""
        return int(self.counts.size) + 1

    def lookup(self, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Ids of raw values.

        Args:
            values: uint32 [n].
            missing: bool [n]; the value there does not matter.

        Returns:
            int32 [n], ids in 0..num_rows-1.
        """
        if self.values.size:
            at = np.searchsorted(self.values, values)
            at[at == self.values.size] = 0
            ids = np.where(self.values[at] == values, self.ids[at], np.int32(0))
        else:
            ids = np.zeros(values.size, np.int32)
        ids[missing] = self.missing_id
        return ids

    def write(self, path: Path) -> None:
        """Write value and count of ids 1, 2, ..., one row each; a missing field is null."""
        by_id = np.zeros(self.counts.size, np.uint32)
        by_id[self.ids - 1] = self.values
        is_missing = np.zeros(by_id.size, bool)
        if self.missing_id:
            is_missing[self.missing_id - 1] = True
        table = pa.table({"value": pa.array(by_id, mask=is_missing), "count": self.counts})
        pq.write_table(table, path)


class VocabularyCounter:
    """Counts the raw values of one column in memory proportional to the distinct ones."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._values = SparseCounter(np.uint32)
        self._num_missing = 0

    def add(self, values: np.ndarray, missing: np.ndarray) -> None:
        """Count raw values: uint32 [n] and bool [n]."""
        self._values.add(values[~missing])
        self._num_missing += int(np.count_nonzero(missing))

    def finish(self, min_count: int, max_rows: int | None = None) -> Vocabulary:
        """The vocabulary of everything counted.

        Args:
            min_count: values seen less often get id 0.
            max_rows: at most so many rows, row 0 included: the hottest values keep their ids.
        """
        values, counts = self._values.result()
        # Position 0 is the missing field, position k + 1 the k-th value in ascending order.
        counts = np.concatenate([[self._num_missing], counts]).astype(np.int64)
        order = np.argsort(-counts, kind="stable")
        num_kept = int(np.count_nonzero(counts >= min_count))
        if max_rows is not None:
            num_kept = min(num_kept, max_rows - 1)
        kept = order[:num_kept]
        id_of = np.zeros(counts.size, np.int32)
        id_of[kept] = np.arange(1, num_kept + 1, dtype=np.int32)
        has_id = id_of[1:] > 0
        return Vocabulary(
            values[has_id], id_of[1:][has_id], int(id_of[0]), counts[kept],
            int(np.count_nonzero(counts)), int(counts.sum() - counts[kept].sum()),
            int(np.count_nonzero(counts == 1)))
