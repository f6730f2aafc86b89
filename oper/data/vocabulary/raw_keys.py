"""Columns without a vocabulary: raw values as 64-bit keys, for dynamic tables."""

from __future__ import annotations

import numpy as np

from oper.data.vocabulary.building import hash64
from oper.errors import InvalidInputError, fail

MISSING_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # of a missing field: what `hash64` makes of no text


class RawKeys:
    """The keys of a column's raw values, in the place of a vocabulary.

    An integer is its own key (of unsigned ones the same 64 bits), a text the 64-bit hash of its
    bytes, which never changes. Nothing is counted, so equal values of any two logs have equal keys.
    """

    def __init__(self, column: str) -> None:
        """`column` is for messages."""
        self._column = column

    def lookup(self, values: np.ndarray) -> np.ndarray:
        """Keys int64 [K + 1] of a missing field and of raw values [K].

        Raises:
            InvalidInputError: a number that stands for a missing field.
        """
        keys = np.empty(values.size + 1, np.int64)
        keys[0] = MISSING_KEY
        if values.dtype.kind == "S":
            keys[1:] = hash64(values).view(np.int64)
            return keys
        keys[1:] = values.astype(np.int64, copy=False)  # unsigned ones wrap around
        if (keys[1:] == MISSING_KEY).any():
            raise InvalidInputError(fail(
                f"cannot keep the ids of column {self._column!r} raw", "id", MISSING_KEY,
                "any other 64-bit number: this one stands for a missing field",
                "read the column as texts, whose hashes become the keys"))
        return keys

