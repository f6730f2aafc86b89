"""Versioned, checked files: array containers (`.npz`), JSON and TOML, atomic writes.

An array file is an ordinary NumPy ``.npz`` (a ZIP with a CRC-32 per member) with one extra member,
``header.json``: ``{"kind", "version", "arrays": {name: [dtype, shape]}, "meta": {...}}``. Sizes are
checked against the ZIP directory before anything is allocated, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import math
import mmap
import os
import re
import struct
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from oper.errors import FileFormatError, InvalidInputError

_HEADER = "header.json"
_NPY = b"\x93NUMPY\x02\x00"  # begins a member, with the version of its form
_ALLOWED_KINDS = "biuf"  # NumPy dtype kinds that may be stored: bool, int, unsigned, float
_DTYPE = re.compile(r"\|b1|\|[iu]1|[<>](i[248]|u[248]|f[248])")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What zipfile and its helpers raise on truncated, damaged or foreign files.
_DAMAGE = (
    zipfile.BadZipFile, EOFError, NotImplementedError, OSError, OverflowError, RuntimeError,
    ValueError, struct.error, zlib.error,
)


def datasets_root() -> Path:
    """The folder of data set recipes and cards, from a wheel or a checkout.

    An installed wheel has it inside the package, a checkout next to the package.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "datasets"
    return inside if inside.is_dir() else package.parent / "datasets"


