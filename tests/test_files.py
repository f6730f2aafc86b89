"""Checked files: read as written, refused if damaged, never written partially."""

import errno
import io
import json
import os
import random
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.errors import FileFormatError
from oper.support.files import atomic_write, read_arrays, write_arrays, write_text

KIND = "oper-test"
ARRAYS = {
    "ids": np.arange(300, dtype=np.uint16),
    "values": np.linspace(0, 1, 12).reshape(3, 4).astype(np.float32),
    "none": np.zeros((0, 5), np.int64),
    "scalar": np.array(7, np.int8),
    "flags": np.array([True, False]),
    "big_endian": np.array([1, 2], ">i4"),
    "transposed": np.arange(6).reshape(2, 3).T,
}


META = {"name": "ünïcode", "list": [1, None]}


def test_a_file_that_leaves_the_cache_is_written_to_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel only drops pages that are already on the disk."""
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", os.fstat(fd).st_size)))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: calls.append(args))
    with atomic_write(tmp_path / "x", uncached=True) as file:
        file.write(bytes(10_000))
    assert calls == [("fsync", 10_000), (0, 0, os.POSIX_FADV_DONTNEED)]


def test_lack_of_space_is_reported_with_the_path(tmp_path: Path) -> None:
    """The path is reported even if the writing library raises another error."""
    def by_library() -> None:
        with atomic_write(tmp_path / "x"):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904, as torch does it

    with pytest.raises(OSError, match=r"No space left on device: '.*x'$"):
        by_library()
    with pytest.raises(RuntimeError, match="other"), atomic_write(tmp_path / "x"):
        raise RuntimeError("other")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.npz"
    write_arrays(file, KIND, 2, ARRAYS, META)
    return file


@pytest.mark.parametrize("uncached", [False, True])
def test_round_trip(path: Path, uncached: bool) -> None:
    write_arrays(path, KIND, 2, ARRAYS, META, uncached=uncached)
    arrays, meta = read_arrays(path, KIND, 2)
    assert meta == META
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].flags.writeable
        np.testing.assert_array_equal(arrays[name], array)
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["values"], ARRAYS["values"])
    with zipfile.ZipFile(path) as archive:
        assert {x.date_time for x in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
def test_files_are_ordinary_archives(tmp_path: Path) -> None:
    """Check names, sizes and checksums, also of members with non-ASCII names."""
    path = tmp_path / "z.npz"
    write_arrays(path, KIND, 2, {"größe": np.arange(70_000), "none": np.zeros(0)}, {})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert list(sizes) == ["header.json", "größe.npy", "none.npy"]
    assert sizes["größe.npy"] == 8 * 70_000 + sizes["none.npy"]  # and a header of 128 bytes each
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", str(path)], check=True, capture_output=True)


def test_truncation_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 37), *range(len(whole) - 80, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match="regenerate it"):
            read_arrays(path, KIND, 2)


def test_a_flipped_bit_is_refused_or_harmless(path: Path) -> None:
    """Dates and unused flags may change; content, names and sizes may not."""
    whole = path.read_bytes()
    expected, meta = read_arrays(path, KIND, 2)
    refused = 0
    for bit in random.Random(0).sample(range(8 * len(whole)), 1000):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            arrays, found_meta = read_arrays(path, KIND, 2)
        except FileFormatError:
            refused += 1
            continue
        assert found_meta == meta
        assert all(np.array_equal(arrays[n], expected[n]) for n in expected)
    assert refused > 700


def rewrite(path: Path, header: dict[str, Any] | None = None,
            members: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive again with valid checksums but another header or other members."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    if header is not None:
        content["header.json"] = json.dumps(
            {**json.loads(content["header.json"]), **header}).encode()
    content.update(members or {})
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(2, 0))
    return file.getvalue()


def npy_that_claims(shape: str, dtype: str = "<i8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text + bytes(8)


@pytest.mark.parametrize(("header", "words"), [
    ({"kind": "oper-plan"}, "kind='oper-plan', expected 'oper-test'"),
    ({"version": 3}, "version=3, expected 2; regenerate it with this release"),
    ({"meta": []}, "header='malformed'"),
    ({"arrays": []}, "expected a JSON header"),
    ({"arrays": {"ids": ["<u2"]}}, "expected a JSON header"),
    ({"arrays": {"ids": ["<u2", [-300]]}}, "header='malformed'"),
    ({"arrays": {"ids": ["<u2", [300.0]]}}, "header='malformed'"),
    ({"arrays": {"ids": ["|O", [300]]}}, "expected bool, integer or float"),
    ({"arrays": {"ids": ["<u2,<u2", [300]]}}, "expected bool, integer or float"),
    ({"arrays": {"ids": ["<u2", [301]]}}, "regenerate it"),
    ({"arrays": {"ids": ["<i2", [300]]}}, "regenerate it"),
    ({"arrays": {"ids": ["<u2", [3, 100]]}}, "regenerate it"),
    ({"arrays": {"ids": ["<u2", [10**30]]}}, "regenerate it"),
    ({"arrays": {"lost": ["<u2", [300]]}}, "expected a member 'lost.npy'"),
])
def test_a_false_header_is_refused(path: Path, header: dict[str, Any], words: str) -> None:
    rewrite(path, header)
    with pytest.raises(FileFormatError, match=words.replace("|", "[|]")):
        read_arrays(path, KIND, 2)


@pytest.mark.parametrize("member", [
    npy_that_claims("(300, 1000000, 1000000)"), npy_that_claims("(300,)", "|O"), b"", b"garbage",
    npy(np.arange(299, dtype=np.uint16)), npy(np.asfortranarray(np.zeros((2, 150), np.uint16))),
    npy(ARRAYS["ids"]) + b"more",
])
def test_a_member_with_false_sizes_is_refused(path: Path, member: bytes) -> None:
    rewrite(path, members={"ids.npy": member})
    with pytest.raises(FileFormatError, match="regenerate it"):
        read_arrays(path, KIND, 2)


def test_a_small_member_that_claims_much_is_refused(path: Path) -> None:
    """It is refused before memory is allocated for it."""
    rewrite(path, {"arrays": {"ids": ["<u2", [10**10]]}},
            {"ids.npy": npy_that_claims("(10000000000,)", "<u2")})
    with pytest.raises(FileFormatError, match="regenerate it"):
        read_arrays(path, KIND, 2)


def test_a_member_may_have_more_padding(path: Path) -> None:
    """NumPy's versions differ in the amount."""
    whole = npy(ARRAYS["ids"])
    padded = whole[:8] + (180).to_bytes(4, "little") + whole[12:127] + b" " * 64 + whole[127:]
    assert np.array_equal(np.load(io.BytesIO(padded)), ARRAYS["ids"])
    for member in (whole, padded):
        rewrite(path, members={"ids.npy": member})
        np.testing.assert_array_equal(read_arrays(path, KIND, 2)[0]["ids"], ARRAYS["ids"])


