"""A leaf of a certificate: which plans it is about, and its prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: What a leaf knows of a table: nothing, that no row of it is pushed, that some row is, that some
#: are and some not, that all are.
FREE, STILL, PUSHES, PARTLY, WHOLLY = 0, 1, 2, 3, 4
#: Kinds of rows about the rank that owns the piece with the largest load in a phase and group:
#: the load alone; beside what a rank reads; the same over links, where its host is spared what it
#: owns; and with the host's ranks as a class of their own.
KINDS = PIECE, READER, SPREAD, APART = "piece", "reader", "spread", "apart"


@dataclass(frozen=True, eq=False)
class Part:
    """Plans that share a relaxation.

    Attributes:
        plans: which, names of `oper.search.problem.space.PLANS`.
        classes: ranks by class; prices of loads are the same for all ranks of one.
        memories: masks bool [W] of ranks whose domains (or hosts) share one memory price.
        apart: ranks of the host (or domain) taken to own the piece with the largest `apart_load`;
            may be empty.
        apart_load: the phase and group that this is about. That piece has the least share of its
            other loads that any piece has.
    """

    plans: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]
    memories: tuple[np.ndarray, ...]
    apart: tuple[int, ...]
    apart_load: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Leaf:
    """Prices, and the part of the plans for which they bound the step.

    Attributes:
        least, most: float64 [P, 5], between which the largest load of any one piece lies.
        step_us: what the phases together take at most, fixed costs apart.
        pushes: uint8 [T], what is known, by free table.
        weights: float64 [L, W], prices of a microsecond of every rank by phase and group of terms,
            then of a byte of device and of host memory; see `oper.search.verify.loads.Loads`.
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
