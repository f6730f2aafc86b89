"""Counting raw 64-bit keys, of which no table says how many there may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.analysis.counting import LengthCounter, SparseCounter
from oper.analysis.presence import PRESENCE_SAMPLES, Lookups, PresenceSampler
from oper.analysis.sketch import DistinctSample, HeavyHitters, sketched_histogram
from oper.stats import TableStats

_HASH_BITS = 40  # of keys whose presence is measured, beside a number of a sample
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class KeyCounter:
    """Counts the lookups of one column of raw keys, batch by batch, into `TableStats`.

    The statistics have no head, since nobody knows which rows keys will have, and nothing that
    could be merged: a histogram of access counts (exact up to a memory budget, beyond it heavy
    hitters and a sampled tail), bag lengths, presence, and how many keys were new in each time
    bucket. `oper.analysis.capacity` makes of them what a dynamic table needs.
    """

    def __init__(self, presence_samples: Sequence[int] = PRESENCE_SAMPLES,
                 budget_bytes: int = 1 << 28) -> None:
        """Start a counter; distinct keys beyond `budget_bytes` (16 each) go to sketches."""
        self._budget = budget_bytes
        self._counter = SparseCounter()
        self._heavy, self._sample = HeavyHitters(), DistinctSample()
        self._is_exact = True
        self._num_accesses = 0
        self._lengths = LengthCounter()
        self._presence = PresenceSampler(1 << _HASH_BITS, presence_samples)
        self._label: str | None = None
        self._known = 0  # distinct keys up to the end of the last bucket
        self._new: list[int] = []

    def add(self, lookups: Sequence[Lookups], bucket: str | None = None) -> None:
        """Count one batch.

        Args:
            lookups: the bags of keys, int64, of every feature of the table, all of the same
                samples.
            bucket: label of the time bucket; all batches of one come together.
        """
        if bucket != self._label:
            self._end_bucket()
            self._label = bucket
        hashed = []
        for part in lookups:
            self._num_accesses += part.ids.size
            self._counter.add(part.ids)
            self._lengths.add(part)
            # The sampler packs ids beside numbers of samples: the upper bits of a product tell keys
            # apart.
            hashes = part.ids.astype(np.int64).view(np.uint64) * _MULTIPLIER >> np.uint64(
                64 - _HASH_BITS)
            hashed.append(Lookups(hashes.astype(np.int64), part.lengths))
        if hashed:
            self._presence.add(hashed)
        if self._counter.num_bytes > self._budget:
            self._is_exact = False
            self._flush()

    def _flush(self) -> None:
        """Give what was counted to the sketches."""
        keys, counts = self._counter.result()
        self._heavy.add(keys, counts)
        self._sample.add(keys, counts)
        self._counter = SparseCounter()

    def _num_keys(self) -> int:
        """Distinct keys so far; about, where they are sketched."""
        if self._is_exact:
            return self._counter.result()[0].size
        self._flush()
        found = self._sample.result()[0].size
        return found << self._sample.level

    def _end_bucket(self) -> None:
        if self._label is None:
            return
        before, self._known = self._known, max(self._known, self._num_keys())
        self._new.append(self._known - before)

    def finish(self) -> TableStats:
        """The statistics of everything counted; the counter must not be used afterwards."""
        self._end_bucket()
        if self._is_exact:
            found = np.unique(self._counter.result()[1], return_counts=True)
            values, rows = found[0], found[1].astype(np.int64)
        else:
            self._flush()
            values, rows = sketched_histogram(self._heavy, self._sample, self._num_accesses)
        if not values.size:
            values, rows = np.zeros(1, np.int64), np.ones(1, np.int64)
        samples, means, windows = self._presence.result()
        lengths, bags = self._lengths.result()
        return TableStats(
            int(rows.sum()), tail_values=values, tail_num_rows=rows, length_values=lengths,
            length_counts=bags, presence_samples=samples, presence_rows=means,
            presence_windows=windows, new_ids=np.array(self._new, np.int64))
