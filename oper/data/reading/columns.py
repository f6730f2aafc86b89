"""Convert text or Arrow columns to labels, numbers, ids and times.

pyarrow and NumPy convert an entire column at once. If it contains a malformed value, they raise
`MalformedError`, and `is_valid` checks the text fields one by one.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oper.data.arrays import lists
from oper.data.recipe import Column, finite
from oper.errors import InvalidInputError

_ARROW_TYPES = {
    "hex32": pa.binary(8), "uint32": pa.int64(), "uint64": pa.uint64(), "int": pa.int64(),
    "integral": pa.float64(), "float": pa.float64(), "string": pa.binary(), "binary": pa.binary(),
    "threshold": pa.float64(), "number": pa.float64(), "among": pa.binary(), "unix": pa.float64(),
    "unix_ms": pa.float64(), "bins": pa.float64(), "iso": pa.timestamp("us"),
    "iso_zone": pa.timestamp("us", "UTC"), "yymmddhh": pa.int64(),
}
EXPECTED = {
    "hex32": "8 digits 0-9a-f or empty", "uint32": "an integer from 0 to 4294967295 or empty",
    "uint64": "an unsigned 64-bit integer or empty", "int": "a signed 64-bit integer or empty",
    "integral": "an integer of magnitude below 2^53 or empty", "float": "a finite number or empty",
    "bins": "a finite number or empty",
    "string": "text of at most 1024 bytes without a zero byte, not empty in a list",
    "binary": "0 or 1",
    "threshold": "a number", "number": "a finite number", "among": "text",
    "unix": "seconds since 1970", "unix_ms": "milliseconds since 1970",
    "iso": "a date and time without zone", "iso_zone": "a date and time with its zone",
    "yymmddhh": "a date and hour YYMMDDHH", "": "text without a carriage return",  # skipped columns
}
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Integers may have any number of leading zeros, which pyarrow ignores.
_FIELD = {
    "hex32": re.compile(rb"[0-9a-f]{8}"), "uint32": re.compile(rb"-?0*[0-9]{1,10}"),
    "uint64": re.compile(rb"0*[0-9]{1,20}"), "int": re.compile(rb"-?0*[0-9]{1,19}"),
    "binary": re.compile(rb"[01]"), "yymmddhh": re.compile(rb"0*[0-9]{1,8}"),
}
_LIMITS = {"uint32": (0, 2**32 - 1), "uint64": (0, 2**64 - 1), "int": (-2**63, 2**63 - 1)}
TOP_SECONDS = 1 << 36  # the year 4147
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_TOP_WHOLE = 2.0**53
MAX_TEXT_BYTES = 1024  # limit for the text of an id
_TEXTS = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string,
          pa.types.is_large_string)


class MalformedError(Exception):
    """A column contains a malformed value; the message is the column's name."""


def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type in which pyarrow's CSV reader reads a text column."""
    if column.missing or column.multi:
        return pa.binary()
    return _ARROW_TYPES[column.parse]


def _prepared(column: Column, array: pa.Array) -> pa.Array:
    """Cast a column to the Arrow type of its `parse`, with null for missing fields.

    Raises MalformedError.
    """
    wanted, array = _ARROW_TYPES[column.parse], without_missing(column, array)
    if array.type == wanted or (
            column.parse == "string" and not pa.types.is_floating(array.type)):
        return array
    try:
        if pa.types.is_binary(array.type) and not pa.types.is_fixed_size_binary(wanted):
            array = array.cast(pa.string())
        # Integers are rounded to the nearest float64; by default Arrow refuses those above 2^53.
        return array.cast(wanted, safe=not (
            pa.types.is_integer(array.type) and pa.types.is_floating(wanted)))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise MalformedError(column.name) from error


def _bytes(texts: Sequence[str]) -> pa.Array:
    return pa.array([text.encode() for text in texts], pa.binary())


def _null_where(chosen: pa.Array, array: pa.Array) -> pa.Array:
    """Replace the binary values where `chosen` is true by null."""
    return pc.if_else(chosen, pa.scalar(None, pa.binary()), array)


def without_missing(column: Column, array: Any) -> Any:
    """Replace values that stand for a missing field (`Column.missing`) by null.

    `array` [n], plain or chunked, may have text or numbers; numbers are compared with those that
    the strings denote. Arrays of other types are returned as they are.
    """
    if not column.missing:
        return array
    array = _typed(array)
    kind = array.type
    if any(is_kind(kind) for is_kind in _TEXTS):
        known = _bytes(column.missing).cast(kind)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        known = pa.array([x for text in column.missing for x in _number_of(text, kind)], kind)
    else:
        return array
    return pc.if_else(pc.is_in(array, known), pa.scalar(None, kind), array)


