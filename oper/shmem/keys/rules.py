"""Dynamic tables: how raw 64-bit keys get rows, and lose them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oper.errors import require_fields

EVICTIONS = ("lru", "lfu")
MOST_COUNTED = 255  # occurrences of keys without a row are counted in a byte
_MOST_UPDATES = 1 << 31
_MOST_FLOAT = 3.4028234e38  # of 32 bits


@dataclass(frozen=True, slots=True)
class DynamicTable:
    """A table whose ids are raw keys, any int64, instead of row numbers.

    A module's ``num_embeddings`` is then the number of rows, one of which, row 0, is the default
    row of all keys that have no row of their own. Keys get rows, and lose them, when a backward
    pass updates the table; the clock counts these updates.

    Attributes:
        admit_after: occurrences, over all ranks, after which a key gets a row; 1 = at once. Keys
            without a row are counted in half as many entries as there are rows; if there are more
            such keys, the count of the one not seen for longest is dropped.
        admit_probability: probability that a key without a row gets one in an update that sees
            it; only without `admit_after`.
        eviction: which key of a full bucket loses its row to a new key: ``"lru"``, the one not seen
            for longest, or ``"lfu"``, the one seen least often. A key in the new key's home line is
            preferred if fewer than a sixteenth of the bucket's keys come before it in that order.
            Keys seen in the current update are never evicted.
        half_life: updates after which the counts of ``"lfu"`` are halved; None = never.
        time_to_live: updates; a key not seen for more than this many loses its row. None = for
            ever.
        seed: seed of the hash, of admission by probability and, with the table's name, of new rows.
        init_bound: new rows are uniform in [-init_bound, init_bound); by default
            ``sqrt(1 / num_embeddings)``, as TorchRec's.

    Raises:
        InvalidInputError: a value out of range, or two kinds of admission.
    """

    admit_after: int = 1
    admit_probability: float = 1.0
    eviction: str = "lru"
    half_life: int | None = None
    time_to_live: int | None = None
    seed: int = 0
    init_bound: float | None = None

    def __post_init__(self) -> None:
        require_fields(
            self, "invalid dynamic table", "correct the configuration",
            ("admit_after", _is_count(self.admit_after, MOST_COUNTED),
             f"an integer in [1, {MOST_COUNTED}]"),
            ("admit_probability", _is_number(self.admit_probability)
             and 0 < self.admit_probability <= 1, "a number in (0, 1]"),
            ("admit_probability", self.admit_after == 1 or self.admit_probability == 1,
             "1 where admit_after > 1: use one of the two"),
            ("eviction", self.eviction in EVICTIONS, f"one of {EVICTIONS}"),
            *((name, getattr(self, name) is None or _is_count(getattr(self, name), _MOST_UPDATES),
               f"None or an integer in [1, {_MOST_UPDATES}]")
              for name in ("half_life", "time_to_live")),
            ("half_life", self.half_life is None or self.eviction == "lfu",
             "None with eviction='lru', which does not use counts"),
            ("seed", isinstance(self.seed, int) and -1 << 63 <= self.seed < 1 << 63,
             "an integer of 64 bits"),
            ("init_bound", self.init_bound is None
             or (_is_number(self.init_bound) and 0 <= self.init_bound <= _MOST_FLOAT),
             "None or a finite float32 >= 0"))


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and math.isfinite(value))
