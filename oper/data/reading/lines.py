"""Read plain or compressed log files as blocks of complete lines, of bounded size."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa

from oper.data.reading import cuts, store
from oper.data.recipe import Layout
from oper.errors import FileFormatError, require

MAX_LINE_BYTES = 1 << 20
MARK = b"\xef\xbb\xbf"  # byte order mark
_FEED = 0x0A
_MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd",
          b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet"}
_COMPRESSED = {"gzip": "gzip", "zstd": "zstd", "bzip2": "bz2"}  # pyarrow's name by format
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Unit:
    """A file or a part of one, which is read as one task.

    Attributes:
        path: the file.
        layout: name of its layout in the recipe.
        start: first row group of a Parquet file, or first byte of text. The unit has the lines that
            begin in its range. For a gzip file, positions are those of the decompressed text.
        stop: end of the range (exclusive); None = the end of the file.
    """

    path: str
    layout: str = ""
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive complete lines of one unit.

    Attributes:
        path: the file.
        data: the lines, each with a line feed (added to the file's last line if it has none).
        first_row: index of the first line in the unit (0-based, not counting a header).
    """

    path: str
    data: bytes
    first_row: int

    @functools.cached_property
    def num_lines(self) -> int:
        return int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == _FEED))


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers: ``day_2`` comes before ``day_10``."""
    return [(0, int(word), "") if word[0] in "0123456789" else (1, 0, word)
            for word in re.findall(r"[0-9]+|[^0-9]+", text)]


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """Expand names, patterns, folders and URLs to the paths of files, in order.

    A pattern stands for its matches; a folder stands for the files in it and its subfolders except
    names that begin with ``.`` or ``_``. Both are expanded in the order of `natural_key`.

    Raises:
        InvalidInputError: there is no input, a pattern has no match, a file is missing or named
            twice, a folder is empty, an input is not a regular file, or a store does not respond.
    """
    what = "cannot read the log"
    paths: list[str] = []
    for name in inputs:
        found = (sorted(store.files_below(name), key=natural_key) if store.is_url(name)
                 else _local_files(name))
        require(what, "check the path",
                ("input", name, bool(found), "an existing file, a folder of files, or a pattern"))
        # Files are read more than once, and their sizes must be known.
        require(what, "write its data to a file first",
                *(("input", file, store.is_url(file) or os.path.isfile(file),
                   "a regular file, or a pipe as the only input") for file in found))
        paths += found
    real = [p if store.is_url(p) else os.path.realpath(p) for p in paths]
    times = Counter(real)
    twice = sorted({p for p, r in zip(paths, real, strict=True) if times[r] > 1})
    require(what, "name every file once",
            ("inputs", twice or paths, bool(paths) and not twice, "at least one file, each once"))
    return paths


def _local_files(name: str) -> list[str]:
    """Expand a local file, folder or pattern; empty if nothing matches."""
    path = Path(name)
    if path.is_dir():
        found = [str(p) for p in path.rglob("*") if p.is_file()
                 and store.is_data(str(p.relative_to(path)))]
    elif path.exists():
        return [name]
    else:
        # As in a shell, folders may be patterns too, and `*` matches no hidden files, such as the
        # indices of gzip files (`oper.data.reading.cuts`).
        folder = str(path.parent)
        inside = glob.escape(folder) if path.parent.is_dir() else folder
        found = [str(Path(p)) for p in glob.glob(os.path.join(inside, path.name))]
    return sorted(found, key=natural_key)


@contextlib.contextmanager
def open_text(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file's decompressed text, and the raw file, whose position measures progress.

    Raises FileFormatError if the file is damaged or compressed in another way.
    """
    with store.open_input(path) as raw:
        kind = _kind(raw)
        if kind not in ("plain", *_COMPRESSED):
            raise FileFormatError(f"cannot read {path!r}", "format", kind,
                                  f"plain text, {', '.join(_COMPRESSED)}", "decompress it")
        try:
            if kind == "plain":
                yield raw, raw
            elif kind == "gzip":
                with gzip.GzipFile(fileobj=raw) as text:
                    yield cast(BinaryIO, text), raw
            else:
                stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), _COMPRESSED[kind])
                with io.BufferedReader(stream, 1 << 20) as text:
                    yield cast(BinaryIO, text), raw
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            if kind == "plain" or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise FileFormatError(f"cannot read {path!r}", kind, str(error), "a complete file",
                                  "fetch it again") from None


@contextlib.contextmanager
def _open_unit(unit: Unit) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a unit's file as `open_text` does; for a part of a file, both streams are seekable."""
    if (unit.start or unit.stop is not None) and _kind_of(unit.path) == "gzip":
        with cuts.open_text(unit.path) as text:
            yield text, text
    else:
        with open_text(unit.path) as files:
            yield files


def _kind(raw: BinaryIO) -> str:
    """Detect the compression of an open file by its first bytes, and rewind it."""
    start = raw.read(8)
    raw.seek(0)
    return next((k for magic, k in _MAGIC.items() if start.startswith(magic)), "plain")


def _kind_of(path: str) -> str:
    with store.open_input(path) as file:
        return _kind(file)


def first_line(path: str, encoding: str = "utf-8") -> str:
    """Read a file's first line without line end and byte order mark; empty for an empty file."""
    with open_text(path) as (text, _):
        line = text.readline(MAX_LINE_BYTES).removeprefix(MARK)
    return line.rstrip(b"\r\n").decode(encoding, "replace")


def is_empty(path: str) -> bool:
    """Whether a file, decompressed, has no text except possibly a byte order mark."""
    with open_text(path) as (text, _):
        return not text.read(len(MARK) + 1).removeprefix(MARK)


