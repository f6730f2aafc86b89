"""Valid inequalities of the relaxation about the owner of the largest pushed piece.

Let y be the largest load that a piece puts on its owner, in some phase and group. The phase takes
at least y, and at least y beside what the owner does as a reader. An owner reads its own piece,
too: of its own time, y is what it does more for that piece than a reader, and what else it owns
costs it the lesser of an owner's and a reader's part, R in all. Over links, a reader r takes s_r
seconds for every byte that other hosts (on a single host, memory domains) own, of E in all. What
the n of W ranks of its own host own, e, they send to all others within T, and where the time of a
link includes the rank's own, within T - R: `e (W - n) <= sum over them of (T - R) / s`. So
`T + k (T - R) >= y + R + s E` with k the largest `s_r / (W - n) sum 1 / s` of all ranks, which is
`n / (W - n)` where links are alike, and s the least s_r. What is read in the forward phase comes
back as gradients in the update phase, with T_u and R_u, which limits what a host owns as well:
`T + k b (T_u - R_u) >= y + R + s E`, b >= 1 being the largest ratio of a row's bytes to its
gradient's.

Better still is a relaxation in which the ranks of the host (on a single host: of the memory domain)
that owns the piece are a class of their own (`Relaxation(distinguished=...)`): what such a reader
is spared is then part of the solution, in every phase. Hosts are interchangeable, so it is the
first, for the largest piece by one load; that piece has some of every other load as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oper.search.bound.options import COPIES, PUSH, Option
from oper.search.bound.pieces import NUM_PIECE_GROUPS, Pieces
from oper.search.bound.rows import ResourceRows
from oper.search.bound.units import ANY, LOCAL, WHOLE
from oper.search.problem.machine import GROUPS, TERMS, Machine
from oper.search.problem.statement import NUM_FEATURES

Load = tuple[int, int]  # phase and group of terms
_Row = tuple[str, Load, Load, np.ndarray, np.ndarray]  # `Inequality` without its number
#: Kinds of rows: the load of the piece alone; beside what a rank reads; the same over links, where
#: its host is spared what it owns; that with the gradients that come back; with the
#: distinguished host.
PIECE, READER, SPREAD, RETURNED, APART = "piece", "reader", "spread", "returned", "apart"


def neighbourhoods(machine: Machine) -> tuple[np.ndarray, str]:
    """What ranks reach by the same slowest links: hosts, or on a single host memory domains; int64
    [W], and the links' group of terms towards a rank."""
    if (machine.host != machine.host[0]).any():
        return machine.host, "cross_in"
    return machine.domain, "link_in"


def first_neighbourhood(machine: Machine) -> list[int]:
    """The ranks of the first host; on a single host, of the first memory domain."""
    of_rank, _ = neighbourhoods(machine)
    return [int(r) for r in np.flatnonzero(of_rank == of_rank[0])]


@dataclass(frozen=True, slots=True, eq=False)
class Inequality:
    """A row about the owner of a large piece.

    Attributes:
        row: its number.
        kind: what it says.
        at: phase and group of terms of the load that it is about.
        load: the load by which the piece is the largest.
        times: float64 [P], the row is at most the phases' times with these weights.
        senders: float64 [P], weights of own times of ranks that send, which take off these.
    """

    row: int
    kind: str
    at: Load
    load: Load
    times: np.ndarray
    senders: np.ndarray


