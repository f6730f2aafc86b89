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

from dataclasses import dataclass

import numpy as np

from oper.search.bound.options import COPIES, PUSH, Option
from oper.search.bound.pieces import NUM_PIECE_GROUPS, Pieces
from oper.search.bound.rows import ResourceRows
from oper.search.bound.units import ANY, LOCAL, WHOLE, UnitRows
from oper.search.problem.machine import GROUPS, TERMS, Machine
from oper.search.problem.statement import NUM_FEATURES

Load = tuple[int, int]  # phase and group of terms
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


@dataclass(frozen=True, slots=True)
class Inequality:
    """A row about the owner of a large piece.

    Attributes:
        row: its number.
        kind: what it says.
        at: phase and group of terms of the load that it is about.
        load: the load by which the piece is the largest.
        share: what the piece has of the row's load at least, for each microsecond of that one.
    """

    row: int
    kind: str
    at: Load
    load: Load
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class Inequalities:
    """What is known of the owner of the largest piece; O rows.

    Attributes:
        loads: phase and group of terms of the load that each is about.
        kinds: what each says.
        phase_of: int64 [O], its phase, -2 where it bounds several together.
        weight: float64 [O, P], a row is at most the weighted sum of the phases' times.
        base: float64 [O], what every plan asks.
        unit: float64 [C, 20, O], what a unit of each tally row, spread over a class, asks.
        every: float64 [20, O], what a unit of each tally row on every rank asks.
        coefficients: float64 [T, M, 4, O], what a unit of each feature asks, by option.
        per_stream: float64 [T, M, 4, O], what every further id stream adds.
    """

    loads: list[Load]
    kinds: list[str]
    phase_of: np.ndarray
    weight: np.ndarray
    base: np.ndarray
    unit: np.ndarray
    every: np.ndarray
    coefficients: np.ndarray
    per_stream: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Limit:
    """What bounds the load of a piece: phases' times with weights `times` (float64 [P]), less the
    own time of ranks that send in these phases, with weights `senders` (float64 [P])."""

    load: Load
    kind: str
    times: np.ndarray
    senders: np.ndarray


