"""Independent references, which share no code with the runtime: optimizers, rounding, keys."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from oper.shmem.keys.rules import DynamicTable
from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    STATE_PARTS,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

# ---- all optimizers of tables, as formulas in plain torch ----------------------------------------

Tensors = dict[str, torch.Tensor]

EVERY: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.3),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.05, eps=1e-8),
    "rowwise_adagrad_l2": RowWiseAdagrad(lr=0.05, eps=1e-8, weight_decay=0.2),
    "rowwise_adagrad_decoupled": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.5, decoupled=True),
    "adagrad": Adagrad(lr=0.05, eps=1e-3),
    "adam": Adam(lr=0.02),
    "adam_decay": Adam(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.02),
    "partial_rowwise_adam_decay": PartialRowWiseAdam(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
    "adamw": AdamW(lr=0.02, weight_decay=0.1),
    "sgd_decay": SGD(lr=0.3, weight_decay=0.2),
    "momentum_sgd": SGD(lr=0.1, momentum=0.8),
    "momentum_sgd_decay": SGD(lr=0.1, momentum=0.7, weight_decay=0.2),
    "rowwise_adagrad_begun": RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.25),
    "adagrad_begun": Adagrad(lr=0.05, initial_accumulator_value=0.25),
    "sgd_clipped": SGD(lr=0.3, max_gradient=0.02, max_row_norm=0.05),
    "rowwise_adagrad_clipped": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.2, max_gradient=0.02, max_row_norm=0.05),
    # Clipped gradients may cancel out. A large eps keeps Adam from making a full step of the
    # rounding error that remains.
    "adam_clipped": Adam(lr=0.02, eps=1e-3, max_gradient=0.02, max_row_norm=0.05),
    "lars_sgd": LarsSGD(lr=0.2, eta=0.1),
    "lars_sgd_decay": LarsSGD(lr=0.2, momentum=0.6, weight_decay=0.5, eta=0.2),
    "lamb": LAMB(lr=0.02),
    "lamb_decay": LAMB(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.02),
    "partial_rowwise_lamb_decay": PartialRowWiseLAMB(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
}


def first_states(optimizer: Optimizer, weight: torch.Tensor) -> Tensors:
    """Return the state of a table with these weights before the first step, in their dtype."""
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    return {part: torch.full(weight.shape[:1] if per_row else weight.shape, first,
                             dtype=weight.dtype)
            for part, per_row in STATE_PARTS[optimizer.name]}


def update_rows(optimizer: Optimizer, w: torch.Tensor, state: Tensors, g: torch.Tensor, lr: float,
                step: int) -> None:
    """Make one optimizer step of some rows in place: weights `w`, their `state` and gradients `g`.
    """
    row_mean = (g * g).mean(1)
    match optimizer:
        case SGD(momentum=momentum, weight_decay=decay):
            g = g + decay * w
            if momentum:
                state["momentum1"].mul_(momentum).add_(g)
                g = state["momentum1"]
            w -= lr * g
        case LarsSGD(momentum=momentum, weight_decay=decay, eta=eta):
            norm = w.norm(dim=1)
            below = g.norm(dim=1) + decay * norm
            rate = torch.where(below > 0, lr * eta * norm / below, 0)[:, None]
            state["momentum1"].mul_(momentum).add_(rate * (g + decay * w))
            w -= state["momentum1"]
        case RowWiseAdagrad(eps=eps, weight_decay=decay, decoupled=decoupled):
            if decay and not decoupled:
                g = g + decay * w
                row_mean = (g * g).mean(1)
            state["momentum1"] += row_mean
            if decay and decoupled:
                w *= 1 - lr * decay
            w -= lr * g / (state["momentum1"].sqrt() + eps)[:, None]
        case Adagrad(eps=eps):
            state["momentum1"] += g * g
            w -= lr * g / (state["momentum1"].sqrt() + eps)
        case Adam(betas=betas, eps=eps, weight_decay=decay):  # and all that derive from it
            b1, b2 = torch.tensor(betas).tolist()  # fp32 numbers, by definition
            by_row = isinstance(optimizer, PartialRowWiseAdam | PartialRowWiseLAMB)
            m, s = state["momentum1"], state["momentum2"]
            m.copy_(b1 * m + (1 - b1) * g)
            s.copy_(b2 * s + (1 - b2) * (row_mean if by_row else g * g))
            root = (s / (1 - b2**step)).sqrt() + eps
            r = m / (1 - b1**step) / (root[:, None] if by_row else root) + decay * w
            if isinstance(optimizer, LAMB):
                ratio = w.norm(dim=1) / r.norm(dim=1)
                r = r * torch.where(r.norm(dim=1) > 0, ratio, 0)[:, None]
            w -= lr * r


# ---- stochastic rounding of 16-bit rows ----------------------------------------------------------
# The computations of csrc/common/{philox,elements}.h. See
# `oper.shmem.optim.arguments.rounding_key`.

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_TAG = 0x4F504552
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute Philox4x32-10 of counters uint32 [..., 4] under a key of two 32-bit numbers; uint32
    [..., 4]."""
    a, b, c, d = (counter[..., k].astype(np.uint64) for k in range(4))
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) & 0xFFFFFFFF)
                  for k, w in zip(key, (_W0, _W1), strict=True))
        p, q = _M0 * a, _M1 * c
        high_p, high_q = p >> np.uint64(32), q >> np.uint64(32)
        a, b, c, d = high_q ^ b ^ k0, q & _LOW, high_p ^ d ^ k1, p & _LOW
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


