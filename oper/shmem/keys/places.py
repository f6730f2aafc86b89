"""Where keys belong in a directory, as csrc/host/keys/directory.h has it."""

from __future__ import annotations

import numpy as np

from oper.tables import KEY_BUCKET_ROWS

_BUCKET_CANDIDATES = 32
_LOW = np.uint64(0xFFFFFFFF)


def buckets_of_keys(keys: np.ndarray, num_slots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Buckets, int64 [n], and hashes, uint64 [n], of keys, int64 [n]."""
    x = np.ascontiguousarray(keys).view(np.uint64) ^ np.uint64(seed & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes = x ^ (x >> np.uint64(31))
    # The upper half of the product of 128 bits; there are fewer than 2^32 buckets.
    n, half = np.uint64(num_buckets(num_slots)), np.uint64(32)
    buckets = ((hashes >> half) * n + ((hashes & _LOW) * n >> half)) >> half
    return buckets.astype(np.int64), hashes


def slots_of_buckets(buckets: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots [begin, end) of buckets, int64 [n] each."""
    size, larger = divmod(num_slots, num_buckets(num_slots))
    begin = buckets * size + np.minimum(buckets, larger)
    return begin, begin + size + (buckets < larger)


def num_candidates(num_slots: int) -> int:
    """Places of keys that are counted without a row."""
    return num_buckets(num_slots) * _BUCKET_CANDIDATES


def num_buckets(num_slots: int) -> int:
    """Buckets of a directory."""
    return -(-num_slots // KEY_BUCKET_ROWS)
