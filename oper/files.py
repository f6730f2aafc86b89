"""Versioned, checked files: array containers (`.npz`) and atomic text or binary writes.

An array file is an ordinary NumPy ``.npz`` (a ZIP with a CRC-32 per member) with one extra member,
``header.json``: ``{"kind", "version", "arrays": {name: [dtype, shape]}, "meta": {...}}``. Sizes are
checked against the ZIP directory before anything is allocated, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from oper.errors import FileFormatError, fail

_HEADER = "header.json"
_MAX_HEADER_BYTES = 64 << 20
_ALLOWED_KINDS = "biuf"  # NumPy dtype kinds that may be stored: bool, int, unsigned, float


def datasets_root() -> Path:
    """The folder of data set recipes and cards, wherever this package runs from.

    An installed wheel carries it inside the package; a checkout has it beside the package.
    """
    package = Path(__file__).resolve().parent
    inside = package / "datasets"
    return inside if inside.is_dir() else package.parent / "datasets"


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary sibling of `path` for writing and rename it over `path` on success.

    A reader sees the old file or the whole new one. On an error the temporary file is removed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates 0600; an ordinary file has the permissions that the umask leaves.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_arrays(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    arrays: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
) -> None:
    """Write named arrays and JSON-able `meta` as one array file, atomically.

    Args:
        path: the file to write.
        kind: what the file is, e.g. ``"oper-stats"``; checked on reading.
        version: format version, checked on reading.
        arrays: bool, integer or float arrays of any shape.
        meta: JSON-able values.
    """
    header = {
        "kind": kind,
        "version": version,
        "arrays": {k: [a.dtype.str, list(a.shape)] for k, a in arrays.items()},
        "meta": dict(meta),
    }
    with (
        atomic_write(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        archive.writestr(_HEADER, json.dumps(header))
        for name, array in arrays.items():
            if array.dtype.kind not in _ALLOWED_KINDS:
                raise TypeError(f"array {name!r} has dtype {array.dtype}, which is not storable")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(
                    member, np.ascontiguousarray(array), version=(2, 0), allow_pickle=False
                )


def read_arrays(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read an array file written by `write_arrays`.

    Returns:
        The arrays by name and the `meta` mapping.

    Raises:
        FileFormatError: truncated, damaged, foreign, or of another kind or version.
        FileNotFoundError: no such file.
    """
    what = f"cannot read {os.fspath(path)!r} as {kind}"
    try:
        with zipfile.ZipFile(path) as archive:
            header = _read_header(archive, what, kind, version)
            arrays = {
                name: _read_member(archive, what, name, dtype, shape)
                for name, (dtype, shape) in header["arrays"].items()
            }
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FileFormatError(
            f"{what}: {error}, expected a complete file; the file is truncated, damaged or "
            f"foreign, write it again"
        ) from error
    return arrays, header["meta"]


def _read_header(
    archive: zipfile.ZipFile, what: str, kind: str, version: int
) -> dict[str, Any]:
    try:
        info = archive.getinfo(_HEADER)
    except KeyError:
        raise FileFormatError(
            fail(what, "members", archive.namelist()[:5], f"a member {_HEADER}", "use an OPER file")
        ) from None
    if info.file_size > _MAX_HEADER_BYTES:
        raise FileFormatError(
            fail(what, "header_bytes", info.file_size, f"<= {_MAX_HEADER_BYTES}", "write it again")
        )
    try:
        header: dict[str, Any] = json.loads(archive.read(info))
        found_kind, found_version = header["kind"], header["version"]
        ok = isinstance(header["meta"], dict) and all(
            isinstance(n, str) and isinstance(d, str) and all(isinstance(s, int) and s >= 0 for s in sh)
            for n, (d, sh) in header["arrays"].items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(fail(what, "header", str(error), "a JSON header", "write it again")) from None
    if found_kind != kind:
        raise FileFormatError(fail(what, "kind", found_kind, f"{kind!r}", "pass the right file"))
    if found_version != version:
        raise FileFormatError(
            fail(what, "version", found_version, f"{version}", "write it again with this release")
        )
    if not ok:
        raise FileFormatError(fail(what, "header", "malformed", "arrays and meta", "write it again"))
    return header


def _read_member(
    archive: zipfile.ZipFile, what: str, name: str, dtype: str, shape: list[int]
) -> np.ndarray:
    try:
        info = archive.getinfo(f"{name}.npy")
        want = np.dtype(dtype)
    except (KeyError, TypeError) as error:
        raise FileFormatError(fail(what, "array", name, "a stored array", "write it again")) from error
    num_bytes = want.itemsize * int(np.prod([int(s) for s in shape], dtype=object))
    # The .npy header is at most 64 KiB; anything else means that header and data disagree.
    if want.kind not in _ALLOWED_KINDS or not 0 <= info.file_size - num_bytes <= 1 << 16:
        raise FileFormatError(
            fail(what, f"{name}_bytes", info.file_size, f"{num_bytes} plus a header", "write it again")
        )
    if info.compress_size > info.file_size + 1024 or info.compress_type != zipfile.ZIP_STORED:
        raise FileFormatError(fail(what, name, "compressed", "a stored member", "write it again"))
    try:
        array = np.lib.format.read_array(io.BytesIO(archive.read(info)), allow_pickle=False)
    except ValueError as error:
        raise FileFormatError(fail(what, name, str(error), "a .npy member", "write it again")) from None
    if array.dtype != want or list(array.shape) != list(shape):
        raise FileFormatError(
            fail(what, name, (array.dtype.str, array.shape), f"{(dtype, shape)}", "write it again")
        )
    return array
