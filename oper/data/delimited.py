"""Vectorised parser of delimited logs: many rows at a time, malformed ones found exactly.

Field boundaries of a whole block come from one scan for separators; each column is then decoded
for all rows at once: hexadecimal digits eight at a time inside 64-bit words, decimal numbers digit
by digit across rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oper.data.lines import Block
from oper.data.recipe import Recipe

MAX_EXAMPLES = 20
_MAX_DIGITS = 18  # decimal digits that always fit int64
_LINE_FEED, _RETURN, _MINUS, _ZERO = 10, 13, 45, 48


@dataclass(frozen=True, slots=True)
class BadRow:
    """A malformed row.

    Attributes:
        path: its file.
        line: its line in the file, 1-based.
        column: name of the first malformed column; empty when the number of columns is wrong.
        value: what stands there, shortened to 40 characters.
        expected: what should.
    """

    path: str
    line: int
    column: str
    value: str
    expected: str

    def __str__(self) -> str:
        where = f"{self.path}, row {self.line}"
        return f"{where}, column {self.column or '-'}: {self.value!r}, expected {self.expected}"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The well-formed rows of one block, n of them, and what was wrong with the others.

    Attributes:
        rows: int64 [n], ascending: number among all rows of all files, malformed ones included.
        labels: int8 [n].
        dense: float32 [D, n], transformed.
        sparse: uint32 [C, n], 0 where missing.
        missing: bool [C, n], whether the sparse field is empty.
        num_bad: malformed rows.
        bad: the first of them, at most `MAX_EXAMPLES`, in order of rows.
    """

    rows: np.ndarray
    labels: np.ndarray
    dense: np.ndarray
    sparse: np.ndarray
    missing: np.ndarray
    num_bad: int
    bad: tuple[BadRow, ...]


def parse_block(block: Block, recipe: Recipe) -> Rows:
    """Parse the lines of `block`; malformed rows are left out and reported."""
    fields = _Fields(block, len(recipe.columns), ord(recipe.separator))
    is_bad = np.zeros(fields.lines.size, bool)
    reports = dict(fields.reports)
    num_bad = fields.num_bad
    labels = np.zeros(fields.lines.size, np.int8)
    dense, sparse, missing = [], [], []
    for k, column in enumerate(recipe.columns):
        if column.kind == "skip":
            continue
        starts, lengths = fields.column(k)
        if column.parse == "binary":
            expected = "0 or 1"
            labels = fields.data[starts] - np.uint8(_ZERO)
            ok = (lengths == 1) & (labels <= 1)
            labels = labels.view(np.int8)
        elif column.parse == "hex32":
            expected = "8 digits 0-9a-f or nothing"
            values, ok = _parse_hex(fields.data, starts, lengths)
        else:
            expected = "an integer or nothing"
            values, ok = _parse_int(fields.data, starts, lengths)
            if column.parse == "uint32":
                expected = "an integer from 0 to 4294967295 or nothing"
                ok &= (values >= 0) & (values < 2**32)
        if column.kind == "dense":
            dense.append(_transform(values, column.transform))
        elif column.kind == "sparse":
            sparse.append(values.astype(np.uint32))
            missing.append(lengths == 0)
        if not ok.all():
            found = np.flatnonzero(~ok & ~is_bad)
            is_bad[found] = True
            num_bad += found.size
            # The first rows of each column suffice: the earliest of all columns are among them.
            for row in found[:MAX_EXAMPLES]:
                reports[int(fields.lines[row])] = (column.name, fields.text(k, row), expected)
    keep = slice(None) if not is_bad.any() else ~is_bad
    count = fields.lines.size
    examples = tuple(BadRow(block.path, block.first_line + line, *reports[line])
                     for line in sorted(reports)[:MAX_EXAMPLES])
    return Rows(
        (fields.lines + block.first_row)[keep], labels[keep],
        _stack(dense, count, np.float32)[:, keep], _stack(sparse, count, np.uint32)[:, keep],
        _stack(missing, count, np.bool_)[:, keep], num_bad, examples)


def parse_blocks(blocks: Iterator[Block], recipe: Recipe) -> Iterator[Rows]:
    """Parse block by block."""
    for block in blocks:
        yield parse_block(block, recipe)


