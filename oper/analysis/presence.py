"""Measured presence: the number of distinct rows that a window of consecutive samples touches.

The independence formula `1 - (1 - p)^(nL)` overestimates presence if ids of neighbouring samples
are correlated (sessions, bursts), so presence is also measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.errors import require

PRESENCE_SAMPLES = (512, 2048, 4096, 8192, 16384)
_MAX_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Lookups:
    """The bags of one feature in one batch.

    Attributes:
        ids: integer [L], ids of all bags, concatenated.
        lengths: integer [B], number of ids per bag; None = one id per bag.
    """

    ids: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        """Number of bags, which equals the number of samples."""
        return int(self.ids.size if self.lengths is None else self.lengths.size)


class PresenceSampler:
    """Measures distinct rows per window of n samples of one table, for several n.

    The log is cut into blocks of `max(num_samples)` samples, of which some are measured: at first
    every second one; whenever more than 16 have been measured, every second measurement is dropped
    and the stride doubles. So measured blocks are spread evenly over a log of any length, at most
    half of the ids are sorted, and their share falls as the log grows. In a measured block, every
    complete window of n samples counts.
    """

    def __init__(self, num_rows: int, num_samples: Sequence[int] = PRESENCE_SAMPLES) -> None:
        """Start a sampler for a table of `num_rows` rows; `num_samples` are the window sizes n."""
        sizes = sorted(set(int(n) for n in num_samples))
        require("cannot measure presence", "pass at least one size, all >= 1",
                ("num_samples", list(num_samples), bool(sizes) and sizes[0] >= 1,
                 "at least one window size, all >= 1"))
        self._sizes = sizes
        self._block = sizes[-1]
        self._bits = (self._block - 1).bit_length()
        require("cannot measure presence", "measure smaller windows",
                ("num_samples, num_rows", (sizes[-1], num_rows), num_rows << self._bits <= 1 << 63,
                 "a product of at most 2^63, the range of the keys that are sorted"))
        # Row and sample are packed into one sort key; 32 bits sort about twice as fast as 64.
        small = num_rows << self._bits <= 2**32
        self._dtype: np.dtype[Any] = np.dtype(np.uint32 if small else np.int64)
        self._stride = 2
        self._at = 0
        self._keys: list[np.ndarray] = []
        self._records: list[dict[int, tuple[int, int]]] = []

    def add(self, lookups: Sequence[Lookups]) -> None:
        """Add one batch: the bags of every feature of the table, all with the same samples."""
        num_samples = lookups[0].num_samples
        ends: list[np.ndarray | None] | None = None
        done = 0
        while done < num_samples:
            inside = self._at % self._block
            take = min(num_samples - done, self._block - inside)
            if (self._at // self._block) % self._stride == 0:
                if ends is None:
                    ends = [None if x.lengths is None else np.cumsum(x.lengths) for x in lookups]
                for part, end in zip(lookups, ends, strict=True):
                    self._keep(part, end, done, take, inside)
            done += take
            self._at += take
            if self._at % self._block == 0:
                self._close(self._block)

    def _keep(self, part: Lookups, end: np.ndarray | None, start: int, take: int,
              inside: int) -> None:
        samples = np.arange(inside, inside + take, dtype=self._dtype)
        if part.lengths is None or end is None:
            ids = part.ids[start:start + take]
        else:
            first = int(end[start - 1]) if start else 0
            ids = part.ids[first:int(end[start + take - 1])]
            samples = np.repeat(samples, part.lengths[start:start + take])
        keys = ids.astype(self._dtype)  # always a copy, which may be changed in place
        keys <<= self._bits
        keys |= samples
        self._keys.append(keys)

    def _close(self, num_samples: int) -> None:
        """Measure the windows of the block that ends here, which has `num_samples` samples."""
        if not self._keys:
            return
        keys = np.concatenate(self._keys)
        self._keys = []
        keys.sort()
        rows = keys >> self._bits
        sample = (keys & ((1 << self._bits) - 1)).astype(np.int32)
        # The sample in which the same row was accessed before, -1 for none. An access is the first
        # of its row in a window if and only if the previous one is in an earlier window.
        previous = np.full(sample.size, -1, np.int32)
        np.copyto(previous[1:], sample[:-1], where=rows[1:] == rows[:-1])
        record = {}
        for n in self._sizes:
            windows = num_samples // n
            if windows:
                inside = slice(None) if windows * n == num_samples else sample < windows * n
                s, p = sample[inside], previous[inside]
                record[n] = (int(np.count_nonzero(p // np.int32(n) < s // np.int32(n))), windows)
        self._records.append(record)
        if len(self._records) > _MAX_BLOCKS:
            self._records = self._records[::2]
            self._stride *= 2

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return window sizes int64 [Q], mean distinct rows float64 [Q], number of windows [Q].

        The numbers are those of the log's complete windows, measured or not. The last block of the
        log counts up to its last complete window. Window sizes without a complete window are left
        out.
        """
        blocks, rest = divmod(self._at, self._block)
        self._close(rest)
        sizes, means, counts = [], [], []
        for n in self._sizes:
            pairs = [record[n] for record in self._records if n in record]
            windows = sum(w for _, w in pairs)
            if windows:
                sizes.append(n)
                means.append(sum(rows for rows, _ in pairs) / windows)
                counts.append(blocks * (self._block // n) + rest // n)
        return (np.array(sizes, np.int64), np.array(means, np.float64), np.array(counts, np.int64))
