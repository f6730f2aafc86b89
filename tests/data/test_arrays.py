"""Conversions between Arrow's strings and NumPy's, and the memory that they take."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from oper.data.arrays import as_binary, as_numpy

WORDS = [b"word-%d" % k * (k % 4) for k in range(40_000)]  # several blocks, with empty strings


@pytest.mark.parametrize("words", [WORDS, WORDS[:1], [], [b"", b""], [b"a", b""]])
def test_strings_to_numpy_and_back(words: list[bytes]) -> None:
    array = pa.array(words, pa.binary())
    values = as_numpy(array)
    assert values.dtype.kind == "S" and values.tolist() == words
    assert as_binary(values).type == pa.binary()
    assert as_binary(values).to_pylist() == words


def test_parts_of_arrays() -> None:
    assert as_numpy(pa.array(WORDS, pa.binary()).slice(7, 30_000)).tolist() == WORDS[7:30_007]
    assert as_binary(np.array(WORDS)[::3]).to_pylist() == WORDS[::3]


def test_conversions_take_little_more_memory_than_their_result() -> None:
    array = pa.array([b"%032d" % k for k in range(300_000)], pa.binary())
    tracemalloc.start()
    try:
        values = as_numpy(array)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * values.nbytes
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert as_binary(values).nbytes == array.nbytes
        assert tracemalloc.get_traced_memory()[1] - before < 2.5 * values.nbytes
    finally:
        tracemalloc.stop()
