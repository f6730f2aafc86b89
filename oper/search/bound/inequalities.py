"""Valid inequalities of the relaxation about the owner of the largest pushed piece.

Let y be the largest load that a piece puts on its owner, in some phase and group. The phase takes
at least y, and at least y beside what the owner does as a reader. An owner reads its own piece,
too: of its own time, y is what it does more for that piece than a reader, and what else it owns
costs it the lesser of an owner's and a reader's part, R in all. Over links, a reader r takes s_r
seconds for every byte that other hosts (on a single host, memory domains) own, of E in all. What
the n of W ranks of its own host own, e, they send to all others within T: `e (W - n) <= sum over
them of T / s`. So `T (1 + k) >= y + s E` with k the largest `s_r / (W - n) sum 1 / s` of all ranks,
which is `n / (W - n)` where links are alike, and s the least s_r. What is read in the forward phase
T_f comes back as gradients in the phase T_u, which limits what a host owns as well: `T_f + k b T_u
>= y + s E`, b >= 1 being the largest ratio of an answer's bytes to its gradient's. Where the time
of a link includes the rank's own, so does y, and R is added: own time is y's and R, bytes are y's
and at least what is said above.

Better still is a relaxation in which the ranks of the host (on a single host: of the memory domain)
that owns the piece are a class of their own (`Relaxation(distinguished=...)`): what such a reader
is spared is then part of the solution, in every phase. Hosts are interchangeable, so it is the
first, for one load at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.search.bound.options import COPIES, PUSH, Option, row_makers
from oper.search.bound.pieces import LOCAL, NUM_PIECE_GROUPS, Pieces
from oper.search.bound.rows import ResourceRows
from oper.search.cost.tally import NUM_ROWS
from oper.search.problem.machine import GROUPS, TERMS, Machine
from oper.search.problem.statement import NUM_FEATURES

Load = tuple[int, int]  # phase and group of terms
_Limit = tuple[np.ndarray, str]  # weights of the phases' times, and what it says
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
class Inequalities:
    """What is known of the owner of the largest piece; O rows.

    Attributes:
        loads: phase and group of terms of the load that each is about.
        kinds: what each says.
        phase_of: int64 [O], its phase, -2 where it bounds several together.
        weight: float64 [O, P], a row is at most the weighted sum of the phases' times.
        base: float64 [O], what every plan asks.
        unit: float64 [C, 22, O], what a unit of each tally row, spread over a class, asks.
        every: float64 [22, O], what a unit of each tally row on every rank asks.
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


