"""Store results of finished runs in files, whose names include a digest of all their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oper.support.files import atomic_write


def digest(*parts: Any) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the concatenated `parts` (bytes or arrays).
    """
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]


def place(folder: str | None, name: str, *parts: Any) -> Path | None:
    """Path of a run's file in `folder`; None without a folder, so that the run is not stored.

    The file's name contains a digest of `parts`, the run's inputs (bytes or arrays).
    """
    return None if folder is None else Path(folder, f"{name}-{digest(*parts)}.npz")


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
