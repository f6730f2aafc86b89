"""Versions of installed packages."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from oper import __version__

_RECORDED = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow", "highspy")


def version_of(*distributions: str) -> str | None:
    """Return the version of the first installed one of `distributions`; None if none is."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def own_version() -> str:
    """Return OPER's version; of a git checkout with the commit, e.g. ``0.1.0+g1a2b3c4d5e6f``, and
    ``.dirty`` after it if files differ from that commit."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        done = subprocess.run(  # without locks, since it would write the index of the checkout
            ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--exclude=*",
             "--abbrev=12", "--dirty=.dirty"],
            capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or the checkout is another user's
        return __version__
    return f"{__version__}+g{done.stdout.strip()}"


def versions() -> dict[str, str]:
    """Return the versions of OPER, Python and installed libraries by name."""
    found = {name: version_of(name) for name in _RECORDED}
    return {"oper": own_version(), "python": platform.python_version(),
            **{name: version for name, version in found.items() if version is not None}}