def rounding_bits(key: tuple[int, int], step: int, rows: np.ndarray, num_columns: int
                  ) -> np.ndarray:
    """Compute 16 random bits per element, uint32 [R, num_columns], of logical rows int64 [R] at a
    step."""
    blocks = np.arange(-(-num_columns // 8), dtype=np.uint64)
    counter = np.zeros((rows.size, blocks.size, 4), np.uint32)
    counter[..., 0] = rows.astype(np.uint32)[:, None]
    counter[..., 1] = blocks | np.uint64((step >> 32) << 20)
    counter[..., 2] = step & 0xFFFFFFFF
    counter[..., 3] = _TAG
    words = philox4x32(counter, key)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    return halves.reshape(rows.size, -1)[:, :num_columns]


def round_stochastically(values: np.ndarray, bits: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 values with 16 random bits each; return the results as float32.

    Args:
        values: float32.
        bits: uint32 below 2^16, of the same shape.
        dtype: ``"float16"`` or ``"bfloat16"``.
    """
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude, sign = raw & np.uint32(0x7FFFFFFF), raw & np.uint32(0x80000000)
    if dtype == "bfloat16":
        up = (magnitude + bits) & np.uint32(0xFFFF0000)
        finite = np.minimum(up, np.uint32(0x7F7F0000)).view(np.float32)
    else:
        exponent = np.maximum((magnitude >> np.uint32(23)).astype(np.int64) - 127, -14)
        step = np.ldexp(1.0, exponent - 10)  # between neighbouring float16 numbers
        # The number of random bits is the number of bits that rounding drops: 13 of the 24 bits of
        # a normal number; 16 below 2^-14, where float16 is fixed-point.
        small = magnitude < 0x38800000
        places = np.where(small, 16, 13)
        draw = np.where(small, bits, bits >> np.uint32(3)).astype(np.int64)
        with np.errstate(invalid="ignore", over="ignore"):
            whole = np.trunc(np.where(magnitude < 0x7F800000, np.abs(values.astype(np.float64)), 0)
                             / step * 2.0**places).astype(np.int64)
        finite = np.minimum((whole + draw) >> places, 2**40) * step
        finite = np.minimum(finite, 65504.0).astype(np.float32)
    result = np.where(magnitude >= 0x7F800000, magnitude.view(np.float32), finite)
    return (result.astype(np.float32).view(np.uint32) | sign).view(np.float32)


# ---- dynamic tables by their rules, in plain dicts -----------------------------------------------

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
