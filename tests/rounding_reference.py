"""Stochastic rounding of 16-bit rows in NumPy: what csrc/common/{philox,elements}.h compute.

See `oper.shmem.optim.arguments.rounding_key`.
"""

from __future__ import annotations

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_TAG = 0x4F504552
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute Philox4x32-10 of counters uint32 [..., 4] under a key of two 32-bit numbers; uint32
    [..., 4]."""
    a, b, c, d = (counter[..., k].astype(np.uint64) for k in range(4))
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) & 0xFFFFFFFF)
                  for k, w in zip(key, (_W0, _W1), strict=True))
        p, q = _M0 * a, _M1 * c
        high_p, high_q = p >> np.uint64(32), q >> np.uint64(32)
        a, b, c, d = high_q ^ b ^ k0, q & _LOW, high_p ^ d ^ k1, p & _LOW
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


def rounding_bits(key: tuple[int, int], step: int, rows: np.ndarray, num_columns: int
                  ) -> np.ndarray:
    """Compute 16 random bits per element, uint32 [R, num_columns], of logical rows int64 [R] at a
    step."""
    blocks = np.arange(-(-num_columns // 8), dtype=np.uint64)
    counter = np.zeros((rows.size, blocks.size, 4), np.uint32)
    counter[..., 0] = rows.astype(np.uint32)[:, None]
    counter[..., 1] = blocks | np.uint64((step >> 32) << 20)
    counter[..., 2] = step & 0xFFFFFFFF
    counter[..., 3] = _TAG
    words = philox4x32(counter, key)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    return halves.reshape(rows.size, -1)[:, :num_columns]


def round_stochastically(values: np.ndarray, bits: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 values with 16 random bits each; return the results as float32.

    Args:
        values: float32.
        bits: uint32 below 2^16, of the same shape.
        dtype: ``"float16"`` or ``"bfloat16"``.
    """
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude, sign = raw & np.uint32(0x7FFFFFFF), raw & np.uint32(0x80000000)
    if dtype == "bfloat16":
        up = (magnitude + bits) & np.uint32(0xFFFF0000)
        finite = np.minimum(up, np.uint32(0x7F7F0000)).view(np.float32)
    else:
        exponent = np.maximum((magnitude >> np.uint32(23)).astype(np.int64) - 127, -14)
        step = np.ldexp(1.0, exponent - 10)  # between neighbouring float16 numbers
        # The number of random bits is the number of bits that rounding drops: 13 of the 24 bits of
        # a normal number; 16 below 2^-14, where float16 is fixed-point.
        small = magnitude < 0x38800000
        places = np.where(small, 16, 13)
        draw = np.where(small, bits, bits >> np.uint32(3)).astype(np.int64)
        with np.errstate(invalid="ignore", over="ignore"):
            whole = np.trunc(np.where(magnitude < 0x7F800000, np.abs(values.astype(np.float64)), 0)
                             / step * 2.0**places).astype(np.int64)
        finite = np.minimum((whole + draw) >> places, 2**40) * step
        finite = np.minimum(finite, 65504.0).astype(np.float32)
    result = np.where(magnitude >= 0x7F800000, magnitude.view(np.float32), finite)
    return (result.astype(np.float32).view(np.uint32) | sign).view(np.float32)
