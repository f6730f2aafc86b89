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
    path = Path(__file__).resolve().parent.parent / "_lib" / "liboper_host.so"
    if not path.exists():
        raise MissingDependencyError(
            fail("cannot run lookups", "library", path.name, "the compiled extension",
                 "run 'make setup', or 'python setup.py build_ext --inplace'"))
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise MissingDependencyError(
            fail("cannot load the compiled extension", "torch", torch.__version__,
                 "torch >= 2.11", f"build it again ({error})")) from None
