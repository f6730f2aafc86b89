"""Arrays in a job's work files, and conversions between NumPy and Arrow arrays."""

from __future__ import annotations

import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from oper.errors import FileFormatError

_BLOCK_VALUES = 1 << 14  # strings that are converted at a time


def append_batch(file: BinaryIO, columns: Mapping[str, Any]) -> int:
    """Append columns, arrays [n], to a file as an Arrow stream; returns the position of its first
    byte. NumPy's bytes (kind ``S``) keep their width."""
    def array(x: Any) -> pa.Array:
        if not isinstance(x, np.ndarray) or x.dtype.kind != "S":
            return pa.array(x)
        return pa.Array.from_buffers(pa.binary(x.itemsize), x.size,
                                     [None, pa.py_buffer(x.tobytes())])

    at = file.tell()
    batch = pa.RecordBatch.from_arrays([array(x) for x in columns.values()], list(columns))
    with pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    return at


def read_batch(path: Path, at: int = 0) -> pa.RecordBatch:
    """Map the columns that `append_batch` has written at a position of a file into memory.

    Raises FileFormatError if the file is damaged, as it may be after a crash of the machine, since
    work files are not written with fsync.
    """
    try:
        with pa.memory_map(str(path)) as file:
            file.seek(at)
            return pa.ipc.open_stream(file).read_next_batch()
    except (pa.ArrowException, StopIteration, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged_work(path, error) from None


def damaged_work(path: Path, error: Exception) -> FileFormatError:
    """Make the error for a damaged file of a job's work in progress."""
    return FileFormatError("cannot continue an interrupted run", "file", str(path),
                           f"a complete file ({str(error) or 'it has no data'})",
                           "run the command again; it starts from scratch")


def read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of the ``.npy`` array at the file position.

    Returns:
        Shape, whether the array is in Fortran order, and dtype.

    Raises:
        ValueError: the header is damaged.
    """
    version = np.lib.format.read_magic(file)
    read = (np.lib.format.read_array_header_1_0 if version == (1, 0)
            else np.lib.format.read_array_header_2_0)
    try:
        return read(file)
    except (SyntaxError, tokenize.TokenError) as error:  # raised by NumPy for a damaged header
        raise ValueError(str(error)) from None


def lists(lengths: np.ndarray, values: np.ndarray | pa.Array) -> pa.ListArray:
    """Split `values` in order into an Arrow array of n lists with the given `lengths`, int [n]."""
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, values)


def table_of(columns: Mapping[str, Any]) -> pa.Table:
    """Make an Arrow table of columns, arrays [n] without nulls. The schema declares them as never
    null, so that readers and writers skip null checks."""
    arrays = [pa.array(x) for x in columns.values()]
    return pa.Table.from_arrays(arrays, schema=pa.schema(
        [pa.field(n, a.type, nullable=False) for n, a in zip(columns, arrays, strict=True)]))


def places_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate ``arange(starts[k], starts[k] + lengths[k])`` over k; both arguments int [n].

    Returns int64 [sum of lengths].
    """
    return np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)


def as_numpy(array: pa.Array) -> np.ndarray:
    """Convert an Arrow array [n] to NumPy [n]; binary values become fixed-width bytes (kind ``S``).

    Binary values must not contain zero bytes.
    """
    if pa.types.is_fixed_size_binary(array.type):
        kind = np.dtype(f"S{array.type.byte_width}")
        return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize
                             ) if len(array) else np.zeros(0, kind)
    if not pa.types.is_binary(array.type):
        return array.to_numpy(zero_copy_only=False)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset:][:len(array) + 1]
    lengths = np.diff(offsets)
    width = max(1, int(lengths.max(initial=0)))
    table = np.zeros((len(array), width), np.uint8)
    text = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    # In blocks, since the positions take several times as much memory as the text.
    for first in range(0, len(array), _BLOCK_VALUES):
        some = lengths[first:first + _BLOCK_VALUES]
        places = places_of(np.arange(first, first + some.size) * width, some)
        table.reshape(-1)[places] = text[offsets[first]:offsets[first] + places.size]
    return table.reshape(-1).view(f"S{width}")


def as_binary(values: np.ndarray) -> pa.ChunkedArray:
    """Convert fixed-width bytes (kind ``S``) [n] to Arrow binary values [n], the inverse of
    `as_numpy`."""
    pieces = []
    for first in range(0, max(1, values.size), _BLOCK_VALUES):
        block = np.ascontiguousarray(values[first:first + _BLOCK_VALUES])
        text = block.view(np.uint8).reshape(block.size, values.dtype.itemsize)
        lengths = np.char.str_len(block)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        text = text[np.arange(values.dtype.itemsize) < lengths[:, None]]
        pieces.append(pa.Array.from_buffers(pa.binary(), block.size, [
            None, pa.py_buffer(offsets), pa.py_buffer(text)]))
    return pa.chunked_array(pieces)
