"""Compiled forms of csrc/device for the tests, kept in ``build/`` between runs."""

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("80", "90")
_SOURCES = ("csrc/device/*.*", "csrc/device/kernels/*", "csrc/common/*",
            "csrc/bindings/device/*", "tests/cuda/emulation*")
_DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-Icsrc"]
_NVCC_FLAGS = ["-std=c++20", "--fmad=false", "-cudart", "shared", "-DUSE_CUDA", "-Xcompiler",
               "-fPIC,-fvisibility=hidden,-ffp-contract=off", *_DEFINES]
_CXX_FLAGS = ["-Og", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
              "-Wno-psabi", "-DOPER_EMULATED", "-Itests/cuda", *_DEFINES,
              # Calls functions of emulation.cpp before each access to memory.
              "-fsanitize=kernel-address", "--param=asan-stack=0", "--param=asan-globals=0",
              "--param=asan-instrumentation-with-call-threshold=0"]
# What half of the compilers' time goes to otherwise: compiled once for all sources. No header of
# csrc, so that a source which lacks an include of its own still does not compile.
_PREFIX = ("emulation.h", "torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/library.h",
           "torch/csrc/stable/ops.h", "torch/csrc/stable/tensor.h")
# For emulation.cpp, in which these tests spend half of their time.
_EMULATION_FLAGS = ["-O2", "-fno-sanitize=kernel-address"]


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def _kept(name: str, make: Callable[[Path], None], *recipe: object) -> Path:
    """The file that `make` writes to a path; made again when a source or `recipe` changes.

    Test processes that ask for it at the same time wait for the first one.
    """
    digest = hashlib.sha256(repr((recipe, torch.__version__)).encode())
    for pattern in _SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    folder = ROOT / "build" / "tests" / digest.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            make(folder / f"{name}.part")
            (folder / f"{name}.part").replace(folder / name)
    return folder / name


def _library(name: str, command: list[str], as_cpp: list[str], tail: list[str]) -> Path:
    sources = [*sorted(ROOT.glob("csrc/device/kernels/*.cu")),
               *sorted(ROOT.glob("csrc/device/*.cpp")),
               *sorted(ROOT.glob("csrc/bindings/device/*.cpp"))]
    if as_cpp:  # the host compiler: its memory is of `emulation.h`
        sources.remove(ROOT / "csrc/bindings/device/memory.cpp")
        sources.append(ROOT / "tests/cuda/emulation.cpp")
    includes = [f for path in include_paths() for f in ("-isystem", path)]

    def make(target: Path) -> None:
        prefix = target.with_name("prefix.h")
        shared = ["-include", str(prefix)] if as_cpp else []
        if as_cpp:
            prefix.write_text("".join(f"#include <{name}>\n" for name in _PREFIX))
            _run([*command, *includes, "-x", "c++-header", str(prefix), "-o", f"{prefix}.gch"])

        def compile_one(source: Path) -> str:
            name = "_".join(source.relative_to(ROOT).parts)
            out, part = target.with_name(f"{name}.o"), target.with_name(f"{name}.o.part")
            own = _EMULATION_FLAGS if source.stem == "emulation" else shared
            if not out.exists():  # else of a build that was interrupted
                _run([*command, *own, *includes, *as_cpp, "-c", str(source), "-o", str(part)])
                part.replace(out)
            return str(out)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        _run([*command, "-shared", *objects, *(f"-L{p}" for p in library_paths()),
              *tail, "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(target)])
        target.with_name("prefix.h.gch").unlink(missing_ok=True)  # 100 MB

    return _kept(name, make, command, tail, _EMULATION_FLAGS, _PREFIX)


@functools.cache
def emulated_library() -> Path:
    """csrc/device compiled by the host's compiler against ``emulation.h``."""
    return _library("liboper_emulated.so",
                    [*shlex.split(os.environ.get("CXX", "g++")), *_CXX_FLAGS], ["-x", "c++"],
                    ["-Wl,--no-as-needed"])


def find_nvcc() -> str:
    """The path of nvcc, from PATH, CUDA_HOME or /usr/local/cuda; skips the test without one."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes))
    if found is None:
        pytest.skip("no nvcc in CUDA_HOME, /usr/local/cuda or PATH")
    return found


@functools.cache
def checked_library() -> Path:
    """The CUDA library with compiled host code and kernels that are only checked, which takes
    seconds to build instead of minutes."""
    checked = [f"-arch=compute_{ARCHS[-1]}", "-fdevice-syntax-only", "-O1"]
    return _library("liboper_cuda.so", [find_nvcc(), *_NVCC_FLAGS, *checked], [], ["-lcudart"])


@functools.cache
def shipped_library() -> Path:
    """The CUDA library as it is shipped, for all architectures."""
    find_nvcc()
    out = ROOT / "build" / "cuda-check"
    _run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(out)],
         os.environ | {"OPER_CUDA": "1", "OPER_CUDA_ARCHS": ";".join(ARCHS)})
    return out / "oper" / "_lib" / "liboper_cuda.so"


@functools.cache
def lookup_kernels(arch: str) -> Path:
    """Machine code of ``forward.cu``, the kernels of the lookup, optimized as it is shipped."""
    command = [find_nvcc(), *_NVCC_FLAGS, "-O3", f"-arch=sm_{arch}", "--cubin",
               *(f for path in include_paths() for f in ("-isystem", path)),
               "csrc/device/kernels/forward.cu", "-o"]
    return _kept("forward.cubin", lambda target: _run([*command, str(target)]), command)
