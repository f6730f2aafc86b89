"""Fast path for unquoted text with numeric fields, parsed into columns by the compiled library.

The library parses lines that are certainly well-formed. `parse_block`, which handles every valid
form and every error, parses the other (irregular) lines; rows of both are merged in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from oper.data.reading import columns as convert
from oper.data.reading.columns import MalformedError
from oper.data.reading.lines import Block, Progress, Unit, read_lines
from oper.data.reading.rows import MAX_EXAMPLES, Rows, concat, in_order, piece_rows
from oper.data.reading.text import TextLayout, parse_block, separator_of
from oper.data.recipe import Column
from oper.support import native

_SKIP, _BIT, _INTEGER, _DECIMAL, _HEX32, _WHOLE, _NUMBER = range(7)
_ALL = (-(10**18), 10**18)
_SECONDS = convert.TOP_SECONDS - 1
# By (kind, parse) of a column: the library's parser, bounds of integers, dtype that the library
# writes, Arrow type of ids. A line with an integer out of bounds is irregular.
_PARSES: dict[tuple[str, str], tuple[int, tuple[int, int], Any, Any]] = {
    ("skip", ""): (_SKIP, _ALL, None, None),
    ("label", "binary"): (_BIT, _ALL, np.int8, None),
    ("label", "threshold"): (_DECIMAL, _ALL, np.float64, None),
    ("label", "number"): (_DECIMAL, _ALL, np.float64, None),
    ("dense", "int"): (_NUMBER, _ALL, np.float32, None),
    ("dense", "float"): (_DECIMAL, _ALL, np.float64, None),
    ("sparse", "hex32"): (_HEX32, _ALL, np.uint32, pa.uint32()),
    ("sparse", "uint32"): (_INTEGER, (0, 2**32 - 1), np.int64, pa.int64()),
    ("sparse", "uint64"): (_INTEGER, (0, 10**18), np.int64, pa.uint64()),
    ("sparse", "int"): (_INTEGER, _ALL, np.int64, pa.int64()),
    ("sparse", "integral"): (_WHOLE, (1 - 2**53, 2**53 - 1), np.int64, pa.int64()),
    ("time", "unix"): (_INTEGER, (-_SECONDS, _SECONDS), np.int64, None),
    ("time", "unix_ms"): (_INTEGER, (-1000 * _SECONDS, 1000 * _SECONDS), np.int64, None),
    ("time", "yymmddhh"): (_INTEGER, (10**7, 10**8 - 1), np.int64, None),
}
_MANY = 8  # if more than 1/8 of its lines are irregular, `parse_block` parses the entire block


class _Field(ctypes.Structure):
    """``Column`` of csrc/data/data.h."""

    _fields_ = [("parse", ctypes.c_int32), ("required", ctypes.c_int32),
                ("low", ctypes.c_int64), ("high", ctypes.c_int64), ("out", ctypes.c_void_p),
                ("is_there", ctypes.c_void_p), ("missing", ctypes.c_char_p),
                ("missing_size", ctypes.c_int64)]


def is_plain(text: TextLayout) -> bool:
    """Whether the library can parse every column of a layout."""
    layout = text.layout
    return (not layout.quote and len(layout.separator) == 1
            and not text.also and not layout.filter and all(
                (c.kind, c.parse) in _PARSES and not c.multi and len(c.missing) <= 1
                and all(len(m) > 0 and m.isascii() and m.isprintable() for m in c.missing)
                for c in text.columns))


def read_plain(unit: Unit, text: TextLayout, progress: Progress, reuse: bool) -> Iterator[Rows]:
    """Yield the rows of a unit whose layout `is_plain`, in pieces of `piece_rows` lines.

    Args:
        unit: file and range.
        text: layout of the file.
        progress: called with the number of file bytes read since the last call.
        reuse: reuse the memory of a piece, which is then valid only until the next is requested.
    """
    piece = _Piece(unit.path, text, 0)
    for data in read_lines(unit, text.layout, progress):
        at = 0
        while at < len(data):
            at += piece.take(data, at)
            if piece.num_lines == piece.capacity:
                yield piece.finish()
                first = piece.first_line + piece.capacity
                if reuse:
                    piece.begin(first)
                else:
                    piece = _Piece(unit.path, text, first)
    if piece.num_lines:
        yield piece.finish()


class _Piece:
    """Buffers for the columns of one piece, into which lines are parsed until it is full."""

    def __init__(self, path: str, text: TextLayout, first_line: int) -> None:
        self.path, self.text = path, text
        self.capacity = size = piece_rows(text.dense, text.sparse)
        self._outs: dict[str, np.ndarray] = {}
        self._there: dict[str, np.ndarray] = {}
        self._dense = np.empty((len(text.dense), size), np.float32)
        self._numbers = np.empty(size, np.int64)
        self._irregular = np.empty((size, 3), np.int64)
        self._times = np.empty(size, np.int64)
        fields = []
        for column in text.columns:
            parse, (low, high), dtype, _ = _PARSES[column.kind, column.parse]
            token = column.missing[0].encode() if column.missing else None
            field = _Field(parse, column.kind in ("label", "time"), low, high, None, None, token,
                           len(token or b""))
            if dtype is not None:
                out = (self._dense[text.dense.index(column.name)] if dtype == np.float32
                       else np.empty(size, dtype))
                self._outs[column.name], field.out = out, out.ctypes.data
            if column.kind == "sparse":
                there = self._there[column.name] = np.empty(size, bool)
                field.is_there = there.ctypes.data
            fields.append(field)
        self._fields = (_Field * len(fields))(*fields)
        self.begin(first_line)

    def begin(self, first_line: int) -> None:
        """Empty the piece; its first line will be line `first_line` of the unit."""
        self.first_line, self.num_lines, self.num_rows = first_line, 0, 0
        self._others: list[Rows] = []

    def take(self, data: memoryview, at: int) -> int:
        """Parse lines of `data[at:]` until the piece is full; returns the bytes parsed."""
        rows, lines, num = (ctypes.c_int64(x) for x in (self.num_rows, self.num_lines, 0))
        text = np.frombuffer(data, np.uint8)[at:]
        taken: int = native.library().oper_data_parse(
            native.address(text), ctypes.c_int64(text.size),
            ctypes.c_char(separator_of(self.text.layout).encode()), self._fields,
            ctypes.c_int64(len(self._fields)), ctypes.c_int64(self.capacity),
            native.address(self._numbers), native.address(self._irregular), ctypes.byref(rows),
            ctypes.byref(lines), ctypes.byref(num))
        irregular = self._irregular[:num.value]
        if len(irregular) * _MANY > lines.value - self.num_lines or not self._convert_times(
                rows.value):
            block = Block(self.path, bytes(data[at:at + taken]), self.first_line + self.num_lines)
            self._others.append(parse_block(block, self.text))
        else:
            self.num_rows = rows.value
            if len(irregular):
                self._take_irregular(data[at:at + taken], irregular)
        self.num_lines = lines.value
        return taken

    def _take_irregular(self, data: memoryview, lines: np.ndarray) -> None:
        block = Block(self.path, b"".join(data[a:b] for _, a, b in lines.tolist()), 0)
        numbers = lines[:, 0] + self.first_line
        found = parse_block(block, self.text)
        self._others.append(replace(
            found, rows=numbers[found.rows],
            bad=tuple(replace(b, row=int(numbers[b.row])) for b in found.bad)))

    def _convert_times(self, stop: int) -> bool:
        """Convert the times of rows from `num_rows` to `stop`; returns False if one is invalid."""
        for column in self.text.layout.of("time"):
            part = slice(self.num_rows, stop)
            raw = self._outs[column.name][part]
            if column.parse == "yymmddhh":
                try:
                    self._times[part] = convert.hours(column, raw)
                except MalformedError:
                    return False
            else:
                self._times[part] = raw // (1000 if column.parse == "unix_ms" else 1)
        return True

    def finish(self) -> Rows:
        """Return the rows of the piece, with those of irregular lines merged in order."""
        text, count = self.text, self.num_rows
        columns = {c.name: c for c in text.columns if c.kind != "skip"}
        others = self._others
        dense = self._dense[:, :count]
        for numbers, name in zip(dense, text.dense, strict=True):
            numbers[:] = convert.transformed(
                columns[name], self._outs[name][:count].astype(np.float32, copy=False))
        rows = Rows(
            self.num_lines - sum(r.num_lines for r in others),
            self._numbers[:count] + self.first_line, self._labels(count), dense,
            tuple(self._ids(columns[name], count) for name in text.sparse),
            self._times[:count] if text.layout.of("time") else None)
        if not others:
            return rows
        whole = concat([rows, *others])
        whole = in_order(whole, np.argsort(whole.rows, kind="stable"))
        return replace(whole, bad=tuple(sorted(
            (b for r in others for b in r.bad), key=lambda b: b.row))[:MAX_EXAMPLES])

    def _labels(self, count: int) -> np.ndarray:
        for column in self.text.layout.of("label"):
            found = self._outs[column.name][:count]
            return found if column.parse == "binary" else convert.label_of(column, found)
        return np.ones(count, np.int8)

    def _ids(self, column: Column, count: int) -> pa.Array:
        there = self._there[column.name][:count]
        missing = count - int(np.count_nonzero(there))
        valid = pa.py_buffer(np.packbits(there, bitorder="little")) if missing else None
        kind = _PARSES[column.kind, column.parse][3]
        return pa.Array.from_buffers(
            kind, count, [valid, pa.py_buffer(self._outs[column.name])], missing)
