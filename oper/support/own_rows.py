"""Inverse indices by which every sample has a row of its own: who makes them can say so at no cost.

Who looks for it later reads memory that is in no cache by then.
"""

from __future__ import annotations

from typing import Any


def note_own_rows(rows: Any) -> None:
    """Say of a new tensor int64 [C, B] that row b of every line is b."""
    if not rows.is_inference():  # changes of such a one leave no trace
        rows.own_version = rows._version


def are_own_rows(rows: Any) -> bool:
    """Whether that was said of a tensor, and nobody has changed it since; False: not known."""
    version = getattr(rows, "own_version", None)
    return version is not None and version == rows._version
