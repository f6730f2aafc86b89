"""The contents of a leaf of a proof, and the prices that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: State of a table in a node: undecided, pushes no rows, pushes some rows.
FREE, STILL, PUSHES = 0, 1, 2
#: Kinds of rows about the owner of the largest piece, as in docs/explanation/formulation.md: own
#: work; links; links with the first host, the assumed owner, distinguished.
OWNER_INEQUALITIES = READER, SPREAD, APART = "reader", "spread", "apart"


@dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf of a proof: limits that its plans satisfy, and the prices that bound their step time.

    Attributes:
        least, most: float64 [P, 5], limits on the largest load of any pushed piece, microseconds.
        step_us: cutoff for the sum of all phases, without fixed costs.
        pushes: uint8 [T], FREE, STILL or PUSHES for each free table.
        weights: float64 [L, C], prices per microsecond of a rank of each class by phase and group
            of terms, then per byte of device and of host memory; for L see
            `oper.search.certificate.loads.Loads`.
        memory_us: sum of the prices of all memory rows.
        owner: kind, phase, group and price of each row about the owner of the largest piece.
    """

    least: np.ndarray
    most: np.ndarray
    step_us: float
    pushes: np.ndarray
    weights: np.ndarray
    memory_us: float = 0.0
    owner: tuple[tuple[str, int, int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class UnitPrices:
    """What a unit of load costs at a leaf's prices, for T tables and C classes of owners.

    Attributes:
        cost: maps each way of holding rows (`KINDS` of `oper.search.cost.space`) to float64
            [2, T, C, 4]: price of a unit of each feature in a piece of all columns, and the part of
            it that does not depend on the number of columns.
        partial: float64 [T, C], price of a byte of partial sums.
        own: float64 [C], price of an id that a rank pushes to itself.
        piece: price of each further column piece of a table.
        tier: price of a nanosecond per id in every pass over a table's ids, as several tiers take.
        bag: price of a bag of a table with pushed rows.
    """

    cost: dict[str, np.ndarray]
    partial: np.ndarray
    own: np.ndarray
    piece: float
    tier: float
    bag: float