class OwnerRows:
    """The O rows about the owner of the largest piece; none where nothing is pushed. Where ranks
    are unequal, the owner reads as fast as the fastest.

    Args:
        rows: the resource rows, which these follow.
        pieces: the pushed pieces, with the tables that they are of.
        options: ways to place a block.
        distinguished: the load whose owner's host is distinguished, see `Relaxation`.

    Attributes:
        inequalities: the rows.
        phase_of: int64 [O], their phases, -2 where they bound several together.
        weight: float64 [O, P], a row is at most the weighted sum of the phases' times.
        base: float64 [O], what every plan asks.
        unit: float64 [C, 20, O], what a unit of each tally row, spread over a class, asks.
        every: float64 [20, O], what a unit of each tally row on every rank asks.
    """

    def __init__(self, rows: ResourceRows, pieces: Pieces, options: list[Option],
                 distinguished: Load | None) -> None:
        self.pieces, self.options, self.tables = pieces, options, pieces.tables
        self.model, self.units = rows.model, pieces.units
        self.inequalities = [Inequality(rows.phase_of.size + n, *x)
                             for n, x in enumerate(self._rows(distinguished))]
        shape = len(self.inequalities), len(self.model.phases)
        at = np.array([x.at for x in self.inequalities], np.int64).reshape(-1, 2)
        self._at, one = (at[:, 0], at[:, 1]), np.arange(len(at))
        self.weight = np.array([x.times for x in self.inequalities]).reshape(shape)
        senders = np.array([x.senders for x in self.inequalities]).reshape(shape)
        #: float64 [O, P], own time that counts: where links wait for it, that of the reader, too.
        self._own = senders.copy()
        self._own[one, self._at[0]] += pieces.has_local[self._at]
        m, seen, units = self.model.machine, self.units.seen, self.units
        of_rank, _ = neighbourhoods(m)
        #: bool [C, S], ranks seen from the owner that are elsewhere, and others of the first host.
        self._far = of_rank[seen] != of_rank[seen[:, :1]]
        self._first = np.isin(seen, first_neighbourhood(m)) & (seen != seen[:, :1])
        plain = (self.weight.sum(axis=1) == 1.0) & (self.weight[one, self._at[0]] == 1.0)
        self.phase_of = np.where(plain, self._at[0], -2)
        floor = pieces.floor.min(axis=0)
        # Loads exceed the phases by the dense compute that hides them, at most.
        self.base = (floor[self._at] + senders @ floor[:, LOCAL]
                     - self.weight @ pieces.hidden.max(axis=0)[:, 0])
        self.unit = self._asked(units.loads(units.each))
        self.every = self._asked(units.loads(units.every)).min(axis=0)

    def coefficients(self) -> np.ndarray:
        """What a unit of each feature asks by option, in one id stream, and what every further one
        adds; float64 [2, T, M, 4, O]."""
        out = np.zeros((2, len(self.tables), len(self.options), NUM_FEATURES, len(self._own)))
        # A rank with a copy reads no less than one that owns nothing: 0 for copies.
        for kind in {o.kind for o in self.options if self.inequalities} - {COPIES}:
            for n, units in enumerate(self.units.of(kind)[[WHOLE, ANY]]):
                asked = self.units.by_tables(units, self._asked)  # [C, T, 4, O]
                for o, option in enumerate(self.options):
                    if option.kind == kind:
                        out[n, :, o] = self.units.by_owner(asked, option.rank_class)
        return out

    def _asked(self, loads: np.ndarray) -> np.ndarray:
        """What units ask of the rows, by their loads on the ranks seen from their owner: own time
        on the rank where that is least, over links the bytes that ranks of other neighbourhoods
        read, over the fastest ones; for the distinguished host, what its other ranks have there.

        Args:
            loads: float64 [C, ..., P, 7, S].

        Returns:
            float64 [C, ..., O].
        """
        out = np.zeros((*loads.shape[:-3], len(self._own)))
        out += self.units.group_us(loads)[..., LOCAL, :].min(axis=(0, -1)) @ self._own.T
        links = loads[..., 1:1 + NUM_PIECE_GROUPS, :]
        seconds = 1e6 * self.units.seconds(loads.ndim)[..., 1:1 + NUM_PIECE_GROUPS, :]
        far, first = (np.expand_dims(x, tuple(range(1, loads.ndim - 1)))
                      for x in (self._far, self._first))
        kinds = np.array([x.kind for x in self.inequalities], str)
        for which, least in (
                (np.isin(kinds, (SPREAD, RETURNED)), seconds.min(axis=(0, -1))
                 * links.min(axis=(0, -1), initial=np.inf, where=far)),
                (kinds == APART, (links * seconds).min(axis=-1, initial=np.inf, where=first))):
            if which.any():
                at = least[..., self._at[0][which], self._at[1][which]]
                out[..., which] += np.where(np.isfinite(at), at, 0.0)  # there may be no such rank
        return out

    def _rows(self, distinguished: Load | None) -> Iterator[_Row]:
        model, pieces = self.model, self.pieces
        pushes = any(o.kind == PUSH for o in self.options)
        if not (model.machine.world_size > 1 and pushes and model.training):
            return
        phases = np.eye(len(model.phases))
        loads = [(phase, group)
                 for phase in range(model.phases.index("forward"), len(model.phases))
                 for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist()]
        for load in loads:
            yield from self._rows_of(load, phases)
        # The piece is on a rank of the distinguished host, whatever else it loads.
        if distinguished is not None and distinguished in loads:
            for load in filter(self._is_far, loads):
                yield APART, load, distinguished, phases[load[0]], 0 * phases[0]

    def _rows_of(self, load: Load, phases: np.ndarray) -> Iterator[_Row]:
        """The rows of one load, a distinguished host apart."""
        machine, model = self.model.machine, self.model
        one, group = phases[load[0]], GROUPS[load[1]]
        yield READER if self.pieces.has_local[load] else PIECE, load, load, one, 0 * one
        if not self._is_far(load):
            return
        of_rank, slowest = neighbourhoods(machine)
        seconds = machine.seconds_per_unit[TERMS.index(group)]
        others = machine.world_size - np.bincount(of_rank)[of_rank]
        spared = float((seconds * np.bincount(of_rank, 1 / seconds)[of_rank] / others).max())
        waits = model.has_local[:, GROUPS.index(slowest)]
        sent = {SPREAD: one}
        if model.phases[load[0]] == "forward" and group.endswith("in"):
            most = max((t.spec.row_bytes / (4.0 * t.spec.dim) for t in self.tables), default=1.0)
            # The owner receives what it sent in the last phase.
            sent[RETURNED] = max(1.0, most) * phases[-1]
        for kind, x in sent.items():
            yield kind, load, load, one + spared * x, spared * x * waits

    def _is_far(self, load: Load) -> bool:
        """Whether bytes of a load go over the slowest links."""
        of_rank, slowest = neighbourhoods(self.model.machine)
        return bool(of_rank.any()) and GROUPS[load[1]].split("_")[0] == slowest.split("_")[0]
