"""Ways to place a block of rows, as the relaxation tells them apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """A way to place a block: its `kind` (`oper.search.cost.space.KINDS`), and the rank class that
    owns it, or has the master copies (-1: all ranks)."""

    kind: str
    rank_class: int