def units_of_text(path: str, layout: Layout, unit_bytes: int, num_threads: int = 1) -> list[Unit]:
    """Divide a text file into units of about `unit_bytes` bytes of text each.

    One unit each are files with quoted fields, files compressed other than by gzip, and files of
    bags whose line numbers are the users. A gzip file larger than `unit_bytes` is first indexed
    with `num_threads` threads (`oper.data.reading.cuts`).
    """
    size = store.size(path)
    if layout.quote or layout.counts_lines or size <= unit_bytes:
        return [Unit(path, layout.name)]
    kind, end = _kind_of(path), None
    if kind != "plain":
        if kind != "gzip" or not cuts.make(path, num_threads):
            return [Unit(path, layout.name)]
        size = end = cuts.text_bytes(path)
    count = max(1, -(-size // unit_bytes))
    starts = [size * k // count for k in range(count)]
    return [Unit(path, layout.name, a, b)
            for a, b in zip(starts, [*starts[1:], end], strict=True)]


def first_of_each_file(units: Sequence[Unit]) -> list[Unit]:
    return list({u.path: u for u in reversed(units)}.values())[::-1]


def read_blocks(unit: Unit, layout: Layout, progress: Progress = lambda _: None,
                block_bytes: int = 1 << 21) -> Iterator[Block]:
    """Yield all lines of a unit, in order.

    Args:
        unit: file and range.
        layout: defines whether the file's first line is a header, which is skipped, and the quotes;
            quoted records that contain line feeds are not divided between blocks.
        progress: called with the number of file bytes read since the last call.
        block_bytes: approximate size of a block.

    Raises:
        FileFormatError: a gzip file is damaged, or a line (record) is longer than 1 MiB.
    """
    # Room for an incomplete line of the previous block, a block, and the rest of the last line.
    memory = bytearray(MAX_LINE_BYTES + block_bytes + 2 * MAX_LINE_BYTES + 1)
    view = memoryview(memory)
    with _open_unit(unit) as (text, raw):
        left = _seek(text, raw, unit)
        at, size, row, ended = raw.tell(), 0, 0, False
        first = unit.start == 0
        skip = layout.header and first
        while not ended:
            num = _fill(text, view, size, block_bytes if left is None else min(block_bytes, left))
            if left is not None:
                left -= num
                if num and left == 0 and memory[size + num - 1] != _FEED:
                    line = text.readline(2 * MAX_LINE_BYTES)  # rest of the unit's last line
                    view[size + num:size + num + len(line)] = line
                    num += len(line)
            progress(raw.tell() - at)
            at = raw.tell()
            ended = not num
            begin, size = 0, size + num
            if first:
                begin, first = len(MARK) * memory.startswith(MARK), False
            if ended and size > begin and memory[size - 1] != _FEED:
                memory[size] = _FEED
                size += 1
            cut = size if ended else _whole_lines(unit.path, memory, (begin, size), layout)
            if skip and cut > begin:
                begin, skip = memory.index(b"\n", begin, cut) + 1, False
            if cut > begin:
                block = Block(unit.path, bytes(view[begin:cut]), row)
                yield block
                row += block.num_lines
            size -= cut
            view[:size] = view[cut:cut + size]


def _fill(text: BinaryIO, view: memoryview, size: int, count: int) -> int:
    """Read up to `count` bytes into `view[size:]`; returns their number, 0 at the file's end."""
    return cast(io.BufferedIOBase, text).readinto(view[size:size + count]) if count else 0


def _seek(text: BinaryIO, raw: BinaryIO, unit: Unit) -> int | None:
    """Seek to the unit's first line; returns the bytes left in the unit, None = up to the end."""
    if unit.start:
        raw.seek(unit.start - 1)
        text.readline()  # skips the line that contains the byte before the unit
    return None if unit.stop is None else max(0, unit.stop - raw.tell())


def line_of(unit: Unit, layout: Layout, row: int) -> int:
    """Return the line number in the file (1-based) of row `row` (0-based) of a unit."""
    lines = row + 1 + (layout.header and unit.start == 0)
    if unit.start:
        with _open_unit(unit) as (file, _):
            left = unit.start
            while left and (piece := file.read(min(left, 1 << 22))):
                lines += piece.count(b"\n")
                left -= len(piece)
            file.seek(unit.start - 1)
            lines += file.read(1) != b"\n"
    return lines


def _whole_lines(path: str, memory: bytearray, part: tuple[int, int], layout: Layout) -> int:
    """Return the end of the last complete line (record) in `memory[begin:end]`; `begin` if none.

    Raises FileFormatError if the rest is longer than `MAX_LINE_BYTES`.
    """
    begin, end = part
    cut = max(begin, memory.rfind(b"\n", begin, end) + 1)
    if layout.quote:
        is_open = _is_open(memory[begin:cut], layout)
        while cut > begin and is_open:  # back to the last line feed outside of quotes
            stop, cut = cut, max(begin, memory.rfind(b"\n", begin, cut - 1) + 1)
            is_open ^= _is_open(memory[cut:stop], layout)
    if end - cut > MAX_LINE_BYTES:
        raise FileFormatError(f"cannot read {path!r}", "line_bytes", end - cut,
                              f"<= {MAX_LINE_BYTES}",
                              "close an unclosed quote, or pass a text file")
    return cut


def _is_open(data: bytearray, layout: Layout) -> bool:
    """Whether `data` contains an odd number of quotes, not counting escaped ones."""
    quote, escape = layout.quote.encode(), layout.escape.encode()
    if escape:
        data = data.replace(escape * 2, b"").replace(escape + quote, b"")
    return data.count(quote) % 2 == 1
