"""Properties of the kernels that the CUDA compiler generates; needs nvcc, but no GPU."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.cuda.compiler import ARCHS, ROOT, checked_library, lookup_kernels, shipped_library

pytestmark = pytest.mark.timeout(3600)  # the first tests compile all kernels for all architectures

# Kernels that move the rows, and the shapes of the usual tables: rows of whole 16-byte parts.
HOT = re.compile(r"(pool_bags|pool_ids|stage_rows|reduce_runs|reduce_chunks|update_kernel)")
UPDATES = re.compile(r"update_kernel|ToE[12]E")  # at the owner, or of a single rank
SCALAR = re.compile(r"Li1ELi32E")  # element by element: dims that are no multiple of 16 bytes


def tool(name: str, *arguments: str) -> str:
    """Output of a tool of the CUDA toolkit, from PATH or from the nvidia-cuda-* packages."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        roots = [p for p in map(Path, sys.path) if (p / "nvidia").is_dir()]
        found = [f for root in roots for f in (root / "nvidia").rglob(name) if f.is_file()]
        path = str(found[0]) if found else None
    if path is None:
        pytest.skip(f"no {name}; it comes with the CUDA toolkit or the nvidia-cuda-{name} package")
    env = os.environ | {"PATH": f"{Path(path).parent}:{os.environ['PATH']}"}
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True,
                          env=env).stdout


def usage(binary: Path, arch: str) -> dict[str, dict[str, int]]:
    """Registers, stack and local bytes of every kernel."""
    text = tool("cuobjdump", "-arch", f"sm_{arch}", "-res-usage", str(binary))
    found = {}
    for name, line in re.findall(r"Function (\S+):\s*\n\s*(REG:[^\n]*)", text):
        found[name] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_hot_kernels_keep_rows_in_registers(arch: str) -> None:
    kernels = usage(shipped_library(), arch)
    hot = {n: u for n, u in kernels.items() if HOT.search(n) and not SCALAR.search(n)}
    assert len(hot) >= 100, sorted(kernels)[:5]
    # Updates keep a few registers on the stack so that another block fits on a multiprocessor,
    # those of 16-bit rows more, for the random numbers of their rounding; most of all (200 bytes)
    # rows of 16 columns in the kernel of all optimizers. Lookups keep none there.
    allowed = {n: (208 if "Float16" in n else 96) if UPDATES.search(n) else 0 for n in hot}
    spilling = {n: u for n, u in hot.items() if u["LOCAL"] or u["STACK"] > allowed[n]}
    assert not spilling, "\n".join(f"{n}: {u}" for n, u in list(spilling.items())[:12])


@cache
def _sass(arch: str) -> dict[str, str]:
    """Machine code of every kernel."""
    text = tool("cuobjdump", "-arch", f"sm_{arch}", "-sass", str(lookup_kernels(arch)))
    parts = re.split(r"\n\s*Function : (\S+)", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _copies(arch: str, kernel: str) -> dict[str, int]:
    """Number of copies from global to shared memory in a kernel, by width in bits."""
    code = [text for name, text in _sass(arch).items() if kernel in name]
    assert len(code) >= 1, kernel
    widths: dict[str, int] = {}
    for suffixes in re.findall(r"\bLDGSTS((?:\.\w+)*)", code[0]):
        width = next((x for x in suffixes.split(".") if x in ("64", "128")), "32")
        widths[width] = widths.get(width, 0) + 1
    return widths


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", ["IfLi4ELi16ELi2E", "IfLi4ELi8ELi2E",
                                   "INS_7Float16ELi8ELi8ELi2E"])
def test_rows_are_fetched_in_parts_of_16_bytes(arch: str, shape: str) -> None:
    # Eight rows in flight: the first ones' copies stand together, all 128 bits wide.
    widths = _copies(arch, f"pool_bagsINS0_5Shape{shape}")
    assert widths.get("128", 0) >= 8 and widths.keys() == {"128"}, widths


@pytest.mark.parametrize("library", [checked_library, shipped_library],
                         ids=lambda library: library.__name__)
def test_torch_symbols_are_in_the_stable_interface(library: Callable[[], Path]) -> None:
    allowed = set((ROOT / "tests/cuda/torch_symbols.txt").read_text(encoding="ascii").split())
    if shutil.which("nm") is None:
        pytest.skip("no nm; it comes with binutils")
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(library())], capture_output=True,
                            text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    torch_names = {n for n in names if re.search(r"torch|aoti|c10|at::|_ZN2at", n)}
    assert torch_names, "the library uses torch"
    assert torch_names <= allowed, sorted(torch_names - allowed)