def _number_of(text: str, kind: pa.DataType) -> list[Any]:
    """Return the number of type `kind` that a text denotes; no number if there is none."""
    try:
        return pa.array([int(text) if pa.types.is_integer(kind) else float(text)], kind).to_pylist()
    except (ValueError, OverflowError):  # pa.ArrowInvalid is a ValueError
        return []


def _require(ok: bool, column: Column) -> None:
    if not ok:
        raise MalformedError(column.name)


def _numbers(column: Column, array: pa.Array) -> np.ndarray:
    """Convert numbers to NumPy [n], null to 0; raises MalformedError if one is not finite."""
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    _require(bool(np.isfinite(values).all()), column)
    return values


def labels(column: Column, array: pa.Array) -> np.ndarray:
    """Convert a label column [n], see `label_of`; raises MalformedError."""
    array = without_missing(column, array)
    _require(array.null_count == 0, column)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.binary())
    if column.parse == "binary" and not pa.types.is_binary(array.type):  # from a Parquet file
        _require(pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
                 or pa.types.is_boolean(array.type), column)
        numbers = array.cast(pa.float64() if not pa.types.is_boolean(array.type) else pa.int8(),
                             safe=False)
        values = numbers.to_numpy(zero_copy_only=False)
        _require(bool(((values == 0) | (values == 1)).all()), column)
        return values.astype(np.int8)
    array = _prepared(column, array)
    _require(array.null_count == 0, column)
    if column.parse in ("threshold", "number"):
        return label_of(column, _numbers(column, array))
    if column.parse == "among":
        found = pc.is_in(array, _bytes(column.positive))
        return found.to_numpy(zero_copy_only=False).astype(np.int8)
    # A binary label is one character.
    _require(not pc.any(pc.not_equal(pc.binary_length(array), 1)).as_py(), column)
    text = _text(array)
    _require(bool(((text | 1) == ord("1")).all()), column)
    return (text - np.uint8(ord("0"))).view(np.int8)


def label_of(column: Column, numbers: np.ndarray) -> np.ndarray:
    """Convert numbers [n] to labels: the transformed numbers, float32 [n], with
    ``parse="number"``, otherwise int8 [n], 0 or 1. Raises MalformedError."""
    if column.parse == "number":
        return transformed(column, _to_float32(numbers))
    return (numbers >= column.threshold).astype(np.int8)


def dense(column: Column, array: pa.Array) -> np.ndarray:
    """Convert a dense column to transformed float32 [n], missing to 0; raises MalformedError."""
    return transformed(column, _to_float32(_numbers(column, _prepared(column, array))))


def _to_float32(values: np.ndarray) -> np.ndarray:
    """Round numbers [n] to float32 [n]; those that are too large become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def transformed(column: Column, values: np.ndarray) -> np.ndarray:
    """Apply the column's transform to float32 [n]; raises MalformedError if one is not finite."""
    _require(bool(np.isfinite(values).all()), column)  # numbers beyond float32 are infinite
    return np.log1p(np.maximum(values, 0)) if column.transform == "log1p" else values


def ids(column: Column, array: pa.Array) -> pa.Array:
    """Convert a sparse column to raw values [n]: integers, binary values or lists of these.

    Missing fields become null, or empty lists. Raises MalformedError."""
    array = _typed(array)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        values = _typed(array.flatten())
        if column.parse != "hex32":  # a recipe's default, with which lists keep their own type
            values = _prepared(column, values)
        return lists(_lengths(array), _whole(column, values))
    if column.multi:
        return _split(column, array)
    return _whole(column, _prepared(column, array))


def _lengths(array: pa.Array) -> np.ndarray:
    """Return the number of values of each list [n], 0 for null."""
    return pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)


