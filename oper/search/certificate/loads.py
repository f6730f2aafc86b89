"""Loads that table rows and other units put on ranks, found by probing the cost model.

The checker uses the problem statement and the cost model, which define the time of a step, but
nothing of the search or its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from oper.search.cost.load_vector import Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import COPIES, copy_load_vectors, model_classes, row_makers
from oper.search.problem.machine import GROUPS, first_neighbourhood, neighbourhoods
from oper.search.problem.statement import NUM_FEATURES, TableProblem

LOCAL, PIECE_GROUPS = GROUPS.index("local"), 5  # the first 5 groups: no pushed piece loads others


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Loads of one unit of each of F kinds, by the class of the rank that owns the units.

    Attributes:
        total: float64 [..., C, F, L, C], loads summed over the ranks of each class (last axis).
            Axis L = 8 P + 2: microseconds by phase and group of terms, bytes in device memory,
            bytes in host memory.
        own: float64 [..., C, F, P, 5], load on the owner, microseconds.
        read: float64 [..., C, F, P], own time of the least loaded reader, microseconds.
        far: float64 [..., C, F, P, 5], least link load of any rank of another host (on a single
            host: memory domain) if all ranks had the fastest links, microseconds.
        apart: float64 [..., C, F, P, 5], least link load of any rank of the first host except the
            owner, microseconds; of a shared link, only the rank's own bytes are counted.
    """

    total: np.ndarray
    own: np.ndarray
    read: np.ndarray
    far: np.ndarray
    apart: np.ndarray

    @staticmethod
    def stack(parts: Sequence[Loads]) -> Loads:
        """Stack several loads along a new first axis."""
        return Loads(*(np.stack([getattr(x, f.name) for x in parts]) for f in fields(Loads)))


class Probe:
    """Evaluates the cost model for single units.

    Args:
        apart: whether ranks of the first host (on a single host: memory domain) form classes of
            their own.

    Attributes:
        classes: classes of interchangeable ranks.
        first: int64 [C], the first rank of each class, which owns the probed units.
    """

    def __init__(self, model: CostModel, apart: bool) -> None:
        self.model, m = model, model.machine
        first = first_neighbourhood(m) if apart else []
        self.classes = model_classes(model, [first] if apart else [])
        self.first = np.array([r[0] for r in self.classes.ranks])
        #: bool [C, 1, 1, 1, W]: the owner; ranks of other hosts; the first host without the owner.
        self._owner = (np.arange(m.world_size) == self.first[:, None])[:, None, None, None]
        of_rank, _ = neighbourhoods(m)
        self._far = (of_rank != of_rank[self.first][:, None])[:, None, None, None]
        self._apart = np.isin(np.arange(m.world_size), first) & ~self._owner

    def units(self, number: int) -> np.ndarray:
        """One unit of each of `number` features, or load-vector rows, on the first rank of each
        class; float64 [C, number, number, W]."""
        return np.eye(number)[:, :, None] * self._owner[:, :, 0]

    def loads(self, rows: np.ndarray) -> Loads:
        """Loads of the given load-vector rows (float64 [..., C, F, 23, W], owned by the first rank
        of each class)."""
        return self._loads(self.model.loads(rows), rows[..., [Row.HELD, Row.HOST_HELD], :])

    def table(self, t: TableProblem, kind: str) -> Loads:
        """Loads of each feature of a table's rows that are held as `kind`, one of
        `oper.search.cost.space.KINDS`.

        The result is [2, C, 4, ...]: loads of a piece of all columns, and the part that does not
        depend on the width. A piece with a share q of the columns has load q x the first plus
        (1 - q) x the second. Tables with copies are not cut.
        """
        if kind == COPIES:
            load_vectors = copy_load_vectors(self.model, t)
            return self._loads(*(np.stack([x, 0 * x])[:, None] for x in (
                np.stack([self.model.units(x) for x in load_vectors]),
                np.stack([x.rows[[Row.HELD, Row.HOST_HELD]] for x in load_vectors]))))
        make, owner = row_makers(self.model)[kind], self.units(NUM_FEATURES)
        once, twice = make(t, t.spec.dim, owner), make(t, 2 * t.spec.dim, owner)
        # Owners of a row's columns exchange squares; `cut_rows` adds them, for the total only.
        cut = self.loads(np.stack([once, self.model.cut_rows(t, once, twice)]))
        return replace(self.loads(np.stack([once, 2 * once - twice])), total=cut.total)

    def _loads(self, units: np.ndarray, held: np.ndarray) -> Loads:
        groups = self.model.group_us(units)
        us, links, seconds = groups[..., :PIECE_GROUPS, :], units[..., 1:1 + PIECE_GROUPS, :], (
            1e6 * self.model.machine.seconds_per_unit[1:1 + PIECE_GROUPS])

        def least(values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
            out = np.where(ranks, values, np.inf).min(axis=-1)
            return np.where(np.isfinite(out), out, 0.0)  # there may be no such rank

        return Loads(self.by_class(groups, held), (us * self._owner).sum(axis=-1),
                     us[..., LOCAL, :].min(axis=-1),
                     least(links, self._far) * seconds.min(axis=-1),
                     least(links * seconds, self._apart))

    def by_class(self, groups: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Sum loads over each class: microseconds float64 [..., P, 8, W] and bytes held [..., 2, W]
        -> [..., L, C]."""
        us = groups.reshape(*held.shape[:-2], -1, held.shape[-1])
        every = np.concatenate([us, held], axis=-2)
        return np.stack([every[..., r].sum(axis=-1) for r in self.classes.ranks], axis=-1)
