"""Settings of dynamic tables: when raw 64-bit keys get rows, and when they lose them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from oper.errors import require_fields
from oper.ranges import PositiveShare, Rule, one_of, rules_of, within
from oper.tables import KEY_EVICTIONS

MOST_COUNTED = 255  # occurrences of keys without a row are counted in a byte
_MOST_FLOAT = 3.4028234e38  # largest float32
_Updates = Annotated[int, within(1, 1 << 31)]
_Bound = Annotated[float, Rule(lambda x: 0 <= x <= _MOST_FLOAT, "None or a finite float32 >= 0")]


@dataclass(frozen=True, slots=True)
class DynamicTable:
    """A table whose ids are raw keys, any int64, instead of row numbers.

    The module's ``num_embeddings`` is then the number of rows. Row 0 is the default row of all keys
    without their own row. Keys get and lose rows only in updates of the table (backward passes);
    ages of keys are measured in updates.

    Attributes:
        admit_after: number of occurrences, over all ranks, after which a key gets a row; 1 =
            immediately. The table counts keys without a row in half as many entries as it has rows;
            if these are full, the count of the least recently seen key is dropped.
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

    admit_after: Annotated[int, within(1, MOST_COUNTED)] = 1
    admit_probability: PositiveShare = 1.0
    eviction: Annotated[str, one_of(*KEY_EVICTIONS)] = "lru"
    half_life: _Updates | None = None
    time_to_live: _Updates | None = None
    seed: Annotated[int, Rule(lambda x: -1 << 63 <= x < 1 << 63, "a signed 64-bit integer")] = 0
    init_bound: _Bound | None = None

    def __post_init__(self) -> None:
        require_fields(
            self, "invalid dynamic table", "correct this setting", *rules_of(self),
            ("admit_probability", self.admit_after == 1 or self.admit_probability == 1,
             "1 if admit_after > 1: use only one of the two"),
            ("half_life", self.half_life is None or self.eviction != "lru",
             "None with eviction='lru', which does not use counts"))
