"""Assignment of columns and rows of pushed tables to ranks, by simulated annealing in C++.

Packing entire tables evenly is NP-hard, but tables may be cut: by columns, which costs an id stream
per piece, and by rows, which costs partial sums. The search (``csrc/search/pack.cpp``) starts from
layouts of the tables that would give a short step if their pieces could be packed evenly. It moves,
swaps, shifts, splits, merges and reassigns pieces and exchanges candidates. It evaluates the entire
step after every move. The relaxation mixes configurations of a table; accordingly, the columns of a
table have up to two parts, each with its own candidate. Pulled rows are divisible: each rank of a
class owns as many units of them as its remaining load allows. Replicated rows load all ranks of a
class equally.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from oper.rows.traffic import ROW_WISE
from oper.search import native
from oper.search.cost.columns import SQUARE_BYTES
from oper.search.cost.load_vector import NUM_ROWS, SUM_ROWS, Row
from oper.search.cost.space import PUSH, SHARD
from oper.search.pricing.master import Bound
from oper.search.problem.machine import GROUPS, REFRESH, REQUEST, TERMS, Term, add_wire
from oper.search.problem.overlap import RESOLVE
from oper.search.problem.space import COLUMN_STEP, MIN_COLUMNS
from oper.search.problem.statement import IDS, ROWS, TOUCHED_ALL
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.units import ANY_SQUARES, WHOLE
from oper.search.rounding.candidates import Candidate, CandidatePool

_SHARES = 96  # grid of shares of a piece at which partial sums are tabulated
_OWNERS = 48  # upper limit of the owners of one piece
_HEADS = 16  # hottest pushed rows of a table whose owners are tracked one by one

_OWNERSHIP = ("table", "piece", "width", "rank", "weight")  # arrays by piece and owner
_CHANGED = ("candidate", "part_width", "units")  # further arrays that a search changes

#: A column piece: its width, its owners, and their stripe weights (() = equal).
Shard = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent columns of a table.

    Attributes:
        width: number of columns.
        candidate: the tiers of these columns.
        shards: the column pieces of pushed rows; empty if nothing is pushed.
    """

    width: int
    candidate: Candidate
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The result of a search.

    Attributes:
        parts: for each table, its parts in column order.
        units: number of units that each rank owns of the pulled rows of its class.
        step_us: modelled step time with barriers, assuming that all rows that are not pushed are
            spread evenly.
        num_moves: number of moves tried.
        arrays: the result in the layout of the native search, from which another run can continue.
    """

    parts: list[list[Part]]
    units: tuple[int, ...]
    step_us: float
    num_moves: int
    arrays: dict[str, np.ndarray]


def single_owner_options(relaxation: Relaxation) -> np.ndarray:
    """Options whose rows are assigned to single owners: the pushed ones, and the pulled ones of
    tables that may not be striped; bool [T, M]."""
    pushed = np.array([o.kind == PUSH for o in relaxation.options], bool)
    pulled = np.array([o.kind == SHARD for o in relaxation.options], bool)
    whole = ["striped" not in relaxation.problem.placements_of(t.spec.name)
             for t in relaxation.tables]
    return pushed | (np.array(whole, bool)[:, None] & pulled)


class Loads:
    """Loads of ranks: microseconds by (phase, group of terms), and last the share of memory used.

    Attributes:
        groups: int64 [5], or [7] with racks, indices of the groups of terms that are represented.
        num_loads: G = 5 P + 1, or 7 P + 1.
        class_of: int64 [W], class of each rank.
        piece_us: float64 [G], load of one more column piece of a table on each rank.
        read_unit: float64 [C, 23, C, G], load of a unit of each load-vector row on ranks that do
            not own it, by class of the owner and class of the rank.
        own_unit: float64 [C, 23, G], excess load of the owner over other ranks of its class.
        mate_unit: float64 [2, C, 23, G], excess load, because of shared links, of other ranks of
            the owner's class on its host, and in its rack, over such ranks elsewhere.
        mates: by owner, int64 [2, number]: these other ranks, and 0 or 1 for host or rack.
    """

    def __init__(self, pool: CandidatePool) -> None:
        self.relaxation, self.full = pool.relaxation, pool.full
        self.model = self.relaxation.model
        self.class_of = self.relaxation.classes.of_rank
        ranks = self.relaxation.classes.ranks
        self.num_classes, self.num_phases = len(ranks), len(self.model.phases)
        machine = self.model.machine
        # Host memory is not a separate group here; its time is added to the rank's own time.
        self.groups = np.array([n for n, name in enumerate(GROUPS) if name != "host_memory"
                                and (machine.has_racks or not name.startswith("rack"))])
        self.num_loads = self.num_phases * self.groups.size + 1
        self.own_unit = np.zeros((self.num_classes, NUM_ROWS, self.num_loads))
        self.own_unit[..., :-1] = self.relaxation.units.own_us[..., self.groups].reshape(
            self.num_classes, NUM_ROWS, -1)
        for c, r in enumerate(ranks):
            memory = pool.full * machine.capacity_bytes[machine.domain[r[0]]]
            memory /= machine.num_domain[r[0]]
            self.own_unit[c, Row.HELD, -1] = 1.0 / max(memory, 1e-3)
        #: float64 [P, G], 1 where a load includes the rank's own time of that phase.
        self.own_time = np.zeros((self.num_phases, self.num_loads))
        self.own_time[:, :-1] = np.reshape(
            np.eye(self.num_phases)[..., None] * self.model.has_local[:, self.groups],
            (self.num_phases, -1))
        looks = np.array([name not in (RESOLVE, REQUEST, REFRESH)
                          for name in self.model.phases], float)
        self.piece_us = self.model.costs.table_us * (looks @ self.own_time)
        self.read_unit = self.by_class(self.relaxation.unit)  # mean including the owner's load
        for c, r in enumerate(ranks):
            others = r.size * self.read_unit[c, :, c] - self.own_unit[c]
            self.read_unit[c, :, c] = others / max(r.size - 1, 1)
            self.own_unit[c] -= self.read_unit[c, :, c]
        self.mate_unit = np.zeros((2, *self.own_unit.shape))
        self.mates = [np.zeros((2, 0), np.int64)] * machine.world_size
        if any(machine.shared_terms):
            for c, r in enumerate(ranks):
                if r.size > 1:
                    self._set_mates(c, r)

    def _set_mates(self, c: int, ranks: np.ndarray) -> None:
        """Set loads by the links that a rank shares with the owner, for class `c`."""
        m, owner = self.model.machine, int(ranks[0])
        apart = np.where(m.host[ranks, None] == m.host[ranks], 0, np.where(
            m.rack[ranks, None] == m.rack[ranks], 1 if m.has_racks else 2, 2))  # by pair of ranks
        np.fill_diagonal(apart, -1)
        most = apart.max()
        unit = np.eye(NUM_ROWS)[:, :, None] * (np.arange(m.world_size) == owner)
        us = self.model.group_us(self.model.loads(unit))[:, :, self.groups]
        us = us.reshape(NUM_ROWS, -1, m.world_size)
        far = us[..., ranks[apart[0] == most]].mean(axis=-1)
        self.read_unit[c, :, c, :-1] = far
        self.own_unit[c, :, :-1] = us[..., owner] - far
        for level in range(most):
            if (apart[0] == level).any():
                mean = us[..., ranks[apart[0] == level]].mean(axis=-1)
                self.mate_unit[level, c, :, :-1] = mean - far
        for r, levels in zip(ranks.tolist(), apart, strict=True):
            near = (levels >= 0) & (levels < most)
            self.mates[r] = np.stack([ranks[near], levels[near]])

    def by_class(self, rows: np.ndarray) -> np.ndarray:
        """Convert resource rows (float64 [..., R]) to loads by class; float64 [..., C, G]."""
        out = np.zeros((*rows.shape[:-1], self.num_classes, self.num_loads))
        for n, (phase, group, c) in enumerate(self.relaxation.rows.names):
            group = "local" if group == "host_memory" else group
            at = phase * self.groups.size + int(np.searchsorted(self.groups, GROUPS.index(group)))
            out[..., c, at] += rows[..., n]
        machine, classes = self.model.machine, self.relaxation.classes
        memory = self.relaxation.rows.first_memory
        for c, ranks in enumerate(classes.ranks):
            share = rows[..., memory + classes.of_domain[machine.domain[ranks[0]]]]
            out[..., c, -1] = share / self.full
        return out

    def square_us(self, *terms: int) -> np.ndarray:
        """Load of a byte of sums of squares by each of `terms` on a rank; float64 [C, G]."""
        model, out = self.model, np.zeros((self.num_classes, self.num_loads))
        if not model.training:
            return out
        for c, ranks in enumerate(self.relaxation.classes.ranks):
            units = np.zeros((self.num_phases, len(TERMS), self.class_of.size))
            units[model.update_phase, list(terms), ranks[0]] = 1.0
            add_wire(units, model.machine)
            out[c, :-1] = model.group_us(units)[:, self.groups, ranks[0]].reshape(-1)
        return out

    def base(self, num_tables: int) -> np.ndarray:
        """Loads that every plan puts on each rank, minus those of one piece per table; float64 [W,
        G]."""
        model, vector = self.model, self.relaxation.base_load_vector
        groups = model.group_us(model.units(vector))
        groups[:, 0] += groups[:, GROUPS.index("host_memory")]
        groups = groups[:, self.groups]
        groups -= 1e6 * model.hidden[:, None]  # beyond the dense compute that hides it
        out = np.zeros((self.class_of.size, self.num_loads))
        out[:, :-1] = groups.reshape(-1, self.class_of.size).T
        out[:, :-1] -= num_tables * self.piece_us[:-1]
        machine = model.machine
        held = machine.per_domain(vector.rows[Row.HELD]) / np.maximum(
            self.full * machine.capacity_bytes, 1e-3)
        out[:, -1] = held[machine.domain]
        return out


class Annealing:
    """The input arrays of the native search, and its runs.

    Args:
        pool: candidates; a search starts from the chosen ones.
        bound: solved relaxation, which gives the initial widths of pieces and numbers of owners.
    """

    def __init__(self, pool: CandidatePool, bound: Bound) -> None:
        self.pool, self.bound, self.loads = pool, bound, Loads(pool)
        self.relaxation, self.single_owner = pool.relaxation, single_owner_options(pool.relaxation)
        self.candidates = [self._ordered(k) for k in range(len(pool.candidates))]
        self.first = np.concatenate([[0], np.cumsum([len(r) for r in self.candidates])])
        arrays = self._arrays()
        arrays |= self._begin(arrays)
        self.arrays = {n: np.ascontiguousarray(x) for n, x in arrays.items()}

    def _ordered(self, k: int) -> list[int]:
        """Candidates of table `k`, sorted so that neighbours are similar: by lookups of rows that
        are assigned to single owners, then by lookups of replicated rows."""
        amount = self.pool.amounts[k]
        assigned = amount[:, self.single_owner[k], IDS].sum(axis=1)
        return np.lexsort((amount[:, 0, IDS], assigned)).tolist()

    def _arrays(self) -> dict[str, np.ndarray]:
        relaxation, loads = self.relaxation, self.loads
        amount = np.concatenate([self.pool.amounts[k][r] for k, r in enumerate(self.candidates)])
        table = np.repeat(np.arange(len(self.candidates)), np.diff(self.first))
        assigned = np.where(self.single_owner[table][..., None], amount, 0.0)
        features, stay = assigned.sum(axis=1), amount - assigned  # [N, 4], [N, O, 4]
        pushed_ids = assigned[:, relaxation.pushes, IDS].sum(axis=1)
        whole = relaxation.unpushed(stay, table)
        once = np.einsum("nof,nofr->nr", stay, relaxation.per_stream[table])
        tables, class_of = relaxation.tables, loads.class_of
        rows = [np.zeros((table.size, loads.num_classes, NUM_ROWS))] * 5
        used = np.flatnonzero(self.single_owner.any(axis=0))
        for kind in {relaxation.options[o].kind for o in used}:
            of_kind = [o.kind == kind for o in relaxation.options]
            part, made = assigned[:, of_kind].sum(axis=1), self._per_table(kind)
            of_ids = part[:, IDS, None, None] * made[0][table][:, :, IDS]
            rows = [x + y for x, y in zip(rows, [*(np.einsum("nf,ncfq->ncq", part, x[table])
                                                   for x in made), of_ids], strict=True)]
        head_at, head = self._heads()
        fill, fill_once = self._fill(stay, table)
        size = np.array([r.size for r in relaxation.classes.ranks], float)[:, None]
        shares = np.linspace(0.0, 1.0, _SHARES + 1)
        sums = np.concatenate([
            loads.model.partial_bytes(t, 1, np.outer(pushed_ids[a:b], shares))
            for t, (a, b) in zip(tables, pairwise(self.first.tolist()), strict=True)])
        per_byte = relaxation.pieces.per_byte[table]  # headers of sums are spread over the columns
        order = np.argsort(class_of, kind="stable")
        place = np.argsort(order)
        mates = [loads.mates[r] for r in order.tolist()]
        places = [loads.model.problem.placements_of(t.spec.name) for t in tables]
        split = np.array([loads.model.problem.may_split(t) for t in tables], bool)
        dim = np.array([t.spec.dim for t in tables])
        good = self.single_owner & relaxation.allowed
        classes = np.array([o.rank_class for o in relaxation.options])
        may = np.stack([np.isin(class_of[order], classes[x]) for x in good])
        may_split = (dim % COLUMN_STEP == 0) & (dim >= 2 * MIN_COLUMNS) & split
        columns = dim[table][:, None, None]
        piece, asked = self._unseen(pushed_ids, table)
        relaxed = self.bound.total()
        num_rows = np.array([t.spec.num_rows for t in tables], float)
        parts = 2 if may_split.any() else 1
        # Pieces are made wider until there are no more than ranks that may own them.
        assert may[table[features[:, ROWS] > 0]].any(axis=1).all(), "no rank may own such rows"
        of_parts = {"first": self.first[:-1], "num_candidates": np.diff(self.first),
                    "may_split": may_split.astype(np.uint8),
                    "may_stripe": np.array(["striped" in p for p in places], np.uint8),
                    "num_may": may.sum(axis=1), "may": may.astype(np.uint8)}
        return {
            "class_of": class_of[order], "rank_of": order, "base": loads.base(len(tables))[order],
            "partial": np.einsum("nq,cqg->ncg", per_byte, loads.own_unit[:, SUM_ROWS]),
            "partial_read": np.einsum("nq,cqdg->ncdg", per_byte, loads.read_unit[:, SUM_ROWS]),
            "level": np.array([max(0.0, relaxed[relaxation.phase_of == p].max())
                               for p in range(loads.num_phases)]),
            "stay": (loads.by_class(whole - once) - (fill - fill_once) / size) / columns,
            "stay_once": loads.by_class(once) - fill_once / size + piece[:, None],
            "fill": (fill - fill_once) / columns, "fill_once": fill_once,
            "column": np.einsum("ncq,cqg->ncg", rows[0], loads.own_unit),
            "stream": np.einsum("ncq,cqg->ncg", rows[1], loads.own_unit),
            "column_read": np.einsum("ncq,cqdg->ncdg", rows[0], loads.read_unit)
            + np.einsum("ndq,dqg->ndg", rows[2], loads.own_unit)[:, None],
            "stream_read": np.einsum("ncq,cqdg->ncdg", rows[1], loads.read_unit)
            + np.einsum("ndq,dqg->ndg", rows[3], loads.own_unit)[:, None],
            "mate_first": np.cumsum([0, *(x.shape[1] for x in mates)]),
            "mates": place[np.concatenate(mates, axis=1)[0]],
            "mate_level": np.concatenate(mates, axis=1)[1],
            "partial_mate": np.einsum("nq,lcqg->nlcg", per_byte, loads.mate_unit[:, :, SUM_ROWS]),
            "column_mate": np.einsum("ncq,lcqg->nlcg", rows[0], loads.mate_unit),
            "stream_mate": np.einsum("ncq,lcqg->nlcg", rows[1], loads.mate_unit),
            "column_ids": np.einsum("ncq,cqg->ncg", rows[4], loads.own_unit),
            "head_at": head_at, "head": head, "asked": asked,
            "whole": (features[:, ROWS] >= num_rows[table] * (1 - 1e-12)).astype(np.uint8),
            "sums": sums, "pushes": (features[:, ROWS] > 0).astype(np.uint8),
            "host_of": loads.model.machine.host[order],
            "domain_of": loads.model.machine.domain[order],
            "squares": (sent := 2 * SQUARE_BYTES * np.array(
                [loads.model.sends_squares(t) for t in tables]))[table]
            * features[:, TOUCHED_ALL],
            "all_squares": sent * np.array([t.total[TOUCHED_ALL] for t in tables]),
            "square_link": loads.square_us(Term.LINK_IN, Term.LINK_OUT),
            "square_cross": loads.square_us(Term.CROSS_IN, Term.CROSS_OUT),
            **{n: np.concatenate([x] * parts) for n, x in of_parts.items()}}

    def _unseen(self, pushed_ids: np.ndarray, table: np.ndarray
                ) -> tuple[np.ndarray, np.ndarray]:
        """Loads that the relaxation leaves out, float64 [N, G] each: of a column piece on every
        rank, and of the requests that an owner of pushed rows sends to itself unless it owns all of
        them (to be multiplied by its share).

        Both equal the charges of `CostModel.whole_table` and `own_requests`, except for tables with
        two candidates, each of which pays for its own tiers.
        """
        model, tables = self.loads.model, self.relaxation.tables
        ids = self.relaxation.total_ids[table]
        bags = np.array([t.num_bags for t in tables], float)[table]
        of = [self.pool.candidates[k][r] for k, rs in enumerate(self.candidates) for r in rs]
        several = np.array([len(r.stops) > 1 for r in of])
        pushes = pushed_ids > 0
        tiers = ids * several * np.where(pushes, model.tiers_ns(True), model.tiers_ns(False))
        bag_us = bags * (several & pushes) * model.costs.push_bag_ns * 1e-3
        own_time = self.loads.own_time
        exchanges = own_time[[x in ("forward", "backward") for x in model.phases]].sum(axis=0)
        piece = self.loads.piece_us + np.outer(tiers * 1e-3, exchanges) + np.outer(
            bag_us, own_time[model.phases.index("forward")])
        return piece, np.outer(pushed_ids * model.costs.push_ns * 1e-3, exchanges)

    def _heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The hottest rows that each candidate pushes: their positions in its first pushed tier
        (int64 [N, H]), and their shares of the lookups of all rows that it pushes (float64 [N, H],
        0 = no row)."""
        at, head = [], []
        for k, t in enumerate(self.relaxation.tables):
            pushes = self.single_owner[k]
            candidates = [self.pool.candidates[k][r] for r in self.candidates[k]]
            ends = [(0, *r.stops) for r in candidates]
            which = [next((n for n, o in enumerate(r.options) if pushes[o]), -1)
                     for r in candidates]
            start, stop = np.array([e[n:n + 2] if n >= 0 else (0, 0)
                                    for e, n in zip(ends, which, strict=True)]).T
            places = np.tile(np.arange(_HEADS), (len(candidates), 1))
            edges = np.minimum(start[:, None] + np.arange(_HEADS + 1), stop[:, None])
            mass = np.diff(t.prefix(edges)[IDS], axis=1)
            if not t.ids_are_positions:  # a table of one tier has no hotness order: rows by id
                by_id = np.array([len(r.stops) == 1 for r in candidates]) & (stop > start)
                hot = np.argsort(-t.explicit[IDS], kind="stable")[:_HEADS]
                places[by_id, :hot.size] = t.explicit_ids[hot]
                mass[by_id] = 0.0
                mass[by_id, :hot.size] = t.explicit[IDS, hot]
            pushed = self.pool.amounts[k][self.candidates[k]][:, pushes, IDS].sum(axis=1)
            at.append(places)
            head.append(mass / np.maximum(pushed, 1e-300)[:, None] * (pushed > 0)[:, None])
        return np.concatenate(at).astype(np.int64), np.concatenate(head)

    def _fill(self, amount: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Load of pulled rows on their owners in excess of readers, if one rank owned them all
        (float64 [N, C, G]), and the part of it that does not depend on the width."""
        relaxation, loads = self.relaxation, self.loads
        out = np.zeros((2, len(table), loads.num_classes, loads.num_loads))
        if loads.class_of.size > 1:
            column, stream, *_ = self._per_table(SHARD)
            dim = np.array([t.spec.dim for t in relaxation.tables])[:, None, None, None]
            own = np.stack([column * dim + stream, stream])
            for o, option in enumerate(relaxation.options):
                if option.kind == SHARD:
                    c = option.rank_class
                    rows = np.einsum("nf,xnfq->xnq", amount[:, o], own[:, table, c])
                    out[:, :, c] += rows @ loads.own_unit[c]
        return out[0], out[1]

    def _per_table(self, kind: str) -> list[np.ndarray]:
        """Load-vector rows by class and feature of rows held as `kind`: the owner's excess over
        other ranks of its class, per column and per id stream, and the same two for all ranks of
        the class; four arrays float64 [T, C, 4, 23]."""
        found = self.relaxation.units.of(kind)
        whole, stream = (np.moveaxis(x, 1, 2) for x in (found[WHOLE] - found[ANY_SQUARES],
                                                        found[ANY_SQUARES]))  # [2, T, C, 4, 23]
        dim = np.array([t.spec.dim for t in self.relaxation.tables], float)[:, None, None, None]
        column = whole / dim
        return [column[0], stream[0], column[1], stream[1]]

    def _begin(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Further arrays: the candidates, widths and owners of pieces from which a search starts.
        """
        num_tables, world = len(self.candidates), self.loads.class_of.size
        chosen = np.array([r.index(p) for r, p in zip(self.candidates, self.pool.pick.tolist(),
                                                      strict=True)], np.int64)
        amount = np.stack([x[p] for x, p in zip(self.pool.amounts, self.pool.pick.tolist(),
                                                strict=True)])
        kinds = self.bound.node.kinds(amount, np.arange(num_tables), self.bound.prices)
        dim = np.array([t.spec.dim for t in self.relaxation.tables])
        owners, widths = np.ones(num_tables, np.int64), dim.copy()  # as in the relaxed solution
        for o in np.flatnonzero(self.relaxation.pushes)[::-1].tolist():  # the first option wins
            k = np.flatnonzero(amount[:, o, IDS] > 0)
            streams, mass = self.bound.node.fit.chosen(
                k, self.relaxation.options[o].rank_class, kinds[k])
            share = amount[k, o, IDS] / self.relaxation.total_ids[k] / np.maximum(mass, 1e-3)
            owners[k] = np.clip(np.ceil(share - 1e-2), 1, _OWNERS)
            widths[k] = -(-dim[k] // np.ceil(streams - 1e-2).astype(np.int64))
        size = arrays["column"][self.first[:-1] + chosen].max(axis=(1, 2)) * dim
        num_parts = arrays["first"].size
        times = num_parts // num_tables
        width = np.zeros(num_parts, np.int64)
        width[:num_tables] = dim
        return {"order": np.argsort(-size, kind="stable"),
                "first_owners": np.tile(owners, times), "part_width": width,
                "first_width": np.tile(widths, times), "candidate": np.tile(chosen, times),
                "units": np.ones(world, np.int64)}

    def run(self, max_moves: int, goal_us: float, seed: int, seconds: float = 0.0,
            start: Packed | None = None) -> Packed:
        """Run a search and return its result.

        Args:
            max_moves: number of moves of pieces to try; in addition, at most as many changes of
                layouts are tried.
            goal_us: stop when the modelled step time has reached this.
            seed: equal seeds give equal results unless `seconds` ends the search.
            seconds: time limit; 0 = none.
            start: result of another run to continue from; None = several short searches. One of
                four starts from the relaxed solution, the others from layouts derived from it.
        """
        num_tables, world = len(self.candidates), self.loads.class_of.size
        num_parts = self.arrays["first"].size
        capacity = num_parts * world  # a rank owns at most one piece of a part
        arrays = (self.arrays | {n: self.arrays[n].copy() for n in _CHANGED}
                  | {n: np.zeros(capacity, np.int64) for n in _OWNERSHIP})
        if start is not None:
            for name, known in start.arrays.items():
                arrays[name][:known.size] = known
        packing: Any = native.call(
            "oper_pack", native.Packing, arrays, num_ranks=world,
            num_classes=self.loads.num_classes, num_loads=self.loads.num_loads,
            num_groups=self.loads.groups.size,
            num_tables=num_tables, num_parts=num_parts, num_shares=_SHARES, num_heads=_HEADS,
            max_moves=max_moves, seconds=seconds, seed=seed, capacity=capacity,
            resumes=int(start is not None),
            count=0 if start is None else start.arrays["rank"].size,
            goal=goal_us - self._fixed_us(1, int(arrays["may_split"].any())))
        shards = _layout(arrays, packing.count)
        parts: list[list[Part]] = [[] for _ in range(num_tables)]
        for n in np.flatnonzero(arrays["part_width"]).tolist():
            k = n % num_tables
            candidate = self.pool.candidates[k][self.candidates[k][int(arrays["candidate"][n])]]
            part = Part(int(arrays["part_width"][n]), candidate, tuple(shards.get(n, ())))
            if parts[k] and parts[k][0].candidate == candidate:  # both parts have equal candidates
                first = parts[k].pop()
                part = Part(first.width + part.width, candidate, first.shards + part.shards)
            parts[k].append(part)
        units = np.zeros(world, np.int64)
        units[arrays["rank_of"]] = arrays["units"]
        pushed = sum(bool(self.relaxation.pushes[list(part.candidate.options)].any())
                     for every in parts for part in every)
        split = sum(sum(max(1, len(part.shards)) for part in every) - 1
                    for t, every in zip(self.relaxation.tables, parts, strict=True)
                    if t.spec.optimizer in ROW_WISE)
        found = Packed(parts, tuple(units.tolist()),
                       packing.step + self._fixed_us(pushed, split), packing.moves,
                       {n: arrays[n][:packing.count].copy() for n in _OWNERSHIP}
                       | {n: arrays[n] for n in _CHANGED})
        if start is not None and start.step_us < found.step_us:  # barriers may differ
            return replace(start, num_moves=packing.moves)
        return found

    def _fixed_us(self, num_pushed: int, num_split: int) -> float:
        """Fixed costs of a plan with `num_pushed` pushed tiers and `num_split` column splits of
        tables with row-wise optimizers, microseconds."""
        base = self.relaxation.base_load_vector
        return float(sum(self.relaxation.model.fixed_us(replace(
            base, num_pushed=base.num_pushed + num_pushed,
            num_split=base.num_split + num_split))))


def _layout(found: dict[str, np.ndarray], count: int) -> dict[int, list[Shard]]:
    """Column pieces by index of their part, from arrays with one entry per piece and owner."""
    out: dict[int, list[Shard]] = {}
    ends = np.flatnonzero(np.diff(found["piece"][:count])) + 1
    for at in np.split(np.arange(count), ends) if count else ():
        weights = found["weight"][at] // np.gcd.reduce(found["weight"][at])
        out.setdefault(int(found["table"][at[0]]), []).append(
            (int(found["width"][at[0]]), tuple(found["rank"][at].tolist()),
             () if (weights == 1).all() else tuple(weights.tolist())))
    return out