class InequalityMaker:
    """Makes the rows; where ranks are unequal, the owner reads as fast as the fastest.

    Args:
        rows: the resource rows.
        pieces: the pushed pieces, with the tables that they are of.
        units: what units of the tables' rows ask of ranks.
        options: ways to place a block.
        distinguished: the load whose owner's host is distinguished, see `Relaxation`.
    """

    def __init__(self, rows: ResourceRows, pieces: Pieces, units: UnitRows, options: list[Option],
                 distinguished: Load | None) -> None:
        self.pieces, self.units, self.options = pieces, units, options
        self.model, self.tables = rows.model, pieces.tables
        self.limits = self._limits(distinguished)
        number, phases = len(self.limits), len(self.model.phases)
        at = np.array([x.load for x in self.limits], np.int64).reshape(number, 2)
        self._at = at[:, 0], at[:, 1]
        self._senders = np.array([x.senders for x in self.limits]).reshape(number, phases)
        #: float64 [O, P], own time that counts: where links wait for it, that of the reader, too.
        self._own = self._senders.copy()
        self._own[np.arange(number), self._at[0]] += pieces.has_local[self._at]
        m, seen = self.model.machine, units.seen
        of_rank, _ = neighbourhoods(m)
        #: bool [C, S], ranks seen from the owner that are elsewhere, and others of the first host.
        self._far = of_rank[seen] != of_rank[seen[:, :1]]
        self._first = np.isin(seen, first_neighbourhood(m)) & (seen != seen[:, :1])

    def make(self) -> Inequalities:
        """The rows; none where nothing is pushed."""
        loads, units = [x.load for x in self.limits], self.units
        weight = np.array([x.times for x in self.limits]).reshape(self._own.shape)
        plain = (weight.sum(axis=1) == 1.0) & (weight[np.arange(len(loads)), self._at[0]] == 1.0)
        floor = self.pieces.floor.min(axis=0)
        # Loads exceed the phases by the dense compute that hides them, at most.
        base = (floor[self._at] + self._senders @ floor[:, LOCAL]
                - weight @ self.pieces.hidden.max(axis=0)[:, 0])
        coefficients, per_stream = self._coefficients()
        return Inequalities(
            loads, [x.kind for x in self.limits], np.where(plain, self._at[0], -2), weight, base,
            self._asked(units.loads(units.each)),
            self._asked(units.loads(units.every)).min(axis=0), coefficients, per_stream)

    def _coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (2, len(self.tables), len(self.options), NUM_FEATURES, len(self.limits))
        out = np.zeros(shape)
        # A rank with a copy reads no less than one that owns nothing: 0 for copies.
        for kind in {o.kind for o in self.options if self.limits} - {COPIES}:
            for n, units in enumerate(self.units.of(kind)[[WHOLE, ANY]]):
                asked = self.units.by_tables(units, self._asked)  # [C, T, 4, O]
                for o, option in enumerate(self.options):
                    if option.kind == kind:
                        out[n, :, o] = self.units.by_owner(asked, option.rank_class)
        return out[0], out[1]

    def _asked(self, loads: np.ndarray) -> np.ndarray:
        """What units ask of the rows, by their loads on the ranks seen from their owner: own time
        on the rank where that is least, over links the bytes that ranks of other neighbourhoods
        read, over the fastest ones; for the distinguished host, what its other ranks have there.

        Args:
            loads: float64 [C, ..., P, 7, S].

        Returns:
            float64 [C, ..., O].
        """
        out = np.zeros((*loads.shape[:-3], len(self.limits)))
        out += self.units.group_us(loads)[..., LOCAL, :].min(axis=(0, -1)) @ self._own.T
        links = loads[..., 1:1 + NUM_PIECE_GROUPS, :]
        seconds = 1e6 * self.units.seconds(loads.ndim)[..., 1:1 + NUM_PIECE_GROUPS, :]
        far, first = (np.expand_dims(x, tuple(range(1, loads.ndim - 1)))
                      for x in (self._far, self._first))
        kinds = np.array([x.kind for x in self.limits], str)
        for which, least in (
                (np.isin(kinds, (SPREAD, RETURNED)), seconds.min(axis=(0, -1))
                 * links.min(axis=(0, -1), initial=np.inf, where=far)),
                (kinds == APART, (links * seconds).min(axis=-1, initial=np.inf, where=first))):
            if which.any():
                at = least[..., self._at[0][which], self._at[1][which]]
                out[..., which] += np.where(np.isfinite(at), at, 0.0)  # there may be no such rank
        return out

    def _limits(self, distinguished: Load | None) -> list[_Limit]:
        model, pieces = self.model, self.pieces
        pushes = any(o.kind == PUSH for o in self.options)
        if not (model.machine.world_size > 1 and pushes and model.training):
            return []
        phases = np.eye(len(model.phases))
        loads = [(phase, group)
                 for phase in range(model.phases.index("forward"), len(model.phases))
                 for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist()]
        out = [x for load in loads for x in self._limits_of(load)]
        if distinguished in loads:  # the piece is on a rank of that host, whatever else it loads
            out += [_Limit(load, APART, phases[load[0]], 0 * phases[0]) for load in loads
                    if self._is_far(load[1])]
        return out

    def _limits_of(self, load: Load) -> list[_Limit]:
        """The rows of one load, a distinguished host apart."""
        machine, model = self.model.machine, self.model
        phases = np.eye(len(model.phases))
        one, group = phases[load[0]], GROUPS[load[1]]
        out = [_Limit(load, READER if self.pieces.has_local[load] else PIECE, one, 0 * one)]
        if not self._is_far(load[1]):
            return out
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
        return out + [_Limit(load, kind, one + spared * x, spared * x * waits)
                      for kind, x in sent.items()]

    def _is_far(self, group: int) -> bool:
        """Whether bytes of a group of terms go over the slowest links."""
        of_rank, slowest = neighbourhoods(self.model.machine)
        return bool(of_rank.any()) and GROUPS[group].split("_")[0] == slowest.split("_")[0]
