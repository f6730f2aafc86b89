"""Rows in messages between counterparts, in the forms of `oper.messages`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oper.messages import number_bytes

_NO_NAMES = torch.empty(0, dtype=torch.int32)


def coded(rows: torch.Tensor, bits: int, draws: Sequence[int] = (),
          names: torch.Tensor = _NO_NAMES) -> torch.Tensor:
    """Return rows in the form of a message, uint8 [bytes].

    Args:
        rows: contiguous [n, columns]; float32, unless `bits` is 32.
        bits: bits per number, one of `oper.messages.BITS`; 32 = as stored, any dtype.
        draws: empty: rounded to nearest. Otherwise the key of the table's random numbers
            (`rounding_key`), the step, the number of the sending group, and the first column:
            numbers of 8 and 4 bits are rounded stochastically, so that their expectation is exact.
        names: with `draws`, the numbers of the rows, int32 [n].
    """
    if bits == 32:
        return rows.reshape(-1).view(torch.uint8)
    codes = torch.empty(rows.shape[0] * number_bytes(bits, rows.shape[1]), dtype=torch.uint8)
    torch.ops.oper.code_rows(rows, bits, list(draws), names, codes)
    return codes


class Reader:
    """Reads consecutive matrices from a uint8 tensor."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._at = data, 0

    def slots(self, count: int) -> np.ndarray:
        """Return the next slots, uint32 [count]."""
        return self.take(count, 1, torch.int32)[:, 0].numpy().view(np.uint32)

    def take(self, rows: int, columns: int, dtype: torch.dtype, bits: int = 32) -> torch.Tensor:
        """Return the next matrix [rows, columns]: of `dtype` if `bits` is 32; else float32, decoded
        from the codes of `coded`."""
        if bits < 32:
            found = torch.empty(rows, columns, dtype=torch.float32)
            torch.ops.oper.decode_rows(self._next(rows * number_bytes(bits, columns)), bits, found)
            return found
        part = self._next(rows * columns * dtype.itemsize)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(rows, columns)

    def _next(self, size: int) -> torch.Tensor:
        begin, self._at = self._at, self._at + size
        return self._data[begin:self._at]