def _typed(array: pa.Array) -> pa.Array:
    """Cast null arrays to binary, views to strings or binary, fixed-size lists to lists, and
    dictionary codes to their values."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _typed(array.cast(kind.value_type))
    if pa.types.is_null(kind):
        return array.cast(pa.binary())
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.string() if pa.types.is_string_view(kind) else pa.binary())
    if pa.types.is_fixed_size_list(kind):
        return array.cast(pa.list_(kind.value_type))
    return array


def _split(column: Column, array: pa.Array) -> pa.ListArray:
    """Split fields such as ``3|17|4`` into ids; a missing field becomes an empty bag."""
    array = _null_where(pc.is_in(array, _bytes(("", *column.missing))), array)
    try:
        parts = pc.split_pattern(array.cast(pa.string()), column.multi)
    except pa.ArrowInvalid as error:
        raise MalformedError(column.name) from error
    values = parts.flatten().cast(pa.binary())
    _require(not pc.any(pc.equal(pc.binary_length(values), 0)).as_py(), column)
    return lists(_lengths(parts), _whole(column, _prepared(column, values)))


def _whole(column: Column, array: pa.Array) -> pa.Array:
    """Check values and convert them to integers or binary; raises MalformedError."""
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        if column.parse == "hex32":
            return _hexadecimal(column, array)
        whole = array.fill_null(b"0" * kind.byte_width).cast(pa.binary())
        return _whole(column, _null_where(array.is_null(), whole))
    if pa.types.is_boolean(kind):
        return array.cast(pa.int64())
    if column.parse in ("integral", "bins") and pa.types.is_floating(kind):
        values = _numbers(column, array)
        if column.parse == "bins":
            values = np.searchsorted(np.array(column.bins), values, "right")
        else:
            _require(bool(((values == np.rint(values)) & (np.abs(values) < _TOP_WHOLE)).all()),
                     column)
        return pa.array(values.astype(np.int64), mask=array.is_null().to_numpy(
            zero_copy_only=False))
    if column.parse == "uint32" and len(array):
        _require(pa.types.is_integer(kind) or array.null_count == len(array), column)
        bounds = pc.min_max(array)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        _require(low is None or 0 <= low <= high < 2**32, column)
    if pa.types.is_integer(kind):
        return array if kind in (pa.int64(), pa.uint64()) else array.cast(pa.int64())
    _require(any(is_kind(kind) for is_kind in _TEXTS), column)
    array = array.cast(pa.binary())
    lengths = pc.binary_length(array)
    bounds = pc.min_max(lengths)
    _require((bounds["max"].as_py() or 0) <= MAX_TEXT_BYTES
             and not (_text(array) == 0).any(), column)
    if bounds["min"].as_py() == 0:  # in Parquet or JSON files an empty string is a missing field
        array = _null_where(pc.equal(lengths, 0), array)
    return array


def _text(array: pa.Array) -> np.ndarray:
    """Return the concatenated bytes of a binary array's values (a slice of its buffer)."""
    _, offsets, text = array.buffers()
    if not len(array) or text is None:
        return np.zeros(0, np.uint8)
    places = np.frombuffer(offsets, np.int32)[array.offset:][:len(array) + 1]
    return np.frombuffer(text, np.uint8)[places[0]:places[-1]]


def _hexadecimal(column: Column, array: pa.Array) -> pa.Array:
    """Parse values of eight lower-case hexadecimal digits to uint32; raises MalformedError."""
    missing = array.is_null().to_numpy(zero_copy_only=False)
    digits = np.frombuffer(array.buffers()[1], "S8", len(array), 8 * array.offset)
    text = np.where(missing, b"0" * 8, digits).tobytes()
    try:
        numbers = binascii.unhexlify(text)
    except binascii.Error as error:
        raise MalformedError(column.name) from error
    _require(binascii.hexlify(numbers) == text, column)  # refuses upper-case digits
    return pa.array(np.frombuffer(numbers, ">u4").astype(np.uint32), mask=missing)


def times(column: Column, array: pa.Array) -> np.ndarray:
    """Convert a time column to whole seconds since 1970 (UTC), int64 [n]; raises MalformedError."""
    array = without_missing(column, array)
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("us"))  # midnight, UTC
    if pa.types.is_integer(array.type) and column.parse in ("unix", "unix_ms"):
        array = array.cast(pa.float64(), safe=False)
    elif not pa.types.is_timestamp(array.type):  # from a Parquet file, of any unit and zone
        # Arrow would take numbers as microseconds.
        _require(not pa.types.is_integer(array.type) or column.parse == "yymmddhh", column)
        array = _prepared(column, array)
    _require(array.null_count == 0, column)
    if pa.types.is_timestamp(array.type):
        seconds = array.cast(pa.int64()).to_numpy(zero_copy_only=False) // _PER_SECOND[
            array.type.unit]
    elif column.parse == "yymmddhh":
        seconds = hours(column, array.to_numpy(zero_copy_only=False))
    else:
        values = _numbers(column, array)
        seconds = np.floor(values / (1000 if column.parse == "unix_ms" else 1))
        _require(bool((np.abs(seconds) < TOP_SECONDS).all()), column)
        seconds = seconds.astype(np.int64)
    _require(not seconds.size or bool(abs(seconds).max() < TOP_SECONDS), column)
    return seconds