class _Uncached:
    """A file that is written past the page cache, front to back.

    The cache would cost a copy, new pages, and later the kernel's work of writing them, on cores
    that other processes use. Instead, blocks of one aligned buffer are written directly
    (``O_DIRECT`` of open(2)). The remainder at the end, and everything on a file system without
    direct writes, is written the usual way.
    """

    _BLOCK = 1 << 22  # a multiple of what any file system aligns
    _spare: ClassVar[list[np.ndarray]] = []  # kept: fresh pages cost more than writing them

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._block = self._memory()
        self._used = 0
        self._is_direct = False
        with contextlib.suppress(OSError):
            self._go(True)

    @classmethod
    def _memory(cls) -> np.ndarray:
        with contextlib.suppress(IndexError):
            return cls._spare.pop()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not shared with forked children
        return np.frombuffer(mmap.mmap(-1, cls._BLOCK, flags=flags), np.uint8)  # of whole pages

    def _go(self, direct: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        others = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~flag
        fcntl.fcntl(self._fd, fcntl.F_SETFL, others | (flag if direct else 0))
        self._is_direct = direct

    def write(self, data: Any) -> int:
        """Write all bytes of a buffer; their number, as a file's `write` returns it."""
        raw = np.frombuffer(data, np.uint8)
        done = 0
        while done < raw.size:
            some = raw[done:done + self._BLOCK - self._used]
            self._block[self._used:self._used + some.size] = some
            self._used += some.size
            done += some.size
            if self._used == self._BLOCK:
                self._drain()
        return raw.size

    def flush(self) -> None:
        """Give the rest to the system. What comes after it is no longer direct."""
        if self._is_direct:
            self._go(False)
        self._drain()

    def close(self) -> None:
        """Nothing more is written; the file itself stays open."""
        if not self._spare:
            self._spare.append(self._block)
        del self._block

    def _drain(self) -> None:
        done = 0
        while done < self._used:
            try:
                done += os.write(self._fd, self._block[done:self._used].data)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._go(False)  # another alignment than this one, or the rest of a short write
        self._used = 0


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], uncached: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary sibling of `path` for writing and rename it over `path` on success.

    A reader sees the old file or the whole new one. On an error the temporary file is removed. A
    symbolic link stays and its target is replaced; a pipe or device is written directly.

    Args:
        path: the file to write.
        uncached: write past the page cache, for large files that are not read soon. The file object
            then has only `write` and `flush`.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb") as file:
            yield file
        return
    check_local(path)
    target = Path(os.path.realpath(path))
    with named(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as opened, (
                contextlib.closing(_Uncached(fd)) if uncached else opened) as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(fd)
        # mkstemp creates 0600; an ordinary file has the permissions that the umask leaves.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        with named(path):
            os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        full = no_room(error) if isinstance(error, Exception) else None
        if full is not None and not full.filename:
            raise OSError(full.errno, full.strerror, os.fspath(path)) from error
        raise


def no_room(error: BaseException | None) -> OSError | None:
    """The error of the system behind `error` that reports a full disk or quota; None if there is
    none.

    A library that writes a file may raise an exception of its own that hides the cause.
    """
    for _ in range(20):  # chains may be circular
        if error is None:
            break
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def new_folder(what: str, output: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder that appears complete, at the end of the block, or not at all.

    Args:
        what: how an error message begins.
        output: the folder, which must not exist.

    Yields:
        The folder to fill, in a temporary folder next to `output`; other files in the temporary
        folder are removed.

    Raises:
        InvalidInputError: `output` is a URL or exists, or its disk is full.
    """
    check_local(output)
    target = Path(output)
    if target.exists():
        raise InvalidInputError(what, "output", str(target), "a new folder", "choose another one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
            filled = Path(work) / "out"
            filled.mkdir()
            yield filled
            os.rename(filled, target)
    except OSError as error:
        full = no_room(error)
        if full is None:
            raise
        raise InvalidInputError(what, "output", os.fspath(output),
                                "enough space for it and for temporary files",
                                f"{full.strerror}: free some space, or choose another disk"
                                ) from error


@contextlib.contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make system errors inside the block name the user's path instead of a temporary file or none.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise InvalidInputError for a URL, since as a path it would create folders such as ``s3:``.
    """
    name = os.fspath(path)
    if isinstance(name, str) and _URL.match(name):
        raise InvalidInputError(
            "cannot use a URL", "path", name, "a path of this machine's file systems",
            "leave 'file://' out" if name.startswith("file:") else
            "copy the data to or from a local folder, or mount the store")


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise InvalidInputError unless a file can be written there; called before long work."""
    check_local(path)
    target = Path(path).absolute()
    if target.exists() and not target.is_file() and not target.is_dir():
        return  # a pipe or device, which is written itself
    folder = next(p for p in target.parents if p.exists())
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInputError("cannot write the result", "file", os.fspath(path),
                                "a file name in a folder that can be written",
                                "choose another")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def parse_json(text: str | bytes, what: str, pairs_hook: Callable[..., Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        text: text, or bytes in UTF-8.
        what: how an error begins.
        pairs_hook: ``object_pairs_hook`` of `json.loads`; it may refuse its argument with
            ValueError.

    Raises:
        FileFormatError: the text is not JSON, or nested too deeply.
    """
    return _parsed(text, what, "JSON", lambda t: json.loads(t, object_pairs_hook=pairs_hook))


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """The value of a JSON file, as `parse_json`; raises OSError where it cannot be read."""
    return parse_json(Path(path).read_bytes(), what)


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The tables of a TOML file; arguments and errors as `read_json`."""
    found: dict[str, Any] = _parsed(Path(path).read_bytes(), what, "TOML", tomllib.loads)
    return found


def _parsed(text: str | bytes, what: str, kind: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{what}: {error}, expected {kind}; it is truncated, damaged or of another kind: "
            "write it again, or correct it if it was edited by hand") from None


def write_arrays(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    arrays: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    uncached: bool = False,
) -> None:
    """Write named arrays and `meta` as one array file, atomically.

    Args:
        path: the file to write.
        kind: what the file is, e.g. ``"oper-stats"``; checked on reading.
        version: format version, checked on reading.
        arrays: bool, integer or float arrays of any shape.
        meta: JSON-serializable values.
        uncached: as for `atomic_write`.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in _ALLOWED_KINDS:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, which is not storable")
    header = {
        "kind": kind,
        "version": version,
        "arrays": {k: [a.dtype.str, list(a.shape)] for k, a in arrays.items()},
        "meta": dict(meta),
    }
    with atomic_write(path, uncached) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header))
        for name, array in arrays.items():
            array = np.asarray(array, order="C")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_2_0(
                    member, np.lib.format.header_data_from_array_1_0(array))
                member.write(array.reshape(-1).view(np.uint8).data)


class ArrayFile:
    """An open array file, as `write_arrays` makes it, whose arrays are read on request.

    Args:
        path: path of the file.
        kind, version: the expected kind and version.

    Attributes:
        names: names of its arrays.
        meta: the `meta` mapping.

    Raises:
        FileFormatError: the file is truncated, damaged, or of another kind or version.
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, version: int) -> None:
        self._what = f"cannot read {os.fspath(path)!r} as {kind}"
        with damage_told(self._what), contextlib.ExitStack() as at_failure:
            self._archive = at_failure.enter_context(zipfile.ZipFile(path))
            assert self._archive.fp is not None  # open
            check_sizes(self._archive, self._what, os.fstat(self._archive.fp.fileno()).st_size)
            header = _read_header(self._archive, self._what, kind, version)
            at_failure.pop_all()
        self._described: dict[str, tuple[str, list[int]]] = header["arrays"]
        self.names = list(self._described)
        self.meta: dict[str, Any] = header["meta"]

    def read(self, name: str) -> np.ndarray:
        """Read the array `name`; raises FileFormatError if it is damaged."""
        with damage_told(self._what):
            return _read_member(self._archive, self._what, name, *self._described[name])

    def close(self) -> None:
        """Close the file; garbage collection of this object also does."""
        self._archive.close()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_arrays(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All arrays of an array file by name, and its `meta` mapping; raises as `ArrayFile`."""
    with ArrayFile(path, kind, version) as file:
        return {name: file.read(name) for name in file.names}, file.meta


