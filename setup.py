"""Builds the native libraries; everything else about the package is in ``pyproject.toml``.

Plain shared libraries come out:

* ``oper/_lib/liboper_search.so``, the planner's, which needs no torch and is loaded by ``ctypes``;
* ``oper/_lib/liboper_host.so``, loaded by ``torch.ops.load_library``;
* ``oper/_lib/liboper_cuda.so`` likewise, when there are CUDA sources, nvcc is found, and torch has
  CUDA.

The last two use libtorch's stable C++ interface and no Python headers, so that one binary serves
every Python and every torch from 2.11 on. torch must be there before the build; install it first
and use ``pip install --no-build-isolation``. A source distribution needs no torch.

Environment variables:
    OPER_CUDA: ``auto`` (default), ``0`` (never), ``1`` (also for a torch without CUDA).
    OPER_CUDA_ARCHS: compute capabilities, default ``80;90``; PTX of the last one is added.
    MAX_JOBS: compilers at once, default the number of cores.
    CXX, CUDA_HOME: the C++ compiler and the CUDA toolkit, if they are not found by themselves.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
SEARCH, HOST, CUDA = (f"oper._lib.liboper_{name}" for name in ("search", "host", "cuda"))
# The oldest torch that the libraries must load in.
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
# No -march: kernels for newer processors are chosen at run time. No contraction to fused
# multiply-add: host and device, and every plan, must round alike.
HOST_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
              "-Wno-psabi"]
CUDA_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-cudart", "shared", "-DUSE_CUDA", "-Xcompiler",
              "-fPIC,-fvisibility=hidden,-ffp-contract=off"]
TORCH_LIBRARIES = ["-ltorch", "-ltorch_cpu", "-lc10"]


def torch_version() -> tuple[str, str | None]:
    """Version of the installed torch and of its CUDA (None = CPU build), without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("oper's build needs torch: install torch first, then run "
                 "'pip install --no-build-isolation' on this project.")
    version = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    return version["__version__"], version.get("cuda")


def find_nvcc() -> str | None:
    """The first nvcc that runs: CUDA_HOME, the usual prefix, PATH (which may be a wrapper)."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for nvcc in [*(str(Path(h) / "bin" / "nvcc") for h in homes if h), shutil.which("nvcc")]:
        if nvcc and os.access(nvcc, os.X_OK):
            probe = subprocess.run([nvcc, "--version"], capture_output=True, check=False)
            if probe.returncode == 0:
                return nvcc
    return None


def sources(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def cuda_sources() -> list[str]:
    """Sources of the CUDA library; empty if it is not built."""
    found = sources("csrc/device/kernels/*.cu")
    choice = os.environ.get("OPER_CUDA") or "auto"
    if choice == "0" or not found or (choice == "auto" and not torch_version()[1]):
        return []
    if find_nvcc() is None:
        if choice == "1":
            sys.exit("OPER_CUDA=1, but no nvcc in CUDA_HOME, /usr/local/cuda or PATH; install the "
                     "CUDA toolkit or unset OPER_CUDA.")
        return []
    return found + sources("csrc/device/*.cpp", "csrc/bindings/device/*.cpp")


def arch_flags() -> list[str]:
    archs = re.findall(r"\w+", os.environ.get("OPER_CUDA_ARCHS") or "80;90")
    codes = [(a, f"sm_{a}") for a in archs] + [(archs[-1], f"compute_{archs[-1]}")]
    return [f for a, code in codes for f in ("-gencode", f"arch=compute_{a},code={code}")]


def is_current(target: Path, inputs: list[Path]) -> bool:
    try:
        made = target.stat().st_mtime_ns
        return all(i.stat().st_mtime_ns <= made for i in inputs)
    except FileNotFoundError:
        return False


def dependencies(depfile: Path) -> list[Path]:
    """The files that a compiler's make-style dependency file names."""
    if not depfile.exists():
        return [depfile]
    names = depfile.read_text().replace("\\\n", " ").split(": ", 1)[-1]
    return [ROOT / name for name in shlex.split(names)]


