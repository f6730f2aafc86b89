"""Loads the compiled operators."""

from __future__ import annotations

import functools
from pathlib import Path

from oper.errors import MissingDependencyError, fail


@functools.cache
def load() -> None:
    """Register the operators ``torch.ops.oper.*`` (once per process).

    Raises:
        MissingDependencyError: torch or the compiled library is missing or does not load.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            fail("cannot run lookups", "torch", str(error), "torch >= 2.11", "pip install torch")
        ) from None
    _load("liboper_host.so", "the compiled extension", torch.__version__)


@functools.cache
def load_device() -> None:
    """Register the operators of the device back end, ``torch.ops.oper.device_*``.

    Raises:
        MissingDependencyError: torch has no CUDA, or the library is missing or does not load.
    """
    load()
    import torch

    if torch.version.cuda is None:
        raise MissingDependencyError(
            fail("cannot use device memory", "torch", torch.__version__, "a CUDA build of torch",
                 "install one, or shard a model on the CPU"))
    _load("liboper_cuda.so", "the compiled CUDA extension, which needs nvcc", torch.__version__)


def _load(name: str, what: str, torch_version: str) -> None:
    import torch

    path = Path(__file__).resolve().parent.parent / "_lib" / name
    if not path.exists():
        raise MissingDependencyError(
            fail("cannot run lookups", "library", name, what,
                 "run 'make setup', or 'python setup.py build_ext --inplace'"))
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise MissingDependencyError(
            fail(f"cannot load {what}", "torch", torch_version, "torch >= 2.11",
                 f"build it again ({error})")) from None
