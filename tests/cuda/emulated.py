"""The device back end of these tests: a GPU, or csrc/device compiled against emulation.h."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from oper.shmem import library
from oper.shmem.batch import Lookup

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi",
         "-DOPER_EMULATED", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-Icsrc",
         "-Itests/cuda"]


def sources() -> list[Path]:
    return [*sorted(ROOT.glob("csrc/device/kernels/*.cu")), ROOT / "csrc/device/context.cpp",
            *sorted(ROOT.glob("csrc/bindings/device*.cpp")), ROOT / "tests/cuda/emulation.cpp"]


@functools.cache
def build() -> Path:
    """The emulated library; kept between runs while nothing that it is made of changes."""
    digest = hashlib.sha256(repr((FLAGS, torch.__version__)).encode())
    for pattern in ("csrc/device/*.*", "csrc/device/kernels/*", "csrc/common/*",
                    "csrc/bindings/device*", "tests/cuda/emulation.*"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    folder = ROOT / "build" / f"emulated-{digest.hexdigest()[:12]}"
    library = folder / "liboper_emulated.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    includes = [f for path in include_paths() for f in ("-isystem", path)]

    def compile_one(source: Path) -> str:
        out = folder / f"{source.name}.o"
        _run([*compiler, *FLAGS, *includes, "-x", "c++", "-c", str(source), "-o", str(out)])
        return str(out)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources()))
    part = folder / f"{os.getpid()}.so"
    _run([*compiler, "-shared", *objects, *(f"-L{p}" for p in library_paths()),
          "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(part)])
    part.replace(library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


_load_device: Callable[[], Any] = library.load_device


@functools.cache
def has_gpu() -> bool:
    """Whether the tests run on a real device instead."""
    return torch.cuda.is_available()


@functools.cache
def load() -> Any:
    """Stands in for `oper.shmem.library.load_device`."""
    if has_gpu():
        return _load_device()
    library.load()
    torch.ops.load_library(str(build()))
    return torch.ops.oper_emulated


def replace_library() -> None:
    """Have this process' tables use it; for processes that end with their test."""
    library.load_device = load


class _HostLookup(torch.autograd.Function):
    """A lookup whose backward pass runs on the caller's thread: its tensors are the host's.

    Autograd has one thread per device, in which virtual ranks could not wait for each other.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, tables: Any,
                batch: Lookup) -> torch.Tensor:
        out, offsets = tables.forward(batch, collective=True)
        ctx.call = (tables, batch, offsets)
        return out.cpu()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[None, torch.Tensor | None, None, None]:
        tables, batch, offsets = ctx.call
        gradient = grads[0].to(tables.device)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = tables.weight_gradient(gradient, batch, offsets).cpu()
        tables.apply_gradients(gradient, batch, offsets)
        return None, of_weights, None, None


class FromHost:
    """Tables on a GPU that take batches in host memory and give results there, as tests do."""

    def __init__(self, tables: Any) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def _move(self, batch: Lookup) -> Lookup:
        to = self._tables.device
        return replace(batch, ids=batch.ids.to(to), lengths=batch.lengths.to(to),
                       weights=None if batch.weights is None else batch.weights.to(to))

    def lookup(self, batch: Lookup) -> torch.Tensor:
        moved = self._move(batch)
        if self._tables.optimizers is None or not torch.is_grad_enabled():
            plain: torch.Tensor = self._tables.lookup(moved)
            return plain.cpu()
        out: torch.Tensor = _HostLookup.apply(  # type: ignore[no-untyped-call]
            self._tables.anchor.detach().cpu().requires_grad_(), batch.weights, self._tables, moved)
        return out

    def resolve(self, batch: Lookup) -> Lookup:
        found: Lookup = self._tables.resolve(self._move(batch))
        return found

    def replica(self, *args: Any) -> torch.Tensor:
        found: torch.Tensor = self._tables.replica(*args)
        return found.cpu()


def device_tables(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `ShardedTables`."""
    from oper.shmem.device_tables import DeviceTables

    if not has_gpu():
        return DeviceTables(*args, device="cpu", **kwargs)
    return FromHost(DeviceTables(*args, device="cuda", **kwargs))
