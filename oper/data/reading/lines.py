"""Whole lines of several log files, plain or compressed, in blocks of bounded size."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from oper.data.reading import cuts, store
from oper.errors import FileFormatError, InvalidInputError, fail

MAX_LINE_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # byte order mark
_FEED = 0x0A
_MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd",
          b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet"}
_COMPRESSED = {"gzip": "gzip", "zstd": "zstd", "bzip2": "bz2"}  # how Arrow calls what is unpacked
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of one file that begin in a range of its bytes.

    Attributes:
        path: the file.
        start: first byte; a line that begins earlier belongs to the span before.
        stop: end of the range, None = end of the file. Of a gzip file these are bytes of its text,
            and `oper.data.reading.cuts` has its cut points; other packed files are not cut.
    """

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Whole lines of one span.

    Attributes:
        path: the file.
        data: the lines; each ends with a line feed, also where the file's last line does not.
        first_row: number of the first line in the span (0-based, a header left out).
    """

    path: str
    data: bytes
    first_row: int

    @functools.cached_property
    def num_lines(self) -> int:
        """Lines of the block."""
        return self.data.count(b"\n")


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which ``day_2`` comes before ``day_10``."""
    return [(0, int(word), "") if word[0] in "0123456789" else (1, 0, word)
            for word in re.findall(r"[0-9]+|[^0-9]+", text)]


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` name, in order.

    A pattern stands for its matches and a folder for its files, also those of folders in it (but
    those whose names begin with ``.`` or ``_``), in natural order. Names may be URLs of a store.

    Raises:
        InvalidInputError: no input, a pattern without a match, a missing file, an empty folder, a
            device, a store that does not answer, or a file named twice.
    """
    what = "cannot read the log"
    paths: list[str] = []
    for name in inputs:
        found = (sorted(store.files_below(name), key=natural_key) if store.is_url(name)
                 else _local_files(name))
        if not found:
            raise InvalidInputError(
                fail(what, "input", name, "an existing file, a folder of files, or a pattern",
                     "check the path"))
        for file in found:
            # It is read more than once, and its size is asked for.
            if not store.is_url(file) and not os.path.isfile(file):
                raise InvalidInputError(
                    fail(what, "input", file, "an ordinary file, or a pipe as the only input",
                         "write what comes through it into a file first"))
        paths += found
    real = [p if store.is_url(p) else os.path.realpath(p) for p in paths]
    twice = sorted({p for p, r in zip(paths, real, strict=True) if real.count(r) > 1})
    if not paths or twice:
        raise InvalidInputError(
            fail(what, "inputs", twice or paths, "at least one file, each once",
                 "name every file once"))
    return paths


def _local_files(name: str) -> list[str]:
    """What a name on this machine stands for."""
    path = Path(name)
    if path.is_dir():
        found = [str(p) for p in path.rglob("*") if p.is_file()
                 and store.is_data(str(p.relative_to(path)))]
    elif path.exists():
        return [name]
    elif any(c in path.name for c in "*?["):
        found = [str(p) for p in path.parent.glob(path.name)]
    else:
        return []
    return sorted(found, key=natural_key)


@contextlib.contextmanager
def open_text(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's text and the raw file below it (whose position is the progress)."""
    with store.open_input(path) as raw:
        kind = _kind(raw)
        if kind not in ("plain", *_COMPRESSED):
            raise FileFormatError(
                fail(f"cannot read {path!r}", "format", kind,
                     f"plain text, {', '.join(_COMPRESSED)}", "unpack it"))
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
            raise FileFormatError(
                fail(f"cannot read {path!r}", kind, str(error), "a complete file",
                     "fetch it again")) from None


@contextlib.contextmanager
def _open_span(span: Span) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """`open_text` for a span: what `Span.start` counts can be sought in the first of the files."""
    if (span.start or span.stop is not None) and _kind_of(span.path) == "gzip":
        with cuts.open_text(span.path) as text:
            yield text, text
    else:
        with open_text(span.path) as files:
            yield files


def _kind(raw: BinaryIO) -> str:
    """How a file is packed, by its first bytes; it stands at its beginning afterwards."""
    start = raw.read(8)
    raw.seek(0)
    return next((k for magic, k in _MAGIC.items() if start.startswith(magic)), "plain")


def _kind_of(path: str) -> str:
    with store.open_input(path) as file:
        return _kind(file)


def first_line(path: str, encoding: str = "utf-8") -> str:
    """The first line of a file without its end (and a byte order mark); empty for an empty file."""
    with open_text(path) as (text, _):
        line = text.readline(MAX_LINE_BYTES).removeprefix(_MARK)
    return line.rstrip(b"\r\n").decode(encoding, "replace")


def is_empty(path: str) -> bool:
    """Whether a file holds no text: no byte, packed or not, or a byte order mark only."""
    with open_text(path) as (text, _):
        return not text.read(len(_MARK) + 1).removeprefix(_MARK)


def spans_of(path: str, span_bytes: int | None, num_threads: int = 1) -> list[Span]:
    """A file cut into spans of about `span_bytes` of text; None = not cut.

    A packed file is cut only where it is by gzip and itself larger than that: one pass by
    `num_threads` threads then notes its cut points, see `oper.data.reading.cuts`.
    """
    size = store.size(path)
    if span_bytes is None or size <= span_bytes:
        return [Span(path)]
    kind, end = _kind_of(path), None
    if kind != "plain":
        if kind != "gzip" or not cuts.make(path, num_threads):
            return [Span(path)]
        size = end = cuts.text_bytes(path)
    count = max(1, -(-size // span_bytes))
    starts = [size * k // count for k in range(count)]
    return [Span(path, a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]


@dataclass(frozen=True, slots=True)
class Quoting:
    """How fields may hold line feeds: inside `quote`s, of which an `escape` takes the meaning."""

    quote: str = ""
    escape: str = ""


def read_blocks(span: Span, header: bool, progress: Progress, quoting: Quoting | None = None,
                block_bytes: int = 1 << 21) -> Iterator[Block]:
    """All lines of a span, in order.

    Args:
        span: file and range; one that does not begin the file begins after a line feed.
        header: leave out the first line of the file.
        progress: is told of file bytes read.
        quoting: keeps records whole that hold line feeds.
        block_bytes: about the size of a block.

    Raises:
        FileFormatError: a damaged gzip file, or a line (record) longer than 1 MiB.
    """
    row = 0
    for lines in read_lines(span, header, progress, quoting, block_bytes):
        block = Block(span.path, bytes(lines), row)
        yield block
        row += block.num_lines


def read_lines(span: Span, header: bool, progress: Progress, quoting: Quoting | None = None,
               block_bytes: int = 1 << 19) -> Iterator[memoryview]:
    """The text of the blocks of `read_blocks`, which nobody has counted the lines of.

    All blocks lie in the same memory, so that it stays in the processor's cache: each is good until
    the next one is asked for.
    """
    quoting = quoting if quoting and quoting.quote else None
    # A line that the block before left over, the block, and the end of the span's last line.
    memory = bytearray(MAX_LINE_BYTES + block_bytes + 2 * MAX_LINE_BYTES + 1)
    view = memoryview(memory)
    with _open_span(span) as (text, raw):
        left = _seek(text, raw, span)
        at, size, ended = raw.tell(), 0, False
        skip = header and span.start == 0
        first = span.start == 0
        while not ended:
            num = _fill(text, view, size, block_bytes if left is None else min(block_bytes, left))
            if left is not None:
                left -= num
                if num and left == 0 and memory[size + num - 1] != _FEED:
                    line = text.readline(2 * MAX_LINE_BYTES)  # the last line begins inside
                    view[size + num:size + num + len(line)] = line
                    num += len(line)
            progress(raw.tell() - at)
            at = raw.tell()
            ended = not num
            begin, size = 0, size + num
            if first:
                begin, first = len(_MARK) * memory.startswith(_MARK), False
            if ended and size > begin and memory[size - 1] != _FEED:
                memory[size] = _FEED
                size += 1
            cut = size if ended else _whole_lines(span.path, memory, (begin, size), quoting)
            if skip and cut > begin:
                begin, skip = memory.index(b"\n", begin, cut) + 1, False
            if cut > begin:
                yield view[begin:cut]
            size -= cut
            view[:size] = view[cut:cut + size]


def _fill(text: BinaryIO, view: memoryview, size: int, count: int) -> int:
    """Read at most `count` bytes to place `size` on; 0 at the end of the file only."""
    return cast(io.BufferedIOBase, text).readinto(view[size:size + count]) if count else 0


def _seek(text: BinaryIO, raw: BinaryIO, span: Span) -> int | None:
    """Go to the first line that begins in the span; bytes left in it, None = all of the file."""
    if span.start:
        raw.seek(span.start - 1)
        text.readline()  # to the end of the line that holds the byte before
    return None if span.stop is None else max(0, span.stop - raw.tell())


def line_of(span: Span, row: int, header: bool) -> int:
    """Number in its file (1-based) of the line that is row `row` of a span."""
    lines = row + 1 + (header and span.start == 0)
    if span.start:
        with _open_span(span) as (file, _):
            left = span.start
            while left and (piece := file.read(min(left, 1 << 22))):
                lines += piece.count(b"\n")
                left -= len(piece)
            file.seek(span.start - 1)
            lines += file.read(1) != b"\n"
    return lines


def _whole_lines(path: str, memory: bytearray, part: tuple[int, int], quoting: Quoting | None
                 ) -> int:
    """Where the whole lines (records) of a part of the memory end."""
    begin, end = part
    cut = max(begin, memory.rfind(b"\n", begin, end) + 1)
    if quoting is not None:
        is_open = _is_open(memory[begin:cut], quoting)
        while cut > begin and is_open:  # back to the last line feed that stands outside of quotes
            stop, cut = cut, max(begin, memory.rfind(b"\n", begin, cut - 1) + 1)
            is_open ^= _is_open(memory[cut:stop], quoting)
    if end - cut > MAX_LINE_BYTES:
        raise FileFormatError(
            fail(f"cannot read {path!r}", "line_bytes", end - cut, f"<= {MAX_LINE_BYTES}",
                 "close the quote that stays open, or pass a text log"))
    return cut


def _is_open(data: bytearray, quoting: Quoting) -> bool:
    """Whether `data` holds an odd number of quotes."""
    if quoting.escape:
        escape = quoting.escape.encode()
        data = data.replace(escape * 2, b"").replace(escape + quoting.quote.encode(), b"")
    return data.count(quoting.quote.encode()) % 2 == 1
