"""Access to local files, and to files in a store that pyarrow or fsspec can open.

URLs such as ``s3://bucket/log.gz`` (S3, GCS and HDFS) are opened by ``pyarrow.fs``, URLs with other
schemes by the fsspec implementation installed for them. All other names are local paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from oper.data.reading.workbook import rows_as_csv
from oper.errors import InvalidInputError
from oper.support.files import is_url as is_url

Inputs: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # one name or several
_BUFFER_BYTES = 1 << 23  # read buffer of a remote file: latency costs more than a few megabytes
_GCS_RETRY_S = 30
# Names that fsspec's file systems give the time at which a file was written.
_TIMES = ("mtime", "modified", "last_modified", "LastModified", "updated", "created")


def filesystem(url: str) -> tuple[Any, str, str]:
    """Return the ``pyarrow.fs.FileSystem`` of a URL, the path in it, and the query with its ``?``.

    Raises:
        InvalidInputError: the scheme is unknown, or the store cannot be opened.
    """
    import fsspec  # type: ignore[import-untyped]
    import pyarrow as pa
    from pyarrow import fs

    plain, mark, query = url.partition("?")
    if url.lower().startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in query:
        # By default, the GCS library retries for 15 minutes if the store does not respond.
        url += ("&" if mark else "?") + f"retry_limit_seconds={_GCS_RETRY_S}"
    try:
        try:
            found, path = fs.FileSystem.from_uri(url.replace(" ", "%20"))
        except pa.ArrowInvalid as error:
            if "nrecognized filesystem" not in str(error):
                raise
            other, path = fsspec.core.url_to_fs(plain)
            found = fs.PyFileSystem(_with_times(other))
    except (pa.ArrowException, ImportError, OSError, ValueError) as error:
        raise InvalidInputError("cannot open a store", "URL", plain,
                                "one that pyarrow or an installed fsspec library can open "
                                f"({str(error)[:200]})", "correct it, or install the library"
                                ) from None
    return found, path, mark + query


def _with_times(files: Any) -> Any:
    """Return a pyarrow handler of an fsspec file system. That of pyarrow itself takes times only
    from ``mtime``, which few file systems have, and files would be replaced without notice."""
    from pyarrow import fs

    class Handler(fs.FSSpecHandler):  # type: ignore[misc]
        @staticmethod
        def _create_file_info(path: str, info: dict[str, Any]) -> Any:
            return fs.FSSpecHandler._create_file_info(path, {**info, "mtime": _time_of(info)})

    return Handler(files)


def _time_of(info: dict[str, Any]) -> datetime | None:
    """Return the time of modification in what fsspec knows about a file; None = unknown."""
    found = next((info[name] for name in _TIMES if info.get(name)), None)
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(found, str):
            return datetime.fromisoformat(found)
        if isinstance(found, int | float):  # rounded to microseconds
            return datetime.fromtimestamp(found, UTC)
    return found if isinstance(found, datetime) else None


@contextlib.contextmanager
def _asking(url: str) -> Iterator[None]:
    """Convert an OSError of a store to an InvalidInputError that names the URL."""
    try:
        yield
    except FileNotFoundError:
        raise InvalidInputError("cannot read the log", "input", url, "an existing file",
                                "check the path") from None
    except OSError as error:
        raise InvalidInputError("cannot use a store", "URL", url,
                                f"a reachable store that grants access ({str(error)[:300]})",
                                "check the URL, the network and the credentials") from None


def open_input(path: str) -> BinaryIO:
    """Open a local or remote file for reading."""
    if not is_url(path):
        return open(path, "rb")
    found, name, _ = filesystem(path)
    with _asking(path):
        return cast(BinaryIO, io.BufferedReader(found.open_input_file(name), _BUFFER_BYTES))


def stamp(path: str) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in ns since 1970 (0 = unknown)."""
    if not is_url(path):
        about = os.stat(path)
        return about.st_size, about.st_mtime_ns
    found, name, _ = filesystem(path)
    with _asking(path):
        info = found.get_file_info(name)
        if not info.is_file:
            raise FileNotFoundError(path)
    return info.size, info.mtime_ns or 0


def inside(url: str, name: str) -> str:
    """Return the URL of a file or folder inside the folder `url`."""
    plain, mark, query = url.partition("?")
    return f"{plain.rstrip('/')}/{name}{mark}{query}"


