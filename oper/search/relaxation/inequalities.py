"""Valid inequalities of the relaxation about the owner of the largest pushed piece.

Let y be the largest load that a piece puts on its owner, in some phase and group. The phase takes
at least y, and also at least y plus what the owner does as a reader. An owner reads its own piece,
too. So for its own time, y is the excess over a reader's work for that piece, and all other rows
cost it at least the smaller of an owner's and a reader's part, R in total. Over links, a reader r
takes s_r seconds for every byte that other hosts (on a single host, memory domains) own, of E in
all. The n of W ranks of its own host own e bytes and send them to all others within T, or within T
- R if the time of a link includes the rank's own work: `e (W - n) <= sum over them of (T - R) / s`.
So `T + k (T - R) >= y + R + s E` with k the largest `s_r / (W - n) sum 1 / s` of all ranks, which
is `n / (W - n)` where links are alike, and s the least s_r. If the ranks of a host share its link,
y contains the mean over them of the bytes that the piece sends or receives, every rank reads the
same bytes from other hosts, and s_r is equal for all ranks of the host: the same inequality holds.

Better still is a relaxation in which the ranks of the host (on a single host: of the memory domain)
that owns the piece are a class of their own (`Relaxation(distinguished=...)`): the solution then
includes, in every phase, the bytes that such a rank need not read. Hosts are interchangeable, so
this host can be taken to be the first, for the piece that is largest by one load; the piece's other
loads are bounded as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.search.cost.space import PUSH
from oper.search.problem.machine import GROUPS, TERMS, first_neighbourhood, neighbourhoods
from oper.search.relaxation.pieces import NUM_PIECE_GROUPS, Pieces
from oper.search.relaxation.rows import Option, ResourceRows
from oper.search.relaxation.units import LOCAL

Load = tuple[int, int]  # phase and group of terms
#: Kinds of rows: the load of the piece beside what a rank reads; the same over links, where its
#: host is spared what it owns; with the distinguished host.
READER, SPREAD, APART = "reader", "spread", "apart"


@dataclass(frozen=True, slots=True, eq=False)
class Inequality:
    """A valid inequality about the owner of the largest piece, stored as a row.

    Attributes:
        row: index of the row.
        kind: which of the inequalities above it is.
        at: phase and group of terms of the load that it is about.
        load: the load by which the piece is the largest.
        spared: the factor k of rows about links: the row is at most 1 + k times its phase, k of
            which account for the senders' own work.
    """

    row: int
    kind: str
    at: Load
    load: Load
    spared: float = 0.0


class OwnerRows:
    """The O rows with inequalities about the owner of the largest piece; none if nothing is pushed.

    Where ranks are unequal, the owner is assumed to read as fast as the fastest rank.

    Args:
        rows: the resource rows, which these follow.
        pieces: the pushed pieces, with their tables.
        options: ways to place a block.
        distinguished: the load whose owner's host is distinguished, see `Relaxation`.

    Attributes:
        inequalities: the rows.
        phase_of: int64 [O], phase of each row, -2 for rows that may exceed their phase.
        weight: float64 [O, P], a row is at most the weighted sum of the phases' times.
        base: float64 [O], what every plan consumes.
        unit: float64 [C, 23, O], what a unit of each tally row, spread over a class, consumes.
        every: float64 [23, O], what a unit of each tally row on every rank consumes.
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
        #: float64 [O], how often own time counts: where it is part of the load, that of the reader.
        self._own = times * pieces.has_local[self._at]
        m, seen, units = self.model.machine, self.units.seen, self.units
        of_rank, _ = neighbourhoods(m)
        #: bool [C, S], ranks seen from the owner that are elsewhere, and others of the first host.
        self._far = of_rank[seen] != of_rank[seen[:, :1]]
        self._first = np.isin(seen, first_neighbourhood(m)) & (seen != seen[:, :1])
        self.phase_of = np.where(times == 1.0, phase, -2)
        floor = pieces.floor.min(axis=0)
        # Loads exceed the phases by the dense compute that hides them, at most.
        self.base = (floor[self._at] - times * pieces.hidden.max(axis=0)[phase, 0]
                     + (times - 1.0) * pieces.has_local[self._at] * floor[phase, LOCAL])
        self.unit = self.asked(units.each)
        self.every = self.asked(units.every).min(axis=0)

    def asked(self, units: np.ndarray) -> np.ndarray:
        """Consumption of the rows by units, from their loads on ranks as seen from the owner.

        Rows about a rank's own time take it on the rank where it is least. Rows about links take
        the bytes that ranks of other neighbourhoods read, over the fastest links; for the
        distinguished host, what its other ranks have there. Of a link shared by the ranks of a host
        only their own bytes count, since the piece's part of the link is counted apart.

        Args:
            units: float64 [2, C, ..., 20], see `UnitRows`.

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
                 for phase in range(model.request_phase, len(model.phases))
                 for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist()]
        for load in loads:
            yield READER, load, load
            if self._is_far(load):
                yield SPREAD, load, load, self._spared(load)
        # The piece is on a rank of the distinguished host, whatever else it loads.
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
        """Whether bytes of a load go over the slowest links."""
        of_rank, slowest = neighbourhoods(self.model.machine)
        return bool(of_rank.any()) and GROUPS[load[1]].split("_")[0] == slowest.split("_")[0]
