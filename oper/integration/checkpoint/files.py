"""Checksums of a checkpoint's files, and a reader that executes no code from a checkpoint.

``torch.distributed.checkpoint`` stores a checkpoint's metadata as a pickle, and torch does not
verify the checksums in its archives. Here, the CRC-32 of every file of a checkpoint is stored in an
array file, and unpickling the metadata is restricted to the few required classes.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from oper.errors import FileFormatError
from oper.support.files import (
    check_local,
    check_sizes,
    damage_as_format_error,
    read_arrays,
    write_arrays,
)

METADATA = ".metadata"  # written by torch.distributed.checkpoint
CHECKSUMS = "checksums.oper"
KIND, VERSION = "oper-checkpoint", 1
_BLOCK = 1 << 20
PIECE_BYTES = 64 << 20  # larger stored tensors are read piece by piece
_MODULES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(n for n in dir(torch) if isinstance(getattr(torch, n),
                                                                      torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
_FOREIGN_OPCODES = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID", "BINPERSID", "EXT1",
                    "EXT2", "EXT4", "INST", "OBJ"}


def place_of(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint's folder without symbolic links; raises InvalidInputError for
    a URL or a name with a zero byte.

    Saving renames the folder, which would replace a link to it. The previous checkpoint and the
    deltas are in folders next to it, so every path to it must lead to the same ones.
    """
    check_local(folder)
    return Path(os.path.realpath(folder))


