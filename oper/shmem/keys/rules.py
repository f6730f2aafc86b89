"""Settings of dynamic tables: when raw 64-bit keys get rows, and when they lose them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oper.errors import require_fields
from oper.tables import KEY_EVICTIONS

MOST_COUNTED = 255  # occurrences of keys without a row are counted in a byte
_MOST_UPDATES = 1 << 31
_MOST_FLOAT = 3.4028234e38  # largest float32


@dataclass(frozen=True, slots=True)
class DynamicTable:
    """A table whose ids are raw keys, any int64, instead of row numbers.

    The module's ``num_embeddings`` is then the number of rows. Row 0 is the default row of all keys
    that have no row of their own. Keys get and lose rows only in updates of the table (backward
    passes); ages of keys are measured in updates.

    Attributes:
        admit_after: number of occurrences, over all ranks, after which a key gets a row; 1 = at
            once. The table counts keys without a row in half as many entries as it has rows; if
            these are full, the count of the least recently seen key is dropped.
        admit_probability: probability that a key without a row gets one in an update that sees
            it; must be 1 if `admit_after` > 1.
        eviction: which key of a full bucket loses its row to a new key: ``"lru"``, the least
            recently seen; ``"lfu"``, the least frequently seen; or ``"distance_lfu"``, which
            combines both: the key with the lowest count / (clock - last + 1), where `clock` is the
            number of the current update and `last` that of the last one with the key (TorchRec's
            ``DistanceLFU_EvictionPolicy`` with decay exponent 1). A key in the cache line in which
            the new key is looked up first is preferred if fewer than a sixteenth of the bucket's
            keys would be evicted before it. Keys seen in the current update are never evicted.
        half_life: number of updates after which counts are halved, for ``"lfu"`` and
            ``"distance_lfu"``; None = never.
        time_to_live: a key that was not seen for more than this many updates loses its row; None =
            no limit.
        seed: seed of the hash and, together with the table's name, of random admission and of the
            values of new rows.
        init_bound: new rows are uniform in [-init_bound, init_bound); by default
            ``sqrt(1 / num_embeddings)``, as in TorchRec.

    Raises:
        InvalidInputError: a value is out of range, or two values exclude each other.
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
            self, "invalid dynamic table", "correct this setting",
            ("admit_after", _is_count(self.admit_after, MOST_COUNTED),
             f"an integer in [1, {MOST_COUNTED}]"),
            ("admit_probability", _is_number(self.admit_probability)
             and 0 < self.admit_probability <= 1, "a number in (0, 1]"),
            ("admit_probability", self.admit_after == 1 or self.admit_probability == 1,
             "1 if admit_after > 1: use only one of the two"),
            ("eviction", self.eviction in KEY_EVICTIONS, f"one of {KEY_EVICTIONS}"),
            *((name, getattr(self, name) is None or _is_count(getattr(self, name), _MOST_UPDATES),
               f"None or an integer in [1, {_MOST_UPDATES}]")
              for name in ("half_life", "time_to_live")),
            ("half_life", self.half_life is None or self.eviction != "lru",
             "None with eviction='lru', which does not use counts"),
            ("seed", isinstance(self.seed, int) and -1 << 63 <= self.seed < 1 << 63,
             "a signed 64-bit integer"),
            ("init_bound", self.init_bound is None
             or (_is_number(self.init_bound) and 0 <= self.init_bound <= _MOST_FLOAT),
             "None or a finite float32 >= 0"))


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and math.isfinite(value))
