"""Formatting of text output."""

from __future__ import annotations

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Format a table as lines; columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if k in left else cell.rjust(width)
                      for k, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows]
