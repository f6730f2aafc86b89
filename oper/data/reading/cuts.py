"""Seek points of gzip files, from which parts of a file can be decompressed in parallel.

Decompression can begin at a position if the 32 KiB of text before it are known. One pass over a
file stores this window, compressed, for every 4 MiB of text in a hidden index file next to it, in
gztool's format, which rapidgzip writes and reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from oper.data.reading import store
from oper.errors import FileFormatError, OperError
from oper.support.locks import exclusive

_log = logging.getLogger(__name__)


def _index(path: str) -> Path:
    """Return the path of a file's index, whose name contains the file's size and mtime."""
    size, changed = store.stamp(path)
    return Path(path).with_name(f".{Path(path).name}.{size:x}-{changed:x}.gzidx")


def make(path: str, num_threads: int = 1) -> bool:
    """Make the index of a gzip file unless it exists; returns whether it exists now.

    No index is made without rapidgzip, for a file in a store, in a read-only folder, or with
    several members or damage. Concurrent calls for one file wait for the first one.
    """
    if store.is_url(path):
        return False
    index = _index(path)
    if index.exists():
        return True
    if importlib.util.find_spec("rapidgzip") is None:
        _log.warning("%s is read by one process; pip install 'oper[data]' lets several processes "
                     "read it in parallel", path)
        return False
    draft = index.with_suffix(f".{os.getpid()}")
    try:
        with exclusive(index.with_suffix(".lock")):
            try:
                if not index.exists() and _write(path, draft, num_threads):
                    os.replace(draft, index)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is read by one process: its index cannot be written next to it (%s)", path,
                     error)
    return index.exists()


def _write(path: str, target: Path, num_threads: int) -> bool:
    """Decompress a file and write its index; returns False for damage or several gzip members."""
    import rapidgzip  # type: ignore[import-not-found]

    _log.info("%s is decompressed once to make an index for parallel reading", path)
    try:
        with rapidgzip.open(path, parallelization=num_threads) as file:
            piece = bytearray(1 << 22)
            while file.readinto(piece):
                pass
            text_bytes = file.tell()
            file.export_index(str(target), rapidgzip.IndexFormat.GZTOOL)
    except (RuntimeError, ValueError):  # the error is reported when the file is read
        return False
    # rapidgzip accepts truncated files; the last 4 bytes are the text's size modulo 2^32.
    with open(path, "rb") as raw:
        raw.seek(-4, os.SEEK_END)
        if int.from_bytes(raw.read(), "little") != text_bytes % (1 << 32):
            return False
    return True


def text_bytes(path: str) -> int:
    """Return the decompressed size in bytes of a file whose index `make` has made."""
    with open_text(path) as text:
        return text.seek(0, os.SEEK_END)


@contextlib.contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """Open the decompressed text, seekable, of a file whose index `make` has made.

    Raises:
        FileFormatError: the file or its index is damaged.
    """
    import rapidgzip

    index = _index(path)
    try:
        with rapidgzip.open(path, parallelization=1) as file:
            file.import_index(str(index))
            with io.BufferedReader(file, 1 << 20) as text:
                yield cast(BinaryIO, text)
    except OperError:
        raise
    except (RuntimeError, ValueError) as error:
        raise FileFormatError(f"cannot read {path!r}", "gzip", str(error)[:200], "a complete file",
                              f"fetch it again, and remove {str(index)!r}") from None
