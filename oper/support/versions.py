"""Versions of installed packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

from oper import __version__

_RECORDED = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow", "highspy")


def version_of(*distributions: str) -> str | None:
    """Return the version of the first installed one of `distributions`; None if none is."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def versions() -> dict[str, str]:
    """Return the versions of OPER, Python and installed libraries by name."""
    found = {name: version_of(name) for name in _RECORDED}
    return {"oper": __version__, "python": platform.python_version(),
            **{name: version for name, version in found.items() if version is not None}}
