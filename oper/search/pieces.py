"""Pushed pieces: how much of a table one owner may hold when a step may take so long at most.

The mean over ranks spreads a pushed table over all of them for the price of one id stream and one
partial sum per bag. A plan cannot: an owner receives the ids of every column piece that it holds,
and sends a partial sum for every bag that meets its rows. What a table pays therefore follows from
its largest pieces, and those are limited: whoever owns a piece is busy with it for at least its own
load, so that in a plan of at most T microseconds no piece has a load above T. A column of a table
whose pieces are `w` wide and hold at most the mass `q` pays `D / w` id streams and at least
`pb(q) / q` bytes of partial sums per unit of mass, `pb` being concave.

So for any T and any prices a plan takes at least min(T, the priced bound with pieces that fit T).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.search.cost import NUM_ROWS, PARTIALS, CostModel
from oper.search.machine import COMPUTE, MEMORY, RankClasses
from oper.search.problem import IDS, TableProblem

MIN_COLUMNS = 8  # pieces of the space are at least so wide: one memory sector of float32
COLUMN_STEP = 4  # and their edges are multiples of this: one vector load
_RATIO = 1.15  # of the widths that a bound does not tell apart
_GRID = 64


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Plans by the largest load that any one pushed piece puts on its owner, phase by phase.

    Attributes:
        least, most: float64 [num_phases, 5], microseconds by phase and group of terms.
        step: what all phases together take at most, without fixed costs.
    """

    least: np.ndarray
    most: np.ndarray
    step: float = np.inf

    def admits(self, own: np.ndarray, floor: np.ndarray) -> np.ndarray:
        """Whether a piece may load its owner by `own` (float64 [..., num_phases, 5]); bool [...].

        Args:
            own: the piece's load.
            floor: float64 [..., num_phases, 5], what its owner carries anyway, beyond the dense
                compute that hides it.
        """
        small = (own <= self.most).all(axis=(-2, -1))
        phases = np.maximum((own + floor).max(axis=-1), 0.0)
        return np.asarray(small & (phases.sum(axis=-1) <= self.step))


@dataclass(frozen=True, slots=True, eq=False)
class PieceTypes:
    """Pieces of one table that fit a limit.

    Attributes:
        streams: float64 [J], least id streams per column.
        mass: float64 [J], largest mass of one owner, of the table's whole mass 1 (0: none fits).
    """

    streams: np.ndarray
    mass: np.ndarray


