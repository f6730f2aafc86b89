"""Messages between memory domains: bits per value, and which rank pools rows.

Ranks that share no memory send each other answers to lookups (rows, partial sums) and gradients (of
rows, of bags). A value in such a message takes

* 32 bits: float32, exact;
* 16 bits: bfloat16, rounded to nearest. It has the exponent range of float32, so gradients neither
  underflow nor overflow;
* 8 or 4 bits: an integer code c that stands for ``min + c * step``, where ``step = (max - min) /
  255``, or ``/ 15``, over the values of a row. The row begins with step and min, float32 each; then
  codes fill bytes from the lowest bit on. Answers are rounded to the nearest code; gradients
  stochastically, so that the expectation is the value itself (Alistarh et al., "QSGD", NeurIPS
  2017). 4 bits need an even number of columns: the planner's bound requires that the size of a
  row's columns, without step and min, is proportional to their number. In a row with infinite
  numbers or NaN, which has a step with a minus sign, the three largest codes stand for these.

All other data is sent exactly: slots, weights, sums of squares, changed rows for replicas, and rows
stored in 16 bits or fewer. Within a memory domain nothing is rounded.

A slot (the number of a row at its owner) takes ``slot_bits(num_rows)`` bits in messages of pushed
ids, requested rows and gradients of rows; slots are packed with the lowest bits first. An owner of
only some rows could use fewer bits, but this way an id takes the same bytes under every plan, so
that the cost model, its lower bound and replays are exact. Slots sent with changed rows take 4
bytes.

Host code rounds in csrc/host/exchange/packing.cpp, device code in csrc/device/kernels/exchange.cu;
csrc/common/exchange.h defines the same sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oper.errors import require
from oper.tables import CODE_BITS, TableSpec

BITS = (32, 16, 8, 4)
_CODED_ROW_BYTES = 8  # step and least number
_LEAST_CODED = 3  # fewest columns sent as codes; narrower rows take fewer bytes as float32


def number_bytes(bits: int, width: int) -> int:
    """Return the size in bytes of a row of `width` values in a message of `bits`-bit values."""
    if bits <= 8:
        coded = _CODED_ROW_BYTES + (width * bits + 7) // 8
        return coded if width >= _LEAST_CODED else 4 * width
    return width * bits // 8


def bits_of(dim: int) -> tuple[int, ...]:
    """Return the bits that messages of a table with `dim` columns may have."""
    return BITS[:-1] if dim % 2 else BITS


def slot_bits(num_rows: int) -> int:
    """Return the bits of a slot of a table of `num_rows` rows in a message (in memory: 32 bits)."""
    return min(max(1, (num_rows - 1).bit_length()), 32)


@dataclass(frozen=True, slots=True)
class MessageBits:
    """Bits per number in messages between memory domains: 32, 16, 8 or 4.

    Attributes:
        answers: bits of the numbers of answers to lookups (rows and partial sums).
        gradients: bits of the numbers of gradients (of rows and of bags).
        tables: (name, answers, gradients) of each table that does not use the bits above, sorted by
            name.
    """

    answers: int = 32
    gradients: int = 32
    tables: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        _check("message_bits", (self.answers, self.gradients))
        for name, *pair in self.tables:
            _check(f"message_bits[{name!r}]", pair)

    @staticmethod
    def parse(value: Any) -> MessageBits:
        """Parse a user's value.

        Args:
            value: one number for both fields; a pair (answers, gradients); or a mapping from table
                names to either, where tables that are not named are exact.

        Raises:
            InvalidInputError: the value has another form, or a number is not in `BITS`; the
                message names the table.
        """
        if isinstance(value, MessageBits):
            return value
        if isinstance(value, Mapping):
            return MessageBits.by_table({
                name: _pair(f"message_bits[{name!r}]", bits) for name, bits in value.items()})
        return _pair("message_bits", value)

    @staticmethod
    def by_table(found: Mapping[str, MessageBits]) -> MessageBits:
        """Combine bits given by table name; tables that are not named are exact."""
        names = sorted((name for name, x in found.items() if x != EXACT), key=str)
        return MessageBits(tables=tuple((n, found[n].answers, found[n].gradients) for n in names))

    @staticmethod
    def from_text(text: str) -> MessageBits:
        """Parse a command-line value such as ``8``, ``16,8``, or by table ``user=8;item=16,8``;
        raises as `parse` does."""
        if "=" not in text:
            return MessageBits.parse(_numbers(text))
        parts = [part.rpartition("=")[::2] for part in text.split(";")]
        found = dict(parts)
        require("invalid message_bits", "name each table once",
                ("message_bits", text, len(found) == len(parts), "every table at most once"))
        return MessageBits.parse({name: _numbers(bits) for name, bits in found.items()})

    def to_json(self) -> list[int] | dict[str, list[int]]:
        """Return [answers, gradients], or a dict from table names to such lists if tables differ;
        `parse` accepts both."""
        if not self.tables:
            return [self.answers, self.gradients]
        return {name: [answers, gradients] for name, answers, gradients in self.tables}

    def of(self, table: str) -> MessageBits:
        """Return the bits of one table, as an object whose `tables` is empty."""
        if not self.tables:  # a fast path for the cost model's many calls
            return self
        for name, answers, gradients in self.tables:
            if name == table:
                return MessageBits(answers, gradients)
        return MessageBits(self.answers, self.gradients)

    def only(self, tables: Collection[str]) -> MessageBits:
        """Return these bits with the entries of `tables` only."""
        return replace(self, tables=tuple(x for x in self.tables if x[0] in tables))

    def check_for(self, tables: Iterable[TableSpec]) -> None:
        """Raise InvalidInputError if the bits name a table that is not one of `tables`, or if a
        table of D columns has bits that are not in ``bits_of(D)``."""
        dims = {t.name: t.dim for t in tables}
        unknown = [name for name, *_ in self.tables if name not in dims]
        require("invalid message_bits", "correct the names, or leave these tables out",
                ("unknown tables", unknown[:8], not unknown,
                 f"tables of the model, such as {sorted(dims)[:8]}"))
        for name, dim in dims.items():
            pair = self.of(name)
            require("invalid message_bits", "choose 8, or an even number of columns", (
                f"message_bits[{name!r}]", [pair.answers, pair.gradients],
                {pair.answers, pair.gradients} <= {*bits_of(dim)},
                f"bits per number of answers and gradients, each one of {bits_of(dim)} for a table "
                f"with {dim} columns"))

    def row_bytes(self, table: TableSpec, width: int) -> float:
        """Return the size in bytes of `width` columns of a row in an answer to a lookup."""
        if table.dtype == "float32":
            return number_bytes(self.of(table.name).answers, width)
        return table.row_bytes * width / table.dim


def _pair(name: str, value: Any) -> MessageBits:
    _check(name, value)
    return MessageBits(*value) if isinstance(value, tuple | list) else MessageBits(value, value)


def _check(name: str, value: Any) -> None:
    """Raise InvalidInputError, with `name`, unless `value` is one of `BITS` or a pair of them."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    require("invalid message_bits", "pass for example 8, or (16, 8)", (
        name, value, len(pair) == 2 and all(type(x) is int and x in BITS for x in pair),
        f"one of {BITS} bits per number, or a pair of them: for answers and for gradients"))


def _numbers(text: str) -> Any:
    numbers = [int(x) if x.strip().isdecimal() else x for x in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


EXACT = MessageBits()


def owners_pool(tables: Iterable[TableSpec], trains: bool, num_domains: int) -> bool:
    """Return whether owners pool the rows of pushed tiers; otherwise readers read them directly.

    Owners always pool in training. In inference they pool if the ranks span several memory domains,
    where every lookup is collective anyway, and no table is quantised.

    Args:
        tables: all tables of a collection.
        trains: whether the collection is trained.
        num_domains: number of memory domains of the collection's ranks.
    """
    return trains or (num_domains > 1 and not any(t.dtype in CODE_BITS for t in tables))
