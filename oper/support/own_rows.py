"""Marks for inverse indices that give every sample its own row.

The creator of the indices knows this at no cost; checking it later would read memory that is no
longer cached.
"""

from __future__ import annotations

from typing import Any


def note_own_rows(rows: Any) -> None:
    """Mark a new tensor int64 [C, B] in which element b of every row is b."""
    if not rows.is_inference():  # changes of such a one leave no trace
        rows.own_version = rows._version


def are_own_rows(rows: Any) -> bool:
    """Whether a tensor is marked and unchanged since; False means that it is not known."""
    version = getattr(rows, "own_version", None)
    return version is not None and version == rows._version