def column_widths(t: TableProblem, split: bool) -> list[tuple[int, int]]:
    """Intervals (narrowest, widest) that cover all widths a piece may have, the whole row first."""
    dim = t.spec.dim
    if not split:
        return [(dim, dim)]
    widths = np.arange(-(-dim // COLUMN_STEP) * COLUMN_STEP - COLUMN_STEP, MIN_COLUMNS - 1,
                       -COLUMN_STEP)
    if not widths.size:
        return [(dim, dim)]
    # Intervals that grow with the width, the narrow ones of a single width.
    level = np.floor(np.log(widths / widths[-1]) / np.log(_RATIO))
    parts = np.split(widths, np.flatnonzero(np.diff(level)) + 1)
    return [(dim, dim), *((int(p[-1]), int(p[0])) for p in parts)]


def own_load(model: CostModel, ranks: list[int]) -> np.ndarray:
    """Microseconds that a unit of each tally row costs the rank which owns it.

    Args:
        model: the cost model.
        ranks: one rank of each class.

    Returns:
        float64 [C, 12, num_phases, 5].
    """
    out = []
    for rank in ranks:
        unit = np.zeros((NUM_ROWS, NUM_ROWS, model.machine.world_size))
        unit[np.arange(NUM_ROWS), np.arange(NUM_ROWS), rank] = 1.0
        out.append(_groups(model.loads(unit) * model.machine.seconds_per_unit * 1e6)[..., rank])
    return np.stack(out)


def _groups(loads: np.ndarray) -> np.ndarray:
    """[..., 6, W] by term -> [..., 5, W] by group."""
    local = loads[..., MEMORY:MEMORY + 1, :] + loads[..., COMPUTE:COMPUTE + 1, :]
    return np.concatenate([local, loads[..., 2:, :]], axis=-2)


class Pieces:
    """Which pushed pieces fit, for every table and class of ranks.

    Attributes:
        box: the plans whose pieces these are.
        floor: float64 [C, num_phases, 5], what every plan puts on a rank, by class.
        hidden: float64 [C, num_phases, 1], most dense compute that a rank's phase runs beside.
    """

    def __init__(self, model: CostModel, tables: tuple[TableProblem, ...], classes: RankClasses,
                 base_rows: np.ndarray) -> None:
        self.model, self.tables = model, tables
        first = [int(r[0]) for r in classes.ranks]
        self.unit = own_load(model, first)  # [C, 12, P, 5]
        base = _groups(model.loads(base_rows) * model.machine.seconds_per_unit * 1e6)
        # What every plan puts on the least loaded rank of each class.
        hidden = np.stack([1e6 * model.hidden[:, r].max(axis=-1) for r in classes.ranks])
        self.floor = np.stack([base[..., r].min(axis=-1) for r in classes.ranks])
        self.hidden = hidden[:, :, None]  # [C, P, 1]
        split = "columns" in model.problem.allow
        self.widths = [column_widths(t, split) for t in tables]
        self._first = first
        grid = np.concatenate([[0.0], np.geomspace(1e-5, 1.0, _GRID)])
        self.grid = grid
        self._sums = [model.partial_bytes(t, t.spec.dim, grid * t.total[IDS]) for t in tables]
        self._whole = [PieceTypes(np.ones(1), np.ones(1))] * len(tables)
        shape = self.floor.shape[1:]
        self.set_box(Box(np.zeros(shape), np.full(shape, np.inf)))

    def set_box(self, box: Box) -> None:
        """Admit the pieces that plans of `box` may have."""
        self.box = box
        self.types: list[list[PieceTypes]] = []
        for k in range(len(self.tables)):
            fits = box.admits(self._load(k), self.floor - self.hidden)
            self.types.append([self._whole[k] if fits[c] else self._types(k, c)
                               for c in range(fits.size)])

    def is_whole(self, k: int) -> bool:
        """Whether table `k` fits every class as one piece."""
        return all(x.mass.size == 1 and x.mass[0] >= 1.0 for x in self.types[k])

    @property
    def everything_fits(self) -> bool:
        """Whether the limit excludes nothing."""
        return all(self.is_whole(k) for k in range(len(self.tables)))

    def _ids(self, k: int, width: int) -> np.ndarray:
        """Tally rows that an owner of all ids of `width` columns pays at least; float64 [C, 12]."""
        t, classes = self.tables[k], np.arange(len(self._first))
        owner = np.zeros((classes.size, 4, self.model.machine.world_size))
        owner[classes, IDS, self._first] = t.total[IDS]
        return np.asarray(self.model.push_rows(t, width, owner)[classes, :, self._first])

    def _load(self, k: int) -> np.ndarray:
        """Own load of the whole table as one piece; float64 [C, num_phases, 5]."""
        rows = self._ids(k, self.tables[k].spec.dim)
        rows[:, PARTIALS] = self._sums[k][-1]
        return np.asarray(np.einsum("cq,cqpg->cpg", rows, self.unit))

    def load(self, k: int, c: int, j: int, mass: float) -> np.ndarray:
        """Own load of a piece of type `j` at least, of at most `mass`; float64 [num_phases, 5]."""
        t, width = self.tables[k], self.widths[k][j][0]
        rows = self._ids(k, width)[c] * mass
        rows[PARTIALS] = self.model.partial_bytes(t, width, np.array(mass * t.total[IDS]))
        return np.asarray(np.einsum("q,qpg->pg", rows, self.unit[c]))

    def _types(self, k: int, c: int) -> PieceTypes:
        """Largest mass by interval of widths, from above: the sums are interpolated from below."""
        widths, dim = self.widths[k], self.tables[k].spec.dim
        narrow = np.array([w[0] for w in widths])
        ends = np.stack([self._ids(k, int(w))[c] for w in narrow[[0, -1]]])
        # Rows are linear in the width.
        along = (narrow - narrow[0]) / min(-1, int(narrow[-1]) - int(narrow[0]))
        rows = ends[0] + along[:, None] * (ends[1] - ends[0])
        ids = np.einsum("jq,qpg->jpg", rows, self.unit[c])[:, None]
        sums = self.unit[c, PARTIALS] * (narrow / dim)[:, None, None, None]

        def fits(mass: np.ndarray) -> np.ndarray:
            amount = np.interp(mass, self.grid, self._sums[k])[..., None, None]
            own = mass[..., None, None] * ids + amount * sums
            return self.box.admits(own, self.floor[c] - self.hidden[c])

        low, high = np.zeros((narrow.size, 1)), np.ones((narrow.size, 1))
        whole, some = fits(high), fits(low)
        for _ in range(16):
            middle = (low + high) / 2
            good = fits(middle)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        mass = np.where(whole, 1.0, np.where(some, high, 0.0))[:, 0]
        return PieceTypes(dim / np.array([w[1] for w in widths], float), mass)
