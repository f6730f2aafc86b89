"""Messages between memory domains: bits per number, and which rank pools rows.

Ranks that share no memory answer each other's lookups (rows, partial sums) and return gradients (of
rows, of bags). In a message, a number has

* 32 bits: float32, exact;
* 16: bfloat16, rounded to nearest. It has the range of float32, so no gradient becomes 0 or
  infinite;
* 8: a code, the number of steps above the least number of its row. A row begins with the step,
  1/255 of its range, and its least number, float32 each. Answers are rounded to the nearest code;
  gradients at random, up with a probability equal to the part of the step below, so that the
  expected value is the number itself (Alistarh et al., "QSGD", NeurIPS 2017).

Everything else is exact: slots, weights, squared norms, changed rows sent to replicas, rows that
are stored in 16 bits or fewer, and all that stays within a memory domain.

Slots of ids that owners pool, of rows that are asked for and of rows with gradients take as many
bits as the table's row numbers do (`slot_bits`), side by side, lowest bits first. Fewer would do
for an owner of some of the rows, but this way an id takes the same bytes under every plan, and the
cost model, its bound and replays all have exactly these. Slots of squared norms and of changed rows
have 4 bytes.

Hosts round in csrc/host/exchange/packing.cpp, devices in csrc/device/kernels/exchange.cu; sizes are
those of csrc/common/exchange.h.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from oper.errors import InvalidInputError, require_fields
from oper.tables import CODE_BITS, TableSpec

BITS = (32, 16, 8)
_CODED_ROW_BYTES = 8  # step and least number
_LEAST_CODED = 3  # columns; codes of fewer would take more bytes than float32


def number_bytes(bits: int, width: int) -> int:
    """Bytes of a row of `width` float32 numbers in a message with `bits` bits per number."""
    if bits == 8:
        return _CODED_ROW_BYTES + width if width >= _LEAST_CODED else 4 * width
    return width * bits // 8


def slot_bits(num_rows: int) -> int:
    """Bits of a slot of a table of `num_rows` rows in a message; slots are of 32 bits in memory."""
    return min(max(1, (num_rows - 1).bit_length()), 32)


@dataclass(frozen=True, slots=True)
class MessageBits:
    """Bits per number in messages: 32, 16 or 8.

    Attributes:
        answers: in answers to lookups, which are rows and partial sums.
        gradients: in gradients of rows and of bags.
    """

    answers: int = 32
    gradients: int = 32

    def __post_init__(self) -> None:
        require_fields(self, "invalid bits of messages", "choose 32 (exact), 16 or 8", *(
            (name, type(value) is int and value in BITS, f"one of {BITS}")
            for name, value in (("answers", self.answers), ("gradients", self.gradients))))

    @staticmethod
    def parse(value: Any) -> MessageBits:
        """Parse a user's value: one number for both directions, or (answers, gradients).

        Raises:
            InvalidInputError: the value is neither.
        """
        if isinstance(value, MessageBits):
            return value
        pair = value if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2:
            raise InvalidInputError("invalid bits of messages", "message_bits", value,
                                    "one number, or one for answers and one for gradients",
                                    "pass for example 8, or (16, 8)")
        return MessageBits(*pair)

    @staticmethod
    def from_text(text: str) -> MessageBits:
        """Parse the text of a command line: ``8``, or ``16,8``."""
        numbers = [int(x) if x.strip().isdecimal() else x for x in text.split(",")]
        return MessageBits.parse(numbers if len(numbers) > 1 else numbers[0])

    def to_json(self) -> list[int]:
        """The value as JSON holds it and `parse` reads it."""
        return [self.answers, self.gradients]

    def row_bytes(self, table: TableSpec, width: int) -> float:
        """Bytes of `width` columns of a row of `table` in an answer to a lookup."""
        if table.dtype == "float32":
            return number_bytes(self.answers, width)
        return table.row_bytes * width / table.dim


EXACT = MessageBits()


def owners_pool(tables: Iterable[TableSpec], trains: bool, num_domains: int) -> bool:
    """Whether owners pool the rows of tiers in push mode; otherwise readers read them directly.

    They do in training. In inference they do only if ranks share no memory, where every lookup is
    collective anyway, and no table is quantised.

    Args:
        tables: all tables of a collection.
        trains: whether the collection is trained.
        num_domains: number of memory domains of its ranks.
    """
    return trains or (num_domains > 1 and not any(t.dtype in CODE_BITS for t in tables))
