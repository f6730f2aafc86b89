"""Columns without a vocabulary: raw values as 64-bit keys, for dynamic tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.data.vocabulary.building import hash64
from oper.errors import InvalidInputError

MISSING_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # of a missing field: what `hash64` makes of no text


class RawKeys:
    """The keys of a column's raw values, used instead of a vocabulary.

    An integer is its own key (an unsigned one by the same 64 bits); a string's key is the 64-bit
    hash of its bytes, which never changes. Nothing is counted, so equal values of any two logs have
    equal keys.
    """

    def __init__(self, column: str) -> None:
        """`column` is for messages."""
        self._column = column

    def lookup(self, values: np.ndarray) -> np.ndarray:
        """Keys int64 [K + 1] of a missing field and of raw values [K], integers or strings as bytes
        (NumPy kind ``S``).

        Raises:
            InvalidInputError: a value is the number that denotes a missing field.
        """
        keys = np.empty(values.size + 1, np.int64)
        keys[0] = MISSING_KEY
        if values.dtype.kind == "S":
            keys[1:] = hash64(values).view(np.int64)
            return keys
        keys[1:] = values.astype(np.int64, copy=False)  # unsigned ones wrap around
        if (keys[1:] == MISSING_KEY).any():
            raise InvalidInputError(f"cannot keep the ids of column {self._column!r} raw", "id",
                                    MISSING_KEY,
                                    "any other 64-bit number: this one stands for a missing field",
                                    "read the column as strings, whose hashes become the keys")
        return keys



def raw_keys(values: Sequence[str | bytes | int | None]) -> np.ndarray:
    """The keys that ``oper preprocess --raw-ids`` makes of a column's values, for ids that do not
    come from a preprocessed folder, such as those of requests to a server.

    Args:
        values: n 64-bit integers, signed or not, or n strings (bytes are UTF-8), of the type as
            which the column was read: without ``:int`` or a similar suffix, the ids of a CSV file
            are strings. None and an empty string denote a missing field.

    Returns:
        int64 [n].

    Raises:
        InvalidInputError: integers and strings are mixed, the values have another type, an integer
            exceeds 64 bits or is the one that denotes a missing field, or a string contains a zero
            byte.
    """
    keys = np.full(len(values), MISSING_KEY, np.int64)
    at = [k for k, v in enumerate(values) if v is not None and v not in ("", b"")]
    some = [values[k] for k in at]
    texts = [v.encode() if isinstance(v, str) else v for v in some if isinstance(v, str | bytes)]
    numbers = [int(v) for v in some
               if isinstance(v, int | np.integer) and -1 << 63 <= int(v) < 1 << 64]
    if max(len(texts), len(numbers)) < len(at) or any(b"\0" in v for v in texts):
        raise InvalidInputError("cannot make keys", "values", some[:8],
                                "all 64-bit integers, or all strings without zero bytes",
                                "convert them")
    if at:
        signed = [v - (1 << 64) if v >> 63 == 1 else v for v in numbers]
        known = np.array(texts) if texts else np.array(signed, np.int64)
        keys[at] = RawKeys("values").lookup(known)[1:]
    return keys
