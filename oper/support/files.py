"""Array files (`.npz`) with versions and checksums, JSON and TOML files, and atomic writes.

An array file is an ordinary NumPy ``.npz`` (a ZIP with a CRC-32 per member) with one extra member,
``header.json``: ``{"kind", "version", "arrays": {name: [dtype, shape]}, "meta": {...}}``. Sizes are
compared with the ZIP directory before memory is allocated, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import struct
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from oper.errors import FileFormatError, InvalidInputError

_HEADER = "header.json"
_NPY = b"\x93NUMPY\x02\x00"  # magic string and version of a ``.npy`` member
_ALLOWED_KINDS = "biuf"  # NumPy dtype kinds that may be stored: bool, int, unsigned, float
_DTYPE = re.compile(r"\|b1|\|[iu]1|[<>](i[248]|u[248]|f[248])")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Exceptions that zipfile raises for truncated, damaged or other files.
_DAMAGE = (
    zipfile.BadZipFile, EOFError, NotImplementedError, OSError, OverflowError, RuntimeError,
    ValueError, struct.error, zlib.error,
)


def datasets_root() -> Path:
    """Return the folder of data set recipes and cards.

    An installed wheel has it inside the package, a checkout next to the package.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "datasets"
    return inside if inside.is_dir() else package.parent / "datasets"


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], uncached: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path` for writing and rename it to `path` on success.

    Readers see either the old or the complete new file. On an error, the temporary file is removed.
    If `path` is a symbolic link, its target is replaced; a pipe or device is written directly.

    Args:
        path: the file to write.
        uncached: remove the file from the page cache, for large files that are not read soon.

    Raises:
        InvalidInputError: `path` is a URL, or has a zero byte.
        OSError: the file cannot be written; names `path` if the disk is full.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb") as file:
            yield file
        return
    check_local(path)
    target = Path(os.path.realpath(path))
    with errors_name(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
            if uncached and hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):  # it is only advice
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        # mkstemp creates files with mode 0600; use the default permissions under the umask.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        with errors_name(path):
            os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        full = disk_full_error(error) if isinstance(error, Exception) else None
        if full is not None and not full.filename:
            raise OSError(full.errno, full.strerror, os.fspath(path)) from error
        raise


def disk_full_error(error: BaseException | None) -> OSError | None:
    """Return the system error in the chain of `error` that reports a full disk or quota, or None.

    Libraries may hide it behind exceptions of their own.
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
    """Create a folder atomically: it appears at the end of the block, or not at all after an error.

    Args:
        what: beginning of error messages.
        output: the folder, which must not exist.

    Yields:
        The folder to fill. It is inside a temporary folder next to `output`, which is removed with
        all other files in it.

    Raises:
        InvalidInputError: `output` is a URL or exists, or its disk is full.
    """
    check_local(output)
    target = Path(output)
    if target.exists():
        raise InvalidInputError(what, "output", str(target), "a folder that does not exist",
                                "choose another one, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
            filled = Path(work) / "out"
            filled.mkdir()
            yield filled
            os.rename(filled, target)
    except OSError as error:
        full = disk_full_error(error)
        if full is None:
            raise
        raise InvalidInputError(what, "output", os.fspath(output),
                                "enough space for it and for temporary files",
                                f"{full.strerror}: free some space, or choose another disk"
                                ) from error


@contextlib.contextmanager
def errors_name(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make system errors inside the block name `path`, instead of a temporary file or no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a name is a URL, such as that of a file in a store, instead of a local path."""
    name = os.fspath(path)
    return isinstance(name, str) and _URL.match(name) is not None


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise InvalidInputError for a URL, which would otherwise create folders such as ``s3:``, and
    for a name with a zero byte, which the system's functions refuse with a ValueError."""
    name = os.fspath(path)
    if "\0" in os.fsdecode(name):
        raise InvalidInputError("cannot use a path", "path", name, "a name without a zero byte",
                                "correct the name")
    if is_url(path):
        raise InvalidInputError(
            "cannot use a URL", "path", name, "a path in a local or mounted file system",
            "leave 'file://' out" if name.startswith("file:") else
            "copy the data to or from a local folder, or mount the store")


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise InvalidInputError unless a file can be written to `path`; for use before long work."""
    check_local(path)
    target = Path(path).absolute()
    if target.exists() and not target.is_file() and not target.is_dir():
        return  # a pipe or device, which is written directly
    folder = next(p for p in target.parents if p.exists())
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInputError("cannot write the result", "file", os.fspath(path),
                                "a file, not a folder, in a writable folder",
                                "choose another path")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse a JSON text.

    Args:
        text: string, or bytes in UTF-8.
        what: beginning of error messages.

    Raises:
        FileFormatError: the text is not JSON, is nested too deeply, or an object repeats a key.
    """
    return _parsed(text, what, "JSON", lambda t: json.loads(t, object_pairs_hook=_without_repeats))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raises ValueError for a repeated key, whose first value `json` drops."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"keys given twice: {sorted({k for k in names if names.count(k) > 1})}")
    return value


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Parse a JSON file; raises as `parse_json`, or OSError if the file cannot be read."""
    return parse_json(Path(path).read_bytes(), what)


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Parse a TOML file; arguments and errors are those of `read_json`."""
    found: dict[str, Any] = _parsed(Path(path).read_bytes(), what, "TOML", tomllib.loads)
    return found


def _parsed(text: str | bytes, what: str, kind: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{what}: {error}, expected {kind}; it is truncated, damaged or of another kind: "
            "regenerate it, or correct it if it was edited by hand") from None


def write_arrays(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    arrays: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    uncached: bool = False,
) -> None:
    """Write named arrays and `meta` to an array file, atomically.

    Args:
        path: the file to write.
        kind: kind of the file, e.g. ``"oper-stats"``; checked on reading.
        version: format version, checked on reading.
        arrays: bool, integer or float arrays of any shape.
        meta: JSON-serializable values.
        uncached: as for `atomic_write`.

    Raises:
        TypeError: an array has another dtype.
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
    """An open array file of `write_arrays`, whose arrays are read one by one.

    Args:
        path: path of the file.
        kind, version: the expected kind and version.

    Attributes:
        names: names of the arrays.
        meta: the values passed to `write_arrays`.

    Raises:
        FileFormatError: the file is truncated, damaged, or of another kind or version.
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, version: int) -> None:
        self._what = f"cannot read {os.fspath(path)!r} as {kind}"
        with damage_as_format_error(self._what), contextlib.ExitStack() as at_failure:
            self._archive = at_failure.enter_context(zipfile.ZipFile(path))
            assert self._archive.fp is not None  # open
            check_sizes(self._archive, self._what, os.fstat(self._archive.fp.fileno()).st_size)
            header = _read_header(self._archive, self._what, kind, version)
            at_failure.pop_all()
        self._described: dict[str, tuple[str, list[int]]] = header["arrays"]
        self.names = list(self._described)
        self.meta: dict[str, Any] = header["meta"]

    def read(self, name: str) -> np.ndarray:
        """Read the array `name`, one of `names`; raises FileFormatError if it is damaged."""
        with damage_as_format_error(self._what):
            return _read_member(self._archive, self._what, name, *self._described[name])

    def close(self) -> None:
        """Close the file; garbage collection of this object closes it, too."""
        self._archive.close()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_arrays(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read all arrays by name, and `meta`, from an array file; raises as `ArrayFile`."""
    with ArrayFile(path, kind, version) as file:
        return {name: file.read(name) for name in file.names}, file.meta


@contextlib.contextmanager
def damage_as_format_error(what: str) -> Iterator[None]:
    """Turn zipfile's exceptions for damaged archives into FileFormatError; `what` begins it."""
    try:
        yield
    except FileFormatError:
        raise
    except _DAMAGE as error:
        # EINVAL is due to damaged offsets; other system errors are not due to the file's contents.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise FileFormatError(
            f"{what}: {error}, expected a complete file; the file is truncated, damaged or "
            "of another kind, regenerate it") from error


def check_sizes(archive: zipfile.ZipFile, what: str, file_bytes: int) -> None:
    """Raise FileFormatError if a ZIP member is compressed or larger than the file."""
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise FileFormatError(what, info.filename, "compressed", "a stored member",
                                  "regenerate it")
        if info.file_size > file_bytes:
            raise FileFormatError(what, f"{info.filename} bytes", info.file_size,
                                  f"<= {file_bytes}, the file's size",
                                  "the file is damaged, regenerate it")


def _member(archive: zipfile.ZipFile, what: str, name: str) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(name)
    except KeyError:
        found = archive.namelist()[:5]
        raise FileFormatError(what, "members", found, f"a member {name!r}",
                              "pass a file that OPER has written") from None


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
                              "regenerate it") from None
    if found_kind != kind:
        raise FileFormatError(what, "kind", found_kind, f"{kind!r}",
                              "pass a file of the expected kind")
    if type(found_version) is not int or found_version != version:  # True == 1
        raise FileFormatError(what, "version", found_version, f"{version}",
                              "regenerate it with this release")
    if not is_complete:
        raise FileFormatError(what, "header", "malformed", "arrays and meta", "regenerate it")
    return header


def _npy_start(dtype: str, shape: Sequence[int], size: int) -> bytes:
    """Return the `size` bytes before the data of a ``.npy`` member, see `numpy.lib.format`."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {tuple(shape)}, }}".encode()
    rest = size - len(_NPY) - 4
    return _NPY + struct.pack("<I", max(rest, 0)) + text.ljust(rest - 1) + b"\n"


def _read_member(
    archive: zipfile.ZipFile, what: str, name: str, dtype: str, shape: list[int]
) -> np.ndarray:
    """Read and verify an array in one pass, which avoids copies by `zipfile` and NumPy."""
    if not _DTYPE.fullmatch(dtype):
        raise FileFormatError(what, f"dtype of {name}", dtype, "bool, integer or float",
                              "regenerate it")
    info, file = _member(archive, what, f"{name}.npy"), cast(io.BufferedReader, archive.fp)
    want = np.dtype(dtype)
    num_bytes = want.itemsize * math.prod(shape)
    expected = _npy_start(dtype, shape, info.file_size - num_bytes)  # with any padding
    file.seek(info.header_offset + 26)
    file.seek(sum(struct.unpack("<2H", file.read(4))), os.SEEK_CUR)  # skip name and extra field
    start = file.read(len(expected))
    if len(expected) != info.file_size - num_bytes or start != expected:
        raise FileFormatError(what, name, (info.file_size, start[:96]),
                              f"{(dtype, shape, num_bytes)}", "regenerate it")
    array = np.empty(shape, want)  # not larger than the file, see `check_sizes`
    data = array.reshape(-1).view(np.uint8)
    if file.readinto(data.data) != num_bytes or (
            zlib.crc32(data.data, zlib.crc32(start)) != info.CRC):
        raise FileFormatError(what, name, "another CRC-32", f"{info.CRC:08x}",
                              "the file is truncated or damaged, regenerate it")
    return array
