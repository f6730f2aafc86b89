"""Valid inequalities about the owner of the largest pushed piece.

Let y be the largest load that a piece puts on its owner, in some phase and group, and T the length
of the phase. Then T >= y. The owner also reads, as every rank does:

* Own time. Let y be the excess of the piece's load over a reader's work for it. All other rows cost
  a rank at least the smaller of an owner's and a reader's work, R in total: T >= y + R.
* Links. A reader r takes s_r seconds for every byte that other hosts (on a single host: memory
  domains) own, of E bytes in total. The n ranks of its host, of W, own e bytes and send them to all
  others within T, or within T - R if the time of a link includes own work:
  `e (W - n) <= sum of (T - R) / s` over these n ranks. Hence `T + k (T - R) >= y + R + s E`, with
  k the largest `s_r / (W - n) sum 1 / s` over all ranks, which is `n / (W - n)` if links are equal,
  and s the least s_r. If the ranks of a host share its link, y contains the mean over them of the
  piece's bytes, every rank reads the same bytes from other hosts, and s_r is equal for all ranks of
  the host: the same inequality holds.
* A distinguished host (`Relaxation(distinguished=...)`). The ranks of the host (on a single host:
  memory domain) that owns the piece form a separate class, so that the solution includes, in every
  phase, the bytes that they need not read. This is tighter. Hosts must be interchangeable; the host
  is then the first without loss of generality, for the piece that is largest by one load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.search.cost.space import PUSH
from oper.search.problem.machine import GROUPS, REFRESH, TERMS, first_neighbourhood, neighbourhoods
from oper.search.relaxation.pieces import NUM_PIECE_GROUPS, Pieces
from oper.search.relaxation.rows import Option, ResourceRows
from oper.search.relaxation.units import LOCAL

Load = tuple[int, int]  # phase and group of terms
#: Kinds of rows, in this order in the module's docstring: own time, links, distinguished host.
READER, SPREAD, APART = "reader", "spread", "apart"


@dataclass(frozen=True, slots=True, eq=False)
class Inequality:
    """A valid inequality about the owner of the largest piece, stored as a row.

    Attributes:
        row: index of the row.
        kind: READER, SPREAD or APART.
        at: the load (phase, group) that the row bounds.
        load: the load by which the piece is the largest.
        spared: the factor k of SPREAD rows, whose value is at most 1 + k times the phase's length;
            0 for other rows.
    """

    row: int
    kind: str
    at: Load
    load: Load
    spared: float = 0.0


class OwnerInequalities:
    """Inequalities about the owner of the largest pushed piece: O further resource rows.

    Each states that consumption by all blocks is at most the weighted sum of the phases' lengths.
    O is 0 if nothing is pushed. If ranks are unequal, the owner is assumed to read as fast as the
    fastest rank.

    Args:
        rows: the resource rows; the indices of these rows follow theirs.
        pieces: the pushed pieces, with their tables.
        options: ways to place a block.
        distinguished: the load that determines the distinguished host, see `Relaxation`.

    Attributes:
        inequalities: the rows.
        phase_of: int64 [O], phase of each row; -2 for SPREAD rows, which may exceed their phase.
        weight: float64 [O, P], factor of each phase's length in the limit of each row.
        base: float64 [O], consumption by every plan.
        unit: float64 [C, 23, O], consumption by a unit of each load-vector row, spread over a
            class.
        every: float64 [23, O], consumption by a unit of each load-vector row on every rank.
    """

    def __init__(self, rows: ResourceRows, pieces: Pieces, options: list[Option],
                 distinguished: Load | None) -> None:
        self.pieces, self.options = pieces, options
        self.model, self.units = rows.model, pieces.units
        self.inequalities = [Inequality(rows.phase_of.size + n, *x)
                             for n, x in enumerate(self._rows(distinguished))]
        at = np.array([x.at for x in self.inequalities], np.int64).reshape(-1, 2)
        self._at = phase, _ = at[:, 0], at[:, 1]
        times = 1.0 + np.array([x.spared for x in self.inequalities])
        self.weight = np.zeros((times.size, len(self.model.phases)))
        self.weight[np.arange(times.size), phase] = times
        #: float64 [O], factor of a reader's own time; 0 if the load does not include own time.
        self._own = times * pieces.has_local[self._at]
        m, seen, units = self.model.machine, self.units.seen, self.units
        of_rank, _ = neighbourhoods(m)
        #: bool [C, S], of the ranks `seen`: those of other hosts; those of the first, except owner.
        self._far = of_rank[seen] != of_rank[seen[:, :1]]
        self._first = np.isin(seen, first_neighbourhood(m)) & (seen != seen[:, :1])
        self.phase_of = np.where(times == 1.0, phase, -2)
        floor = pieces.floor.min(axis=0)
        # Loads exceed phase times by no more than the dense compute that hides them.
        self.base = (floor[self._at] - times * pieces.hidden.max(axis=0)[phase, 0]
                     + (times - 1.0) * pieces.has_local[self._at] * floor[phase, LOCAL])
        self.unit = self.asked(units.each)
        self.every = self.asked(units.every).min(axis=0)

    def asked(self, units: np.ndarray) -> np.ndarray:
        """Return what units contribute to each inequality.

        Own time is counted on the rank where it is least. SPREAD rows count the least bytes that a
        rank of another host reads, over the fastest links; APART rows the least link time of the
        distinguished host's other ranks. Of a link that the ranks of a host share, each rank counts
        only its own bytes, because the piece's bytes on that link are part of y.

        Args:
            units: float64 [2, C, ..., 23], see `UnitRows`.

        Returns:
            float64 [C, ..., O].
        """
        if not self.inequalities:
            return np.zeros((*units.shape[1:-1], 0))
        loads = self.units.loads(units, by_rank=True)
        out = np.zeros((*loads.shape[:-3], len(self._own)))
        own = self.units.group_us(loads)[..., LOCAL, :].min(axis=(0, -1))
        out += own[..., self._at[0]] * self._own
        links = loads[..., 1:1 + NUM_PIECE_GROUPS, :]
        seconds = 1e6 * self.units.seconds(loads.ndim)[..., 1:1 + NUM_PIECE_GROUPS, :]
        far, first = (np.expand_dims(x, tuple(range(1, loads.ndim - 1)))
                      for x in (self._far, self._first))
        kinds = np.array([x.kind for x in self.inequalities], str)
        for which, least in (
                (kinds == SPREAD, seconds.min(axis=(0, -1))
                 * links.min(axis=(0, -1), initial=np.inf, where=far)),
                (kinds == APART, (links * seconds).min(axis=-1, initial=np.inf, where=first))):
            if which.any():
                at = least[..., self._at[0][which], self._at[1][which]]
                out[..., which] += np.where(np.isfinite(at), at, 0.0)  # there may be no such rank
        return out

    def _rows(self, distinguished: Load | None) -> Iterator[tuple[Any, ...]]:
        """Fields of each `Inequality` except its row."""
        model, pieces = self.model, self.pieces
        pushes = any(o.kind == PUSH for o in self.options)
        if model.machine.world_size == 1 or not pushes:
            return
        loads = [(phase, group)
                 for phase, name in enumerate(model.phases)
                 if phase >= model.request_phase and name != REFRESH  # not loaded by pieces
                 for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist()]
        for load in loads:
            yield READER, load, load
            if self._is_far(load):
                yield SPREAD, load, load, self._spared(load)
        # The piece is on the distinguished host, in whichever load the row counts it.
        if distinguished is not None and distinguished in loads:
            for load in filter(self._is_far, loads):
                yield APART, load, distinguished

    def _spared(self, load: Load) -> float:
        machine = self.model.machine
        of_rank, _ = neighbourhoods(machine)
        seconds = machine.seconds_per_unit[TERMS.index(GROUPS[load[1]])]
        others = machine.world_size - np.bincount(of_rank)[of_rank]
        return float((seconds * np.bincount(of_rank, 1 / seconds)[of_rank] / others).max())

    def _is_far(self, load: Load) -> bool:
        """Whether a load is on the links between hosts (on a single host: memory domains)."""
        of_rank, slowest = neighbourhoods(self.model.machine)
        return bool(of_rank.any()) and GROUPS[load[1]].split("_")[0] == slowest.split("_")[0]