def hours(column: Column, values: np.ndarray) -> np.ndarray:
    """Convert integers YYMMDDHH [n], years 2000 to 2099, to seconds since 1970, int64 [n].

    Raises MalformedError if a date or hour does not exist.
    """
    _require(bool(((values >= 0) & (values < 10**8)).all()), column)
    days, hour = np.divmod(values, 100)
    distinct, inverse = np.unique(days, return_inverse=True)
    starts = np.empty(distinct.size, np.int64)
    for k, day in enumerate(distinct.tolist()):
        try:
            date = np.datetime64(f"20{day // 10000:02}-{day // 100 % 100:02}-{day % 100:02}", "s")
        except ValueError as error:
            raise MalformedError(column.name) from error
        starts[k] = date.astype(np.int64)
    _require(bool((hour < 24).all()), column)
    return starts[inverse] + hour * 3600


def is_valid(column: Column, field: bytes) -> bool:
    """Whether one text field is a valid value of its column."""
    if column.kind == "skip":
        return True
    if not field or field.decode("utf-8", "replace") in column.missing:
        return column.kind in ("dense", "sparse")
    if column.multi:
        return all(part and _is_value(column.parse, part)
                   for part in field.split(column.multi.encode()))
    if not column.missing and column.parse not in ("hex32", "binary", "string", "among"):
        field = field.strip(b" \t")  # as pyarrow does around numbers
    return _is_value(column.parse, field)


def _is_value(parse: str, field: bytes) -> bool:
    pattern = _FIELD.get(parse)
    if pattern is not None:
        if not pattern.fullmatch(field):
            return False
        if parse == "yymmddhh":
            text = field.decode()[-8:].zfill(8)
            return _is_time(parse, f"20{text[:2]}-{text[2:4]}-{text[4:6]} {text[6:]}:00:00")
        if parse in _LIMITS:
            low, high = _LIMITS[parse]
            return low <= int(field[:1] + field[1:].lstrip(b"0").zfill(1)) <= high
        return True
    if parse in ("string", "among"):
        return b"\0" not in field and (len(field) <= MAX_TEXT_BYTES or parse == "among")
    if parse in ("iso", "iso_zone"):
        return _is_time(parse, field.decode("ascii", "replace"))
    if not _NUMBER.fullmatch(field):
        return False
    value = float(field)
    if parse == "integral":
        return value == int(value) and abs(value) < _TOP_WHOLE if np.isfinite(value) else False
    if parse in ("unix", "unix_ms"):
        return abs(value) / (1000 if parse == "unix_ms" else 1) < TOP_SECONDS
    number = np.array(value)
    return bool(np.isfinite(number if parse in ("bins", "threshold") else _to_float32(number)))


def _is_time(parse: str, text: str) -> bool:
    if text.startswith("0000"):  # a year that pyarrow knows, unlike Python; 2000 is a leap year too
        text = "2" + text[1:]
    try:
        return (datetime.fromisoformat(text).tzinfo is not None) == (parse == "iso_zone")
    except ValueError:
        return False


_COMPARES = {"==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal,
             ">": pc.greater, ">=": pc.greater_equal}


def filter_type(column: Column) -> pa.DataType:
    """Return the Arrow type in which a filter compares the fields of a text column."""
    return pa.binary() if column.multi else _ARROW_TYPES[column.parse]


def compared(column: Column, array: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the fields of a text column [n] in the form that a filter compares, null where they
    are missing; raises MalformedError."""
    if column.multi:
        return without_missing(column, array)
    return _prepared(column, array) if column.missing else array


def compares_numbers(kind: pa.DataType, operator: str, value: str) -> bool:
    """Whether a filter compares text as numbers: if the text is to be less or more than a number.
    """
    return operator not in ("==", "!=") and finite(value) is not None and any(
        is_kind(kind) for is_kind in _TEXTS)


def holds(column: pa.ChunkedArray, operator: str, value: str, path: str) -> pa.ChunkedArray:
    """Compare each field with `value`; the result for missing fields is false.

    Text that is to be less or more than a number is compared as a number; empty text is missing.

    Raises InvalidInputError, which names `path`, if `value` or a field cannot be cast.
    """
    try:
        if any(is_kind(column.type) for is_kind in _TEXTS):
            is_empty = pc.equal(pc.binary_length(column), 0)
            column = pc.if_else(is_empty, pa.scalar(None, column.type), column)
        if compares_numbers(column.type, operator, value):
            column = column.cast(pa.string()).cast(pa.float64())
        return pc.fill_null(_COMPARES[operator](column, pa.scalar(value).cast(column.type)), False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidInputError(f"cannot filter {path!r}", "value", value,
                                f"one of type {column.type} ({str(error)[:120]})",
                                "correct the filter in the recipe") from None