def run_tool(command: list[str], output: Path) -> None:
    """Run a compiler or linker that writes `output` (its last argument), atomically."""
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    command = [*command, "-o", str(temporary)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    if done.returncode:
        temporary.unlink(missing_ok=True)
        raise CompileError(f"the compiler ended with {done.returncode}: {shlex.join(command)}")
    os.replace(temporary, output)


class BuildNative(build_ext):
    """Compiles the changed sources in parallel and links each library."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def copy_extensions_to_source(self) -> None:
        (ROOT / "oper" / "_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        is_cuda = ext.name == CUDA
        compiler = [find_nvcc() or "nvcc"] if is_cuda else shlex.split(
            os.environ.get("CXX") or "g++")
        if shutil.which(compiler[0]) is None:
            sys.exit(f"oper's build needs the compiler {compiler[0]!r}: install g++ or set CXX.")
        flags = [*(CUDA_FLAGS + arch_flags() if is_cuda else HOST_FLAGS), *DEFINES,
                 "-Icsrc"]
        key = hashlib.sha256("\0".join([*compiler, *flags, *torch_version()[:1]]).encode())
        folder = ROOT / "build" / "objects" / key.hexdigest()[:12]
        objects = [folder / (s.replace("/", "_") + ".o") for s in ext.sources]
        stale = [(s, o) for s, o in zip(ext.sources, objects, strict=True)
                 if not is_current(o, [ROOT / s, *dependencies(o.with_suffix(".d"))])]
        library = Path(self.get_ext_fullpath(ext.name))
        if not stale and is_current(library, objects):
            return
        # The longest to compile first, so that none is left alone at the end. Size is the measure,
        # except for kernels_*.cpp: short files that include all kernels of the host.
        stale.sort(key=lambda job: ("/kernels_" not in job[0], -(ROOT / job[0]).stat().st_size))
        from torch.utils.cpp_extension import include_paths, library_paths

        includes = [f for path in include_paths() for f in ("-isystem", path)]
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(job: tuple[str, Path]) -> None:
            source, obj = job
            print(f"compiling {source}\n", end="", flush=True)  # one write, as threads print
            run_tool([*compiler, *flags, *includes, "-MMD", "-MF", str(obj.with_suffix(".d")),
                      "-MT", "object", "-c", source], obj)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(compile_one, stale))
        print(f"linking {ext.name.rpartition('.')[2]}.so", flush=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        # libtorch stands in for whatever the installed torch needs (the CUDA half too), and no
        # symbol that is used by name is found otherwise: keep it even when it seems unused.
        keep = ["-Xlinker", "--no-as-needed"]
        own = CUDA_FLAGS[3:5] if is_cuda else ["-pthread"]
        torch = [] if ext.name == SEARCH else [
            *keep, *(f"-L{path}" for path in library_paths()), *TORCH_LIBRARIES]
        run_tool([*compiler, "-shared", *own, *map(str, objects), *torch,
                  *(["-lcudart"] if is_cuda else [])], library)


class BuildPython(build_py):
    """Also puts the data set recipes of the top-level ``datasets/`` into the package."""

    def run(self) -> None:
        if not self.editable_mode:
            # What an earlier build left there may no longer exist in the sources.
            shutil.rmtree(Path(self.build_lib) / "oper", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            ignore = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / "datasets", Path(self.build_lib) / "oper" / "datasets",
                            ignore=ignore, dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """The libraries know no Python: one wheel per platform serves them all."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sys.path.insert(0, str(ROOT))
from oper.support.environment import BUILD, check_environment  # noqa: E402  (needs nothing that is built)

try:
    check_environment("cannot build", BUILD)
except ValueError as error:
    sys.exit(str(error))
# What only looks at the sources needs no torch. Everything else stops here without one, before pip
# resolves dependencies: it would fetch a torch of its own choice.
packing = bool({"sdist", "egg_info"} & set(sys.argv[1:]))
if not packing:
    torch_version()
extensions = [Extension(SEARCH, sources("csrc/search/*.cpp")),
              Extension(HOST, sources("csrc/host/**/*.cpp", "csrc/bindings/*.cpp"))]
if not packing and cuda_sources():
    extensions.append(Extension(CUDA, cuda_sources()))
setup(ext_modules=extensions,
      cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": PlatformWheel})