@contextlib.contextmanager
def damage_told(what: str) -> Iterator[None]:
    """Turn what zipfile raises on a damaged archive into a FileFormatError that begins with `what`.
    """
    try:
        yield
    except FileFormatError:
        raise
    except _DAMAGE as error:
        # Damaged offsets make the library seek to impossible places; anything else that the
        # system reports is not the file's fault.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise FileFormatError(
            f"{what}: {error}, expected a complete file; the file is truncated, damaged or "
            "of another kind, write it again") from error


def check_sizes(archive: zipfile.ZipFile, what: str, file_bytes: int) -> None:
    """Raise FileFormatError where a ZIP directory lists more bytes than the file can hold."""
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise FileFormatError(what, info.filename, "compressed", "a stored member",
                                  "write it again")
        if info.file_size > file_bytes:
            raise FileFormatError(what, f"{info.filename} bytes", info.file_size,
                                  f"<= {file_bytes}, the file's size",
                                  "the file is damaged, write it again")


def _member(archive: zipfile.ZipFile, what: str, name: str) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(name)
    except KeyError:
        found = archive.namelist()[:5]
        raise FileFormatError(what, "members", found, f"a member {name!r}",
                              "pass an OPER file") from None


def _read_header(archive: zipfile.ZipFile, what: str, kind: str, version: int) -> dict[str, Any]:
    header: dict[str, Any] = parse_json(archive.read(_member(archive, what, _HEADER)), what)
    try:
        found_kind, found_version = header["kind"], header["version"]
        is_complete = isinstance(header["meta"], dict) and all(
            isinstance(dtype, str)
            and isinstance(shape, list)
            and all(type(size) is int and size >= 0 for size in shape)
            for dtype, shape in header["arrays"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(what, "header", str(error), "a JSON header",
                              "write it again") from None
    if found_kind != kind:
        raise FileFormatError(what, "kind", found_kind, f"{kind!r}",
                              "pass a file of the expected kind")
    if type(found_version) is not int or found_version != version:  # true is no version 1
        raise FileFormatError(what, "version", found_version, f"{version}",
                              "write it again with this release")
    if not is_complete:
        raise FileFormatError(what, "header", "malformed", "arrays and meta", "write it again")
    return header


def _npy_start(dtype: str, shape: Sequence[int], size: int) -> bytes:
    """The `size` bytes that precede the data of a ``.npy`` member, see `numpy.lib.format`."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {tuple(shape)}, }}".encode()
    rest = size - len(_NPY) - 4
    return _NPY + struct.pack("<I", max(rest, 0)) + text.ljust(rest - 1) + b"\n"


def _read_member(
    archive: zipfile.ZipFile, what: str, name: str, dtype: str, shape: list[int]
) -> np.ndarray:
    """Read an array in one pass, without what `zipfile` and NumPy copy and parse on the way."""
    if not _DTYPE.fullmatch(dtype):
        raise FileFormatError(what, f"dtype of {name}", dtype, "bool, integer or float",
                              "write it again")
    info, file = _member(archive, what, f"{name}.npy"), cast(io.BufferedReader, archive.fp)
    want = np.dtype(dtype)
    num_bytes = want.itemsize * math.prod(shape)
    expected = _npy_start(dtype, shape, info.file_size - num_bytes)  # padded as it may be
    file.seek(info.header_offset + 26)
    file.seek(sum(struct.unpack("<2H", file.read(4))), os.SEEK_CUR)  # behind name and extra field
    start = file.read(len(expected))
    if len(expected) != info.file_size - num_bytes or start != expected:
        raise FileFormatError(what, name, (info.file_size, start[:96]),
                              f"{(dtype, shape, num_bytes)}", "write it again")
    array = np.empty(shape, want)  # no larger than the file
    data = array.reshape(-1).view(np.uint8)
    if file.readinto(data.data) != num_bytes or (
            zlib.crc32(data.data, zlib.crc32(start)) != info.CRC):
        raise FileFormatError(what, name, "another CRC-32", f"{info.CRC:08x}",
                              "the file is truncated or damaged, write it again")
    return array
