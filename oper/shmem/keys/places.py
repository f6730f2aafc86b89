"""The assignment of keys to slots of a directory; equals csrc/host/keys/directory.h."""

from __future__ import annotations

import numpy as np

from oper.tables import KEY_BUCKET_ROWS

_BUCKET_CANDIDATES = 32
_LINES = 8  # lines per bucket; slot k of a bucket belongs to line k % 8
_LOW = np.uint64(0xFFFFFFFF)
BUCKET_BYTES = 9 * KEY_BUCKET_ROWS  # a tag per slot, then a hash per slot


def buckets_of_keys(keys: np.ndarray, num_slots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the buckets, int64 [n], and hashes, uint64 [n], of keys, int64 [n]."""
    x = np.ascontiguousarray(keys).view(np.uint64) ^ np.uint64(seed & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes = x ^ (x >> np.uint64(31))
    # bucket = (hash * n) >> 64 in 128-bit arithmetic; n < 2^32.
    n, half = np.uint64(num_buckets(num_slots)), np.uint64(32)
    buckets = ((hashes >> half) * n + ((hashes & _LOW) * n >> half)) >> half
    return buckets.astype(np.int64), hashes


def slots_of_buckets(buckets: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first slot and the last slot + 1 of buckets, int64 [n] each."""
    size, larger = divmod(num_slots, num_buckets(num_slots))
    begin = buckets * size + np.minimum(buckets, larger)
    return begin, begin + size + (buckets < larger)


def places_of_slots(slots: np.ndarray, num_slots: int
                    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Locate slots, int64 [n], in the memory of a directory's buckets.

    Returns:
        The slots' buckets; where their tags are, in bytes; where their hashes are, in units of 8
        bytes (int64 [n] each); and the hashes that they have while they are free, uint64 [n].
    """
    size, larger = divmod(num_slots, num_buckets(num_slots))
    end = larger * (size + 1)  # end of the larger buckets' slots
    buckets = np.where(slots < end, slots // (size + 1), larger + (slots - end) // size)
    at = slots - slots_of_buckets(buckets, num_slots)[0]
    line = at % _LINES
    words = KEY_BUCKET_ROWS // 8 + line * (KEY_BUCKET_ROWS // _LINES) + at // _LINES
    return (buckets, buckets * BUCKET_BYTES + at, buckets * (BUCKET_BYTES // 8) + words,
            np.where(line == 0, np.uint64(1 << 8), np.uint64(0)))


def empty_buckets(num_slots: int) -> np.ndarray:
    """Return the memory of a directory's buckets without keys, uint8 [num_buckets,
    BUCKET_BYTES]."""
    words = np.zeros((num_buckets(num_slots), BUCKET_BYTES // 8), np.uint64)
    first = KEY_BUCKET_ROWS // 8
    words[:, first:first + KEY_BUCKET_ROWS // _LINES] = 1 << 8  # line 0
    return words.view(np.uint8)


def slots_of_keys(keys: np.ndarray, counts: np.ndarray, num_slots: int, seed: int) -> np.ndarray:
    """Assign slots in an empty directory to distinct keys; returns int64 [n], -1 = no slot.

    Within a bucket, keys with the highest `counts` (int64 [n]) get slots, in their home line as
    long as it has free slots, and then anywhere in the bucket.
    """
    buckets, hashes = buckets_of_keys(keys, num_slots, seed)
    found = np.full(keys.size, -1)
    order = np.lexsort((hashes, -counts, buckets))
    begin, end = slots_of_buckets(buckets, num_slots)
    order = order[begin[order] + _rank(buckets[order]) < end[order]]
    lines = (hashes[order] >> np.uint64(8)).astype(np.int64) % _LINES
    by_line = np.argsort(lines, kind="stable")
    by_line = by_line[np.argsort(buckets[order[by_line]], kind="stable")]
    order, lines = order[by_line], lines[by_line]
    slots = begin[order] + lines + _LINES * _rank(buckets[order] * _LINES + lines)
    is_home = slots < end[order]
    found[order[is_home]] = slots[is_home]
    free = np.setdiff1d(np.arange(num_slots), slots[is_home], assume_unique=True)
    rest = order[~is_home]
    found[rest] = free[np.searchsorted(free, begin[rest]) + _rank(buckets[rest])]
    return found


def _rank(groups: np.ndarray) -> np.ndarray:
    """Return, for each entry of ascending `groups`, int64 [n], the number of equal entries before
    it, int64 [n]."""
    return np.arange(groups.size) - np.searchsorted(groups, groups)


def num_candidates(num_slots: int) -> int:
    """Return the capacity of a directory for candidates (keys counted without a row)."""
    return num_buckets(num_slots) * _BUCKET_CANDIDATES


def num_buckets(num_slots: int) -> int:
    """Return the number of buckets of a directory with `num_slots` slots."""
    return -(-num_slots // KEY_BUCKET_ROWS)
