"""Results of finished runs, kept as files whose names have a digest of all that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep the arrays of a run; the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        np.savez_compressed(file, **dict[str, Any](arrays))


def read(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a run, or None where it is not kept."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
