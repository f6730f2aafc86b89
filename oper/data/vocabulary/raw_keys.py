"""Raw values as 64-bit keys of dynamic tables, instead of ids from a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.data.vocabulary.building import hash64
from oper.errors import InvalidInputError

MISSING_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # missing field; equals `hash64` of an empty string


class RawKeys:
    """Maps a column's raw values to 64-bit keys; used instead of a vocabulary.

    An integer is its own key (unsigned ones are reinterpreted as signed); the key of a string is
    the `hash64` of its bytes. So equal values of any two logs have equal keys.
    """

    def __init__(self, column: str) -> None:
        """Make a map for `column`, whose name is used in messages."""
        self._column = column

    def lookup(self, values: np.ndarray) -> np.ndarray:
        """Map raw values [K], integers or bytes (kind ``S``), to keys int64 [K + 1].

        Entry 0 is the key of a missing field, entry k + 1 that of value k.

        Raises:
            InvalidInputError: an integer equals `MISSING_KEY`.
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
    """Map raw values to keys as ``oper preprocess --raw-ids`` does, for example in a server.

    Args:
        values: n 64-bit integers, signed or unsigned, or n strings (bytes are UTF-8), of the type
            in which the column was preprocessed: ids of a CSV file are strings unless a suffix such
            as ``:int`` was given. None and an empty string denote a missing field.

    Returns:
        int64 [n].

    Raises:
        InvalidInputError: integers and strings are mixed, the values have another type, an integer
            exceeds 64 bits or equals the key of a missing field, or a string contains a zero byte.
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
                                "convert the values to one of these types")
    if at:
        signed = [v - (1 << 64) if v >> 63 == 1 else v for v in numbers]
        known = np.array(texts) if texts else np.array(signed, np.int64)
        keys[at] = RawKeys("values").lookup(known)[1:]
    return keys