def present_and_previous(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return `place_of` the folder of a checkpoint, and the folder that has the previous checkpoint
    until saving has ended."""
    place = place_of(folder)
    return place, place.with_name(f"{place.name}.previous")


def open_folder(folder: Path) -> int:
    """Open a folder and return its descriptor; raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def path_of(number: int) -> Path:
    """Return a path that continues to refer to an open folder after a rename. A training run may
    replace a checkpoint while it is read; the files of two checkpoints must not be mixed."""
    return Path(f"/proc/self/fd/{number}")


@contextlib.contextmanager
def as_format_error(what: str, name: str, expected: str, todo: str,
                    kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn exceptions of `kinds`, raised by the block for an intact file with other contents, into
    FileFormatError. `what`, `name`, `expected` and `todo` are parts of its message."""
    try:
        yield
    except kinds as error:
        raise FileFormatError(what, name, f"{type(error).__name__}: {error}", expected, todo
                              ) from error


class CheckpointReader(FileSystemReader):
    """torch's reader of checkpoint folders, with safe unpickling and validation of the metadata.

    For ``torch.distributed.checkpoint.load(storage_reader=...)``, with any planner.

    A stored tensor of more than `PIECE_BYTES` is read piece by piece if the planner writes it to a
    table (`LoadPlanner.takes_pieces`) and it is stored contiguously.
    """

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read large tensors of tables piece by piece, then the rest as torch's reader does."""
        takes = getattr(planner, "takes_pieces", lambda item: False)
        rest = [x for x in plan.items if not (
            x.type == LoadItemType.TENSOR and takes(x)
            and self.storage_data[x.storage_index].length > PIECE_BYTES
            and not self.storage_data[x.storage_index].transform_descriptors
            and self._read_in_pieces(x, planner))]
        return super().read_data(LoadPlan(rest, plan.storage_data, plan.planner_data), planner)

    def _read_in_pieces(self, item: ReadItem, planner: Any) -> bool:
        """Pass a stored tensor to the planner piece by piece; False if it is not contiguous."""
        place = self.storage_data[item.storage_index]
        path = self.fs.concat_path(self.path, place.relative_path)
        file: Any
        with self.fs.create_stream(path, "rb") as file:
            # On the meta device, torch reads only the metadata and the offset of the values.
            found = torch.load(self._slice_file(file, place), "meta", weights_only=True)
            at = getattr(found.untyped_storage(), "_checkpoint_offset", None)
            if (at is None or not found.is_contiguous() or found.shape != item.lengths
                    or any(item.storage_offsets)):
                return False
            row_bytes = found.dtype.itemsize * found.shape[1:].numel()
            at += found.dtype.itemsize * found.storage_offset()
            if not 0 <= at <= place.length - found.shape[0] * row_bytes:
                return False
            at += place.offset
            rows = max(1, PIECE_BYTES // max(1, row_bytes))
            for begin in range(0, found.shape[0], rows):
                shape = (min(rows, found.shape[0] - begin), *found.shape[1:])
                if not planner.wants_piece(item, begin, shape[0]):
                    continue
                data = bytearray(shape[0] * row_bytes)
                file.seek(at + begin * row_bytes)
                if file.readinto(data) != len(data):
                    raise FileFormatError("cannot read a checkpoint", "file", place.relative_path,
                                          "all bytes listed in its description",
                                          "load another checkpoint")
                planner.commit_piece(
                    item, begin, torch.frombuffer(data, dtype=found.dtype).view(shape))
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; raises FileFormatError if they are damaged or not a checkpoint's."""
        folder = Path(self.path)
        what = f"cannot read the checkpoint {str(folder)!r}"
        todo = "load another checkpoint"
        try:
            data = (folder / METADATA).read_bytes()
        except FileNotFoundError as error:
            raise FileFormatError(what, "missing file", error.filename, "a complete folder", todo
                                  ) from None
        # Unpickling damaged bytes may raise any exception.
        with as_format_error(what, METADATA, "what torch.distributed.checkpoint writes", todo):
            _check_opcodes(data)
            metadata = _Unpickler(io.BytesIO(data)).load()
            problem = _problem(metadata, folder)
        if problem is not None:
            raise FileFormatError(what, *problem, todo)
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _MODULES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        return super().find_class(module, name)


def _check_opcodes(data: bytes) -> None:
    """Refuse a pickle for which Python's unpickler would allocate more than the file's size. The
    unpickler allocates its memo up to the largest index, and allocates a declared size before
    reading the data. Iterating over the opcodes compares declared sizes with the available bytes.
    The k-th opcode may only store memo indices up to k, which holds for all real picklers."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in _FOREIGN_OPCODES or (
                opcode.name.endswith("PUT") and int(argument or 0) not in range(count + 1)):
            raise pickle.UnpicklingError(f"{opcode.name} {argument} is not part of a checkpoint")


def _problem(metadata: Any, folder: Path) -> tuple[str, Any, str] | None:
    """Return name, value and constraint of a size or position that does not fit the folder's files;
    None if all fit."""
    if not isinstance(metadata, Metadata):
        return METADATA, type(metadata).__name__, "Metadata"
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    for info in metadata.storage_data.values():
        path, begin, length = info.relative_path, info.offset, info.length
        end = sizes.get(path, -1) if os.path.basename(path) == path else -1
        if not (begin >= 0 and length >= 0 and begin + length <= end):
            return ("file, offset, bytes", (path, begin, length), "a file of this folder"
                    if end < 0 else f"a range of the file's {end} bytes")
    total = sum(sizes.values())
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            num_bytes = item.size.numel() * item.properties.dtype.itemsize
            inside = all(o >= 0 and n >= 0 and o + n <= whole for chunk in item.chunks
                         for o, n, whole in zip(chunk.offsets, chunk.sizes, item.size, strict=True))
            if min(item.size, default=0) < 0 or num_bytes > total or not inside:
                return (name, tuple(item.size),
                        f"a tensor of at most {total} bytes, the files' size")
    return None


def sum_of(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of a file."""
    crc = size = 0
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc, size = zlib.crc32(block[:count], crc), size + count
    return size, crc


def write_checksums(folder: Path, sums: dict[str, tuple[int, int]]) -> None:
    """Write the file of sizes and checksums, the last file of a checkpoint."""
    write_arrays(folder / CHECKSUMS, KIND, VERSION, {},
                 {"files": {name: list(pair) for name, pair in sorted(sums.items())}})


def _is_file_name(name: str) -> bool:
    return (name not in ("", ".", "..") and "/" not in name and len(name) < 256
            and name.isascii() and name.isprintable())


def check_files(folder: Path, first: int = 0, every: int = 1) -> None:
    """Verify the checksums of files `first`, ``first + every``, ... of a checkpoint.

    In a folder without a file of checksums, written by torch alone, verify the checksums inside
    torch's archives.

    Raises:
        FileFormatError: a file is missing, truncated, damaged or belongs to another checkpoint.
    """
    if not (folder / CHECKSUMS).exists():
        _check_items(folder, first, every)
        return
    what = f"cannot read the checkpoint {str(folder)!r}"
    wanted = _sums(folder, what)
    for name in sorted(wanted)[first::every]:
        try:
            found = list(sum_of(folder / name))
        except (FileNotFoundError, IsADirectoryError):
            found = []
        if found != wanted[name]:
            raise FileFormatError(what, f"{name}: bytes, CRC-32", found,
                                  f"{wanted[name]} as when it was saved",
                                  "the file is damaged; load another checkpoint")


def has_all_files(folder: Path) -> bool:
    """Whether all files named by a checkpoint's file of checksums are there in their sizes."""
    try:
        wanted = _sums(folder, "")
        return all((folder / name).stat().st_size == size for name, (size, _) in wanted.items())
    except (FileFormatError, FileNotFoundError, ValueError):
        return False


def _sums(folder: Path, what: str) -> dict[str, list[int]]:
    """Return size and CRC-32 by file of a checkpoint from its file of checksums."""
    _, meta = read_arrays(folder / CHECKSUMS, KIND, VERSION)
    wanted = meta.get("files")
    if not isinstance(wanted, dict) or not all(
            _is_file_name(n) and isinstance(v, list) for n, v in wanted.items()):
        raise FileFormatError(what, CHECKSUMS, meta, "sizes and sums by file",
                              "load another checkpoint")
    return wanted


class _Part(io.RawIOBase):
    """A file-like view of `size` bytes of a file from `begin` on. Unlike torch's own view, it can
    seek from the end."""

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = (0, self._at, self._size)[whence]
        if base + offset < 0:
            raise ValueError(f"a position before the beginning: {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._begin + self._at)
        count: int = self._file.readinto(  # type: ignore[attr-defined]
            memoryview(buffer)[:max(0, self._size - self._at)])
        self._at += count
        return count


def check_archive(file: BinaryIO, what: str, begin: int = 0, size: int | None = None) -> None:
    """Verify the CRC-32 of every record of an archive of ``torch.save``; ``torch.load`` does not.

    Args:
        file: an open file that contains the archive; readable and seekable.
        what: beginning of error messages.
        begin: offset of the archive's first byte.
        size: size of the archive in bytes; None = up to the end of the file.

    Raises:
        FileFormatError: a record or the archive's directory is damaged, or it has no checksums.
        OSError: the file cannot be read.
    """
    size = file.seek(0, os.SEEK_END) - begin if size is None else size
    part = cast(BinaryIO, _Part(file, begin, size))
    with damage_as_format_error(what), zipfile.ZipFile(part) as archive:
        check_sizes(archive, what, size)
        records = archive.infolist()
        if records and not any(r.CRC for r in records):
            raise FileFormatError(what, "CRC-32 of its records", 0,
                                  "checksums to verify the weights by",
                                  "save it again with torch.serialization.set_crc32_options(True)")
        damaged = archive.testzip()
        if damaged is not None:
            raise FileFormatError(what, "CRC-32 of record", damaged,
                                  "that of the archive's directory",
                                  "the file is damaged, restore it from a copy or save it again")


def _check_items(folder: Path, first: int, every: int) -> None:
    """Verify the archives, one per stored value, of a checkpoint without a file of checksums."""
    reader = CheckpointReader(folder)
    places = {(x.relative_path, x.offset): x
              for x in reader.read_metadata().storage_data.values()
              if not x.transform_descriptors}  # e.g. compressed values are not archives
    for key in sorted(places)[first::every]:
        with open(folder / key[0], "rb") as file:
            check_archive(file, f"cannot read the checkpoint {str(folder)!r}: {key[0]}",
                          key[1], places[key].length)


def load_archive(path: str | os.PathLike[str], what: str) -> Any:
    """Load a file written by ``torch.save``: tensors, mapped into memory, and plain values.

    The file's checksums are verified first.

    Raises:
        FileFormatError: the file was not written by ``torch.save``, or is damaged; the message
            begins with `what`.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        check_archive(file, what)
        try:
            # Through the descriptor, since the path may have been replaced by another file.
            return torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu",
                              weights_only=True, mmap=True)
        except Exception as error:  # torch raises various classes for other files
            raise FileFormatError(
                what, "content", f"{type(error).__name__} {error}".partition("\n")[0],
                "tensors and plain values written by torch.save", "regenerate it") from None
