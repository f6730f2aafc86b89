"""Store results of finished runs in files, whose names include a digest of all their inputs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import oper.rl_rec
from oper.support.files import atomic_write


def place(folder: str | None, name: str, *parts: Any) -> Path | None:
    """Path of a run's file in `folder`; None without a folder, so that the run is not stored.

    The file's name contains a digest of `parts`, the run's inputs (bytes or arrays), and of the
    source files of `oper.rl_rec`: if one of these changes, stored runs are void.
    """
    if folder is None:
        return None
    digest = _sources().copy()
    for part in parts:
        digest.update(part)
    return Path(folder, f"{name}-{digest.hexdigest()[:12]}.npz")


@functools.cache
def _sources() -> hashlib._Hash:
    found = hashlib.sha256()
    for path in sorted(Path(str(oper.rl_rec.__file__)).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found


def once(path: Path | None, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a run: read from its file if that exists, otherwise made by `make` and written
    atomically if `path` is given."""
    if path is not None and path.exists():
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    found = dict[str, Any](make())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            np.savez_compressed(file, **found)
    return found
