"""Counting raw 64-bit keys, whose number no table size limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.analysis.counting import AdaptiveCounter, LengthCounter
from oper.analysis.presence import PRESENCE_SAMPLES, Lookups, PresenceSampler
from oper.analysis.sketch import sketched_histogram
from oper.stats import TableStats

_HASH_BITS = 40  # of keys whose presence is measured; packed with the number of a sample
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class KeyCounter:
    """Counts the lookups of one column of raw keys, batch by batch, into `TableStats`.

    The statistics have no head, since it is unknown which row a key will get, and cannot be merged.
    They hold a histogram of access counts (exact up to a memory budget, beyond it heavy hitters and
    a sampled tail), bag lengths, presence, and how many keys were new in each time bucket.
    `oper.analysis.capacity` predicts from them how large a dynamic table must be.
    """

    def __init__(self, presence_samples: Sequence[int] = PRESENCE_SAMPLES,
                 budget_bytes: int = 1 << 28) -> None:
        """Start a counter; more distinct keys than fit into `budget_bytes` go to sketches."""
        self._counter = AdaptiveCounter(budget_bytes)
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
            # Keys may be any 64 bits; counters take numbers that are not negative, and the sampler
            # packs them with the numbers of samples. The upper bits of a product distinguish keys.
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
        """The statistics of all batches; the counter must not be used afterwards."""
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