def test_compressed_members_are_refused(path: Path) -> None:
    """A small file must not unpack to a huge one."""
    rewrite(path, members={"ids.npy": npy(np.zeros(1 << 20))}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(FileFormatError, match="compressed"):
        read_arrays(path, KIND, 2)


def test_a_directory_with_too_large_sizes_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    entry = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"PK\x05\x06"))
    damaged = bytearray(whole)
    damaged[entry + 20:entry + 28] = (1 << 31).to_bytes(4, "little") * 2  # both sizes
    path.write_bytes(damaged)
    with pytest.raises(FileFormatError, match="the file's size"):
        read_arrays(path, KIND, 2)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", b'{"kind": "oper-test"}',
                                     bytes(5000)])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(FileFormatError, match="truncated, damaged or of another kind"):
        read_arrays(tmp_path / "foreign", KIND, 2)


def test_an_archive_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", ids=np.arange(3))
    with pytest.raises(FileFormatError, match=r"expected a member 'header\.json'"):
        read_arrays(tmp_path / "plain.npz", KIND, 2)


def test_a_missing_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none", KIND, 2)


def test_objects_are_not_storable(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not storable"):
        write_arrays(tmp_path / "x", KIND, 1, {"o": np.array([{}])}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")

    def fail_half_way() -> None:
        with atomic_write(tmp_path / "x") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_write_makes_folders_and_ordinary_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "x", "text")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a" / "b" / "x").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(tmp_path / "pipe", "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_an_unwritable_path_is_named_as_given(tmp_path: Path) -> None:
    """The error names it, not the temporary file next to it."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in ("file/plan.json", "folder"):
        with pytest.raises(OSError, match=f"{path}'$") as caught:
            write_text(tmp_path / path, "text")
        assert caught.value.filename == os.fspath(tmp_path / path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    if os.geteuid() != 0:
        (tmp_path / "folder").chmod(0o500)
        with pytest.raises(PermissionError, match=r"folder/plan\.json'$"):
            write_text(tmp_path / "folder" / "plan.json", "text")
