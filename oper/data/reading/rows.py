"""Rows of a log in columnar form, and descriptions of malformed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from oper.data.reading.columns import MalformedError

MAX_EXAMPLES = 20
PIECE_ROWS = 1 << 19   # maximum number of rows of the log in memory at once
PIECE_BYTES = 1 << 28  # approximate bytes of these rows, which limits logs with many columns


@dataclass(frozen=True, slots=True)
class BadRow:
    """A malformed row.

    Attributes:
        row: index of the row in its unit of work (0-based).
        column: name of the first malformed column; empty if the number of columns is wrong.
        value: value found, shortened to 40 characters.
        expected: description of valid values.
    """

    row: int
    column: str
    value: str
    expected: str


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The n well-formed rows of a piece of a log.

    Attributes:
        num_lines: number of rows of the piece, including malformed ones.
        rows: index of each row in the unit of work, int64 [n], ascending unless reordered.
        labels: int8 [n], 0 or 1; float32 [n] if the recipe's label is a number.
        dense: transformed numbers, float32 [D, n].
        sparse: raw values of each sparse column: integers or binary [n], null where missing, or
            non-null lists of them.
        time: int64 [n], seconds since 1970; None = the log has no time.
        num_bad: number of malformed rows.
        bad: the first malformed rows, at most `MAX_EXAMPLES`.
    """

    num_lines: int
    rows: np.ndarray
    labels: np.ndarray
    dense: np.ndarray
    sparse: tuple[pa.Array, ...]
    time: np.ndarray | None = None
    num_bad: int = 0
    bad: tuple[BadRow, ...] = field(default=())


def piece_rows(dense: Sequence[str], sparse: Sequence[str]) -> int:
    """Return how many rows of a log with these columns are in memory at a time."""
    return max(1, min(PIECE_ROWS, PIECE_BYTES // (8 * (len(dense) + len(sparse) + 4))))


def show(text: bytes) -> str:
    """Format a field for a message, shortened to 40 characters."""
    shown = text[:41].decode("utf-8", "backslashreplace")
    return shown if len(text) <= 40 else shown[:37] + "..."


def concat(parts: Sequence[Rows]) -> Rows:
    """Concatenate one or more pieces with the same columns."""
    if len(parts) == 1:
        return parts[0]
    times = [p.time for p in parts if p.time is not None]
    sparse = []
    for same in zip(*(p.sparse for p in parts), strict=True):
        if len({ids.type for ids in same}) > 1:
            wide = pa.list_(pa.int64()) if pa.types.is_list(same[0].type) else pa.int64()
            same = tuple(ids.cast(wide) for ids in same)
        sparse.append(pa.concat_arrays(same))
    return Rows(
        sum(p.num_lines for p in parts), np.concatenate([p.rows for p in parts]),
        np.concatenate([p.labels for p in parts]),
        np.concatenate([p.dense for p in parts], axis=1), tuple(sparse),
        np.concatenate(times) if times else None, sum(p.num_bad for p in parts),
        tuple(b for p in parts for b in p.bad)[:MAX_EXAMPLES])


def by_halves(count: int, parse: Callable[[int, int], Rows], blame: Callable[[int, Exception],
              BadRow], none: Callable[[], Rows],
              caught: tuple[type[Exception], ...] = (MalformedError,)) -> Rows:
    """Parse rows 0..count - 1, isolating malformed rows by bisection.

    Args:
        count: number of rows.
        parse: parses the rows `[start, stop)`, or raises one of `caught`.
        blame: describes the error of a single row, given its index and the exception.
        none: makes an empty result, which is returned if all rows are malformed.
        caught: exceptions that indicate a malformed row.
    """
    bad: list[BadRow] = []

    def halves(start: int, stop: int) -> list[Rows]:
        if start == stop:
            return []
        try:
            return [parse(start, stop)]
        except caught as error:
            if stop - start == 1:
                bad.append(blame(start, error))
                return []
            middle = (start + stop) // 2
            return halves(start, middle) + halves(middle, stop)

    parts = halves(0, count)
    return replace(concat(parts) if parts else none(), num_lines=count, num_bad=len(bad),
                   bad=tuple(bad[:MAX_EXAMPLES]))


def in_order(rows: Rows, order: np.ndarray) -> Rows:
    """Gather rows: row k of the result is row `order[k]`; `order` int [m]."""
    at = pa.array(order)
    return replace(
        rows, rows=rows.rows[order], labels=rows.labels[order], dense=rows.dense[:, order],
        sparse=tuple(ids.take(at) for ids in rows.sparse),
        time=None if rows.time is None else rows.time[order])
