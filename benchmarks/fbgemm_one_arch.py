"""Pack fbgemm_gpu's training libraries for one GPU architecture, for a machine without a network.

    python benchmarks/fbgemm_one_arch.py WHEEL FOLDER [--arch 90]

WHEEL is a CUDA wheel of fbgemm-gpu, which has machine code of many architectures and more libraries
than training needs. FOLDER receives the Python files and the compressed training libraries with the
code of one architecture. benchmarks/gpu.py --fbgemm FOLDER unpacks and uses them. The format of the
fat binaries in `.nv_fatbin` is not documented: containers are found by their magic number; entries
of other architectures are removed, the container's size is adjusted and the rest is zeroed.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAGIC = 0xBA55ED50
_ALIGN = 8
# Libraries whose name contains one of these are not needed for training tables on one GPU.
_LEFT_OUT = ("inference", "dense", "_gwd", "_vbe", "embedding_inplace")
# Replaces the package's __init__.py, which loads all libraries or none; this one loads the packed
# libraries in the order of their dependencies.
_INIT = '''"""fbgemm_gpu with the libraries of training."""

import os

import torch

open_source = True
for name in ("config", "tbe_utils", "tbe_index_select", "tbe_cache", "tbe_optimizers",
             "tbe_training_forward", "tbe_training_backward", "tbe_training_backward_pt2",
             "tbe_training_backward_split_host", "py"):
    torch.ops.load_library(os.path.join(os.path.dirname(__file__), f"fbgemm_gpu_{name}.so"))
from . import sparse_ops
'''
# sparse_ops.py registers operators of libraries that are not packed; _IF_THERE makes it skip them.
_SPARSE = "fbgemm_gpu/sparse_ops.py"
_REGISTERS = '''        for dkey in ["CompositeImplicitAutograd", "Meta"]:
'''
_IF_THERE = '''        if not hasattr(torch.ops.fbgemm, op_name.split("::")[1]):
            return
'''
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 192 << 20}]


def keep_arch(data: bytearray, begin: int, end: int, arch: int) -> tuple[int, int]:
    """Remove all architectures but `arch` from the fat binaries in `data[begin:end]`, in place.

    Returns:
        Numbers of entries found and kept.
    """
    found = kept = 0
    at = begin
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += _ALIGN
            continue
        first, last = at + header, at + header + size
        wanted = bytearray()
        entry = first
        while entry < last:
            _, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            if entry_header < 32:
                raise ValueError(f"an entry at {entry} has a header of {entry_header} bytes")
            found += 1
            if struct.unpack_from("<I", data, entry + 28)[0] == arch:
                wanted += data[entry:entry + entry_header + entry_size]
                kept += 1
            entry += entry_header + entry_size
        if wanted:  # otherwise leave it unchanged: a container without entries would not load
            struct.pack_into("<Q", data, at + 8, len(wanted))
            data[first:last] = wanted + bytes(size - len(wanted))
        at = last
    return found, kept


def fatbin_section(data: bytes) -> tuple[int, int]:
    """Byte range of section `.nv_fatbin` in a 64-bit ELF file; (0, 0) if there is none.

    Raises ValueError for another kind of file.
    """
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + k * size) for k in range(count)]
    names = sections[names_at][4]
    for name, _, _, _, offset, length in sections:
        start = names + name
        if data[start:data.index(b"\0", start)] == b".nv_fatbin":
            return offset, offset + length
    return 0, 0


def python_file(name: str, text: str) -> str:
    """The packed version of a Python file of the package with path `name`."""
    if name == "fbgemm_gpu/__init__.py":
        return _INIT
    return text.replace(_REGISTERS, _IF_THERE + _REGISTERS) if name == _SPARSE else text


def pack(wheel: Path, folder: Path, arch: int) -> None:
    """Write the parts of a wheel that training needs on architecture `arch` to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            if not name.startswith("fbgemm_gpu/"):
                continue
            target = folder / name
            if name.endswith(".py"):
                target.parent.mkdir(parents=True, exist_ok=True)
                text = python_file(name, archive.read(info).decode())
                target.write_text(text, encoding="utf-8")
                total += len(text)
            elif name.endswith(".so") and not any(x in Path(name).name for x in _LEFT_OUT):
                data = bytearray(archive.read(info))
                found, kept = keep_arch(data, *fatbin_section(data), arch)
                target.parent.mkdir(parents=True, exist_ok=True)
                packed = lzma.compress(bytes(data), format=lzma.FORMAT_XZ, filters=_FILTERS)
                target.with_name(target.name + ".xz").write_bytes(packed)
                total += len(packed)
                print(f"{name}: {len(data) >> 20} -> {len(packed) / 2**20:.1f} MiB, "
                      f"{kept} of {found} entries", flush=True)
    print(f"{folder}: {total / 2**20:.1f} MiB")


def unpack(folder: Path, target: Path) -> Path:
    """Decompress the output of `pack` into `target`, and return `target` for ``sys.path``."""
    jobs = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        to = target / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        jobs.append((path, to))

    def one(job: tuple[Path, Path]) -> None:
        path, to = job
        if path.suffix != ".xz":
            shutil.copyfile(path, to)
            return
        with lzma.open(path) as source, open(to.with_suffix(""), "wb") as out:
            shutil.copyfileobj(source, out, 1 << 22)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, jobs))
    return target


def main() -> int:
    """Pack a wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90 = sm_90a as well")
    args = parser.parse_args()
    pack(args.wheel, args.folder, args.arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