def listing(url: str) -> dict[str, tuple[int, int]]:
    """Return the `stamp`s of all files in a folder of a store, by name relative to the folder,
    which need not exist."""
    from pyarrow import fs

    found, name, _ = filesystem(url)
    with _asking(url):
        infos = found.get_file_info(fs.FileSelector(name, allow_not_found=True, recursive=True))
    start = name.rstrip("/") + "/"
    return {i.path[i.path.index(start) + len(start):]: (i.size, i.mtime_ns or 0)
            for i in infos if i.is_file}


def size(path: str) -> int:
    return stamp(path)[0]


def full_name(path: str) -> str:
    """Return the absolute path, or the URL without its query, which may contain credentials."""
    return path.partition("?")[0] if is_url(path) else os.path.abspath(path)


def files_below(url: str) -> list[str]:
    """List the URLs of the data files at `url`, a file, folder or pattern, in no defined order."""
    from pyarrow import fs

    found, name, query = filesystem(url)
    plain = url.partition("?")[0]
    base = plain[:len(plain) - len(name)] if plain.endswith(name) else f"{plain.split('://')[0]}://"
    with _asking(url):
        fixed = name
        if any(c in name for c in "*?["):
            fixed = re.split(r"[*?\[]", name)[0].rpartition("/")[0]
        elif found.get_file_info(name).is_file:
            return [url]
        infos = found.get_file_info(fs.FileSelector(fixed, allow_not_found=True, recursive=True))
        paths = [i.path for i in infos if i.is_file]
    if fixed != name:
        return [base + p + query for p in paths if Path(p).match(name)
                and p.count("/") == name.count("/")
                # As locally, `*` matches no hidden file.
                and (Path(p).name[0] != "." or Path(name).name[0] == ".")]
    return [base + p + query for p in paths if is_data(p[len(fixed):])]


def is_data(path: str) -> bool:
    """Whether no part of a relative path begins with ``.`` or ``_`` (such as ``_SUCCESS``)."""
    return not any(part[0] in "._" for part in path.split("/") if part)


@contextlib.contextmanager
def spooled(names: Inputs, beside: Path) -> Iterator[list[str]]:
    """Replace pipes and workbooks among `names` by temporary files, which can be read repeatedly.

    The data of a pipe (``-``, ``/dev/stdin``, a named pipe), or the first sheet of an Excel
    workbook as CSV, is written to a file next to `beside`, named by a digest of its contents: an
    interrupted run resumes if the pipe delivers the same data again. Files are removed after the
    block, unless it raises KeyboardInterrupt or OSError.
    """
    found, files = [], []
    given = [names] if isinstance(names, (str, os.PathLike)) else names
    for name in [os.fspath(n) for n in given]:
        is_workbook = name.endswith(".xlsx")
        if not is_workbook and not is_pipe(name):
            found.append(name)
            continue
        beside.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        pieces = rows_as_csv(name) if is_workbook else _pieces(name)
        with contextlib.ExitStack() as stack:
            number, path = tempfile.mkstemp(dir=beside.parent, prefix=f".{beside.name}.pipe.")
            draft = Path(path)
            stack.callback(draft.unlink, missing_ok=True)
            with open(number, "wb") as out:
                for piece in pieces:
                    digest.update(piece)
                    out.write(piece)
            files.append(draft.with_name(f".{beside.name}.pipe-{digest.hexdigest()[:24]}"))
            os.utime(draft, ns=(0, 0))  # a fixed mtime keeps the job's identity for equal contents
            os.replace(draft, files[-1])
        found.append(str(files[-1]))
    try:
        yield found
    except (KeyboardInterrupt, OSError):
        files = []
        raise
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _pieces(name: str) -> Iterator[bytes]:
    with open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
        while piece := pipe.read(1 << 22):
            yield piece


def is_pipe(name: str) -> bool:
    """Whether a name is ``-``, a pipe, a socket or a character device (readable only once)."""
    if name == "-" or is_url(name):
        return name == "-"
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def upload(folder: Path, url: str, last: Sequence[str]) -> None:
    """Upload the files of a local folder to a URL, those in `last` (relative paths) at the end.

    Raises:
        InvalidInputError: the store refuses a file.
    """
    found, name, _ = filesystem(url)
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    with _asking(url):
        for path in [*(n for n in names if n not in last), *last]:
            target = f"{name.rstrip('/')}/{path}"
            found.create_dir(target.rpartition("/")[0], recursive=True)
            # pyarrow.fs.copy_files does not return if the server responds with errors.
            with open(folder / path, "rb") as file, found.open_output_stream(target) as out:
                shutil.copyfileobj(file, out, 1 << 22)


def remove_below(url: str) -> None:
    """Remove all files below a URL; the folder need not exist."""
    found, name, _ = filesystem(url)
    with _asking(url):
        found.delete_dir_contents(name, missing_dir_ok=True)
