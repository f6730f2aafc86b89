"""Whole lines of several log files, plain or gzip, in blocks of bounded size."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from oper.errors import FileFormatError, InvalidInputError, fail

PADDING = 32  # zero bytes after a block, so that a field may be read in fixed-size words
_MAX_LINE_BYTES = 1 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd",
          b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet"}
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole lines of one file.

    Attributes:
        path: the file.
        data: uint8 [size + PADDING]; the last line ends with a line feed also where the file's last
            line does not.
        size: bytes without the padding.
        first_row: number of the first line among all rows of all files (0-based, headers left out).
        first_line: number of the first line in its file (1-based), for messages.
    """

    path: str
    data: np.ndarray
    size: int
    first_row: int
    first_line: int


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which ``day_2`` comes before ``day_10``."""
    return [(0, int(word), "") if word[0] in "0123456789" else (1, 0, word)
            for word in re.findall(r"[0-9]+|[^0-9]+", text)]


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` name, in order; a pattern stands for its matches in natural order.

    Raises:
        InvalidInputError: no input, a pattern without a match, a missing file, a folder, or a file
            named twice.
    """
    what = "cannot read the log"
    paths: list[str] = []
    for name in inputs:
        path = Path(name)
        found = [name] if path.exists() else []
        if not found and any(c in path.name for c in "*?["):
            found = sorted((str(p) for p in path.parent.glob(path.name)), key=natural_key)
        if not found or path.is_dir():
            raise InvalidInputError(
                fail(what, "input", name, "an existing file, or a pattern of files", "correct it"))
        paths += found
    real = [os.path.realpath(p) for p in paths]
    twice = sorted({p for p, r in zip(paths, real, strict=True) if real.count(r) > 1})
    if not paths or twice:
        raise InvalidInputError(
            fail(what, "inputs", twice or paths, "at least one file, each once", "correct them"))
    return paths


@contextlib.contextmanager
def _open(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's text and the raw file below it (whose position is the progress)."""
    with open(path, "rb") as raw:
        start = raw.read(8)
        raw.seek(0)
        kind = next((k for magic, k in _MAGIC.items() if start.startswith(magic)), "plain")
        if kind not in ("plain", "gzip"):
            raise FileFormatError(
                fail(f"cannot read {path!r}", "format", kind, "plain text or gzip", "unpack it"))
        try:
            if kind == "gzip":
                with gzip.GzipFile(fileobj=raw) as text:
                    yield cast(BinaryIO, text), raw
            else:
                yield raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileFormatError(
                fail(f"cannot read {path!r}", "gzip", str(error), "a complete file",
                     "fetch it again")) from None


def count_rows(paths: Sequence[str], header: bool, progress: Progress,
               block_bytes: int = 1 << 22) -> list[int]:
    """Lines of each file, without the header line; `progress` is told of file bytes read."""
    result = []
    for path in paths:
        lines, last = 0, b"\n"
        with _open(path) as (text, raw):
            at = 0
            while piece := text.read(block_bytes):
                lines += piece.count(b"\n")
                last = piece[-1:]
                progress(raw.tell() - at)
                at = raw.tell()
        result.append(max(0, lines + (last != b"\n") - header))
    return result


def read_blocks(paths: Sequence[str], header: str | None, progress: Progress,
                block_bytes: int = 1 << 22) -> Iterator[Block]:
    """All lines of all files, in order.

    Args:
        paths: the files.
        header: the line that each file must begin with; it is left out. None = no header.
        progress: is told of file bytes read.
        block_bytes: about the size of a block.

    Raises:
        FileFormatError: a damaged gzip file, a wrong header, or a line longer than 1 MiB.
    """
    row = 0
    for path in paths:
        line = 1
        with _open(path) as (text, raw):
            rest, at, ended, header_left = b"", 0, False, header is not None
            while not ended:
                piece = text.read(block_bytes)
                progress(raw.tell() - at)
                at = raw.tell()
                ended = not piece
                lines, rest = _whole_lines(path, rest + piece, ended)
                if header_left and lines:
                    lines = _drop_header(path, lines, str(header))
                    header_left, line = False, 2
                if lines:
                    data = np.frombuffer(lines + bytes(PADDING), np.uint8)
                    yield Block(path, data, len(lines), row, line)
                    num_lines = lines.count(b"\n")
                    row += num_lines
                    line += num_lines


def _whole_lines(path: str, data: bytes, ended: bool) -> tuple[bytes, bytes]:
    if ended:
        return (data + b"\n" if data and not data.endswith(b"\n") else data), b""
    cut = data.rfind(b"\n") + 1
    if len(data) - cut > _MAX_LINE_BYTES:
        raise FileFormatError(
            fail(f"cannot read {path!r}", "line_bytes", len(data) - cut, f"<= {_MAX_LINE_BYTES}",
                 "this is no text log, pass the right file"))
    return data[:cut], data[cut:]


def _drop_header(path: str, lines: bytes, header: str) -> bytes:
    first, _, rest = lines.partition(b"\n")
    found = first.rstrip(b"\r").decode("utf-8", "replace")
    if found != header:
        raise FileFormatError(
            fail(f"cannot read {path!r}", "header", found, repr(header), "pass the right file"))
    return rest
