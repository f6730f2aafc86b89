"""Rows of 8-bit and 4-bit codes in the layout of FBGEMM's IntNBit tables on the CPU.

A row is a float16 scale, a float16 bias and one code per column; the value of a column is
``scale * code + bias``. Codes, scale and bias are bitwise those of FBGEMM's
``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf``, which TorchRec's ``quantize_inference_model``
uses, except that the sign of a zero bias may differ in rows that contain both +0 and -0.
"""

from __future__ import annotations

import torch

from oper.errors import InvalidInputError
from oper.shmem.library import register
from oper.tables import CODE_BITS, SCALE_BIAS_BYTES, TableSpec, bytes_of_row


def quantise(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Quantise rows; returns them in stored form, uint8 [n, bytes of a row].

    Args:
        values: floats [n, dim], finite.
        dtype: ``"int8"``, or ``"int4"`` for even dim.

    Raises:
        InvalidInputError: a number is not finite, or the range of a row exceeds float16.
    """
    register()
    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        values = values.float()
    rows = values.detach().cpu().contiguous()
    codes = torch.empty((rows.shape[0], bytes_of_row(dtype, rows.shape[1])), dtype=torch.uint8)
    bad = torch.ops.oper.quantise_rows(rows, CODE_BITS[dtype], codes)
    if bad >= 0:
        raise InvalidInputError(
            "cannot quantise", f"first values of row {bad}", rows[bad, :4].tolist(),
            "finite numbers, with minimum and range (max - min) within float16's 65504",
            "keep this table in a float type")
    return codes


def dequantise(rows: torch.Tensor, dtype: str, dim: int) -> torch.Tensor:
    """Return the values, float32 [n, dim], of quantised rows, uint8 [n, bytes of a row or more]."""
    heads = rows[:, :SCALE_BIAS_BYTES].contiguous().view(torch.float16).float()
    codes = rows[:, SCALE_BIAS_BYTES:]
    if dtype == "int4":
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    # scale * code is exact in float32 (11 + 8 bits), so the result equals a fused multiply-add.
    return codes[:, :dim].float() * heads[:, :1] + heads[:, 1:]


def as_rows(values: torch.Tensor, spec: TableSpec) -> torch.Tensor:
    """Convert rows to the form in which a table stores them.

    Args:
        values: floats [n, dim], or quantised rows, uint8 [n, bytes of a row or more] (FBGEMM pads
            rows).
        spec: the table.

    Returns:
        uint8 [n, bytes of a row] for quantised tables, else [n, dim] of the table's dtype.

    Raises:
        InvalidInputError: the values have another width, are codes but the table is not quantised,
            or are finite but too large for float16; or as `quantise`.
    """
    is_codes = values.dtype == torch.uint8
    wanted = spec.row_bytes if is_codes else spec.dim
    fits = values.dim() == 2 and (
        values.shape[1] >= wanted if is_codes else values.shape[1] == wanted)
    if not fits or (is_codes and spec.dtype not in CODE_BITS):
        raise InvalidInputError(
            f"cannot store rows of table {spec.name!r}", "values",
            (values.dtype, tuple(values.shape)),
            f"floats [n, {spec.dim}]" + (
                f", or uint8 [n, {spec.row_bytes}]" if spec.dtype in CODE_BITS else ""),
            "pass this table's rows")
    if is_codes:
        return values[:, :wanted]
    if spec.dtype in CODE_BITS:
        return quantise(values, spec.dtype)
    rows = values.to(getattr(torch, spec.dtype))
    if rows.dtype == torch.float16 and values.dtype != torch.float16:
        overflown = values[rows.isinf() & values.isfinite()]
        if overflown.numel():
            raise InvalidInputError(f"cannot store rows of table {spec.name!r} as float16", "value",
                                    float(overflown[0]), "at most 65504 in magnitude",
                                    "keep this table in float32, or store it as bfloat16")
    return rows


def squared_errors(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the sum of squared errors of each row if stored as `dtype`, float64 [n].

    Args:
        values: floats [n, dim].
        dtype: one of `oper.tables.DTYPES`.

    Raises:
        InvalidInputError: as `quantise`.
    """
    numbers = values.float()
    stored = (dequantise(quantise(numbers, dtype), dtype, values.shape[1]) if dtype in CODE_BITS
              else numbers.to(getattr(torch, dtype)))
    # In float64, since squares may underflow in float32.
    return (stored.double() - numbers.double()).square_().sum(dim=1)
