"""Nodes of a certificate's trees: which plans they are about; leaves have prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: What a node knows of a table: nothing, that no row of it is pushed, that some row is.
FREE, STILL, PUSHES = 0, 1, 2
#: Kinds of rows about the rank that owns the piece with the largest load in a phase and group: the
#: load beside what a rank reads; the same over links, where its host is spared what it owns; and
#: with the first host's ranks as classes of their own, taken to be where that piece is.
KINDS = READER, SPREAD, APART = "reader", "spread", "apart"


@dataclass(frozen=True, eq=False)
class Node:
    """Some of the plans, and prices for which they bound the step.

    Attributes:
        least, most: float64 [P, 5], between which the largest load of any one piece lies.
        step_us: what the phases together take at most, fixed costs apart.
        pushes: uint8 [T], what is known, by free table.
        weights: float64 [L, C], prices of a microsecond of a rank of each class by phase and group
            of terms, then of a byte of device and of host memory; see
            `oper.search.certificate.loads.Loads`.
        memory_us: prices of full memories, which every plan may use.
        owner: kind, phase, group and price of rows about the owner of the largest piece.
    """

    least: np.ndarray
    most: np.ndarray
    step_us: float
    pushes: np.ndarray
    weights: np.ndarray
    memory_us: float = 0.0
    owner: tuple[tuple[str, int, int, float], ...] = ()
