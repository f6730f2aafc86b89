"""Counts of raw 64-bit keys, which unlike ids are not limited by a table's number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.analysis.counting import AdaptiveCounter, LengthCounter
from oper.analysis.presence import PRESENCE_SAMPLES, Lookups, PresenceSampler
from oper.analysis.sketch import sketched_histogram
from oper.stats import TableStats

_HASH_BITS = 40  # bits of hashed keys for presence, which are packed with a sample's index
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class KeyCounter:
    """Counts the lookups of one column of raw keys batch by batch, for `TableStats`.

    The statistics cannot be merged, and have no head, since it is unknown which row a key will get.
    They contain a histogram of access counts (exact up to a memory budget, beyond it from heavy
    hitters and a sampled tail), bag lengths, presence, and the number of new keys in each time
    bucket. `oper.rows.capacity` predicts from them how large a dynamic table must be.
    """

    def __init__(self, presence_samples: Sequence[int] = PRESENCE_SAMPLES,
                 budget_bytes: int = 1 << 28) -> None:
        """Start a count; sketches are used if the distinct keys exceed `budget_bytes` bytes."""
        self._counter = AdaptiveCounter(budget_bytes)
        self._lengths = LengthCounter()
        self._presence = PresenceSampler(1 << _HASH_BITS, presence_samples)
        self._label: str | None = None
        self._known = 0  # number of distinct keys up to the end of the last bucket
        self._new: list[int] = []

    def add(self, lookups: Sequence[Lookups], bucket: str | None = None) -> None:
        """Count one batch.

        Args:
            lookups: the bags of keys (int64) of every feature of the table, with the same samples.
            bucket: label of the time bucket; batches of a bucket must be consecutive.
        """
        if bucket != self._label:
            self._end_bucket()
            self._label = bucket
        hashed = []
        for part in lookups:
            # Keys may be any 64 bits, but counters need numbers >= 0, and the sampler packs keys
            # with samples. So keys are hashed: the upper bits of the product distinguish them.
            hashes = part.ids.astype(np.int64).view(np.uint64) * _MULTIPLIER
            self._counter.add((hashes >> np.uint64(1)).view(np.int64))
            self._lengths.add(part)
            hashed.append(Lookups((hashes >> np.uint64(64 - _HASH_BITS)).view(np.int64),
                                  part.lengths))
        if hashed:
            self._presence.add(hashed)

    def _end_bucket(self) -> None:
        if self._label is None:
            return
        before, self._known = self._known, max(self._known, self._counter.num_ids)
        self._new.append(self._known - before)

    def finish(self) -> TableStats:
        """Return the statistics of all batches; the counter must not be used afterwards."""
        self._end_bucket()
        counter = self._counter
        _, counts = counter.result()
        if counter.is_exact:
            found = np.unique(counts, return_counts=True)
            values, rows = found[0], found[1].astype(np.int64)
        else:
            values, rows = sketched_histogram(counter.heavy, counter.sample, counter.num_accesses)
        if not values.size:
            values, rows = np.zeros(1, np.int64), np.ones(1, np.int64)
        samples, means, windows = self._presence.result()
        lengths, bags = self._lengths.result()
        return TableStats(
            int(rows.sum()), tail_values=values, tail_num_rows=rows, length_values=lengths,
            length_counts=bags, presence_samples=samples, presence_rows=means,
            presence_windows=windows, new_ids=np.array(self._new, np.int64))
