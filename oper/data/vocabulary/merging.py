"""Merge sorted runs of (value, count) in bounded memory, spilling to disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oper.data.arrays import append_batch, as_numpy, read_batch
from oper.errors import InvalidInputError
from oper.support.counts import merge_counts, sum_counts

MEMORY_BYTES = 96 << 20  # maximum size of runs in memory before they are spilled
_SLICE = 1 << 21          # maximum number of entries, approximately, that are merged at once


def slice_entries(value_bytes: int, memory_bytes: int = MEMORY_BYTES) -> int:
    """Return how many entries with values of `value_bytes` bytes are merged at once: about half of
    the bytes that runs in memory may have, so that long strings do not take much more."""
    return max(1, min(_SLICE, memory_bytes // (2 * (value_bytes + 8))))


class RunMerger:
    """Sums the counts of equal values over any number of sorted runs of one column.

    Runs of similar size are merged in memory, so that each entry takes part in a logarithmic number
    of merges. Runs that exceed the memory limit are written to disk as one run, and `slices` merges
    the runs on disk range by range.
    """

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        """Start without runs; those beyond `memory_bytes` are spilled to files in `folder`."""
        self._folder, self._memory = folder, memory_bytes
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._spilled: list[Path] = []
        self._dtype: np.dtype[Any] | None = None

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Add distinct ascending `values` [K] (integers or bytes) and their counts int64 [K].

        Raises InvalidInputError if the values have no common type with earlier ones.
        """
        if not values.size:
            return
        before = self._dtype or values.dtype
        self._dtype = np.promote_types(before, values.dtype)
        # NumPy would promote integers and strings to strings.
        is_mixed = (before.kind == "S") != (values.dtype.kind == "S")
        if is_mixed or self._dtype.kind not in "iuS":
            raise InvalidInputError("cannot merge values of one column", "types",
                                    (before.name, values.dtype.name),
                                    "only signed integers, only unsigned ones, or only strings",
                                    "convert the column to the same type in all files")
        self._runs.append((values, counts))
        while len(self._runs) > 1 and self._runs[-2][0].size <= 2 * self._runs[-1][0].size:
            last = [self._runs.pop(-2), self._runs.pop()]
            self._runs.append(_merged_into_one(last))
        if sum(v.nbytes + c.nbytes for v, c in self._runs) > self._memory:
            self._spill()

    def _spill(self) -> None:
        values, counts = _merged_into_one(self._runs)
        path = self._folder / f"{len(self._spilled)}.run"
        with path.open("wb") as file:
            append_batch(file, {"values": values, "counts": counts})
        self._spilled.append(path)

    def slices(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all distinct values in ascending order with their counts; may be called repeatedly.

        Every piece has the same dtype; strings have the width of the longest one.
        """
        for values, counts in self._slices():
            yield values.astype(self._dtype, copy=False), counts

    def _slices(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self._spilled:
            if len(self._runs) > 1:
                self._runs.append(_merged_into_one(self._runs))
            values, counts = self._runs[0] if self._runs else (np.zeros(0, np.int64),) * 2
            size = slice_entries(values.dtype.itemsize, self._memory)
            for start in range(0, values.size, size):
                yield values[start:start + size], counts[start:start + size]
            return
        if self._runs:
            self._spill()
        yield from self._merged()

    def _merged(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        count = len(self._spilled)
        assert self._dtype is not None
        size = slice_entries(self._dtype.itemsize, self._memory)
        step = max(1, size // (4 * count))

        def load() -> list[list[np.ndarray]]:
            return [[as_numpy(x) for x in read_batch(path).columns] for path in self._spilled]

        # Between two adjacent sampled values, each run has at most `step` entries.
        sampled = np.sort(np.concatenate([v[::step] for v, _ in load()]))
        bounds = sampled[max(1, size // step - count)::max(1, size // step - count)]
        ends = [0] * count
        for k in range(bounds.size + 1):
            runs = load()  # mapped anew, so that pages of earlier slices do not stay resident
            starts, parts = list(ends), []
            for r, (values, counts) in enumerate(runs):
                ends[r] = values.size if k == bounds.size else int(
                    np.searchsorted(values, bounds[k]))
                if ends[r] > starts[r]:
                    part = slice(starts[r], ends[r])
                    parts.append((np.array(values[part]), np.array(counts[part])))
            if parts:
                yield merge_counts(parts)

    def close(self) -> None:
        """Remove the files of spilled runs."""
        for path in self._spilled:
            path.unlink(missing_ok=True)
        self._spilled = []


def _merged_into_one(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Merge runs, and empty the list, so that they take no memory during most of the work."""
    if len(runs) == 1:
        return runs.pop()
    joined = [np.concatenate(arrays) for arrays in zip(*runs, strict=True)]
    runs.clear()
    return sum_counts(joined.pop(0), joined.pop())
