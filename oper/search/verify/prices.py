"""A leaf of a certificate: which plans it is about, and its prices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PIECE_GROUPS = 5  # groups of terms that a pushed piece loads: it is not in host memory
#: What a leaf knows of a table: nothing, that no row of it is pushed, that some row is, that some
#: are and some not, that all are.
FREE, STILL, PUSHES, PARTLY, WHOLLY = 0, 1, 2, 3, 4
#: Kinds of rows about the rank that owns the piece with the largest load in a phase and group:
#: the load alone; beside what a rank reads; the same over links, where its host is spared what it
#: owns; that with the gradients which come back; and with the host's ranks as a class of their own.
KINDS = PIECE, READER, SPREAD, RETURNED, APART = "piece", "reader", "spread", "returned", "apart"


@dataclass(frozen=True, eq=False)
class Part:
    """Plans that share a relaxation.

    Attributes:
        plans: which, names of `oper.search.problem.space.PLANS`.
        classes: ranks by class; prices are the same for all ranks of one.
        memories, hosts: memory domains and hosts by class.
        apart: ranks of the host (or domain) that owns the largest piece, by `apart_load`; none.
        apart_load: the phase and group that this is about.
        beside_reader: whether a piece's own time is what its owner does more than a reader.
    """

    plans: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]
    memories: tuple[tuple[int, ...], ...]
    hosts: tuple[tuple[int, ...], ...]
    apart: tuple[int, ...]
    apart_load: tuple[int, int] | None
    beside_reader: bool


@dataclass(frozen=True, eq=False)
class Leaf:
    """Prices, and the part of the plans for which they bound the step.

    Attributes:
        load: float64 [P, 6, W], of a microsecond of every rank.
        memory: float64 [num_domains], of a byte that a domain holds, times `memory_us`.
        host: float64 [num_hosts], the same of host memory.
        memory_us: prices of full memories, which every plan may use.
        owner: kind, phase, group and price of rows about the owner of the largest piece.
        least, most: float64 [P, 5], between which the largest load of any one piece lies.
        step_us: what the phases together take at most, fixed costs apart.
        pushes: uint8 [T], what is known, by free table.
    """

    load: np.ndarray
    memory: np.ndarray
    host: np.ndarray
    memory_us: float
    owner: tuple[tuple[str, int, int, float], ...]
    least: np.ndarray
    most: np.ndarray
    step_us: float
    pushes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
