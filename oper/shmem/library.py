"""Loads the compiled operators."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from oper.errors import InvalidInputError, MissingDependencyError
from oper.support.environment import check_environment, setting


def load() -> None:
    """Register the operators ``torch.ops.oper.*`` and check the environment variables.

    Raises:
        MissingDependencyError: torch or the compiled library is missing or does not load.
        InvalidInputError: an environment variable has an invalid value.
    """
    check_environment("cannot run lookups")
    register()
    check_kernels()


def check_kernels() -> None:
    """Raise InvalidInputError if the kernels in use are not those in ``OPER_CPU_KERNELS``.

    Call `register` first. The library reads the variable once, on first use.
    """
    wanted = setting("OPER_CPU_KERNELS", "cannot run lookups")
    if not wanted:
        return
    import torch

    used = torch.ops.oper.kernel_name()
    if used != wanted:
        raise InvalidInputError(
            "cannot run lookups", "environment variable OPER_CPU_KERNELS", wanted,
            f"kernels that this processor supports, set before the first lookup; {used} are in use",
            "unset the variable to use the best available ones")


@functools.cache
def register() -> None:
    """Register the operators ``torch.ops.oper.*`` (once per process).

    Raises:
        MissingDependencyError: torch or the compiled library is missing or does not load.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("cannot run lookups", "torch", str(error), "torch >= 2.11",
                                     "pip install torch") from None
    _load("liboper_host.so", "the compiled extension", torch.__version__)


@functools.cache
def load_device() -> Any:
    """Register the operators of the device back end; returns their namespace ``torch.ops.oper``.

    Raises:
        MissingDependencyError: torch has no CUDA, or the library is missing or does not load.
    """
    load()
    import torch

    if torch.version.cuda is None:
        raise MissingDependencyError("cannot use device memory", "torch", torch.__version__,
                                     "a CUDA build of torch",
                                     "install one, or shard a model on the CPU")
    _load("liboper_cuda.so", "the compiled CUDA extension, which needs nvcc", torch.__version__)
    return torch.ops.oper


def streams_of(device: Any) -> Any:
    """Return `torch.cuda` if work on this torch.device is ordered by streams, else None."""
    import torch

    return torch.cuda if device.type == "cuda" else None


def _load(name: str, what: str, torch_version: str) -> None:
    import torch

    path = Path(__file__).resolve().parent.parent / "_lib" / name
    if not path.exists():
        raise MissingDependencyError("cannot run lookups", "library", name, what,
                                     "run 'make setup', or 'python setup.py build_ext --inplace'")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise MissingDependencyError(f"cannot load {what}", "library", str(path),
                                     f"one that torch {torch_version} can load (torch >= 2.11)",
                                     f"build it again ({error})") from None