def _stack(arrays: list[np.ndarray], count: int, dtype: type[np.generic]) -> np.ndarray:
    return np.stack(arrays) if arrays else np.zeros((0, count), dtype)


class _Fields:
    """Positions of all fields of a block, for the lines that have the right number of them."""

    def __init__(self, block: Block, num_columns: int, separator: int) -> None:
        self.data = data = block.data
        text = data[:block.size]
        ends = np.flatnonzero((text == separator) | (text == _LINE_FEED)).astype(np.int32)
        last = np.flatnonzero(data[ends] == _LINE_FEED)
        starts = np.empty_like(ends)
        starts[:1] = 0
        starts[1:] = ends[:-1] + 1
        # A line may end with CR LF; neither belongs to the last field.
        ends[last] -= (data[ends[last] - 1] == _RETURN) & (ends[last] > starts[last])
        per_line = np.diff(last, prepend=-1)
        wrong = per_line != num_columns
        self.num_bad = int(np.count_nonzero(wrong))
        self.reports: dict[int, tuple[str, str, str]] = {}
        for line in np.flatnonzero(wrong)[:MAX_EXAMPLES]:
            begin = int(starts[last[line] - per_line[line] + 1])
            self.reports[int(line)] = (
                "", _show(data[begin:int(ends[last[line]])]),
                f"{num_columns} columns instead of {per_line[line]}")
        if self.num_bad:
            keep = np.repeat(~wrong, per_line)
            starts, ends = starts[keep], ends[keep]
        self.lines = np.flatnonzero(~wrong)
        self._starts = np.ascontiguousarray(starts.reshape(-1, num_columns).T)
        self._ends = np.ascontiguousarray(ends.reshape(-1, num_columns).T)

    def column(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """First bytes and lengths of the fields of column k, int32 [n] each."""
        return self._starts[k], self._ends[k] - self._starts[k]

    def text(self, k: int, row: int) -> str:
        """Field (k, row), for a message."""
        return _show(self.data[self._starts[k, row]:self._ends[k, row]])


def _show(data: np.ndarray) -> str:
    text = data[:41].tobytes().decode("utf-8", "backslashreplace")
    return text if data.size <= 40 else text[:37] + "..."


def _transform(values: np.ndarray, transform: str) -> np.ndarray:
    if transform == "log1p":
        return np.log1p(np.maximum(values, 0).astype(np.float32))
    return values.astype(np.float32)


def _parse_int(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decimal integers int64 [n] (0 where empty) and whether each field is one or empty."""
    negative = (data[starts] == _MINUS) & (lengths > 0)
    at, digits = starts + negative, lengths - negative
    ok = (lengths == 0) | ((digits >= 1) & (digits <= _MAX_DIGITS))
    values = np.zeros(starts.size, np.int64)
    for k in range(min(int(digits.max(initial=0)), _MAX_DIGITS)):
        inside = digits > k
        digit = data[at + k] - np.uint8(_ZERO)  # wraps below "0"; a block is padded
        ok &= (digit <= 9) | ~inside
        values = np.where(inside, values * 10 + digit, values)
    return np.where(negative, -values, values), ok


_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_ONES = np.uint64(0x0101010101010101)


def _parse_hex(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Eight hexadecimal digits uint64 [n] (0 where empty) and whether each field is that or empty.

    A field is read as one little-endian word of eight characters, all of them decoded at once.
    """
    words = np.ndarray((data.size - 7,), "<u8", data, strides=(1,))
    text = words[starts]
    # "0".."9" are 0x30..0x39, "a".."f" 0x61..0x66: bit 6 tells letters, whose low bits start at 1.
    digits = (text & _NIBBLES) + ((text >> np.uint64(6)) & _ONES) * np.uint64(9)
    letters = ((digits + _ONES * np.uint64(6)) >> np.uint64(4)) & _ONES
    back = digits + _ONES * np.uint64(0x30) + letters * np.uint64(0x27)
    # Only a lower-case digit encodes back to itself, but "g".."o" do as well, as digits above 15.
    valid = (back == text) & ((digits & ~_NIBBLES) == 0) & (lengths == 8)
    pairs = ((digits << np.uint64(4)) | (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    quads = ((pairs << np.uint64(8)) | (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    values = ((quads << np.uint64(16)) | (quads >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    empty = lengths == 0
    return np.where(empty, np.uint64(0), values), valid | empty
