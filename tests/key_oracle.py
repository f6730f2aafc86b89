"""Dynamic tables implemented by their rules in plain dicts; shares no code with the runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from oper.shmem.keys.rules import DynamicTable
from tests.rounding_reference import philox4x32

MASK = (1 << 64) - 1
BUCKET, LINE, CANDIDATES = 64, 8, 32
MOST = (1 << 32) - 1


def hash_of(key: int, seed: int) -> int:
    """Compute SplitMix64's finalizer."""
    x = (key ^ seed) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def draw(seed: int, of: int, number: int, purpose: bytes) -> list[int]:
    """Draw four words of 32 bits."""
    of, seed = of & MASK, seed & MASK
    counter = np.array([of & 0xFFFFFFFF, of >> 32, number, int.from_bytes(purpose, "big")],
                       np.uint32)
    words: list[int] = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).tolist()
    return words


def first_row(key: int, seed: int, dim: int, bound: float) -> np.ndarray:
    """Compute a new row, float32 [dim]."""
    words = [w for block in range(-(-dim // 4)) for w in draw(seed, key, block, b"init")][:dim]
    units = (np.array(words, np.uint32) >> np.uint32(8)).astype(np.float32)
    return (units * np.float32(2.0**-23) - np.float32(1)) * np.float32(bound)


@dataclass
class Entry:
    count: int
    clock: int
    row: int = 0


@dataclass
class Oracle:
    """A dynamic table without rows.

    Attributes:
        slots: number of rows for keys.
        rule: its configuration.
        draws: seed of admission by probability.
        held: the keys that have a row.
        waiting: by bucket, the places for keys that are counted but have no row; None = free.
    """

    slots: int
    rule: DynamicTable
    draws: int = 0
    clock: int = 0
    held: dict[int, Entry] = field(default_factory=dict)
    waiting: dict[int, list[tuple[int, Entry] | None]] = field(default_factory=dict)

    @property
    def buckets(self) -> int:
        return -(-self.slots // BUCKET)

    def bucket_of(self, key: int) -> int:
        return hash_of(key, self.rule.seed) * self.buckets >> 64

    def rows_of(self, bucket: int) -> range:
        size, larger = divmod(self.slots, self.buckets)
        first = 1 + bucket * size + min(bucket, larger)
        return range(first, first + size + (bucket < larger))

    def is_live(self, entry: Entry, clock: int | None = None) -> bool:
        ttl = self.rule.time_to_live
        return ttl is None or (self.clock if clock is None else clock) - entry.clock <= ttl

    def row_of(self, key: int) -> int:
        entry = self.held.get(key)
        return entry.row if entry is not None and self.is_live(entry) else 0

    def now_counts(self, entry: Entry) -> int:
        half = self.rule.half_life
        return entry.count if half is None or self.clock <= entry.clock else (
            entry.count >> min(40, self.clock // half - entry.clock // half))

    def update(self, keys: Iterable[int]) -> dict[int, int]:
        """Update with keys, which may repeat; return the rows of new keys."""
        self.clock += 1
        counted = Counter(keys)
        order = sorted(counted, key=lambda k: hash_of(k, self.rule.seed))
        found: dict[int, int] = {}
        for bucket in dict.fromkeys(map(self.bucket_of, order)):
            mine = [k for k in order if self.bucket_of(k) == bucket]
            fresh: list[tuple[int, int]] = []
            for key in mine:
                entry = self.held.get(key)
                if entry is not None and self.is_live(entry, self.clock - 1):
                    entry.count = min(MOST, self.now_counts(entry) + counted[key])
                    entry.clock = self.clock
                    continue
                self.held.pop(key, None)
                total = self.admitted(bucket, key, counted[key])
                if total:
                    fresh.append((key, total))
            fresh.sort(key=lambda x: (-x[1], hash_of(x[0], self.rule.seed)))
            for key, total in fresh:
                row = self.free_row(bucket, key)
                if row:
                    self.held[key] = Entry(total, self.clock, row)
                    found[key] = row
                    places = self.waiting.get(bucket, [])
                    for k, place in enumerate(places):
                        if place is not None and place[0] == key:
                            places[k] = None
        return found

    def admitted(self, bucket: int, key: int, count: int) -> int:
        rule = self.rule
        if rule.admit_probability < 1:
            low, high, *_ = draw(self.draws, hash_of(key, rule.seed), self.clock, b"admt")
            return count if low + (high << 32) < int(rule.admit_probability * 2.0**64) else 0
        if rule.admit_after == 1:
            return count
        places = self.waiting.setdefault(bucket, [None] * CANDIDATES)
        known = [k for k, place in enumerate(places) if place is not None and place[0] == key]
        if known:
            entry = places[known[0]][1]  # type: ignore[index]
            total = entry.count + count
        else:
            total = count
            if total >= rule.admit_after:
                return total
        at = known[0] if known else min(range(CANDIDATES), key=lambda k: (
            -1 if places[k] is None else places[k][1].clock, k))  # type: ignore[index]
        places[at] = key, Entry(min(total, 255), self.clock)
        return total if total >= rule.admit_after else 0

    def free_row(self, bucket: int, key: int) -> int:
        """Return a row for a new key, which the key that has it loses; 0 = none."""
        rows = self.rows_of(bucket)
        line = (hash_of(key, self.rule.seed) >> 8) % (BUCKET // LINE)
        home = set(rows[line::BUCKET // LINE])
        by_row = {e.row: (k, e) for k, e in self.held.items() if e.row in rows}
        around = sorted(rows, key=lambda r: (r not in home, r))
        free = [r for r in around if r not in by_row]
        if free:
            return free[0]
        over = [r for r in around if not self.is_live(by_row[r][1])]
        idle = [r for r in rows if by_row[r][1].clock != self.clock]
        if not over and not idle:
            return 0

        def score(row: int) -> tuple[float, ...]:
            entry = by_row[row][1]
            count = self.now_counts(entry)
            distance = max(self.clock, entry.clock) - entry.clock + 1
            return {"lru": (entry.clock, count), "lfu": (count, entry.clock),
                    "distance_lfu": (float(np.float32(count) / np.float32(distance)), entry.clock)
                    }[self.rule.eviction]

        if over:
            row = over[0]
        else:
            row = min(idle, key=lambda r: (score(r), r))
            near = min(home & set(idle), key=lambda r: (score(r), r), default=None)
            if near is not None and (
                    sum(score(r) < score(near) for r in idle) < len(rows) // 16):
                row = near
        del self.held[by_row[row][0]]
        return row

    def records(self) -> dict[int, tuple[int, int, int]]:
        """Return row, count and clock by key."""
        return {k: (e.row, e.count, e.clock) for k, e in self.held.items()}
