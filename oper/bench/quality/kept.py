"""Results of finished runs, kept as files whose names have a digest of all that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oper.support.files import atomic_write


def digest(*parts: Any) -> str:
    """First 12 digits of the SHA-256 of bytes or arrays."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]


def place(folder: str | None, name: str, *parts: Any) -> Path | None:
    """Path of a run's file in the folder of kept runs; None = the run is not kept.

    The name contains a digest of everything that the run depends on.
    """
    return None if folder is None else Path(folder, f"{name}-{digest(*parts)}.npz")


def once(path: Path | None, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a run, from its file if there is one; otherwise `make` makes them, and they are
    saved. The file appears complete or not at all."""
    if path is not None and path.exists():
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    found = dict[str, Any](make())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            np.savez_compressed(file, **found)
    return found
