"""Access statistics from published counts: a table of (field, value, count) instead of a log."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np

from oper.analysis.sketch import whole_rows
from oper.errors import FileFormatError, require
from oper.stats import AccessStats, TableStats
from oper.support.numeric import falling_root

_NAMES = {"field": ("field", "column", "feature"), "value": ("value", "id"),
          "count": ("count", "total", "frequency")}
_MAX_COUNT = 1 << 50
_MAX_FIT_COUNT = 1 << 20
_FIT_ROWS = 200  # minimum number of coldest known values to which the tail is fitted


@dataclass(frozen=True, slots=True)
class ValueCountOptions:
    """Facts about a log that its published counts do not contain.

    Attributes:
        num_samples: number of samples of the log; None = the largest sum of counts of any field.
        min_count: least count that was published; None = the least count in the file.
        num_rows: number of distinct values by field, for fields where it is known.
    """

    num_samples: int | None = None
    min_count: int | None = None
    num_rows: Mapping[str, int] | None = None


def stats_from_value_counts(path: str | os.PathLike[str], options: ValueCountOptions | None = None
                            ) -> AccessStats:
    """Make access statistics from a CSV file (plain or gzip) with columns field, value and count.

    Every field is a table with one id per sample. Values get ids 1, 2, ... in descending order of
    count; id 0 represents rare and unseen values. If a field has fewer accesses than there are
    samples, the missing ones belong to values seen fewer than `min_count` times. These are modelled
    by the power law count(rank) ~ rank^-a of the coldest known values, continued until the missing
    accesses are used up, or, if the number of distinct values is known, by the power law that has
    that number.

    Raises:
        FileFormatError: the header lacks these columns, or a row is malformed.
        InvalidInputError: a field has more accesses than `num_samples`, or `options.num_rows` has
            unknown fields or impossible numbers.
    """
    options = options or ValueCountOptions()
    fields = _read(path)
    total = options.num_samples or max(int(c.sum()) for c in fields.values())
    least = options.min_count or min(int(c.min()) for c in fields.values())
    what = f"cannot use the counts of {os.fspath(path)!r}"
    unknown = sorted(set(options.num_rows or {}) - set(fields))
    require(what, "remove the fields that the file does not have",
            ("num_rows", unknown, not unknown, f"fields {sorted(fields)[:12]}"))
    tables, modelled = {}, 0
    for name, counts in fields.items():
        missing = total - int(counts.sum())
        require(what, "pass a larger num_samples",
                (f"accesses of {name!r}", int(counts.sum()), missing >= 0,
                 f"<= num_samples={total}"))
        known = (options.num_rows or {}).get(name)
        # Values that the file lacks have at least one access each, and fewer than `least`.
        least_rows = counts.size + -(-missing // max(1, least - 1))
        most_rows = counts.size + missing
        require(what, "pass the number of distinct values of the log, or correct num_samples",
                (f"num_rows of {name!r}", known, known is None or least_rows <= known <= most_rows,
                 f"{least_rows}..{most_rows}: {counts.size} values, and those of the {missing} "
                 "accesses that the file lacks"))
        tail = _tail(counts, missing, least, None if known is None else known - counts.size)
        modelled += missing
        tables[name] = _table(np.sort(counts)[::-1], tail, total)
    text = f"published value counts, {os.path.basename(path)}"
    if modelled:
        share = modelled / (total * len(fields))
        text += f"; values seen fewer than {least} times ({share:.1%} of accesses) modelled"
    return AccessStats(total, tables, text, ids_in_hotness_order=True)


def _table(counts: np.ndarray, tail: tuple[np.ndarray, np.ndarray], total: int) -> TableStats:
    num_rows = 1 + counts.size + int(tail[1].sum())
    values, rows = tail
    values, rows = np.concatenate([[0], values]), np.concatenate([[1], rows])  # row 0
    return TableStats(num_rows, np.arange(1, counts.size + 1), counts, values, rows,
                      np.array([1]), np.array([total]))


def _tail(counts: np.ndarray, missing: int, least: int, num_tail: int | None
          ) -> tuple[np.ndarray, np.ndarray]:
    """Return counts below `least` and the number of rows with each; `missing` accesses in all."""
    empty = np.zeros(0, np.int64)
    if missing == 0 or least <= 1:
        if missing:
            return np.array([1]), np.array([missing])  # assume values seen once
        return empty, empty
    values = np.arange(1, min(least, missing + 1), dtype=np.int64)

    def rows_at(slope: float) -> np.ndarray:
        """Return the rows by count for n(c) ~ c^-slope, scaled to the missing accesses."""
        weight = values.astype(np.float64) ** -slope
        return weight * (missing / float(values @ weight))

    if num_tail is None:
        slope, density = _fitted(counts, least)
        rows = _continued(values, density * values.astype(np.float64) ** -slope, missing)
    else:  # a steeper slope gives more rows
        rows = rows_at(falling_root(lambda slope: num_tail - rows_at(slope).sum(), -4.0, 12.0))
    return whole_rows(values, rows, missing, missing if num_tail is None else num_tail)


def _continued(values: np.ndarray, rows: np.ndarray, missing: int) -> np.ndarray:
    """Take rows, those with the largest counts first, until they have the missing accesses."""
    mass = values * rows
    if mass.sum() <= missing:
        return rows * (missing / mass.sum())
    before = np.concatenate([np.cumsum(mass[::-1])[::-1][1:], [0.0]])
    share: np.ndarray = np.clip((missing - before) / mass, 0.0, 1.0)
    return rows * share


def _fitted(counts: np.ndarray, least: int) -> tuple[float, float]:
    """Fit slope and density of n(c) = density c^-slope to the coldest known values.

    The slope is the maximum-likelihood estimate (Hill 1975) for a power law truncated on both
    sides."""
    top = least
    end = min(int(counts.max()), _MAX_FIT_COUNT)
    while top < end and np.count_nonzero(counts < 2 * top) < _FIT_ROWS:
        top *= 2
    near = counts[counts < 2 * top]
    if near.size < 10:  # too few for a fit: Zipf's law, c^-2, whose sum from `least` is 1 / least
        return 2.0, near.size * float(least)
    # For a power law on [least, 2 top), the mean of log(c / least) falls as the slope grows.
    mean = float(np.log((near + 0.5) / least).mean())
    span = float(np.log(2 * top / least))

    def excess(slope: float) -> float:
        a = slope - 1
        return (span / 2 if abs(a) < 1e-9 else 1 / a - span / np.expm1(a * span)) - mean

    slope = falling_root(excess, -3.0, 8.0)
    weight = np.arange(least, 2 * top, dtype=np.float64) ** -slope
    return slope, near.size / float(weight.sum())


def _read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    what = f"cannot read {os.fspath(path)!r}"
    found: dict[str, list[int]] = {}
    seen: set[tuple[str, str]] = set()
    for line, field, value, text in _lines(path, what):
        count = int(text) if text.isdigit() and len(text) < 17 else 0
        if not 1 <= count < _MAX_COUNT or not field or (field, value) in seen:
            raise FileFormatError(what, f"line {line}", (field, value, text),
                                  "a field, a value not listed before, and a count from 1 to "
                                  f"{_MAX_COUNT - 1}", "correct or remove this line")
        seen.add((field, value))
        found.setdefault(field, []).append(count)
    if not found:
        raise FileFormatError(what, "rows", 0, "at least one",
                              "pass a file of counts with rows after its header")
    return {name: np.array(counts, np.int64) for name, counts in found.items()}


def _lines(path: str | os.PathLike[str], what: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line number, field, value and count of every row, as text."""
    with open(path, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        source: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        rows = csv.reader(io.TextIOWrapper(source, encoding="utf-8", newline=""))
        try:
            header = [name.strip().lower() for name in next(rows, [])]
            places = [next((k for k, h in enumerate(header) if h in names), None)
                      for names in _NAMES.values()]
            field, value, count = places
            if field is None or value is None or count is None:
                raise FileFormatError(what, "header", header, "columns field, value, count",
                                      "rename the columns")
            for row in rows:
                if len(row) != len(header):
                    raise FileFormatError(what, f"line {rows.line_num}", row,
                                          f"{len(header)} columns", "correct or remove this line")
                yield rows.line_num, row[field], row[value], row[count]
        except (csv.Error, UnicodeDecodeError, EOFError, gzip.BadGzipFile, OSError) as error:
            raise FileFormatError(what, "content", str(error), "a complete CSV file",
                                  "fetch the file again") from None