class InequalityMaker:
    """Makes the rows; where ranks are unequal, the owner reads as fast as the fastest.

    Args:
        rows: the resource rows.
        pieces: the pushed pieces, with the tables that they are of.
        options: ways to place a block.
        distinguished: the load whose owner's host is distinguished, see `Relaxation`.
    """

    def __init__(self, rows: ResourceRows, pieces: Pieces, options: list[Option],
                 distinguished: Load | None) -> None:
        self.rows, self.pieces, self.options = rows, pieces, options
        self.distinguished = distinguished
        self.model, self.classes, self.tables = rows.model, rows.classes, pieces.tables

    def make(self) -> Inequalities:
        """The rows; none where nothing is pushed."""
        model, pieces = self.model, self.pieces
        pushes = any(o.kind == PUSH for o in self.options)
        names: list[Load] = []
        limits: list[_Limit] = []
        if model.machine.world_size > 1 and pushes and model.training:
            for phase in range(model.phases.index("forward"), len(model.phases)):
                for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist():
                    found = self._limits(phase, GROUPS[group])
                    names += [(phase, group)] * len(found)
                    limits += found
        if not names:
            return self._none()
        distinguished = self.distinguished if self.distinguished in names else None
        if distinguished is not None:  # what the reader's part is follows below
            names.append(distinguished)
            limits.append((np.eye(len(model.phases))[distinguished[0]], APART))
        weights, kinds = np.array([x[0] for x in limits]), [x[1] for x in limits]
        at = tuple(np.array(names, np.int64).T)
        # What the owner of the piece reads: its own time is all that is asked of it by some rows.
        read_at = at[0], np.where(np.isin(kinds, (READER, APART)), LOCAL, at[1])
        own_time = [pieces.beside_reader and pieces.has_local[load] for load in names]
        reads = np.array([kind != PIECE and (kind != APART or own)
                          for kind, own in zip(kinds, own_time, strict=True)], float)
        plain = (weights.sum(axis=1) == 1.0) & (weights[np.arange(len(names)), at[0]] == 1.0)
        one = self._read(self._owned(NUM_ROWS))
        unit = np.repeat((reads * one[:, *read_at])[None], len(self.classes.ranks), axis=0)
        if distinguished is not None:
            unit[:, :, -1] += self._read_apart(self._owned(NUM_ROWS), distinguished)
        # Loads exceed the phases by the dense compute that hides them, at most.
        hidden = pieces.hidden.max(axis=0)[:, 0]
        base = pieces.floor.min(axis=0)[at] - weights @ hidden
        once, more = self._coefficients(read_at, reads, distinguished)
        every = self._read(np.broadcast_to(np.eye(NUM_ROWS)[:, :, None], (
            NUM_ROWS, NUM_ROWS, model.machine.world_size)))
        return Inequalities(names, kinds, np.where(plain, at[0], -2), weights, base, unit,
                            reads * every[:, *read_at], once, more)

    def _none(self) -> Inequalities:
        table = np.zeros((len(self.tables), len(self.options), NUM_FEATURES, 0))
        unit = np.zeros((*self.rows.unit.shape[:2], 0))
        weight = np.zeros((0, len(self.model.phases)))
        return Inequalities([], [], np.zeros(0, np.int64), weight, np.zeros(0), unit, unit[0],
                            table, table)

    def _coefficients(self, at: tuple[np.ndarray, ...], reads: np.ndarray,
                      distinguished: Load | None) -> tuple[np.ndarray, np.ndarray]:
        shape = (2, len(self.tables), len(self.options), NUM_FEATURES, reads.size)
        out, owned = np.zeros(shape), self._owned(NUM_FEATURES)
        sizes = np.array([r.size for r in self.classes.ranks])
        # A rank with a copy reads no less than one that owns nothing: 0 for copies.
        for kind in {o.kind for o in self.options} - {COPIES}:
            alike = [o for o, option in enumerate(self.options) if option.kind == kind]
            make = row_makers(self.model)[kind]
            for k, t in enumerate(self.tables):
                whole = make(t, t.spec.dim, owned)
                for n, rows in enumerate((whole, 2 * whole - make(t, 2 * t.spec.dim, owned))):
                    out[n, k, alike] = reads * self._read(rows)[:, at[0], at[1]]
                    if distinguished is not None:
                        apart = self._read_apart(rows, distinguished)
                        mean = sizes @ apart / sizes.sum()
                        for o in alike:
                            c = self.options[o].rank_class
                            out[n, k, o, :, -1] += mean if c < 0 else apart[c]
        return out[0], out[1]

    def _read_apart(self, rows: np.ndarray, load: Load) -> np.ndarray:
        """What a reader of the first neighbourhood has on its links at least, in the phase and
        group `load`; rows float64 [C, F, 22, W], by class of the owner -> [C, F]."""
        m, (phase, group) = self.model.machine, load
        owner = np.arange(m.world_size) == np.array([r[0] for r in self.classes.ranks])[:, None]
        there = np.isin(np.arange(m.world_size), first_neighbourhood(m)) & ~owner  # [C, W]
        units = self.model.loads(rows)[..., phase, group + 1, :] * m.seconds_per_unit[group + 1]
        least = 1e6 * np.where(there[:, None], units, np.inf).min(axis=-1)
        return np.where(np.isfinite(least), least, 0.0)  # nobody else is there

    def _limits(self, phase: int, group: str) -> list[_Limit]:
        """The rows of one phase and group."""
        machine, num_phases = self.model.machine, len(self.model.phases)
        one = np.eye(num_phases)[phase]
        beside = self.pieces.beside_reader and self.pieces.has_local[phase, GROUPS.index(group)]
        out = [(one, READER if beside else PIECE)]
        of_rank, slowest = neighbourhoods(machine)
        if group.split("_")[0] != slowest.split("_")[0] or not of_rank.any():
            return out
        seconds = machine.seconds_per_unit[TERMS.index(group)]
        others = machine.world_size - np.bincount(of_rank)[of_rank]
        spared = float((seconds * np.bincount(of_rank, 1 / seconds)[of_rank] / others).max())
        out.append((one * (1.0 + spared), SPREAD))
        if self.model.phases[phase] == "forward" and group.endswith("in"):
            most = self.model.messages.most_per_gradient(self.tables)
            # The owner receives what it sent in the last phase.
            out.append((one + spared * most * np.eye(num_phases)[-1], RETURNED))
        return out

    def _owned(self, number: int) -> np.ndarray:
        """A unit of each of so many rows, one at a time, on a rank of each class; float64
        [C, number, number, W]."""
        ranks = [int(r[0]) for r in self.classes.ranks]
        out = np.zeros((len(ranks), number, number, self.model.machine.world_size))
        out[np.arange(len(ranks))[:, None], np.arange(number), np.arange(number),
            np.array(ranks)[:, None]] = 1.0
        return out

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """What any rank reads of units at least, whoever has them: own time where that counts, and
        over links the bytes that ranks of other neighbourhoods read, over the fastest ones.

        Args:
            rows: float64 [C, F, 22, W], tally rows by class of who has the units; without the first
                axis where all ranks have them.

        Returns:
            float64 [F, P, 5].
        """
        m, counts = self.model.machine, self.pieces.has_local * self.pieces.beside_reader
        units = self.model.loads(rows if rows.ndim == 4 else rows[None])
        own = self.model.group_us(units)[..., LOCAL, :].min(axis=(0, -1))[..., None] * counts
        of_rank, _ = neighbourhoods(m)
        far = of_rank != of_rank[[int(r[0]) for r in self.classes.ranks]][:, None]  # [C, W]
        if rows.ndim == 3 or not far.any():
            return np.asarray(own)
        seconds = 1e6 * m.seconds_per_unit[1:1 + NUM_PIECE_GROUPS].min(axis=1)
        seconds[LOCAL] = 0.0
        links = np.where(far[:, None, None, None], units[..., 1:1 + NUM_PIECE_GROUPS, :], np.inf)
        return np.asarray(own + links.min(axis=(0, -1)) * seconds)
