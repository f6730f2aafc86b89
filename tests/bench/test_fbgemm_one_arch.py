"""Packing keeps one architecture of fat binaries, and libraries without device code unchanged."""

import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from fbgemm_one_arch import fatbin_section, keep_arch, pack, unpack


def _entry(arch: int, code: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, 2, 0x101, 64, len(code))
    struct.pack_into("<I", header, 28, arch)
    return bytes(header) + code


def _container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _elf(section: bytes) -> bytes:
    """A minimal 64-bit ELF file with a `.nv_fatbin` section."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    body_at, names_at = 64, 64 + len(section)
    table_at = names_at + len(names)
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, table_at)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    table = bytearray(3 * 64)
    struct.pack_into("<IIQQQQ", table, 64, 1, 1, 0, 0, body_at, len(section))
    struct.pack_into("<IIQQQQ", table, 128, 12, 3, 0, 0, names_at, len(names))
    return bytes(header) + section + names + bytes(table)


def test_one_architecture_is_kept() -> None:
    first = _container(_entry(80, b"a" * 40), _entry(90, b"b" * 24), _entry(100, b"c" * 8))
    second = _container(_entry(80, b"d" * 8))
    elf = bytearray(_elf(first + second))
    begin, end = fatbin_section(elf)
    assert elf[begin:end] == first + second
    assert keep_arch(elf, begin, end, 90) == (4, 1)
    kept = _entry(90, b"b" * 24)
    assert elf[begin + 16:begin + 16 + len(kept)] == kept
    assert struct.unpack_from("<Q", elf, begin + 8)[0] == len(kept)
    assert not any(elf[begin + 16 + len(kept):begin + len(first)])
    assert elf[begin + len(first):end] == second, "a container without the architecture"


REGISTERS = '''
def setup():
    def impl_abstract(op_name, fn):
        for dkey in ["CompositeImplicitAutograd", "Meta"]:
            if op_name == "fbgemm::gone":
                raise RuntimeError("there is no such operator")
        torch.library.register_fake(op_name, fn)
    for name in ("here", "gone"):
        impl_abstract(f"fbgemm::{name}", None)
setup()
'''


def test_a_wheel_is_packed_and_unpacked(tmp_path: Path) -> None:
    library = _elf(_container(_entry(90, b"x" * 64), _entry(100, b"y" * 64)))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("fbgemm_gpu/__init__.py", "x = 1\n")
        wheel.writestr("fbgemm_gpu/sparse_ops.py", REGISTERS)
        wheel.writestr("fbgemm_gpu/fbgemm_gpu_py.so", library)
        wheel.writestr("fbgemm_gpu/fbgemm_gpu_tbe_training_backward_vbe.so", library)
    pack(tmp_path / "a.whl", tmp_path / "packed", 90)
    to = unpack(tmp_path / "packed", tmp_path / "out")
    found = sorted(str(p.relative_to(to)) for p in to.rglob("*") if p.is_file())
    assert found == ["fbgemm_gpu/__init__.py", "fbgemm_gpu/fbgemm_gpu_py.so",
                     "fbgemm_gpu/sparse_ops.py"]
    assert "load_library" in (to / "fbgemm_gpu/__init__.py").read_text()
    # Operators of libraries that are left out are passed over.
    known: list[str] = []
    scope = {"torch": SimpleNamespace(
        ops=SimpleNamespace(fbgemm=SimpleNamespace(here=1)),
        library=SimpleNamespace(register_fake=lambda name, fn: known.append(name)))}
    exec((to / "fbgemm_gpu/sparse_ops.py").read_text(), scope)
    assert known == ["fbgemm::here"]
    got = (to / "fbgemm_gpu/fbgemm_gpu_py.so").read_bytes()
    assert len(got) == len(library) and b"x" * 64 in got and b"y" not in got


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="ELF"):
        fatbin_section(b"MZ" + bytes(100))
