"""Marks for inverse indices that map every sample b to bag b.

The creator of the indices knows this at no cost; checking it later would read memory that is no
longer in the processor's cache.
"""

from __future__ import annotations

from typing import Any


def note_own_rows(rows: Any) -> None:
    """Mark a new int64 tensor [C, B] in which element b of every row is b."""
    if not rows.is_inference():  # inference tensors have no version counter
        rows.own_version = rows._version


def are_own_rows(rows: Any) -> bool:
    """Whether a tensor is marked and unchanged since then; False means unknown."""
    version = getattr(rows, "own_version", None)
    return version is not None and version == rows._version
